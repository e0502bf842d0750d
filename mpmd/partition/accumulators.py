"""Gives each output of a loop an accumulator, inside the task that makes it.

A gradient with parts from several stages (a tied, stacked or shared parameter) is accumulated in parts:
its sum is cut at the leaves, so that no gradient crosses groups in each microbatch.
"""

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node, Place
from mpmd.graphs.linearity import linear_in
from mpmd.graphs.scheduled_loop import ScheduledLoop
from mpmd.ops.reductions import (
    Add,
    Concat,
    Mean,
    Operation,
    dtype_of_sum,
    explicit_sharding,
    result_types,
)
from mpmd.partition.joint_outputs import Joins
from mpmd.tracing.folding import integer_of
from mpmd.tracing.new_equations import Atom, Equations, copy_equations, trace_equations, trace_operation


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """One reduced value of the loop, built up inside the task that produces it."""

    value: Atom  # the variable of the loop's body that is accumulated, at `place`
    result: compat.Var  # the variable, outside of the loop, of the last accumulator
    operation: Operation
    place: Place


def reduce_outputs(
    body: Body, eqn: compat.JaxprEqn, info: ScheduledLoop, split: bool
) -> tuple[Body, list[Accumulator], list[compat.JaxprEqn]]:
    """Makes an accumulator for each output, or for each part of an output from several stages.

    Args:
      body: the body, in which every equation that is not clonable has its place.
      split: whether the schedule has `I` and `W` tasks instead of (or in addition to) `B`.

    Returns:
      The body with the sums of parts that are accumulated, its accumulators, and the equations after the loop that make
      the loop's results from them.
    """
    outputs = _Outputs(body, info, split)
    for value, operation, result in zip(body.outvars, info.operations, eqn.outvars, strict=True):
        if not isinstance(result, compat.DropVar):
            outputs.reduce(value, operation, result)
    return body.with_nodes([*body.nodes, *outputs.added]), outputs.accumulators, outputs.after


class _Linear(NamedTuple):
    """A linear equation between a summand and its gradient.

    Attributes:
      apply: the equation, on a value that may have another shape (without an earlier padding), and on `operands`.
      waits: whether it runs after the loop: it pads a slice's gradient with zeros, moves rows, or reads `operands`.
    """

    apply: Callable[..., jax.Array]
    waits: bool = False
    commutes: bool = False  # whether it may also run before a step that waits
    operands: tuple[compat.Var, ...] = ()  # its other inputs, which are the same for all microbatches


class _Summand(NamedTuple):
    """One summand of a gradient: its value in the loop, its place, and the steps from it to the gradient."""

    value: Atom
    place: Place
    steps: tuple[_Linear, ...]


def _is_coarse(part: _Summand, value: Atom) -> bool:
    """Returns whether a sum over microbatches of a part would round or overflow where the gradient's sum does not."""
    dtype = part.value.aval.dtype
    return dtype != value.aval.dtype or (dtype == np.float16 and any(step.operands for step in part.steps))


class _Outputs:
    """The outputs of a loop, reduced one after the other."""

    def __init__(self, body: Body, info: ScheduledLoop, split: bool):
        self.body = body
        self.num_microbatches = info.num_microbatches
        self._of_a_list, self._whole_sums = info.path is not None, info.whole_sums
        self._last_stage = info.schedule.num_stages - 1
        self.added: list[Node] = []  # further nodes for the body
        self.accumulators: list[Accumulator] = []
        self.after: list[compat.JaxprEqn] = []
        self._joins = Joins(body) if split else None
        self._types: dict[tuple[Operation, compat.Aval], compat.Aval] = {}  # types of accumulators
        self._steps: _Steps = {}
        self._appended: dict[Hashable, Atom] = {}
        self._shared: dict[Hashable, compat.Var] = {}  # accumulators that several outputs may use
        self._readers: dict[Atom, list[Node | None]] = defaultdict(list)
        for node in body.nodes:
            for v in node.inputs:
                self._readers[v].append(node)
        for v in body.outvars:
            if isinstance(v, compat.Var):
                self._readers[v].append(None)

    def reduce(self, value: Atom, operation: Operation, result: compat.Var) -> None:
        """Reduces one output."""
        n = self.num_microbatches
        source = self.body.source_in_loop(value)
        if source is None and value is not self.body.index:
            if not self._of_a_list:
                self.after += _same_every_time(self.body, value, operation, n, result)
                return
            # Calls with lists of other lengths run by this plan, so it is counted in the loop.
            value = self._append(Place(self._last_stage, "F"), lax.copy_p.bind, value)
        # A mean adds small integers in larger ones, where a sum that the user wrote wraps around.
        wraps = type(operation) is Mean and dtype_of_sum(value.aval.dtype) != value.aval.dtype
        is_cut = type(operation) in (Add, Mean) and not wraps and not self._whole_sums
        parts = self._summands(value) if is_cut else []
        if not parts:
            if self._joins and (join := self._joins.of(value, operation, n)):
                kept, operands, fun = join
                stacks = [self._accumulate(v, Concat(), place, is_shared=True) for v, place in kept]
                self.after += _bound(fun, [*stacks, *operands], result)
                return
            kind = "B" if source is not None and source.backward else "F"
            home = source.place if source is not None else None
            parts = [_Summand(value, home or Place(self._last_stage, kind), ())]
        totals = [(self._accumulate(p.value, operation, p.place, bool(p.steps)), p.steps) for p in parts]
        self.after += _combine(totals, operation, n, result)

    def _accumulate(self, value: Atom, operation: Operation, place: Place, is_shared: bool) -> compat.Var:
        """Makes an accumulator for one output, or one for all outputs that are made from it after the loop."""
        if is_shared and (value, operation, place) in self._shared:
            return self._shared[value, operation, place]
        key = operation, value.aval
        if key not in self._types:
            start = functools.partial(operation.init, value.aval, self.num_microbatches)
            self._types[key] = result_types(start)[0]
        result = compat.Var(self._types[key])
        self.accumulators.append(Accumulator(value, result, operation, place))
        if is_shared:
            self._shared[value, operation, place] = result
        return result

    def _summands(self, value: Atom) -> list[_Summand]:
        """Returns the summands of `value`, if they are in several stages or not in its own stage; else [].

        Sums are cut at their leaves. Linear equations between a leaf and the output run on the leaf, inside the
        loop, up to a padding (a slice's gradient) or a product with a value that is the same for all microbatches (a
        scale, the other factor of a low rank); these run once after the loop.
        """
        leaves = _leaves(self.body, value, self._readers, self._steps, self._of_a_list)
        if leaves is None:
            return []
        stages, source = {leaf.place.stage for leaf in leaves}, self.body.source_in_loop(value)
        home = source.place.stage if source and source.place else None
        if len(stages) < 2 and home in stages:
            return []
        parts: list[_Summand] = []
        for v, place, chain in sorted(leaves, key=lambda leaf: leaf.place.stage):
            later: list[_Linear] = []
            for step in chain:
                if (step.commutes and not any(s.operands or not s.waits for s in later)) or not (later or step.waits):
                    v = self._append(place, step.apply, v)
                else:
                    later.append(step)
            if parts and parts[-1].place == place and parts[-1].steps == tuple(later):
                parts[-1] = parts[-1]._replace(value=self._append(place, operator.add, parts[-1].value, v))
            else:
                parts.append(_Summand(v, place, tuple(later)))
        return [] if any(_is_coarse(part, value) for part in parts) else parts

    def _append(self, place: Place, fun: Callable, *atoms: Atom) -> Atom:
        """Adds `fun(*atoms)` to the body at `place`; returns its result."""
        key = place, fun, tuple(id(x) if isinstance(x, compat.Literal) else x for x in atoms)
        if key not in self._appended:
            eqns, (self._appended[key],) = trace_equations(fun, *atoms)
            self.added += [Node(eqn, backward=place.kind == "B", place=place) for eqn in eqns]
        return self._appended[key]


# A gradient that an equation reads, and the step from it to the result; None: the gradient itself is a summand.
_Step = tuple[Atom, _Linear | None]
_Steps = dict[tuple[Node, int], list[_Step] | None]
_Visit = tuple[Atom, tuple[_Linear, ...], Place | None]
_VISITS = 4  # for each node of the body, the most on the way to the summands of one output


def _leaves(
    body: Body, value: Atom, readers: Mapping[Atom, list[Node | None]], steps: _Steps, of_a_list: bool
) -> list[_Summand] | None:
    """Returns the summands of `value`; None if one has no place in the backward pass.

    In a list, microbatches of all shapes are added to the same accumulators, and have the same steps after the loop. So
    a sum is not cut behind a step that may differ between shapes.

    A summand belongs to the stage of the first equation on it alone: the gradient of a shared bias is reduced in the
    bias's stage, though the reduced value comes from the next stage. If another equation comes first, the summand
    belongs to the stage of the mark that the value passed, if that stage reads the value anyway.

    A value may be reached in as many ways as there are paths through the equations. A sum of too many is not cut.
    """
    leaves: list[_Summand | None] = []

    def add(v: Atom, chain: tuple[_Linear, ...], place: Place | None) -> None:
        leaves.append(_Summand(v, place, chain) if place and place.kind == "B" else None)

    def arrived(node: Node, v: Atom) -> Place | None:
        place = node.arrivals.get(v) if isinstance(v, compat.Var) else None
        if place is None or place.kind != "B":
            return None
        return place if any(r and r is not node and r.place == place for r in readers[v]) else None

    def visit(v: Atom, chain: tuple[_Linear, ...], place: Place | None) -> Iterator[_Visit]:
        """Adds a summand, or yields what to visit in its stead."""
        node = body.source_in_loop(v)
        is_shared = len(readers[v]) > 1 and v is not value
        if node is None or not node.place or (is_shared and not only_in_steps(v)):
            add(v, chain, node and node.place and (place or node.place))
        elif (found := steps_of(node, node.eqn.outvars.index(v))) is not None:
            for x, step in found:
                reduces = x.aval.size > v.aval.size and not node.eqn.primitive.multiple_results
                nearer = node.place if reduces and len(found) == 1 and step is not None else arrived(node, x)
                yield x, chain if step is None else (step, *chain), nearer
        else:
            add(v, chain, place or node.place)

    def steps_of(node: Node, result: int) -> list[_Step] | None:
        if (node, result) not in steps:
            steps[node, result] = _linear_steps(body, node.eqn, result, of_a_list)
        return steps[node, result]

    def waits(reader: Node | None, v: Atom) -> bool | None:
        """Returns whether a reader that `visit` passes is a step that waits; None for other readers."""
        found = steps_of(reader, 0) if reader else None
        if found is None:
            return None
        return any(step is not None and step.waits for operand, step in found if operand is v)

    def only_in_steps(v: Atom) -> bool:
        found = [waits(reader, v) for reader in readers[v]]
        return None not in found and any(found)

    ahead: list[_Visit] = [(value, (), None)]
    for _ in range(_VISITS * len(body.nodes)):
        if not ahead:
            break
        ahead += reversed(list(visit(*ahead.pop())))
    else:
        return None
    found = [leaf for leaf in leaves if leaf is not None]
    return found if len(found) == len(leaves) else None


# These run on a summand inside of the loop, if they have no other inputs.
_WITHIN = {
    "reshape", "transpose", "squeeze", "broadcast_in_dim", "reshard", "sharding_constraint", "copy", "copy_p",
    "reduce_sum", "neg", "convert_element_type", "mul", "div", "sub", "dynamic_slice", "gather",
    "complex", "real", "imag", "conj",
}  # fmt: skip


def _linear_steps(body: Body, eqn: compat.JaxprEqn, result: int, of_a_list: bool) -> list[_Step] | None:
    """Returns the gradients that an equation adds up to a result, each with its step; None if the result is no sum.

    An activation is no gradient, even if its factor in the equation is the same for all microbatches. In a list, a
    factor may be the number of a microbatch's tokens; such a step belongs in the loop.
    """
    name = eqn.primitive.name
    moving = [i for i, v in enumerate(eqn.invars) if v is body.index or body.source_in_loop(v) is not None]
    sources = [body.source_in_loop(eqn.invars[i]) for i in moving]
    if not moving or not all(source and source.backward for source in sources):
        return None
    summands = linear_in(eqn, moving[0])
    if not set(moving) <= set(summands) or not all(i in moving or _is_zeros(body, eqn.invars[i]) for i in summands):
        return None
    if name in ("add", "add_any"):
        return [(eqn.invars[i], None) for i in moving]
    others = [v for i, v in enumerate(eqn.invars) if i not in summands]
    operands = tuple(equations.variables(others))
    if name == "cumsum" or (operands and name in ("dynamic_slice", "gather")):
        return None  # after the loop, a cumsum rounds differently, and the others would slice a larger accumulator
    has_array = of_a_list and any(isinstance(v, compat.Literal) and v.aval.shape for v in others)  # of this shape alone
    waits = bool(operands) or has_array or name not in _WITHIN
    if of_a_list and waits and not _is_of_any_shape(eqn):
        return None

    def apply(position: int, x: jax.Array, *given: jax.Array) -> jax.Array:
        if (around := _room(eqn, position)) is not None:  # a pad runs at its reader, so that less is sent
            x = lax.expand_dims(x, [eqn.params["axis"]]) if name == "stack" else x
            return lax.pad(x, np.zeros((), x.dtype), [(low, high, 0) for low, high in around])
        values = dict(zip(operands, given, strict=True))

        def value(i: int, v: Atom) -> ArrayLike:
            if i in summands:
                return x if i == position else lax.full(v.aval.shape, 0, x.dtype, sharding=explicit_sharding(v.aval))
            return v.val if isinstance(v, compat.Literal) else values[v]

        out = eqn.primitive.bind(*(value(i, v) for i, v in enumerate(eqn.invars)), **eqn.params)
        return out[result] if eqn.primitive.multiple_results else out

    commutes = name in ("convert_element_type", "neg") or (of_a_list and name in ("mul", "div"))
    return [(eqn.invars[i], _Linear(functools.partial(apply, i), waits, commutes, operands)) for i in moving]


def _room(eqn: compat.JaxprEqn, position: int) -> list[tuple[int, int]] | None:
    """Returns the number of elements before and after an operand that is a piece of the result, along each axis."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "dynamic_update_slice":
        starts = [integer_of(v) for v in eqn.invars[2:]]
        if position != 1 or None in starts:
            return None
        room = [n - m for n, m in zip(shape, eqn.invars[1].aval.shape, strict=True)]
        return [(start := min(max(s or 0, 0), r), r - start) for s, r in zip(starts, room, strict=True)]
    if name not in ("concatenate", "stack"):
        return None
    axis = eqn.params["axis" if name == "stack" else "dimension"]
    sizes = [1 if name == "stack" else v.aval.shape[axis] for v in eqn.invars]
    around = [(0, 0)] * len(shape)
    around[axis] = sum(sizes[:position]), sum(sizes[position + 1 :])
    return around


def _is_of_any_shape(eqn: compat.JaxprEqn) -> bool:
    """Returns whether a step after a loop over a list is the same for all shapes of a microbatch: it takes one element
    of an axis, such as a layer of a stack, or puts one among zeros.
    """
    if eqn.primitive.name not in ("pad", "dynamic_update_slice", "rev", "slice"):
        return eqn.primitive.name in ("stack", "unstack")
    operand = eqn.invars[eqn.primitive.name == "dynamic_update_slice"].aval.shape
    return all(1 in (a, b) or a == b for a, b in zip(operand, eqn.outvars[0].aval.shape, strict=True))


def _is_zeros(body: Body, atom: Atom) -> bool:
    """Returns whether a value is a literal zero, or an array of zeros."""
    source = body.source(atom)
    if source is not None and source.eqn.primitive.name == "broadcast_in_dim":
        atom = source.eqn.invars[0]
    return equations.is_zero(atom)


def _combine(
    totals: Sequence[tuple[compat.Var, tuple[_Linear, ...]]],
    operation: Operation,
    num_microbatches: int,
    result: compat.Var,
) -> list[compat.JaxprEqn]:
    """Returns the equations after the loop: each part's steps, their sum in stage order, and the end of the reduction.
    Last steps that all parts share run once, on the sum.
    """
    if len(totals) == 1 and not totals[0][1]:
        total = totals[0][0]
        return _named(trace_operation(operation, "finish", (total,), num_microbatches), [total], result)
    chains = [later for _, later in totals]
    alike = 0
    while all(len(c) > alike and c[-1 - alike] is chains[0][-1 - alike] for c in chains):
        alike += 1
    if not any(step.operands for step in chains[0][len(chains[0]) - alike :]):
        alike = 0
    operands = list(dict.fromkeys(v for c in chains for step in c for v in step.operands))

    def fun(*args):
        values = dict(zip(operands, args[len(chains) :], strict=True))

        def applied(x: jax.Array, step: _Linear) -> jax.Array:
            return step.apply(x, *(values[v] for v in step.operands))

        pairs = zip(args[: len(chains)], chains, strict=True)
        parts = [functools.reduce(applied, c[: len(c) - alike], acc) for acc, c in pairs]
        total = functools.reduce(applied, chains[0][len(chains[0]) - alike :], functools.reduce(operator.add, parts))
        return operation.finish(total, num_microbatches)

    return _bound(fun, [*(v for v, _ in totals), *operands], result)


def _same_every_time(
    body: Body, value: Atom, operation: Operation, num_microbatches: int, result: compat.Var
) -> list[compat.JaxprEqn]:
    """Reduces an output that is the same for all microbatches, without a loop task (zeros stay zeros)."""
    if _is_zeros(body, value) and type(operation) in (Add, Mean):
        acc = functools.partial(operation.init, value.aval, num_microbatches)
        return _bound(lambda: operation.finish(acc(), num_microbatches), [], result)

    def repeat(x: jax.Array) -> jax.Array:
        start = operation.init(jax.typeof(x), num_microbatches)

        def update(i: jax.Array, acc: jax.Array) -> jax.Array:
            return operation.update(acc, x, jax.lax.convert_element_type(i, np.int32))  # the loop's index is weak

        acc = jax.lax.fori_loop(0, num_microbatches, update, start)
        return operation.finish(acc, num_microbatches)

    if isinstance(value, compat.Literal):
        constant = np.asarray(value.val, value.aval.dtype)
        return _bound(lambda: repeat(jax.numpy.asarray(constant)), [], result)
    return _bound(repeat, [value], result)


def _bound(fun: Callable, atoms: Sequence[Atom], result: compat.Var) -> list[compat.JaxprEqn]:
    """Returns the equations of `fun(*atoms)`, with its one result renamed to `result`."""
    return _named(trace_equations(fun, *atoms), atoms, result)


def _named(found: Equations, atoms: Sequence[Atom], result: compat.Var) -> list[compat.JaxprEqn]:
    """Returns equations on `atoms`, with their one result renamed to `result`."""
    eqns, (out,) = found
    if isinstance(out, compat.Literal) or out in atoms:
        return [*eqns, *copy_equations(out).named([result])]
    assert out.aval.shape == result.aval.shape, f"{out.aval} for {result.aval}"
    return Equations(eqns, [out]).named([result])
