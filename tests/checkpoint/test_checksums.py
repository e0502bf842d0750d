"""The sum of a box changes with each of its bytes, and with their order."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.arrays.boxes import Box
from reshard.storage.checksums import checksum, damaged


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_changes_the_sum(data):
    size = data.draw(st.sampled_from([1, 7, 8, 100, 4096, 4097, 20_000]))
    values = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    flipped = values.copy()
    flipped[data.draw(st.integers(0, size - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    assert checksum(values) != checksum(flipped)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 30_000), max_size=6))
def test_a_sum_of_parts_is_the_sum_of_the_whole(cuts):
    values = np.random.default_rng(0).integers(0, 256, 30_000, np.uint8)
    total = 0
    for part in np.split(values, sorted(cuts)):
        total = checksum(part, total)
    assert total == checksum(values)


@settings(max_examples=100, deadline=None)
@given(one=st.integers(0, 4095), other=st.integers(0, 4095))
def test_a_swap_of_any_two_words_changes_the_sum(one, other):
    values = np.arange(4096, dtype=np.float32)
    swapped = values.copy()
    swapped[[one, other]] = values[[other, one]]
    assert (checksum(values) == checksum(swapped)) == (one == other)


def test_the_length_counts():
    assert checksum(np.zeros(10)) != checksum(np.zeros(11))


def test_a_view_has_the_sum_of_its_copy():
    values = np.random.default_rng(0).normal(size=(50, 40))
    assert checksum(values[3:20, 7:31]) == checksum(values[3:20, 7:31].copy())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.bool_, np.int64, jnp.float8_e4m3fn, jnp.int4])
def test_every_dtype_and_scalars_have_one(dtype):
    assert checksum(np.ones((3, 5), dtype)) != checksum(np.zeros((3, 5), dtype))
    assert checksum(np.ones((), dtype)) != checksum(np.zeros((), dtype))


def test_boxes_that_were_read_as_a_whole_are_checked_and_others_are_not():
    values = np.arange(64).reshape(8, 8)
    boxes = [Box((i, 0), (i + 2, 8)) for i in range(0, 8, 2)]
    sums = [(box, checksum(values[box.slices])) for box in boxes]
    assert damaged(values, Box.whole((8, 8)), sums) is None
    wrong = values.copy()
    wrong[5, 3] = 0
    assert damaged(wrong, Box.whole((8, 8)), sums) == boxes[2]
    assert damaged(wrong[4:6], boxes[2], sums) == boxes[2]
    assert damaged(wrong[5:6], Box((5, 0), (6, 8)), sums) is None
