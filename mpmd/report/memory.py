"""How many bytes a step needs on each device: measured from what was compiled, or estimated before anything is.

Both walk the checked program of each group and add up what is alive: arguments, accumulators, and the activations of
the microbatches in flight, in the sharding that each has. They differ in where shardings and the temporaries inside of
an executable come from: from XLA, or from a reading of the equations (`estimate`).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from typing import Any

from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout, fit
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.program import edge_name, step_program
from mpmd.compile.step import LoopProgram, StepPrograms, donations, task_bodies
from mpmd.partition import equations
from mpmd.partition.graph import Place
from mpmd.partition.outline import Loop, Outline, Segment
from scheduler import Call, Free, Program, Recv, Run, Value

KINDS = ("parameters", "state", "data", "gradients", "activations", "temporaries")


def measured(programs: StepPrograms, program: Program, roles: Mapping[compat.Var, str]) -> dict[int, dict[str, int]]:
    """Per group, bytes per device, with the temporaries that XLA reports.

    Args:
      roles: what each argument is: "parameters", "state" or "data".

    Returns:
      For each group of this process: `parameters`, `state` (the optimizer's, and what else comes back), `data`, their
      sum `arguments`; the peaks of `gradients` (accumulators, and what is made of them) and of `activations` (values of
      microbatches); the largest `temporaries` of an executable; `peak`, the most of all of it at one time; and `host`,
      the peak of what is kept in host memory.
    """

    def temporaries(group: int, instruction) -> int:
        if group not in programs.mesh.local_groups:
            return 0
        found = [
            getattr(e.call.memory_analysis(), "temp_size_in_bytes", 0) for e in _executables(programs, instruction)
        ]
        return max(found, default=0)

    walk = _Walk(programs, program, roles, temporaries)
    return {g: walk.group(g) for g in programs.mesh.local_groups}


def estimate(outline: Outline, mesh: MpmdMesh, in_layouts, donated: frozenset[int], roles) -> dict[int, dict[str, int]]:
    """As `measured`, for every group, before anything is compiled.

    Shardings follow from the arguments, constraints, types on Explicit axes, and a simple propagation; temporaries from
    the lifetimes of what fusion would not make disappear.
    """
    num_consts = len(outline.trace.consts)
    layouts: dict[compat.Var, Layout] = {
        v: layout for v, layout in zip(outline.trace.jaxpr.invars[num_consts:], in_layouts, strict=True) if layout
    }
    reading = _Reading(mesh, layouts, {v for v, role in roles.items() if role == "data"})
    inner: dict = {}
    loops = []
    for item in outline.items:
        if isinstance(item, Segment):
            inner[item.name] = reading.temporaries(item.eqns, item.writes, item.group)
        elif isinstance(item, Loop):
            loops.append(_loop(item, mesh))
            for body in task_bodies(item):
                results = [item.partition.accumulators[k].value for k in body.accumulates]
                outs = [*body.writes, *results]
                inner[item.number, body.place] = reading.temporaries(body.eqns, outs, item.group(body.place))
            for acc in item.partition.accumulators:
                if acc.value in layouts:
                    layouts.setdefault(acc.result, layouts[acc.value])
    no_compiler: dict = {"compiler": None, "segments": {}, "donated": donations(outline, mesh, donated)}
    programs = StepPrograms(outline=outline, mesh=mesh, loops=tuple(loops), layouts=layouts, **no_compiler)
    program = step_program(programs)

    def temporaries(group: int, instruction) -> int:
        if isinstance(instruction, Call):
            return inner.get(instruction.name, 0)
        places = [(instruction.loop, Place(t.stage, t.kind)) for t in instruction.tasks]
        return max((inner.get(p, 0) for p in places), default=0)

    walk = _Walk(programs, program, roles, temporaries)
    return {g: walk.group(g) for g in range(mesh.num_groups)}


def _loop(loop: Loop, mesh: MpmdMesh) -> LoopProgram:
    """A loop without executables."""
    zeros: dict = {}
    for group in range(mesh.num_groups):
        own = tuple(k for k, a in enumerate(loop.partition.accumulators) if loop.group(a.place) == group)
        if own:
            zeros[group] = own, None
    return LoopProgram(loop, {}, {}, zeros)


def _executables(programs: StepPrograms, instruction):
    if isinstance(instruction, Call):
        found = programs.segments.get(instruction.name)
        return [] if found is None else [found]
    loop = programs.loops[instruction.loop]
    places = tuple(Place(t.stage, t.kind) for t in instruction.tasks)
    if len(places) == 2 and places in loop.fused:
        return [loop.fused[places[0], places[1]]]
    entries = [loop.tasks.get(p) for p in places]
    return [e.executable for e in entries if e is not None and e.executable is not None]


class _Walk:
    """Adds up what is alive in a group, instruction by instruction."""

    def __init__(self, programs: StepPrograms, program: Program, roles, temporaries: Callable):
        self.programs = programs
        self.program = program
        self.temporaries = functools.cache(temporaries)
        outline = programs.outline
        self.vars = {name: v for v, name in outline.names.items()}
        self.kinds = {outline.names[v]: roles.get(v, "data") for v in outline.trace.jaxpr.invars}
        for loop in programs.loops:
            self.vars.update((edge_name(loop.loop, v), v) for v in loop.loop.partition.names)
        self._sizes: dict[tuple[str, int], tuple[int, bool]] = {}

    def size(self, value: Value, group: int) -> tuple[int, bool]:
        """Bytes on each device, and whether they are in host memory."""
        key = value.name, group
        if key not in self._sizes:
            v = self.vars[value.name]
            nbytes = equations.nbytes(v.aval)
            sharding = self.programs.sharding(v, group)
            shape = getattr(v.aval, "shape", ())
            if nbytes and shape:
                part = 1
                for n in sharding.shard_shape(tuple(shape)):
                    part *= n
                nbytes = nbytes * part // equations.size(v.aval)
            layout = self.programs.layouts.get(v, (PartitionSpec(), None))
            self._sizes[key] = nbytes, (layout[1] or compat.memory_kind(v.aval)) in ("pinned_host", "unpinned_host")
        return self._sizes[key]

    def kind(self, value: Value) -> str:
        return "activations" if value.microbatch is not None else self.kinds.get(value.name, "gradients")

    def group(self, group: int) -> dict[str, int]:
        alive: dict[str, int] = dict.fromkeys(KINDS, 0)
        peak: dict[str, int] = dict.fromkeys((*KINDS, "peak", "host"), 0)
        host = 0
        live: set[Value] = set()

        def add(value: Value, sign: int):
            nonlocal host
            if (value in live) == (sign > 0):
                return  # an accumulator that a task takes over and gives back
            (live.add if sign > 0 else live.discard)(value)
            nbytes, in_host = self.size(value, group)
            if in_host:
                host += sign * nbytes
            else:
                alive[self.kind(value)] += sign * nbytes

        def note(temporaries: int = 0):
            for kind, nbytes in alive.items():
                peak[kind] = max(peak[kind], nbytes)
            peak["temporaries"] = max(peak["temporaries"], temporaries)
            peak["peak"] = max(peak["peak"], sum(alive.values()) + temporaries)
            peak["host"] = max(peak["host"], host)

        for value in self.program.inputs[group]:
            add(value, 1)
        note()
        for instruction in self.program.groups[group]:
            if isinstance(instruction, (Run, Call)):
                for value in instruction.donates:
                    if value not in instruction.writes:
                        add(value, -1)
                for value in instruction.writes:
                    add(value, 1)
                note(self.temporaries(group, instruction))
            elif isinstance(instruction, Recv):
                add(instruction.value, 1)
                note()
            elif isinstance(instruction, Free):
                add(instruction.value, -1)
        arguments = sum(peak[kind] for kind in ("parameters", "state", "data"))
        return {"arguments": arguments, **peak}


# --- reading equations ----------------------------------------------------------------------------


class _Reading:
    """Shardings and temporaries of programs that nobody has compiled."""

    def __init__(self, mesh: MpmdMesh, layouts: dict[compat.Var, Layout], batches: Set[compat.Var] = frozenset()):
        self.mesh = mesh
        self.layouts = layouts
        self.batches = batches  # arguments that are data

    def spec(self, v) -> PartitionSpec | None:
        if isinstance(v, compat.Literal) or v not in self.layouts:
            return None
        return self.layouts[v][0]

    def nbytes(self, v, group: int) -> int:
        """Bytes on each device of a group."""
        nbytes, shape = equations.nbytes(v.aval), tuple(getattr(v.aval, "shape", ()))
        spec = self.spec(v)
        if spec is None or not nbytes or not shape:
            return nbytes
        part = 1
        for n in fit((spec, None), self.mesh.groups[group], shape).shard_shape(shape):
            part *= n
        return nbytes * part // equations.size(v.aval)

    def propagate(self, eqn, made) -> None:
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

    def _back(self, v, spec: PartitionSpec, made) -> None:
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

    def _told(self, eqn, v) -> PartitionSpec | None:
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
        return _rearranged(name, params, eqn.invars, [self.spec(x) for x in eqn.invars])

    def temporaries(self, eqns, results, group: int) -> int:
        """The most bytes that an executable holds at once beside its arguments and results."""
        made = {v: eqn for eqn in eqns for v in equations.outputs(eqn)}
        for eqn in eqns:
            self.propagate(eqn, made)
        stored = {v for v, eqn in made.items() if _is_stored(eqn)}
        for eqn in eqns:
            if equations.is_heavy(eqn) and not equations.changes_memory(eqn):
                stored.update(
                    v for v in equations.variables(eqn.invars) if v in made and not equations.is_layout(made[v])
                )
        kept = set(equations.variables(results))
        last: dict[compat.Var, int] = {}

        def use(v, position):
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
            inside = max((_Reading(self.mesh, {}).inner(j, group) for j in compat.jaxprs_in(eqn.params)), default=0)
            most = max(most, alive + inside)
            alive -= sum(self.nbytes(v, group) for v in ends[position])
        return most

    def inner(self, jaxpr, group: int) -> int:
        """Temporaries of an inner jaxpr, its results among them."""
        return self.temporaries(jaxpr.eqns, (), group)


def _is_stored(eqn) -> bool:
    """Whether XLA writes the results of an equation to memory rather than fuse them into their readers."""
    if equations.changes_memory(eqn) or equations.is_layout(eqn):
        return False
    return equations.is_heavy(eqn) or eqn.primitive.name.startswith(("reduce", "arg", "gather", "random"))


def _rearranged(name: str, params, invars, specs) -> PartitionSpec | None:
    """The spec of a result whose dimensions are those of an operand in another order."""

    def entries(i):
        found = list(specs[i].partitions) if specs[i] is not None else []
        return found + [None] * (invars[i].aval.ndim - len(found))

    if name == "dot_general":
        ((lhs_sum, rhs_sum), (lhs_batch, rhs_batch)) = params["dimension_numbers"]
        lhs, rhs = entries(0), entries(1)
        return PartitionSpec(
            *(lhs[d] for d in lhs_batch),
            *(e for d, e in enumerate(lhs) if d not in (*lhs_sum, *lhs_batch)),
            *(e for d, e in enumerate(rhs) if d not in (*rhs_sum, *rhs_batch)),
        )
    if specs[0] is None:
        return None
    first = entries(0)
    if name == "transpose":
        return PartitionSpec(*(first[d] for d in params["permutation"]))
    if name.startswith("reduce_") and "axes" in params:
        return PartitionSpec(*(e for d, e in enumerate(first) if d not in params["axes"]))
    if name == "squeeze":
        return PartitionSpec(*(e for d, e in enumerate(first) if d not in params["dimensions"]))
    if name == "broadcast_in_dim":
        found = [None] * len(params["shape"])
        for d, e in zip(params["broadcast_dimensions"], first, strict=True):
            found[d] = e
        return PartitionSpec(*found)
    if name in ("dynamic_slice", "slice", "convert_element_type", "cumsum", "sort"):
        return PartitionSpec(*first)
    return None
