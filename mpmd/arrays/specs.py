"""Reads the ways to write a spec, and checks that the meshes of groups fit it."""

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

SpecLike = PartitionSpec | Sequence[object] | str | None


def as_spec(spec: SpecLike) -> PartitionSpec:
    """Returns a tuple, the name of an axis or None as a `PartitionSpec`."""
    if isinstance(spec, PartitionSpec):
        return spec
    if spec is None:
        return PartitionSpec()
    if isinstance(spec, str):
        return PartitionSpec(spec)
    if isinstance(spec, (tuple, list)):
        return PartitionSpec(*spec)
    raise ValueError(f"MpmdSharding: spec={spec!r} is a {type(spec).__name__}, not a jax.sharding.PartitionSpec.")


def names_of(spec: PartitionSpec) -> list[str]:
    """Returns the mesh axes that a spec names, in order."""
    return [n for e in spec.partitions for n in (e if isinstance(e, tuple) else (e,)) if n is not None]


def trimmed(entries: Sequence[object]) -> tuple[object, ...]:
    """Returns the entries of a spec without trailing Nones."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return tuple(entries)


def without_axis(spec: PartitionSpec, axis_name: str | None) -> PartitionSpec:
    """Returns the spec with one mesh axis dropped, and each entry in its shortest form."""
    entries: list[object] = []
    for entry in spec.partitions:
        if isinstance(entry, (tuple, list)):
            names = tuple(name for name in entry if name != axis_name)
            entries.append(names[0] if len(names) == 1 else names or None)
        else:
            entries.append(None if entry is not None and entry == axis_name else entry)
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def with_axis(spec: PartitionSpec, axis_name: str, array_axis: int) -> PartitionSpec:
    """Returns the spec with one more mesh axis, which cuts an array axis before the axes already named there."""
    entries: list[object] = [*spec.partitions, *[None] * (array_axis + 1 - len(spec))]
    entry = entries[array_axis]
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    entries[array_axis] = (axis_name, *names) if names else axis_name
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def group_shardings(
    meshes: Mapping[int, Mesh], spec: PartitionSpec, memory_kind: str | None
) -> dict[int, NamedSharding]:
    """Returns the sharding in each group; raises one error for all groups that have none."""
    if PartitionSpec.UNCONSTRAINED in spec.partitions:
        raise ValueError(f"MpmdSharding: spec={spec} is unconstrained; where an array lies must be said in full.")
    faults: list[str] = []
    shardings: dict[int, NamedSharding] = {}
    for group, mesh in meshes.items():
        missing = sorted({str(n) for n in names_of(spec) if n not in mesh.axis_names})
        if missing:
            faults.append(f"group {group} has axes {quoted(mesh.axis_names)}, but no {quoted(missing)}")
            continue
        try:
            shardings[group] = NamedSharding(mesh, spec, memory_kind=memory_kind)
        except Exception as error:  # JAX's errors for specs share no base class
            faults.append(f"group {group}: {error}")
    if faults:
        raise ValueError(f"MpmdSharding: spec={spec} does not fit:\n" + "\n".join(f"  {fault}" for fault in faults))
    return shardings


def quoted(names: Iterable[object]) -> str:
    """Returns names of axes as messages show them."""
    return ", ".join(repr(name) for name in names) or "no axes"
