"""Turns some of the places where a stage may end into stage ends: as cuts ask for, or the roles of a step."""

from collections.abc import Iterator, Sequence

from mpmd import _jax_compat as compat
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.split_scans import split_scans
from mpmd.errors import StageError
from mpmd.ops.stage_end import MarkId, RoleEnd, boundaries, mark_at, mark_p, with_each


def with_stage_ends(body: compat.ClosedJaxpr, candidates: Candidates, ends: Sequence[int]) -> compat.ClosedJaxpr:
    """Returns the body of a loop with stage ends at some of its candidates (given by number), and no other marks."""
    chosen, lengths, first = set(ends), [], 0
    new_ids: dict[int, MarkId] = {}  # for each mark outside of scans that ends a stage, by its number
    number = 0
    for m in candidates.marked:
        own = sorted(k - first for k in chosen if first <= k < first + m.count)
        if m.is_scan:
            starts = [0, *(k + 1 for k in own)]
            lengths.append(tuple(b - a for a, b in zip(starts, [*starts[1:], m.count], strict=True)))
        else:
            if own:
                new_ids[number] = MarkId()
            number += 1
        first += m.count
    body = compat.ClosedJaxpr(_with_marks(body.jaxpr, new_ids), body.consts)
    return split_scans(body, lengths) if lengths else body


def _with_marks(jaxpr: compat.Jaxpr, new_ids: dict[int, MarkId]) -> compat.Jaxpr:
    """Turns the marks outside of scans that have a new id into stage ends, and drops the other marks there."""
    marks = [eqn for eqn in jaxpr.eqns if eqn.primitive is mark_p]
    numbers = iter(boundaries([eqn.params for eqn in marks]))

    def changed(eqn: compat.JaxprEqn) -> compat.JaxprEqn | None:
        if eqn.primitive is not mark_p:
            return eqn
        new_id = new_ids.get(next(numbers))
        return new_id and eqn.replace(params={**eqn.params, "id": new_id, "optional": False})

    return with_each(jaxpr, changed)


# --- roles ----------------------------------------------------------------------------------------


def ends_of_roles(eqn: compat.JaxprEqn, candidates: Candidates) -> compat.JaxprEqn:
    """Returns a loop with roles with only stage ends as marks: one for each role and each group of a role.

    Layer ends inside a role leave its division open: it is even, by their number. Stage ends fix it.

    Raises:
      StageError: a role has fewer stages than groups, or marks follow the last role.
    """
    own: list[list[compat.JaxprEqn]] = [[]]  # the marks in each role, one for each candidate
    ends: list[int] = []
    number = 0
    for m in candidates.marked:
        mark = m.marks[0]
        if mark.params["role"] is None:
            own[-1] += [mark] * m.count
        else:
            ends += [number - len(own[-1]) + k for k in _divided(mark, own[-1])] + [number]
            own.append([])
        number += m.count
    if wrong := [mark for mark in own[-1] if not mark.params["optional"]]:
        raise StageError(
            f"{mark_at(wrong[0])} follows the last role of the loop.\n"
            "  Make a role of what it ends, or leave it out: what follows the last role runs where that does."
        )
    body: compat.ClosedJaxpr = with_stage_ends(eqn.params["jaxpr"], candidates, ends)
    return eqn.replace(params={**eqn.params, "jaxpr": _labelled(body)})


def _divided(end: compat.JaxprEqn, marks: Sequence[compat.JaxprEqn]) -> Iterator[int]:
    """Yields the numbers of the marks in a role at which its stages end; `end` is the mark that ends the role."""
    layers, groups = len(marks), end.params["role"].groups or (0,)
    if layers < len(groups) - 1:
        raise StageError(
            f"{mark_at(end)} has the groups {groups}, and its function"
            f" {layers or 'no'} mark{'s' * (layers != 1)}: a stage is in one group.\n"
            f"  Call mark_layer_end after each layer, or mark_stage_end {len(groups) - 1} times; or give it one group."
        )
    if not any(mark.params["optional"] for mark in marks):
        yield from range(layers)
        return
    layers = max(layers, len(groups))  # the last layer may have no mark
    yield from (layers * i // len(groups) - 1 for i in range(1, len(groups)))


def _labelled(body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Names the stages of a role after it, with a number if there are several."""
    ends = forward_roles(body.jaxpr)
    names = iter(_names(ends))

    def named(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
        if eqn.primitive is not mark_p or eqn.params["kind"] != "forward":
            return eqn
        name = next(names)
        own = eqn.params["label"] if eqn.params["role"] is None else None
        return eqn.replace(params={**eqn.params, "label": own or name})

    return compat.ClosedJaxpr(compat.new_jaxpr(body.jaxpr, eqns=list(map(named, body.jaxpr.eqns))), body.consts)


def _names(ends: Sequence[RoleEnd | None]) -> Iterator[str]:
    first = 0
    for k, end in enumerate(ends):
        if end is not None:
            yield from ([end.name] if k == first else [f"{end.name}.{i}" for i in range(k + 1 - first)])
            first = k + 1


def forward_roles(jaxpr: compat.Jaxpr) -> list[RoleEnd | None]:
    """Returns the role that each stage end ends, or None."""
    marks = [e for e in jaxpr.eqns if e.primitive is mark_p and e.params["kind"] == "forward"]
    return [mark.params["role"] for mark in marks]


def has_roles(candidates: Candidates) -> bool:
    """Returns whether a table assigns stages of a loop to groups."""
    roles = (mark.params["role"] for m in candidates.marked for mark in m.marks)
    return any(end is not None and end.groups is not None for end in roles)
