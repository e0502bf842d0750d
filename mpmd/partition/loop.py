"""Cuts a loop's body into tasks, forward and backward of each stage. Lists the rules that the passes follow.

The rules, in the order in which they are applied (each is a function of this file or of one that it imports):

  hoist       equations that depend on neither the microbatch nor its index run once, before the loop
  marks       the k-th mark ends stage k; a backward mark is tied to the forward mark that it transposes
  float       each reader repeats cheap work on the microbatch alone (labels, masks, positions, keys)
  forward     an equation runs in the stage in which it stands in the text, or where fewer bytes cross: a minimum
              cut, between the latest mark that it depends on and the first mark that needs it
  roles       where stages are roles, an equation that is heavy or reads parameters runs where it stands
  side        a loss, metric or residual of values in known stages runs in their stage
  backward    an equation runs in the stage of the forward equation that it transposes; gradients from roles in
              several groups are added where the sum is read
  sink        an equation that only the backward of its stage reads moves there if that keeps fewer bytes
  cut         a gradient with parts from several stages is accumulated in parts, summed after the loop
  parts       each device of a group accumulates its own part of a gradient; they are summed after the loop
  halves      in a split backward, an equation with inner equations (a checkpoint, a scan) is divided into I and W
  again       its recomputation of the forward is R, which need not wait for a gradient
  join        in a split backward, values made from several stages' gradients are computed after the loop

The result is pure data: `LoopPartition`, which prints itself.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.backward_stages import backward_stages, find_backward
from mpmd.graphs.body import Body, Node, Place, drop_unused, hoist, with_places
from mpmd.graphs.equations import live_equations
from mpmd.graphs.marks import Marks, check_marks_are_used, forget_marks
from mpmd.graphs.scheduled_loop import ScheduledLoop
from mpmd.graphs.sharded_axes import ShardedAxes
from mpmd.partition.accumulators import Accumulator, reduce_outputs
from mpmd.partition.floating import place_floating, sink_residuals
from mpmd.partition.forward_stages import forward_stages
from mpmd.partition.partial_sums import sum_once
from mpmd.partition.split_backward import split_backward
from mpmd.tracing.new_equations import Atom
from scheduler.ordering import recomputing
from scheduler.task import Orders, Reads


@dataclasses.dataclass(frozen=True)
class TaskBody:
    """The equations of one task, and the values that it exchanges; the same for every microbatch."""

    place: Place
    eqns: tuple[compat.JaxprEqn, ...]  # the equations, in order; cheap ones may be in several tasks
    operands: tuple[compat.Var, ...]  # loop operands (parameters, whole batches) that it reads
    reads: tuple[compat.Var, ...]  # values of the same microbatch from other tasks
    writes: tuple[compat.Var, ...]  # values of the same microbatch for other tasks
    accumulates: tuple[int, ...]  # positions in `LoopPartition.accumulators`
    uses_index: bool  # whether it needs the microbatch index

    @property
    def is_empty(self) -> bool:
        """Whether the task has nothing to do: it keeps its turn in the order and launches nothing."""
        return not (self.writes or self.accumulates or any(e.effects for e in self.eqns))


@dataclasses.dataclass(frozen=True)
class LoopPartition:
    """A loop, cut. `before` runs once ahead of it, `after` makes the loop's results from the accumulators."""

    info: ScheduledLoop
    index: compat.Var
    tasks: tuple[TaskBody, ...]
    accumulators: tuple[Accumulator, ...]
    before: tuple[compat.JaxprEqn, ...]
    after: tuple[compat.JaxprEqn, ...]
    names: dict[compat.Var, str]
    labels: tuple[str | None, ...]  # per stage, the name that the user gave it, or None

    def recomputing(self, orders: Orders) -> Orders:
        """Adds `R` to the orders of its schedule, where stages have one."""
        again = frozenset(t.place.stage for t in self.tasks if t.place.kind == "R")
        return recomputing(self.info.schedule, self.info.num_microbatches, orders, again)

    def reads(self) -> Reads:
        """Returns, per stage, the earlier stages that it exchanges values with, in either direction."""
        producer = {v: t.place.stage for t in self.tasks for v in t.writes}
        pairs = {(producer[v], t.place.stage) for t in self.tasks for v in t.reads}
        return tuple(
            tuple(sorted({min(pair) for pair in pairs if max(pair) == s and min(pair) < s}))
            for s in range(len(self.labels))
        )

    def task(self, place: Place) -> TaskBody:
        """Returns the task at `place`."""
        return next(t for t in self.tasks if t.place == place)

    def __str__(self):
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
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


def partition_loop(
    eqn: compat.JaxprEqn, split: bool, sharded: ShardedAxes | None = None, ahead: bool = True
) -> LoopPartition:
    """Cuts the body of a `treduce` equation into the tasks of its schedule.

    Args:
      eqn: the equation; its body is flat (see `trace.inline`).
      split: whether the schedule has `I` and `W` tasks instead of (or in addition to) `B`.
      sharded: the known shardings of its operands inside of a group, if there are any.
      ahead: whether split backwards may recompute before their gradient arrives, and keep the results in memory.

    Raises:
      StageError: the marks do not fit the schedule, or a value would flow back to an earlier stage.
    """
    info: ScheduledLoop = eqn.params["info"]
    body = hoist(check_marks_are_used(Body.of(eqn)), of_a_list=info.path is not None)
    marks = Marks.of(body, info)
    body = forget_marks(place_equations(body, marks, info.num_microbatches))
    body = sink_residuals(place_floating(body, marks.num_stages))
    body, accumulators, after = reduce_outputs(body, eqn, info, split)
    body = drop_unused(body, [a.value for a in accumulators])
    if sharded is not None:
        body, accumulators, sums = sum_once(body, accumulators, sharded, info.num_microbatches)
        after = [*sums, *after]
    if split:
        body, accumulators = split_backward(body, accumulators, ahead)
    return _tasks(body, info, marks.labels, accumulators, after, ("F", "R", "I", "W") if split else ("F", "B"))


def place_equations(body: Body, marks: Marks, num_microbatches: int) -> Body:
    """Gives each equation of the loop its place by the marks; floating equations have none yet."""
    backward = find_backward(body, marks)
    forward = forward_stages(body, marks, backward, num_microbatches)
    gradients = backward_stages(body, marks, backward, forward)
    return with_places(body, backward, forward, gradients)


# --- tasks ----------------------------------------------------------------------------------------


def _tasks(
    body: Body,
    info: ScheduledLoop,
    labels: tuple[str | None, ...],
    accumulators: Sequence[Accumulator],
    after: Sequence[compat.JaxprEqn],
    kinds: Sequence[str],
) -> LoopPartition:
    """Divides a body, in which every equation has its place, into tasks."""
    stages = range(len(labels))
    places = [Place(s, k) for k in kinds for s in (stages if k == "F" else reversed(stages))]
    own: dict[Place, list[Node]] = defaultdict(list)
    for node in body.nodes:
        if node.per_microbatch and node.place:
            own[node.place].append(node)
    position = {n: i for i, n in enumerate(body.nodes)}
    accs = {p: tuple(k for k, a in enumerate(accumulators) if a.place == p) for p in places}
    values = {p: [accumulators[k].value for k in accs[p]] for p in places}
    drafts = {p: _gather(body, p, own[p], values[p]) for p in places}
    read_by_others = {v for _, reads in drafts.values() for v in reads}
    tasks, names = [], {}
    for p in places:
        writes = [v for n in own[p] for v in n.eqn.outvars if v in read_by_others]
        names.update((v, f"{p}.{n}") for n, v in enumerate(writes))
        eqns = [n.eqn for n in sorted(drafts[p][0], key=position.__getitem__)]
        eqns = live_equations(eqns, [*writes, *values[p]])
        free = equations.free_variables(eqns, values[p])
        reads = tuple(v for v in free if body.source_in_loop(v))
        operands = tuple(v for v in free if v not in reads and v is not body.index)
        uses_index = body.index in free or any(accumulators[k].operation.reads_index for k in accs[p])
        tasks.append(TaskBody(p, tuple(eqns), operands, reads, tuple(writes), accs[p], uses_index))
    # Dropping a dead equation may leave a value that nobody reads any more.
    wanted = {v for t in tasks for v in t.reads}
    tasks = [dataclasses.replace(t, writes=tuple(v for v in t.writes if v in wanted)) for t in tasks]
    tasks = [t for t in tasks if t.place.kind != "R" or not t.is_empty]
    before = tuple(n.eqn for n in body.nodes if not n.per_microbatch)
    return LoopPartition(info, body.index, tuple(tasks), tuple(accumulators), before, tuple(after), names, labels)


def _gather(body: Body, place: Place, own: Sequence[Node], accumulated: Sequence[Atom]) -> tuple[set[Node], set[Atom]]:
    """Returns a task's own equations with the cheap ones that they need, and the values that other tasks send."""
    wanted, reads = set(own), set[Atom]()
    stack: list[Atom] = [*(v for n in own for v in n.inputs), *accumulated]
    while stack:
        v = stack.pop()
        node = body.source(v)
        if node is None or node.place == place:
            continue
        if node.clonable or equations.is_free_view(node.eqn):
            if node not in wanted:
                wanted.add(node)
                stack += node.inputs
        elif node.per_microbatch:
            reads.add(v)
    return wanted, reads
