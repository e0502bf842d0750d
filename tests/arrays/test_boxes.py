"""Boxes against sets of indices, and against what JAX says about its shardings."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mpmd.arrays.boxes import Box, device_boxes, part_boxes
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding


def indices(box):
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def boxes(draw, ndim):
    start = tuple(draw(st.integers(0, 4)) for _ in range(ndim))
    return Box(start, tuple(a + draw(st.integers(0, 4)) for a in start))


@st.composite
def two_boxes(draw):
    ndim = draw(st.integers(0, 3))
    return draw(boxes(ndim)), draw(boxes(ndim))


@given(two_boxes())
def test_box_arithmetic_is_set_arithmetic_on_indices(pair):
    a, b = pair
    assert len(a) == a.size == len(indices(a))
    assert indices(a & b) == indices(a) & indices(b)
    assert (b in a) == (indices(b) <= indices(a))
    parts = a - b
    assert all(parts)
    assert sum(map(len, parts)) == len(indices(a) - indices(b))
    assert set().union(*map(indices, parts)) == indices(a) - indices(b)
    assert all(index in a for index in indices(a))


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 20))
def test_a_split_box_has_the_same_elements_in_parts_of_at_most_the_given_size(box, max_elements):
    sized = list(box.split_sized(max_elements))
    parts = [part for part, _ in sized]
    assert all(0 < size == part.size <= max_elements for part, size in sized)
    assert sum(map(len, parts)) == len(box)
    assert set().union(*map(indices, parts)) == indices(box)
    assert parts == sorted(parts)


@given(two_boxes())
def test_relative_slices_find_a_box_inside_a_shard(pair):
    a, b = pair
    whole = np.arange(9**a.ndim).reshape((9,) * a.ndim)
    shard = whole[a.slices]
    both = a & b
    if both.size:
        np.testing.assert_array_equal(shard[both.relative_to(a).slices], whole[both.slices])


@given(st.data())
def test_a_grid_cuts_a_box_into_disjoint_cells_that_are_all_of_it(data):
    box = data.draw(st.integers(0, 3).flatmap(boxes))
    cell = tuple(data.draw(st.integers(1, 4)) for _ in range(box.ndim))
    parts = list(box.grid(cell))
    assert sum(map(len, parts)) == len(box)
    assert set().union(*map(indices, parts)) == indices(box)
    assert all(n <= most for part in parts for n, most in zip(part.shape, cell, strict=True))
    assert parts == sorted(parts)


@given(st.data())
def test_an_aligned_box_is_the_cells_of_the_grid_that_the_box_touches(data):
    box = data.draw(st.integers(0, 3).flatmap(boxes))
    cell = tuple(data.draw(st.integers(1, 4)) for _ in range(box.ndim))
    touched = [c for c in Box.whole((12,) * box.ndim).grid(cell) if (c & box).size]
    if touched:
        assert box.aligned(cell) == Box.bounding(touched)


@given(two_boxes())
def test_the_bounding_box_is_the_smallest_that_contains_both(pair):
    around = Box.bounding(pair)
    assert pair[0] in around and pair[1] in around
    for axis in range(around.ndim):
        assert around.start[axis] in (pair[0].start[axis], pair[1].start[axis])
        assert around.stop[axis] in (pair[0].stop[axis], pair[1].stop[axis])


def test_boxes_are_shifted_scaled_and_changed_on_one_axis():
    box = Box((1, 2), (3, 5))
    assert box.shifted((10, 0)) == Box((11, 2), (13, 5))
    assert box.shifted((10, 0)).relative_to(box) == Box((10, 0), (12, 3))
    assert box.scaled((2, 3)) == Box((2, 6), (6, 15))
    assert box.with_range(1, 0, 9) == Box((1, 0), (3, 9))


def test_a_box_prints_as_ranges_and_refuses_steps():
    assert repr(Box((0, 3), (2, 7))) == "Box[0:2, 3:7]"
    assert Box.from_slices((slice(1, None),), (4, 3)) == Box((1, 0), (4, 3))
    assert Box.whole(()).size == 1
    assert Box((0, 0), (2, 3)).nbytes(4) == 24
    with pytest.raises(ValueError, match="have a step"):
        Box.from_slices((slice(0, 4, 2),), (4,))
    with pytest.raises(ValueError, match="parts of 0 elements"):
        list(Box((0,), (2,)).split_sized(0))


SPECS = [P(), P("a"), P("b"), P("a", "b"), P(None, ("a", "b")), P(("b", "a")), P("b", "a")]


@settings(max_examples=30)
@given(st.sampled_from(SPECS), st.permutations(range(8)))
def test_device_boxes_are_the_indices_that_jax_gives_each_device(spec, order):
    mesh = Mesh(np.array(jax.devices())[np.array(order)].reshape(4, 2), ("a", "b"))
    array = jax.device_put(np.zeros((8, 16)), NamedSharding(mesh, spec))
    expected = {s.device: Box.from_slices(s.index, array.shape) for s in array.addressable_shards}
    assert device_boxes(array.sharding, array.shape) == expected


def test_each_group_holds_the_whole_array():
    devices = np.array(jax.devices())
    mesh = MpmdMesh(Mesh(devices.reshape(4, 2), ("stage", "data")), "stage")
    sharding = MpmdSharding(mesh, {0, 3}, P("data"))
    by_group = part_boxes(sharding, (4,))
    assert sorted(by_group) == [0, 3]
    assert by_group[0] == {devices[0]: Box((0,), (2,)), devices[1]: Box((2,), (4,))}
    assert by_group[3] == {devices[6]: Box((0,), (2,)), devices[7]: Box((2,), (4,))}
    assert part_boxes(SingleDeviceSharding(devices[5]), ()) == {0: {devices[5]: Box((), ())}}


def test_a_spec_that_does_not_divide_is_a_value_error():
    mesh = Mesh(np.array(jax.devices()), ("a",))
    with pytest.raises(ValueError, match="evenly divide"):
        device_boxes(NamedSharding(mesh, P("a")), (7,))
