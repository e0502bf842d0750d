"""Gives each output of a loop an accumulator, inside the task that makes it.

A gradient whose parts arise in several stages (a tied, stacked or shared parameter) is accumulated in parts:
its sum is cut at the leaves, so that no gradient crosses groups once a microbatch.
"""

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node, Place
from mpmd.graphs.scheduled_loop import ScheduledLoop
from mpmd.ops.reductions import Add, Concat, Mean, Operation, result_types
from mpmd.partition.joint_outputs import Joins
from mpmd.tracing.folding import integer_of
from mpmd.tracing.new_equations import Atom, Equations, copy_equations, trace_equations, trace_operation


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """One reduced value of the loop, built up inside the task that produces it.

    Attributes:
      value: the variable of the loop's body that is accumulated, at `place`.
      result: the variable, outside of the loop, of the last accumulator.
    """

    value: Atom
    result: compat.Var
    operation: Operation
    place: Place


def reduce_outputs(
    body: Body, eqn: compat.JaxprEqn, info: ScheduledLoop, split: bool
) -> tuple[Body, list[Accumulator], list[compat.JaxprEqn]]:
    """Makes an accumulator per output, or per part of one that arises in several stages.

    Args:
      body: the body, in which all that is not clonable has its place.
      split: whether the schedule has `I` and `W` tasks instead of (or beside) `B`.

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
    """A linear equation between a summand and the gradient that it is part of.

    Attributes:
      apply: the equation, on a value that may have another shape (before a padding that came first), and on `operands`.
      waits: whether it runs after the loop: it puts a slice's gradient among zeros, moves rows, or reads `operands`.
      commutes: whether it may as well run before such a step.
      operands: what it reads besides, which no microbatch changes.
    """

    apply: Callable[..., jax.Array]
    waits: bool = False
    commutes: bool = False
    operands: tuple[compat.Var, ...] = ()


class _Summand(NamedTuple):
    """One summand of a gradient: its value in the loop, its place, and the steps from it to the gradient."""

    value: Atom
    place: Place
    steps: tuple[_Linear, ...]


class _Outputs:
    """The outputs of a loop, reduced one after the other.

    Attributes:
      added: the nodes that the body gets besides.
      accumulators, after: as `reduce_outputs` returns them.
    """

    def __init__(self, body: Body, info: ScheduledLoop, split: bool):
        self.body = body
        self.num_microbatches = info.num_microbatches
        self._of_a_list = info.path is not None
        self._last_stage = info.schedule.num_stages - 1
        self.added: list[Node] = []
        self.accumulators: list[Accumulator] = []
        self.after: list[compat.JaxprEqn] = []
        self._joins = Joins(body) if split else None
        self._types: dict[tuple[Operation, Any], Any] = {}  # of accumulators
        self._steps: _Steps = {}
        self._appended: dict[Any, Atom] = {}
        self._shared: dict[Any, compat.Var] = {}  # accumulators of what several outputs are made of
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
            self.after += _same_every_time(self.body, value, operation, n, result)
            return
        parts = self._summands(value) if type(operation) in (Add, Mean) else []
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
        """An accumulator of one output, or one for all outputs that are made of it after the loop."""
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
        """The summands of `value` in several stages (or in another one than it), or [] if it arises in one.

        Sums are cut at their leaves. Linear equations between a leaf and the output run on the leaf, inside the
        loop, up to a padding (a slice's gradient) or a product with what no microbatch changes (a scale, the other
        factor of a low rank); these run once after the loop.
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
            first = next((i for i, step in enumerate(chain) if step.waits), len(chain))
            commute = all(step.commutes or not step.operands for step in chain[first:])
            for step in [*chain[:first], *(s for s in chain[first:] if s.commutes and commute)]:
                v = self._append(place, step.apply, v)
            later = tuple(s for s in chain[first:] if not (s.commutes and commute))
            if parts and parts[-1].place == place and parts[-1].steps == later:
                parts[-1] = _Summand(self._append(place, operator.add, parts[-1].value, v), place, later)
            else:
                parts.append(_Summand(v, place, later))
        return parts

    def _append(self, place: Place, fun: Callable, *atoms: Atom) -> Atom:
        """Adds `fun(*atoms)` to the body at `place`; returns its result."""
        key = place, fun, atoms
        if key not in self._appended:
            eqns, (self._appended[key],) = trace_equations(fun, *atoms)
            self.added += [Node(eqn, backward=place.kind == "B", place=place) for eqn in eqns]
        return self._appended[key]


_Steps = dict[Node, tuple[Atom, _Linear] | None]


def _leaves(
    body: Body, value: Atom, readers: Mapping[Atom, list[Node | None]], steps: _Steps, of_a_list: bool
) -> list[_Summand] | None:
    """The summands of `value`; None if one has no place in the backward pass.

    Of a list, microbatches of other shapes are added to the same accumulators and go through the same steps after the
    loop: sums are not cut behind what may be another step for another shape.

    A summand belongs where the first equation on it alone runs: the gradient of a shared bias is reduced in
    the bias's stage, though the value that is reduced comes from the next one. If the sum comes first, that stage
    is the one of the mark through which the value came, if it is read there anyhow.
    """
    leaves: list[_Summand | None] = []

    def add(v: Atom, chain: tuple[_Linear, ...], place: Place | None) -> None:
        leaves.append(_Summand(v, place, chain) if place and place.kind == "B" else None)

    def arrived(node: Node, v: Atom) -> Place | None:
        place = node.arrivals.get(v) if isinstance(v, compat.Var) else None
        if place is None or place.kind != "B":
            return None
        return place if any(r and r is not node and r.place == place for r in readers[v]) else None

    def walk(v: Atom, chain: tuple[_Linear, ...], first: bool, place: Place | None) -> None:
        node = body.source_in_loop(v)
        is_shared = len(readers[v]) > 1 and not first
        if node is None or not node.place or (is_shared and not only_in_steps(v)):
            add(v, chain, node and node.place and (place or node.place))
        elif _is_sum(node):
            for x in node.eqn.invars:
                walk(x, chain, False, arrived(node, x))
        elif node.eqn.primitive.name == "stack" or (node.eqn.primitive.name == "concatenate" and not of_a_list):
            for x, step in zip(node.eqn.invars, _joining(node.eqn), strict=True):
                walk(x, (step, *chain), False, arrived(node, x))
        elif takes_part(node.eqn):
            walk(node.eqn.invars[0], (_split_off(node.eqn, node.eqn.outvars.index(v)), *chain), False, None)
        elif (found := step_of(node)) is not None:
            operand, step = found
            reduces = operand.aval.size > node.eqn.outvars[0].aval.size
            walk(operand, (step, *chain), False, node.place if reduces else None)
        else:
            add(v, chain, place or node.place)

    def step_of(node: Node) -> tuple[Atom, _Linear] | None:
        if node not in steps:
            step = _linear_step(body, node.eqn, of_a_list)
            operands = node.eqn.invars[node.eqn.primitive.name == "dynamic_update_slice" :]
            operand = next((v for v in operands if isinstance(v, compat.Var)), None)
            found = (operand, step) if step and operand else None
            if of_a_list:
                steps[node] = found if _is_of_any_shape(node.eqn) else None
            else:
                steps[node] = found or _product(body, node.eqn)
        return steps[node]

    def waits(reader: Node | None, v: Atom) -> bool | None:
        """Of a reader that `walk` passes: whether it is a step that waits. None of another one."""
        if reader is None:
            return None
        if takes_part(reader.eqn) or _is_sum(reader):
            return not _is_sum(reader)
        step = step_of(reader)
        return step[1].waits if step and step[0] is v else None

    def takes_part(eqn: compat.JaxprEqn) -> bool:
        return eqn.primitive.name == "unstack" or (eqn.primitive.name == "split" and not of_a_list)

    def only_in_steps(v: Atom) -> bool:
        found = [waits(reader, v) for reader in readers[v]]
        return None not in found and any(found)

    walk(value, (), True, None)
    found = [leaf for leaf in leaves if leaf is not None]
    return found if len(found) == len(leaves) else None


def _is_of_any_shape(eqn: compat.JaxprEqn) -> bool:
    """Whether a linear equation between a summand and a gradient is the same for all shapes of a microbatch: what it
    takes, or puts among zeros, is one element of an axis, as a layer of a stack is.
    """
    if eqn.primitive.name not in ("pad", "dynamic_update_slice", *_ROWS):
        return True
    operand = eqn.invars[eqn.primitive.name == "dynamic_update_slice"].aval.shape
    return all(1 in (a, b) or a == b for a, b in zip(operand, eqn.outvars[0].aval.shape, strict=True))


def _is_sum(node: Node) -> bool:
    return node.backward and node.eqn.primitive.name in ("add_any", "add")


_COMMUTES_WITH_PAD = {"convert_element_type", "neg"}
_ROWS = {"rev", "slice"}  # they move or take rows: with them goes what was padded before
_SHAPES = {
    "reshape", "transpose", "squeeze", "broadcast_in_dim", "reshard", "sharding_constraint", "copy", "reduce_sum",
    "expand_dims",
}  # fmt: skip


def _linear_step(body: Body, eqn: compat.JaxprEqn, of_a_list: bool) -> _Linear | None:
    """The equation as a step, or None if it is not linear in one operand. A factor may be the tokens of a microbatch of
    a list; then it belongs in the loop.
    """
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        starts: list = [integer_of(v) for v in eqn.invars[2:]]
        if not _is_zeros(body, eqn.invars[0]) or any(s is None for s in starts):
            return None
        room = [n - m for n, m in zip(eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)]
        config = [(min(max(s, 0), r), r - min(max(s, 0), r), 0) for s, r in zip(starts, room, strict=True)]
        return _Linear(lambda x: jax.lax.pad(x, np.zeros((), x.dtype), config), waits=True)
    if name == "pad":
        if not _is_zeros(body, eqn.invars[1]):
            return None
        return _Linear(lambda x: eqn.primitive.bind(x, np.zeros((), x.dtype), **eqn.params), waits=True)
    if name == "mul" and isinstance(eqn.invars[0], compat.Literal):
        factor = eqn.invars[0].val
        return _Linear(lambda x: eqn.primitive.bind(factor, x, **eqn.params), commutes=of_a_list)
    if name in ("mul", "div"):
        if not isinstance(eqn.invars[1], compat.Literal) or isinstance(eqn.invars[0], compat.Literal):
            return None
    elif name == "convert_element_type":
        if not all(jax.dtypes.issubdtype(v.aval.dtype, np.floating) for v in (eqn.invars[0], eqn.outvars[0])):
            return None
    elif name in _ROWS:
        return _Linear(lambda x: eqn.primitive.bind(x, **eqn.params), waits=True)
    elif name != "neg" and name not in _SHAPES:
        return None
    rest = [v.val for v in eqn.invars[1:]]
    commutes = name in _COMMUTES_WITH_PAD or (of_a_list and name in ("mul", "div"))
    return _Linear(lambda x: eqn.primitive.bind(x, *rest, **eqn.params), commutes=commutes)


def _split_off(eqn: compat.JaxprEqn, position: int) -> _Linear:
    """What `split` or `unstack` gives at a position."""
    return _Linear(lambda x: eqn.primitive.bind(x, **eqn.params)[position], waits=True)


def _product(body: Body, eqn: compat.JaxprEqn) -> tuple[Atom, _Linear] | None:
    """A product of a gradient and a value (or a mask) that no microbatch changes: the gradient, and the step on it."""
    moving = [i for i, v in enumerate(eqn.invars) if v is body.index or body.source_in_loop(v) is not None]
    name = eqn.primitive.name
    if len(moving) != 1:
        return None
    (position,) = moving
    gradient = body.source_in_loop(eqn.invars[position])
    if gradient is None or not gradient.backward:  # an activation, under a gradient that no microbatch changes
        return None
    if name == "select_n" and len(eqn.invars) == 3 and position:
        other, mask = eqn.invars[3 - position], eqn.invars[0]
        if not _is_zeros(body, other) or isinstance(mask, compat.Literal):
            return None

        def apply(x, y):
            zeros = jax.numpy.zeros_like(x)
            return eqn.primitive.bind(y, *((x, zeros) if position == 1 else (zeros, x)))

        return eqn.invars[position], _Linear(apply, waits=True, operands=(mask,))
    zeros = body.source(eqn.invars[0])
    if name == "scatter-add" and position == 2 and zeros is not None and _is_zeros(body, eqn.invars[0]):
        indices = eqn.invars[1]

        def scatter(x, *given):
            whole = zeros.eqn.primitive.bind(zeros.eqn.invars[0].val, **zeros.eqn.params)
            return eqn.primitive.bind(whole, given[0] if given else indices.val, x, **eqn.params)

        return eqn.invars[2], _Linear(scatter, waits=True, operands=tuple(equations.variables([indices])))
    if name not in ("mul", "div", "dot_general") or (name == "div" and position):
        return None
    other = eqn.invars[1 - position]
    if isinstance(other, compat.Literal):
        return None

    def apply(x, y):
        return eqn.primitive.bind(*((x, y) if position == 0 else (y, x)), **eqn.params)

    return eqn.invars[position], _Linear(apply, waits=True, operands=(other,))


def _joining(eqn: compat.JaxprEqn) -> Iterator[_Linear]:
    """What a concatenation or a stack does to each of its operands: it stands among zeros."""
    is_stack, shape = eqn.primitive.name == "stack", eqn.outvars[0].aval.shape
    axis, offset = eqn.params["axis" if is_stack else "dimension"], 0

    def pad(offset, x):
        x = jax.lax.expand_dims(x, (axis,)) if is_stack else x
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (offset, shape[axis] - offset - x.shape[axis], 0)
        return jax.lax.pad(x, np.zeros((), x.dtype), config)

    for x in eqn.invars:
        yield _Linear(functools.partial(pad, offset), waits=True)
        offset += 1 if is_stack else x.aval.shape[axis]


def _is_zeros(body: Body, atom: Atom) -> bool:
    """Whether a value is a literal zero, or an array of one."""
    source = body.source(atom)
    if source is not None and source.eqn.primitive.name == "broadcast_in_dim":
        atom = source.eqn.invars[0]
    return isinstance(atom, compat.Literal) and not np.any(atom.val)


def _combine(
    totals: Sequence[tuple[compat.Var, tuple[_Linear, ...]]],
    operation: Operation,
    num_microbatches: int,
    result: compat.Var,
) -> list[compat.JaxprEqn]:
    """After the loop: pads each part, sums them in stage order, finishes the reduction. Steps that end all parts alike
    run once, on the sum.
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
    """An output that no microbatch changes: reduced without a loop task (zeros stay zeros)."""
    if _is_zeros(body, value) and type(operation) in (Add, Mean):
        acc = functools.partial(operation.init, value.aval, num_microbatches)
        return _bound(lambda: operation.finish(acc(), num_microbatches), [], result)

    def repeat(x: jax.Array) -> Any:
        start = operation.init(jax.typeof(x), num_microbatches)
        acc = jax.lax.fori_loop(0, num_microbatches, lambda i, acc: operation.update(acc, x, i), start)
        return operation.finish(acc, num_microbatches)

    if isinstance(value, compat.Literal):
        constant = np.asarray(value.val, value.aval.dtype)
        return _bound(lambda: repeat(jax.numpy.asarray(constant)), [], result)
    return _bound(repeat, [value], result)


def _bound(fun: Callable, atoms: Sequence[Atom], result: compat.Var) -> list[compat.JaxprEqn]:
    """The equations of `fun(*atoms)`, whose one result gets the name `result`."""
    return _named(trace_equations(fun, *atoms), atoms, result)


def _named(found: Equations, atoms: Sequence[Atom], result: compat.Var) -> list[compat.JaxprEqn]:
    """Equations on `atoms`, whose one result gets the name `result`."""
    eqns, (out,) = found
    if isinstance(out, compat.Literal) or out in atoms:
        return [*eqns, *copy_equations(out).named([result])]
    return Equations(eqns, [out]).named([result])
