"""What a loop returns: an accumulator for each output, inside the task that makes it.

A gradient whose parts arise in several stages (a tied, stacked or shared parameter) is accumulated in parts:
its sum is cut at the leaves, so that no gradient crosses groups once a microbatch.
"""

import dataclasses
import functools
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.markers import Add, LoopInfo, Mean, Operation
from mpmd.placing import Body, Node, Place
from mpmd.trace import trace_equations


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """One reduced value of the loop, built up inside the task that produces it.

    Attributes:
      value: the variable of the loop's body that is accumulated, at `place`.
      result: the variable, outside of the loop, of the last accumulator.
    """

    value: compat.Var | compat.Literal
    result: compat.Var
    operation: type[Operation]
    place: Place


# --- outputs --------------------------------------------------------------------------------------


def reduce_outputs(body: Body, eqn, info: LoopInfo, num_stages: int):
    """An accumulator per output (or per part of one that arises in several stages), and the equations after
    the loop that make the loop's results from them.
    """
    accumulators: list[Accumulator] = []
    after: list[compat.JaxprEqn] = []
    uses = defaultdict(int)
    for node in body.nodes:
        for v in node.eqn.invars:
            if not isinstance(v, compat.Literal):
                uses[v] += 1
    for v in body.outvars:
        if not isinstance(v, compat.Literal):
            uses[v] += 1
    for value, operation, result in zip(body.outvars, info.operations, eqn.outvars, strict=True):
        if isinstance(result, compat.DropVar):
            continue
        source = body.source(value)
        is_index = value is body.index
        if not is_index and (source is None or not source.per_microbatch):
            after += _same_every_time(body, value, operation, info.num_microbatches, result)
            continue
        parts = _parts(body, value, uses) if issubclass(operation, Add) else []
        if len({p.place.stage for p in parts}) < 2:
            place = Place(num_stages - 1, "F") if is_index else _home(source, num_stages)
            parts = [_Part(value, place, ())]
        totals = []
        for part in parts:
            final = compat.new_var(_accumulated(part.value.aval, operation, info.num_microbatches))
            accumulators.append(Accumulator(part.value, final, operation, part.place))
            totals.append((final, part.later))
        after += _combine(totals, operation, info.num_microbatches, result)
    return accumulators, after


def _home(source, num_stages) -> Place:
    return source.place or Place(num_stages - 1, "B" if source.backward else "F")


def _accumulated(aval, operation, num_microbatches):
    return compat.shaped_array(jax.eval_shape(functools.partial(operation.init, aval, num_microbatches)))


class _Part(NamedTuple):
    """One summand of a gradient: its value in the loop, where, and what is done with it after the loop."""

    value: compat.Var | compat.Literal
    place: Place
    later: tuple[compat.JaxprEqn, ...]


def _parts(body: Body, value, uses) -> list[_Part]:
    """The summands of `value` in several stages, or [] if it arises in one.

    Sums are cut at their leaves. Linear equations between a leaf and the output run on the leaf, inside the
    loop, up to a padding; the padding (a slice's gradient) runs once after the loop.
    """
    leaves: list[tuple[compat.Var, tuple]] = []

    def walk(v, chain, first):
        node = body.source(v)
        if node is None or not node.per_microbatch or not node.place or (uses[v] > 1 and not first):
            leaves.append((v, chain))
        elif node.eqn.primitive.name == "add_any":
            for x in node.eqn.invars:
                walk(x, chain, False)
        elif _is_linear(body, node.eqn):
            walk(_operand(node.eqn), (node.eqn, *chain), False)
        else:
            leaves.append((v, chain))

    walk(value, (), True)
    nodes: list = [body.source(v) if not isinstance(v, compat.Literal) else None for v, _ in leaves]
    if any(n is None or not n.per_microbatch or n.place is None or n.place.kind != "B" for n in nodes):
        return []
    if len({n.place.stage for n in nodes}) < 2:
        return []
    parts: list[_Part] = []
    for (v, chain), node in sorted(zip(leaves, nodes, strict=True), key=lambda x: x[1].place.stage):
        pads = next((i for i, e in enumerate(chain) if e.primitive.name in _PADS), len(chain))
        now = [*chain[:pads], *(e for e in chain[pads:] if e.primitive.name in _COMMUTES_WITH_PAD)]
        later = tuple(e for e in chain[pads:] if e.primitive.name not in _COMMUTES_WITH_PAD)
        for e in now:
            v = _append(body, node.place, lambda x, e=e: _apply(e, x), v)
        if not later and parts and parts[-1].place == node.place and not parts[-1].later:
            parts[-1] = _Part(_append(body, node.place, lambda a, b: a + b, parts[-1].value, v), node.place, ())
        else:
            parts.append(_Part(v, node.place, later))
    return parts


_PADS = {"pad", "dynamic_update_slice"}
_COMMUTES_WITH_PAD = {"convert_element_type", "neg"}
_SHAPES = {
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "reshard",
    "sharding_constraint",
    "copy",
    "reduce_sum",
    "expand_dims",
}


def _is_linear(body, eqn) -> bool:
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        zeros = body.source(eqn.invars[0])
        return zeros is not None and _is_zeros(zeros.eqn) and all(isinstance(v, compat.Literal) for v in eqn.invars[2:])
    if name == "pad":
        return isinstance(eqn.invars[1], compat.Literal) and not np.any(eqn.invars[1].val)
    if name in ("mul", "div"):
        return isinstance(eqn.invars[1], compat.Literal) and not isinstance(eqn.invars[0], compat.Literal)
    if name == "convert_element_type":
        return all(jax.dtypes.issubdtype(v.aval.dtype, np.floating) for v in (eqn.invars[0], eqn.outvars[0]))
    return name == "neg" or name in _SHAPES


def _is_zeros(eqn) -> bool:
    return (
        eqn.primitive.name == "broadcast_in_dim"
        and isinstance(eqn.invars[0], compat.Literal)
        and not np.any(eqn.invars[0].val)
    )


def _operand(eqn):
    return eqn.invars[1] if eqn.primitive.name == "dynamic_update_slice" else eqn.invars[0]


def _apply(eqn, x):
    """The linear equation `eqn` on a value of perhaps another shape (before a padding that came first)."""
    if eqn.primitive.name == "dynamic_update_slice":
        zeros = jax.lax.full(eqn.outvars[0].aval.shape, 0, x.dtype)
        return jax.lax.dynamic_update_slice(zeros, x, [v.val for v in eqn.invars[2:]])
    rest = [v.val for v in eqn.invars[1:]]
    if eqn.primitive.name == "pad":
        rest = [np.zeros((), x.dtype)]
    return eqn.primitive.bind(x, *rest, **eqn.params)


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
            for e in later:
                acc = _apply(e, acc)
            parts.append(acc)
        return operation.finish(functools.reduce(lambda a, b: a + b, parts), num_microbatches)

    return _bound(fun, [v for v, _ in totals], result)


def _same_every_time(body, value, operation, num_microbatches, result):
    """An output that no microbatch changes: reduced without a loop task (zeros stay zeros)."""
    source = body.source(value)
    zero = isinstance(value, compat.Literal) and not np.any(value.val)
    if (zero or (source and _is_zeros(source.eqn))) and issubclass(operation, Add):
        aval = value.aval

        def zeros():
            acc = operation.init(aval, num_microbatches)
            return operation.finish(acc, num_microbatches) if issubclass(operation, Mean) else acc

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
        constant = np.asarray(out.val, out.aval.dtype) if isinstance(out, compat.Literal) else None
        operands = [] if isinstance(out, compat.Literal) else [out]
        more, (out2,) = trace_equations(lambda *x: jax.lax.copy_p.bind(x[0] if x else constant), *operands)
        eqns, out = [*eqns, *more], out2
    return [e.replace(outvars=[result if v is out else v for v in e.outvars]) for e in eqns]
