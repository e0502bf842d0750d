"""Plans, without devices: what crosses hosts, who sends, how rounds keep to the threshold, how it prints."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from mpmd.arrays.boxes import part_boxes
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from reshard.moving.plan import Traffic

F32 = np.float32


def aval(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def described(stage=4, data=4, **options):
    mesh = reshard.describe_mesh({"stage": stage, "data": data}, **options)
    return mesh, MpmdMesh(mesh, "stage")


def held(sharding, shape, domain):
    """The elements that each domain (device, process or host) has."""
    found = {}
    for boxes in part_boxes(sharding, shape).values():
        for device, box in boxes.items():
            found.setdefault(domain(device), np.zeros(shape, bool))[box.slices] = True
    return found


def lacking(source, target, shape, domain):
    have = held(source, shape, domain)
    return sum(
        int((want & ~have.get(key, np.zeros(shape, bool))).sum()) for key, want in held(target, shape, domain).items()
    )


def test_a_described_mesh_has_hosts_and_processes_and_no_local_devices():
    mesh, groups = described(devices_per_host=8, devices_per_process=2)
    assert [d.host for d in mesh.devices.flat] == [i // 8 for i in range(16)]
    assert [d.process_index for d in mesh.devices.flat] == [i // 2 for i in range(16)]
    assert groups.local_groups == ()
    assert groups.processes[1] == (2, 3)
    other = reshard.describe_mesh({"x": 2}, first_device=16)
    assert not set(other.devices.flat) & set(mesh.devices.flat)
    with pytest.raises(ValueError, match=r"the sizes of axes are positive integers; got \{'x': 0\}"):
        reshard.describe_mesh({"x": 0, "y": 2})


SPECS = [P(), P("data"), P("stage"), P(("stage", "data")), P("data", "stage"), P(None, "data")]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(SPECS),
    st.sampled_from([P(), P("data"), P(None, "data")]),
    st.sets(st.integers(0, 3), min_size=1),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_each_missing_byte_crosses_to_a_host_once_and_then_spreads(spec, stage_spec, ids, per_host, per_process, back):
    mesh, groups = described(devices_per_host=per_host, devices_per_process=min(per_process, per_host))
    source, target = NamedSharding(mesh, spec), MpmdSharding(groups, ids, stage_spec)
    if back:
        source, target = target, source
    shape = (16, 32)
    plan = reshard.plan(aval(*shape), source, target)
    process = lacking(source, target, shape, lambda d: d.process_index) * 4
    host = lacking(source, target, shape, lambda d: d.host) * 4
    device = lacking(source, target, shape, lambda d: d) * 4
    assert plan.bytes_moved == plan.bytes_lower_bound == device
    assert plan.bytes_between_hosts == plan.bytes_between_hosts_lower_bound == host
    assert plan.traffic.within_host + plan.traffic.between_hosts == process
    assert sum(plan.sent.values()) == sum(plan.received.values()) == device


def test_replicas_share_the_sending():
    groups = described(stage=4, data=4, devices_per_host=16)[1]
    # Stages 0..2 have it all; stage 3 gets it: 12 senders can share.
    source = MpmdSharding(groups, {0, 1, 2}, P())
    plan = reshard.plan([aval(16, 16)] * 30, source, MpmdSharding(groups, 3, P("data")))
    senders = [n for n in plan.sent.values() if n]
    assert len(senders) == 12
    assert max(senders) <= 1.2 * sum(senders) / len(senders)


def test_the_devices_of_a_host_take_turns_to_let_bytes_in():
    mesh, groups = described(stage=4, data=4, devices_per_host=4)
    source = MpmdSharding(groups, 0, P("data"))
    plan = reshard.plan([aval(16, 16)] * 40, source, NamedSharding(mesh, P()))
    # Every host but the first gets each array once, and passes it on three times.
    outside = [n for device, n in plan.sent.items() if device.host]
    assert sum(outside) == 3 * 3 * 40 * 1024
    assert max(outside) <= 1.2 * sum(outside) / len(outside)


@pytest.mark.slow
def test_ten_thousand_arrays_share_the_work_of_few_routes():
    mesh, groups = described(stage=8, data=128)
    avals = [aval(1024 * (1 + i % 50), 8) for i in range(10_000)]
    targets = [MpmdSharding(groups, i % 8, P("data")) for i in range(10_000)]
    plan = reshard.plan(avals, NamedSharding(mesh, P(("stage", "data"))), targets, threshold=1 << 24)
    assert len({id(array.route) for array in plan.arrays}) == 8
    assert plan.bytes_moved == plan.bytes_lower_bound
    assert plan.peak_working_bytes <= 1 << 24


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 3000), st.lists(st.sampled_from([(16, 16), (32, 64), (64, 4)]), min_size=1, max_size=6))
def test_rounds_carry_every_element_once_and_keep_to_the_threshold(threshold, shapes):
    mesh, groups = described(devices_per_host=4)
    targets = [MpmdSharding(groups, i % 4, P(None, "data")) for i in range(len(shapes))]
    plan = reshard.plan([aval(*s) for s in shapes], NamedSharding(mesh, P(("stage", "data"))), targets, threshold)
    seen = [np.zeros(a.route.moves.shape, np.int64) for a in plan.arrays]
    written = [{} for _ in plan.arrays]
    for round_ in plan.rounds:
        working = {}
        for batch in round_:
            array = plan.arrays[batch.array]
            route, itemsize = array.route, 4
            if batch.boxes:
                parts = [(p, box.size) for p, box in zip(batch.pieces, batch.boxes, strict=True)]
            else:
                parts = [(p, int(route.elements[p]) * int(np.prod(array.scale))) for p in batch.pieces]
            for piece, size in parts:
                seen[batch.array][piece] += size
                uncut = size == int(route.elements[piece]) * int(np.prod(array.scale))
                hop = int(route.hop[piece])
                sender, receiver = int(route.sender_place[piece]), int(route.receiver_place[piece])
                if hop:
                    assert written[batch.array][int(route.sender[piece])]
                if route.moves[piece] and not (uncut and route.whole_source[piece]):
                    working[sender] = working.get(sender, 0) + size * itemsize
                if not (uncut and route.whole_target[piece]):
                    working[receiver] = working.get(receiver, 0) + size * itemsize
                written[batch.array].setdefault(int(route.receiver[piece]), True)
        assert max(working.values(), default=0) <= plan.peak_working_bytes <= threshold
    for array, sizes in zip(plan.arrays, seen, strict=True):
        np.testing.assert_array_equal(sizes, array.route.elements * int(np.prod(array.scale)))


def test_all_groups_receive_at_once_and_the_largest_arrays_go_first():
    groups = described(stage=4, data=1, devices_per_host=4)[1]
    shapes = [(8 * (1 + i % 2), 64) for i in range(8)]
    targets = [MpmdSharding(groups, i // 2, P()) for i in range(8)]
    source = MpmdSharding(MpmdMesh.from_groups([reshard.describe_mesh({"x": 4}, first_device=16)]), 0, P(None, "x"))
    plan = reshard.plan([aval(*s) for s in shapes], source, targets, threshold=16 * 64 * 4)
    order = [batch.array for round_ in plan.rounds for batch in round_]
    assert sorted(order[:4]) == [1, 3, 5, 7]
    assert {batch.array for batch in plan.rounds[0]} >= {1, 3, 5, 7}


def test_a_plan_prints_what_stays_and_what_moves_how_far():
    mesh, groups = described(stage=2, data=4, devices_per_host=4, devices_per_process=2)
    tree = {"w": aval(64, 64), "b": aval(64)}
    targets = {"w": MpmdSharding(groups, 1, P("data")), "b": MpmdSharding(groups, {0, 1}, P())}
    plan = reshard.plan(tree, NamedSharding(mesh, P("data")), targets, threshold=1024)
    assert str(plan) == (
        "reshard of 2 arrays, 16.2 KiB, in 1 round\n"
        "  stays on its device     16.5 KiB\n"
        "  moves                   1.5 KiB (lower bound 1.5 KiB)\n"
        "    inside a process      1.0 KiB\n"
        "    between processes     512 B\n"
        "    between hosts         0 B (lower bound 0 B)\n"
        "  busiest sender          192 B, DescribedDevice(0, host 0) (average of 8: 192 B)\n"
        "  busiest receiver        192 B, DescribedDevice(0, host 0) (average of 8: 192 B)\n"
        "  peak working memory     320 B a device (threshold 1.0 KiB)"
    )
    assert plan.explain().splitlines()[-3:] == [
        "array  type            from        to                  stays     process  host   hosts",
        "['w']  float32[64,64]  P('data',)  group 1 P('data',)  16.0 KiB  0 B      0 B    0 B",
        "['b']  float32[64]     P('data',)  group 0,1 P()       512 B     1.0 KiB  512 B  0 B",
    ]
    assert plan.explain(max_arrays=1).endswith("… and 1 smaller array")


def test_described_and_real_shardings_plan_alike():
    real = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    fake = reshard.describe_mesh({"stage": 4, "data": 2}, devices_per_host=8)
    plans = [
        reshard.plan(aval(16, 8), NamedSharding(m, P("stage")), MpmdSharding(MpmdMesh(m, "stage"), 2, P("data")))
        for m in (real, fake)
    ]
    assert plans[0].traffic == plans[1].traffic == Traffic(stays=128, within_process=384)


def test_keys_and_narrow_types_are_planned_by_their_bytes():
    mesh, groups = described(stage=2, data=2, devices_per_host=4)
    key = jax.eval_shape(jax.random.split, jax.eval_shape(jax.random.key, 0))
    source, target = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    assert reshard.plan(key, source, target).traffic.stays == 4 * 8
    plan = reshard.plan(aval(8, dtype=jax.numpy.int4), MpmdSharding(groups, 0), MpmdSharding(groups, 1))
    assert plan.bytes_moved == 16


def test_shardings_may_be_prefixes_of_the_tree():
    mesh, groups = described()
    tree = {"layers": [aval(8), aval(16)], "head": aval(8)}
    shardings = {"layers": MpmdSharding(groups, 0), "head": MpmdSharding(groups, 3)}
    plan = reshard.plan(tree, NamedSharding(mesh, P()), shardings)
    assert [a.leaf.path for a in plan.arrays] == ["['head']", "['layers'][0]", "['layers'][1]"]
    assert [a.leaf.target.groups for a in plan.arrays] == [(3,), (0,), (0,)]


def test_what_does_not_fit_is_named_for_every_array_at_once():
    mesh, groups = described()
    tree = {"a": aval(7), "b": aval(8), "c": aval()}
    with pytest.raises(reshard.ReshardError) as error:
        reshard.plan(tree, NamedSharding(mesh, P()), MpmdSharding(groups, 0, P("data")))
    lines = str(error.value).splitlines()
    assert lines[0] == "these arrays cannot be moved as asked; nothing was moved:"
    assert lines[1].startswith("  ['a']: to: ") and "evenly divide" in lines[1]
    assert lines[2].startswith("  ['c']: to: ") and "but the array has 0 axes" in lines[2]
    with pytest.raises(reshard.ReshardError) as error:
        reshard.plan({"a": aval(8), "b": aval(8)}, NamedSharding(mesh, P()), MpmdSharding(groups, 0, P("data")), 3)
    assert str(error.value) == (
        "these arrays cannot be moved as asked; nothing was moved:\n"
        "  ['a']: one element has 4 bytes, more than threshold=3\n"
        "  ['b']: one element has 4 bytes, more than threshold=3"
    )
