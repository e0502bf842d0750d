"""Finds runs of equations that programs have in common, such as the layers of stages that hold several of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# What a call more must save: so many equations that are not compiled.
LEAST = 80


class Stretch(NamedTuple):
    """A stretch of a sequence."""

    sequence: int
    start: int
    length: int


def repeated_runs(sequences: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]) -> list[list[Stretch]]:
    """Equal runs that do not overlap, those first that save most: each a list of at least two.

    Args:
      sequences: kinds of equations (0 and above), one list for each program.
      weights: of each of these.
    """
    # One text; what lies between two sequences, or in a run that is found, equals nothing.
    text = np.asarray([n for k, kinds in enumerate(sequences) for n in (*kinds, -1 - k)], np.int64)
    at = [(k, i) for k, kinds in enumerate(sequences) for i in range(len(kinds) + 1)]
    before = np.concatenate([[0], np.cumsum([n for w in weights for n in (*w, 0)])]).astype(int)
    found = []
    while len(text) and (best := max(_candidates(text, before), default=None)) is not None:
        _, length, starts = best
        found.append([Stretch(*at[s], length) for s in starts])
        for s in starts:
            text[s : s + length] = range(text.min() - length, text.min())
    return found


def _candidates(text: np.ndarray, before: np.ndarray) -> Iterator[tuple[int, int, list[int]]]:
    """What equal runs save, their length and where they begin. Those that save nothing are left out."""
    order, common = _suffixes(text)
    for length, first, last in _intervals(common):
        weight = before[order[first] + length] - before[order[first]]
        starts: list[int] = []
        for s in sorted(order[first : last + 1].tolist()):
            if not starts or s >= starts[-1] + length:
                starts.append(s)
        saved = int(weight * (len(starts) - 1) - LEAST * len(starts))
        if saved > 0:
            yield saved, length, starts


def _suffixes(text: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """All ends of `text`, sorted; and how long each has in common with the one before it."""
    ranks = np.unique(text, return_inverse=True)[1]
    n, width = len(text), 1
    while True:
        pairs = ranks * (n + 1) + np.concatenate([ranks[width:] + 1, np.zeros(min(width, n), ranks.dtype)])
        ranks = np.unique(pairs, return_inverse=True)[1]
        if ranks.max() == n - 1:
            break
        width *= 2
    order = np.argsort(ranks)
    common, length, values = [0] * n, 0, text.tolist()
    for i, rank in enumerate(ranks.tolist()):
        if rank == 0:
            length = 0
            continue
        j = int(order[rank - 1])
        while max(i, j) + length < n and values[i + length] == values[j + length]:
            length += 1
        common[rank] = length
        length = max(0, length - 1)
    return order, common


def _intervals(common: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """A length, and the first and last of the ends that begin with the same so many; as long as possible."""
    stack = [(0, 0)]
    for i, length in enumerate((*common[1:], 0), 1):
        first = i - 1
        while stack[-1][0] > length:
            found, first = stack.pop()
            yield found, first, i - 1
        if stack[-1][0] < length:
            stack.append((length, first))
