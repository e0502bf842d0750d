"""Finds mesh axes inside of groups along which no heavy work is divided: all devices along them compute the same."""

import math
from collections import Counter
from collections.abc import Collection, Iterator

from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.compile.executable import DistinctProgram, Executable
from mpmd.compile.step import StepPrograms
from mpmd.costs.work import work_of

# With fewer operations in its products, a step takes about the same time on any number of devices.
_WORTH = 1e6
_PAGE = "docs/inside-a-group.md"


def repetition(programs: StepPrograms) -> str | None:
    """Returns a text on devices that compute the same, with advice; None if none do, or for a small step.

    It reads only shardings, which every process has, so it compiles no program and waits for none.
    """
    if not (axes := _repeated(programs)):
        return None
    mesh = programs.mesh.groups[0]
    count = math.prod(mesh.shape[axis] for axis in axes)
    devices = f"the {count} devices of each group compute the same"
    if count < mesh.size:
        devices = f"of the {mesh.size} devices of each group, always {count} compute the same"
    named = f"mesh {'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(repr, axes))}"
    along = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    rows = f"P(None, {along})" if programs.loops else f"P({along})"
    return (
        f"{devices}: most matrix products are not divided along {named}. Divide the rows of the batch,"
        f" mpmd.jit(..., in_shardings=(None, {rows})), or the parameters; else leave the devices out ({_PAGE})."
    )


def _repeated(programs: StepPrograms) -> list[str]:
    """Returns the axes along which more than half of the heavy work is not divided."""
    mesh = programs.mesh.groups[0]
    unnamed = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    if not unnamed:
        return []
    times: Counter[DistinctProgram] = Counter()
    axes: dict[DistinctProgram, set[str]] = {}
    for executable, count in _called(programs):
        times[executable.compiled] += count
        axes[executable.compiled] = set(_axes_at_edges(executable))
    if all(found.issuperset(unnamed) for found in axes.values()):
        return []
    products = {program: count * work_of(program.jaxpr).products for program, count in times.items()}
    total = sum(products.values())
    if total < _WORTH:
        return []
    for program in axes:
        axes[program].update(_axes_inside(program.jaxpr))
    return [axis for axis in unnamed if 2 * sum(n for p, n in products.items() if axis not in axes[p]) > total]


def _called(programs: StepPrograms) -> Iterator[tuple[Executable, int]]:
    """Yields the tasks of the loops (the segments of a step without a loop), and how often a step runs each."""
    for loop in programs.loops:
        for executable in loop.executables.values():
            yield executable, loop.loop.partition.info.num_microbatches
    if not programs.loops:
        for executable in programs.segments.values():
            yield executable, 1


def _axes_at_edges(executable: Executable) -> Iterator[str]:
    """Yields the mesh axes along which an argument or result is divided.

    A batch that is divided along its microbatches does not count: each device gets whole microbatches.
    """
    jaxpr = executable.compiled.jaxpr
    picked = _picked(jaxpr)
    shardings = *executable.in_shardings, *executable.out_shardings
    for v, sharding in zip((*jaxpr.invars, *jaxpr.outvars), shardings, strict=True):
        yield from _axes_of(sharding, picked.get(v, frozenset()) if isinstance(v, compat.Var) else frozenset())


def _picked(jaxpr: compat.Jaxpr) -> dict[compat.Var, frozenset[int]]:
    """Returns the array axes of arguments and results along which a program only reads or writes some positions."""
    found = {v: frozenset(range(len(v.aval.shape))) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for position, v in enumerate(eqn.invars):
            if isinstance(v, compat.Var) and v in found:
                found[v] &= _picked_by(eqn) if position == 0 else frozenset()
        if eqn.primitive.name == "dynamic_update_slice":
            found[eqn.outvars[0]] = _picked_by(eqn)
    return found


def _picked_by(eqn: compat.JaxprEqn) -> frozenset[int]:
    """Returns the array axes of its first operand along which an equation reads or writes some positions."""
    if eqn.primitive.name == "dynamic_update_slice":
        sizes = eqn.invars[1].aval.shape
    else:
        sizes = eqn.params["slice_sizes"] if eqn.primitive.name in ("dynamic_slice", "gather") else ()
    return frozenset(
        i for i, (some, size) in enumerate(zip(sizes, eqn.invars[0].aval.shape, strict=False)) if some < size
    )


def _axes_inside(jaxpr: compat.Jaxpr) -> Iterator[str]:
    """Yields the mesh axes that constraints, types and `shard_map` name in a program."""
    for eqn in compat.all_equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            yield from eqn.params["newly_manual_axes"]
        for v in eqn.outvars:
            yield from _axes_of(getattr(v.aval, "sharding", None))
        for key in ("sharding", "dst_sharding"):
            yield from _axes_of(eqn.params.get(key))


def _axes_of(sharding: object, without: Collection[int] = ()) -> Iterator[str]:
    """Yields the mesh axes in a sharding, except at some axes of the array."""
    if isinstance(sharding, NamedSharding):
        yield from sharding.spec.unreduced  # each device holds a sum over its own rows
        for i, entry in enumerate(sharding.spec.partitions):
            if entry is not None and entry is not PartitionSpec.UNCONSTRAINED and i not in without:
                yield from (entry,) if isinstance(entry, str) else entry
