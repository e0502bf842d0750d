"""Estimates the bytes that a step will need on each device, before anything is compiled.

The walk is that of `memory.py`. Shardings follow from the arguments, constraints, types on Explicit axes, and a simple
propagation; temporaries from the lifetimes of what fusion would not make disappear.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout, fit
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.donation import donations
from mpmd.compile.executable import nbytes_on_a_device
from mpmd.compile.program import step_program
from mpmd.compile.tasks import task_bodies
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.graphs.sharded_axes import RULES, dims_of
from mpmd.partition.outline import Loop, Outline, Segment
from mpmd.report.memory import Sizes, peaks
from mpmd.report.roles import Roles
from scheduler import Call, Program, Run


class Draft(NamedTuple):
    """A step that is not compiled: its program, and the bytes that are estimated for it.

    Attributes:
      temporaries: of an instruction, beside its arguments and results.
    """

    program: Program
    sizes: Sizes
    temporaries: Callable[[Run | Call], int]

    def memory(self) -> dict[int, dict[str, int]]:
        """As `memory.measured`, for every group."""
        groups = range(len(self.program.groups))
        return {g: peaks(self.program, g, self.sizes, self.temporaries) for g in groups}


def draft_of(outline: Outline, mesh: MpmdMesh, in_layouts: Sequence[Layout | None], donated_args: Set[int]) -> Draft:
    """The program of a step and the sizes of its values, without compiling anything.

    Args:
      in_layouts: per flat argument, its layout or None.
      donated_args: flat arguments whose memory may be taken over.
    """
    layouts = {v: layout for v, layout in zip(outline.trace.arguments, in_layouts, strict=True) if layout}
    reading = _Reading(mesh, layouts, {v for v, role in Roles(outline).role.items() if role == "data"})
    inner: dict[str | tuple[int, Place], int] = {}
    for item in outline.items:
        if isinstance(item, Segment):
            inner[item.name] = reading.temporaries(item.eqns, item.writes, item.group)
        elif isinstance(item, Loop):
            for body in task_bodies(item):
                results = [item.partition.accumulators[k].value for k in body.accumulates]
                outs = [*body.writes, *results]
                inner[item.number, body.place] = reading.temporaries(body.eqns, outs, item.group(body.place))
            for acc in item.partition.accumulators:
                if acc.value in layouts:
                    layouts.setdefault(acc.result, layouts[acc.value])
    program = step_program(outline, mesh.num_groups, donations(outline, mesh, donated_args))

    def temporaries(instruction: Run | Call) -> int:
        if isinstance(instruction, Call):
            return inner.get(instruction.name, 0)
        return max((inner.get((instruction.loop, Place(t.stage, t.kind)), 0) for t in instruction.tasks), default=0)

    return Draft(program, Sizes(outline, mesh, layouts), temporaries)


class _Reading:
    """Shardings and temporaries of programs that nobody has compiled."""

    def __init__(self, mesh: MpmdMesh, layouts: dict[compat.Var, Layout], batches: Set[compat.Var] = frozenset()):
        self.mesh = mesh
        self.layouts = layouts
        self.batches = batches  # arguments that are data

    def spec(self, v: Any) -> PartitionSpec | None:
        if isinstance(v, compat.Literal) or v not in self.layouts:
            return None
        return self.layouts[v][0]

    def nbytes(self, v: Any, group: int) -> int:
        """Bytes on each device of a group."""
        if (spec := self.spec(v)) is None:
            return equations.nbytes(v.aval)
        return nbytes_on_a_device(v, fit((spec, None), self.mesh.groups[group], v.aval.shape))

    def propagate(self, eqn: compat.JaxprEqn, made: Mapping[compat.Var, compat.JaxprEqn]) -> None:
        """Gives the results of an equation their specs, where they can be told, and operands that have none."""
        spec = self._told(eqn, eqn.outvars[0]) if eqn.outvars else None
        if spec is not None and any(spec.partitions):
            for x in equations.variables(eqn.invars):
                if x.aval.shape == eqn.outvars[0].aval.shape:
                    self._back(x, spec, made)
        for v in equations.outputs(eqn):
            if v in self.layouts:
                continue
            typed = getattr(v.aval, "sharding", None)
            spec = typed.spec if typed is not None and any(typed.spec.partitions) else self._told(eqn, v)
            if spec is not None and any(spec.partitions):
                self.layouts[v] = spec, compat.memory_kind(v.aval)

    def _back(self, v: Any, spec: PartitionSpec, made: Mapping[compat.Var, compat.JaxprEqn]) -> None:
        """An operand without a spec takes its reader's; so does the batch that it is a slice of."""
        if v in self.layouts:
            return
        eqn: Any = made.get(v)
        if eqn is None:
            if v in self.batches:
                self.layouts[v] = spec, None
            return
        name = eqn.primitive.name
        if name == "squeeze":
            entries = list(spec.partitions) + [None] * (v.aval.ndim - len(spec.partitions))
            for d in sorted(eqn.params["dimensions"]):
                entries.insert(d, None)
            self.layouts[v] = spec, None
            self._back(eqn.invars[0], PartitionSpec(*entries), made)
        elif name in ("dynamic_slice", "convert_element_type"):
            self.layouts[v] = spec, None
            self._back(eqn.invars[0], spec, made)

    def _told(self, eqn: compat.JaxprEqn, v: compat.Var) -> PartitionSpec | None:
        name, params = eqn.primitive.name, eqn.params
        if name == "sharding_constraint":
            return getattr(params["sharding"], "spec", None)
        if name == "shard_map":
            return params["out_specs"][eqn.outvars.index(v)]
        known = [(x, s) for x in eqn.invars if (s := self.spec(x)) is not None]
        for x, spec in known:
            if x.aval.shape == v.aval.shape and name != "transpose":
                return spec
        if not known:
            return None
        if name in _MOVES_AXES and (rule := RULES.get(name)) is not None:
            dims = rule(eqn, [dims_of(self.spec(x) or PartitionSpec(), x.aval.ndim) for x in eqn.invars])
            return PartitionSpec(*(axes or None for axes in dims))
        return self.spec(eqn.invars[0]) if name in ("dynamic_slice", "slice", "cumsum", "sort") else None

    def temporaries(self, eqns: Sequence[compat.JaxprEqn], results: Sequence[Any], group: int) -> int:
        """The most bytes that an executable holds at once beside its arguments and results."""
        made = {v: eqn for eqn in eqns for v in equations.outputs(eqn)}
        for eqn in eqns:
            self.propagate(eqn, made)
        stored = {v for v, eqn in made.items() if _is_stored(eqn)}
        for eqn in eqns:
            if equations.is_heavy(eqn) and not equations.changes_memory(eqn):
                stored.update(
                    v for v in equations.variables(eqn.invars) if v in made and not equations.is_view(made[v])
                )
        kept = set(equations.variables(results))
        last: dict[compat.Var, int] = {}

        def use(v: compat.Var, position: int) -> None:
            """A value that fusion makes disappear keeps alive what it is made of."""
            stack = [v]
            while stack:
                x = stack.pop()
                if x in made and last.get(x, -1) < position:
                    last[x] = position
                    if x not in stored:
                        stack += equations.variables(made[x].invars)

        for position, eqn in enumerate(eqns):
            for v in equations.variables(eqn.invars):
                use(v, position)
        ends = defaultdict(list)
        for v, position in last.items():
            if v in stored and v not in kept:
                ends[position].append(v)
        alive = most = 0
        for position, eqn in enumerate(eqns):
            alive += sum(
                self.nbytes(v, group) for v in equations.outputs(eqn) if v in stored and v not in kept and v in last
            )
            inner = [_Reading(self.mesh, {}).temporaries(j.eqns, (), group) for j in compat.jaxprs_in(eqn.params)]
            most = max(most, alive + max(inner, default=0))
            alive -= sum(self.nbytes(v, group) for v in ends[position])
        return most


# Other rules of the partition (a reshape's, say) find what this rough estimate leaves out.
_MOVES_AXES = {"dot_general", "transpose", "squeeze", "broadcast_in_dim", "reduce_sum", "reduce_max", "reduce_min",
               "reduce_prod", "reduce_and", "reduce_or"}  # fmt: skip


def _is_stored(eqn: compat.JaxprEqn) -> bool:
    """Whether XLA writes the results of an equation to memory rather than fuse them into their readers."""
    if equations.changes_memory(eqn) or equations.is_view(eqn):
        return False
    return equations.is_heavy(eqn) or eqn.primitive.name.startswith(("reduce", "arg", "gather", "random"))
