"""Cuts a loop's body into tasks: forward and backward of each stage, by one place per equation.

The rules, in the order in which they are applied (each is a function below):

  hoist       what depends on neither the microbatch nor its index runs once, before the loop
  marks       the k-th mark ends stage k; a backward mark is tied to the forward mark that it transposes
  forward     an equation runs in the stage after the latest mark that it depends on; with no mark, in stage 0
              if stage 0's mark needs it and it reads a parameter (or reads what does)
  backward    an equation that depends on a backward mark, or comes from transposition, runs in the stage of
              that mark, or where the forward values that it reads are
  float       what has no place by these (labels, masks, positions, keys) is computed again by each reader if
              that is cheap, else once and sent
  sink        what only the backward of the same stage reads moves there if that keeps fewer bytes
  cut         a gradient whose parts arise in several stages is accumulated in parts, summed after the loop

The result is pure data: `LoopPartition`, which prints itself.
"""

import dataclasses
import functools
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd import costs
from mpmd.errors import StageError
from mpmd.markers import Add, Concat, LoopInfo, Mean, Operation, mark_p
from mpmd.trace import explicit_sharding, inline


class Place(NamedTuple):
    """Where an equation runs: a stage and `F` or `B` (after `split_backward`, also `I` or `W`)."""

    stage: int
    kind: str

    def __str__(self):
        return f"{self.kind}{self.stage}"


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """One reduced value of the loop, built up inside the task that produces it.

    Attributes:
      value: the variable of the loop's body that is accumulated, at `place`.
      result: the variable, outside of the loop, of the last accumulator.
    """

    value: compat.Var | compat.Literal
    result: compat.Var
    operation: type[Operation]
    place: Place


@dataclasses.dataclass(frozen=True)
class TaskBody:
    """The equations of one task and what it exchanges with the rest; the same for every microbatch.

    Attributes:
      eqns: in order; cheap ones may stand in several tasks.
      operands: loop operands (parameters, whole batches) that it reads.
      reads, writes: values of the same microbatch from and for other tasks.
      accumulates: positions in `LoopPartition.accumulators`.
      uses_index: whether it needs the microbatch index.
    """

    place: Place
    eqns: tuple[compat.JaxprEqn, ...]
    operands: tuple[compat.Var, ...]
    reads: tuple[compat.Var, ...]
    writes: tuple[compat.Var, ...]
    accumulates: tuple[int, ...]
    uses_index: bool

    @property
    def is_empty(self) -> bool:
        """Whether the task has nothing to do: it keeps its turn in the order and launches nothing."""
        return not (self.writes or self.accumulates or any(e.effects for e in self.eqns))


@dataclasses.dataclass(frozen=True)
class LoopPartition:
    """A loop, cut. `before` runs once ahead of it, `after` makes the loop's results from the accumulators."""

    info: LoopInfo
    index: compat.Var
    tasks: tuple[TaskBody, ...]
    accumulators: tuple[Accumulator, ...]
    before: tuple[compat.JaxprEqn, ...]
    after: tuple[compat.JaxprEqn, ...]
    names: dict[compat.Var, str]

    def task(self, place) -> TaskBody:
        """The task at `place`."""
        return next(t for t in self.tasks if t.place == place)

    def __str__(self):
        return "\n".join(self._lines())

    def _lines(self):
        producer = {v: t.place for t in self.tasks for v in t.writes}
        readers = defaultdict(list)
        for t in self.tasks:
            for v in t.reads:
                readers[v].append(t.place)
        for t in self.tasks:
            ops = defaultdict(int)
            for e in t.eqns:
                ops[e.primitive.name] += 1
            done = ", ".join(f"{n}× {k}" if n > 1 else k for k, n in ops.items())
            yield f"{t.place}: {done or 'empty'}"
            for v in t.reads:
                yield f"    reads {self.names[v]} from {producer[v]}"
            for v in t.writes:
                where = ", ".join(map(str, readers[v]))
                yield f"    writes {self.names[v]} {v.aval.str_short(short_dtypes=True)} ({costs.nbytes(v.aval):,} B) for {where}"
            for k in t.accumulates:
                acc = self.accumulators[k]
                yield f"    accumulates {acc.operation.__name__} {acc.value.aval.str_short(short_dtypes=True)}"


def partition_loop(eqn: compat.JaxprEqn, split: bool) -> LoopPartition:
    """Cuts the body of a `treduce` equation into the tasks of its schedule.

    Args:
      eqn: the equation; its body is flat (see `trace.inline`).
      split: whether the schedule has `I` and `W` tasks instead of (or beside) `B`.

    Raises:
      StageError: the marks do not fit the schedule, or a value would flow back to an earlier stage.
    """
    info: LoopInfo = eqn.params["info"]
    body = _Body.of(eqn)
    _check_marks_are_used(body)
    marks = _Marks.of(body, info)
    body.drop_microbatch_free()
    _place_forward(body, marks)
    _place_backward(body, marks)
    body.forget_marks()
    _resolve_floats(body, marks.num_stages)
    _sink_residuals(body)
    accumulators, after = _outputs(body, eqn, info, marks.num_stages)
    return _build(body, info, marks.num_stages, accumulators, after, split)


# --- the body, as a graph -------------------------------------------------------------------------


@dataclasses.dataclass
class _Node:
    """An equation under analysis."""

    eqn: compat.JaxprEqn
    per_microbatch: bool = True
    backward: bool = False
    place: Place | None = None
    clonable: bool = False


class _Body:
    """The loop's equations with fresh variables, operands replaced by those of the step."""

    def __init__(self, nodes, index, outvars, operands):
        self.nodes: list[_Node] = nodes
        self.index: compat.Var = index
        self.outvars = outvars
        self.operands: set[compat.Var] = operands
        self.producer: dict[compat.Var, _Node] = {v: n for n in nodes for v in n.eqn.outvars}

    @classmethod
    def of(cls, eqn):
        jaxpr = eqn.params["jaxpr"].jaxpr
        env = dict(zip(jaxpr.invars, eqn.invars, strict=False))
        index = env[jaxpr.invars[-1]] = compat.new_var(jaxpr.invars[-1].aval)
        env |= {v: compat.Literal(c, v.aval) for v, c in zip(jaxpr.constvars, eqn.params["jaxpr"].consts, strict=True)}

        def read(v):
            return v if isinstance(v, compat.Literal) else env[v]

        nodes = []
        for e in jaxpr.eqns:
            fresh = [v if isinstance(v, compat.DropVar) else compat.new_var(v.aval) for v in e.outvars]
            nodes.append(_Node(e.replace(invars=[read(v) for v in e.invars], outvars=fresh)))
            env.update(zip(e.outvars, fresh, strict=True))
        operands = {v for v in eqn.invars if not isinstance(v, compat.Literal)}
        return cls(nodes, index, [read(v) for v in jaxpr.outvars], operands)

    def inputs(self, node):
        return [v for v in node.eqn.invars if not isinstance(v, compat.Literal)]

    def source(self, v) -> _Node | None:
        return None if isinstance(v, compat.Literal) else self.producer.get(v)

    def ancestors(self, atoms) -> set[int]:
        """Identities of the nodes that `atoms` depend on."""
        found: set[int] = set()
        stack = [n for v in atoms if (n := self.source(v))]
        while stack:
            node = stack.pop()
            if id(node) not in found:
                found.add(id(node))
                stack += [n for v in self.inputs(node) if (n := self.source(v))]
        return found

    def drop_microbatch_free(self):
        """Finds what no microbatch changes. Cheap views and constants may be computed again inside the tasks
        that read them; everything else is computed before the loop and becomes an operand."""
        moving = {self.index}
        rooted: set[compat.Var] = set(self.operands)
        for node in self.nodes:
            ins = self.inputs(node)
            node.per_microbatch = bool(node.eqn.effects) or any(v in moving for v in ins)
            if node.per_microbatch or node.eqn.primitive is mark_p:
                node.per_microbatch = True
                moving.update(node.eqn.outvars)
                continue
            from_operands = any(v in rooted for v in ins)
            if from_operands:
                rooted.update(node.eqn.outvars)
            cheap = not costs.is_heavy(node.eqn)
            node.clonable = cheap and (not from_operands or costs.is_layout(node.eqn) or costs.is_scalar_work(node.eqn))

    def forget_marks(self):
        """Marks are identities: what crosses several of them untouched is one value."""
        alias: dict[compat.Var, compat.Var | compat.Literal] = {}

        def read(v):
            while not isinstance(v, compat.Literal) and v in alias:
                v = alias[v]
            return v

        kept = []
        for node in self.nodes:
            node.eqn = node.eqn.replace(invars=[read(v) for v in node.eqn.invars])
            if node.eqn.primitive is mark_p:
                alias.update(zip(node.eqn.outvars, node.eqn.invars, strict=True))
            else:
                kept.append(node)
        self.nodes = kept
        self.outvars = [read(v) for v in self.outvars]
        self.producer = {v: n for n in kept for v in n.eqn.outvars}


# --- marks ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Marks:
    """For each variable, the latest forward mark and the earliest backward mark that it depends on."""

    num_stages: int
    number: dict[int, int]  # identity of a mark's node -> its boundary
    latest: dict[compat.Var, int]
    earliest: dict[compat.Var, int]
    first: _Node | None

    @classmethod
    def of(cls, body: _Body, info: LoopInfo):
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
                    f"mark_stage_end at {compat.source_line(node.eqn)} depends on gradients of stage {min(early)}, so the value that"
                    " it marks would flow back to an earlier stage.\n  Mark stage ends in the forward pass only, once per microbatch."
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
        return cls(num_stages, number, latest, earliest, forward[0] if forward else None)

    def forward_stage(self, v) -> int | None:
        """The stage that the latest mark before `v` begins."""
        return min(self.latest[v] + 1, self.num_stages - 1) if v in self.latest else None


def _check_marks_are_used(body: _Body):
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
        f"mark_stage_end: {schedule} has {stages} stages, which takes {want} mark{'s' if stages > 1 else ''} in a microbatch;"
        f" found {found}{':' if found else '.'}{lines}{more}\n"
        "  Call mark_stage_end at the end of each stage (the last may be left out), on values that are used afterwards."
    )


def _number_marks(nodes, forward) -> dict[int, int]:
    """The boundary of every mark. Marks from a cached inner jaxpr share an id: backward ones then pair with
    forward ones from the last to the first, which is the order of a backward pass."""
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


def _place_forward(body: _Body, marks: _Marks):
    before_forward_marks = body.ancestors(
        v for n in body.nodes if n.eqn.primitive is mark_p and n.eqn.params["kind"] == "forward" for v in n.eqn.invars
    )
    backward: set[compat.Var] = set()
    unmarked: list[_Node] = []
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


def _place_stage_zero(body: _Body, marks: _Marks, unmarked):
    """The implied entry mark: what mark 0 needs and reads a parameter, and what reads that, is stage 0's."""
    needed = body.ancestors(marks.first.eqn.invars)
    roots = _parameter_roots(body)
    in_stage_zero: set[compat.Var] = set()
    parameters: set[compat.Var] = set()
    for node in unmarked:
        reads = _parameters_read(body, node, roots)
        if id(node) in needed and (reads or any(v in in_stage_zero for v in body.inputs(node))):
            parameters |= reads
            in_stage_zero.update(node.eqn.outvars)
    for node in unmarked:
        reads = _parameters_read(body, node, roots)
        if reads & parameters or any(v in in_stage_zero for v in node.eqn.outvars + body.inputs(node)):
            in_stage_zero.update(node.eqn.outvars)
            node.place = Place(0, "F")


def _parameter_roots(body: _Body) -> dict[compat.Var, frozenset]:
    """For each value that no microbatch changes, the parameters (inexact arrays) that it comes from."""
    roots = {
        v: frozenset([v])
        for v in body.operands
        if jax.dtypes.issubdtype(v.aval.dtype, np.inexact) and getattr(v.aval, "ndim", 0) > 0
    }
    for node in body.nodes:
        if not node.per_microbatch:
            found = frozenset().union(*(roots.get(v, frozenset()) for v in body.inputs(node)))
            if found:
                roots.update((v, found) for v in node.eqn.outvars)
    return roots


def _parameters_read(body: _Body, node, roots) -> frozenset:
    """Parameters that an equation reads. Taking one microbatch of an operand is reading data, not a parameter."""
    if node.eqn.primitive.name == "dynamic_slice" and any(
        v is body.index or ((n := body.source(v)) and n.per_microbatch) for v in node.eqn.invars[1:]
    ):
        return frozenset()
    return frozenset().union(*(roots.get(v, frozenset()) for v in body.inputs(node)))


def _place_backward(body: _Body, marks: _Marks):
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


def _later_than_marks(body: _Body, marks: _Marks) -> dict[int, int]:
    """For each backward equation that a backward mark depends on, the stage that it must not come after."""
    bound: dict[int, int] = {}
    for node in reversed(body.nodes):
        stage = bound.get(id(node))
        if node.eqn.primitive is mark_p and node.eqn.params["kind"] == "backward":
            stage = max(min(marks.number[id(node)] + 1, marks.num_stages - 1), stage or 0)
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


def _resolve_floats(body: _Body, num_stages: int):
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
        if source and source.per_microbatch and source.place is None:
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


def _sink_residuals(body: _Body):
    """Moves a forward equation into the backward of its stage when only that reads it, and no more bytes are
    kept for it than before."""
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


# --- outputs --------------------------------------------------------------------------------------


def _outputs(body: _Body, eqn, info: LoopInfo, num_stages: int):
    """An accumulator per output (or per part of one that arises in several stages), and the equations after
    the loop that make the loop's results from them."""
    accumulators: list[Accumulator] = []
    after: list[compat.JaxprEqn] = []
    uses = defaultdict(int)
    for node in body.nodes:
        for v in node.eqn.invars:
            if not isinstance(v, compat.Literal):
                uses[v] += 1
    for v in body.outvars:
        if not isinstance(v, compat.Literal):
            uses[v] += 1
    for value, operation, result in zip(body.outvars, info.operations, eqn.outvars, strict=True):
        if isinstance(result, compat.DropVar):
            continue
        source = body.source(value)
        is_index = value is body.index
        if not is_index and (source is None or not source.per_microbatch):
            after += _same_every_time(body, value, operation, info.num_microbatches, result)
            continue
        parts = _parts(body, value, uses) if issubclass(operation, Add) else []
        if len({p.place.stage for p in parts}) < 2:
            place = Place(num_stages - 1, "F") if is_index else _home(source, num_stages)
            parts = [_Part(value, place, ())]
        totals = []
        for part in parts:
            final = compat.new_var(_accumulated(part.value.aval, operation, info.num_microbatches))
            accumulators.append(Accumulator(part.value, final, operation, part.place))
            totals.append((final, part.later))
        after += _combine(totals, operation, info.num_microbatches, result)
    return accumulators, after


def _home(source, num_stages) -> Place:
    return source.place or Place(num_stages - 1, "B" if source.backward else "F")


def _accumulated(aval, operation, num_microbatches):
    return compat.shaped_array(jax.eval_shape(functools.partial(operation.init, aval, num_microbatches)))


class _Part(NamedTuple):
    """One summand of a gradient: its value in the loop, where, and what is done with it after the loop."""

    value: compat.Var
    place: Place
    later: tuple[compat.JaxprEqn, ...]


def _parts(body: _Body, value, uses) -> list[_Part]:
    """The summands of `value` in several stages, or [] if it arises in one.

    Sums are cut at their leaves. Linear equations between a leaf and the output run on the leaf, inside the
    loop, up to a padding; the padding (a slice's gradient) runs once after the loop.
    """
    leaves: list[tuple[compat.Var, tuple]] = []

    def walk(v, chain, first):
        node = body.source(v)
        if node is None or not node.per_microbatch or not node.place or (uses[v] > 1 and not first):
            leaves.append((v, chain))
        elif node.eqn.primitive.name == "add_any":
            for x in node.eqn.invars:
                walk(x, chain, False)
        elif _is_linear(body, node.eqn):
            walk(_operand(node.eqn), (node.eqn, *chain), False)
        else:
            leaves.append((v, chain))

    walk(value, (), True)
    nodes = [body.source(v) if not isinstance(v, compat.Literal) else None for v, _ in leaves]
    if any(n is None or not n.per_microbatch or n.place is None or n.place.kind != "B" for n in nodes):
        return []
    if len({n.place.stage for n in nodes}) < 2:
        return []
    parts: list[_Part] = []
    for (v, chain), node in sorted(zip(leaves, nodes, strict=True), key=lambda x: x[1].place.stage):
        pads = next((i for i, e in enumerate(chain) if e.primitive.name in _PADS), len(chain))
        now = [*chain[:pads], *(e for e in chain[pads:] if e.primitive.name in _COMMUTES_WITH_PAD)]
        later = tuple(e for e in chain[pads:] if e.primitive.name not in _COMMUTES_WITH_PAD)
        for e in now:
            v = _append(body, node.place, lambda x, e=e: _apply(e, x), v)
        if not later and parts and parts[-1].place == node.place and not parts[-1].later:
            parts[-1] = _Part(_append(body, node.place, lambda a, b: a + b, parts[-1].value, v), node.place, ())
        else:
            parts.append(_Part(v, node.place, later))
    return parts


_PADS = {"pad", "dynamic_update_slice"}
_COMMUTES_WITH_PAD = {"convert_element_type", "neg"}
_SHAPES = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "reshard", "sharding_constraint", "copy", "reduce_sum", "expand_dims"}


def _is_linear(body, eqn) -> bool:
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        zeros = body.source(eqn.invars[0])
        return zeros is not None and _is_zeros(zeros.eqn) and all(isinstance(v, compat.Literal) for v in eqn.invars[2:])
    if name == "pad":
        return isinstance(eqn.invars[1], compat.Literal) and not np.any(eqn.invars[1].val)
    if name in ("mul", "div"):
        return isinstance(eqn.invars[1], compat.Literal) and not isinstance(eqn.invars[0], compat.Literal)
    if name == "convert_element_type":
        return all(jax.dtypes.issubdtype(v.aval.dtype, np.floating) for v in (eqn.invars[0], eqn.outvars[0]))
    return name == "neg" or name in _SHAPES


def _is_zeros(eqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], compat.Literal) and not np.any(eqn.invars[0].val)


def _operand(eqn):
    return eqn.invars[1] if eqn.primitive.name == "dynamic_update_slice" else eqn.invars[0]


def _apply(eqn, x):
    """The linear equation `eqn` on a value of perhaps another shape (before a padding that came first)."""
    if eqn.primitive.name == "dynamic_update_slice":
        zeros = jax.lax.full(eqn.outvars[0].aval.shape, 0, x.dtype)
        return jax.lax.dynamic_update_slice(zeros, x, [v.val for v in eqn.invars[2:]])
    rest = [v.val for v in eqn.invars[1:]]
    if eqn.primitive.name == "pad":
        rest = [np.zeros((), x.dtype)]
    return eqn.primitive.bind(x, *rest, **eqn.params)


def trace_equations(fun, *atoms):
    """The equations of `fun` on the types of `atoms`, reading `atoms`: (eqns, result variables)."""
    closed = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=explicit_sharding(v.aval)) for v in atoms))
    env = dict(zip(closed.jaxpr.invars, atoms, strict=True))
    env |= {v: compat.Literal(c, v.aval) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def read(v):
        return v if isinstance(v, compat.Literal) else env.get(v, v)

    eqns = [e.replace(invars=[read(v) for v in e.invars]) for e in inline(closed.jaxpr).eqns]
    return eqns, [read(v) for v in closed.jaxpr.outvars]


def _append(body: _Body, place: Place, fun, *atoms):
    """Adds `fun(*atoms)` to the body at `place`; returns its variable."""
    eqns, (out,) = trace_equations(fun, *atoms)
    for eqn in eqns:
        node = _Node(eqn, backward=place.kind == "B", place=place)
        body.nodes.append(node)
        body.producer.update((v, node) for v in eqn.outvars)
    return out


def _combine(totals, operation, num_microbatches, result):
    """After the loop: pad each part, sum them in stage order, finish the reduction."""

    def fun(*accs):
        parts = []
        for acc, (_, later) in zip(accs, totals, strict=True):
            for e in later:
                acc = _apply(e, acc)
            parts.append(acc)
        return operation.finish(functools.reduce(lambda a, b: a + b, parts), num_microbatches)

    return _bound(fun, [v for v, _ in totals], result)


def _same_every_time(body, value, operation, num_microbatches, result):
    """An output that no microbatch changes: reduced without a loop task (zeros stay zeros)."""
    source = body.source(value)
    zero = isinstance(value, compat.Literal) and not np.any(value.val)
    if (zero or (source and _is_zeros(source.eqn))) and issubclass(operation, Add):
        aval = value.aval

        def zeros():
            acc = operation.init(aval, num_microbatches)
            return operation.finish(acc, num_microbatches) if issubclass(operation, Mean) else acc

        return _bound(zeros, [], result)

    def repeat(x):
        def step(i, acc):
            return operation.update(acc, x, i)

        acc = jax.lax.fori_loop(0, num_microbatches, step, operation.init(jax.typeof(x), num_microbatches))
        return operation.finish(acc, num_microbatches)

    if isinstance(value, compat.Literal):
        constant = np.asarray(value.val, value.aval.dtype)
        return _bound(lambda: repeat(jax.numpy.asarray(constant)), [], result)
    return _bound(repeat, [value], result)


def _bound(fun, atoms, result):
    """Equations of `fun(*atoms)` whose outcome is the variable `result`."""
    eqns, (out,) = trace_equations(fun, *atoms)
    if isinstance(out, compat.Literal) or out in atoms:
        more, (out2,) = trace_equations(lambda *x: jax.lax.copy_p.bind(x[0] if x else jax.numpy.asarray(out.val, out.aval.dtype)),
                               *([] if isinstance(out, compat.Literal) else [out]))  # fmt: skip
        eqns, out = [*eqns, *more], out2
    return [e.replace(outvars=[result if v is out else v for v in e.outvars]) for e in eqns]


# --- tasks ----------------------------------------------------------------------------------------


def _build(body: _Body, info, num_stages, accumulators, after, split) -> LoopPartition:
    if split:
        split_backward(body, accumulators)
        accumulators = [dataclasses.replace(a, place=_split_place(body, a)) for a in accumulators]
    kinds = ("F", "I", "W") if split else ("F", "B")
    places = [Place(s, k) for k in kinds for s in (range(num_stages) if k == "F" else reversed(range(num_stages)))]
    own: dict[Place, list[int]] = defaultdict(list)
    for i, node in enumerate(body.nodes):
        if node.per_microbatch and node.place:
            own[node.place].append(i)
    position = {v: i for i, n in enumerate(body.nodes) for v in n.eqn.outvars}
    drafts = {p: _gather(body, p, own[p], position, [a for a in accumulators if a.place == p]) for p in places}
    read_by_others = {v for p, d in drafts.items() for v in d.reads}
    tasks, names = [], {}
    for p in places:
        d = drafts[p]
        writes = [v for i in own[p] for v in body.nodes[i].eqn.outvars if v in read_by_others]
        names.update((v, f"{p}.{n}") for n, v in enumerate(writes))
        accs = tuple(k for k, a in enumerate(accumulators) if a.place == p)
        eqns = _live(d.eqns, [*writes, *(accumulators[k].value for k in accs)])
        tasks.append(TaskBody(p, eqns, *_free_variables(body, eqns, [accumulators[k].value for k in accs]), tuple(writes), accs,
                              _needs_index(body, eqns, accumulators, accs)))  # fmt: skip
    # Dropping a dead equation may leave a value that nobody reads any more.
    wanted = {v for t in tasks for v in t.reads}
    tasks = [dataclasses.replace(t, writes=tuple(v for v in t.writes if v in wanted)) for t in tasks]
    before = tuple(n.eqn for n in body.nodes if not n.per_microbatch)
    return LoopPartition(info, body.index, tuple(tasks), tuple(accumulators), before, tuple(after), names)


class _Draft(NamedTuple):
    eqns: list
    reads: set


def _gather(body: _Body, place, own, position, accumulators) -> _Draft:
    """The task's own equations with the cheap ones that they read, in order."""
    wanted, reads = set(own), set()
    stack = [v for i in own for v in body.inputs(body.nodes[i])] + [a.value for a in accumulators]
    while stack:
        v = stack.pop()
        node = body.source(v)
        if node is None or node.place == place:
            continue
        if node.clonable:
            i = position[v]
            if i not in wanted:
                wanted.add(i)
                stack += body.inputs(node)
        elif node.per_microbatch:
            reads.add(v)
    return _Draft([body.nodes[i].eqn for i in sorted(wanted)], reads)


def _live(eqns, wanted):
    needed = set(costs.variables(wanted))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(costs.variables(eqn.invars))
    return tuple(reversed(kept))


def _free_variables(body: _Body, eqns, accumulated):
    """(operands, reads) of a task, in order of first use."""
    bound = {v for e in eqns for v in e.outvars}
    free = [v for v in costs.variables([v for e in eqns for v in e.invars] + list(accumulated)) if v not in bound and v is not body.index]
    reads = tuple(v for v in free if (n := body.source(v)) and n.per_microbatch)
    return tuple(v for v in free if v not in reads), reads


def _needs_index(body, eqns, accumulators, accs) -> bool:
    values = [v for e in eqns for v in e.invars] + [accumulators[k].value for k in accs]
    return any(v is body.index for v in values) or any(accumulators[k].operation is Concat for k in accs)


def split_backward(body: _Body, accumulators):
    """Turns each `B` into `I`, what the previous stage's gradient needs, and `W`, the rest.

    An equation that feeds both, and every effect, runs once, in `I`; `W` reads what it made.
    """
    readers = defaultdict(set)
    for node in body.nodes:
        if node.per_microbatch and node.place:
            for v in body.inputs(node):
                readers[v].add(node.place)
    urgent: set[compat.Var] = set()
    for node in reversed(body.nodes):
        if not node.per_microbatch:
            continue
        if node.clonable and node.place is None:
            continue
        if node.place is None or node.place.kind != "B":
            continue
        outs = costs.outputs(node.eqn)
        crosses = any(p != node.place and p.kind in "BIW" for v in outs for p in readers[v] if p.stage != node.place.stage)
        if node.eqn.effects or crosses or any(v in urgent for v in outs):
            urgent.update(body.inputs(node))
            node.place = Place(node.place.stage, "I")
        else:
            node.place = Place(node.place.stage, "W")


def _split_place(body, acc: Accumulator) -> Place:
    if acc.place.kind != "B":
        return acc.place
    source = body.source(acc.value)
    return source.place if source and source.place and source.per_microbatch else Place(acc.place.stage, "W")
