"""What is known of the layout of arrays, as what is known of their pieces."""

import dataclasses
from collections.abc import Sequence

from mpmd.cutting.pieces import Rows
from mpmd.cutting.rewrite_rows import Cut
from mpmd.cutting.split_rows import SplitStep
from mpmd.tracing.arguments import Hint

Groups = frozenset[int]


def rows_of(hint: Hint) -> Rows | None:
    """How an array is cut that is known to be split."""
    if hint.split_axis is None:
        return None
    return Rows(hint.split_axis, (0, *(r.stop for r in hint.ranges)))


def hints_of_pieces(hints: Sequence[Hint], rows: Cut) -> tuple[Hint, ...]:
    """Per piece: its group, where the array is split just so, and its layout there.

    The groups of a whole array say nothing of the pieces: it is cut, and they are put where they are read.
    """
    found: list[Hint] = []
    for hint, r in zip(hints, rows, strict=True):
        if r is None:
            found.append(hint)
            continue
        known = {(x.start, x.stop): frozenset([x.group]) for x in hint.ranges if hint.split_axis == r.axis}
        found += [Hint(known.get(ends), hint.layout) for ends in r.ranges]
    return tuple(found)


def in_one_group(hints: tuple[Hint, ...], split: SplitStep, inputs: Sequence[Groups]) -> tuple[Hint, ...]:
    """The hints, in which each piece that several groups read is in the first of them: it is sent to the others.

    Args:
      hints: per argument of `split.trace`.
      inputs: per input of `split.trace`, the groups that hold it.
    """
    found, first = list(hints), len(split.trace.consts)
    for ks in split.in_positions:
        for k in ks if len(ks) > 1 else ():
            if len(inputs[first + k]) > 1:
                found[k] = dataclasses.replace(hints[k], groups=frozenset([min(inputs[first + k])]))
    return tuple(found)
