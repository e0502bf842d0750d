"""Where everything outside of the loops runs: the step as segments (one group, one executable) and loops.

An equation runs in the group that holds its operands; where they lie in several groups, in the one with the most
bytes of them (of equals, in one that holds state), and the rest (scalars such as a global norm, usually) is sent
there. What depends on no placed value runs wherever its result is wanted. A state leaf that the step returns in the
same position is kept in the groups that it came from, so that a training loop moves nothing.

Placing is a forward pass (where operands are), a backward pass (where results are wanted) and a levelling
(what can run together before the next transfer). All of it is pure; `Outline` prints itself.
"""

import dataclasses
from collections import defaultdict

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.ops.stage_end import mark_p
from mpmd.ops.treduce import treduce_p
from mpmd.partition import equations
from mpmd.partition.graph import Place
from mpmd.partition.loop import LoopPartition, partition_loop
from mpmd.tracing.trace import Trace, copy_equations
from scheduler import Schedule
from scheduler.task import Orders

Groups = frozenset[int]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations outside of the loops that one group runs as one executable.

    Attributes:
      reads, writes: variables of the step, in the argument order of the executable.
    """

    name: str
    group: int
    level: int
    eqns: tuple[compat.JaxprEqn, ...]
    reads: tuple[compat.Var, ...]
    writes: tuple[compat.Var | compat.Literal, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A variable that goes from one group to another, after everything of its level."""

    var: compat.Var
    source: int
    target: int
    level: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A pipelined loop between the segments.

    Its operands must be in place when it starts; its accumulators are made in place by the executor.

    Attributes:
      orders: per group, its tasks in order: the schedule computes them once.
    """

    number: int
    partition: LoopPartition
    orders: Orders = dataclasses.field(repr=False)

    @property
    def schedule(self) -> Schedule:
        """The schedule that orders its tasks."""
        return self.partition.info.schedule

    def group(self, place: Place) -> int:
        """The group that runs a stage."""
        return self.schedule.placement[place.stage]

    def needs(self) -> dict[compat.Var, set[int]]:
        """The groups in which each variable of the step must be when the loop starts."""
        found: dict[compat.Var, set[int]] = defaultdict(set)
        for task in self.partition.tasks:
            for v in task.operands:
                found[v].add(self.group(task.place))
        return found


@dataclasses.dataclass(frozen=True)
class Outline:
    """The whole step, placed.

    Attributes:
      inputs: per flat argument (and captured constant, first), the groups that must have it.
      outputs: per flat result, the variable (or literal) and the groups that hold it.
      items: segments, transfers and loops in one global order.
      donors: per flat result, the flat argument whose place it takes (None: none).
      committed: per flat result, whether something that is placed says where it is.
      packed: vectors of scalars that cross together, and how many each holds.
    """

    trace: Trace
    inputs: tuple[Groups, ...]
    outputs: tuple[tuple[compat.Var | compat.Literal, Groups], ...]
    items: tuple[Segment | Transfer | Loop, ...]
    donors: tuple[int | None, ...]
    names: dict[compat.Var, str]
    committed: tuple[bool, ...]
    packed: dict[compat.Var, int]

    @property
    def loops(self) -> list[Loop]:
        """The pipelined loops, in order."""
        return [i for i in self.items if isinstance(i, Loop)]

    def __str__(self):
        lines = []
        for item in self.items:
            if isinstance(item, Segment):
                lines.append(f"{item.name} (group {item.group}): {len(item.eqns)} equations")
            elif isinstance(item, Transfer):
                size = equations.nbytes(item.var.aval)
                lines.append(f"  send {self.names[item.var]} ({size:,} B) from group {item.source} to {item.target}")
            else:
                lines.append(
                    f"loop {item.number}: {item.schedule}, {item.partition.info.num_microbatches} microbatches"
                )
                lines += ["  " + line for line in str(item.partition).splitlines()]
        return "\n".join(lines)


# --- the step as a list of equations and loops ----------------------------------------------------


def step_items(trace: Trace, mpmd_mesh, forwarded):
    """Equations and loops in order, with what a loop needs before and after it; dead ones dropped."""
    items: list[compat.JaxprEqn | Loop] = []
    alias: dict = {}

    def read(v):
        return v if isinstance(v, compat.Literal) else alias.get(v, v)

    for eqn in trace.jaxpr.eqns:
        eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
        if eqn.primitive is mark_p:
            alias.update(zip(eqn.outvars, eqn.invars, strict=True))
        elif eqn.primitive is treduce_p:
            items += _loop_items(eqn, mpmd_mesh, sum(isinstance(i, Loop) for i in items))
        else:
            items.append(eqn)
    outvars = [read(v) for v in trace.jaxpr.outvars]
    num_consts = len(trace.consts)
    taken = set(trace.jaxpr.invars) - {trace.jaxpr.invars[num_consts + i] for i in forwarded}
    for j, v in enumerate(outvars):
        if isinstance(v, compat.Literal) or v in taken:
            # Memory of its own: a later step may be given it for good.
            eqns, (outvars[j],) = copy_equations(v)
            items += eqns
        taken.add(outvars[j])
    return _live(items, outvars), outvars


def _loop_items(eqn, mpmd_mesh, number):
    schedule = eqn.params["info"].schedule
    _check_groups(schedule, mpmd_mesh, eqn)
    orders = schedule.orders(eqn.params["info"].num_microbatches)
    split = any(task.kind in "IW" for order in orders for task in order)
    partition = partition_loop(eqn, split)
    return [*partition.before, Loop(number, partition, orders), *partition.after]


def _check_groups(schedule, mpmd_mesh, eqn):
    if schedule.num_groups != mpmd_mesh.num_groups:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: {schedule} runs on {schedule.num_groups} groups,"
            f" but {mpmd_mesh} has {mpmd_mesh.num_groups}.\n"
            f"  Use a schedule for {mpmd_mesh.num_groups} groups, or MpmdMesh.mpmd_submesh."
        )


def _live(items, outvars):
    needed = set(equations.variables(outvars))
    kept = []
    for item in reversed(items):
        if isinstance(item, Loop):
            for task in item.partition.tasks:
                needed.update(task.operands)
            kept.append(item)
        elif item.effects or any(v in needed for v in item.outvars):
            if item.primitive.name in ("cond", "scan", "while"):  # their parts are found by what is read of them
                item = item.replace(outvars=[v if v in needed else compat.DropVar(v.aval) for v in item.outvars])
            needed.update(equations.variables(item.invars))
            kept.append(item)
    return kept[::-1]


# --- state that goes in and comes out -------------------------------------------------------------


def match_state(trace: Trace) -> tuple[int | None, ...]:
    """For each flat result, the flat argument whose position it takes, found by equal subtrees.

    The largest parts are matched first: a whole state, then what is left of it.
    """
    (args, kwargs) = jax.tree.unflatten(trace.in_tree, range(trace.in_tree.num_leaves))
    out = jax.tree.unflatten(trace.out_tree, range(trace.out_tree.num_leaves))
    in_avals, out_avals = trace.in_avals, [v.aval for v in trace.jaxpr.outvars]

    def key(tree, avals):
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, tuple((avals[i].shape, str(avals[i].dtype)) for i in leaves)

    taken: set[int] = set()
    donors: list[int | None] = [None] * len(out_avals)
    sources: dict = defaultdict(list)
    for tree in [*args, *kwargs.values()]:
        for sub in _subtrees(tree, 2):
            if not _is_leaf(sub) or sub is tree or not isinstance(tree, (dict, list, tuple)):
                sources[key(sub, in_avals)].append(jax.tree.leaves(sub))
    for sub in sorted(_subtrees(out, 4), key=lambda t: -len(jax.tree.leaves(t))):
        leaves = jax.tree.leaves(sub)
        if not leaves or any(donors[j] is not None for j in leaves):
            continue
        if _is_leaf(sub) and not out_avals[leaves[0]].shape and len(out_avals) > 1:
            continue  # a scalar loss is not a scalar argument
        for candidate in sources.get(key(sub, out_avals), ()):
            if not taken.intersection(candidate):
                taken.update(candidate)
                for j, i in zip(leaves, candidate, strict=True):
                    donors[j] = i
                break
    return tuple(donors)


def _is_leaf(tree) -> bool:
    return jax.tree_util.all_leaves([tree])


def _subtrees(tree, depth):
    yield tree
    if depth and not _is_leaf(tree):
        for child in jax.tree.leaves(tree, is_leaf=lambda t, root=tree: t is not root):
            yield from _subtrees(child, depth - 1)
