"""A compiled step for lists of microbatches, one bucket for each shape; it plans an executor for each length."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from mpmd.bucket_checks import check_bucket
from mpmd.compile.program import step_program
from mpmd.compile.step import StepPrograms, compile_bucket, with_outline
from mpmd.compiled import Compiled
from mpmd.cutting.split_rows import SplitStep
from mpmd.microbatch_list import MicrobatchList
from mpmd.ops import lists
from mpmd.partition.outline import Loop, Outline, with_changes, with_microbatches
from mpmd.pytrees import PyTree
from mpmd.report.gathered import facts_of
from mpmd.report.profile import LoopFacts, Profile
from mpmd.run.audits import AuditedBucketExecutor, AuditSampling
from mpmd.run.bucket_executor import NUM_ORDERS, BucketExecutor, MicrobatchArray, Order, Permutations
from mpmd.run.inputs import Inputs
from mpmd.stages import Lowered
from scheduler import Program
from scheduler.base.bounded import BoundedDict
from scheduler.base.collector import without_collection
from scheduler.programs.fewer import begins_with
from scheduler.schedules.graph import graph_of, with_graph
from scheduler.task import Orders

# The number of microbatches in each list of a step.
Counts = tuple[int, ...]
# A plan is for at least so many microbatches, since it contains the plans for fewer.
_FEWEST_PLANNED = 8


class _ListArguments(list[ArrayLike]):
    """The flat arguments of a call with lists of microbatches, and the lists."""

    lists: Sequence[MicrobatchList]
    order: Order  # per list, the bucket of each microbatch


class BucketedStep(Compiled):
    """A compiled step for lists of microbatches: the first bucket, and the buckets that are added to it."""

    def _executor_of(self, programs: StepPrograms, program: Program, split: SplitStep) -> None:
        """Returns None: `_prepare` chooses an executor for each call."""

    def begin(self, paths: list[lists.Path], positions: Mapping[int, tuple[int, int]], lock: threading.RLock) -> None:
        """Begins as the step of the first bucket.

        Args:
          positions: maps the position of an argument that stands for a microbatch array to its list and number there.
          lock: a lock that is held while the step runs lists or adds a bucket.
        """
        self._positions = positions
        self._lock = lock
        self._sampling = AuditSampling(self._audit_every)
        self._first = self._inputs
        self._buckets = [(self._programs, self._inputs)]
        self._are_like_first = [True]
        infos = {loop.number: loop.partition.info for loop in self._programs.outline.loops}
        self._list_of = {n: paths.index(info.path) for n, info in infos.items() if info.path is not None}
        self._planned: BoundedDict[Counts, BucketExecutor] = BoundedDict(NUM_ORDERS)
        self._executors: BoundedDict[Counts, BucketExecutor] = BoundedDict(NUM_ORDERS)
        self._orders: BoundedDict[tuple[int, int], Orders] = BoundedDict(NUM_ORDERS)
        self._views: BoundedDict[tuple[Order, Permutations], tuple[list[MicrobatchArray], Inputs]]
        self._views = BoundedDict(NUM_ORDERS)

    def add(self, lowered: Lowered) -> int:
        """Adds a bucket, and returns its number."""
        ins = [h.layout for h in lowered._ins]
        lowered = dataclasses.replace(lowered, _outline=_ordered_as(self._programs.outline, lowered._outline))
        is_like_first = check_bucket(self._programs, lowered)
        programs = compile_bucket(lowered._outline, self._programs, ins, lowered._donated, lowered._split.stacks)
        self._buckets.append((programs, Inputs(programs, lowered._split)))
        self._are_like_first.append(is_like_first)
        self._planned.clear()
        self._executors.clear()
        return len(self._buckets) - 1

    def fits_apart(self, leaves: Sequence[ArrayLike], wishes: Sequence[object]) -> bool:
        """Returns whether it can be called with these other arguments, whatever the microbatches are."""
        return self._first.fit(self._with_places(leaves), self._with_places(wishes))

    def _with_places(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arguments, with placeholders for the arrays of one microbatch."""
        rest = iter(leaves)
        return [_NOTHING if i in self._positions else next(rest) for i in range(self.in_tree.num_leaves)]

    def arguments(self, leaves: Sequence[ArrayLike], xs: Sequence[MicrobatchList], order: Order) -> "_ListArguments":
        """Returns all arguments of a call that has these lists."""
        found = _ListArguments(self._with_places(leaves))
        found += (leaf for x in xs for own in x.leaves for leaf in own)
        found.lists, found.order = xs, order
        return found

    def _run(self, leaves: Sequence[ArrayLike]) -> PyTree:
        with self._taking(leaves):
            return super()._run(leaves)

    def _profile(self, leaves: Sequence[ArrayLike], steps: int) -> Profile:
        with self._taking(leaves):
            return super()._profile(leaves, steps)

    @contextlib.contextmanager
    def _taking(self, of: Sequence[ArrayLike]) -> Iterator[None]:
        """Sets the step up for these lists inside this context. Calls from other threads, with other lists, wait."""
        assert isinstance(of, _ListArguments)
        with self._lock:
            with without_collection():
                self._prepare(of.lists, of.order)
            yield

    def _prepare(self, xs: Sequence[MicrobatchList], order: Order) -> None:
        permutations = tuple(x.permutation for x in xs)
        if (key := (order, permutations)) not in self._views:
            self._views[key] = self._view(xs, order)
        arrays, self._inputs = self._views[key]
        self._bound = self._executor_for(tuple(len(x.given) for x in xs))
        self._bound.take(order, permutations, arrays)
        self._order = order
        vars(self).pop("_loop_facts", None)

    @functools.cached_property
    def _loop_facts(self) -> tuple[LoopFacts, ...]:
        """The facts about the loops, for the last call's lists."""
        counts = {n: len(self._order[k]) for n, k in self._list_of.items()}
        return tuple(map(self._facts, with_microbatches(self._programs.outline, counts).loops))

    def _facts(self, loop: Loop) -> LoopFacts:
        executables = [programs.loops[loop.number].executables for programs, _ in self._buckets]
        if (k := self._list_of.get(loop.number)) is None:
            return facts_of(loop, executables, [0] * loop.partition.info.num_microbatches)
        names = [
            ", ".join(inputs.avals[i].str_short(short_dtypes=True) for i, (of, _) in self._positions.items() if of == k)
            for _, inputs in self._buckets
        ]
        return facts_of(loop, executables, self._order[k], names)

    def _view(self, xs: Sequence[MicrobatchList], order: Order) -> tuple[list[MicrobatchArray], Inputs]:
        """Returns the arrays of all microbatches, and the inputs of a call with them."""
        at = {own: i for i, own in self._positions.items()}
        names, argument = self._split.whole.in_names, self._argument_names
        arrays = []
        for k, (x, buckets) in enumerate(zip(xs, order, strict=True)):
            places = [at[k, n] for n in range(x.tree.num_leaves)]
            for m, bucket in enumerate(buckets):
                inputs = self._buckets[bucket][1]
                own = f"[{m if x.permutation is None else x.permutation[m]}]"
                arrays += [
                    MicrobatchArray(argument[i], m, names[i].replace("[*]", own), inputs.avals[i], inputs.shardings[i])
                    for i in places
                ]
        more = [(a.name, a.aval, a.sharding) for a in arrays]
        return arrays, self._first.dealt(self._positions.keys(), more)

    @functools.cached_property
    def _argument_names(self) -> dict[int, str]:
        """The names, in the program, of the arguments that stand for a microbatch."""
        outline, split = self._programs.outline, self._split
        return {i: outline.names[outline.trace.arguments[split.in_positions[i][0]]] for i in self._positions}

    def _executor_for(self, counts: Counts) -> BucketExecutor:
        """Returns an executor for these lengths of lists, or for longer ones if their plan contains this plan."""
        if counts not in self._executors:
            longer = next((c for c in (*self._planned, _rounded(counts)) if self._holds(c, counts)), counts)
            if longer not in self._planned:
                self._planned[longer] = self._plan(longer)
            self._executors[counts] = self._planned[longer]
        return self._executors[counts]

    def _holds(self, longer: Counts, counts: Counts) -> bool:
        """Returns whether the plan for longer lists, without the later microbatches, is the plan for shorter ones."""
        if longer == counts or any(a < b for a, b in zip(longer, counts, strict=True)):
            return longer == counts
        try:
            return all(
                begins_with(loop.schedule, self._orders_of(loop, longer[k]), longer[k], counts[k])
                for loop in self._programs.outline.loops
                if (k := self._list_of.get(loop.number)) is not None
            )
        except ValueError:  # the schedule cannot run so many; if it cannot run `counts`, `_plan` raises an error
            return False

    def _orders_of(self, loop: Loop, count: int) -> Orders:
        if (key := (loop.number, count)) not in self._orders:
            self._orders[key] = loop.schedule.orders(count)
        return self._orders[key]

    def _plan(self, counts: Counts) -> BucketExecutor:
        """Plans an executor for lists of these lengths, and for shorter ones."""
        numbers = {n: counts[k] for n, k in self._list_of.items()}
        found: list[tuple[StepPrograms, Program]] = []
        for (programs, _), is_like_first in zip(self._buckets, self._are_like_first, strict=True):
            programs = with_outline(programs, with_microbatches(programs.outline, numbers))
            if not found or not is_like_first:
                program = step_program(programs.outline, programs.mesh.num_groups, programs.donated)
            else:
                program = found[0][1]
            found.append((programs, program))
        skip = len(self._programs.outline.trace.consts)
        absent = frozenset(skip + self._split.in_positions[i][0] for i in self._positions)
        of = found, self._split.whole, frozenset(self._argument_names.values()), absent, self._list_of
        return AuditedBucketExecutor(*of, sampling=self._sampling) if self._audit_every else BucketExecutor(*of)


def _rounded(counts: Counts) -> Counts:
    """Rounds lengths of lists up, so that shorter lists need no plan of their own."""
    return tuple(max(_FEWEST_PLANNED, 1 << (count - 1).bit_length()) for count in counts)


_NOTHING = np.zeros((), np.float32)


def _ordered_as(first: Outline, other: Outline) -> Outline:
    """Makes loops over graphs of stages use the costs of the first step, so that both steps have the same order."""
    schedules = {}
    for a, b in zip(first.loops, other.loops, strict=False):  # `check_bucket` reports other numbers of loops
        one, two = graph_of(a.schedule), graph_of(b.schedule)
        if one is not None and two is not None:
            schedules[b.number] = {"schedule": with_graph(b.schedule, dataclasses.replace(two, costs=one.costs))}
    return with_changes(other, schedules)
