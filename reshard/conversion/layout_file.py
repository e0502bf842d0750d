"""A layout in a file: a mesh, its groups and processes, and which leaf goes where, in YAML or JSON.

    mesh:
      axes: {stage: 4, data: 2, model: 2}   # names and sizes, outermost first
      mpmd_axis: stage                      # left out: all devices share everything (SPMD)
      devices_per_process: 4                # left out: 8, or all if there are fewer
      device_memory: 80GiB                  # left out: no check
    rules:                                  # the first whose path matches counts
      - path: "**/layers/{layer}/**"        # one entry a layer: to the group of its layer
        groups: by_layer
        spec: [null, model]
      - path: "**/layers/**"                # stacked: each group holds its layers of axis 0
        stacked_axis: 0
        spec: [null, null, model]           # the same: spec: [stage, null, model]
      - path: "**/folded/**"                # stacked: each group holds these ranges of axis 0
        split: {0: [[0, 2], [14, 16]], 1: [[2, 4], [12, 14]], 2: [[4, 6], [10, 12]], 3: [[6, 10]]}
      - path: "**/embed"
        groups: [0]
      - path: "**"                          # the rest, on all devices of all groups

`spec` is a PartitionSpec: for each array axis a mesh axis, a list of them, or null. Layers are spread evenly unless a
rule has `layers_per_group: [3, 3, 2, 2]`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.specs import without_axis
from mpmd.arrays.splits import Split, as_split, named_axis
from mpmd.errors import ReshardError
from reshard.places import describe_mesh
from reshard.sizes import nbytes_of
from reshard.storage.documents import read_document
from reshard.storage.paths import compiled
from scheduler.base.texts import counted

_MOST_AXES = 32
_MOST_DEVICES = 1 << 17
_MOST_FAULTS = 20
_MOST_SHOWN = 500  # characters of a fault


@dataclasses.dataclass(frozen=True)
class LayoutRule:
    """The destination of the leaves of one pattern; `groups` None means all groups."""

    path: str
    groups: tuple[int, ...] | None = None
    by_layer: bool = False
    stacked_axis: int | None = None
    layers_per_group: tuple[int, ...] | None = None
    split: Split | None = None
    spec: PartitionSpec = dataclasses.field(default_factory=PartitionSpec)


@dataclasses.dataclass(frozen=True)
class TargetLayout:
    """A mesh of devices that need not exist, and rules; `groups` are the meshes of the groups, one for SPMD."""

    mesh: Mesh
    mpmd_axis: str | None
    groups: tuple[Mesh, ...]
    rules: tuple[LayoutRule, ...]
    device_memory: int | None

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        processes = {device.process_index for device in self.mesh.devices.flat}
        grouped = f", {counted(len(self.groups), 'group')} along {self.mpmd_axis}" if self.mpmd_axis else ""
        return f"mesh {axes}: {counted(self.mesh.size, 'device')}, {counted(len(processes), 'process')}{grouped}"


def read_layout(file: str | File) -> TargetLayout:
    """Reads a layout file. A ReshardError says that it cannot be read, or lists every fault found."""
    document = read_document(file, "a layout")
    return parse_layout(document, str(file))


def parse_layout(document: object, name: str = "layout") -> TargetLayout:
    """Makes a layout from the content of a layout file. A ReshardError lists every fault found."""
    faults: list[str] = []
    document = _mapping(document, "the layout", {"mesh", "rules"}, faults)
    where = _mapping(
        document.get("mesh"), "mesh", {"axes", "mpmd_axis", "devices_per_process", "device_memory"}, faults
    )
    axes = where.get("axes")
    if not isinstance(axes, Mapping) or not axes or not all(isinstance(k, str) and _is_count(axes[k]) for k in axes):
        faults.append(
            f"mesh.axes is {axes!r}, but must name the mesh axes and their sizes, as in {{stage: 4, data: 2}}"
        )
        axes = {}
    mpmd_axis = where.get("mpmd_axis")
    if mpmd_axis is not None and axes and (not isinstance(mpmd_axis, str) or mpmd_axis not in axes):
        faults.append(f"mesh.mpmd_axis is {mpmd_axis!r}, which is not one of the axes {', '.join(axes)}")
    per_process = where.get("devices_per_process", min(8, math.prod(axes.values())))
    if not _is_count(per_process):
        faults.append(f"mesh.devices_per_process is {per_process!r}, not a positive number")
    memory = where.get("device_memory")
    try:
        memory = None if memory is None else nbytes_of(memory)
    except ValueError as error:
        faults.append(f"mesh.device_memory: {str(error).removesuffix('.')}")
    num_groups = axes.get(mpmd_axis, 1) if isinstance(mpmd_axis, str) else 1
    rules = document.get("rules", [{"path": "**"}])
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        faults.append(f"rules is {rules!r}, but must be a list")
        rules = []
    made = [_rule(rule, f"rules[{i}]", num_groups, axes, mpmd_axis, faults) for i, rule in enumerate(rules)]
    if faults:
        shown = [fault if len(fault) <= _MOST_SHOWN else f"{fault[:_MOST_SHOWN]}…" for fault in faults[:_MOST_FAULTS]]
        shown += [f"and {len(faults) - _MOST_FAULTS} faults more"] if len(faults) > _MOST_FAULTS else []
        raise ReshardError(f"{name} is not a layout:\n" + "\n".join(f"  {fault}." for fault in shown))
    if len(axes) > _MOST_AXES or math.prod(axes.values()) > _MOST_DEVICES:
        raise ReshardError(
            f"{name}: its mesh has more than {_MOST_AXES} axes or {_MOST_DEVICES} devices, and cannot be planned for."
        )
    mesh = describe_mesh(axes, devices_per_host=per_process)
    groups = MpmdMesh(mesh, mpmd_axis).groups if mpmd_axis else (mesh,)
    return TargetLayout(mesh, mpmd_axis, groups, tuple(made), memory)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _mapping(value: object, name: str, known: set[str], faults: list[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        faults.append(f"{name} is {value!r}, but must have the entries {', '.join(sorted(known))}")
        return {}
    if unknown := sorted(str(key) for key in value if key not in known):
        faults.append(f"{name} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return value


def _rule(
    value: Any, name: str, num_groups: int, axes: Mapping[str, int], mpmd_axis: str | None, faults: list[str]
) -> LayoutRule:
    known = {"path", "groups", "spec", "stacked_axis", "layers_per_group", "split"}
    value = _mapping(value, name, known, faults)
    path = value.get("path")
    try:
        compiled(path)
    except (ValueError, AttributeError, TypeError):
        faults.append(f"{name}.path is {path!r}, but must be a pattern like '**/layers/{{layer}}/**'")
        path = "**"
    groups = value.get("groups", "all")
    by_layer = groups == "by_layer"
    if by_layer and "{layer}" not in path:
        faults.append(f"{name}.groups is by_layer, but its path {path!r} has no {{layer}}")
    elif groups not in ("all", "by_layer") and not (
        isinstance(groups, list) and groups and all(isinstance(g, int) and 0 <= g < num_groups for g in groups)
    ):
        faults.append(f"{name}.groups is {groups!r}, but must be all, by_layer, or a list of 0 to {num_groups - 1}")
        groups = "all"
    spec = _spec(value.get("spec", []), f"{name}.spec", axes, faults)
    axis, named = value.get("stacked_axis"), named_axis(spec, mpmd_axis)
    if axis is not None and not (isinstance(axis, int) and axis >= 0):
        faults.append(f"{name}.stacked_axis is {axis!r}, not an array axis")
    elif None not in (axis, named) and axis != named:
        faults.append(f"{name}.stacked_axis is {axis}, but its spec names {mpmd_axis} at axis {named}")
    axis = named if axis is None else axis
    if axis is not None and by_layer:
        faults.append(f"{name} has both stacked_axis and by_layer; layers are either stacked or entries of their own")
    counts = value.get("layers_per_group")
    num_chosen = len(groups) if isinstance(groups, list) else num_groups
    if counts is not None and not (
        isinstance(counts, list) and len(counts) == num_chosen and all(isinstance(n, int) and n >= 0 for n in counts)
    ):
        faults.append(f"{name}.layers_per_group is {counts!r}, but must be {num_chosen} numbers, one a group")
        counts = None
    if counts is not None and axis is None and not by_layer:
        faults.append(f"{name} has layers_per_group, but neither stacked_axis nor by_layer")
    chosen = tuple(groups) if isinstance(groups, list) else None
    split = None
    if "split" in value:
        if by_layer or counts is not None:
            faults.append(f"{name} has split, which says itself which layers each group has, beside others that do")
        split = _split(value["split"], f"{name}.split", chosen or range(num_groups), axis, faults)
    counts = tuple(counts) if counts is not None else None
    return LayoutRule(path, chosen, by_layer, axis, counts, split, without_axis(spec, mpmd_axis))


def _split(value: object, name: str, groups: Sequence[int], axis: int | None, faults: list[str]) -> Split | None:
    """Returns the ranges of each group; JSON can name groups only by text."""
    if not isinstance(value, Mapping) or not all(str(group).isdecimal() for group in value):
        faults.append(f"{name} is {value!r}, but must be {{group: [[start, stop], ...]}}")
        return None
    try:
        split = {int(group): ranges for group, ranges in value.items()}
        return as_split(split, tuple(sorted(groups)), frozenset(groups), None, axis)
    except ValueError as error:
        faults += [f"{name}: {line.strip()}" for line in str(error).splitlines()[1:]]
        return None


def _spec(value: Any, name: str, axes: Mapping[str, int], faults: list[str]) -> PartitionSpec:
    entries = [tuple(e) if isinstance(e, list) else e for e in value] if isinstance(value, list) else [value]
    names = [n for e in entries if e is not None for n in (e if isinstance(e, tuple) else (e,))]
    if len(entries) > _MOST_AXES:
        faults.append(f"{name} has {len(entries)} entries, more than an array has axes")
    elif not isinstance(value, list) or not all(isinstance(n, str) for n in names):
        faults.append(
            f"{name} is {value!r}, but must be a list with a mesh axis, a list of them, or null per array axis"
        )
    elif unknown := sorted(set(names) - set(axes)):
        faults.append(f"{name} names {', '.join(unknown)}; the mesh has {', '.join(axes) or 'no axes'}")
    elif twice := sorted({n for n in names if names.count(n) > 1}):
        faults.append(f"{name} names {', '.join(twice)} twice")
    else:
        return PartitionSpec(*entries)
    return PartitionSpec()
