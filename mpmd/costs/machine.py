"""A cluster as a plan sees it: durations of work, collectives and transfers, by a roofline with its constants."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated

from jax.sharding import Mesh

from mpmd.arrays.targets import Target
from mpmd.costs.collectives import SENT, Collective
from mpmd.costs.work import Work
from scheduler.base.texts import in_bytes

# The part of a device's memory that JAX's allocator takes by default, and the most that leaves room for NCCL and cuDNN.
_TAKEN = {"cuda": 0.75, "tpu": 0.98}
_MOST = 0.93


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of a target, in hosts. The annotated fields are options of `python -m mpmd plan`.

    An efficiency of None is that measured for the target; attention's is at most that of products.
    """

    target: Target  # the data sheet
    devices_per_host: int = 8  # the number of neighbours that reach each other by `target.link_bandwidth`
    matrix_efficiency: Annotated[float | None, "share of the data sheet's speed that matrix products reach"] = None
    attention_efficiency: Annotated[float | None, "share of that speed that cuDNN's attention reaches"] = None
    memory_efficiency: Annotated[float, "share of the data sheet's memory bandwidth that is reached"] = 0.8
    link_efficiency: Annotated[float, "share of the bandwidth of links that is reached"] = 0.8
    latency_s: Annotated[float, "seconds until a transfer or collective begins to move bytes"] = 15e-6
    launch_s: Annotated[float, "seconds to start a program"] = 10e-6
    memory_fraction: float | None = None  # the part of a device's memory that JAX's allocator takes. None: its default.

    def __post_init__(self) -> None:
        t = self.target
        above_zero = {
            "memory": t.memory_nbytes, "link bandwidth": t.link_bandwidth, "network bandwidth": t.network_bandwidth,
            "devices per host": self.devices_per_host, "matrix efficiency": self.products_fraction,
            "attention efficiency": 1.0 if self.attention_efficiency is None else self.attention_efficiency,
            "memory efficiency": self.memory_efficiency, "link efficiency": self.link_efficiency,
            "memory fraction": self.taken_fraction,
        }  # fmt: skip
        at_least_zero = {"latency": self.latency_s, "launch": self.launch_s}
        faults = [f"{name} is {x}" for name, x in above_zero.items() if not x > 0]
        faults += [f"{name} is {x}" for name, x in at_least_zero.items() if not 0 <= x < math.inf]
        fractions = (name for name in above_zero if name.endswith(("efficiency", "fraction")))
        faults += [f"{name} is {above_zero[name]}" for name in fractions if above_zero[name] > 1]
        if faults:
            raise ValueError(f"a machine cannot be like this: {', '.join(faults)}.")

    @property
    def products_fraction(self) -> float:
        """The part of the peak that matrix products reach."""
        return self.target.matrix_efficiency if self.matrix_efficiency is None else self.matrix_efficiency

    @property
    def attention_fraction(self) -> float:
        """The part of the peak that cuDNN's attention reaches."""
        known = self.attention_efficiency
        return min(self.target.attention_efficiency if known is None else known, self.products_fraction)

    @property
    def taken_fraction(self) -> float:
        """The part of a device's memory that JAX's allocator takes."""
        return _TAKEN.get(self.target.platform, 1.0) if self.memory_fraction is None else self.memory_fraction

    @property
    def usable_nbytes(self) -> int:
        """Device memory that a step may use."""
        return round(self.target.memory_nbytes * self.taken_fraction)

    @property
    def more_memory(self) -> str | None:
        """How to give a step more of a device's memory; None if it has all of it."""
        if self.target.platform != "cuda" or self.taken_fraction >= _MOST:
            return None
        return (
            f"JAX takes {self.taken_fraction:.0%} of a GPU's memory; XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST} in the"
            f" environment (here: --memory-fraction {_MOST}) gives a step"
            f" {in_bytes(round(self.target.memory_nbytes * _MOST))}"
        )

    @property
    def num_near(self) -> int:
        """The number of devices that reach each other by links, in a host or beyond."""
        return max(self.devices_per_host, self.target.devices_per_link_domain)

    def bandwidth(self, is_near: bool) -> float:
        """Returns the bytes per second that a device sends, to neighbours or to other hosts."""
        peak = self.target.link_bandwidth if is_near else self.target.network_bandwidth
        return peak * self.link_efficiency

    def compute_s(self, works: Iterable[Work], num_devices: int) -> float:
        """Returns the seconds of a program without its collectives, evenly divided among devices: each of `works` takes
        as long as its products or its memory traffic, one after the other. So the times of parts add up to the whole.
        """
        return self.launch_s + self.work_s(works, num_devices)

    def work_s(self, works: Iterable[Work], num_devices: int) -> float:
        """Returns the seconds of work without the start of a program. Otherwise like `compute_s`."""
        return sum(map(self._seconds, works)) / num_devices

    def _seconds(self, work: Work) -> float:
        t = self.target
        bfloat16 = (work.products - work.attention - work.float32 - work.float8) / t.flops
        others = work.float32 / t.flops_float32 + work.float8 / (t.flops_float8 or t.flops)
        products = (bfloat16 + others) / self.products_fraction
        attention = work.attention / (t.flops * self.attention_fraction)
        return max(products + attention, self.memory_s(work.nbytes))

    def memory_s(self, nbytes: float) -> float:
        """Returns the seconds in which a device reads or writes this many bytes of its memory."""
        return nbytes / (self.target.memory_bandwidth * self.memory_efficiency)

    def collective_s(self, collective: Collective) -> float:
        """Returns the seconds of a collective with all its repetitions."""
        n, hosts, kind = collective.num_devices, collective.num_hosts, collective.kind
        if n < 2:
            return 0.0
        if hosts > 1 and "all-to-all" in kind:  # each device sends its part for other hosts itself
            beside, nbytes = n // hosts, collective.nbytes / n
            near_s = (beside - 1) * nbytes / self.bandwidth(True)
            far_s = (n - beside) * nbytes / self.bandwidth(False)
            seconds = self.latency_s + max(near_s, far_s)
        elif kind == "collective-permute":
            seconds = self.transfer_s(collective.nbytes, hosts == 1)
        else:
            seconds = self.latency_s + collective.nbytes * SENT[kind](n) / self.ring_bandwidth(n, hosts)
        return collective.times * seconds

    def waiting_s(self, collectives: Iterable[Collective], compute_s: float) -> float:
        """Returns the seconds of the collectives of a program beyond `compute_s`, its computation, which hides some."""
        seconds = {True: 0.0, False: 0.0}
        for collective in collectives:
            seconds[collective.is_hidden] += self.collective_s(collective)
        return seconds[False] + max(0.0, seconds[True] - compute_s)

    def ring_bandwidth(self, num_devices: int, num_hosts: int) -> float:
        """Returns the bytes per second that each device of a ring sends. Several rings leave a host by different
        network cards, and each device has one. So the bandwidth between two hosts is that of all their cards together.
        """
        if num_hosts == 1:
            return self.bandwidth(True)
        return min(self.bandwidth(True), num_devices // num_hosts * self.bandwidth(False))

    def transfer_s(self, nbytes: float, is_near: bool) -> float:
        """Returns the seconds until a value, with this many bytes on a device, has reached another group."""
        return self.latency_s + nbytes / self.bandwidth(is_near)

    def between_s(self, nbytes: float, *groups: Mesh) -> float:
        """Returns the seconds for a value to go from one of these groups to the other. Otherwise like `transfer_s`."""
        hosts = {d.id // self.num_near for mesh in groups for d in mesh.devices.flat}
        return self.transfer_s(nbytes, len(hosts) == 1)

    def __str__(self) -> str:
        t = self.target
        return (
            f"{t.name} ({t.description}): {t.memory_nbytes / 1e9:.1f} GB a device,"
            f" {self.usable_nbytes / 1e9:.1f} GB of it for the step; {t.flops / 1e12:.0f} TFLOP/s in bfloat16,"
            f" {t.flops_float32 / 1e12:.0f} in float32, at {self.products_fraction:.0%}"
            f" (attention {self.attention_fraction:.0%});"
            f" memory {t.memory_bandwidth / 1e12:.2f} TB/s at {self.memory_efficiency:.0%};"
            f" links {t.link_bandwidth / 1e9:.0f} GB/s among {self.num_near},"
            f" network {t.network_bandwidth / 1e9:.0f} GB/s a device, at {self.link_efficiency:.0%};"
            f" {self.latency_s * 1e6:.0f} µs a transfer, {self.launch_s * 1e6:.0f} µs a program"
        )
