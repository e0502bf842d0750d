"""Finds runs of equations that programs have in common, such as the layers of stages that hold several of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpmd import _jax_compat as compat
from mpmd.compile.subprogram import SUM, Pattern, Subprogram
from mpmd.graphs import equations

# A further call must save the compilation of so many equations.
LEAST = 80


class Stretch(NamedTuple):
    """A stretch of a sequence."""

    sequence: int
    start: int
    length: int


def repeated_runs(sequences: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]) -> list[list[Stretch]]:
    """Finds equal runs that do not overlap, the largest saving first. Returns lists of at least two runs.

    Args:
      sequences: kinds of equations (0 and above), one list for each program.
    """
    # One text: separators between sequences, and the elements of found runs, equal nothing.
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
    """Yields the saving of equal runs, their length and their starts, if they save anything."""
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
    """Returns the suffix array of `text`, and the length of the prefix that each suffix shares with the one before."""
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
    """Yields maximal intervals of the suffix array with a common prefix: its length, first and last suffix."""
    stack = [(0, 0)]
    for i, length in enumerate((*common[1:], 0), 1):
        first = i - 1
        while stack[-1][0] > length:
            found, first = stack.pop()
            yield found, first, i - 1
        if stack[-1][0] < length:
            stack.append((length, first))


# --- common parts of programs that do not contain each other: layers of stages with two and three layers ---


class BlockSite(NamedTuple):
    """Equations of a program, by position. Matching sites of programs have all but their sums in the same order."""

    pattern: Pattern
    alike: tuple[int, ...]
    sums: tuple[int, ...]

    @property
    def eqns(self) -> list[compat.JaxprEqn]:
        return [self.pattern.jaxpr.eqns[i] for i in sorted((*self.alike, *self.sums))]

    @property
    def wanted(self) -> set[compat.Var]:
        """Variables that other equations, or the caller of the program, read."""
        own = {*self.alike, *self.sums}
        others = (e for i, e in enumerate(self.pattern.jaxpr.eqns) if i not in own)
        return {v for e in others for v in equations.variables(e.invars)}.union(
            equations.variables(self.pattern.jaxpr.outvars)
        )


def common_blocks(patterns: Sequence[Pattern]) -> Iterator[list[BlockSite]]:
    """Yields lists of sites that match, perhaps except for sums: the largest saving, and in a list most sums, first."""
    rows = [[i for i, e in enumerate(p.jaxpr.eqns) if e.primitive.name != SUM] for p in patterns]
    kinds = [[p.kinds[i] for i in row] for p, row in zip(patterns, rows, strict=True)]
    weights = [[p.weights[i] for i in row] for p, row in zip(patterns, rows, strict=True)]
    for runs in repeated_runs(kinds, weights):
        if len({run.sequence for run in runs}) > 1:
            spans = []
            for k, start, length in runs:
                alike = rows[k][start : start + length]
                end = rows[k][start + length] if start + length < len(rows[k]) else len(patterns[k].kinds)
                sums = set(range(alike[0], end)).difference(alike)
                spans.append(BlockSite(patterns[k], tuple(alike), tuple(sums)))
            yield sorted(_grown(spans), key=lambda span: len(span.sums), reverse=True)


def _grown(spans: Sequence[BlockSite]) -> list[BlockSite]:
    """Extends sites by matching equations before them that only they read, such as a backward's work on residuals."""
    patterns = [span.pattern for span in spans]
    own = [{*span.alike, *span.sums} for span in spans]
    rows = list(zip(*(span.alike for span in spans), strict=True))
    for row in rows:  # the loop appends to `rows`
        for atoms in zip(*(p.jaxpr.eqns[i].invars for p, i in zip(patterns, row, strict=True)), strict=True):
            if all(not isinstance(v, compat.Literal) and v in p.origin for p, v in zip(patterns, atoms, strict=True)):
                found = tuple(p.origin[v][0] for p, v in zip(patterns, atoms, strict=True))
                at = list(zip(patterns, found, own, strict=True))
                is_new = all(i not in mine and p.readers[i] <= mine for p, i, mine in at)
                if is_new and len({p.kinds[i] for p, i, _ in at}) == 1:
                    rows.append(found)
                    for _, i, mine in at:
                        mine.add(i)
    return [
        BlockSite(p, alike, span.sums) for p, alike, span in zip(patterns, zip(*rows, strict=True), spans, strict=True)
    ]


def block_of(spans: Sequence[BlockSite]) -> Subprogram:
    """Returns the first of matching sites as a program that writes all variables that any of them must."""
    model = spans[0].eqns
    made = dict.fromkeys(v for e in model for v in equations.outputs(e))  # in order: the same in every process
    sums = {v: e.outvars[0] for e in model if e.primitive.name == SUM for v in equations.variables(e.invars)}
    wanted = spans[0].wanted
    for span in spans[1:]:
        outs = [[s.pattern.jaxpr.eqns[i].outvars for i in s.alike] for s in (spans[0], span)]
        pairs = [pair for mine, its in zip(*outs, strict=True) for pair in zip(mine, its, strict=True)]
        its = span.wanted
        wanted |= {sums.get(v, v) for v, w in pairs if w in its}
    first = equations.variables(spans[0].pattern.jaxpr.outvars)
    results = dict.fromkeys(v for v in (*first, *made) if v in made and v in wanted)
    return Subprogram(tuple(model), tuple(equations.free_variables(model)), tuple(results))
