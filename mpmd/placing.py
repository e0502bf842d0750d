"""Gives every equation of a loop's body its place: a stage, forward or backward. The rules are in `partition`."""

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd import costs
from mpmd.body import Body, Node, Place
from mpmd.errors import StageError
from mpmd.markers import LoopInfo, mark_p

# --- marks ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Marks:
    """For each variable, the latest forward mark and the earliest backward mark that it depends on.

    Attributes:
      labels: per stage, the name that the mark at its end gives it, or None.
    """

    num_stages: int
    number: dict[int, int]  # identity of a mark's node -> its boundary
    latest: dict[compat.Var, int]
    earliest: dict[compat.Var, int]
    first: Any
    labels: tuple[str | None, ...]

    @classmethod
    def of(cls, body: Body, info: LoopInfo):
        num_stages = info.schedule.num_stages
        nodes = [n for n in body.nodes if n.eqn.primitive is mark_p]
        forward = [n for n in nodes if n.eqn.params["kind"] == "forward"]
        _check_number_of_marks(forward, info.schedule)
        number = _number_marks(nodes, forward)
        latest: dict[compat.Var, int] = {}
        earliest: dict[compat.Var, int] = {}
        for node in body.nodes:
            kind = node.eqn.params["kind"] if node.eqn.primitive is mark_p else None
            late = [latest[v] for v in body.inputs(node) if v in latest]
            early = [earliest[v] for v in body.inputs(node) if v in earliest]
            if kind == "forward" and early:
                raise StageError(
                    f"mark_stage_end at {compat.source_line(node.eqn)} depends on gradients of stage {min(early)},"
                    " so the value that it marks would flow back to an earlier stage.\n"
                    "  Mark stage ends in the forward pass only, once per microbatch."
                )
            if kind in ("forward", "tangent"):
                late.append(number[id(node)])
            elif kind == "backward":
                early.append(number[id(node)])
            for v in node.eqn.outvars:
                if late:
                    latest[v] = max(late)
                if early:
                    earliest[v] = min(early)
        labels = (*(n.eqn.params["label"] for n in forward), None)[:num_stages]
        return cls(num_stages, number, latest, earliest, forward[0] if forward else None, labels)

    def forward_stage(self, v) -> int | None:
        """The stage that the latest mark before `v` begins."""
        return min(self.latest[v] + 1, self.num_stages - 1) if v in self.latest else None


def check_marks_are_used(body: Body):
    """Drops what nothing needs; a forward mark among it is a mistake."""
    effects = [v for n in body.nodes if n.eqn.effects for v in n.eqn.outvars + n.eqn.invars]
    live = body.ancestors([*body.outvars, *effects]) | {id(n) for n in body.nodes if n.eqn.effects}
    for node in body.nodes:
        if node.eqn.primitive is not mark_p or node.eqn.params["kind"] != "forward":
            continue
        if id(node) not in live:
            raise StageError(
                f"mark_stage_end at {compat.source_line(node.eqn)}: nobody uses its result, so no stage ends there.\n"
                "  Use the values that it returns: x = mark_stage_end(x)."
            )
        if compat.called_from(node.eqn, "process_custom_vjp_call"):
            raise StageError(
                f"mark_stage_end inside custom_vjp, at {compat.source_line(node.eqn)}: a stage cannot end there.\n"
                "  Mark the stage end outside of the function with a custom derivative."
            )
    body.nodes = [n for n in body.nodes if id(n) in live]
    body.producer = {v: n for n in body.nodes for v in n.eqn.outvars}


def _check_number_of_marks(forward, schedule):
    stages, found = schedule.num_stages, len(forward)
    if found in (stages - 1, stages):
        return
    lines = "".join(f"\n    {compat.source_line(n.eqn)}" for n in forward[:8])
    more = f"\n    … and {found - 8} more" if found > 8 else ""
    want = f"{stages - 1} or {stages}" if stages > 1 else "no mark, or 1"
    raise StageError(
        f"mark_stage_end: {schedule} has {stages} stages, which takes {want} mark{'s' if stages > 1 else ''}"
        f" in a microbatch; found {found}{':' if found else '.'}{lines}{more}\n"
        "  Call mark_stage_end at the end of each stage (the last may be left out), on values that are used afterwards."
    )


def _number_marks(nodes, forward) -> dict[int, int]:
    """The boundary of every mark. Marks from a cached inner jaxpr share an id: backward ones then pair with
    forward ones from the last to the first, which is the order of a backward pass.
    """
    number = {id(n): k for k, n in enumerate(forward)}
    by_id = defaultdict(list)
    for node in forward:
        by_id[node.eqn.params["id"]].append(number[id(node)])
    for kind, step in (("backward", -1), ("tangent", 1)):
        queues = {mark: list(ks)[::step] for mark, ks in by_id.items()}
        for node in nodes:
            if node.eqn.params["kind"] == kind:
                queue = queues[node.eqn.params["id"]]
                number[id(node)] = queue.pop(0) if len(queue) > 1 else queue[0]
    return number


# --- placing --------------------------------------------------------------------------------------


def place_forward(body: Body, marks: Marks):
    """Tells forward from backward equations, and places the forward ones: after the latest mark that they depend
    on, or in stage 0. Those without a place by this float.
    """
    before_forward_marks = body.ancestors(
        v for n in body.nodes if n.eqn.primitive is mark_p and n.eqn.params["kind"] == "forward" for v in n.eqn.invars
    )
    backward: set[compat.Var] = set()
    unmarked: list[Node] = []
    for node in body.nodes:
        if not node.per_microbatch:
            continue
        ins = body.inputs(node)
        if node.eqn.primitive is mark_p:
            k = marks.number[id(node)]
            forward = node.eqn.params["kind"] != "backward"
            node.place = Place(min(k + 1, marks.num_stages - 1), "F") if forward else Place(k, "B")
            node.backward = not forward
        else:
            transposed = compat.is_transposed(node.eqn) and id(node) not in before_forward_marks
            node.backward = transposed or any(v in backward or v in marks.earliest for v in ins)
            if not node.backward:
                stages = [s for v in ins if (s := marks.forward_stage(v)) is not None]
                if stages:
                    node.place = Place(max(stages), "F")
                else:
                    unmarked.append(node)
        if node.backward:
            backward.update(node.eqn.outvars)
    if marks.first is None or marks.num_stages == 1:
        for node in unmarked:
            node.place = Place(0, "F")
    else:
        _place_stage_zero(body, marks, unmarked)


def _place_stage_zero(body: Body, marks: Marks, unmarked):
    """The implied entry mark: what mark 0 needs and reads a parameter, and what reads that, is stage 0's. So is what
    only mark 0 needs of heavy work on the microbatch alone, such as a frozen encoder.
    """
    needed = body.ancestors(marks.first.eqn.invars)
    roots = _parameter_roots(body)
    in_stage_zero: set[compat.Var] = set()
    parameters: set[compat.Var] = set()
    heavy: set[compat.Var] = set()
    for node in unmarked:
        if id(node) not in needed:
            continue
        reads = _parameters_read(body, node, roots)
        if reads or any(v in in_stage_zero for v in body.inputs(node)):
            parameters |= reads
            in_stage_zero.update(node.eqn.outvars)
        elif costs.is_heavy(node.eqn) or any(v in heavy for v in body.inputs(node)):
            heavy.update(node.eqn.outvars)
            node.place = Place(0, "F")
    for node in unmarked:
        reads = _parameters_read(body, node, roots)
        if reads & parameters or any(v in in_stage_zero for v in node.eqn.outvars + body.inputs(node)):
            in_stage_zero.update(node.eqn.outvars)
            node.place = Place(0, "F")


def _parameter_roots(body: Body) -> dict[compat.Var, frozenset]:
    """For each value that no microbatch changes, the parameters (whatever is inexact) that it comes from."""
    roots = {v: frozenset([v]) for v in body.operands if jax.dtypes.issubdtype(v.aval.dtype, np.inexact)}
    for node in body.nodes:
        if not node.per_microbatch:
            found = frozenset().union(*(roots.get(v, frozenset()) for v in body.inputs(node)))
            if found:
                roots.update((v, found) for v in node.eqn.outvars)
    return roots


def _parameters_read(body: Body, node, roots) -> frozenset:
    """Parameters that an equation reads. Taking one microbatch of an operand is reading data, not a parameter."""
    if node.eqn.primitive.name == "dynamic_slice" and any(
        v is body.index or ((n := body.source(v)) and n.per_microbatch) for v in node.eqn.invars[1:]
    ):
        return frozenset()
    return frozenset().union(*(roots.get(v, frozenset()) for v in body.inputs(node)))


def place_backward(body: Body, marks: Marks):
    """Places backward equations: by the backward mark that they depend on, or by the forward values that they read."""
    used_in = defaultdict(set)
    for node in body.nodes:
        if node.place and node.place.kind == "F" and node.eqn.primitive is not mark_p:
            for v in body.inputs(node):
                used_in[v].add(node.place.stage)
    at_least = _later_than_marks(body, marks)
    for node in body.nodes:
        if not node.per_microbatch or not node.backward or node.place:
            continue
        ins = body.inputs(node)
        early = [marks.earliest[v] for v in ins if v in marks.earliest]
        if early:
            node.place = Place(max(min(early), at_least.get(id(node), 0)), "B")
            continue
        gradients, forward = [], []
        for v in ins:
            source = body.source(v)
            if source and source.per_microbatch and source.place:
                (gradients if source.place.kind == "B" else forward).append((v, source.place.stage))
        stage = _stage_by_reads([s for _, s in gradients], [(s, used_in[v] | {s}) for v, s in forward])
        if stage is None and id(node) in at_least:
            stage = at_least[id(node)]
        if stage is not None:
            node.place = Place(max(stage, at_least.get(id(node), 0)), "B")


def _stage_by_reads(gradients, forward) -> int | None:
    """The stage of a backward equation that no backward mark reaches (a loss, an early exit)."""
    if gradients:
        stage = min(gradients)
        away = [producer for producer, available in forward if stage not in available]
        return min(stage, max(away)) if away else stage
    if forward:
        common = set.intersection(*(available for _, available in forward))
        return max(common) if common else max(producer for producer, _ in forward)
    return None


def _later_than_marks(body: Body, marks: Marks) -> dict[int, int]:
    """For each backward equation that one of a known stage depends on, the stage that it must not come after."""
    bound: dict[int, int] = {}
    for node in reversed(body.nodes):
        stage = bound.get(id(node))
        early = [marks.earliest[v] for v in body.inputs(node) if v in marks.earliest]
        if node.eqn.primitive is mark_p and node.eqn.params["kind"] == "backward":
            stage = max(min(marks.number[id(node)] + 1, marks.num_stages - 1), stage or 0)
        elif early:
            stage = max(min(early), stage or 0)
        if stage is None:
            continue
        for v in body.inputs(node):
            source = body.source(v)
            if source and source.backward and source.per_microbatch:
                bound[id(source)] = max(bound.get(id(source), 0), stage)
    return bound


def _order(num_stages):
    """Places in the order in which one microbatch passes them."""
    return [Place(s, "F") for s in range(num_stages)] + [Place(s, "B") for s in reversed(range(num_stages))]


def resolve_floats(body: Body, num_stages: int):
    """Gives a home, at its first reader, to every floating equation that is not cheap to compute again."""
    rank = {p: i for i, p in enumerate(_order(num_stages))}
    free: set[compat.Var] = {body.index, *body.operands}
    for node in body.nodes:
        if not node.per_microbatch:
            free.update(node.eqn.outvars)
        elif node.place is None and not costs.is_heavy(node.eqn) and all(v in free for v in body.inputs(node)):
            roots = _reads_whole_operand(body, node)
            node.clonable = not roots
            if node.clonable:
                free.update(node.eqn.outvars)
    readers: dict[compat.Var, set[Place]] = defaultdict(set)
    for v in body.outvars:
        source = body.source(v)
        if source and source.per_microbatch and source.place is None and not isinstance(v, compat.Literal):
            readers[v].add(Place(num_stages - 1, "B" if source.backward else "F"))
    for node in reversed(body.nodes):
        if not node.per_microbatch:
            continue
        if node.place is None:
            places = set().union(*(readers[v] for v in node.eqn.outvars))
            if not node.clonable:
                default = Place(num_stages - 1, "B") if node.backward else Place(0, "F")
                node.place = min(places, key=rank.__getitem__, default=default)
        else:
            places = {node.place}
        for v in body.inputs(node):
            readers[v] |= {node.place} if node.place else places


def _reads_whole_operand(body, node) -> bool:
    """Whether a floating equation reads a large operand other than by taking this microbatch's slice of it."""
    if node.eqn.primitive.name == "dynamic_slice":
        return False
    return any(v in body.operands and costs.size(v.aval) > 64 for v in body.inputs(node))


def sink_residuals(body: Body):
    """Moves a forward equation into the backward of its stage when only that reads it, and no more bytes are
    kept for it than before.
    """
    readers: dict[compat.Var, set[Place | None]] = defaultdict(set)
    for v in body.outvars:
        if not isinstance(v, compat.Literal):
            readers[v].add(None)
    for node in reversed(body.nodes):
        place = node.place
        if place and place.kind == "F" and not costs.is_heavy(node.eqn):
            target = Place(place.stage, "B")
            outs = costs.outputs(node.eqn)
            if outs and set().union(*(readers[v] for v in outs)) == {target}:
                kept = sum(costs.nbytes(v.aval) for v in outs)
                new = 0
                for v in set(body.inputs(node)):
                    source = body.source(v)
                    if source and source.per_microbatch and not source.clonable and target not in readers[v]:
                        new += costs.nbytes(v.aval)
                if new <= kept:
                    node.place = place = target
                    node.backward = True
        for v in body.inputs(node):
            readers[v].add(place if place or not node.clonable else None)
        if node.clonable:
            for v in body.inputs(node):
                readers[v] |= set().union(*(readers[o] for o in node.eqn.outvars))
