"""Runs a step in which now and then other groups run one instruction again, to find devices that compute wrong.

`scheduler.programs.audits` plans the extra instructions of such a call, and they are inserted among the bound
instructions. Each device makes digests of all bits that the audited instruction reads and writes; `mpmd.job.audits`
compares the digests later. It also compares digests of the results of the call, since bits in memory may flip.
"""

import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import Device, MpmdMesh
from mpmd.compile.compiler import CompilerOptions
from mpmd.compile.executable import Executable, on_mesh
from mpmd.compile.step import StepPrograms
from mpmd.graphs.body import Place
from mpmd.job import audits, joining
from mpmd.job.wires import NUMBER_BITS
from mpmd.observe.flight import Flight
from mpmd.run import device_put
from mpmd.run.adaptive_executor import AdaptiveExecutor
from mpmd.run.bindings import Bindings, values_of_instruction, with_added
from mpmd.run.bound_instruction import HostCall, Instruction
from mpmd.run.bound_transfers import variables_of
from mpmd.run.bucket_executor import BucketExecutor
from mpmd.run.digests import copies_with_digests, digests
from mpmd.run.executor import Executor
from mpmd.run.results_at_rest import ResultsAtRest
from scheduler import Call, Program, Run, Value
from scheduler.base.bounded import BoundedDict
from scheduler.programs import audits as plans

_MOST_TRIES = 8
_NUM_PLANNERS = 16  # lists of each length have their own planner


class AuditSampling:
    """The choice of the calls that are audited: one in `every`."""

    def __init__(self, every: int):
        self.every, self.count = every, 0  # `count`: the number of calls so far
        self.results: ResultsAtRest | None = None  # of the last call, if it was audited
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Restarts the count in each epoch of the job, so that a process that replaces another one counts alike."""
        if epoch != self._epoch:
            self._epoch, self.count, self.results = epoch, 0, None

    def is_due(self) -> bool:
        """Counts a call, and returns whether it is audited."""
        self.count += 1
        return self.count % self.every == 0


class _Auditable(NamedTuple):
    """An instruction of a group; `number` is its position among the tasks and calls of the group."""

    group: int
    number: int
    instruction: Run | Call

    def __str__(self) -> str:
        instruction = self.instruction
        return instruction.name if isinstance(instruction, Call) else "+".join(map(str, instruction.tasks))


class _OwnStep(NamedTuple):
    """The step that an instruction belongs to; for a step over lists, the step for the shape of its microbatch."""

    programs: StepPrograms
    program: Program
    places: Sequence[int]  # per instruction of the call, its position in the order of `scheduler.merge` of the program
    dealt: frozenset[str]  # names of the arguments that differ between microbatches


class _Drawn(NamedTuple):
    """An instruction that is audited.

    Attributes:
      reads: its inputs, in its order: values, and numbers that are constants. An argument that differs between
        microbatches has its name in the program.
      alike: for a group of this process, maps each such argument to the value of the microbatch.
    """

    what: _Auditable
    own: _OwnStep
    reads: list[Value | np.generic]
    alike: dict[tuple[int, Value], tuple[int, Value]]
    plan: plans.PlannedAudit


class AuditedExecutor(Executor):
    """Runs this process's part of a program and of its audits."""

    def __init__(self, *of: Any, sampling: AuditSampling):
        self._sampling = sampling
        self._is_audited = False
        self._lock = threading.RLock()
        self._planners: BoundedDict[Hashable, plans.AuditPlanner] = BoundedDict(_NUM_PLANNERS)
        self._listed: BoundedDict[Hashable, list[_Auditable]] = BoundedDict(_NUM_PLANNERS)
        self._variables: dict[int, dict[tuple[str, bool], compat.Var]] = {}
        super().__init__(*of)

    @functools.cached_property
    def _auditors(self) -> list[list[int]]:
        mesh = self._programs.mesh
        return [auditors_of(mesh, group) for group in range(mesh.num_groups)]

    def _planner(self, program: Program) -> plans.AuditPlanner:
        key = id(program), *self._counts.items()
        if key not in self._planners:
            self._planners[key] = plans.AuditPlanner(program, self._counts)
        return self._planners[key]

    @property
    def _candidates(self) -> list[_Auditable]:
        """The instructions of the call that other groups can run."""
        key = tuple(self._counts.items())
        if key not in self._listed:
            self._listed[key] = [
                _Auditable(g, k, work.instruction)
                for g, (own, auditors) in enumerate(zip(self._planner(self.program).work, self._auditors, strict=True))
                for k, work in enumerate(own)
                if auditors and work.stays and _can_run_twice(self._programs, work.instruction)
            ]
        return self._listed[key]

    def _own_step(self, instruction: Run | Call) -> _OwnStep | None:
        """Returns the step that an instruction belongs to; None if no single program runs it."""
        return _OwnStep(self._programs, self.program, self.bindings.places, frozenset())

    @property
    def notes(self) -> list[str]:
        """Lines of `explain()` about the way it runs."""
        bytes_of = list(filter(None, map(self._nbytes, self._candidates)))
        few, most = min(bytes_of, default=0), max(bytes_of, default=0)
        every = self._sampling.every
        text = f"audits: one call in {every} has one of {len(bytes_of)} programs run again by other groups"
        alone = [str(group) for group, auditors in enumerate(self._auditors) if not auditors]
        never = f"; those of group {', '.join(alone)} never, for no other group has its shape" if alone else ""
        text = f"{text}, which get its arguments ({few:,} to {most:,} B each){never}"
        return [*super().notes, f"{text}; the results of that call are looked at again before the next one"]

    def _nbytes(self, candidate: _Auditable) -> int:
        if (own := self._own_step(candidate.instruction)) is None:
            return 0
        reads, _, _ = self._values_of(candidate, own)
        return sum(own.program.nbytes.get(v.name, 0) for v in reads if isinstance(v, Value))

    def _values_of(self, candidate: _Auditable, own: _OwnStep) -> tuple[list[Any], list[Value], list[Value]]:
        return values_of_instruction(own.programs, self.job, candidate.group, candidate.instruction, own.dealt)

    def __call__(self, arguments: Sequence[Mapping[int, jax.Array]]) -> list[dict[int, jax.Array]]:
        with self._lock:  # an audited call swaps the bindings, and calls of other threads must not see that
            return self._called(arguments)

    def _called(self, arguments: Sequence[Mapping[int, jax.Array]]) -> list[dict[int, jax.Array]]:
        found = None
        if self._sampling.is_due() and self._is_finished:
            audits.settle(but=1)
            with joining.compiling():
                found = self._audited()
        if self._sampling.results is not None:  # this call may take over the memory of these results
            audits.look_at(self._sampling.results, is_last=True)
            self._sampling.results = None
        if found is None:
            return super().__call__(arguments)
        taken, audit = found
        plain = self.bindings, self._instructions, self.flight
        self._take(*taken)
        self._is_audited = True
        try:
            results = super().__call__(arguments)
        finally:
            self._is_audited = False
            self._take(*plain)
        if audit.found:
            audits.put_down(audit)
        what = f"a result of call {self._sampling.count} of {self._programs.name}"
        with joining.compiling():
            self._sampling.results = ResultsAtRest(what, results, self.job)
        audits.watch(self._sampling.results)
        return results

    @property
    def _work(self) -> Hashable:
        return super()._work, self._is_audited

    def prepare(self) -> bool:
        """Agrees on the plan and warms up collectives, once. Returns whether this call did so."""
        if is_first := super().prepare():
            self._sampling.begin(self._epoch)
        return is_first

    def _audited(self) -> tuple[tuple[Bindings, list[Instruction], Flight], audits.Audit] | None:
        """Returns the next call with an audit, the same in every process; None if nothing in it can be audited."""
        if (drawn := self._drawn()) is None:
            return None
        own, plan, count = drawn.own, drawn.plan, self._sampling.count
        if (key := id(own.programs)) not in self._variables:
            self._variables[key] = variables_of(own.programs)
        call = _AuditedCall(drawn, self._variables[key])
        devices = {g: [*own.programs.mesh.groups[g].devices.flat] for g in call.groups}
        audit = audits.Audit(
            f"{self._epoch} {0 if self._next_piece is None else self._next_piece >> NUMBER_BITS} {count}",
            f"{drawn.what} in call {count} of {own.programs.name}",
            {g: [d.process_index for d in of_group] for g, of_group in devices.items()},
            {g: [f"rank {d.process_index}: {d}" for d in of_group] for g, of_group in devices.items()},
            call.found,
            self.job,
            self._epoch,
        )
        bindings = with_added(
            self.bindings, own.places, plan.added, call.programs, plan.program, self.job, drawn.alike
        )  # fmt: skip
        bound = [b.walked(number) for number, b in enumerate(bindings.instructions)]
        return (bindings, bound, Flight(len(bound))), audit

    def _drawn(self) -> _Drawn | None:
        """Draws an instruction and plans its audit; avoids instructions with audits that make the step longer."""
        planner, candidates = self._planner(self.program), self._candidates
        chosen = random.Random(f"{self._programs.name} {self._epoch} {self._sampling.count}")
        drawn = None
        for _ in range(_MOST_TRIES if candidates else 0):
            candidate = chosen.choice(candidates)
            if (own := self._own_step(candidate.instruction)) is None:
                continue
            drawn = self._planned(candidate, own)
            if isinstance(candidate.instruction, Call) or drawn.plan.delay <= plans.MOST_DELAY * planner.makespan:
                break
        return drawn

    def _planned(self, candidate: _Auditable, own: _OwnStep) -> _Drawn:
        reads, writes, donates = self._values_of(candidate, own)
        group, number, _ = candidate
        named = [Value(v.name) if isinstance(v, Value) and v.name in own.dealt else v for v in reads]
        is_here = group in own.programs.mesh.local_groups
        alike = {(group, name): (group, v) for name, v in zip(named, reads, strict=True) if is_here and name is not v}
        values = [v for v in named if isinstance(v, Value)]
        plan = self._planner(own.program).plan(group, number, values, writes, donates, self._auditors[group])
        return _Drawn(candidate, own, named, alike, plan)


class AuditedBucketExecutor(AuditedExecutor, BucketExecutor):
    """Runs steps over lists, with audits. An instruction belongs to the step for the shape of its microbatch."""

    def _own_step(self, instruction: Run | Call) -> _OwnStep | None:
        buckets = {0}
        if isinstance(instruction, Run) and (xs := self._list_of.get(instruction.loop)) is not None:
            if self._permutations[xs] is not None and self._adds_or_counts(instruction):
                return None  # it may have its own accumulators, and it has another number in the list
            buckets = {self._order[xs][task.microbatch] for task in instruction.tasks}
        (bucket, *more) = buckets
        if more or not _can_run_twice(self._buckets[bucket][0], instruction):
            return None
        places = self._bound_buckets.of[bucket].places
        return _OwnStep(*self._buckets[bucket], [places[k] for k in self._kept_of_plan], self._dealt)

    def _adds_or_counts(self, run: Run) -> bool:
        tasks = self._buckets[0][0].loops[run.loop].tasks
        bodies = [tasks[Place(t.stage, t.kind)].body for t in run.tasks]
        return any(body.accumulates or body.uses_index for body in bodies)


class AuditedAdaptiveExecutor(AuditedExecutor, AdaptiveExecutor):
    """Runs steps with tasks that may run out of turn, and audits. An audited call runs all in the planned order."""

    @property
    def _is_in_order(self) -> bool:
        return self._is_audited or super()._is_in_order


def _can_run_twice(programs: StepPrograms, instruction: Run | Call) -> bool:
    found = programs.executables_of(instruction)
    return len(found) == 1 and not found[0].compiled.jaxpr.effects and bool(found[0].in_shardings)


def check_audits(every: object, mesh: MpmdMesh) -> None:
    """Checks `audit_every` of `mpmd.jit`.

    Raises:
      ValueError: it is not a number of calls, or no group can run the instructions of another group.
    """
    if isinstance(every, bool) or not isinstance(every, int | np.integer) or every < 0:
        raise ValueError(f"mpmd.jit: audit_every is {every!r}; expected a number of calls, or 0.")
    if every and not any(auditors_of(mesh, group) for group in range(mesh.num_groups)):
        raise ValueError(
            f"mpmd.jit: audit_every is {every}, but no two groups of {mesh} have the same shape and devices of their"
            " own, so that one could run again what the other has run. Leave audit_every out."
        )


def audited_options(options: CompilerOptions | None, mesh: MpmdMesh) -> CompilerOptions | None:
    """Returns compiler options with which two groups compute the same bits."""
    if mesh.lowering_mesh().devices.flat[0].platform != "gpu":
        return options
    return {audits.SAME_BITS: True} | dict(options or {})


def auditors_of(mesh: MpmdMesh, group: int) -> list[int]:
    """Returns the groups that can repeat the work of a group, with the same bits, on other devices."""
    own = mesh.groups[group]
    return [
        g
        for g, other in enumerate(mesh.groups)
        if other.abstract_mesh == own.abstract_mesh and {*own.devices.flat}.isdisjoint(other.devices.flat)
    ]


class _AuditedCall:
    """The calls of one audit in this process.

    Attributes:
      programs: the calls of the audit, and the values that they exchange.
      found: per group of this process, a function that waits for the findings of its devices and returns them.
    """

    def __init__(self, drawn: _Drawn, variables: Mapping[tuple[str, bool], compat.Var]):
        group, plan, programs = drawn.what.group, drawn.plan, drawn.own.programs
        (executable,) = programs.executables_of(drawn.what.instruction)
        self.groups = group, *plan.auditors  # the audited group first, then the auditors
        local = programs.mesh.local_groups
        self._digests: dict[tuple[int, str], dict[Device, jax.Array]] = {}
        self._held = [k for k, v in enumerate(plan.copies) if v in plan.program.inputs_of(group)]
        self.found = {g: functools.partial(self._sign, g, programs.mesh) for g in self.groups if g in local}
        acts = {plans.BEFORE: self._before, plans.TAKE: self._take, plans.RESULT: self._result}
        calls: dict[str, HostCall] = {name: HostCall(name, functools.partial(act, group)) for name, act in acts.items()}
        for g in plan.auditors:
            name = f"{plans.AGAIN}{g}"
            again = self._again(g, programs, executable, drawn.reads, plan) if g in local else None
            calls[name] = HostCall(name, again)
        copied = {copy.name: variables[v.name, v.microbatch is not None] for v, copy in plan.copies.items()}
        fresh = {name: compat.Var(v.aval) for name, v in copied.items()}
        outline = dataclasses.replace(programs.outline, names={v: name for name, v in fresh.items()})
        layouts = {v: programs.layout(copied[name]) for name, v in fresh.items()}
        self.programs = dataclasses.replace(programs, outline=outline, layouts=layouts, segments=calls, loops=())

    def _before(self, group: int, *arrays: jax.Array) -> list[jax.Array]:
        self._digests[group, "before"] = {d: digests(*xs) for d, xs in _by_device(arrays).items()}
        return []

    def _take(self, group: int, *arrays: jax.Array) -> list[jax.Array]:
        copies: dict[Device, Sequence[jax.Array]] = {}
        for device, xs in _by_device(arrays).items():
            *copies[device], self._digests.setdefault((group, "reads"), {})[device] = copies_with_digests(*xs)
        return [
            jax.make_array_from_single_device_arrays(x.shape, x.sharding, [copies[d][k] for d in compat.shards(x)])
            for k, x in enumerate(arrays)
        ]

    def _result(self, group: int, *arrays: jax.Array) -> list[jax.Array]:
        self._digests[group, "writes"] = {d: digests(*xs) for d, xs in _by_device(arrays).items()}
        return []

    def _again(
        self, group: int, programs: StepPrograms, executable: Executable, reads: Sequence[Any], plan: plans.PlannedAudit
    ) -> Callable:
        """Returns the call of an auditor: the same program, on its own devices."""
        mesh = programs.mesh.groups[group]
        ins, outs = (tuple(on_mesh(mesh, s) for s in of) for of in (executable.in_shardings, executable.out_shardings))
        call = Executable(executable.name, mesh, executable.compiled, ins, outs).call
        places = {v: k for k, v in enumerate(plan.copies)}
        replicated = NamedSharding(mesh, PartitionSpec())
        constants = {
            k: device_put.place_all([x], [replicated])[0] for k, x in enumerate(reads) if not isinstance(x, Value)
        }
        order = [(k, places.get(x)) for k, x in enumerate(reads)]

        def again(*arrays: jax.Array) -> list[jax.Array]:
            self._digests[group, "reads"] = {d: digests(*xs) for d, xs in _by_device(arrays).items()}
            self._result(group, *call(*(constants[k] if at is None else arrays[at] for k, at in order)))
            return []

        return again

    def _sign(self, group: int, mesh: MpmdMesh) -> dict[int, str]:
        """Waits for the findings of each device of a group in this process, and returns them."""
        own: dict[int, str] = {}
        reads, writes = self._digests[group, "reads"], self._digests[group, "writes"]
        before = self._digests.get((group, "before"), {})
        for number, device in enumerate(mesh.groups[group].devices.flat):
            if device not in reads:
                continue
            read = np.asarray(reads[device])
            own[number] = f"{read.tobytes().hex()} {np.asarray(writes[device]).tobytes().hex()}"
            if device in before and not np.array_equal(np.asarray(before[device]), read[self._held]):
                own[number] = f"{audits.MEMORY} {own[number]}"
        return own


def _by_device(arrays: Sequence[jax.Array]) -> dict[Device, list[jax.Array]]:
    """Maps each device of this process to its shards of some arrays."""
    found: dict[Device, list[jax.Array]] = {}
    for x in arrays:
        for device, block in compat.shards(x).items():
            found.setdefault(device, []).append(block)
    return found
