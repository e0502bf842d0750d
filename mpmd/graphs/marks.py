"""Checks and numbers the marks of a loop's body, and finds what depends on them."""

import dataclasses
from collections.abc import Sequence

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.graphs.body import Body, Node
from mpmd.graphs.scheduled_loop import ScheduledLoop
from mpmd.ops.stage_end import boundaries, mark_at
from mpmd.tracing.new_equations import Atom
from scheduler import Schedule
from scheduler.base.texts import counted


@dataclasses.dataclass(frozen=True)
class Marks:
    """The marks of a loop's body."""

    num_stages: int
    number: dict[Node, int]  # the boundary of each mark: forward, backward and tangent ones
    forward: tuple[Node, ...]  # the forward ones, in the order of the text
    labels: tuple[str | None, ...]  # the name of each stage, which the mark at its end sets, or None
    roles: tuple[int, ...] | None = None  # the group of each stage, if stages are roles: these run where written

    @classmethod
    def of(cls, body: Body, info: ScheduledLoop) -> "Marks":
        """Reads a body's marks; raises a StageError if they do not fit the schedule, or if one depends on gradients."""
        nodes = [n for n in body.nodes if n.is_mark]
        forward = tuple(n for n in nodes if n.eqn.params["kind"] == "forward")
        _check_number_of_marks(forward, info.schedule)
        number = dict(zip(nodes, boundaries([n.eqn.params for n in nodes]), strict=True))
        _check_marks_follow_no_gradient(body, number)
        num_stages = info.schedule.num_stages
        labels = (*(n.eqn.params["label"] for n in forward), None)[:num_stages]
        ends = (n.eqn.params["role"] for n in forward)
        roles = tuple(info.schedule.placement) if any(end is not None and end.groups for end in ends) else None
        return cls(num_stages, number, forward, labels, roles)


def _check_marks_follow_no_gradient(body: Body, number: dict[Node, int]) -> None:
    earliest: dict[compat.Var, int] = {}
    for node in body.nodes:
        kind = node.eqn.params["kind"] if node.is_mark else None
        early = [earliest[v] for v in node.inputs if v in earliest]
        if kind == "forward" and early:
            raise StageError(
                f"{mark_at(node.eqn)} depends on gradients of stage {min(early)},"
                " so the value that it marks would flow back to an earlier stage.\n"
                "  Mark stage ends in the forward pass only, once per microbatch. A model that is called again on what"
                " its own gradient gave (MAML) marks in the last call only: give it the function that marks as an"
                " argument, mark=mpmd.mark_stage_end there and mark=lambda x: x elsewhere."
            )
        if kind == "tangent" and early and min(early) <= number[node]:
            raise StageError(
                f"{mark_at(node.eqn)}: a gradient of a gradient goes through the stages forward and backward twice,"
                " and a schedule has tasks for once.\n"
                "  Differentiate twice inside of a stage, or in two loops: the first one gives the inner gradients out"
                " (operation=mpmd.Concat), and the second one takes jax.jvp of jax.grad along them."
            )
        if kind == "backward":
            early.append(number[node])
        if early:
            earliest.update(dict.fromkeys(node.eqn.outvars, min(early)))


def check_marks_are_used(body: Body) -> Body:
    """Drops unused equations. An unused forward mark is an error, unless its gradient is used: a role such as the loss
    itself, or a mark before a linear function.

    Raises:
      StageError: the result of a mark is unused, or the mark is in a function with a custom derivative.
    """
    marks = [n for n in body.nodes if n.is_mark and n.eqn.params["kind"] == "forward"]
    differentiated = {n.eqn.params["id"] for n in body.live(body.outvars) if n.is_mark}
    kept = [n for n in marks if n.eqn.params["role"] or n.eqn.params["id"] in differentiated]
    live = body.live([*body.outvars, *(v for n in kept for v in n.eqn.outvars)])
    for node in marks:
        function, role = node.eqn.params["function"], node.eqn.params["role"]
        if compat.called_from(node.eqn, "process_custom_vjp_call"):  # this may be why its result is unused
            raise StageError(
                f"{function} inside custom_vjp, at {compat.source_line(node.eqn)}: a stage cannot end"
                " there.\n  Mark the stage end outside of the function with a custom derivative."
            )
        if node not in live:
            raise StageError(
                f"{mark_at(node.eqn)}: nobody uses its result, so no stage ends there.\n"
                f"  Use the values that it returns{'' if role else f': x = {function}(x)'}."
            )
    return body.with_nodes(n for n in body.nodes if n in live)


def forget_marks(body: Body) -> Body:
    """Removes the marks, which are identities: a value that crosses several of them becomes one variable."""
    alias: dict[compat.Var, Atom] = {}

    def read(v: Atom) -> Atom:
        while not isinstance(v, compat.Literal) and v in alias:
            v = alias[v]
        return v

    nodes = []
    for node in body.nodes:
        marked = [(read(v), mark.place) for v in node.inputs if v in alias and (mark := body.source(v))]
        arrivals = {v: place for v, place in marked if place and not isinstance(v, compat.Literal)}
        eqn = node.eqn.replace(invars=[read(v) for v in node.eqn.invars]) if marked else node.eqn
        if node.is_mark:
            alias.update(zip(eqn.outvars, eqn.invars, strict=True))
        else:
            nodes.append(dataclasses.replace(node, eqn=eqn, arrivals=arrivals) if marked else node)
    return dataclasses.replace(body, nodes=tuple(nodes), outvars=tuple(map(read, body.outvars)))


def _calls_of_a_model(forward: Sequence[Node], num_stages: int) -> list[str] | None:
    """Returns the lines that call the model, if it is called several times, each time with marks for all stages."""
    levels = [list(level) for level in zip(*(compat.users_stack(n.eqn) for n in forward), strict=False)]
    outermost = next((k for k, level in enumerate(levels) if len(set(level)) > 1), len(levels))
    if outermost + 1 >= len(levels) or len({frame.split("(")[-1] for frame in levels[outermost + 1]}) > 1:
        return None  # these lines do not call one function
    calls = list(dict.fromkeys(levels[outermost]))
    sizes = {levels[outermost].count(call) for call in calls}
    return calls if len(sizes) == 1 and sizes <= {num_stages - 1, num_stages} - {1} else None


def _check_number_of_marks(forward: Sequence[Node], schedule: Schedule) -> None:
    stages, found = schedule.num_stages, len(forward)
    if found in (stages - 1, stages):
        return
    lines = "".join(f"\n    {compat.source_line(n.eqn)}" for n in forward[:8])
    more = f"\n    … and {found - 8} more" if found > 8 else ""
    want = f"{stages - 1} or {stages}" if stages > 1 else "no mark, or 1"
    if (twice := _calls_of_a_model(forward, stages)) is not None:
        raise StageError(
            f"mark_stage_end: {schedule} has {counted(stages, 'stage')}, which takes {want}"
            f" mark{'s' if stages > 1 else ''}"
            f" in a microbatch; found {found}: the marked model is called {len(twice)} times in a microbatch,"
            f" with {counted(found // len(twice), 'mark')} each:{''.join(f'{chr(10)}    {line}' for line in twice)}\n"
            "  Call it once, on both inputs (jnp.concatenate, jax.vmap), or have it mark in one of the calls only: give"
            " it the function that marks as an argument, mark=mpmd.mark_stage_end there and mark=lambda x: x elsewhere."
        )
    layers = "\n  Or call mark_layer_end after each layer, in the body of a scan too: then stages are chosen."
    both = "\n  Two models in one step share their marks: x, y = mark_stage_end((x, y))." if found > stages else ""
    raise StageError(
        f"mark_stage_end: {schedule} has {counted(stages, 'stage')}, which takes {want} mark{'s' if stages > 1 else ''}"
        f" in a microbatch; found {found}{':' if found else '.'}{lines}{more}\n"
        "  Call mark_stage_end at the end of each stage (the last may be left out), on values that are used afterwards."
        + (layers if not found else "")
        + both
    )
