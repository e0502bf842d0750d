"""Cuts a loop's body into tasks, forward and backward of each stage. Lists the rules that the passes follow.

The rules, in the order in which they are applied (each is a function of this file or of one that it imports):

  hoist       what depends on neither the microbatch nor its index runs once, before the loop
  marks       the k-th mark ends stage k; a backward mark is tied to the forward mark that it transposes
  float       cheap work on the microbatch alone (labels, masks, positions, keys) is done again by each reader
  forward     an equation runs in the stage in which it stands in the text, or where fewer bytes cross: a minimum
              cut, between the latest mark that it depends on and the first mark that needs it
  roles       where stages are roles, what is heavy or reads parameters runs where it stands
  side        a loss, metric or residual of values whose stage is known runs where these are
  backward    an equation runs in the stage of the forward equation that it transposes; gradients from roles in
              several groups are added where the sum is read
  sink        what only the backward of the same stage reads moves there if that keeps fewer bytes
  cut         a gradient whose parts arise in several stages is accumulated in parts, summed after the loop
  parts       what each device of a group adds to a gradient is accumulated apart, summed after the loop
  halves      in a split backward, an equation that holds others (a checkpoint, a scan) is divided into I and W
  again       and what it computes again of the forward is R, which need not wait for a gradient
  join        in a split backward, what is made of several stages' gradients is computed after the loop

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

    info: ScheduledLoop
    index: compat.Var
    tasks: tuple[TaskBody, ...]
    accumulators: tuple[Accumulator, ...]
    before: tuple[compat.JaxprEqn, ...]
    after: tuple[compat.JaxprEqn, ...]
    names: dict[compat.Var, str]
    labels: tuple[str | None, ...]

    def recomputing(self, orders: Orders) -> Orders:
        """The orders of its schedule, and `R` where stages have one."""
        again = frozenset(t.place.stage for t in self.tasks if t.place.kind == "R")
        return recomputing(self.info.schedule, self.info.num_microbatches, orders, again)

    def reads(self) -> Reads:
        """For each stage, the earlier stages that it exchanges values with, in either direction."""
        producer = {v: t.place.stage for t in self.tasks for v in t.writes}
        pairs = {(producer[v], t.place.stage) for t in self.tasks for v in t.reads}
        return tuple(
            tuple(sorted({min(pair) for pair in pairs if max(pair) == s and min(pair) < s}))
            for s in range(len(self.labels))
        )

    def task(self, place: Place) -> TaskBody:
        """The task at `place`."""
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
      split: whether the schedule has `I` and `W` tasks instead of (or beside) `B`.
      sharded: how its operands are sharded inside of a group, if they can be.
      ahead: whether split backwards may compute again ahead of their gradient, which keeps that in memory meanwhile.

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
    """Gives each equation of the loop its place by the marks; what floats has none yet."""
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
    """A body of which every equation has its place, as tasks."""
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
    """A task's own equations and the cheap ones that they read; what it reads of other tasks."""
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
