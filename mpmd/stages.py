"""`Traced` and `Lowered`: the stages of a step before it is `Compiled`, as in `jax.stages`.

Each can be printed and inspected. A trace and a partition depend on shapes alone; only `Compiled` depends on devices:
it places the arguments and runs the program.
"""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import jax

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.compile.compiler import CompilerOptions
from mpmd.compile.program import loop_graph, step_program
from mpmd.compile.step import StepPrograms, compile_step
from mpmd.compiled import Compiled, ForCall
from mpmd.costs.devices import machine_for_cuts, machine_of, memory_limit
from mpmd.costs.machine import Machine
from mpmd.cutting.cut import cut_trace
from mpmd.cutting.cut_outside import cut_outside
from mpmd.cutting.split_rows import SplitStep, hints_of_pieces, in_one_group, rows_of, split_rows
from mpmd.job import joining
from mpmd.observe import ledger
from mpmd.ops import lists
from mpmd.partition.outline import Loop, Outline
from mpmd.partition.place_segments import outline_step
from mpmd.pytrees import PyTree, TreeDef
from mpmd.report.estimate import Draft, draft_of
from mpmd.report.loop_notes import gathered_gradients, undivided_backward
from mpmd.report.repetition import repetition
from mpmd.report.shares import ListFigures, MicrobatchFigures, Shares, figures_of
from mpmd.report.task_costs import ordered_by_costs
from mpmd.tracing.arguments import Hint, broadcast, hint_of
from mpmd.tracing.trace import Trace, trace_step
from mpmd.users_frame import users_frame
from scheduler import Costs
from scheduler.base.collector import without_collection
from scheduler.base.texts import counted
from scheduler.base.waiting import waiting

# Maps a list of microbatches (its path) and the cuts of its loop to the step for each shape, and to the number of the
# shape of each microbatch.
Shapes = Callable[[lists.Path, tuple[int, ...] | None], "tuple[Sequence[Traced], Sequence[int]]"]


def shape_of(mesh: MpmdMesh) -> tuple[Hashable, ...]:
    """Returns the properties of a mesh that a trace and its partition depend on: all except the devices."""
    return mesh.tracing_mesh().abstract_mesh, mesh.mpmd_axis_name, tuple(g.abstract_mesh for g in mesh.groups)


def check_options(options: CompilerOptions | None, name: str, num_stages: int | None = None) -> None:
    """Checks options for XLA: values by name, for all programs or, in a mapping by stage, for the tasks of a stage."""
    if not isinstance(options, Mapping | None):
        raise ValueError(f"{name}: compiler_options is {options!r:.80}; give a dict of XLA's options by name.")
    for key, value in (options or {}).items():
        is_stage = isinstance(key, int) and not isinstance(key, bool)
        if is_stage and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            if num_stages is not None and not 0 <= key < num_stages:
                raise ValueError(f"{name}: compiler_options are given for stage {key}, of {num_stages} stages.")
        elif not isinstance(key, str) or isinstance(value, Mapping):
            raise ValueError(
                f"{name}: compiler_options has {key!r}: {value!r:.80}. They are options of XLA by name, for the"
                " programs of all stages and groups: {'xla_cpu_enable_fast_math': True}; or such options for the tasks"
                " of a stage: {0: {'xla_cpu_enable_fast_math': True}}."
            )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A step as one jaxpr. `str()` prints it."""

    _trace: Trace
    _name: str
    _mesh: MpmdMesh
    _hints: tuple[Hint, ...]
    _out_shardings: PyTree
    _donated: frozenset[int]
    _options: CompilerOptions
    _shapes: "Shapes | None" = None
    _audit_every: int = 0
    _for_call: ForCall | None = None
    _moves: bool = False  # its results are its arguments, each of them whole in the groups of its hint

    @property
    def jaxpr(self) -> compat.ClosedJaxpr:
        """The jaxpr, flat; loops are `treduce` equations."""
        return compat.ClosedJaxpr(self._trace.jaxpr, ())

    @property
    def out_tree(self) -> TreeDef:
        """The structure of the result."""
        return self._trace.out_tree

    @compat.api_boundary
    def lower(self, *, mpmd_mesh: MpmdMesh | None = None) -> "Lowered":
        """Cuts the step into tasks and places everything on groups.

        Args:
          mpmd_mesh: a mesh of the same shape as the traced one, with other devices.

        Raises:
          StageError: the step cannot be cut.
          ValueError: `mpmd_mesh` has another shape.
        """
        mesh = self._mesh if mpmd_mesh is None else mpmd_mesh
        if mesh == self._mesh:
            return self._lowered
        if shape_of(mesh) != shape_of(self._mesh):
            raise ValueError(
                f"Traced.lower: the step was traced for {self._mesh}, which has another shape or other axes than"
                f" {mesh}.\n  Trace it again: mpmd.jit(step, mpmd_mesh=...).trace(*args)."
            )
        return self._lower(mesh)

    @functools.cached_property
    def _lowered(self) -> "Lowered":
        with waiting(lambda: ("mpmd: cutting the step into tasks", 0.0)), ledger.during(ledger.COMPILING):
            return self._lower(self._mesh)

    def _is_of(self, hints: Sequence[Hint]) -> bool:
        """Returns whether this trace serves arguments in these layouts. It does if it was made for these layouts, or if
        it left the layouts of some arguments open and was compiled to read these arguments where they are now.
        """
        if (made_for := self._hints) == tuple(hints):
            return True
        lowered = vars(self).get("_lowered")
        compiled = None if lowered is None else vars(lowered).get("_compiled")
        return compiled is not None and all(
            made == hint or (made == Hint() and compiled._reads(i, hint))
            for i, (made, hint) in enumerate(zip(made_for, hints, strict=True))
        )

    def _lowered_within(self, limit: float) -> "Lowered":
        """Returns the step for `limit` bytes per device: without recomputation ahead, if that exceeds the limit."""
        lowered = self._lowered
        outline, ins, donated = lowered._outline, lowered._ins, lowered._donated
        if not _recomputes_too_much_ahead(outline, self._mesh, ins, donated, limit):
            return lowered
        return self._lower(self._mesh, limit)

    def _lower(self, mesh: MpmdMesh, limit: float | None = None) -> "Lowered":
        """Cuts the step for a mesh's devices, within `limit` bytes on each; None: all memory, if its size is known."""
        trace = self._trace
        wish = broadcast(self._out_shardings, trace.out_tree, "out_shardings")
        outs = [
            hint_of(w, None, self._mesh, n, v.aval) if w is not None else Hint()
            for w, n, v in zip(wish, trace.out_names, trace.jaxpr.outvars, strict=True)
        ]
        forwarded = self._donated if all(w is None for w in wish) else frozenset()
        split = split_rows(
            cut_outside(cut_trace(trace, mesh, [h.layout for h in self._hints]), self._hints, mesh.num_groups),
            [rows_of(h) for h in self._hints],
            [rows_of(h) for h in outs],
            [h.groups is not None and not h.ranges for h in outs],
            has_whole_arguments=self._moves,
        )
        ins, outs = hints_of_pieces(self._hints, split.ins), hints_of_pieces(outs, split.outs)
        donated, forwarded = split.pieces_of(self._donated), split.pieces_of(forwarded)
        specs = [None if h.layout is None else h.layout[0] for h in ins]
        asked = [h.groups for h in outs]

        def outlined(ahead: bool = True) -> Outline:
            found = outline_step(split.trace, mesh, [h.groups for h in ins], asked, forwarded, specs, ahead)
            return ordered_by_costs(found, mesh, machine_for_cuts(mesh))

        outline = outlined()
        if (single := in_one_group(ins, split, outline.inputs)) != ins:
            ins = single
            outline = outlined()
        limit = memory_limit(mesh, machine_of(mesh)) if limit is None else limit
        if _recomputes_too_much_ahead(outline, mesh, ins, donated, limit):
            outline = outlined(ahead=False)
        return Lowered(
            outline, split, mesh, self._name, ins, outs, donated, self._options, self._shapes, self._audit_every,
            self._for_call,
        )  # fmt: skip

    def __str__(self):
        return str(self._trace)

    def __repr__(self):
        loops = [e.params["info"] for e in self._trace.jaxpr.eqns if e.primitive.name == "treduce"]
        shown = "; ".join(f"{i.schedule}, {counted(i.num_microbatches, 'microbatch')}" for i in loops) or "no loop"
        return f"Traced({self._name}: {len(self._trace.jaxpr.eqns)} equations; {shown})"


def _recomputes_too_much_ahead(
    outline: Outline, mesh: MpmdMesh, ins: Sequence[Hint], donated: frozenset[int], limit: float | None
) -> bool:
    """Returns whether stages recompute before their gradient arrives, and devices lack the memory for that."""
    if limit is None or not any(t.place.kind == "R" for loop in outline.loops for t in loop.partition.tasks):
        return False
    memory = draft_of(outline, mesh, [h.layout for h in ins], donated).memory()
    return max(of_group["peak"] for of_group in memory.values()) > limit


def _same(loop: Loop, lowered: "Lowered") -> Loop:
    """Returns the same loop in the step for microbatches of another shape."""
    return next(other for other in lowered._outline.loops if other.number == loop.number)


def _mover(
    mesh: MpmdMesh,
    arrays: Sequence[MpmdArray],
    names: Sequence[str],
    avals: Sequence[compat.Aval],
    targets: Sequence[MpmdSharding],
) -> Compiled:
    """Compiles a step that moves arrays with the types `avals` to the shardings in which another step reads them."""
    hints = tuple(hint_of(x.mpmd_sharding, x, mesh, name) for x, name in zip(arrays, names, strict=True))
    tree = jax.tree.structure((tuple(avals), {}))
    trace = trace_step(lambda *arrays: list(arrays), avals, tree, names, mesh)
    return Traced(trace, "move", mesh, hints, targets, frozenset(), {}, _moves=True).lower().compile()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lowered:
    """A step, cut into tasks and segments. `.as_text()` prints the partition."""

    _outline: Outline
    _split: SplitStep
    _mesh: MpmdMesh
    _name: str
    _ins: Sequence[Hint]
    _outs: Sequence[Hint]
    _donated: frozenset[int]
    _options: CompilerOptions
    _shapes: "Shapes | None" = None
    _audit_every: int = 0
    _for_call: ForCall | None = None

    def as_text(self) -> str:
        """Returns each stage's tasks as text: their equations, reads and writes, and the bytes that cross groups."""
        return str(self._outline)

    __str__ = as_text

    def __repr__(self):
        return f"Lowered({self._mesh}; {self._outline!r})"

    @property
    def cuts(self) -> tuple | None:
        """The number of layers of each stage, in the form of `treduce(cuts=...)`; None where `mark_stage_end` marks
        the stages. For a step with several loops, a tuple with the cuts of each.
        """
        found = tuple(loop.partition.info.cuts for loop in self._outline.loops)
        return found[0] if len(found) == 1 else found or None

    @compat.api_boundary
    def costs(self, loop: int = -1) -> Costs:
        """Estimates time and memory of the tasks of a loop, by the roofline of the devices. Compiles nothing.

        The result is an argument of `scheduler.simulate`, `search` and `order_microbatches`. For a loop over a list, it
        contains the costs of each microbatch (`Costs.microbatches`); its other costs are for the largest microbatch.

        Args:
          loop: the number of the loop; by default the last one of the step.

        Raises:
          ValueError: the step has no such loop.
        """
        if not -len(self._outline.loops) <= loop < len(self._outline.loops):
            raise ValueError(
                f"costs: loop is {loop}, and the step has {len(self._outline.loops)} loops with a schedule."
            )
        found, machine = self._outline.loops[loop], machine_of(self._mesh)
        return (self._of_list(found, machine) or self._figures(found, machine)).costs

    def _figures(self, loop: Loop, machine: Machine) -> MicrobatchFigures:
        return figures_of(loop, self._outline, self._mesh, machine, self._draft.sizes)

    @functools.cached_property
    def _draft(self) -> Draft:
        """The step and its memory, as estimated before it is compiled."""
        return draft_of(self._outline, self._mesh, [h.layout for h in self._ins], self._donated)

    def _of_list(self, loop: Loop, machine: Machine) -> ListFigures | None:
        """Returns the figures of a loop over a list; None for other loops."""
        if loop.partition.info.path is None or self._shapes is None:
            return None
        every = self._of_microbatches(loop)
        known = {step: step._figures(_same(loop, step), machine) for step in dict.fromkeys(every)}
        producers = {edge.name: edge.producer for edge in loop_graph(loop).edges}
        return ListFigures(self._figures(loop, machine), producers, tuple(known[step] for step in every))

    def _shares_on(self, machine: Machine) -> Shares:
        """Returns the shares: the work of each microbatch in the step's lists, relative to the largest one."""
        found = {loop.number: self._of_list(loop, machine) for loop in self._outline.loops}
        return Shares({number: of_list for number, of_list in found.items() if of_list is not None})

    def _of_microbatches(self, loop: Loop | None = None) -> "list[Lowered]":
        """Returns, for a loop over a list (by default the first), the step for each microbatch; else only this step."""
        loops = self._outline.loops if loop is None else [loop]
        path = next((one.partition.info.path for one in loops if one.partition.info.path), None)
        if path is None or self._shapes is None:
            return [self]
        steps, numbers = self._shapes(path, self.cuts if len(self._outline.loops) == 1 else None)
        return [steps[n]._lowered for n in numbers]

    @compat.api_boundary
    def estimate(self) -> dict[int, dict[str, int]]:
        """Estimates `Compiled.memory_analysis()` for every group. Compiles nothing."""
        return self._draft.memory()

    @compat.api_boundary
    def compile(self, compiler_options: CompilerOptions | None = None) -> Compiled:
        """Compiles each distinct task once, builds the program and checks it.

        Args:
          compiler_options: options for XLA, as in `jax.stages.Lowered.compile`; they override options of `mpmd.jit`.

        Returns:
          The compiled step; without `compiler_options`, a call of the jitted step runs the same one.
        """
        check_options(compiler_options, "compile")
        with joining.compiling():
            compiled = self._begin_to_compile(compiler_options) if compiler_options else self._compiled
            try:
                compiled._wait()
            except BaseException:
                vars(self).pop("_compiled", None)
                raise
            return copy.copy(compiled)  # with a `timing` of its own

    @functools.cached_property
    def _compiled(self) -> Compiled:
        return self._begin_to_compile()

    def _begin_to_compile(
        self,
        compiler_options: CompilerOptions | None = None,
        kind: type[Compiled] = Compiled,
        others: Compiled | None = None,
    ) -> Compiled:
        """Compiles the step, without waiting: a first call may begin while later programs are compiled. The programs of
        `others`, which was compiled with the same options, are reused.
        """
        described = compat.described_options(self._mesh.groups[0].devices.flat[0])
        options: dict[str | int, object] = {**described, **self._options, **(compiler_options or {})}
        check_options(options, self._name, max((loop.schedule.num_stages for loop in self._outline.loops), default=0))
        with joining.compiling():
            ins, outs = [h.layout for h in self._ins], [h.layout for h in self._outs]
            programs = compile_step(
                self._outline, self._mesh, ins, outs, self._donated, self._name, options, self._split.stacks,
                None if others is None else others._programs.compiler,
            )  # fmt: skip
            try:
                if jax.process_index() == 0:
                    for text in self._warnings(programs):
                        warnings.warn(f"{self._name}: {text}", stacklevel=users_frame())
                with without_collection():
                    program = step_program(self._outline, self._mesh.num_groups, programs.donated)
                    made = kind(programs, program, self._donated, self._split, self._audit_every)
                    made._shares_on, made._for_call, made._mover_of = self._shares_on, self._for_call, _mover
                    return made
            finally:
                programs.compiler.close()

    def _warnings(self, programs: StepPrograms) -> Iterator[str]:
        """Yields warnings about costs that are too large to go unmentioned; `explain()` has them, too."""
        if (repeated := repetition(programs)) is not None:
            yield repeated
        for loop in self._outline.loops:
            yield from filter(None, (gathered_gradients(loop), undivided_backward(loop)))
