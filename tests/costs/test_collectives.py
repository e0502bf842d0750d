"""Collectives read out of XLA's text: of real programs, and of the ways in which XLA writes them for GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpmd.costs.collectives import Collective, collectives_of


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


def test_a_program_that_runs_as_several_has_the_collectives_of_all():
    modules = [f"HloModule part{number}, is_scheduled=true\n{GPU}" for number in range(2)]
    assert collectives_of("\n".join(modules), 16) == 2 * collectives_of(GPU, 16)
