"""Cuts the stacked arrays of a step where its scans are cut: parameters, gradients, optimizer state, caches.

`split_scans` returns a step in which loops slice their stacked operands and join their stacked results. This pass moves
the slices to the arguments and the joins to the results: every equation on the way is done piece by piece (which ones:
`spread`; how: `rewrite_rows`). Other equations read the whole array, and are listed (`SplitStep.joins`).
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax

from mpmd import _jax_compat as compat
from mpmd.cutting.pieces import Rows, join_rows_p, pieces_of, split_rows_p
from mpmd.cutting.rewrite_rows import Cut, Rewriter, WholeStack
from mpmd.cutting.sliced_stacks import sliced_stacks
from mpmd.cutting.spread import Spread
from mpmd.ops import lists
from mpmd.ops.loop_primitive import treduce_p
from mpmd.pytrees import TreeDef
from mpmd.tracing.arguments import Hint
from mpmd.tracing.new_equations import Atom
from mpmd.tracing.state import match_state
from mpmd.tracing.trace import Trace


@dataclasses.dataclass(frozen=True)
class SplitStep:
    """A step on pieces of arrays."""

    whole: Trace  # the user's step
    trace: Trace  # the step on pieces; each piece is an argument (a result), in a tuple that replaces the array
    ins: tuple[Rows | None, ...]  # the cut of each argument of the user's step; None for whole ones
    outs: tuple[Rows | None, ...]  # the cut of each result, likewise
    joins: tuple[WholeStack, ...] = ()  # the stacked values that are needed as a whole

    @functools.cached_property
    def in_positions(self) -> tuple[range, ...]:
        """The positions of each argument's pieces among the arguments of `trace`."""
        return _positions(self.ins)

    @functools.cached_property
    def out_positions(self) -> tuple[range, ...]:
        """The positions of each result's pieces among the results of `trace`."""
        return _positions(self.outs)

    def pieces_of(self, arguments: Iterable[int]) -> frozenset[int]:
        """Returns the positions in `trace` of the pieces of some arguments."""
        return frozenset(k for i in arguments for k in self.in_positions[i])

    @functools.cached_property
    def stacks(self) -> list[list[compat.Var]]:
        """The pieces of each cut array, as variables of `trace`."""
        ins, outs = self.trace.arguments, self.trace.jaxpr.outvars
        found = [[ins[k] for k in ks] for ks in self.in_positions] + [
            [outs[k] for k in ks] for ks in self.out_positions
        ]
        return [pieces for pieces in found if len(pieces) > 1]


def split_rows(
    trace: Trace, in_rows: Cut, out_rows: Cut, whole_results: Sequence[bool], *, has_whole_arguments: bool = False
) -> SplitStep:
    """Cuts the stacked arrays of a step.

    Args:
      trace: the step, with cut scans (`split_scans`).
      in_rows, out_rows: how the user asks for each argument and result to be cut, or None.
      has_whole_arguments: whether arguments stay whole, even if the results that replace them are cut.
    """
    jaxpr, arguments = trace.jaxpr, trace.arguments
    ins, outs = (None,) * len(in_rows), (None,) * len(out_rows)
    if not any(in_rows) and not any(out_rows) and not _has_pieces(jaxpr):
        return SplitStep(trace, trace, ins, outs)
    spread = Spread()
    spread.uncut.update(arguments[i] for i in lists.leaves_of_one(trace.in_tree))
    state = [(arguments[i], jaxpr.outvars[j]) for j, i in enumerate(match_state(trace)) if i is not None]
    spread.run(jaxpr.eqns, state)  # the scans first: what the user says of other arrays must not change their layers
    for v, rows in [*zip(arguments, in_rows, strict=True), *zip(jaxpr.outvars, out_rows, strict=True)]:
        if not (has_whole_arguments and v in arguments):
            spread.add(v, rows)
    spread.run(jaxpr.eqns, state)
    rewriter = Rewriter(spread)
    cut_ins = [spread.of(v) for v in jaxpr.invars]
    wishes = zip(jaxpr.outvars, out_rows, whole_results, strict=True)
    cut_outs = [None if whole else rows or _as_state(spread, v, state) for v, rows, whole in wishes]
    done = rewriter.rewrite(jaxpr, cut_ins, cut_outs)
    of_consts = zip(trace.consts, cut_ins, strict=False)
    consts = [p for c, r in of_consts for p in ([c] if r is None else pieces_of(c, r))]
    cut_ins = cut_ins[len(trace.consts) :]
    return SplitStep(
        trace,
        Trace(
            done,
            tuple(consts),
            _tree(trace.in_tree, cut_ins),
            _tree(trace.out_tree, cut_outs),
            _names(trace.in_names, cut_ins),
            _names(trace.out_names, cut_outs),
        ),
        tuple(cut_ins),
        tuple(cut_outs),
        tuple(rewriter.joins),
    )


def _positions(rows: Cut) -> tuple[range, ...]:
    found, first = [], 0
    for r in rows:
        found.append(range(first, first + (1 if r is None else len(r.ranges))))
        first = found[-1].stop
    return tuple(found)


def _has_pieces(jaxpr: compat.Jaxpr) -> bool:
    loops = [e.params["jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive is treduce_p]
    return any(
        any(e.primitive in (split_rows_p, join_rows_p) for e in j.eqns) or any(True for _ in sliced_stacks(j.eqns))
        for j in (jaxpr, *loops)
    )


def _as_state(spread: Spread, v: Atom, state: Sequence[tuple[Atom, Atom]]) -> Rows | None:
    """Returns how to cut a result if the user does not say it; state is cut like the argument that it replaces."""
    argument = next((a for a, out in state if out is v), v)
    return spread.of(argument)


def _tree(tree: TreeDef, rows: Cut) -> TreeDef:
    """Returns the tree with a tuple of pieces for each leaf that is cut."""
    leaves = [0 if r is None else (0,) * len(r.ranges) for r in rows]
    return jax.tree.structure(jax.tree.unflatten(tree, leaves))


def _names(names: Sequence[str], rows: Cut) -> tuple[str, ...]:
    found = []
    for name, r in zip(names, rows, strict=True):
        found += [name] if r is None else [f"{name}[{':, ' * r.axis}{start}:{stop}]" for start, stop in r.ranges]
    return tuple(found)


# --- hints about arrays, turned into hints about their pieces --------------------------------------


def rows_of(hint: Hint) -> Rows | None:
    """Returns the cut of an array that is known to be split; None for others."""
    if hint.split_axis is None:
        return None
    return Rows(hint.split_axis, (0, *(r.stop for r in hint.ranges)))


def hints_of_pieces(hints: Sequence[Hint], rows: Cut) -> tuple[Hint, ...]:
    """Returns the group of each piece, if the array is split exactly like this, and its layout there.

    The groups of a whole array do not apply to its pieces: these are put where they are read.
    """
    found: list[Hint] = []
    for hint, r in zip(hints, rows, strict=True):
        if r is None:
            found.append(hint)
            continue
        known = {(x.start, x.stop): frozenset([x.group]) for x in hint.ranges if hint.split_axis == r.axis}
        found += [Hint(known.get(ends), hint.layout) for ends in r.ranges]
    return tuple(found)


def in_one_group(hints: tuple[Hint, ...], split: SplitStep, inputs: Sequence[frozenset[int]]) -> tuple[Hint, ...]:
    """Returns the hints with each piece that several groups read in the first of them, which sends it to the others.

    Args:
      hints: for each argument of `split.trace`.
      inputs: the groups that hold each input of `split.trace`.
    """
    found, first = list(hints), len(split.trace.consts)
    for ks in split.in_positions:
        for k in ks if len(ks) > 1 else ():
            if len(inputs[first + k]) > 1:
                found[k] = dataclasses.replace(hints[k], groups=frozenset([min(inputs[first + k])]))
    return tuple(found)
