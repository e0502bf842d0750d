"""Traces the user's step once, differentiated, on an abstract mesh: one flat jaxpr."""

import dataclasses
import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.errors import StageError
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.reductions import is_number_or_array
from mpmd.ops.stage_end import mark_p
from mpmd.pytrees import TreeDef
from mpmd.tracing.arguments import REF_ADVICE
from mpmd.tracing.inline import inline

Described = jax.ShapeDtypeStruct | compat.Aval


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced step: the `.trace` of an `mpmd.jit` step, before anything is cut."""

    jaxpr: compat.Jaxpr  # one flat jaxpr; loops are `treduce` equations. Captured constants are its first inputs.
    consts: tuple  # their values
    in_tree: TreeDef  # of `(args, kwargs)`
    out_tree: TreeDef  # of the result
    in_names: tuple[str, ...]  # the path of each flat input, for messages
    out_names: tuple[str, ...]  # the path of each flat output, for messages
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # static arguments and keywords, for messages

    @property
    def arguments(self) -> list[compat.Var]:
        """The variables of the flat arguments, without the captured constants."""
        return self.jaxpr.invars[len(self.consts) :]

    @property
    def num_marks(self) -> int:
        """The number of stage ends outside of loops."""
        return sum(e.primitive is mark_p and e.params["kind"] == "forward" for e in self.jaxpr.eqns)

    def with_loops(self, change: Callable[[compat.JaxprEqn], compat.JaxprEqn]) -> "Trace":
        """Returns the step with each `treduce` equation replaced by `change(eqn)`."""
        eqns = [change(e) if e.primitive is treduce_p else e for e in self.jaxpr.eqns]
        return dataclasses.replace(self, jaxpr=compat.new_jaxpr(self.jaxpr, eqns=eqns))

    def __str__(self):
        return str(self.jaxpr)


def trace_step(
    fun: Callable,
    avals: Sequence[Described],
    in_tree: TreeDef,
    in_names: Sequence[str],
    mpmd_mesh: MpmdMesh,
) -> Trace:
    """Traces `fun(*args, **kwargs)` once, on the abstract mesh of the first group."""
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

    mesh, axis = mpmd_mesh.groups[0].abstract_mesh, mpmd_mesh.mpmd_axis_name
    others = frozenset(m.abstract_mesh for m in (mpmd_mesh.tracing_mesh(), *mpmd_mesh.groups))
    with compat.tracing(mesh, others, axis):
        closed, jaxpr = _traced(flat, avals)
    _check_axis(jaxpr, axis, mesh.axis_names)
    jaxpr = compat.rebase(compat.ClosedJaxpr(jaxpr, ()), mesh, mesh, axis).jaxpr
    return Trace(jaxpr, tuple(closed.consts), in_tree, out_tree, tuple(in_names), out_names)


def _traced(flat: Callable, avals: Sequence[Described]) -> tuple[compat.ClosedJaxpr, compat.Jaxpr]:
    """Returns a function as traced, and flat: constants are the first inputs, and unused equations are dropped."""
    try:
        closed = compat.written_out(jax.make_jaxpr(flat)(*avals))
    except _NEEDS_A_VALUE as e:
        raise StageError(
            f"mpmd.jit: the step needs the value of an array while it is traced, at {_users_line(e)}.\n"
            f"  {str(e).splitlines()[0]}\n"
            "  To read it (float(), .item(), print), return the array and do that outside of the step; to choose by it,"
            " use jnp.where or jax.lax.cond; what is part of the program is named in static_argnums."
        ) from e
    _check_constants(closed)
    jaxpr = inline(compat.constvars_to_invars(closed.jaxpr))
    return closed, compat.without_unused(jaxpr)


_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _users_line(error: BaseException) -> str:
    """Returns `file:line (function)` of the innermost frame outside of JAX and this package."""
    ours = tuple(str(Path(module.__file__).parent) + os.sep for module in (jax, compat) if module.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "an unknown line"


def _check_constants(closed: compat.ClosedJaxpr) -> None:
    """Checks captured constants. A traced value among them has left the function that it belongs to, and a ref would
    have its memory on one device.
    """
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        user = next((e for e in closed.jaxpr.eqns if var in e.invars), None)
        where = "as a result" if user is None else f"at {compat.source_line(user)}"
        if compat.is_ref(var.aval):
            raise StageError(
                f"mpmd.jit: a {var.aval.str_short(short_dtypes=True)} is used {where}, which was made outside of the"
                f" step.\n  {REF_ADVICE}"
            )
        if isinstance(value, compat.Tracer):
            raise StageError(
                f"mpmd.jit: a {var.aval.str_short(short_dtypes=True)} of one microbatch (or of another traced function)"
                f" is used outside of it, {where}: it was kept in a list, an attribute or a global variable.\n"
                "  Return it from the function, with an operation such as mpmd.Concat."
            )


def _check_results(fun: Callable, names: Sequence[str], leaves: Sequence[object]) -> None:
    """Checks that everything that a step returns is an array or a number."""
    for name, x in zip(names, leaves, strict=True):
        if not is_number_or_array(x):
            step = inspect.unwrap(fun)
            code = getattr(step, "__code__", None)
            where = "" if code is None else f", defined at {code.co_filename}:{code.co_firstlineno},"
            raise StageError(
                f"mpmd.jit: the step {getattr(step, '__name__', step)}{where} returns {name}, a {type(x).__name__},"
                f" {x!r:.40}, which is no array.\n"
                "  Return arrays, numbers and None in dicts, lists, tuples or registered dataclasses."
            )


def _check_axis(jaxpr: compat.Jaxpr, axis: str | None, names: tuple[str, ...]) -> None:
    """Checks that nothing inside the step names the mpmd axis: a group does not extend along it.

    If a `shard_map` divides a dimension over all axes of the mesh, JAX has written this for a residual (`rebase`).
    """
    if axis is None:
        return
    for eqn in compat.all_equations(jaxpr):
        if eqn.primitive.name not in ("pvary", "pcast") and _names_axis(eqn, axis, names):
            what = eqn.primitive.name.replace("_invariant", "")
            where = compat.source_line(eqn)
            raise StageError(
                f"{what} names the mpmd axis {axis!r}, at {where}. Inside a step each group has its own mesh, on which"
                f" {axis!r} has size 1.\n  Leave {axis!r} out of specs and collectives inside the step;"
                " values cross groups where stages end."
            )


_NAMING = ("axes", "axis_name", "axis_index_groups", "axis", "in_specs", "out_specs", "out_sharding")


def _names_axis(eqn: compat.JaxprEqn, axis: str, names: tuple[str, ...]) -> bool:
    found: list[object] = [x for key, x in eqn.params.items() if key in _NAMING or isinstance(x, NamedSharding)]
    if eqn.primitive.name == "shard_map":
        specs = [s for key in ("in_specs", "out_specs") for s in eqn.params[key]]
        found = [[e for e in (*s.partitions, *s.unreduced, *s.reduced) if e != names] for s in specs]
    return any(_mentions(x, axis) for x in found)


def _mentions(value: object, axis: str) -> bool:
    if isinstance(value, NamedSharding):
        value = value.spec
    if isinstance(value, PartitionSpec):  # axes of dimensions, and axes over which values are (un)reduced
        value = (*value.partitions, *value.unreduced, *value.reduced)
    if isinstance(value, (tuple, list, frozenset, set)):
        return any(_mentions(v, axis) for v in value)
    return isinstance(value, str) and value == axis
