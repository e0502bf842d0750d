"""`Traced`, `Lowered` and `Compiled`: what a step goes through on its way to running, as in `jax.stages`.

Each can be printed and asked. A trace and a partition depend on shapes alone; devices come in with `Compiled`, which
places the arguments and runs the program.
"""

import copy
import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.typing import ArrayLike

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.program import loop_graph, step_program
from mpmd.compile.step import StepPrograms, compile_step
from mpmd.costs.devices import machine_for_cuts, machine_of, memory_limit
from mpmd.costs.machine import Machine
from mpmd.cutting.cut import cut_trace
from mpmd.cutting.cut_outside import cut_outside
from mpmd.cutting.split_rows import SplitStep, hints_of_pieces, in_one_group, rows_of, split_rows
from mpmd.job import joining
from mpmd.job.wires import expected_wire
from mpmd.observe import ledger
from mpmd.observe.records import RecordedTimes
from mpmd.ops import lists
from mpmd.partition.outline import Loop, Outline
from mpmd.partition.place_segments import outline_step
from mpmd.report.estimate import Draft, draft_of
from mpmd.report.explain import StepTraffic, explain
from mpmd.report.flops import cost_per_step
from mpmd.report.gathered import facts_of, profile_of
from mpmd.report.html import Facts, report_page
from mpmd.report.loop_notes import gathered_gradients, undivided_backward
from mpmd.report.memory import measured
from mpmd.report.profile import LoopFacts, Profile
from mpmd.report.program_texts import texts
from mpmd.report.repetition import repetition
from mpmd.report.shares import ListFigures, MicrobatchFigures, Shares, figures_of
from mpmd.report.task_costs import ordered_by_costs
from mpmd.run.adaptive_executor import AdaptiveExecutor, is_adaptive
from mpmd.run.audits import AuditedAdaptiveExecutor, AuditedExecutor, AuditSampling
from mpmd.run.donated import apart, consume, usable
from mpmd.run.executor import Executor
from mpmd.run.inputs import Inputs
from mpmd.run.results import Results
from mpmd.tracing.arguments import Args, Hint, Kwargs, broadcast, check_is_outside, hint_of
from mpmd.tracing.trace import Trace, trace_step
from mpmd.users_frame import users_frame
from scheduler import Costs, Program, Timeline
from scheduler.base.collector import without_collection
from scheduler.base.texts import counted
from scheduler.base.waiting import waiting

_C = TypeVar("_C", bound="Compiled")
# Of a list of microbatches (its path), with the cuts of its loop: the step for each shape, and which microbatch has
# which shape.
Shapes = Callable[[lists.Path, tuple[int, ...] | None], "tuple[Sequence[Traced], Sequence[int]]"]
# Of a call, `(args, kwargs)`, with lists of microbatches: the step that runs it, and its flat arguments.
ForCall = Callable[[Args, Kwargs], "tuple[Compiled, Sequence[ArrayLike]]"]


def shape_of(mesh: MpmdMesh) -> tuple[Hashable, ...]:
    """All of a mesh that a trace and its partition depend on: everything but the devices."""
    return mesh.tracing_mesh().abstract_mesh, mesh.mpmd_axis_name, tuple(g.abstract_mesh for g in mesh.groups)


def check_options(options: Mapping[Any, Any] | None, name: str, num_stages: int | None = None) -> None:
    """Options for XLA are single values by name, for all programs or, in a mapping, for the tasks of a stage."""
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
    _out_shardings: Any
    _donated: frozenset[int]
    _options: Mapping[Any, Any]
    _shapes: "Shapes | None" = None
    _audit_every: int = 0
    _for_call: "ForCall | None" = None
    _moves: bool = False  # its results are its arguments, each of which is whole where its hint says

    @property
    def jaxpr(self) -> compat.ClosedJaxpr:
        """The jaxpr, flat; loops are `treduce` equations."""
        return compat.ClosedJaxpr(self._trace.jaxpr, ())

    @property
    def out_tree(self) -> lists.TreeDef:
        """The structure of the result."""
        return self._trace.out_tree

    @compat.api_boundary
    def lower(self, *, mpmd_mesh: MpmdMesh | None = None) -> "Lowered":
        """Cuts the step into tasks and places everything on groups.

        Args:
          mpmd_mesh: other devices than the step was traced for, in a mesh of the same shape.

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
        """Whether arguments in these layouts may have what was made of this trace: it was made for them, or nothing
        was said of some arguments, and it was compiled to read those where they are now.
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
        """The step for devices of which it may use `limit` bytes: if it needs them, nothing is computed again ahead."""
        lowered = self._lowered
        outline, ins, donated = lowered._outline, lowered._ins, lowered._donated
        if not _recomputes_too_much_ahead(outline, self._mesh, ins, donated, limit):
            return lowered
        return self._lower(self._mesh, limit)

    def _lower(self, mesh: MpmdMesh, limit: float | None = None) -> "Lowered":
        """The step, cut for the devices of a mesh.

        Args:
          limit: bytes that it may use on each of them; None: all that they have, where that is known.
        """
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
    """Whether stages compute something again before they have their gradient, for which devices lack the memory."""
    if limit is None or not any(t.place.kind == "R" for loop in outline.loops for t in loop.partition.tasks):
        return False
    memory = draft_of(outline, mesh, [h.layout for h in ins], donated).memory()
    return max(of_group["peak"] for of_group in memory.values()) > limit


def _same(loop: Loop, lowered: "Lowered") -> Loop:
    """That loop of the step for microbatches of another shape."""
    return next(other for other in lowered._outline.loops if other.number == loop.number)


def _items(outline: Outline, mesh: MpmdMesh) -> str:
    """A step in a line: its loops, and what is around them."""
    loops = [
        f"{loop.schedule}, {counted(loop.partition.info.num_microbatches, 'microbatch')}" for loop in outline.loops
    ]
    around = len(outline.items) - len(loops)
    return f"{mesh}; {'; '.join(loops) or 'no loop'}; {around} segments and transfers around"


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
    _options: Mapping[Any, Any]
    _shapes: "Shapes | None" = None
    _audit_every: int = 0
    _for_call: "ForCall | None" = None

    def as_text(self) -> str:
        """Each stage's tasks: their equations, what they read and write, and the bytes that cross."""
        return str(self._outline)

    __str__ = as_text

    def __repr__(self):
        return f"Lowered({_items(self._outline, self._mesh)})"

    @property
    def cuts(self) -> Any:
        """How many layers each stage gets, as `treduce(cuts=...)` takes it; None where `mark_stage_end` says it.

        Of a step with several loops, a tuple with the cuts of each.
        """
        found = tuple(loop.partition.info.cuts for loop in self._outline.loops)
        return found[0] if len(found) == 1 else found or None

    @compat.api_boundary
    def costs(self, loop: int = -1) -> Costs:
        """What the tasks of a loop take and hold, by the roofline of the devices. Compiles nothing.

        `scheduler.simulate`, `search` and `order_microbatches` take it. Of a loop over a list, the costs of each of its
        microbatches are in it (`Costs.microbatches`), and the others are those of the largest.

        Args:
          loop: which one of the step, the last one by default.

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
        """The step, and what it needs, before it is compiled."""
        return draft_of(self._outline, self._mesh, [h.layout for h in self._ins], self._donated)

    def _of_list(self, loop: Loop, machine: Machine) -> ListFigures | None:
        """Of a loop over a list."""
        if loop.partition.info.path is None or self._shapes is None:
            return None
        every = self._of_microbatches(loop)
        known = {step: step._figures(_same(loop, step), machine) for step in dict.fromkeys(every)}
        producers = {edge.name: edge.producer for edge in loop_graph(loop).edges}
        return ListFigures(self._figures(loop, machine), producers, tuple(known[step] for step in every))

    def _shares_on(self, machine: Machine) -> Shares:
        """What each microbatch of its lists does beside the largest."""
        found = {loop.number: self._of_list(loop, machine) for loop in self._outline.loops}
        return Shares({number: of_list for number, of_list in found.items() if of_list is not None})

    def _of_microbatches(self, loop: Loop | None = None) -> "list[Lowered]":
        """Of a loop over a list (the first one), the step for each of its microbatches; else the step alone."""
        loops = self._outline.loops if loop is None else [loop]
        path = next((one.partition.info.path for one in loops if one.partition.info.path), None)
        if path is None or self._shapes is None:
            return [self]
        steps, numbers = self._shapes(path, self.cuts if len(self._outline.loops) == 1 else None)
        return [steps[n]._lowered for n in numbers]

    @compat.api_boundary
    def estimate(self) -> dict[int, dict[str, int]]:
        """`Compiled.memory_analysis()` for every group before anything is compiled, roughly. Costs no compilation."""
        return self._draft.memory()

    @compat.api_boundary
    def compile(self, compiler_options: Mapping[Any, Any] | None = None) -> "Compiled":
        """Compiles each distinct task once, builds the program and checks it.

        Args:
          compiler_options: for XLA, as in `jax.stages.Lowered.compile`; they go before those of `mpmd.jit`.

        Returns:
          What a call of the jitted step runs, too, if `compiler_options` are not given.
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
    def _compiled(self) -> "Compiled":
        return self._begin_to_compile()

    def _begin_to_compile(
        self,
        compiler_options: Mapping[Any, Any] | None = None,
        kind: "type[_C] | None" = None,
        others: "Compiled | None" = None,
    ) -> "_C | Compiled":
        """As `compile`, but a first call may begin while later programs are compiled.

        Args:
          kind: what to make; None: a `Compiled`.
          others: a step that was compiled with the same options, whose programs are used too.
        """
        described = compat.described_options(self._mesh.groups[0].devices.flat[0])
        options: dict[Any, Any] = {**described, **self._options, **(compiler_options or {})}
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
                    made = (kind or Compiled)(programs, program, self._donated, self._split, self._audit_every)
                    made._shares_on, made._for_call = self._shares_on, self._for_call
                    return made
            finally:
                programs.compiler.close()

    def _warnings(self, programs: StepPrograms) -> Iterator[str]:
        """What costs so much that it is said without being asked; `explain()` says it, too."""
        if (repeated := repetition(programs)) is not None:
            yield repeated
        for loop in self._outline.loops:
            yield from filter(None, (gathered_gradients(loop), undivided_backward(loop)))


class Compiled:
    """A compiled step: call it with arguments of the shapes that it was compiled for.

    Attributes:
      timing: set it to True to have calls measured for `.last_timeline()`. Each call then waits for its result.
    """

    def __init__(
        self,
        programs: StepPrograms,
        program: Program,
        donated: frozenset[int],
        split: SplitStep,
        audit_every: int = 0,
    ):
        self._audit_every = audit_every
        self._programs = programs
        self._program = program
        self._donated = usable(programs, donated)
        self._consumed = {i: ks for i, ks in enumerate(split.in_positions) if not self._donated.isdisjoint(ks)}
        self._bound = None if programs.mesh.is_described else self._executor_of(programs, program, split)
        self._timed: Profile | None = None
        self._shares_on: Callable[[Machine], Shares] = lambda machine: Shares()
        self._for_call: ForCall | None = None
        self._movers: dict[Hashable, Compiled] = {}
        self.timing = False
        self._split = split
        self._inputs = Inputs(programs, split)
        self._results = Results(programs, split)

    def _executor_of(self, programs: StepPrograms, program: Program, split: SplitStep) -> Executor | None:
        is_free = any(map(is_adaptive, programs.loops))
        if self._audit_every:
            kind = AuditedAdaptiveExecutor if is_free else AuditedExecutor
            return kind(programs, program, split.whole, sampling=AuditSampling(self._audit_every))
        return (AdaptiveExecutor if is_free else Executor)(programs, program, split.whole)

    def _wait(self) -> None:
        """Waits for all programs that will be called."""
        if self._bound is None:
            self._programs.compiler.release()
        else:
            self._bound.finish()

    @property
    def _executor(self) -> Executor:
        if self._bound is None:
            raise RuntimeError(
                "mpmd: this step was compiled for devices that are not here (topology_mesh)."
                " It can be asked, not called."
            )
        return self._bound

    def __repr__(self):
        programs = counted(self._programs.compiler.num_programs, "program")
        return f"Compiled({_items(self._programs.outline, self._programs.mesh)}; {programs})"

    # --- what it is -------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """What each group runs, sends, receives and frees; checked."""
        return self._program

    @property
    def input_shardings(self) -> Any:
        """`(args, kwargs)` of `MpmdSharding`, as in `jax.stages.Compiled`."""
        return jax.tree.unflatten(self.in_tree, self._inputs.shardings)

    @property
    def output_shardings(self) -> Any:
        """The result's tree of `MpmdSharding`."""
        return jax.tree.unflatten(self.out_tree, self._results.shardings)

    @property
    def in_tree(self) -> lists.TreeDef:
        """The structure of `(args, kwargs)`."""
        return self._split.whole.in_tree

    @property
    def out_tree(self) -> lists.TreeDef:
        """The structure of the result."""
        return self._split.whole.out_tree

    @compat.api_boundary
    def as_text(self, stage: int | None = None, kind: str | None = None, dialect: str | None = None) -> str:
        """The partition and the program, for people; with arguments, the programs that XLA is given.

        Each of these stands under a line `// name`, which says so where it runs a program that was compiled under
        another name.

        Args:
          stage, kind: the tasks to show (kinds `F`, `B`, `R`, `I`, `W`); None for all.
          dialect: `"hlo"` (what XLA made of it; the default of tasks) or `"stablehlo"` (what XLA was given, with
            Shardy's annotations). Without a stage and a kind: all tasks, and the segments around the loops.

        Raises:
          ValueError: the step has no such task, or there is no such dialect.
        """
        if stage is not None or kind is not None or dialect is not None:
            return texts(self._programs, stage, kind, dialect)
        return f"{self._programs.outline}\n\n{self._program}"

    def explain(self) -> str:
        """The page to read before a big run.

        What runs where; each group's parameters and memory, against that of a device; how even the stages are; what
        crosses, why, and at which line of yours; what is computed twice; collectives and sums over groups; warnings
        that say what to do.
        """
        notes = [*dict.fromkeys(map(str, self._split.joins)), *([] if self._bound is None else self._bound.notes)]
        mesh = self._programs.mesh
        machine = machine_of(mesh)
        limit = memory_limit(mesh, machine)
        shares = self._shares_on(machine)
        if self._bound is None:
            wire = expected_wire(mesh.groups[0].devices.flat[0].platform)
            transport = f"by jax.device_put in a process, between processes by {wire}"
            traffic = StepTraffic.of_all(self._program, transport, shares)
        else:
            own = self._bound.bindings
            nbytes = round(sum(c.nbytes * shares.sent(c.value, c.target) for c in own.crossings))
            traffic = StepTraffic(own.num_calls, own.num_moves, nbytes, self._bound.transport)
        return explain(self._programs, self._program, traffic, shares, notes, limit)

    @compat.api_boundary
    def report(self, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
        """Writes one HTML page about the step, which a browser opens from disk: schedule, timeline, stages, memory, ….

        Runs nothing. Of a job, any process may write one, each to a path of its own: the memory is that of its groups.

        Args:
          path: of the file, which is replaced.
          profile: what was measured; by default the last `profile` of this step, if there was one.
        """
        outline, found = self._programs.outline, self._timed if profile is None else profile
        layouts = [self._programs.layouts[v] for v in outline.trace.arguments]
        planned = draft_of(outline, self._programs.mesh, layouts, self._donated).memory()
        shares = self._shares_on(machine_of(self._programs.mesh))
        page = report_page(Facts(self._programs, self._program, self.explain(), planned, found, shares))
        Path(path).write_text(page, encoding="utf-8")

    def memory_analysis(self) -> dict[int, dict[str, int]]:
        """Per group of this process, bytes on each device: `parameters`, `state` and `data` (together `arguments`),
        the peaks of `gradients` and `activations`, the largest `temporaries` that XLA reports, and the `peak` of all.
        """
        return measured(self._programs, self._program)

    def cost_analysis(self) -> dict[str, float]:
        """Operations and bytes of one step on all devices, by XLA's cost analysis of each executable.

        For devices that are not here (`topology_mesh`), where XLA has none, they are counted in the equations.

        Returns:
          `"flops"`, floating-point operations, and `"bytes accessed"`, read from and written to device memory.
        """
        flops, nbytes = cost_per_step(self._programs, self._program, self._shares_on(machine_of(self._programs.mesh)))
        return {"flops": flops, "bytes accessed": nbytes}

    @compat.api_boundary
    def profile(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, steps: int = 3) -> Profile:
        """Runs some steps as in training, and measures when everything of them ran on every rank.

        Nothing of a step waits that would not wait otherwise; a step begins when this process has the results of the
        one before. One step more runs first, which is not measured. Every process calls this together, as a step.
        A step over lists of microbatches takes any lists, as a call of the jitted step does, and measures each shape.

        Args:
          args, kwargs: of a call, `args` as one tuple. Donated ones are used up, as by a call. Each next step takes in
            place of a donated argument the result that takes its place; if there is none, the argument is copied for
            each step.
          steps: how many are measured.

        Returns:
          The profile; `.result` is the result of the last step, to go on with.

        Raises:
          ValueError: `steps` is less than 1.
          TypeError: the arguments have other shapes or another structure, or are not given as a tuple.
        """
        if steps < 1:
            raise ValueError(f"profile: steps={steps}, expected at least 1.")
        if not isinstance(args, Sequence) or not (kwargs is None or isinstance(kwargs, Mapping)):
            raise TypeError(
                "profile: pass the arguments of a call as one tuple: profile((a, b)), or profile((a,), {'b': b})."
            )
        step, leaves = self._for(tuple(args), dict(kwargs or {}))
        self._timed = step._profile(leaves, steps)
        return self._timed

    def _profile(self, leaves: Sequence[ArrayLike], steps: int) -> Profile:
        """Of flat arguments."""
        consumed, next_of = set(self._consumed), self._successors()
        rows: list[Callable[[], RecordedTimes]] = []
        result = None
        with waiting(lambda: (f"mpmd: measured {len(rows)} of {steps} steps", len(rows) / steps)):
            for number in range(steps + 1):
                lent = [copy.copy(x) if i in consumed - set(next_of) else x for i, x in enumerate(leaves)]
                result, found = self._timed_run(apart(lent, self._consumed), number)
                results = jax.tree.leaves(result)
                leaves = [results[next_of[i]] if i in next_of else x for i, x in enumerate(leaves)]
                rows += [found] if number else []
        return self._profile_of([found() for found in rows], result)

    def _successors(self) -> dict[int, int]:
        """Per donated argument, the result that takes its place, if there is one."""
        donors = self._programs.outline.donors
        result_of = {donors[ks[0]]: k for k, ks in enumerate(self._split.out_positions)}
        return {i: result_of[ks[0]] for i, ks in self._consumed.items() if ks[0] in result_of}

    @compat.api_boundary
    def last_timeline(self) -> Timeline:
        """When each task of the (last) loop ran, measured.

        Of the last `profile`, or of the last call while `.timing` was True; if there was none, of one call on zeros
        that is made now. `Costs.measured` of it feeds `scheduler.simulate` and `search`.

        Raises:
          ValueError: the step has no pipelined loop.
        """
        if not self._programs.loops:
            raise ValueError("last_timeline: the step has no treduce loop, so there are no tasks to show.")
        if self._timed is None:
            zeros = self._inputs.zeros()
            rows = RecordedTimes
            for _ in range(2):  # the first run of an executable is not typical; donated zeros are made anew
                copies = [*self._inputs.constants, *jax.tree.map(lambda x: x.copy(), zeros)]
                _, rows = self._executor.timed(copies, 1)
            self._timed = self._profile_of([rows()], None)
        return self._timed.timeline()

    def _profile_of(self, rows: Sequence[RecordedTimes], result: object) -> Profile:
        """The rows of all processes, put together."""
        executor = self._executor
        return profile_of(self._programs, self._loop_facts, executor.job, executor.ranks, rows, result)

    @functools.cached_property
    def _loop_facts(self) -> tuple[LoopFacts, ...]:
        return tuple(
            facts_of(p.loop, [p.executables], [0] * p.loop.partition.info.num_microbatches)
            for p in self._programs.loops
        )

    def _seconds_of_calls(self, count: int) -> list[float]:
        """Seconds of as many ordinary calls on zeros, until this process has its results."""
        zeros, found = self._inputs.zeros(), []
        self._executor.prepare()
        for _ in range(count + 1):
            arguments = jax.block_until_ready(jax.tree.map(lambda x: x.copy(), zeros))
            start = time.perf_counter()
            jax.block_until_ready(self._executor([*self._inputs.constants, *arguments]))
            found.append(time.perf_counter() - start)
        return found[1:]  # the first call warms up

    # --- running ----------------------------------------------------------------------------------

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any):
        step, leaves = self._for(args, kwargs)
        return step._run(leaves)

    def _for(self, args: Args, kwargs: Kwargs) -> "tuple[Compiled, Sequence[ArrayLike]]":
        """The step that runs a call, another one where it has lists of microbatches, and its flat arguments."""
        if self._for_call is None:
            return self, self._inputs.checked(args, kwargs)
        return self._for_call(args, kwargs)

    def _fits(self, leaves: Sequence[ArrayLike]) -> bool:
        """Whether it can be called with these arrays."""
        return self._inputs.fit(leaves)

    def _reads(self, argument: int, hint: Hint) -> bool:
        """Whether an argument is read in the layout of `hint`."""
        sharding, names = self._inputs.shardings[argument], self._split.whole.in_names
        found = hint_of(sharding, self._inputs.avals[argument], self._programs.mesh, names[argument])
        return dataclasses.replace(hint, groups=found.groups if hint.groups is None else hint.groups) == found

    def _run(self, leaves: Sequence[ArrayLike]) -> Any:
        check_is_outside()
        with compat.no_mesh():
            leaves = apart(leaves, self._consumed) if self._consumed else leaves
            if self.timing:
                result, rows = self._timed_run(leaves, 1)
                self._timed = self._profile_of([rows()], None)
                return result
            placed = self._placed(leaves)
            return self._result(leaves, placed, self._executor([*self._inputs.constants, *placed]))

    def _timed_run(self, leaves: Sequence[ArrayLike], number: int) -> tuple[Any, Callable[[], RecordedTimes]]:
        """A call, and when everything of this process ran."""
        placed = self._placed(leaves)
        results, rows = self._executor.timed([*self._inputs.constants, *placed], number)
        return self._result(leaves, placed, results), rows

    def _placed(self, leaves: Sequence[ArrayLike]) -> list[dict[int, jax.Array]]:
        """Per flat argument, its array in each group that reads it."""
        if len(self._executor.ranks) == 1:
            return self._inputs.place(leaves)
        is_first = self._executor.prepare()
        leaves, given = self._moved(leaves), []
        placed = self._inputs.place(leaves, given)
        makers = [x._made_by if type(x) is MpmdArray else 0 for x in leaves]
        self._executor.compare(given, makers, is_first)
        return placed

    def _result(self, given: Sequence[Any], placed: Sequence[Any], results: Sequence[dict[int, jax.Array]]) -> Any:
        """What the user gets; donated arguments are used up."""
        kept = {id(a): a for arrays in results for a in arrays.values()} if self._donated else {}
        for i, pieces in self._consumed.items():
            consume(given[i], [placed[k] for k in pieces], kept, self._programs.mesh.groups_share_devices)
        return jax.tree.unflatten(self.out_tree, self._results.arrays(results, self._executor.call_number))

    def _moved(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments, with uncommitted arrays in the groups where the step reads them, also in other processes."""
        apart = self._inputs.misplaced(leaves)
        if not apart:
            return leaves
        mesh, names = self._programs.mesh, self._split.whole.in_names
        xs = [leaves[i] for i in apart]
        for i, x in zip(apart, xs, strict=True):
            if x._is_split:
                raise ValueError(
                    f"mpmd: {names[i]} is {x!r}, and the step reads its rows elsewhere:\n"
                    f"  {self._inputs.shardings[i]}\n"
                    "  Give all loops over the same layers one cut: treduce(..., cuts=lowered.cuts), where `lowered` is"
                    " the step that made it. To move it once: reshard.mpmd_to_mpmd_reshard(args,"
                    " compiled.input_shardings[0])."
                )
        key = tuple((i, x.mpmd_sharding) for i, x in zip(apart, xs, strict=True))
        if key not in self._movers:
            hints = tuple(hint_of(x.mpmd_sharding, x, mesh, names[i]) for i, x in zip(apart, xs, strict=True))
            avals = [self._inputs.avals[i] for i in apart]
            tree = jax.tree.structure((tuple(apart), {}))
            trace = trace_step(lambda *arrays: list(arrays), avals, tree, [names[i] for i in apart], mesh)
            targets = [self._inputs.shardings[i] for i in apart]
            traced = Traced(trace, "move", mesh, hints, targets, frozenset(), {}, _moves=True)
            self._movers[key] = traced.lower().compile()
        leaves = list(leaves)
        for i, x in zip(apart, self._movers[key](*xs), strict=True):
            leaves[i] = x
        return leaves
