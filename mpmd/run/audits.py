"""Runs a step in which now and then other groups run one instruction again, to find devices that compute wrong.

The program of such a call is `scheduler.programs.audits.with_audit` of the step's. Digests of all bits that an
instruction reads and writes are made on each device; `mpmd.job.audits` compares them later.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.executable import Executable, on_mesh
from mpmd.compile.step import StepPrograms
from mpmd.job import audits, joining
from mpmd.job.wires import NUMBER_BITS
from mpmd.observe.flight import Flight
from mpmd.run import device_put
from mpmd.run.bindings import Bindings, HostCall, audited_bindings, values_of_instruction, variables_of
from mpmd.run.executor import Executor, Instruction
from mpmd.tracing.trace import Trace
from scheduler import Call, Program, Run, Value
from scheduler.programs import audits as plans

_MOST_TRIES = 8


@dataclasses.dataclass(frozen=True)
class _Auditable:
    """An instruction of a group."""

    group: int
    index: int
    instruction: Run | Call

    def __str__(self) -> str:
        instruction = self.instruction
        return instruction.name if isinstance(instruction, Call) else "+".join(map(str, instruction.tasks))


class AuditedExecutor(Executor):
    """Runs this process's part of a program, and of audits.

    Args:
      every: one call in so many is audited.
    """

    def __init__(self, programs: StepPrograms, program: Program, whole: Trace, every: int):
        self._every, self._count = every, 0
        super().__init__(programs, program, whole)
        self._plain = self.bindings, self._instructions, self.flight

    @functools.cached_property
    def _candidates(self) -> list[_Auditable]:
        """The instructions that can be run twice."""
        return [
            _Auditable(g, k, instruction)
            for g, instructions in enumerate(self.program.groups)
            if auditors_of(self._programs.mesh, g)
            for k, instruction in enumerate(instructions)
            if isinstance(instruction, (Run, Call)) and self._can_run_twice(instruction)
        ]

    def _can_run_twice(self, instruction: Run | Call) -> bool:
        found = self._programs.executables_of(instruction)
        return len(found) == 1 and not found[0].compiled.jaxpr.effects and bool(found[0].in_shardings)

    @property
    def notes(self) -> list[str]:
        """What `explain()` says of how it runs."""
        bytes_of = [self._nbytes(candidate) for candidate in self._candidates]
        few, most = min(bytes_of, default=0), max(bytes_of, default=0)
        text = f"audits: one call in {self._every} has one of {len(bytes_of)} programs run again by other groups"
        mesh = self._programs.mesh
        alone = [str(group) for group in range(mesh.num_groups) if not auditors_of(mesh, group)]
        never = f"; those of group {', '.join(alone)} never, for no other group has its shape" if alone else ""
        return [f"{text}, which get its arguments ({few:,} to {most:,} B each){never}"]

    def _nbytes(self, candidate: _Auditable) -> int:
        reads, _, _ = self._values_of(candidate)
        return sum(self.program.nbytes.get(v.name, 0) for v in reads if isinstance(v, Value))

    def _values_of(self, candidate: _Auditable) -> Any:
        return values_of_instruction(self._programs, self._job, candidate.group, candidate.instruction)

    def __call__(self, arguments: Sequence[Mapping[int, jax.Array]]) -> list[dict[int, jax.Array]]:
        self._count += 1
        audited = self._count % self._every == 0 and self._is_finished and bool(self._candidates)
        if not audited:
            return super().__call__(arguments)
        audits.settle(but=1)
        with joining.compiling():
            taken, audit = self._audited()
        self._take(*taken)
        try:
            results = super().__call__(arguments)
        finally:
            self._take(*self._plain)
        if audit.found:
            audits.put_down(audit)
        return results

    def finish(self) -> None:
        """Waits for all programs, once."""
        if not self._is_finished:
            super().finish()
            self._plain = self.bindings, self._instructions, self.flight

    def prepare(self) -> bool:
        """Agrees on the plan and warms up collectives, once: whether this was that time."""
        if is_first := super().prepare():
            self._count = 0  # a process that has taken another's place counts from here too
        return is_first

    def _take(self, bindings: Bindings, instructions: list[Instruction], flight: Flight) -> None:
        """The next call runs this."""
        self.bindings, self._instructions, self.flight = bindings, instructions, flight
        for name in ("_recorder", "_annotated"):
            vars(self).pop(name, None)

    def _audited(self) -> tuple[tuple[Bindings, list[Instruction], Flight], audits.Audit]:
        """The program of the next call, with an audit of one of its instructions, the same in every process."""
        programs = self._programs
        candidate, plan = self._drawn()
        call = _AuditedCall(programs, candidate, self._values_of(candidate)[0], plan)
        devices = {g: [*programs.mesh.groups[g].devices.flat] for g in call.groups}
        audit = audits.Audit(
            f"{self._epoch} {0 if self._next_piece is None else self._next_piece >> NUMBER_BITS} {self._count}",
            f"{candidate} in call {self._count} of {programs.name}",
            {g: [d.process_index for d in of_group] for g, of_group in devices.items()},
            {g: [f"rank {d.process_index}: {d}" for d in of_group] for g, of_group in devices.items()},
            call.found,
            self._job,
        )
        bindings = audited_bindings(call.programs, plan.program, self._job)
        bound = [(b.code, b.act, b.reads, b.writes, b.frees, k) for k, b in enumerate(bindings.instructions)]
        return (bindings, bound, Flight(len(bound))), audit

    def _drawn(self) -> tuple[_Auditable, plans.AuditedProgram]:
        """One of the instructions, and the program with its audit; not one that makes the step longer, if possible."""
        chosen = random.Random(f"{self._programs.name} {self._epoch} {self._count}")
        for _ in range(_MOST_TRIES):
            candidate, plan = self._planned(chosen.choice(self._candidates))
            if isinstance(candidate.instruction, Call) or plan.delay <= plans.MOST_DELAY * plan.makespan:
                return candidate, plan
        return self._planned(chosen.choice(self._candidates))

    def _planned(self, candidate: _Auditable) -> tuple[_Auditable, plans.AuditedProgram]:
        reads, writes, donates = self._values_of(candidate)
        values = [v for v in reads if isinstance(v, Value)]
        auditors = auditors_of(self._programs.mesh, candidate.group)
        index, group = candidate.index, candidate.group
        return candidate, plans.with_audit(self.program, group, index, values, writes, donates, auditors)


def check_audits(every: Any, mesh: MpmdMesh) -> None:
    """What `audit_every` of `mpmd.jit` may be.

    Raises:
      ValueError: it is no number of calls, or no group can run what another one runs.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(f"mpmd.jit: audit_every is {every!r}; expected a number of calls, or 0.")
    if every and not any(auditors_of(mesh, group) for group in range(mesh.num_groups)):
        raise ValueError(
            f"mpmd.jit: audit_every is {every}, but no two groups of {mesh} have the same shape and devices of their"
            " own, so that one could run again what the other has run. Leave audit_every out."
        )


def audited_options(options: Mapping[Any, Any] | None, mesh: MpmdMesh) -> Mapping[Any, Any] | None:
    """Compiler options with which two groups compute the same bits."""
    if mesh.lowering_mesh().devices.flat[0].platform != "gpu":
        return options
    return {audits.SAME_BITS: True} | dict(options or {})


def auditors_of(mesh: MpmdMesh, group: int) -> list[int]:
    """The groups that can run what a group runs, with the same bits, on other devices."""
    own = mesh.groups[group]
    return [
        g
        for g, other in enumerate(mesh.groups)
        if other.abstract_mesh == own.abstract_mesh and {*own.devices.flat}.isdisjoint(other.devices.flat)
    ]


class _AuditedCall:
    """What the instructions of one audit do in this process.

    Attributes:
      programs: those of the step, with the calls of the audit.
      groups: that of the step first, then the auditors.
      found: per group of this process, waits for and returns what its devices found.
    """

    def __init__(
        self,
        programs: StepPrograms,
        candidate: _Auditable,
        reads: Sequence[Any],
        plan: plans.AuditedProgram,
    ):
        group = candidate.group
        (executable,) = programs.executables_of(candidate.instruction)
        self.groups = group, *plan.auditors
        local = programs.mesh.local_groups
        self._digests: dict[tuple[int, str], dict[Any, jax.Array]] = {}
        self._held = [k for k, v in enumerate(plan.copies) if v in plan.program.inputs_of(group)]
        self.found = {g: functools.partial(self._sign, g, programs.mesh) for g in self.groups if g in local}
        acts = {plans.BEFORE: self._before, plans.TAKE: self._take, plans.RESULT: self._result}
        calls: dict[str, Any] = {name: HostCall(name, functools.partial(act, group)) for name, act in acts.items()}
        for g in plan.auditors:
            name = f"{plans.AGAIN}{g}"
            calls[name] = HostCall(name, self._again(g, programs, executable, reads, plan) if g in local else None)
        variables = variables_of(programs)
        fresh = {v: compat.Var(variables[v.name, v.microbatch is not None].aval) for v in plan.copies}
        layouts = {fresh[v]: programs.layout(variables[v.name, v.microbatch is not None]) for v in plan.copies}
        names = {fresh[v]: copy.name for v, copy in plan.copies.items()}
        outline = dataclasses.replace(programs.outline, names=programs.outline.names | names)
        self.programs = dataclasses.replace(
            programs, outline=outline, layouts=programs.layouts | layouts, segments=programs.segments | calls
        )

    def _before(self, group: int, *arrays: jax.Array) -> list[Any]:
        self._digests[group, "before"] = {d: _digests(*xs) for d, xs in _by_device(arrays).items()}
        return []

    def _take(self, group: int, *arrays: jax.Array) -> list[jax.Array]:
        copies: dict[Any, Sequence[jax.Array]] = {}
        for device, xs in _by_device(arrays).items():
            *copies[device], self._digests.setdefault((group, "reads"), {})[device] = _copies(*xs)
        return [
            jax.make_array_from_single_device_arrays(x.shape, x.sharding, [copies[d][k] for d in compat.shards(x)])
            for k, x in enumerate(arrays)
        ]

    def _result(self, group: int, *arrays: jax.Array) -> list[Any]:
        self._digests[group, "writes"] = {d: _digests(*xs) for d, xs in _by_device(arrays).items()}
        return []

    def _again(
        self, group: int, programs: StepPrograms, executable: Executable, reads: Sequence[Any], plan: Any
    ) -> Callable:
        """What an auditor does: the same program, on its own devices."""
        mesh = programs.mesh.groups[group]
        ins, outs = (tuple(on_mesh(mesh, s) for s in of) for of in (executable.in_shardings, executable.out_shardings))
        call = Executable(executable.name, mesh, executable.compiled, ins, outs).call
        places = {v: k for k, v in enumerate(plan.copies)}
        replicated = NamedSharding(mesh, PartitionSpec())
        constants = {
            k: device_put.place_all([x], [replicated])[0] for k, x in enumerate(reads) if not isinstance(x, Value)
        }
        order = [(k, places.get(x)) for k, x in enumerate(reads)]

        def again(*arrays: jax.Array) -> list[Any]:
            self._digests[group, "reads"] = {d: _digests(*xs) for d, xs in _by_device(arrays).items()}
            self._result(group, *call(*(constants[k] if at is None else arrays[at] for k, at in order)))
            return []

        return again

    def _sign(self, group: int, mesh: MpmdMesh) -> dict[int, str]:
        """What each device of a group in this process found; waits for it."""
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


def _by_device(arrays: Sequence[jax.Array]) -> dict[Any, list[jax.Array]]:
    """What each device of this process has of some arrays."""
    found: dict[Any, list[jax.Array]] = {}
    for x in arrays:
        for device, block in compat.shards(x).items():
            found.setdefault(device, []).append(block)
    return found


@jax.jit
def _digests(*arrays: jax.Array) -> jax.Array:
    """Two numbers for each array, which any flipped bit changes."""
    return jnp.stack([_digest(x) for x in arrays]) if arrays else jnp.zeros((0, 2), jnp.uint32)


@jax.jit
def _copies(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Copies of arrays, and their digests."""
    return *(jnp.copy(x) for x in arrays), _digests(*arrays)


def _digest(x: jax.Array) -> jax.Array:
    """Sums of all bits of an array, in two mixtures; each word has an odd factor of its own, so none can be lost."""
    words = _words_of(x)
    odd = 2 * lax.iota(jnp.uint32, words.size) + 1
    mixed = (words ^ (words >> 15) ^ (odd << 7)) * jnp.uint32(0x2C9277B5)
    return jnp.stack([jnp.sum(words * odd, dtype=jnp.uint32), jnp.sum((mixed ^ (mixed >> 13)) * odd, dtype=jnp.uint32)])


def _words_of(x: jax.Array) -> jax.Array:
    """The bits of an array, as words of 32 bits."""
    x = keys.to_data(x) if keys.is_key(x.dtype) else x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or _is_small(x.dtype):
        x = x.astype(jnp.int8) if not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    width = x.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32).ravel()


def _is_small(dtype: Any) -> bool:
    """Whether a value takes less than a byte."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits < 8
