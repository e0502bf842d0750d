"""Index arithmetic: boxes of indices, and which device holds which box of an array.

All data movement (transfers between groups, resharding, restoring) is set arithmetic on boxes: the part that a device
wants, without the part that it has, cut by the parts that others have. A `Box` is a value; nothing here touches data,
and nothing needs devices beyond their identity.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import jax

from mpmd.arrays.mesh import Device
from mpmd.arrays.sharding import Key, MpmdSharding
from scheduler.base.texts import counted


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Box:
    """A box of indices: on each array axis the half-open range from `start` to `stop`.

    A range that would end before it starts is empty, and so is the box. The box of a scalar has no axes and one
    element.

    Examples:
        >>> Box((0, 0), (4, 4)) & Box((2, 1), (6, 3))
        Box[2:4, 1:3]
        >>> Box((2,), (3,)) in Box((0,), (4,))
        True
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Returns the box of all indices of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_slices(cls, slices: Sequence[slice], shape: Sequence[int]) -> "Box":
        """Returns the box that slices (of step 1) select from an array of this shape; missing slices select all."""
        bounds = [s.indices(size) for s, size in zip(slices, shape)]  # noqa: B905 (trailing axes follow)
        if any(step != 1 for _, _, step in bounds):
            raise ValueError(f"slices {tuple(slices)} have a step; a box has none.")
        rest = tuple(shape[len(bounds) :])
        return cls(tuple(b[0] for b in bounds) + (0,) * len(rest), tuple(b[1] for b in bounds) + rest)

    @classmethod
    def bounding(cls, boxes: Iterable["Box"]) -> "Box":
        """Returns the smallest box that contains all of these boxes; there must be at least one."""
        starts, stops = zip(*[(box.start, box.stop) for box in boxes], strict=True)
        return cls(tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True))))

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([max(0, b - a) for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.size

    def nbytes(self, itemsize: int) -> int:
        """Returns the bytes of its elements."""
        return self.size * itemsize

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns slices that take the box from a whole array."""
        return tuple([slice(a, b) for a, b in zip(self.start, self.stop, strict=True)])

    def __and__(self, other: "Box") -> "Box":
        """Returns the intersection."""
        return Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))

    def __contains__(self, other: "Box | Sequence[int]") -> bool:
        """Returns whether this box contains every element of another box, or one index."""
        if isinstance(other, Box):
            return not other.size or (self & other) == other
        return all(a <= i < b for a, i, b in zip(self.start, other, self.stop, strict=True))

    def relative_to(self, outer: "Box") -> "Box":
        """Returns the same elements, counted from the start of `outer`: their place in a shard that holds `outer`."""
        return self.shifted([-first for first in outer.start])

    def shifted(self, offset: Sequence[int]) -> "Box":
        """Returns the box, moved by this many indices on each axis."""
        return Box(tuple(map(operator.add, self.start, offset)), tuple(map(operator.add, self.stop, offset)))

    def scaled(self, factors: Sequence[int]) -> "Box":
        """Returns the same part of an array that is longer by a factor on each axis."""
        return Box(tuple(map(operator.mul, self.start, factors)), tuple(map(operator.mul, self.stop, factors)))

    def with_range(self, axis: int, start: int, stop: int) -> "Box":
        """Returns the box with another range on one axis."""
        return Box(
            (*self.start[:axis], start, *self.start[axis + 1 :]), (*self.stop[:axis], stop, *self.stop[axis + 1 :])
        )

    def aligned(self, cell: Sequence[int]) -> "Box":
        """Returns the cells that it touches, in a grid of cells of one shape that starts at the origin."""
        return Box(
            tuple([a // n * n for a, n in zip(self.start, cell, strict=True)]),
            tuple([-(-b // n) * n for b, n in zip(self.stop, cell, strict=True)]),
        )

    def grid(self, cell: Sequence[int]) -> Iterator["Box"]:
        """Cuts the box into cells of one shape, in row-major order; the last ones on an axis may be smaller."""
        ranges = [range(a, b, max(n, 1)) for a, b, n in zip(self.start, self.stop, cell, strict=True)]
        for start in itertools.product(*ranges):
            yield Box(start, tuple([min(a + n, b) for a, n, b in zip(start, cell, self.stop, strict=True)]))

    def __sub__(self, other: "Box") -> list["Box"]:
        """Returns the elements of this box that are not in the other, as disjoint boxes."""
        common = self & other
        if not common.size:
            return [Box(self.start, self.stop)] if self.size else []
        parts: list[Box] = []
        rest = self
        for axis, (start, stop) in enumerate(zip(common.start, common.stop, strict=True)):
            if rest.start[axis] < start:
                parts.append(rest.with_range(axis, rest.start[axis], start))
            if stop < rest.stop[axis]:
                parts.append(rest.with_range(axis, stop, rest.stop[axis]))
            rest = rest.with_range(axis, start, stop)
        return parts

    def without(self, others: Iterable["Box"]) -> list["Box"]:
        """Returns the elements of this box that are in none of the others, as disjoint boxes."""
        rest: list[Box] = [self] if self.size else []
        for other in others:
            rest = [part for box in rest for part in box - other]
        return rest

    def split_sized(self, max_elements: int) -> Iterator[tuple["Box", int]]:
        """Cuts the box into boxes of at most `max_elements` elements, each with its number of elements.

        They come in row-major order. The cut is along the leading axes, so that every part is contiguous in memory
        if the box is; the parts of one axis differ in length by at most one.
        """
        if max_elements < 1:
            raise ValueError(f"cannot split {self!r} into parts of {max_elements} elements.")
        shape = self.shape
        size = math.prod(shape)
        if size <= max_elements:
            if size:
                yield self, size
            return
        axis = next(i for i, n in enumerate(shape) if n > 1)
        length, first = shape[axis], self.start[axis]
        row = size // length
        num_parts = min(length, math.ceil(length / max(1, max_elements // row)))
        for i in range(num_parts):
            lo, hi = length * i // num_parts, length * (i + 1) // num_parts
            part = self.with_range(axis, first + lo, first + hi)
            if (hi - lo) * row <= max_elements:
                yield part, (hi - lo) * row
            else:
                yield from part.split_sized(max_elements)

    def __repr__(self) -> str:
        return f"Box[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


@functools.lru_cache(maxsize=4096)
def device_boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """Returns the box of an array on each device of a JAX sharding, of other processes too.

    Callers share the result and must not change it. It costs one Python object per device, once for each sharding and
    shape.

    Raises:
        ValueError: the sharding does not fit the shape.
    """
    by_slices: dict[object, Box] = {}
    boxes: dict[Device, Box] = {}
    spec = getattr(sharding, "spec", ())
    if len(spec) > len(shape):
        raise ValueError(
            f"spec {spec} has {counted(len(spec), 'entry')}, but the array has {counted(len(shape), 'axis')}"
        )
    try:
        index_map = sharding.devices_indices_map(shape)
    except ValueError:
        raise
    except Exception as error:  # JAX's errors for specs share no base class
        raise ValueError(str(error)) from error
    for device, slices in index_map.items():
        key = tuple([(s.start, s.stop) for s in slices])
        box = by_slices.get(key)
        if box is None:
            box = by_slices[key] = Box.from_slices(slices, shape)
        boxes[device] = box
    return boxes


def part_boxes(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Key, dict[Device, Box]]:
    """Returns the box on each device, for each part (`MpmdSharding.parts`); a JAX sharding counts as group 0."""
    shape = tuple(shape)
    if not isinstance(sharding, MpmdSharding):
        return {0: device_boxes(sharding, shape)}
    found: dict[Key, dict[Device, Box]] = {}
    for part in sharding.parts(shape):
        boxes = device_boxes(sharding.group_sharding(part.group), part.shape)
        if any(part.offset):
            boxes = {device: box.shifted(part.offset) for device, box in boxes.items()}
        found[part.key] = boxes
    return found


def held_cells(
    sharding: jax.sharding.Sharding, shape: Sequence[int]
) -> tuple[tuple[int, ...], dict[Box, tuple[int, ...]]]:
    """Cuts an array into cells that lie within every shard that they touch, each with the processes that have it.

    Returns:
        The shape of the cells, and the processes of each, ascending; the cells are in row-major order.
    """
    by_part = part_boxes(sharding, shape)
    shards = {box: box.shape for boxes in by_part.values() for box in boxes.values()}
    cell = tuple([math.gcd(*sizes) for sizes in zip(*shards.values(), strict=True)])
    cells = {box: list(box.grid(cell)) for box in shards}
    holders: dict[Box, set[int]] = {}
    for boxes in by_part.values():
        for device, box in boxes.items():
            for part in cells[box]:
                holders.setdefault(part, set()).add(device.process_index)
    return cell, {box: tuple(sorted(holders[box])) for box in sorted(holders, key=lambda box: box.start)}
