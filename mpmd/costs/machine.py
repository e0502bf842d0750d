"""A cluster as a plan sees it: how long work, collectives and transfers take, by a roofline with its constants."""

import dataclasses
from collections.abc import Iterable

from jax.sharding import Mesh

from mpmd.arrays.targets import Target
from mpmd.costs.collectives import Collective
from mpmd.costs.work import Work

# Bytes that each device sends, by the size of the result on a device, among n devices (ring algorithms).
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
    "ragged-all-to-all": lambda n: (n - 1) / n,
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of a target, in hosts.

    Attributes:
      target: the data sheet.
      devices_per_host: neighbours that reach each other by `target.link_bandwidth`.
      matrix_efficiency, memory_efficiency, link_efficiency: the part of the peak that good kernels reach.
      latency_s: of each transfer and collective.
      launch_s: of each program.
      reserved_nbytes: of each device, what the driver and the communication library keep.
    """

    target: Target
    devices_per_host: int = 8
    matrix_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    latency_s: float = 15e-6
    launch_s: float = 10e-6
    reserved_nbytes: int = 2 << 30

    def __post_init__(self) -> None:
        t = self.target
        above_zero = {
            "memory": t.memory_nbytes, "link bandwidth": t.link_bandwidth, "network bandwidth": t.network_bandwidth,
            "devices per host": self.devices_per_host, "matrix efficiency": self.matrix_efficiency,
            "memory efficiency": self.memory_efficiency, "link efficiency": self.link_efficiency,
        }  # fmt: skip
        at_least_zero = {"latency": self.latency_s, "launch": self.launch_s, "reserved memory": self.reserved_nbytes}
        faults = [f"{name} is {x}" for name, x in above_zero.items() if not x > 0]
        faults += [f"{name} is {x}" for name, x in at_least_zero.items() if not x >= 0]
        if faults:
            raise ValueError(f"a machine cannot be like this: {', '.join(faults)}.")

    @property
    def usable_nbytes(self) -> int:
        """Device memory that a step may use."""
        return self.target.memory_nbytes - self.reserved_nbytes

    @property
    def num_near(self) -> int:
        """How many devices reach each other by links, in a host or beyond."""
        return max(self.devices_per_host, self.target.devices_per_link_domain)

    def bandwidth(self, is_near: bool) -> float:
        """Bytes a second that a device sends, to neighbours or to other hosts."""
        peak = self.target.link_bandwidth if is_near else self.target.network_bandwidth
        return peak * self.link_efficiency

    def compute_s(self, works: Iterable[Work], num_devices: int) -> float:
        """Seconds of a program without its collectives, evenly divided among devices: each of `works` takes as long as
        its products or its memory traffic, and they run one after the other. So parts of a program add up to the whole.
        """
        return self.launch_s + self.work_s(works, num_devices)

    def work_s(self, works: Iterable[Work], num_devices: int) -> float:
        """As `compute_s`, without the start of the program."""
        return sum(map(self._seconds, works)) / num_devices

    def _seconds(self, work: Work) -> float:
        narrow = (work.products - work.float32) / self.target.flops
        products = (narrow + work.float32 / self.target.flops_float32) / self.matrix_efficiency
        return max(products, self.memory_s(work.nbytes))

    def memory_s(self, nbytes: float) -> float:
        """Seconds in which a device reads or writes so many bytes of its memory."""
        return nbytes / (self.target.memory_bandwidth * self.memory_efficiency)

    def collective_s(self, collective: Collective) -> float:
        """Seconds of a collective, all its repetitions."""
        n = collective.num_devices
        if n < 2:
            return 0.0
        sent = collective.nbytes * _SENT[collective.kind](n)
        return collective.times * self.transfer_s(sent, n <= self.num_near)

    def transfer_s(self, nbytes: float, is_near: bool) -> float:
        """Seconds until a value, of which a device has so many bytes, has reached another group."""
        return self.latency_s + nbytes / self.bandwidth(is_near)

    def between_s(self, nbytes: float, *groups: Mesh) -> float:
        """As `transfer_s`, for a value that goes from one of these groups to the other."""
        hosts = {d.id // self.num_near for mesh in groups for d in mesh.devices.flat}
        return self.transfer_s(nbytes, len(hosts) == 1)

    def __str__(self) -> str:
        t = self.target
        return (
            f"{t.name} ({t.description}): {t.memory_nbytes / 1e9:.1f} GB a device,"
            f" {self.reserved_nbytes / 1e9:.1f} GB of it reserved; {t.flops / 1e12:.0f} TFLOP/s in bfloat16,"
            f" {t.flops_float32 / 1e12:.0f} in float32, at {self.matrix_efficiency:.0%};"
            f" memory {t.memory_bandwidth / 1e12:.2f} TB/s at {self.memory_efficiency:.0%};"
            f" links {t.link_bandwidth / 1e9:.0f} GB/s among {self.num_near},"
            f" network {t.network_bandwidth / 1e9:.0f} GB/s a device, at {self.link_efficiency:.0%};"
            f" {self.latency_s * 1e6:.0f} µs a transfer, {self.launch_s * 1e6:.0f} µs a program"
        )
