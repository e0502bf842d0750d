"""Cuts a loop's body into tasks: forward and backward of each stage, by one place per equation.

The rules, in the order in which they are applied (each is a function of this file or of one that it imports):

  hoist       what depends on neither the microbatch nor its index runs once, before the loop
  marks       the k-th mark ends stage k; a backward mark is tied to the forward mark that it transposes
  float       cheap work on the microbatch alone (labels, masks, positions, keys) is done again by each reader
  forward     an equation runs in the stage in which it stands in the text, or where fewer bytes cross: a minimum
              cut, between the latest mark that it depends on and the first mark that needs it
  side        a loss, metric or residual of values whose stage is known runs where these are
  backward    an equation runs in the stage of the forward equation that it transposes
  sink        what only the backward of the same stage reads moves there if that keeps fewer bytes
  cut         a gradient whose parts arise in several stages is accumulated in parts, summed after the loop
  join        in a split backward, what is made of several stages' gradients is computed after the loop

The result is pure data: `LoopPartition`, which prints itself.
"""

import dataclasses
from collections import defaultdict
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.ops.treduce import LoopInfo
from mpmd.partition import equations
from mpmd.partition.accumulators import Accumulator, reduce_outputs
from mpmd.partition.backward_stages import backward_stages, find_backward
from mpmd.partition.floating import resolve_floats, sink_residuals
from mpmd.partition.forward_stages import forward_stages
from mpmd.partition.graph import Body, Place
from mpmd.partition.marks import Marks, check_marks_are_used


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
    """A loop, cut. `before` runs once ahead of it, `after` makes the loop's results from the accumulators.

    Attributes:
      labels: per stage, the name that the user gave it, or None.
    """

    info: LoopInfo
    index: compat.Var
    tasks: tuple[TaskBody, ...]
    accumulators: tuple[Accumulator, ...]
    before: tuple[compat.JaxprEqn, ...]
    after: tuple[compat.JaxprEqn, ...]
    names: dict[compat.Var, str]
    labels: tuple[str | None, ...]

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
            label = self.labels[t.place.stage]
            yield f"{t.place}{f' ({label})' if label else ''}: {done or 'empty'}"
            for v in t.reads:
                yield f"    reads {self.names[v]} from {producer[v]}"
            for v in t.writes:
                where = ", ".join(map(str, readers[v]))
                kind = v.aval.str_short(short_dtypes=True)
                yield f"    writes {self.names[v]} {kind} ({equations.nbytes(v.aval):,} B) for {where}"
            for k in t.accumulates:
                acc = self.accumulators[k]
                yield f"    accumulates {acc.operation} {acc.value.aval.str_short(short_dtypes=True)}"


def partition_loop(eqn: compat.JaxprEqn, split: bool) -> LoopPartition:
    """Cuts the body of a `treduce` equation into the tasks of its schedule.

    Args:
      eqn: the equation; its body is flat (see `trace.inline`).
      split: whether the schedule has `I` and `W` tasks instead of (or beside) `B`.

    Raises:
      StageError: the marks do not fit the schedule, or a value would flow back to an earlier stage.
    """
    info: LoopInfo = eqn.params["info"]
    body = Body.of(eqn)
    check_marks_are_used(body)
    marks = Marks.of(body, info)
    body.drop_microbatch_free()
    _place(body, marks, info.num_microbatches)
    body.forget_marks()
    resolve_floats(body, marks.num_stages)
    sink_residuals(body)
    accumulators, after = reduce_outputs(body, eqn, info, marks.num_stages, split)
    body.keep_live([a.value for a in accumulators])
    return _build(body, info, marks.labels, accumulators, after, split)


def _place(body: Body, marks: Marks, num_microbatches: int):
    backward = find_backward(body, marks)
    forward = forward_stages(body, marks, backward, num_microbatches)
    gradients = backward_stages(body, marks, backward, forward)
    for node in body.nodes:
        node.backward = id(node) in backward
        if id(node) in forward:
            node.place = Place(forward[id(node)], "F")
        elif id(node) in gradients:
            node.place = Place(gradients[id(node)], "B")


# --- tasks ----------------------------------------------------------------------------------------


def _build(body: Body, info, labels, accumulators, after, split) -> LoopPartition:
    num_stages = len(labels)
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
        operands, reads = _free_variables(body, eqns, [accumulators[k].value for k in accs])
        uses_index = _needs_index(body, eqns, accumulators, accs)
        tasks.append(TaskBody(p, eqns, operands, reads, tuple(writes), accs, uses_index))
    # Dropping a dead equation may leave a value that nobody reads any more.
    wanted = {v for t in tasks for v in t.reads}
    tasks = [dataclasses.replace(t, writes=tuple(v for v in t.writes if v in wanted)) for t in tasks]
    before = tuple(n.eqn for n in body.nodes if not n.per_microbatch)
    return LoopPartition(info, body.index, tuple(tasks), tuple(accumulators), before, tuple(after), names, labels)


class _Draft(NamedTuple):
    eqns: list
    reads: set


def _gather(body: Body, place, own, position, accumulators) -> _Draft:
    """The task's own equations with the cheap ones that they read, in order."""
    wanted, reads = set(own), set()
    stack = [v for i in own for v in body.inputs(body.nodes[i])] + [a.value for a in accumulators]
    while stack:
        v = stack.pop()
        node = body.source(v)
        if node is None or node.place == place:
            continue
        if node.clonable or equations.is_free_view(node.eqn):
            i = position[v]
            if i not in wanted:
                wanted.add(i)
                stack += body.inputs(node)
        elif node.per_microbatch:
            reads.add(v)
    return _Draft([body.nodes[i].eqn for i in sorted(wanted)], reads)


def _live(eqns, wanted):
    needed = set(equations.variables(wanted))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(equations.variables(eqn.invars))
    return tuple(reversed(kept))


def _free_variables(body: Body, eqns, accumulated):
    """(operands, reads) of a task, in order of first use."""
    bound = {v for e in eqns for v in e.outvars}
    free = [
        v
        for v in equations.variables([v for e in eqns for v in e.invars] + list(accumulated))
        if v not in bound and v is not body.index
    ]
    reads = tuple(v for v in free if (n := body.source(v)) and n.per_microbatch)
    return tuple(v for v in free if v not in reads), reads


def _needs_index(body, eqns, accumulators, accs) -> bool:
    values = [v for e in eqns for v in e.invars] + [accumulators[k].value for k in accs]
    return any(v is body.index for v in values) or any(accumulators[k].operation.reads_index for k in accs)


def split_backward(body: Body, accumulators):
    """Turns each `B` into `I`, what the previous stage's gradient needs, and `W`, the rest.

    An equation that feeds both, and every effect, runs once, in `I`; `W` reads what it made. So does what another
    stage's backward reads in the loop: no weight half waits for one of another stage.
    """
    readers = defaultdict(set)
    for node in body.nodes:
        if node.per_microbatch and node.place:
            for v in body.inputs(node):
                readers[v].add(node.place)
    for acc in accumulators:
        if not isinstance(acc.value, compat.Literal):
            readers[acc.value].add(acc.place)
    urgent: set[compat.Var] = set()
    for node in reversed(body.nodes):
        if not node.per_microbatch:
            continue
        if node.clonable and node.place is None:
            continue
        if node.place is None or node.place.kind != "B":
            continue
        outs = equations.outputs(node.eqn)
        crosses = any(
            p != node.place and p.kind in "BIW" for v in outs for p in readers[v] if p.stage != node.place.stage
        )
        if node.eqn.effects or crosses or any(v in urgent for v in outs):
            urgent.update(body.inputs(node))
            node.place = Place(node.place.stage, "I")
        else:
            node.place = Place(node.place.stage, "W")


def _split_place(body, acc: Accumulator) -> Place:
    if acc.place.kind != "B":
        return acc.place
    source = body.source(acc.value)
    here = source and source.per_microbatch and source.place and source.place.stage == acc.place.stage
    return source.place if here and source.place.kind in "IW" else Place(acc.place.stage, "W")
