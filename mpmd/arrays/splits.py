"""How an array is split over groups: each group has ranges of one array axis, and nothing else of the array."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from scheduler.base.texts import counted

SplitLike = Mapping[int, Sequence[tuple[int, int]]] | None


class Range(NamedTuple):
    """The rows from `start` to `stop` of the split axis, and the group that has them."""

    start: int
    stop: int
    group: int


@dataclasses.dataclass(frozen=True)
class Split:
    """Which group has which rows of an array."""

    axis: int  # the array axis that is split
    groups: tuple[int, ...]  # the groups that have a part, ascending
    given: tuple[Range, ...] | None = None  # the user's, sorted by start; None splits evenly, in the order of `groups`

    def ranges(self, num_rows: int) -> tuple[Range, ...]:
        """Returns the ranges of an array with this many rows on the split axis, sorted by their start.

        Raises:
            ValueError: the split is for another number of rows, or cannot be even.
        """
        if self.given is None:
            return _even(num_rows, self.axis, self.groups)
        if self.given[-1].stop != num_rows:
            raise ValueError(f"axis {self.axis} has {counted(num_rows, 'row')}, but split covers {self.given[-1].stop}")
        return self.given

    @property
    def is_regular(self) -> bool:
        """Whether each group has one range, all are of one length, and they are in the order of the groups."""
        if self.given is None:
            return True
        return [r.group for r in self.given] == list(self.groups) and len({r.stop - r.start for r in self.given}) == 1

    def by_group(self) -> dict[int, tuple[tuple[int, int], ...]] | None:
        """Returns the split as the user writes it; None if it is even."""
        if self.given is None:
            return None
        return {g: tuple([(r.start, r.stop) for r in self.given if r.group == g]) for g in self.groups}

    @property
    def summary(self) -> str:
        """Returns the split in words; many ranges are only counted. Otherwise like `str`."""
        many = self.given is not None and len(self.given) > 8
        return f"axis {self.axis} split into {len(self.given or ())} ranges" if many else str(self)

    def __str__(self) -> str:
        if self.given is None:
            return f"axis {self.axis} split evenly"
        texts = [f"{g}: " + " ".join(f"{a}:{b}" for a, b in ranges) for g, ranges in (self.by_group() or {}).items()]
        return f"axis {self.axis} split {{{', '.join(texts)}}}"


@functools.lru_cache(maxsize=1024)
def _even(num_rows: int, axis: int, groups: tuple[int, ...]) -> tuple[Range, ...]:
    each, rest = divmod(num_rows, len(groups))
    if rest or not each:
        raise ValueError(
            f"axis {axis} has {counted(num_rows, 'row')}, which cannot be split evenly over {len(groups)} groups;"
            " give split={group: ((start, stop), ...)}"
        )
    return tuple([Range(i * each, (i + 1) * each, group) for i, group in enumerate(groups)])


def named_axis(spec: PartitionSpec, axis_name: str | None) -> int | None:
    """Returns the array axis at which a spec names a mesh axis; raises a ValueError if it names it at two."""
    found = [
        axis
        for axis, entry in enumerate(spec.partitions)
        if axis_name is not None and axis_name in (entry if isinstance(entry, (tuple, list)) else (entry,))
    ]
    if len(found) > 1:
        raise ValueError(
            f"MpmdSharding: spec={spec} names {axis_name!r} at the array axes {', '.join(map(str, found))}; an array is"
            " split over its groups along one of them."
        )
    return found[0] if found else None


def as_split(
    split: SplitLike, groups: tuple[int, ...], mesh_ids: frozenset[int], axis: int | None, named: int | None
) -> Split | None:
    """Returns the split that a user asks for; None if every group has the whole array.

    Args:
        groups: the groups that hold the array, ascending.
        mesh_ids: the same, as the user gave them.
        axis: the array axis that the user gave, or None.
        named: the array axis at which the spec names the mpmd axis, or None.
    """
    if axis is not None:
        axis = operator.index(axis)
        if axis < 0 or named not in (None, axis):
            why = "it counts from 0" if axis < 0 else f"the spec names the mpmd axis at array axis {named}"
            raise ValueError(f"MpmdSharding: split_axis={axis}, but {why}.")
    axis = named if axis is None else axis
    if split is None:
        return None if axis is None or len(groups) == 1 else Split(axis, groups)
    if not isinstance(split, Mapping):
        raise ValueError(
            f"MpmdSharding: split is a {type(split).__name__}; give a mapping, {{group: ((start, stop), ...)}}."
        )
    ranges, faults = _parsed(split)
    faults = faults or _wrong_groups({r.group for r in ranges}, mesh_ids) or _gaps(ranges)
    if faults:
        raise ValueError(f"MpmdSharding: split={split!r} is wrong:\n" + "\n".join(f"  {fault}" for fault in faults))
    return Split(axis or 0, groups, tuple(ranges))


def _parsed(split: Mapping[int, Iterable[Sequence[int]]]) -> tuple[list[Range], list[str]]:
    """Returns all ranges, sorted, and the faults of single ranges."""
    ranges: list[Range] = []
    faults: list[str] = []
    for group, given in split.items():
        try:
            mine = [Range(operator.index(a), operator.index(b), operator.index(group)) for a, b in given]
        except (TypeError, ValueError):
            faults.append(f"group {group}: {given!r} is not a sequence of pairs of integers, ((start, stop), ...)")
            continue
        faults += [f"group {group}: the range {r.start}:{r.stop} is empty" for r in mine if r.stop <= r.start]
        ranges += mine
    if not ranges and not faults:
        faults.append("it has no range")
    return sorted(ranges), faults


def _wrong_groups(groups: set[int], mesh_ids: frozenset[int]) -> list[str]:
    ids = ", ".join(map(str, sorted(mesh_ids)))
    faults = [f"group {g} is not in mesh_ids {{{ids}}}" for g in sorted(groups - mesh_ids)]
    return faults + [f"group {g} of mesh_ids has no range" for g in sorted(mesh_ids - groups)]


def _gaps(ranges: Sequence[Range]) -> list[str]:
    """Returns where ranges overlap, or leave rows to no group."""
    faults: list[str] = []
    end = Range(0, 0, -1)
    for r in ranges:
        if r.start > end.stop:
            faults.append(f"no group has the rows {end.stop}:{r.start}")
        elif r.start < end.stop:
            faults.append(f"{_said(end)} and {_said(r)} overlap")
        end = max(end, r, key=lambda one: one.stop)
    return faults


def _said(r: Range) -> str:
    return f"{r.start}:{r.stop} of group {r.group}"
