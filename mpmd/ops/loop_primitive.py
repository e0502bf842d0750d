"""The loop over microbatches, as a JAX primitive that lowers to a `lax.scan`.

So a step that uses it runs under plain `jax.jit` unchanged; `mpmd.jit` finds the loop in the traced step and makes a
pipeline from it.
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpmd import _jax_compat as compat
from mpmd.ops import lists
from mpmd.ops.reductions import Operation, result_types
from mpmd.users_frame import users_frame
from scheduler import Schedule
from scheduler.base.texts import counted

# A loop outside of any jitted function that takes longer to compile is a mistake.
_SLOW_S = 2.0
treduce_p = compat.Primitive("treduce")
treduce_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class LoopInfo:
    """The parameters of a microbatch loop's equation, except its body."""

    schedule: Schedule | str | None  # as the user gave it; None for a loop without a pipeline
    num_microbatches: int
    operations: tuple[Operation, ...]
    cuts: tuple[int, ...] | None = None  # layers of each stage, given or chosen; None if marks alone end stages
    doubt: str | None = dataclasses.field(default=None, compare=False)  # a microbatch that may be a row of a batch
    path: lists.Path | None = None  # of the argument that is the list of its microbatches, if there is one
    whole_sums: bool = False  # whether a gradient from several stages is added up for each microbatch

    def __str__(self):
        operations = ", ".join(map(str, self.operations))
        cuts = "" if self.cuts is None else f", cuts {self.cuts}"
        return f"LoopInfo({self.schedule}, {counted(self.num_microbatches, 'microbatch')}, {operations}{cuts})"

    __repr__ = __str__


def scan_loop(*consts: jax.Array, jaxpr: compat.ClosedJaxpr, info: LoopInfo) -> list[jax.Array]:
    """Runs the loop as plain JAX: the reference for pipelined runs."""
    run = compat.jaxpr_as_fun(jaxpr)
    return _reduced(lambda index: run(*consts, index), info.operations, jaxpr.out_avals, info.num_microbatches)


def _reduced(
    run: Callable, operations: Sequence[Operation], out_avals: Sequence[compat.Aval], n: int
) -> list[jax.Array]:
    """Returns the reduced outputs of `run(index)`, which have the types `out_avals`."""

    def body(accs, index):
        return [op.update(acc, x, index) for op, acc, x in zip(operations, accs, run(index), strict=True)], None

    init = [op.init(aval, n) for op, aval in zip(operations, out_avals, strict=True)]
    accs, _ = lax.scan(body, init, jnp.arange(n, dtype=np.int32))
    return [op.finish(acc, n) for op, acc in zip(operations, accs, strict=True)]


def _treduce_abstract_eval(*avals: compat.Aval, jaxpr: compat.ClosedJaxpr, info: LoopInfo):
    """Derives the types from the body's outputs: each kind is reduced once, and the body is not traced again."""
    kinds = [(id(op), aval) for op, aval in zip(info.operations, jaxpr.out_avals, strict=True)]
    distinct = dict(zip(kinds, zip(info.operations, jaxpr.out_avals, strict=True), strict=True))
    operations, out_avals = [op for op, _ in distinct.values()], [aval for _, aval in distinct.values()]

    def reduced(*outs):
        return _reduced(lambda index: outs, operations, out_avals, info.num_microbatches)

    types = dict(zip(distinct, result_types(reduced, *out_avals), strict=True))
    return [types[kind] for kind in kinds], jaxpr.effects


def _treduce_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, jaxpr: compat.ClosedJaxpr, info: LoopInfo):
    moving = [i for i, t in enumerate(tangents) if type(t) is not compat.ad.Zero]

    def run(*some):
        args = list(primals)
        for i, x in zip(moving, some, strict=True):
            args[i] = x
        return scan_loop(*args, jaxpr=jaxpr, info=info)

    return jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])


def _treduce_batch(args: Sequence[jax.Array], dims: Sequence[int | None], *, jaxpr: compat.ClosedJaxpr, info: LoopInfo):
    outs = jax.vmap(functools.partial(scan_loop, jaxpr=jaxpr, info=info), in_axes=list(dims))(*args)
    return outs, [0] * len(outs)


def _treduce_without_unused(used: Sequence[bool], eqn: compat.JaxprEqn) -> tuple[list[bool], compat.JaxprEqn | None]:
    """Drops the unused results of a loop: no task computes, sends or sums them."""
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    outvars = [v if u else compat.DropVar(v.aval) for v, u in zip(eqn.outvars, used, strict=True)]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars)


@treduce_p.def_impl
def _treduce_impl(*args: jax.Array, jaxpr: compat.ClosedJaxpr, info: LoopInfo):
    start = time.monotonic()
    reduced = jax.jit(functools.partial(scan_loop, jaxpr=jaxpr, info=info))(*args)
    if (took_s := time.monotonic() - start) > _SLOW_S:
        warnings.warn(
            "mpmd.treduce outside of a jitted function compiles its loop again in each call, which took"
            f" {took_s:.0f} s. Call it in a function of mpmd.jit, which makes a pipeline of it, or of jax.jit.",
            stacklevel=users_frame(),
        )
    return reduced


treduce_p.def_effectful_abstract_eval(_treduce_abstract_eval)
compat.ad.primitive_jvps[treduce_p] = _treduce_jvp
compat.batching.primitive_batchers[treduce_p] = _treduce_batch
compat.register_dce_rule(treduce_p, _treduce_without_unused)
compat.mlir.register_lowering(treduce_p, compat.mlir.lower_fun(scan_loop, multiple_results=True))
