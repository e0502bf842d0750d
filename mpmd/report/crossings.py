"""Lists the values that cross between groups outside of the loops, with the reason and the user's line."""

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.partition.outline import Loop, Outline, OutlineTransfer, Segment
from scheduler.base.texts import counted, in_bytes

_SHOWN = 8
_SMALL = 64  # elements; a smaller argument is worth no warning


def crossing_lines(outline: Outline) -> list[str]:
    """Returns a line for each of the largest values that cross outside of the loops, and warnings about arguments."""
    transfers = sorted(
        (i for i in outline.items if isinstance(i, OutlineTransfer)), key=lambda t: -equations.nbytes(t.var.aval)
    )
    if not transfers:
        return []
    sizes = [in_bytes(equations.nbytes(t.var.aval)) for t in transfers]
    total = in_bytes(sum(equations.nbytes(t.var.aval) for t in transfers))
    lines = [f"outside of the loops {total} cross in {counted(len(transfers), 'transfer')} a step:"]
    for t, size in list(zip(transfers, sizes, strict=True))[:_SHOWN]:
        shown = f"{outline.names[t.var]} {t.var.aval.str_short(short_dtypes=True)} ({size})"
        lines.append(f"  {shown} from group {t.source} to {t.target}: {_reason(outline, t)}")
    if len(transfers) > _SHOWN:
        lines.append(f"  … and {len(transfers) - _SHOWN} more, of at most {sizes[_SHOWN]}")
    made_of = _made_of_arguments(outline)
    for t, size in zip(transfers, sizes, strict=True):
        source = made_of.get(t.var)
        if source is None or equations.size(t.var.aval) <= _SMALL:
            continue
        move = f"is sent from group {t.source} to {t.target} in every call: {_reason(outline, t)}.\n"
        if source is t.var:
            lines.append(
                f"warning: the argument {outline.names[source]} ({size}) {move}"
                f"  Keep it in group {t.target} too (in_shardings), or let that line read the arrays of one group."
            )
        else:
            lines.append(
                f"warning: what is made of the argument {outline.names[source]} ({size}) {move}"
                f"  Make it of the arrays of one group, or inside of the layer that reads it."
            )
    return lines


def _made_of_arguments(outline: Outline) -> dict[compat.Var, compat.Var]:
    """Maps large arguments, and values of the same size that depend on these alone, to such an argument."""
    found = {v: v for v in outline.trace.jaxpr.invars}
    for item in outline.items:
        for eqn in item.eqns if isinstance(item, Segment) else ():
            large = [v for v in equations.variables(eqn.invars) if equations.size(v.aval) > _SMALL]
            if not large or equations.is_heavy(eqn) or not all(v in found for v in large):
                continue
            for out in eqn.outvars:
                same = [v for v in large if equations.size(v.aval) == equations.size(out.aval)]
                if same:
                    found[out] = found[same[0]]
    return found


def _reason(outline: Outline, transfer: OutlineTransfer) -> str:
    """Returns the reason for a transfer: a user's equation or a stage reads it, or the step returns it, or scalars."""
    if (num_scalars := outline.packed.get(transfer.var, 0)) > 0:
        return f"{num_scalars} scalars, packed"
    for item in outline.items:
        if isinstance(item, Segment) and item.group == transfer.target and transfer.var in item.reads:
            eqn = next(e for e in item.eqns if transfer.var in e.invars)
            line = compat.source_line(eqn)
            return f"{eqn.primitive.name} reads it, at {line}" if line else "a part of a sum over groups"
        if isinstance(item, Loop) and transfer.target in item.needs().get(transfer.var, ()):
            stages = sorted(
                {t.place.stage for t in item.partition.tasks
                 if transfer.var in t.operands and item.group(t.place) == transfer.target}
            )  # fmt: skip
            return f"stage {', '.join(map(str, stages))} of the loop reads it"
    return "the step returns it there"
