"""Collectives read out of XLA's text: of real programs, and of the ways in which XLA writes them for GPUs."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpmd.arrays.targets import Target
from mpmd.costs.collectives import Collective, collectives_of
from mpmd.costs.machine import Machine


def text_of(fun, in_specs, out_specs, *shapes):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*args).compile().as_text()


def repeated(x):
    return lax.scan(lambda c, _: (lax.psum(c, "d") * 0.25, None), x, None, length=5)[0]


REAL = {
    "all-reduce": (lambda x: lax.psum(x, "d"), P("d"), P(), Collective("all-reduce", 4 * 2 * 8, 4)),
    "all-gather": (lambda x: lax.all_gather(x, "d", tiled=True), P("d"), P(), Collective("all-gather", 4 * 8 * 8, 4)),
    "scan": (repeated, P("d"), P("d"), Collective("all-reduce", 4 * 2 * 8, 4, times=5)),
}


@pytest.mark.parametrize("name", REAL)
def test_a_collective_of_a_real_program_is_found(name):
    fun, ins, outs, expected = REAL[name]
    assert collectives_of(text_of(fun, ins, outs, (8, 8)), 4) == [expected]


GPU = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

ENTRY %main_spmd (p: bf16[64,32]) -> bf16[64,32] {
  %start = bf16[64,32]{1,0} all-reduce-start(%p), replica_groups=mesh['a'=8,'b'=2] {'a'}, to_apply=%add
  %newer = ((bf16[64,32]{1,0}), bf16[64,32]{1,0}) all-reduce-start(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
  %done = bf16[64,32]{1,0} all-reduce-done(%start)
  %gather = (bf16[8,32]{1,0}, bf16[64,32]{1,0}) all-gather-start(%q), replica_groups=[2,8]<=[16], dimensions={0}
  %gathered = bf16[64,32]{1,0} all-gather-done(%gather)
  %rs = f32[8,32]{1,0} reduce-scatter(%r), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %cp = (u8[16]{0}, u8[16]{0}, u32[], u32[]) collective-permute-start(%s), source_target_pairs={{0,1}}
}
"""


def test_each_way_to_write_groups_and_results_is_read():
    assert collectives_of(GPU, 16) == [
        Collective("all-reduce", 64 * 32 * 2, 8, is_async=True),
        Collective("all-reduce", 64 * 32 * 2, 2, is_async=True),
        Collective("all-gather", 64 * 32 * 2, 8, is_async=True),
        Collective("reduce-scatter", 8 * 32 * 4, 4),
        Collective("collective-permute", 16, 16, is_async=True),
    ]


HOSTS = [0] * 8 + [1] * 8
GROUPS = {
    "replica_groups={}": (16, 2),
    "replica_groups=[2,8]<=[16]": (8, 1),
    "replica_groups=[8,2]<=[2,8]T(1,0)": (2, 2),
    "replica_groups=[4,4]<=[2,4,2]T(1,0,2)": (4, 2),
    "replica_groups={{0,8},{1,9}}": (2, 2),
    "replica_groups={{0,1},{7,8}}": (2, 2),  # one of them goes to another host
    "replica_groups=mesh['a'=8,'b'=2] {'b'}": (2, 1),
    "replica_groups=mesh['a'=2,'b'=8] {'a'}": (2, 2),
    "replica_groups=mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a'}": (2, 1),
    "replica_groups=mesh['a'=2,'b'=2,'c'=4], device_ids=([16]) {'a','c'}": (8, 2),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_devices_that_exchange_are_counted_in_their_hosts(groups):
    hlo = f"ENTRY %main () -> f32[8] {{\n  %r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    devices, hosts = GROUPS[groups]
    assert collectives_of(hlo, 16, HOSTS) == [Collective("all-reduce", 32, devices, hosts)]


@pytest.mark.parametrize("ways", ["[4,3]<=[12]", "{{0,1,2},{3,4,5},{6,7,8},{9,10,11}}", "mesh['a'=4,'b'=3] {'b'}"])
def test_a_collective_is_in_as_many_hosts_as_its_most_divided_group(ways):
    hlo = f"ENTRY %main () -> f32[8] {{\n  %r = f32[8]{{0}} all-reduce(%p), replica_groups={ways}, to_apply=%add\n}}\n"
    hosts = ([d // 6 for d in range(start, start + 12)] for start in (0, 3, 1))
    assert [collectives_of(hlo, 12, one)[0].num_hosts for one in hosts] == [1, 1, 2]


@pytest.mark.parametrize("groups", [g for g in GROUPS if g != "replica_groups={}"])
def test_another_number_of_devices_than_the_programs_is_refused(groups):
    hlo = f"ENTRY %main () -> f32[8] {{\n  %r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    with pytest.raises(ValueError) as error:
        collectives_of(hlo, 3)
    count = 1 + max(map(int, re.findall(r"\d", groups))) if "{{" in groups else 16  # of lists, what is seen
    assert str(error.value) == (
        f"collectives_of: num_devices is 3, but a collective of the program is among {count} devices.\n"
        "  Pass the number of devices that it was compiled for: `size` of its group's mesh."
    )


def test_a_permutation_is_as_far_as_its_farthest_pair():
    near = "ENTRY %main () -> f32[8] {\n  %r = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{8,9}}\n}\n"
    assert [c.num_hosts for c in collectives_of(near, 16, HOSTS)] == [1]
    assert [c.num_hosts for c in collectives_of(near.replace("{0,1}", "{7,8}"), 16, HOSTS)] == [2]


H100 = Machine(Target.named("h100"), latency_s=0, link_efficiency=1)  # links of 450 GB/s, a network card of 50 for each
GB = 10**9


@pytest.mark.parametrize(
    "kind, devices, hosts, seconds",
    [
        ("all-reduce", 8, 1, 2 * 7 / 8 / 450),
        ("all-reduce", 64, 8, 2 * 63 / 64 / 400),  # eight rings, each over another card of a host
        ("all-reduce", 8, 8, 2 * 7 / 8 / 50),  # strided: one device in each host
        ("all-gather", 16, 8, 15 / 16 / 100),
        ("all-to-all", 64, 8, 56 / 64 / 50),
        ("all-to-all", 8, 1, 7 / 8 / 450),
        ("collective-permute", 8, 1, 1 / 450),
        ("collective-permute", 64, 2, 1 / 50),
    ],
)
def test_a_collective_beyond_one_host_goes_over_the_cards_of_all_its_devices(kind, devices, hosts, seconds):
    assert H100.collective_s(Collective(kind, GB, devices, hosts)) == pytest.approx(seconds)


def test_a_program_that_runs_as_several_has_the_collectives_of_all():
    modules = [f"HloModule part{number}, is_scheduled=true\n{GPU}" for number in range(2)]
    assert collectives_of("\n".join(modules), 16) == 2 * collectives_of(GPU, 16)


HIDDEN = """
%products (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {
  ROOT %dot.1 = bf16[8,8] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%copied (p: bf16[8]) -> bf16[8] {
  ROOT %copy.1 = bf16[8] copy(%p)
}

ENTRY %main (p: bf16[64,32]) -> bf16[64,32] {
  %first = (bf16[8,32]{1,0}, bf16[64,32]{1,0}) all-gather-start(%p), replica_groups=[2,8]<=[16], dimensions={0}
  %gemm = bf16[8,8] fusion(%a, %b), kind=kCustom, calls=%products
  %first.end = bf16[64,32]{1,0} all-gather-done(%first)
  %second = (bf16[8,32]{1,0}, bf16[64,32]{1,0}) all-gather-start(%p), replica_groups=[2,8]<=[16], dimensions={0}
  %copy = bf16[8] fusion(%c), kind=kLoop, calls=%copied
  %second.end = bf16[64,32]{1,0} all-gather-done(%second)
  %library = (bf16[8,8], s8[4]) custom-call(%a, %b), custom_call_target="__cublas$gemm"
}
"""


def test_a_collective_is_hidden_where_a_product_stands_before_its_end():
    assert [c.is_hidden for c in collectives_of(HIDDEN, 16)] == [True, False]
    instead = HIDDEN.replace(
        "fusion(%c), kind=kLoop, calls=%copied", 'custom-call(%c), custom_call_target="__cublas$gemm"'
    )
    assert [c.is_hidden for c in collectives_of(instead, 16)] == [True, True]


def test_hidden_collectives_take_only_what_is_longer_than_the_products():
    near, hidden = (
        Collective("collective-permute", 450 * GB, 8),
        Collective("collective-permute", 450 * GB, 8, is_hidden=True),
    )
    assert H100.waiting_s([near, hidden], 3.0) == pytest.approx(1.0)
    assert H100.waiting_s([near, hidden], 0.25) == pytest.approx(1.75)
