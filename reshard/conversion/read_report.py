"""Reports how much each process of a layout would read of a checkpoint, and why that is more than it needs.

Chunks are read whole, so a process reads all chunks that its part touches, each once, however many of its devices
want them. Index arithmetic alone: neither data nor devices are touched.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import NamedSharding

from mpmd.arrays.boxes import Box, device_boxes
from mpmd.arrays.mesh import Device
from mpmd.errors import ReshardError
from reshard.conversion.layout_file import LayoutRule, TargetLayout
from reshard.storage.arrays import IN_FLIGHT_NBYTES, plan_reads
from reshard.storage.paths import matches, show
from reshard.storage.stored import Checkpoint, Leaf
from reshard.trees import fault_of_sharding
from scheduler.base.texts import first_of, human, table


@dataclasses.dataclass
class ProcessReads:
    """One process: bytes of the leaves that its devices need, bytes of the chunks that hold them, and memory."""

    process: int
    devices: list[int] = dataclasses.field(default_factory=list)
    needed_bytes: int = 0
    read_bytes: int = 0
    device_bytes: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def largest_device_bytes(self) -> int:
        return max(self.device_bytes.values(), default=0)


@dataclasses.dataclass
class LeafReads:
    """The reads of one leaf by all processes together; boxes of the shape `fitting_chunk` make up all their parts."""

    leaf: Leaf
    fitting_chunk: tuple[int, ...]
    needed_bytes: int = 0
    read_bytes: int = 0
    num_processes: int = 0

    def __str__(self) -> str:
        path, sizes = show(self.leaf.path), ",".join(map(str, self.fitting_chunk))
        return (
            f"{path}: {human(self.read_bytes)} for {human(self.needed_bytes)}: its chunks are {list(self.leaf.chunk)}, "
            f"its parts multiples of {list(self.fitting_chunk)}; convert --chunk '{path}={sizes}' avoids it"
        )


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The reads of a checkpoint by a layout; prints itself."""

    checkpoint: Checkpoint
    layout: TargetLayout
    processes: tuple[ProcessReads, ...]
    leaves: tuple[LeafReads, ...]

    @property
    def too_large(self) -> list[int]:
        """The devices that have too little memory for the tree."""
        limit = self.layout.device_memory
        return [d for p in self.processes for d, n in p.device_bytes.items() if limit is not None and n > limit]

    def __str__(self) -> str:
        rows = [("process", "devices", "needs", "reads", "", "device memory", "largest device")]
        for p in self.processes:
            memory, largest = human(sum(p.device_bytes.values())), human(p.largest_device_bytes)
            rows.append((str(p.process), _ranges(p.devices), *_bytes(p.needed_bytes, p.read_bytes), memory, largest))
        if len(self.processes) > 1:
            needed, read = (sum(n) for n in zip(*[(p.needed_bytes, p.read_bytes) for p in self.processes], strict=True))
            memory = human(sum(sum(p.device_bytes.values()) for p in self.processes))
            rows.append(("all", str(self.layout.mesh.size), *_bytes(needed, read), memory, ""))
        lines = [str(self.layout), *table(rows, ">" * len(rows[0]))]
        over = [x for x in self.leaves if x.read_bytes > x.needed_bytes]
        over.sort(key=lambda x: (x.read_bytes - x.needed_bytes, show(x.leaf.path)), reverse=True)
        if over:
            lines += ["Chunks are read whole:", first_of(over)]
        else:
            lines.append("No process reads more than it needs: the chunks fit the layout.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        return {
            "layout": str(self.layout),
            "processes": [
                dataclasses.asdict(p) | {"device_bytes": list(p.device_bytes.values())} for p in self.processes
            ],
            "leaves": [
                {
                    "path": show(x.leaf.path),
                    "needed_bytes": x.needed_bytes,
                    "read_bytes": x.read_bytes,
                    "processes": x.num_processes,
                    "chunk": list(x.leaf.chunk),
                    "fitting_chunk": list(x.fitting_chunk),
                }
                for x in self.leaves
            ],
            "too_large_devices": self.too_large,
        }


def _bytes(needed: int, read: int) -> tuple[str, str, str]:
    return human(needed), human(read), f"{read / needed if needed else 1.0:.2f}x"


def _ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers as text, with runs shortened.

    Examples:
        >>> _ranges([0, 1, 2, 5])
        '0-2,5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ",".join("-".join(map(str, run)) for run in runs)


def plan_reading(checkpoint: Checkpoint, layout: TargetLayout) -> ReadPlan:
    """Computes the reads of each process of a layout. A ReshardError lists all leaves that have no rule that fits."""
    processes: dict[int, ProcessReads] = {}
    for device in sorted(layout.mesh.devices.flat, key=lambda d: d.id):
        process = processes.setdefault(device.process_index, ProcessReads(device.process_index))
        process.devices.append(device.id)
        process.device_bytes[device.id] = 0
    arrays = [leaf for leaf in checkpoint.leaves if leaf.is_array]
    chosen = [_rule_of(leaf, layout) for leaf in arrays]
    num_layers: dict[int, int] = {}
    for _, rule, layer in chosen:
        if rule is not None and layer is not None:
            num_layers[id(rule)] = max(num_layers.get(id(rule), 0), layer + 1)
    faults, reads = [], []
    for leaf, rule, layer in chosen:
        try:
            if rule is None:
                raise ReshardError("no rule's path matches it")
            shares = _shares(leaf, rule, layer, num_layers.get(id(rule), 0), layout)
            reads.append(_read(leaf, _wanted(rule, shares, layout), processes))
        except ReshardError as error:
            faults.append(f"{show(leaf.path)} {list(leaf.shape)}: {error}.")
    if faults:
        raise ReshardError(f"the layout does not fit the checkpoint:\n{first_of(faults)}")
    return ReadPlan(checkpoint, layout, tuple(processes.values()), tuple(reads))


def _rule_of(leaf: Leaf, layout: TargetLayout) -> tuple[Leaf, LayoutRule | None, int | None]:
    for rule in layout.rules:
        if (match := matches(rule.path, leaf.path)) is not None:
            return leaf, rule, int(match["layer"]) if rule.by_layer else None
    return leaf, None, None


def _shares(
    leaf: Leaf, rule: LayoutRule, layer: int | None, num_layers: int, layout: TargetLayout
) -> list[tuple[int, Box]]:
    """Returns the groups, each with a box of the leaf that it holds."""
    whole = Box.whole(leaf.shape)
    groups = rule.groups if rule.groups is not None else tuple(range(len(layout.groups)))
    if layer is not None:
        ends = _ends(num_layers, rule, len(layout.groups))
        return [(next(group for group, end in enumerate(ends) if layer < end), whole)]
    axis = rule.stacked_axis if rule.split is None else rule.split.axis
    if axis is None:
        return [(group, whole) for group in groups]
    if axis >= len(leaf.shape):
        raise ReshardError(f"its rule {rule.path!r} has stacked_axis {axis}, which the array does not have")
    if rule.split is not None:
        try:
            ranges = rule.split.ranges(leaf.shape[axis])
        except ValueError as error:
            raise ReshardError(f"rule {rule.path!r}: {error}") from None
        return [(r.group, whole.with_range(axis, r.start, r.stop)) for r in ranges]
    ends = itertools.pairwise((0, *_ends(leaf.shape[axis], rule, len(groups))))
    return [(group, whole.with_range(axis, *ends)) for group, ends in zip(sorted(groups), ends, strict=True)]


@functools.lru_cache(maxsize=1024)
def _ends(num_layers: int, rule: LayoutRule, num_groups: int) -> tuple[int, ...]:
    counts = rule.layers_per_group
    if counts is None:
        if num_layers % num_groups:
            raise ReshardError(
                f"{num_layers} layers do not divide evenly by {num_groups} groups; give layers_per_group"
            )
        counts = (num_layers // num_groups,) * num_groups
    if sum(counts) != num_layers:
        raise ReshardError(f"layers_per_group {list(counts)} are {sum(counts)} layers, but there are {num_layers}")
    return tuple(itertools.accumulate(counts))


def _wanted(rule: LayoutRule, shares: Iterable[tuple[int, Box]], layout: TargetLayout) -> Iterator[tuple[Device, Box]]:
    """Yields each device with each box that it wants."""
    for group, share in shares:
        if not share.size:
            continue
        sharding = NamedSharding(layout.groups[group], rule.spec)
        if (fault := fault_of_sharding(sharding, share.shape)) is not None:
            raise ReshardError(f"rule {rule.path!r}: " + " ".join(fault.split()).removesuffix("."))
        for device, box in device_boxes(sharding, share.shape).items():
            yield device, box.shifted(share.start)


def _read(leaf: Leaf, wanted: Iterable[tuple[Device, Box]], processes: dict[int, ProcessReads]) -> LeafReads:
    by_process: dict[int, dict[Box, None]] = {}
    for device, box in wanted:
        processes[device.process_index].device_bytes[device.id] += box.nbytes(leaf.itemsize)
        by_process.setdefault(device.process_index, {})[box] = None
    parts: list[Box] = []
    reads = LeafReads(leaf, (), num_processes=len(by_process))
    for index, boxes in by_process.items():
        seen = list(boxes)
        needed = sum(p.nbytes(leaf.itemsize) for i, box in enumerate(seen) for p in box.without(seen[:i]))
        joined = plan_reads(boxes, leaf.read_chunk, IN_FLIGHT_NBYTES // leaf.itemsize)
        read = sum(leaf.cells_nbytes(box) for box, _ in joined)
        processes[index].needed_bytes += needed
        processes[index].read_bytes += read
        reads.needed_bytes += needed
        reads.read_bytes += read
        around = Box.bounding(boxes)
        parts += [around] if around.nbytes(leaf.itemsize) == needed else list(boxes)
    reads.fitting_chunk = _fitting_chunk(parts, leaf.shape)
    return reads


def _fitting_chunk(parts: Iterable[Box], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the largest chunks that make up every part exactly."""
    sizes = []
    for axis, n in enumerate(shape):
        borders = {border for part in parts for border in (part.start[axis], part.stop[axis])} - {0, n}
        sizes.append(math.gcd(*borders) or n)
    return tuple(sizes)
