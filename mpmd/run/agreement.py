"""Compares the plans of all processes before the first step, and chooses which arguments of each call are compared.

A difference would cause a hang or, worse, wrong numbers: a different order of collectives can pass unnoticed.
"""

import dataclasses
import functools
import itertools
import json
import re
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.step import StepPrograms
from mpmd.errors import ScheduleError
from mpmd.job.disagreement import other_ways
from mpmd.job.job import Job
from mpmd.job.notes import Note, Values
from scheduler import Program

Given = Sequence[tuple[int, jax.Array | np.ndarray]]  # by position in the call

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# An error shows at most so many characters of each side.
_MAX_SHOWN = 160
# Arrays on devices up to this size, such as keys and numbers, are compared in every call.
_MAX_SMALL_NBYTES = 4096


@dataclasses.dataclass(frozen=True)
class Announcement:
    """The plan of a process, as named texts that must be the same in all processes."""

    sections: dict[str, str]

    @property
    def short(self) -> str:
        """The last arguments, which tend to be the data."""
        lines = [line.rpartition(" in groups")[0] for line in self.sections["arguments"].splitlines()]
        return ("... " if len(lines) > 2 else "") + ", ".join(lines[-2:])

    @property
    def hashes(self) -> dict[str, str]:
        """A short hash of each section."""
        return {name: f"{zlib.crc32(text.encode()):08x}{len(text):x}" for name, text in self.sections.items()}


def plan_of(programs: StepPrograms, program: Program) -> Announcement:
    """Returns the plan of a compiled step, from the user's code to the instructions."""
    trace = programs.outline.trace
    mesh = programs.mesh
    inputs = programs.outline.inputs[len(trace.consts) :]
    arguments = zip(trace.in_names, trace.arguments, inputs, strict=True)
    lines = [f"{name}: {v.aval.str_short()} in groups {sorted(groups)}" for name, v, groups in arguments]
    loops = [loop.loop.partition.info for loop in programs.loops]
    names = programs.outline.names
    devices = [
        f"group {g}: {dict(m.shape)} {[(d.process_index, d.id) for d in m.devices.flat]}"
        for g, m in enumerate(mesh.groups)
    ]
    layouts = [f"{names[v]}: {programs.layouts[v]}" for v in trace.jaxpr.invars]
    return Announcement(
        {
            "JAX's settings": _ADDRESS.sub("0x", compat.trace_settings()),
            "devices": "\n".join(devices),
            "arguments": "\n".join(lines),
            "loops": "\n".join(f"{i.schedule}, {i.num_microbatches} microbatches" for i in loops),
            "constants": "\n".join(map(_value, trace.consts)),
            "the step's equations": _ADDRESS.sub("0x", str(trace.jaxpr)),
            "layouts": "\n".join(layouts),
            "instructions": f"{program}\n{sorted(program.nbytes.items())}",
        }
    )


def _value(x: jax.Array | np.ndarray) -> str:
    """Describes a captured constant by its type and, if this process has all of it, a hash of its value."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        data = keys.to_data(x)
        return f"{x.dtype}{list(x.shape)} {zlib.crc32(np.asarray(data).tobytes()):08x}"
    return f"{x.dtype}{list(x.shape)}"


def agree(job: Job, plan: Announcement, ranks: Sequence[int], call: Note) -> int:
    """Checks that all `ranks` are about to run the same plan. Returns a number for the plan, the same in all of them.

    Raises:
      ScheduleError: the plans or earlier calls differ; the message says where. Every process raises it.
    """
    number = job.new_number(ranks, "the first call of a step", f" with {plan.short}", call)
    said = job.exchange("comparing plans", json.dumps(plan.hashes), ranks)
    hashes = {rank: json.loads(text) for rank, text in said.items()}
    first = min(ranks)
    sections = list(dict.fromkeys(n for _, h in sorted(hashes.items()) for n in h))  # some may have more shapes
    different = {rank: [n for n in sections if h.get(n) != hashes[first].get(n)] for rank, h in hashes.items()}
    different = {rank: names for rank, names in different.items() if names}
    if not different:
        return number
    job.calls.settle(ranks)  # these may be the plans of different steps, since an earlier call differs
    name = next(n for n in sections if any(n in names for names in different.values()))
    mine = json.dumps([plan.sections.get(name, "")[:1_000_000], dict(call.fixed)])
    told = job.exchange("saying how plans differ", mine, ranks)
    texts = {rank: json.loads(text)[0] for rank, text in told.items()}
    fixed = "".join(f"  {line}\n" for _, line in other_ways({r: json.loads(text)[1] for r, text in told.items()}))
    rank = next(r for r, names in different.items() if name in names)
    raise ScheduleError(
        f"the processes are about to run different programs: {name} of rank {rank} differ from those of rank {first}.\n"
        f"{_difference(texts[first], texts[rank], first, rank)}\n{fixed}"
        "  Every process must call the same step with arguments of the same shapes, in the same order"
        " (a different seed, data shape, option or code version makes another program)."
    )


def _difference(a: str, b: str, rank_a: int, rank_b: int) -> str:
    """Returns the first line in which two texts differ."""
    pairs = itertools.zip_longest(a.splitlines(), b.splitlines(), fillvalue="")
    lines = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    shown = (line.strip()[:_MAX_SHOWN] or "(nothing)" for line in lines)
    return "\n".join(f"  rank {r}: {line}" for r, line in zip((rank_a, rank_b), shown, strict=True))


def values_to_compare(given: Given, is_first: bool) -> Values:
    """Returns, by position, the arguments of a call that must be equal in all processes: host arrays and keys.

    Large arrays that are on devices already are compared in the first call only; later calls have None for them. An
    array that the user has laid out on a mesh (`jax.make_array_from_process_local_data`) may differ between processes.
    """
    for _, x in given:
        if type(x) is not np.ndarray:
            break
    else:  # most calls
        return given
    return [
        (i, x if is_first or type(x) is np.ndarray or x.nbytes <= _MAX_SMALL_NBYTES else None)
        for i, x in given
        if type(x) is np.ndarray or not isinstance(x, jax.Array) or isinstance(x.sharding, SingleDeviceSharding)
    ]


def warm_up(job: Job, mesh: MpmdMesh, ranks: Sequence[int]) -> None:
    """Runs one small collective in every group that spans processes, in one order.

    The first collective of a set of processes is a rendezvous with a fixed limit of 30 s, and processes may reach
    several of them in different orders. So it happens here, right after all processes have met.
    """
    spread = [g for g, processes in enumerate(mesh.processes) if len(processes) > 1]
    if not spread:
        return
    job.exchange("meeting before the first collective", "", ranks)
    for group in spread:
        if group in mesh.local_groups:
            _meet(mesh.groups[group])


def _meet(mesh: Mesh) -> None:
    """Runs a sum over all devices of a mesh, and one over each of its axes."""
    names = tuple(mesh.axis_names)
    sharding = NamedSharding(mesh, PartitionSpec(names))
    ones = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones((mesh.size,), np.float32)[index])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(names), out_specs=PartitionSpec(names))
    def sums(x):
        for axes in (names, *((n,) for n in names if mesh.shape[n] > 1)):
            x = jax.lax.pcast(jax.lax.psum(x, axes), axes, to="varying")
        return x

    with jax.set_mesh(mesh):
        jax.block_until_ready(jax.jit(sums)(jnp.asarray(ones)))
