"""Where a new array comes from in stored ones: index arithmetic, no data.

An `Entry` is a leaf of a new tree. Its `Origin`s map boxes of stored arrays to boxes of the new one. The axes may be
in another order, and one axis on one side may be several on the other, like `(heads dim)`.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mpmd.arrays.boxes import Box
from reshard.storage.paths import show
from reshard.storage.stored import Leaf
from scheduler.base.texts import type_text

Axes = tuple[tuple[int, ...], ...]
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Origin:
    """A box of a stored array that is a box of a new one.

    Both boxes have the same elements: they are two views of an array with one axis for each factor.
    """

    leaf: Leaf  # the stored array
    source: Box  # the box of it
    target: Box  # the box of the new array
    factors: tuple[int, ...]  # the size of each factor
    source_axes: Axes  # for each axis of the stored array, the factors that it is made of, outermost first
    target_axes: Axes  # the same for the new array

    @classmethod
    def whole(cls, leaf: Leaf) -> "Origin":
        """Returns the origin of an unchanged array."""
        axes = tuple([(axis,) for axis in range(len(leaf.shape))])
        return cls(leaf, Box.whole(leaf.shape), Box.whole(leaf.shape), leaf.shape, axes, axes)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the stored array with its axes in their order."""
        return self.source == Box.whole(self.leaf.shape) and self.source_axes == self.target_axes

    def within(self, box: Box) -> Iterator["Origin"]:
        """Yields the part that is in a box of the new array, as origins."""
        return self._cut(self.target, self.target_axes, box)

    def taking(self, box: Box) -> Iterator["Origin"]:
        """Yields the part that takes from a box of the stored array, as origins."""
        return self._cut(self.source, self.source_axes, box)

    def _cut(self, whole: Box, axes: Axes, box: Box) -> Iterator["Origin"]:
        common = whole & box
        if not common.size:
            return
        if common == whole:
            yield self
            return
        inside = common.relative_to(whole)
        choices = [
            list(_boxes_of_run(start, stop, [self.factors[f] for f in factors]))
            for start, stop, factors in zip(inside.start, inside.stop, axes, strict=True)
        ]
        for chosen in itertools.product(*choices):
            ranges = itertools.chain(*[zip(f, r, strict=True) for f, r in zip(axes, chosen, strict=True)])
            yield from self.with_ranges(dict(ranges))

    def with_ranges(self, ranges: Mapping[int, Range]) -> Iterator["Origin"]:
        """Yields the part where some factors have only these indices, as origins: both sides of each are boxes."""
        full = {f: ranges.get(f, (0, n)) for f, n in enumerate(self.factors)}
        for factors in (*self.source_axes, *self.target_axes):
            if (odd := self._between(factors, full)) is not None:
                for i in range(*full[odd]):
                    yield from self.with_ranges({**full, odd: (i, i + 1)})
                return
        sizes = tuple([stop - start for start, stop in full.values()])
        source = self._box(self.source, self.source_axes, full)
        target = self._box(self.target, self.target_axes, full)
        yield dataclasses.replace(self, source=source, target=target, factors=sizes)

    def _between(self, factors: Sequence[int], ranges: Mapping[int, Range]) -> int | None:
        """Returns the factor of an axis that keeps these ranges from being one range of it; None if they are one."""
        outer = next((k for k, f in enumerate(factors) if ranges[f][1] - ranges[f][0] > 1), None)
        if outer is None or all(ranges[f] == (0, self.factors[f]) for f in factors[outer + 1 :]):
            return None
        return factors[outer]

    def _box(self, whole: Box, axes: Axes, ranges: Mapping[int, Range]) -> Box:
        start, stop = [], []
        for first, factors in zip(whole.start, axes, strict=True):
            index, size = 0, 1
            for f in factors:
                index = index * self.factors[f] + ranges[f][0]
                size *= ranges[f][1] - ranges[f][0]
            start.append(first + index)
            stop.append(first + index + size)
        return Box(tuple(start), tuple(stop))

    def arranged(self, data: np.ndarray) -> np.ndarray:
        """Rearranges the elements of `source` into the order and shape of `target`."""
        given = [f for factors in self.source_axes for f in factors]
        wanted = [f for factors in self.target_axes for f in factors]
        order = [given.index(f) for f in wanted if f in given]
        order += [i for i, f in enumerate(given) if f not in wanted]  # of size 1, like wanted ones that are not given
        return data.reshape([self.factors[f] for f in given]).transpose(order).reshape(self.target.shape)

    def as_layer(self, index: int) -> "Origin":
        """Returns this origin in a stack, as the layer of this index."""
        target = Box((index, *self.target.start), (index + 1, *self.target.stop))
        return dataclasses.replace(self, target=target, target_axes=((), *self.target_axes))

    def of_layer(self) -> "Origin":
        """Returns this origin within a layer, for a target that is one layer of the stack."""
        gone = set(self.target_axes[0])
        return dataclasses.replace(
            self,
            target=Box(self.target.start[1:], self.target.stop[1:]),
            source_axes=tuple([tuple([f for f in factors if f not in gone]) for factors in self.source_axes]),
            target_axes=self.target_axes[1:],
        )

    @property
    def inverse(self) -> "Origin":
        """This origin with its sides exchanged, but the same `leaf`."""
        return dataclasses.replace(
            self,
            source=self.target,
            target=self.source,
            source_axes=self.target_axes,
            target_axes=self.source_axes,
        )

    def then(self, second: "Origin") -> Iterator["Origin"]:
        """Composes this origin with a second one, which takes from this one's target. Raises a ValueError if an axis
        between them is made of different factors on the two sides.
        """
        for after in second.taking(self.target):
            for before in self.within(after.source):
                if before.target == after.source:
                    yield before._joined(after)
                else:
                    yield from before.then(after)

    def _joined(self, second: "Origin") -> "Origin":
        """Composes two origins that meet in one box."""
        sizes: list[int] = []
        first_parts: dict[int, tuple[int, ...]] = {}
        second_parts: dict[int, tuple[int, ...]] = {}
        for mine, theirs in zip(self.target_axes, second.source_axes, strict=True):
            a, b = [self.factors[f] for f in mine], [second.factors[f] for f in theirs]
            common = _common(a, b)
            for factors, parts, own in ((mine, first_parts, a), (theirs, second_parts, b)):
                numbers = itertools.count(len(sizes))
                left = iter(common)
                for f, size in zip(factors, own, strict=True):
                    parts[f] = ()
                    while size > 1:
                        size //= next(left)
                        parts[f] += (next(numbers),)
            sizes += common
        for factors, parts in ((self.factors, first_parts), (second.factors, second_parts)):
            for f, n in enumerate(factors):  # a factor that only one side has is of size 1
                if f not in parts:
                    parts[f] = (len(sizes),)
                    sizes.append(n)

        def axes(given: Axes, parts: Mapping[int, tuple[int, ...]]) -> Axes:
            return tuple([tuple([p for f in factors for p in parts[f]]) for factors in given])

        return Origin(
            self.leaf,
            self.source,
            second.target,
            tuple(sizes),
            axes(self.source_axes, first_parts),
            axes(second.target_axes, second_parts),
        )

    def __str__(self) -> str:
        """Returns the path of the stored array and, for a part, its indices: `params/w[3]`."""
        indices = []
        for axis, (start, stop) in enumerate(zip(self.source.start, self.source.stop, strict=True)):
            whole = (start, stop) == (0, self.leaf.shape[axis]) and self.source_axes[axis]
            indices.append(":" if whole else str(start) if not self.source_axes[axis] else f"{start}:{stop}")
        while indices and indices[-1] == ":":
            indices.pop()
        return show(self.leaf.path) + (f"[{', '.join(indices)}]" if indices else "")


def _common(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Returns the fewest sizes with runs that make up both lists: [8, 128] and [1024] are both made of [8, 128]."""
    sizes: list[int] = []
    left, right = [n for n in a if n > 1], [n for n in b if n > 1]
    while left and right:
        small, large = (left, right) if left[-1] <= right[-1] else (right, left)
        n = small.pop()
        if large[-1] % n:
            raise ValueError(f"an axis is {list(a)} on one side and {list(b)} on the other")
        large[-1] //= n
        if large[-1] == 1:
            large.pop()
        sizes.append(n)
    return sizes[::-1]


def _boxes_of_run(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Yields boxes that together are the elements from `start` to `stop` of an array of these sizes, in C order."""
    if len(sizes) <= 1:
        yield ((start, stop),) if sizes else ()
        return
    inner = math.prod(sizes[1:])
    first, last = start // inner, (stop - 1) // inner
    if start % inner == 0 and stop % inner == 0:
        yield (first, last + 1), *[(0, n) for n in sizes[1:]]
    elif first == last:
        for rest in _boxes_of_run(start - first * inner, stop - first * inner, sizes[1:]):
            yield (first, first + 1), *rest
    else:
        border = (first + 1) * inner if start % inner else last * inner
        yield from _boxes_of_run(start, border, sizes)
        yield from _boxes_of_run(border, stop, sizes)


@dataclasses.dataclass(frozen=True)
class Entry(Leaf):
    """A leaf of the new tree. A leaf that is no array (empty container, text) has one part and is taken over whole."""

    origins: tuple[Origin, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def of(cls, leaf: Leaf) -> "Entry":
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(Leaf)}
        return cls(**fields, origins=(Origin.whole(leaf),))

    def through(self, seconds: Iterable[Origin]) -> list[Origin]:
        """Composes this entry's origins with `seconds`, which take from this entry as if it were stored. Raises a
        ValueError if an axis is cut in two ways that do not fit.
        """
        return [joined for second in seconds for first in self.parts(second.source) for joined in first.then(second)]

    def parts(self, box: Box) -> Iterator[Origin]:
        """Yields the parts of stored arrays that a box of this entry takes."""
        if not box.ndim:
            return iter(self.origins)
        starts, stops, origins = self._ordered
        near = slice(bisect.bisect_right(stops, box.start[0]), bisect.bisect_left(starts, box.stop[0]))
        return itertools.chain.from_iterable(origin.within(box) for origin in origins[near])

    @functools.cached_property
    def _ordered(self) -> tuple[list[int], list[int], list[Origin]]:
        """Starts on axis 0 in ascending order, the furthest stop so far at each, and the origins in this order."""
        origins = sorted(self.origins, key=lambda origin: origin.target.start)
        stops = itertools.accumulate([origin.target.stop[0] for origin in origins], max)
        return [origin.target.start[0] for origin in origins], list(stops), origins

    def __str__(self) -> str:
        return f"{show(self.path)}  {described(self)}"


def described(entry: Entry) -> str:
    """Returns the type of an entry, as messages show it: `float32[2,3]`, or the type of a leaf that is no array."""
    return type_text(entry.shape, entry.dtype) if entry.is_array else entry.value_type
