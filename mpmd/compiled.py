"""`Compiled`: a step that can be called, printed and inspected, like `jax.stages.Compiled`."""

import copy
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.typing import ArrayLike

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.compile.step import StepPrograms
from mpmd.costs.devices import machine_of, memory_limit
from mpmd.costs.machine import Machine
from mpmd.cutting.split_rows import SplitStep
from mpmd.job.wires import expected_wire
from mpmd.observe.records import RecordedTimes
from mpmd.pytrees import PyTree, TreeDef
from mpmd.report.estimate import draft_of
from mpmd.report.explain import StepTraffic, explain
from mpmd.report.flops import cost_per_step
from mpmd.report.gathered import facts_of, profile_of
from mpmd.report.html import Facts, report_page
from mpmd.report.memory import measured
from mpmd.report.profile import LoopFacts, Profile
from mpmd.report.program_texts import texts
from mpmd.report.shares import Shares
from mpmd.run.adaptive_executor import AdaptiveExecutor, is_adaptive
from mpmd.run.audits import AuditedAdaptiveExecutor, AuditedExecutor, AuditSampling
from mpmd.run.donated import apart, consume, usable
from mpmd.run.executor import Executor
from mpmd.run.inputs import Inputs
from mpmd.run.results import Results
from mpmd.tracing.arguments import Args, Hint, Kwargs, check_is_outside, hint_of
from scheduler import Program, Timeline
from scheduler.base.bounded import BoundedDict
from scheduler.base.texts import counted
from scheduler.base.waiting import waiting

# Maps a call, `(args, kwargs)`, with lists of microbatches to the step that runs it, and to its flat arguments.
ForCall = Callable[[Args, Kwargs], "tuple[Compiled, Sequence[ArrayLike]]"]


class Compiled:
    """A compiled step: call it with arguments of the shapes that it was compiled for.

    Attributes:
      timing: True measures calls for `.last_timeline()`. Each call then waits for its result.
    """

    _mover_of: "Callable[..., Compiled]"  # set by `Lowered`: makes a step that moves arguments to this step's layouts

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
        self._movers: BoundedDict[Hashable, Compiled] = BoundedDict(64)  # by the shardings of their arrays
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
        return f"Compiled({self._programs.mesh}; {self._programs.outline!r}; {programs})"

    # --- what it is -------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The checked program: the runs, sends, receives and frees of each group."""
        return self._program

    @property
    def input_shardings(self) -> PyTree:
        """`(args, kwargs)` of `MpmdSharding`, as in `jax.stages.Compiled`."""
        return jax.tree.unflatten(self.in_tree, self._inputs.shardings)

    @property
    def output_shardings(self) -> PyTree:
        """The result's tree of `MpmdSharding`."""
        return jax.tree.unflatten(self.out_tree, self._results.shardings)

    @property
    def in_tree(self) -> TreeDef:
        """The structure of `(args, kwargs)`."""
        return self._split.whole.in_tree

    @property
    def out_tree(self) -> TreeDef:
        """The structure of the result."""
        return self._split.whole.out_tree

    @compat.api_boundary
    def as_text(self, stage: int | None = None, kind: str | None = None, dialect: str | None = None) -> str:
        """Returns the partition and the program as text; with arguments, the text of XLA programs.

        Each XLA program has a header line `// name`, which also names the program that it runs if that was compiled
        under another name.

        Args:
          stage, kind: the tasks to show (kinds `F`, `B`, `R`, `I`, `W`); None for all.
          dialect: `"hlo"` (the output of XLA; the default for tasks) or `"stablehlo"` (the input of XLA, with
            Shardy's annotations). Without a stage and a kind: all tasks, and the segments outside the loops.

        Raises:
          ValueError: the step has no such task, or there is no such dialect.
        """
        if stage is not None or kind is not None or dialect is not None:
            return texts(self._programs, stage, kind, dialect)
        return f"{self._programs.outline}\n\n{self._program}"

    def explain(self) -> str:
        """Returns the page to read before a big run.

        It shows what runs where; each group's parameters and memory, compared with a device's; the balance of the
        stages; the values that cross groups, with the reason and your line; work that is done twice; collectives and
        sums over groups; warnings with advice.
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

        Runs nothing. In a job, any process may write one, each to its own path; it shows the memory of its groups.

        Args:
          path: the path of the file, which is replaced.
          profile: the measurements to show; by default the last `profile` of this step, if there was one.

        Raises:
          ValueError: `profile` belongs to another step.
        """
        outline, found = self._programs.outline, self._timed if profile is None else profile
        if found is not None and not self._is_own(found):
            raise ValueError("report: profile is none of this step. Give what its own profile(...) has returned.")
        layouts = [self._programs.layouts[v] for v in outline.trace.arguments]
        planned = draft_of(outline, self._programs.mesh, layouts, self._donated).memory()
        shares = self._shares_on(machine_of(self._programs.mesh))
        page = report_page(Facts(self._programs, self._program, self.explain(), planned, found, shares))
        Path(path).write_text(page, encoding="utf-8")

    def _is_own(self, profile: object) -> bool:
        """Returns whether a profile was measured in a step with this name and these loops."""
        own = [(loop.number, tuple(loop.schedule.placement)) for loop in self._programs.outline.loops]
        return (
            isinstance(profile, Profile)
            and (profile.name, len(profile.ranks)) == (self._programs.name, self._programs.mesh.num_groups)
            and [(facts.number, tuple(facts.placement)) for facts in profile.loops] == own
        )

    def memory_analysis(self) -> dict[int, dict[str, int]]:
        """Returns, per group of this process, bytes on each device: `parameters`, `state` and `data` (their sum is
        `arguments`), peaks of `gradients` and `activations`, the largest `temporaries` in XLA's reports, the `peak`.
        """
        return measured(self._programs, self._program)

    def cost_analysis(self) -> dict[str, float]:
        """Counts operations and bytes of one step on all devices, by XLA's cost analysis of each executable.

        For absent devices (`topology_mesh`), XLA has no analysis, and they are counted in the equations.

        Returns:
          `"flops"`, floating-point operations, and `"bytes accessed"`, read from and written to device memory.
        """
        flops, nbytes = cost_per_step(self._programs, self._program, self._shares_on(machine_of(self._programs.mesh)))
        return {"flops": flops, "bytes accessed": nbytes}

    @compat.api_boundary
    def profile(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None = None, *, steps: int = 3) -> Profile:
        """Runs some steps as in training, and measures when each task and transfer ran on every rank.

        Measuring adds no waits inside a step; a step begins when this process has the results of the step before.
        One more step runs first, without being measured. Every process must call this together, as for a step.
        A step over lists of microbatches takes any lists, as a call of the jitted step does, and measures each shape.

        Args:
          args, kwargs: the arguments of a call, `args` as one tuple. Donated arguments are used up, as by a call. Each
            next step takes the result that replaces a donated argument; an argument without such a result is copied
            for each step.
          steps: the number of measured steps.

        Returns:
          The profile; `.result` is the result of the last step, with which to continue.

        Raises:
          ValueError: `steps` is not an integer of at least 1, or the step runs no program.
          TypeError: the arguments have other shapes or another structure, or are not passed as a tuple.
        """
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"profile: steps={steps!r}, expected a number from 1 on.")
        if not isinstance(args, Sequence) or not (kwargs is None or isinstance(kwargs, Mapping)):
            raise TypeError(
                "profile: pass the arguments of a call as one tuple: profile((a, b)), or profile((a,), {'b': b})."
            )
        step, leaves = self._for(tuple(args), dict(kwargs or {}))
        self._timed = step._profile(leaves, steps)
        return self._timed

    def _profile(self, leaves: Sequence[ArrayLike], steps: int) -> Profile:
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
        profile = self._profile_of([found() for found in rows], result)
        if not profile.steps:
            raise ValueError("profile: the step runs no program, so there is nothing to measure.")
        return profile

    def _successors(self) -> dict[int, int]:
        """Maps each donated argument to the result that replaces it, if there is one."""
        donors = self._programs.outline.donors
        result_of = {donors[ks[0]]: k for k, ks in enumerate(self._split.out_positions)}
        return {i: result_of[ks[0]] for i, ks in self._consumed.items() if ks[0] in result_of}

    @compat.api_boundary
    def last_timeline(self) -> Timeline:
        """Returns the measured times of each task of the (last) loop.

        They are from the last `profile` or the last call while `.timing` was True; if there was none, it measures a
        call on zeros now. `Costs.measured` turns them into costs for `scheduler.simulate` and `search`.

        Raises:
          ValueError: the step has no pipelined loop, or no task of its loops computes anything.
        """
        if not self._programs.loops:
            raise ValueError("last_timeline: the step has no treduce loop, so there are no tasks to show.")
        profile = self._timed or self._profile_on_zeros()
        if not profile.measured_loops:
            raise ValueError("last_timeline: no task of the step's loops ran, since none depends on a microbatch.")
        return profile.timeline(profile.measured_loops[-1])

    def _profile_on_zeros(self) -> Profile:
        """Measures a call on zeros."""
        zeros = self._inputs.zeros()
        rows = RecordedTimes
        for _ in range(2):  # the first run of an executable is not typical; donated zeros are made anew
            copies = [*self._inputs.constants, *jax.tree.map(lambda x: x.copy(), zeros)]
            _, rows = self._executor.timed(copies, 1)
        self._timed = self._profile_of([rows()], None)
        return self._timed

    def _profile_of(self, rows: Sequence[RecordedTimes], result: object) -> Profile:
        """Gathers the rows of all processes into a profile."""
        executor = self._executor
        return profile_of(self._programs, self._loop_facts, executor.job, executor.ranks, rows, result)

    @functools.cached_property
    def _loop_facts(self) -> tuple[LoopFacts, ...]:
        return tuple(
            facts_of(p.loop, [p.executables], [0] * p.loop.partition.info.num_microbatches)
            for p in self._programs.loops
        )

    def _seconds_of_calls(self, count: int) -> list[float]:
        """Returns the seconds of each of `count` ordinary calls on zeros, until this process has its results."""
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
    def __call__(self, *args: PyTree, **kwargs: PyTree):
        step, leaves = self._for(args, kwargs)
        return step._run(leaves)

    def _for(self, args: Args, kwargs: Kwargs) -> "tuple[Compiled, Sequence[ArrayLike]]":
        """Returns the step that runs a call (a different one for lists of microbatches), and its flat arguments."""
        if self._for_call is None:
            return self, self._inputs.checked(args, kwargs)
        return self._for_call(args, kwargs)

    def _fits(self, leaves: Sequence[ArrayLike], wishes: Sequence[object]) -> bool:
        """Returns whether it can be called with these arrays, of which some have a sharding of the user's."""
        return self._inputs.fit(leaves, wishes)

    def _reads(self, argument: int, hint: Hint) -> bool:
        """Returns whether it reads an argument in the layout of `hint`."""
        sharding, names = self._inputs.shardings[argument], self._split.whole.in_names
        found = hint_of(sharding, self._inputs.avals[argument], self._programs.mesh, names[argument])
        return dataclasses.replace(hint, groups=found.groups if hint.groups is None else hint.groups) == found

    def _run(self, leaves: Sequence[ArrayLike]) -> PyTree:
        check_is_outside()
        with compat.no_mesh():
            leaves = apart(leaves, self._consumed) if self._consumed else leaves
            if self.timing:
                result, rows = self._timed_run(leaves, 1)
                self._timed = self._profile_of([rows()], None)
                return result
            placed = self._placed(leaves)
            return self._result(leaves, placed, self._executor([*self._inputs.constants, *placed]))

    def _timed_run(self, leaves: Sequence[ArrayLike], number: int) -> tuple[PyTree, Callable[[], RecordedTimes]]:
        """Runs a call. Returns its result, and a function that returns the times of this process's instructions."""
        placed = self._placed(leaves)
        results, rows = self._executor.timed([*self._inputs.constants, *placed], number)
        return self._result(leaves, placed, results), rows

    def _placed(self, leaves: Sequence[ArrayLike]) -> list[dict[int, jax.Array]]:
        """Returns, per flat argument, its array in each group that reads it."""
        if len(self._executor.ranks) == 1:
            return self._inputs.place(leaves)
        is_first = self._executor.prepare()
        leaves, given = self._moved(leaves), []
        placed = self._inputs.place(leaves, given)
        makers = [x._made_by if type(x) is MpmdArray else 0 for x in leaves]
        self._executor.compare(given, makers, is_first)
        return placed

    def _result(
        self,
        given: Sequence[ArrayLike],
        placed: Sequence[dict[int, jax.Array]],
        results: Sequence[dict[int, jax.Array]],
    ) -> PyTree:
        """Returns the user's result, and deletes donated arguments."""
        kept = {id(a): a for arrays in results for a in arrays.values()} if self._donated else {}
        for i, pieces in self._consumed.items():
            consume(given[i], [placed[k] for k in pieces], kept, self._programs.mesh.groups_share_devices)
        return jax.tree.unflatten(self.out_tree, self._results.arrays(results, self._executor.call_number))

    def _moved(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Moves uncommitted arrays to the groups where the step reads them, even to other processes."""
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
            avals, targets = ([of[i] for i in apart] for of in (self._inputs.avals, self._inputs.shardings))
            self._movers[key] = self._mover_of(mesh, xs, [names[i] for i in apart], avals, targets)
        leaves = list(leaves)
        for i, x in zip(apart, self._movers[key](*xs), strict=True):
            leaves[i] = x
        return leaves
