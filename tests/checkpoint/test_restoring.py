"""Which boxes are read together: planned without files."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.arrays.boxes import Box
from reshard.checkpoint.requests import in_storage, index_text
from reshard.storage.arrays import plan_reads

MANY = 1 << 40  # elements


def test_a_box_that_several_devices_want_is_read_once():
    box = Box((0, 0), (4, 8))
    assert plan_reads([box, box, box], (4, 8), MANY) == [(box, (box,))]


def test_boxes_in_chunks_of_their_own_are_read_apart():
    boxes = [Box((i,), (i + 4,)) for i in range(0, 16, 4)]
    assert plan_reads(boxes, (4,), MANY) == [(box, (box,)) for box in boxes]


def test_columns_of_the_same_chunks_are_read_together():
    left, right = Box((0, 0), (8, 4)), Box((0, 4), (8, 8))
    ((box, wanted),) = plan_reads([left, right], (2, 8), MANY)
    assert box == Box((0, 0), (8, 8))
    assert set(wanted) == {left, right}


def test_four_columns_of_the_same_chunks_are_one_read():
    columns = [Box((0, i), (8, i + 2)) for i in range(0, 8, 2)]
    ((box, _),) = plan_reads(columns, (8, 8), MANY)
    assert box == Box((0, 0), (8, 8))


def test_joined_boxes_are_no_larger_than_the_limit_or_the_largest_of_them():
    rows = [Box((i, 0), (i + 3, 8)) for i in range(0, 12, 3)]  # chunks of four rows lie across their borders
    assert [read for read, _ in plan_reads(rows, (4, 8), MANY)] == [Box((0, 0), (12, 8))]
    assert [read for read, _ in plan_reads(rows, (4, 8), 1)] == rows
    pairs = [read for read, _ in plan_reads(rows, (4, 8), 6 * 8)]
    assert pairs == [Box((0, 0), (6, 8)), Box((6, 0), (12, 8))]


def test_far_apart_boxes_of_a_chunk_are_not_joined_into_memory_that_nobody_wants():
    boxes = [Box((0,), (2,)), Box((14,), (16,))]
    assert len(plan_reads(boxes, (16,), MANY)) == 2


def test_a_part_lies_in_the_stored_array_where_its_index_says():
    assert in_storage(Box((0, 2), (4, 8)), (3,)) == Box((3, 0, 2), (4, 4, 8))
    assert in_storage(Box((0, 2), (4, 8)), (slice(10, 20), 5)) == Box((10, 5, 2), (14, 6, 8))
    assert in_storage(Box((), ()), (1, 2)) == Box((1, 2), (2, 3))
    assert index_text((3, slice(0, 8), slice(None))) == "[3, 0:8, :]"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_wanted_box_is_in_exactly_one_read_and_reads_hold_no_more_than_all_boxes(data):
    ndim = data.draw(st.integers(1, 3))
    chunk = tuple(data.draw(st.integers(1, 5)) for _ in range(ndim))
    boxes = []
    for _ in range(data.draw(st.integers(1, 6))):
        start = tuple(data.draw(st.integers(0, 6)) for _ in range(ndim))
        boxes.append(Box(start, tuple(a + data.draw(st.integers(1, 5)) for a in start)))
    reads = plan_reads(boxes, chunk, MANY)
    for box in boxes:
        holders = [read for read, wanted in reads if box in wanted]
        assert len(holders) == 1
        assert box in holders[0]
    assert sum(read.size for read, _ in reads) <= sum(box.size for box in set(boxes))
    values = np.arange(20**ndim).reshape((20,) * ndim)
    for read, wanted in reads:
        data_read = values[read.slices]
        for box in wanted:
            np.testing.assert_array_equal(data_read[box.relative_to(read).slices], values[box.slices])
