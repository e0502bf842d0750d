"""The same step without a pipeline: a bound for one program over all devices (FSDP)."""

import dataclasses

from mpmd.compile.step import StepPrograms
from mpmd.costs.machine import Machine
from mpmd.costs.work import Work
from mpmd.graphs import equations
from mpmd.partition.outline import is_of_list
from mpmd.report.memory import KINDS
from mpmd.report.roles import Roles
from mpmd.report.shares import Shares, kept_bytes
from scheduler.base.texts import counted, in_bytes, in_seconds


@dataclasses.dataclass(frozen=True)
class Unpipelined:
    """The same step on all devices as one program, with parameters, state and gradients divided among them (FSDP).

    This is an upper bound of its speed: it assumes that computation hides communication where there is enough of it.
    """

    num_devices: int
    compute_s: float  # seconds of a step; the longer one of this and the next is its time
    communication_s: float
    peak: int  # bytes on each device
    rows: int  # the rows of the batch, which have to be divided among the devices

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.communication_s)

    def __str__(self) -> str:
        text = (
            f"at best {in_seconds(self.seconds)} as one program (FSDP: computes {in_seconds(self.compute_s)},"
            f" communicates {in_seconds(self.communication_s)}, {in_bytes(self.peak)} a device)"
        )
        if self.rows < self.num_devices:
            text += f"; but {counted(self.rows, 'row')} a step cannot be divided among {self.num_devices} devices"
        return text

    def verdict(self, pipelined_s: float, limit: float | None) -> str:
        """Returns whether to pipeline, if the pipelined step takes `pipelined_s` and a device has `limit` bytes."""
        if self.seconds >= pipelined_s or self.rows < self.num_devices:
            return f"without a pipeline: {self}"
        if limit is not None and self.peak > limit:
            return f"without a pipeline: {self}; it does not fit"
        return f"do not pipeline: {self}"


def unpipelined(programs: StepPrograms, roles: Roles, machine: Machine, total: Work, shares: Shares) -> Unpipelined:
    """Returns the bound for a step, from the total work of a whole step over all devices."""
    count = sum(mesh.size for mesh in programs.mesh.groups)
    held = {role: sum(equations.nbytes(v.aval) for v, r in roles.role.items() if r == role) for role in KINDS[:3]}
    data = [v for v, role in roles.role.items() if role == "data" and not is_of_list(roles.names[v])]
    rows = max((v.aval.shape[0] * v.aval.shape[1] for v in data if len(v.aval.shape) >= 2), default=1)
    kept, largest = 0, 0
    for loop in programs.loops:
        if (of_list := shares.lists.get(loop.loop.number)) is not None:
            kept += sum(one.kept for one in of_list.microbatches)
            rows = max(rows, sum(one.rows for one in of_list.microbatches))
            held["data"] += sum(one.data for one in of_list.microbatches) - of_list.largest.data
        else:
            kept += kept_bytes(loop.loop) * loop.loop.partition.info.num_microbatches
        for t in loop.loop.partition.tasks:
            mine = [v for v in roles.arguments(t.operands) if roles.role[v] == "parameters"]
            largest = max(largest, sum(equations.nbytes(v.aval) for v in mine))
    frozen = sum(equations.nbytes(v.aval) for v in roles.frozen)
    gradients = held["parameters"] - frozen
    # Parameters are gathered forward and, if there is a backward, backward; gradients are reduced once.
    sent = (3 * gradients + (1 + roles.trains) * frozen) * (count - 1) / count
    share = (sum(held.values()) + gradients + kept) // count
    communication_s = sent / machine.ring_bandwidth(count, -(-count // machine.num_near))
    return Unpipelined(count, machine.compute_s([total], count), communication_s, share + largest, rows)
