"""Decides which arguments a segment may reuse for its results (donation). Needs only the outline; compiles nothing."""

from collections import Counter
from collections.abc import Set

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.partition.outline import Outline, OutlineTransfer, Segment


def last_uses(outline: Outline) -> dict[tuple[compat.Var, int], int]:
    """Returns, per variable and group, the position of the last item that reads it there. Ignores results."""
    last: dict[tuple[compat.Var, int], int] = {}
    for position, item in enumerate(outline.items):
        if isinstance(item, Segment):
            last.update(((v, item.group), position) for v in item.reads)
        elif isinstance(item, OutlineTransfer):
            last[item.var, item.source] = position
            last.setdefault((item.var, item.target), position)
        else:
            last.update(((v, g), position) for v, groups in item.needs().items() for g in groups)
    return last


def donations(outline: Outline, mesh: MpmdMesh, donated_args: Set[int]) -> dict[str, frozenset[compat.Var]]:
    """Returns, per segment, the arguments that are dead afterwards and that have the type of a result.

    Args:
      donated_args: flat arguments of the step that it may take over.
    """
    invars, arguments = outline.trace.jaxpr.invars, outline.trace.arguments
    kept = set(invars) - {arguments[i] for i in donated_args}
    # Where groups share devices, a transfer is an alias; between processes, a sent value lives until it is received.
    if mesh.groups_share_devices or len({p for ps in mesh.processes for p in ps}) > 1:
        kept |= {t.var for t in outline.items if isinstance(t, OutlineTransfer)}
        kept |= {v for v, groups in zip(invars, outline.inputs, strict=True) if len(groups) > 1}
    returned = {(v, g) for v, groups in outline.outputs if not isinstance(v, compat.Literal) for g in groups}
    last = last_uses(outline)
    found: dict[str, frozenset[compat.Var]] = {}
    for position, item in enumerate(outline.items):
        if isinstance(item, Segment):
            free = [
                v
                for v in item.reads
                if v not in kept and (v, item.group) not in returned and last[v, item.group] == position
            ]
            found[item.name] = _fitting(free, item)
    return found


def _fitting(free: list[compat.Var], item: Segment) -> frozenset[compat.Var]:
    """Returns the variables that have the type of a result, one for each result."""
    room = Counter(buffer_type(v) for v in item.writes if not isinstance(v, compat.Literal))
    found = set()
    for v in free:
        if room[buffer_type(v)] > 0:
            room[buffer_type(v)] -= 1
            found.add(v)
    return frozenset(found)


def buffer_type(v: compat.Var | compat.Literal) -> tuple[tuple[int, ...] | None, str, str | None]:
    """Returns shape, dtype and memory kind. A value can reuse the buffer of another one where these are equal."""
    return getattr(v.aval, "shape", None), str(v.aval.dtype), compat.memory_kind(v.aval)
