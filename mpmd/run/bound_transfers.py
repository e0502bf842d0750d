"""Binds the instructions that send and receive."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from mpmd import _jax_compat as compat
from mpmd.compile.program import edge_name
from mpmd.compile.step import StepPrograms
from mpmd.job.job import Job
from mpmd.run import device_put
from mpmd.run.bound_instruction import ALIAS, MOVE, RECV, SEND, BoundInstruction, Crossing
from mpmd.run.pieces import pieces
from mpmd.run.routes import ValueRoute
from mpmd.run.run_ahead import Flow, Limits
from mpmd.run.slots import Slots
from scheduler import Program, Recv, Send, Value


class _Way(NamedTuple):
    """The way of a value from one group to another, the same for every microbatch."""

    code: int
    source: NamedSharding
    target: NamedSharding
    aval: compat.Aval
    mover: Callable[[jax.Array], jax.Array] | None


def variables_of(programs: StepPrograms) -> dict[tuple[str, bool], compat.Var]:
    """Maps names of values to variables. A key also says whether each microbatch has its own value."""
    found = {(name, False): v for v, name in programs.outline.names.items()}
    for loop in programs.loops:
        found.update(((edge_name(loop.loop, v), True), v) for v in loop.loop.partition.names)
    return found


class BoundTransfers:
    """Binds sends and receives, and counts the pieces that they move, from `num_pieces` on."""

    def __init__(
        self, programs: StepPrograms, program: Program, job: Job | None, slots: Slots, limits: Limits | None,
        num_pieces: int = 0,
    ):  # fmt: skip
        self.num_pieces = num_pieces
        self._programs, self._program = programs, program
        self._job, self._slots, self._limits = job, slots, limits
        self._vars = variables_of(programs)
        self._ways: dict[tuple[str, int, int], _Way] = {}
        self._routes: dict[tuple[int, int, Value], tuple[ValueRoute, Flow | None]] = {}

    def send(self, group: int, instruction: Send) -> list[BoundInstruction]:
        """Binds the transfer of a value to another group. Returns nothing where this process has no part in it."""
        value, target = instruction.value, instruction.to_group
        way = self._way(value, group, target)
        text = f"the transfer of {value} from group {group} to {target}"
        if way.code == SEND:
            return self._send_away(group, target, value, way, text)
        if group not in self._programs.mesh.local_groups:
            return []
        crossing = self._crossing(value, group, target)
        reads, writes = self._slots.of(group, value), self._slots.of(target, value)
        return [BoundInstruction(way.code, way.mover, reads, writes, group, text, crossing=crossing)]

    def receive(self, group: int, instruction: Recv) -> list[BoundInstruction]:
        """Binds a receive. Returns nothing where the sender, in this process, does the whole transfer."""
        value, source = instruction.value, instruction.from_group
        route, flow = self._routes.pop((source, group, value), (None, None))
        if route is None:
            return []
        carry = route.carry if flow is None else flow.receiving(route.carry)
        is_here = source in self._programs.mesh.local_groups
        crossing = self._crossing(value, source, group)
        reads, writes = self._slots.of(source, value) if is_here else None, self._slots.of(group, value)
        return [BoundInstruction(RECV, carry, reads, writes, group, route.text, crossing=crossing)]

    def _send_away(self, group: int, target: int, value: Value, way: _Way, text: str) -> list[BoundInstruction]:
        """Binds the sending of pieces to other processes. Every process counts all pieces, so that numbers agree.

        Where this process receives too, the receive, which follows directly, does both.
        """
        assert self._job is not None and self._limits is not None
        first, local = self.num_pieces, self._programs.mesh.local_groups
        self.num_pieces += len(pieces(way.source, way.target, tuple(way.aval.shape)))
        if group not in local and target not in local:
            return []
        # The user may hold such an array, and delete or donate it during the transfer.
        keep = value in self._program.inputs_of(group) or value in self._program.outputs_of(group)
        route = ValueRoute(self._job, way.source, way.target, way.aval, first, keep, text)
        flow = self._limits.flow(group, target, value)
        self._routes[group, target, value] = route, flow
        # With a flow, also a process without a piece of the value waits in turn: receivers report to it, too.
        if group not in local or target in local or (flow is None and not route.share.sends):
            return []
        crossing = self._crossing(value, group, target)
        carry = route.carry if route.share.sends else _send_nothing
        carry = carry if flow is None else flow.sending(carry)
        return [BoundInstruction(SEND, carry, self._slots.of(group, value), None, group, text, crossing=crossing)]

    def _way(self, value: Value, group: int, target: int) -> _Way:
        key = value.name, group, target
        if key not in self._ways:
            v, mesh = self._vars[value.name, value.microbatch is not None], self._programs.mesh
            source, wanted = self._programs.sharding(v, group), self._programs.sharding(v, target)
            code, mover = MOVE, None
            if device_put.is_alias(source, wanted, len(v.aval.shape)):
                code = ALIAS
            elif len({*mesh.processes[group], *mesh.processes[target]}) > 1:
                code = SEND
            elif group in mesh.local_groups:
                mover = device_put.mover(source, wanted, v.aval.dtype)
            self._ways[key] = _Way(code, source, wanted, v.aval, mover)
        return self._ways[key]

    def _crossing(self, value: Value, source: int, target: int) -> Crossing:
        return Crossing(value, source, target, self._program.nbytes.get(value.name, 0))


def _send_nothing(x: jax.Array, base: int) -> None:
    pass
