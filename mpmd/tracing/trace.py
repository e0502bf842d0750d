"""Traces the user's step once, differentiated, on an abstract mesh: one flat jaxpr.

Calls that only wrap other equations (`jit`, custom derivatives that have done their work) are inlined, so
that what comes next can cut between any two equations. Marks must stand where a cut is possible: in a
loop's body, or in that of a `scan` over layers there, not inside `cond`, `while`, `shard_map` or a `checkpoint`.
"""

import dataclasses
import functools
import inspect
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.errors import StageError
from mpmd.ops.cross_group import place_p
from mpmd.ops.reductions import Operation, explicit_sharding
from mpmd.ops.stage_end import mark_name, mark_p, without
from mpmd.ops.treduce import scan_loop, treduce_p

Atom = compat.Var | compat.Literal


class Equations(NamedTuple):
    """Equations with variables of their own, and their results."""

    eqns: list[compat.JaxprEqn]
    outs: list[Atom]

    def named(self, results: Sequence[compat.Var]) -> list[compat.JaxprEqn]:
        """The equations, with other names for their results."""
        names = dict(zip(self.outs, results, strict=True))
        return [e.replace(outvars=[names.get(v, v) for v in e.outvars]) for e in self.eqns]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced step: what `mpmd.jit(...).trace` knows, before anything is cut.

    Attributes:
      jaxpr: one flat jaxpr; loops are `treduce` equations. Captured constants are its first inputs.
      consts: their values.
      in_tree, out_tree: structures of `(args, kwargs)` and of the result.
      in_names, out_names: a path per flat input and output, for messages.
    """

    jaxpr: compat.Jaxpr
    consts: tuple
    in_tree: Any
    out_tree: Any
    in_names: tuple[str, ...]
    out_names: tuple[str, ...]

    @property
    def arguments(self) -> list[compat.Var]:
        """The variables of the flat arguments, without the captured constants."""
        return self.jaxpr.invars[len(self.consts) :]

    @property
    def num_marks(self) -> int:
        """How many stage ends stand outside of loops."""
        return sum(e.primitive is mark_p and e.params["kind"] == "forward" for e in self.jaxpr.eqns)

    def with_loops(self, change: Callable[[compat.JaxprEqn], compat.JaxprEqn]) -> "Trace":
        """The step with `change(eqn)` in the place of each `treduce` equation."""
        eqns = [change(e) if e.primitive is treduce_p else e for e in self.jaxpr.eqns]
        return dataclasses.replace(self, jaxpr=compat.new_jaxpr(self.jaxpr, eqns=eqns))

    def __str__(self):
        return str(self.jaxpr)


def trace_step(
    fun: Callable, avals: Sequence[Any], in_tree: Any, in_names: Sequence[str], mpmd_mesh: MpmdMesh
) -> Trace:
    """Traces `fun(*args, **kwargs)` once, on the abstract mesh of the whole `mpmd_mesh`.

    Args:
      fun: the user's step.
      avals: a `ShapeDtypeStruct` per flat argument.
      in_tree: the structure of `(args, kwargs)`.
      in_names: a path per flat argument.
      mpmd_mesh: the groups.
    """
    out_tree = None
    out_names: tuple[str, ...] = ()

    def flat(*leaves):
        nonlocal out_tree, out_names
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        out = fun(*args, **kwargs)
        paths, out_tree = jax.tree_util.tree_flatten_with_path(out)
        out_names = tuple("result" + jax.tree_util.keystr(path) for path, _ in paths)
        _check_results(fun, out_names, [x for _, x in paths])
        return [x for _, x in paths]

    whole, axis = mpmd_mesh.tracing_mesh().abstract_mesh, mpmd_mesh.mpmd_axis_name
    with compat.tracing(whole, frozenset(g.abstract_mesh for g in mpmd_mesh.groups), axis):
        closed, jaxpr = _traced(flat, avals)
    _check_axis(jaxpr, axis)
    jaxpr = compat.rebase(compat.ClosedJaxpr(jaxpr, ()), mpmd_mesh.groups[0].abstract_mesh, whole).jaxpr
    return Trace(jaxpr, tuple(closed.consts), in_tree, out_tree, tuple(in_names), out_names)


def _traced(flat: Callable, avals: Sequence[Any]) -> tuple[compat.ClosedJaxpr, compat.Jaxpr]:
    """A function as it is traced, and flat: constants are its first inputs, and what nobody uses is left out."""
    try:
        closed = jax.make_jaxpr(flat)(*avals)
    except _NEEDS_A_VALUE as e:
        raise StageError(
            f"mpmd.jit: the step needs the value of an array while it is traced, at {_users_line(e)}.\n"
            f"  {str(e).splitlines()[0]}\n"
            "  Use jnp.where or jax.lax.cond, or name in static_argnums what is part of the program."
        ) from e
    _check_no_leaks(closed)
    jaxpr = inline(compat.constvars_to_invars(closed.jaxpr))
    return closed, compat.pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _users_line(error: BaseException) -> str:
    """`file:line (function)` of the innermost frame that is neither JAX's nor ours."""
    ours = tuple(str(Path(module.__file__).parent) + os.sep for module in (jax, compat) if module.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "an unknown line"


def _check_no_leaks(closed: compat.ClosedJaxpr) -> None:
    """A traced value that was captured as if it were a constant has left the function that it belongs to."""
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if isinstance(value, compat.Tracer):
            user = next((e for e in closed.jaxpr.eqns if var in e.invars), None)
            where = "as a result" if user is None else f"at {compat.source_line(user)}"
            raise StageError(
                f"mpmd.jit: a {var.aval.str_short(short_dtypes=True)} of one microbatch (or of another traced function)"
                f" is used outside of it, {where}: it was kept in a list, an attribute or a global variable.\n"
                "  Return it from the function, with an operation such as mpmd.Concat."
            )


def _check_results(fun: Callable, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Everything that a step returns is an array or a number."""
    for name, x in zip(names, leaves, strict=True):
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
            step = inspect.unwrap(fun)
            code = getattr(step, "__code__", None)
            where = "" if code is None else f", defined at {code.co_filename}:{code.co_firstlineno},"
            raise StageError(
                f"mpmd.jit: the step {getattr(step, '__name__', step)}{where} returns {name}, a {type(x).__name__},"
                f" {x!r:.40}, which is no array.\n"
                "  Return arrays, numbers and None in dicts, lists, tuples or registered dataclasses."
            )


def inline(jaxpr: compat.Jaxpr, in_loop: bool = False) -> compat.Jaxpr:
    """`jaxpr` with its calls inlined, in the bodies of its loops too; marks where nothing can be cut are refused.

    Args:
      in_loop: whether this is the body of a `treduce`, where a scan over layers may hold marks.
    """
    eqns: list[compat.JaxprEqn] = []
    env: dict = {}
    _inline_into(eqns, env, jaxpr.eqns, None, in_loop)
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[compat.renamed(v, env) for v in jaxpr.outvars])


def _inline_into(
    out: list[compat.JaxprEqn],
    env: dict[Atom, Atom],
    eqns: Iterable[compat.JaxprEqn],
    outer: compat.JaxprEqn | None,
    in_loop: bool,
) -> None:
    """Appends `eqns` to `out` under the renaming `env`; `outer` is the call that they come from (then all
    variables are made anew, since one cached jaxpr may be called many times).
    """
    for eqn in eqns:
        eqn = eqn.replace(invars=[compat.renamed(v, env) for v in eqn.invars])
        if eqn.primitive is treduce_p and eqn.params["info"].schedule is None:
            eqn = _plain_loop(eqn)
        if outer is not None:
            eqn = compat.within(eqn, outer)
        if len(eqn.invars) > 1 and eqn.primitive.name in _SEVERAL_AT_ONCE:
            _inline_into(out, env, _one_by_one(eqn), outer, in_loop)
            continue
        called = compat.called_jaxpr(eqn)
        if (
            called is None
            and eqn.primitive is compat.jit_p
            and contains(eqn.params["jaxpr"].jaxpr, (mark_p, treduce_p))
        ):
            called = eqn.params["jaxpr"]
        if called is not None:
            inner = dict(zip(called.jaxpr.invars, eqn.invars, strict=True))
            inner |= _literals(called)
            _inline_into(out, inner, called.jaxpr.eqns, eqn, in_loop)
            env.update(zip(eqn.outvars, (compat.renamed(v, inner) for v in called.jaxpr.outvars), strict=True))
            continue
        if eqn.primitive is treduce_p:
            body = eqn.params["jaxpr"]
            _check_nothing_placed_inside("treduce", body.jaxpr)
            flat = compat.ClosedJaxpr(inline(body.jaxpr, in_loop=True), body.consts)
            eqn = eqn.replace(params={**eqn.params, "jaxpr": flat})
        elif eqn.primitive.name == "scan":
            _check_is_no_rest_of_a_loop(eqn)
            _check_marks_in_scan(eqn, _AROUND_A_LAYER if in_loop else _AROUND_A_LAYER - {"scan"})
        else:
            check_no_marks_inside(eqn)
        if outer is not None:
            fresh: list = [v if isinstance(v, compat.DropVar) else compat.Var(v.aval) for v in eqn.outvars]
            env.update((v, f) for v, f in zip(eqn.outvars, fresh, strict=True) if not isinstance(v, compat.DropVar))
            eqn = eqn.replace(outvars=fresh)
        out.append(eqn)


# Equations that do the same to each of their operands; these may live in different groups.
_SEVERAL_AT_ONCE = {"device_put", "optimization_barrier"}


def _one_by_one(eqn: compat.JaxprEqn) -> Iterator[compat.JaxprEqn]:
    """The equation on each of its operands alone."""
    for i, (x, y) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        params = {k: p[i : i + 1] if isinstance(p, (tuple, list)) else p for k, p in eqn.params.items()}
        yield eqn.replace(invars=[x], outvars=[y], params=params)


def _plain_loop(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
    """A loop without a schedule as the call of an ordinary `lax.scan`; marks in it mark nothing."""
    body = compat.ClosedJaxpr(without(eqn.params["jaxpr"].jaxpr, (mark_p, place_p)), eqn.params["jaxpr"].consts)
    loop = functools.partial(scan_loop, jaxpr=body, info=eqn.params["info"])
    closed = jax.make_jaxpr(loop)(*(_abstract(x.aval) for x in eqn.invars))
    return compat.call(eqn, closed)


def _literals(closed: compat.ClosedJaxpr) -> dict[Atom, Atom]:
    """The constants of a jaxpr, by the variables that it has for them."""
    return {v: compat.Literal(c, v.aval) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}


def contains(jaxpr: compat.Jaxpr, primitives: Collection[compat.Primitive]) -> bool:
    """Whether any equation of `jaxpr`, however deep, is one of `primitives`."""
    return any(
        e.primitive in primitives or any(contains(j, primitives) for j in compat.jaxprs_in(e.params))
        for e in jaxpr.eqns
    )


_CALL_FOR_EACH = "\n  Where the loop is over tokens or steps, call the jitted function once for each, from Python."
_REMEDY = {
    "checkpoint": "Put jax.checkpoint around each stage, between the marks, instead of around all of them.",
    "scan": f"Write the stages as a Python loop, and use lax.scan for the layers inside each stage.{_CALL_FOR_EACH}",
    "while": f"Write the stages as a Python loop; loops inside a stage are fine.{_CALL_FOR_EACH}",
    "cond": "Mark the stage end after the cond, so that both branches belong to one stage.",
    "shard_map": "Call shard_map once per stage, and mark the stage end outside of it.",
}


def _check_nothing_placed_inside(name: str, jaxpr: compat.Jaxpr) -> None:
    """Refuses values that the user places, and pipelined loops."""
    if contains(jaxpr, (place_p,)):
        why = (
            "its stages run in the groups that the schedule gives them" if name == "treduce" else "it runs in one group"
        )
        raise StageError(
            f"place or a cross_mpmd function inside {name}, at {compat.source_line(_first(jaxpr, place_p))}: {why}.\n"
            f"  Use it outside of {name}, on values that go in or come out."
        )
    if (loop := _first(jaxpr, treduce_p, lambda e: e.params["info"].schedule is not None)) is not None:
        raise StageError(
            f"treduce inside {name}, at {compat.source_line(loop)}: the pipelined loop must stand in the step itself.\n"
            "  Move it out, or pass schedule=None for a plain loop."
        )


def _check_is_no_rest_of_a_loop(eqn: compat.JaxprEqn) -> None:
    """Refuses what JAX's transformations leave of a whole `treduce`, if it holds marks."""
    transformed = {"_treduce_jvp": "differentiated", "_treduce_batch": "batched by vmap"}
    whats = [what for rule, what in transformed.items() if compat.called_from(eqn, rule)]
    if whats and any(contains(jaxpr, (mark_p,)) for jaxpr in compat.jaxprs_in(eqn.params)):
        raise StageError(
            f"treduce is {whats[0]} as a whole, at {compat.source_line(eqn)}: what is left is no pipelined loop.\n"
            "  Differentiate inside of fun: treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, ...)."
        )


# What a scan over layers may wrap its body's marks in.
_AROUND_A_LAYER = {"scan", "jit", "checkpoint", "remat", "remat2", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def _check_marks_in_scan(eqn: compat.JaxprEqn, around: Collection[str] = _AROUND_A_LAYER) -> None:
    """A scan over layers may hold marks, also within a checkpoint of its body, but not where a branch decides.

    Args:
      eqn: the scan.
      around: what may stand between its body and the marks; outside of loops no scan, which may be one over tokens.
    """
    for jaxpr in compat.jaxprs_in(eqn.params):
        _check_nothing_placed_inside(str(eqn.primitive.name), jaxpr)
        for inner in jaxpr.eqns:
            if inner.primitive.name in around:
                _check_marks_in_scan(inner, around)
            else:
                check_no_marks_inside(inner)


def check_no_marks_inside(eqn: compat.JaxprEqn) -> None:
    """Refuses an equation that holds marks, loops or placements where nothing can be cut.

    Raises:
      StageError: with the user's line and a remedy.
    """
    for jaxpr in compat.jaxprs_in(eqn.params):
        _check_nothing_placed_inside(str(eqn.primitive.name), jaxpr)
        if not contains(jaxpr, (mark_p,)):
            continue
        _check_is_no_rest_of_a_loop(eqn)
        name = {"remat": "checkpoint", "remat2": "checkpoint"}.get(eqn.primitive.name, str(eqn.primitive.name))
        mark = _first(jaxpr, mark_p)
        raise StageError(
            f"{mark_name(mark.params['optional'])} inside {name}, at {compat.source_line(mark)}: a stage cannot end"
            f" there.\n  {_REMEDY.get(name, f'Mark the stage end outside of {name}.')}"
        )


def _first(jaxpr: compat.Jaxpr, primitive: compat.Primitive, wanted: Callable = lambda eqn: True) -> Any:
    """The first equation of a primitive, however deep; None if there is none."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitive and wanted(eqn):
            return eqn
        for inner in compat.jaxprs_in(eqn.params):
            if (found := _first(inner, primitive, wanted)) is not None:
                return found
    return None


def _check_axis(jaxpr: compat.Jaxpr, axis: str | None) -> None:
    """Nothing inside the step may name the mpmd axis: a group does not extend along it."""
    if axis is None:
        return
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in ("pvary", "pcast") and _names_axis(eqn, axis):
            what = eqn.primitive.name.replace("_invariant", "")
            where = compat.source_line(eqn)
            raise StageError(
                f"{what} names the mpmd axis {axis!r}, at {where}. Inside a step each group has its own mesh, on which"
                f" {axis!r} has size 1.\n  Leave {axis!r} out of specs and collectives inside the step;"
                " values cross groups where stages end."
            )
        for inner in compat.jaxprs_in(eqn.params):
            _check_axis(inner, axis)


_NAMING = ("axes", "axis_name", "axis_index_groups", "axis", "in_specs", "out_specs", "out_sharding")


def _names_axis(eqn: compat.JaxprEqn, axis: str) -> bool:
    found = (x for key, x in eqn.params.items() if key in _NAMING or isinstance(x, NamedSharding))
    return any(_mentions(x, axis) for x in found)


def _mentions(value: Any, axis: str) -> bool:
    if isinstance(value, NamedSharding):
        value = value.spec
    if isinstance(value, PartitionSpec):  # axes of dimensions, and those over which values are (un)reduced
        value = (*value.partitions, *value.unreduced, *value.reduced)
    if isinstance(value, (tuple, list, frozenset, set)):
        return any(_mentions(v, axis) for v in value)
    return isinstance(value, str) and value == axis


def equations_on(closed: compat.ClosedJaxpr, atoms: Sequence[Atom]) -> Equations:
    """The equations of a flat jaxpr on other operands; a cached jaxpr may be used many times."""
    env: dict = dict(zip(closed.jaxpr.invars, atoms, strict=True))
    env |= _literals(closed)
    eqns = []
    for eqn in closed.jaxpr.eqns:
        fresh: list = [v if isinstance(v, compat.DropVar) else compat.Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=[compat.renamed(v, env) for v in eqn.invars], outvars=fresh))
        env.update(zip(eqn.outvars, fresh, strict=True))
    return Equations(eqns, [compat.renamed(v, env) for v in closed.jaxpr.outvars])


def trace_equations(fun: Callable, *atoms: Atom) -> Equations:
    """The equations of `fun` on `atoms`."""
    avals = tuple(a.aval for a in atoms)
    return equations_on(_trace_on(fun, avals, _mesh_of(avals)), atoms)


def trace_operation(operation: Operation, method: str, atoms: Sequence[Atom], *args: int) -> Equations:
    """The equations of a method of an operation, traced once for all operands of the same types.

    Args:
      args: what it takes after the atoms.
    """
    avals = tuple(a.aval for a in atoms)
    return equations_on(
        _operation_jaxpr(operation, method, avals, args, _mesh_of(avals), compat.trace_context()), atoms
    )


@functools.lru_cache(maxsize=1024)
def _operation_jaxpr(
    operation: Operation, method: str, avals: tuple[Any, ...], args: tuple[int, ...], mesh: AbstractMesh, context: Any
) -> compat.ClosedJaxpr:
    return _trace_on(lambda *xs: getattr(operation, method)(*xs, *args), avals, mesh)


def _trace_on(fun: Callable, avals: Sequence[Any], mesh: AbstractMesh) -> compat.ClosedJaxpr:
    with compat.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(fun)(*map(_abstract, avals))
    return compat.ClosedJaxpr(inline(closed.jaxpr), closed.consts)


def _mesh_of(avals: Sequence[Any]) -> AbstractMesh:
    """That of the first operand with a sharding of its own, else the one that is set."""
    meshes = (cast(AbstractMesh, s.mesh) for aval in avals if (s := explicit_sharding(aval)) is not None)
    return next(meshes, compat.current_mesh())


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = explicit_sharding(aval)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def copy_equations(atom: Atom) -> Equations:
    """The equations that copy a variable or a literal."""
    if isinstance(atom, compat.Literal):
        constant = np.asarray(atom.val, atom.aval.dtype)
        return trace_equations(lambda: jax.lax.copy_p.bind(constant))
    return trace_equations(jax.lax.copy_p.bind, atom)
