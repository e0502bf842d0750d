"""Who writes what: planned without devices, for meshes that do not exist."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from mpmd.arrays.boxes import Box, part_boxes
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from reshard.checkpoint.write_plan import (
    LARGEST_CHUNK_NBYTES,
    SMALLEST_CHUNK_NBYTES,
    WrittenLeaf,
    chunk_shape,
    plan_writing,
)
from reshard.places import describe_mesh

MIB = 1 << 20


def one_mesh(groups: int, data: int, per_process: int) -> MpmdMesh:
    axes = {"stage": groups, "data": data}
    return MpmdMesh(describe_mesh(axes, devices_per_process=per_process), "stage")


def written(leaf: WrittenLeaf, plan) -> np.ndarray:
    """How often each element is written."""
    count = np.zeros(leaf.shape, np.int8)
    for boxes in plan.boxes.values():
        for box in boxes:
            count[box.slices] += 1
    return count


def test_a_stack_has_one_chunk_for_each_layer():
    assert chunk_shape((12, 256, 1024), 4) == (1, 256, 1024)


def test_small_layers_share_a_chunk_of_a_useful_size():
    chunk = chunk_shape((12, 16, 64), 4)
    assert chunk == (12, 16, 64)
    chunk = chunk_shape((64, 64, 64), 4)
    assert chunk == (4, 64, 64)
    assert math.prod(chunk) * 4 == SMALLEST_CHUNK_NBYTES


def test_a_large_array_is_cut_along_its_leading_axes_into_even_parts():
    assert chunk_shape((50_000, 4096), 4) == (500, 4096)
    assert 500 * 4096 * 4 <= LARGEST_CHUNK_NBYTES < 625 * 4096 * 4
    assert chunk_shape((4, 4096, 4096), 4) == (1, 512, 4096)


def test_a_vocabulary_of_prime_size_is_cut_along_the_width_instead_of_into_single_rows():
    assert chunk_shape((65_537, 768), 4) == (65_537, 24)
    assert chunk_shape((50_257,), 4) == (50_257,)
    assert chunk_shape((10_000_019,), 4) == (10_000_019,)


def test_the_users_bound_on_chunks_is_kept():
    assert chunk_shape((8, 64, 64), 4, max_nbytes=4096) == (1, 16, 64)
    assert chunk_shape((8, 64, 64), 4, max_nbytes=MIB) == (8, 64, 64)


def test_scalars_are_written_by_one_process_each_and_spread_over_all():
    mesh = one_mesh(4, 2, per_process=2)
    leaf = WrittenLeaf((), 4, MpmdSharding(mesh, range(4)))
    plans = plan_writing((leaf,) * 8)
    assert [list(plan.boxes) for plan in plans] == [[0], [1], [2], [3]] * 2


def test_processes_that_hold_the_same_array_share_its_writing():
    mesh = one_mesh(2, 4, per_process=1)
    leaf = WrittenLeaf((64, MIB), 4, MpmdSharding(mesh, {0, 1}, P()))
    (plan,) = plan_writing((leaf,))
    sizes = {process: sum(box.size for box in boxes) for process, boxes in plan.boxes.items()}
    assert sizes == dict.fromkeys(range(8), 8 * MIB)
    assert all(len(boxes) == 1 for boxes in plan.boxes.values())


def test_who_has_much_to_write_already_is_spared():
    mesh = one_mesh(2, 1, per_process=1)
    alone = WrittenLeaf((32, MIB), 4, MpmdSharding(mesh, 0))
    tied = WrittenLeaf((64, MIB), 4, MpmdSharding(mesh, {0, 1}))
    plans = plan_writing((alone, tied))
    sizes = [{p: sum(b.size for b in boxes) // MIB for p, boxes in plan.boxes.items()} for plan in plans]
    assert sizes == [{0: 32}, {0: 16, 1: 48}]


def test_a_tree_is_planned_once_and_alike_in_every_process():
    mesh = one_mesh(4, 2, per_process=2)
    leaves = tuple(WrittenLeaf((8 * i, 16), 4, MpmdSharding(mesh, i % 4, P("data"))) for i in range(1, 9))
    assert plan_writing(leaves) is plan_writing(tuple(leaves))


@pytest.mark.parametrize("per_process", [1, 2, 8])
def test_groups_of_different_shapes_share_chunks_that_fit_all_of_them(per_process):
    wide = describe_mesh({"data": 4}, devices_per_process=per_process)
    narrow = describe_mesh({"data": 2}, devices_per_process=per_process, first_device=4)
    mesh = MpmdMesh.from_groups([wide, narrow])
    leaf = WrittenLeaf((24, 1024), 4, MpmdSharding(mesh, {0, 1}, P("data")))
    (plan,) = plan_writing((leaf,))
    assert (written(leaf, plan) == 1).all()
    assert plan.chunk_shape == (6, 1024)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_chunk_is_written_once_by_a_process_that_holds_it(data):
    groups, size = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4, 6]))
    mesh = one_mesh(groups, size, data.draw(st.sampled_from([1, 2, 3, 4])))
    leaves = []
    for _ in range(data.draw(st.integers(1, 4))):
        ids = data.draw(st.sets(st.integers(0, groups - 1), min_size=1))
        ndim = data.draw(st.integers(0, 3))
        shape = [data.draw(st.integers(1, 9)) for _ in range(ndim)]
        axis = data.draw(st.integers(-1, ndim - 1))
        if axis >= 0:
            shape[axis] *= size
        spec = P(*["data" if i == axis else None for i in range(ndim)])
        bound = data.draw(st.sampled_from([None, 16, 64]))
        sharding, rows = MpmdSharding(mesh, ids, spec), (shape or [0])[0] // (size if axis == 0 else 1)
        if len(ids) <= rows and data.draw(st.booleans()):
            ends = [*sorted(data.draw(st.permutations(range(1, rows)))[: len(ids) - 1]), rows]
            unit, starts = shape[0] // rows, [0, *ends[:-1]]
            ranges = zip(data.draw(st.permutations(sorted(ids))), starts, ends, strict=True)
            sharding = sharding.replace(split={g: ((a * unit, b * unit),) for g, a, b in ranges})
        leaves.append(WrittenLeaf(tuple(shape), 4, sharding, bound))
    for leaf, plan in zip(leaves, plan_writing(tuple(leaves)), strict=True):
        assert (written(leaf, plan) == 1).all()
        held = {}
        for boxes in part_boxes(leaf.sharding, leaf.shape).values():
            for device, box in boxes.items():
                held.setdefault(device.process_index, []).append(box)
        for process, boxes in plan.boxes.items():
            for box in boxes:
                assert any(box in shard for shard in held[process])
                for chunk in box.grid(plan.chunk_shape):
                    assert chunk in box
                    assert chunk.shape == plan.chunk_shape
                    assert all(start % n == 0 for start, n in zip(chunk.start, plan.chunk_shape, strict=True))


@pytest.mark.slow
def test_a_thousand_arrays_on_a_thousand_devices_are_planned_within_seconds(benchmark_s=20):
    import time

    mesh = MpmdMesh(describe_mesh({"stage": 8, "data": 128}, devices_per_process=8), "stage")
    leaves = tuple(WrittenLeaf((1024, 128 * (i % 7 + 1)), 4, MpmdSharding(mesh, i % 8, P("data"))) for i in range(1000))
    started = time.monotonic()
    plans = plan_writing(leaves)
    assert time.monotonic() - started < benchmark_s
    assert sum(box.size for plan in plans for boxes in plan.boxes.values() for box in boxes) == sum(
        math.prod(leaf.shape) for leaf in leaves
    )


def test_boxes_of_the_plan_are_those_of_jax():
    mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
    (plan,) = plan_writing((WrittenLeaf((8, 6), 4, MpmdSharding(mesh, 1, P("data"))),))
    assert plan.boxes == {0: (Box((0, 0), (4, 6)), Box((4, 0), (8, 6)))}
