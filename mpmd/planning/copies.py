"""The costs of `mpmd.resilient`'s copies of the state: memory of hosts, bytes, and seconds of network."""

import dataclasses
from collections import Counter

from mpmd.arrays.mesh import MpmdMesh
from mpmd.costs.machine import Machine
from mpmd.graphs import equations
from mpmd.report.roles import Roles
from scheduler.base.texts import in_bytes, in_seconds

_VERSIONS = 2  # one whole, one on its way


@dataclasses.dataclass(frozen=True)
class CopiesPlan:
    """Copies of the state after a step."""

    copies: int  # how many other hosts keep each part too
    state_nbytes: int  # bytes of the state, each part once
    host_nbytes: int  # memory of the host that keeps most
    sent_nbytes: int  # the most bytes that a host sends after a step
    seconds: float  # the time to send these over all network cards of the host

    def text(self, step_s: float) -> str:
        """Returns one line. `step_s` is the time of a step."""
        if not self.sent_nbytes:
            way = "there is no other host for a copy: only what one process loses can be put back"
        else:
            every = int(-(-self.seconds // step_s))
            way = f"a host sends {in_bytes(self.sent_nbytes)} after a step, {in_seconds(self.seconds)} of its network, "
            way += "while the next step runs" if every <= 1 else f"more than a step takes: every={every} hides it"
        return (
            f"mpmd.resilient(copies={self.copies}): a state of {in_bytes(self.state_nbytes)};"
            f" {in_bytes(self.host_nbytes)} of a host's memory at most, for {_VERSIONS} versions; {way}"
        )


def plan_copies(mesh: MpmdMesh, roles: Roles, machine: Machine, copies: int) -> CopiesPlan:
    """Plans the copies of a step's state: `copies` of them, or one on each other host if there are fewer hosts."""
    hosts = [Counter(d.id // machine.devices_per_host for d in group.devices.flat) for group in mesh.groups]
    kept = {host: 0.0 for of_group in hosts for host in sorted(of_group)}
    for v, groups in zip(roles.args, roles.groups, strict=True):
        is_state = roles.role[v] != "data" and v not in roles.frozen
        if is_state and groups:  # the first group that has an array keeps it, each device a part
            for host, count in hosts[min(groups)].items():
                kept[host] += equations.nbytes(v.aval) * count / hosts[min(groups)].total()
    own = [round(nbytes) for nbytes in kept.values()]
    copies_here = min(copies, len(own) - 1)
    with_copies = [sum(own[i - k] for k in range(copies_here + 1)) for i in range(len(own))]
    sent = max(own) * copies_here
    seconds = sent / (machine.devices_per_host * machine.bandwidth(False))
    return CopiesPlan(copies, sum(own), _VERSIONS * max(with_copies), sent, seconds)
