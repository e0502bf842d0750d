"""What a new array takes from stored ones, against numpy: any box, in any order of axes, cut, joined and composed."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.arrays.boxes import Box
from reshard.edits import axes
from reshard.edits.axes import AxesRule
from reshard.edits.entries import Entry, Origin
from reshard.storage.paths import Key
from reshard.storage.stored import Leaf

SIZES = {"a": 3, "b": 4, "c": 2, "d": 5}


def leaf(shape, name="x") -> Leaf:
    return Leaf((Key(name),), "jax.Array", tuple(shape), np.dtype(np.int64), tuple(shape))


def side(names, cuts):
    """Names in an order, some of them joined into one axis."""
    groups = [[names[0]]]
    for name, joined in zip(names[1:], cuts, strict=False):
        groups[-1].append(name) if joined else groups.append([name])
    return tuple(tuple(group) for group in groups)


sides = st.builds(side, st.permutations(sorted(SIZES)), st.lists(st.booleans(), min_size=3, max_size=3))


def moved(data, source, target):
    """The array in the other order of axes."""
    names = [name for axis in source for name in axis]
    order = [names.index(name) for axis in target for name in axis]
    return data.reshape([SIZES[name] for name in names]).transpose(order).reshape(axes.shape_of(target, SIZES))


def read(entry: Entry, box: Box, stored: dict[str, np.ndarray]) -> np.ndarray:
    data = np.full(box.shape, -1)
    for part in entry.parts(box):
        found = stored[part.leaf.path[0].name][part.source.slices]
        view = data[part.target.relative_to(box).slices]
        assert (view == -1).all()  # nothing is read twice
        view[...] = part.arranged(found)
    return data


def entry_of(shape, origins) -> Entry:
    return Entry((Key("new"),), "jax.Array", tuple(shape), np.dtype(np.int64), tuple(shape), origins=tuple(origins))


def box_of(draw, shape) -> Box:
    ranges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


@settings(max_examples=80, deadline=None)
@given(st.data(), sides, sides, sides)
def test_any_box_of_an_array_in_another_order_of_axes_is_put_together(data, first, second, third):
    x = np.arange(math.prod(SIZES.values())).reshape(axes.shape_of(first, SIZES))
    one = list(axes.moves(leaf(x.shape), first, second, SIZES))
    middle = entry_of(axes.shape_of(second, SIZES), one)
    y = moved(x, first, second)
    box = box_of(data.draw, y.shape)
    assert (read(middle, box, {"x": x}) == y[box.slices]).all()
    # what takes from a box of the stored array, together, is that box
    cell = box_of(data.draw, x.shape)
    taken = list(one[0].taking(cell))
    assert sum(part.source.size for part in taken) == cell.size and all(part.source in cell for part in taken)
    # through a second rule, as if the first one's result were stored
    two = axes.moves(leaf(y.shape), second, third, SIZES)
    last = entry_of(axes.shape_of(third, SIZES), middle.through(two))
    box = box_of(data.draw, last.shape)
    assert (read(last, box, {"x": x}) == moved(y, second, third)[box.slices]).all()


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["(b g d) m -> m b g d", "(g d) m b -> b m g d", "m b g d -> (m g) b d"]))
def test_arrays_that_are_joined_along_any_axis_are_cut_again(data, text):
    rule, parts = AxesRule.parse(text), [3, 1, 2]
    sizes = {"b": 2, "d": 2, "m": 3, "g": sum(parts)}
    all_of = np.arange(math.prod(sizes.values())).reshape(axes.shape_of(rule.left, sizes))
    by_name = all_of.reshape([sizes[n] for axis in rule.left for n in axis])
    names = [n for axis in rule.left for n in axis]
    made = []
    for first, part in zip(axes.offsets(parts), parts, strict=True):
        own = {**sizes, "g": part}
        moves = axes.moves(leaf(all_of.shape), rule.right, rule.left, own, along="g", total=6, first=first)
        entry = entry_of(axes.shape_of(rule.right, own), [one.inverse for one in moves])
        piece = np.take(by_name, range(first, first + part), names.index("g"))
        wanted = piece.transpose([names.index(n) for axis in rule.right for n in axis]).reshape(entry.shape)
        box = box_of(data.draw, entry.shape)
        assert (read(entry, box, {"x": all_of}) == wanted[box.slices]).all()
        made.append((entry, wanted))
    # and together they are the first array again
    origins = [
        origin
        for i, (first, part) in enumerate(zip(axes.offsets(parts), parts, strict=True))
        for origin in axes.moves(
            leaf(made[i][1].shape, str(i)), rule.right, rule.left, {**sizes, "g": part}, along="g", total=6, first=first
        )
    ]
    box = box_of(data.draw, all_of.shape)
    stored = {str(i): wanted for i, (_, wanted) in enumerate(made)}
    assert (read(entry_of(all_of.shape, origins), box, stored) == all_of[box.slices]).all()


def test_layers_become_a_stack_and_a_stack_becomes_layers():
    x = np.arange(24).reshape(4, 6)
    stack = entry_of((2, 4, 6), [Origin.whole(leaf(x.shape)).as_layer(i) for i in range(2)])
    assert (read(stack, Box((0, 1, 2), (2, 3, 5)), {"x": x}) == np.stack([x, x])[:, 1:3, 2:5]).all()
    (part,) = stack.parts(Box((1, 0, 0), (2, 4, 6)))
    assert part.of_layer() == Origin.whole(leaf(x.shape))
    assert str(next(Origin.whole(leaf(x.shape)).taking(Box((1, 0), (2, 6))))) == "x[1:2]"
