"""What a loop returns: an accumulator for each output, inside the task that makes it.

A gradient whose parts arise in several stages (a tied, stacked or shared parameter) is accumulated in parts:
its sum is cut at the leaves, so that no gradient crosses groups once a microbatch.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.ops.reductions import Add, Concat, Mean, Operation, result_types
from mpmd.ops.treduce import LoopInfo
from mpmd.partition.graph import Body, Node, Place
from mpmd.partition.joint_outputs import Joins
from mpmd.tracing.trace import copy_equations, trace_equations


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """One reduced value of the loop, built up inside the task that produces it.

    Attributes:
      value: the variable of the loop's body that is accumulated, at `place`.
      result: the variable, outside of the loop, of the last accumulator.
    """

    value: compat.Var | compat.Literal
    result: compat.Var
    operation: Operation
    place: Place


# --- outputs --------------------------------------------------------------------------------------


def reduce_outputs(body: Body, eqn, info: LoopInfo, num_stages: int, split: bool):
    """An accumulator per output (or per part of one that arises in several stages), and the equations after
    the loop that make the loop's results from them. `split`: see `loop.partition_loop`.
    """
    accumulators: list[Accumulator] = []
    after: list[compat.JaxprEqn] = []
    readers: dict[compat.Var, list[Node | None]] = defaultdict(list)
    for node in body.nodes:
        for v in body.inputs(node):
            readers[v].append(node)
    for v in body.outvars:
        if not isinstance(v, compat.Literal):
            readers[v].append(None)
    joins = Joins(body) if split else None
    stacks: dict[compat.Var, compat.Var] = {}

    def accumulate(value, operation, place):
        final = compat.new_var(_accumulated(value.aval, operation, info.num_microbatches))
        accumulators.append(Accumulator(value, final, operation, place))
        return final

    for value, operation, result in zip(body.outvars, info.operations, eqn.outvars, strict=True):
        if isinstance(result, compat.DropVar):
            continue
        source = body.source(value)
        is_index = value is body.index
        if not is_index and (source is None or not source.per_microbatch):
            after += _same_every_time(body, value, operation, info.num_microbatches, result)
            continue
        parts = _parts(body, value, readers) if type(operation) in (Add, Mean) else []
        if len({p.place.stage for p in parts}) < 2:
            if joins and (join := joins.of(value)):
                for v, place in join.parts:
                    if v not in stacks:
                        stacks[v] = accumulate(v, Concat(), place)
                atoms = [*(stacks[v] for v, _ in join.parts), *join.operands]
                after += _bound(join.reduced(operation, info.num_microbatches), atoms, result)
                continue
            place = Place(num_stages - 1, "F") if is_index else _home(source, num_stages)
            parts = [_Part(value, place, ())]
        totals = [(accumulate(part.value, operation, part.place), part.later) for part in parts]
        after += _combine(totals, operation, info.num_microbatches, result)
    return accumulators, after


def _home(source, num_stages) -> Place:
    return source.place or Place(num_stages - 1, "B" if source.backward else "F")


def _accumulated(aval, operation, num_microbatches):
    return result_types(functools.partial(operation.init, aval, num_microbatches))[0]


class _Step(NamedTuple):
    """A linear equation between a summand and the gradient that it is part of.

    Attributes:
      apply: the equation, on a value of perhaps another shape (before a padding that came first).
      pads: whether it puts a slice's gradient among zeros.
      commutes: whether it may as well run before such a padding.
    """

    apply: Callable
    pads: bool = False
    commutes: bool = False


class _Part(NamedTuple):
    """One summand of a gradient: its value in the loop, where, and what is done with it after the loop."""

    value: compat.Var | compat.Literal
    place: Place
    later: tuple[_Step, ...]


def _parts(body: Body, value, readers) -> list[_Part]:
    """The summands of `value` in several stages, or [] if it arises in one.

    Sums are cut at their leaves. Linear equations between a leaf and the output run on the leaf, inside the
    loop, up to a padding; the padding (a slice's gradient) runs once after the loop.
    """
    leaves = _leaves(body, value, readers)
    if leaves is None:
        return []
    if len({place.stage for _, _, place in leaves}) < 2:
        return []
    parts: list[_Part] = []
    for v, chain, place in sorted(leaves, key=lambda leaf: leaf[2].stage):
        pads = next((i for i, step in enumerate(chain) if step.pads), len(chain))
        for step in [*chain[:pads], *(s for s in chain[pads:] if s.commutes)]:
            v = _append(body, place, step.apply, v)
        later = tuple(s for s in chain[pads:] if not s.commutes)
        if not later and parts and parts[-1].place == place and not parts[-1].later:
            parts[-1] = _Part(_append(body, place, lambda a, b: a + b, parts[-1].value, v), place, ())
        else:
            parts.append(_Part(v, place, later))
    return parts


def _leaves(body: Body, value, readers):
    """The summands of `value`: (variable, the steps from it to `value`, its place); None if one has no place in
    the backward pass.

    A summand belongs where the first equation on it alone runs: the gradient of a shared bias is reduced in
    the bias's stage, though the value that is reduced comes from the next one. If the sum comes first, that stage
    is the one of the mark through which the value came, if it is read there anyhow.
    """
    leaves: list[tuple[Any, tuple[_Step, ...], Any]] = []

    def arrived(node, v):
        place = None if isinstance(v, compat.Literal) else node.arrivals.get(v)
        if place is None or place.kind != "B":
            return None
        return place if any(r and r is not node and r.place == place for r in readers[v]) else None

    def walk(v, chain, first, place):
        node = body.source(v)
        if node is None or not node.per_microbatch or not node.place or (len(readers[v]) > 1 and not first):
            made = node.place if node is not None and node.per_microbatch else None
            leaves.append((v, chain, made and (place or made)))
        elif node.eqn.primitive.name == "add_any":
            for x in node.eqn.invars:
                walk(x, chain, False, arrived(node, x))
        elif node.eqn.primitive.name == "concatenate":
            offset = 0
            for x in node.eqn.invars:
                walk(x, (_concatenation(node.eqn, offset), *chain), False, arrived(node, x))
                offset += x.aval.shape[node.eqn.params["dimension"]]
        elif (step := _linear_step(body, node.eqn)) is not None:
            walk(_operand(node.eqn), (step, *chain), False, node.place)
        else:
            leaves.append((v, chain, place or node.place))

    walk(value, (), True, None)
    return leaves if all(place and place.kind == "B" for _, _, place in leaves) else None


_COMMUTES_WITH_PAD = {"convert_element_type", "neg"}
_SHAPES = {
    "reshape", "transpose", "squeeze", "broadcast_in_dim", "reshard", "sharding_constraint", "copy", "reduce_sum",
    "expand_dims",
}  # fmt: skip


def _linear_step(body: Body, eqn) -> _Step | None:
    """The equation as a step, or None if it is not linear in one operand."""
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        zeros = body.source(eqn.invars[0])
        starts: list = [body.constant(v) for v in eqn.invars[2:]]
        if zeros is None or not _is_zeros(zeros.eqn) or any(s is None for s in starts):
            return None
        room = [n - m for n, m in zip(eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)]
        config = [(min(max(s, 0), r), r - min(max(s, 0), r), 0) for s, r in zip(starts, room, strict=True)]
        return _Step(lambda x: jax.lax.pad(x, np.zeros((), x.dtype), config), pads=True)
    if name == "pad":
        if not isinstance(eqn.invars[1], compat.Literal) or np.any(eqn.invars[1].val):
            return None
        return _Step(lambda x: eqn.primitive.bind(x, np.zeros((), x.dtype), **eqn.params), pads=True)
    if name in ("mul", "div"):
        if not isinstance(eqn.invars[1], compat.Literal) or isinstance(eqn.invars[0], compat.Literal):
            return None
    elif name == "convert_element_type":
        if not all(jax.dtypes.issubdtype(v.aval.dtype, np.floating) for v in (eqn.invars[0], eqn.outvars[0])):
            return None
    elif name != "neg" and name not in _SHAPES:
        return None
    rest = [v.val for v in eqn.invars[1:]]
    return _Step(lambda x: eqn.primitive.bind(x, *rest, **eqn.params), commutes=name in _COMMUTES_WITH_PAD)


def _concatenation(eqn, offset: int) -> _Step:
    """What a concatenation does to the operand at `offset`: it stands among zeros."""
    shape, axis = eqn.outvars[0].aval.shape, eqn.params["dimension"]

    def pad(x):
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (offset, shape[axis] - offset - x.shape[axis], 0)
        return jax.lax.pad(x, np.zeros((), x.dtype), config)

    return _Step(pad, pads=True)


def _is_zeros(eqn) -> bool:
    return (
        eqn.primitive.name == "broadcast_in_dim"
        and isinstance(eqn.invars[0], compat.Literal)
        and not np.any(eqn.invars[0].val)
    )


def _operand(eqn):
    return eqn.invars[1] if eqn.primitive.name == "dynamic_update_slice" else eqn.invars[0]


def _append(body: Body, place: Place, fun, *atoms):
    """Adds `fun(*atoms)` to the body at `place`; returns its variable."""
    eqns, (out,) = trace_equations(fun, *atoms)
    for eqn in eqns:
        node = Node(eqn, backward=place.kind == "B", place=place)
        body.nodes.append(node)
        body.producer.update((v, node) for v in eqn.outvars)
    return out


def _combine(totals, operation, num_microbatches, result):
    """After the loop: pad each part, sum them in stage order, finish the reduction."""

    def fun(*accs):
        parts = []
        for acc, (_, later) in zip(accs, totals, strict=True):
            for step in later:
                acc = step.apply(acc)
            parts.append(acc)
        return operation.finish(functools.reduce(lambda a, b: a + b, parts), num_microbatches)

    return _bound(fun, [v for v, _ in totals], result)


def _same_every_time(body, value, operation, num_microbatches, result):
    """An output that no microbatch changes: reduced without a loop task (zeros stay zeros)."""
    source = body.source(value)
    zero = isinstance(value, compat.Literal) and not np.any(value.val)
    if (zero or (source and _is_zeros(source.eqn))) and type(operation) in (Add, Mean):
        aval = value.aval

        def zeros():
            acc = operation.init(aval, num_microbatches)
            return operation.finish(acc, num_microbatches)

        return _bound(zeros, [], result)

    def repeat(x):
        def step(i, acc):
            return operation.update(acc, x, i)

        acc = jax.lax.fori_loop(0, num_microbatches, step, operation.init(jax.typeof(x), num_microbatches))
        return operation.finish(acc, num_microbatches)

    if isinstance(value, compat.Literal):
        constant = np.asarray(value.val, value.aval.dtype)
        return _bound(lambda: repeat(jax.numpy.asarray(constant)), [], result)
    return _bound(repeat, [value], result)


def _bound(fun, atoms, result):
    """Equations of `fun(*atoms)` whose outcome is the variable `result`."""
    eqns, (out,) = trace_equations(fun, *atoms)
    if isinstance(out, compat.Literal) or out in atoms:
        more, (out2,) = copy_equations(out)
        eqns, out = [*eqns, *more], out2
    return [e.replace(outvars=[result if v is out else v for v in e.outvars]) for e in eqns]
