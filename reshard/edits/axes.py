"""How the axes of an array in a folder become those of ours: `(heads dim) model -> model heads dim`.

The left side is the array in the folder, the right side ours. Axes in parentheses are one axis of the array, the
outermost first. Both sides name the same axes; a name on only one side is an index (`along` of a mapping).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from mpmd.arrays.boxes import Box
from reshard.edits.entries import Origin
from reshard.storage.stored import Leaf
from scheduler.base.texts import counted

Named = tuple[tuple[str, ...], ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AxesRule:
    """Both sides of a rule: for each axis, the names that it is made of."""

    left: Named
    right: Named

    @classmethod
    def parse(cls, text: str) -> "AxesRule":
        """Reads `(heads dim) model -> model heads dim`. Raises a ValueError if the text does not have this form."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"{text!r} has no ->; write it like '(heads dim) model -> model heads dim'")
        return cls(_side(left, text), _side(right, text))

    def check(self, along: str | None) -> None:
        """Raises a ValueError if the sides do not name the same axes."""
        left, right = _names(self.left), _names(self.right)
        for name in sorted(left ^ right):
            if name != along:
                raise ValueError(f"{name!r} is on one side alone")


def _side(text: str, whole: str) -> Named:
    found = re.findall(r"\w+|\([\w\s]*\)|\S", text)  # one pattern for the whole text would take exponential time
    axes = tuple([tuple(axis.strip("()").split()) for axis in found])
    if not all(axis and re.fullmatch(r"[\w\s]+", " ".join(axis)) for axis in axes):
        raise ValueError(f"{whole!r} is not written like '(heads dim) model -> model heads dim'")
    names = [name for axis in axes for name in axis]
    if len(set(names)) < len(names):
        raise ValueError(f"{whole!r} has a name twice on one side")
    return axes


def _names(side: Named) -> set[str]:
    return {name for axis in side for name in axis}


def sizes_of(side: Named, shape: Shape, known: Mapping[str, int]) -> dict[str, int]:
    """Returns the size of each name, from the shape of the array and, for axes of several names, `known` sizes. Raises
    a ValueError if the array has other axes, or a size is missing or does not fit.
    """
    if len(side) != len(shape):
        raise ValueError(f"it has {counted(len(shape), 'axis')}, not {len(side)}")
    sizes: dict[str, int] = {}
    for names, size in zip(side, shape, strict=True):
        if len(names) == 1:
            sizes[names[0]] = size
            continue
        unknown = [name for name in names if name not in known]
        if len(unknown) > 1:
            raise ValueError(f"the sizes of {' and '.join(unknown)} are not known: {' '.join(names)} are {size}")
        rest = math.prod(known[name] for name in names if name in known)
        found = {name: known.get(name, size // max(1, rest)) for name in names}
        if math.prod(found.values()) != size:
            raise ValueError(f"its axis of {size} is not made of {', '.join(f'{n} {s}' for n, s in found.items())}")
        sizes |= found
    return sizes


def shape_of(side: Named, sizes: Mapping[str, int]) -> Shape:
    """Returns the shape of an array with axes made of these names, from the size of each name."""
    return tuple([math.prod(sizes[name] for name in axis) for axis in side])


def moves(
    leaf: Leaf, source: Named, target: Named, sizes: Mapping[str, int], *, along: str | None = None, total: int = 0,
    first: int = 0,
) -> Iterator[Origin]:  # fmt: skip
    """Maps an array to its boxes in the array that several are joined into.

    Args:
        leaf: stands for the array.
        source, target: the axes of the array, and of the whole.
        sizes: the sizes of the array; for `along`, of its part.
        along: the name along which they are joined; None where one array becomes one.
        total: the size of `along` in the whole.
        first: where the part begins in the whole.
    """
    names = sorted(_names(source) | _names(target))
    ids = {name: i for i, name in enumerate(names)}
    factors = tuple([sizes[name] for name in names])
    source_axes = tuple([tuple([ids[name] for name in axis]) for axis in source])
    target_axes = tuple([tuple([ids[name] for name in axis]) for axis in target])
    whole = Origin(
        leaf, Box.whole(shape_of(source, sizes)), Box.whole(shape_of(target, sizes)), factors, source_axes, target_axes
    )
    if along is None:
        yield whole
        return
    axis = next(i for i, names_of_axis in enumerate(target) if along in names_of_axis)
    place = target[axis].index(along)
    outer, inner = target[axis][:place], math.prod(sizes[name] for name in target[axis][place + 1 :])
    for index, chosen in enumerate(itertools.product(*[range(sizes[name]) for name in outer])):
        shift = (index * (total - sizes[along]) + first) * inner
        for part in whole.with_ranges({ids[name]: (i, i + 1) for name, i in zip(outer, chosen, strict=True)}):
            box = part.target.shifted([shift if i == axis else 0 for i in range(len(target))])
            yield dataclasses.replace(part, target=box)


def offsets(parts: Sequence[int]) -> list[int]:
    """Returns the start of each part."""
    return [0, *itertools.accumulate(parts)][:-1]
