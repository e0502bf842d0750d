"""Steps that take lists of microbatches of several shapes: an ordinary step for each distinct shape, and one program.

Each shape is a *bucket*: the step, traced, cut and compiled for microbatches of this shape only. A check ensures that
all buckets have the same work outside the loops, and the same inputs and outputs of tasks. So one program runs any
number of microbatches in any order of their shapes, each task with the executable of its microbatch's bucket.
"""

import contextlib
import dataclasses
import enum
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mpmd import _jax_compat as compat
from mpmd.compile.donation import donations
from mpmd.compile.program import step_program
from mpmd.compile.step import StepPrograms, compile_bucket, with_outline
from mpmd.compiled import Compiled
from mpmd.cutting.cut import with_given_cuts
from mpmd.cutting.split_rows import SplitStep
from mpmd.errors import StageError
from mpmd.graphs import equations
from mpmd.job import joining
from mpmd.ops import lists
from mpmd.ops.lists import CountsList, Microbatches, ReadsList, Reordered
from mpmd.ops.reductions import check_alike, in_each_task
from mpmd.ops.treduce import LoopInfo, treduce_p
from mpmd.partition.outline import Loop, Outline, Segment, with_changes, with_microbatches
from mpmd.pytrees import PyTree, TreeDef
from mpmd.report.gathered import facts_of
from mpmd.report.profile import LoopFacts, Profile
from mpmd.run.audits import AuditedBucketExecutor, AuditSampling
from mpmd.run.bucket_executor import NUM_ORDERS, BucketExecutor, MicrobatchArray, Order, Permutations
from mpmd.run.inputs import Inputs
from mpmd.stages import Lowered, Traced
from mpmd.tracing.arguments import CallArguments, Hint, leaf_type
from mpmd.users_frame import users_frame
from scheduler import Free, Instruction, Program, Recv, Run, Send
from scheduler.base.bounded import BoundedDict
from scheduler.base.collector import without_collection
from scheduler.base.texts import counted
from scheduler.programs.fewer import begins_with
from scheduler.schedules.graph import graph_of, with_graph
from scheduler.task import Orders

# The number of microbatches in each list of a step.
Counts = tuple[int, ...]
# A plan is for at least so many microbatches, since it contains the plans for fewer.
_FEWEST_PLANNED = 8


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchList:
    """A list of microbatches, an argument of a call."""

    path: lists.Path
    given: list  # the list itself
    permutation: tuple[int, ...] | None  # their numbers in the order in which they run; None: the list's order
    items: list  # the microbatches, in the order in which they run
    leaves: list[list]  # of each microbatch
    tree: TreeDef  # the structure of each microbatch
    types: list[tuple]  # of the leaves of each microbatch

    @classmethod
    def of(cls, path: lists.Path, given: list, explicit: Set[str]) -> "MicrobatchList":
        """Reads a list; `explicit` are the Explicit axes of the groups' meshes."""
        permutation = given.order if isinstance(given, Reordered) else None
        if permutation is not None and len(permutation) != len(given):
            raise ValueError(
                f"Reordered: the list has {counted(len(given), 'microbatch')}, but its order is {permutation}: it was"
                " changed after it was made. Make a new one."
            )
        items = given if permutation is None else [given[i] for i in permutation]
        found = list(lists.elements(items))
        leaves = [xs for xs, _ in found]
        types = [tuple(leaf_type(x, explicit) for x in xs) for xs in leaves]
        return cls(path, given, permutation, items, leaves, found[0][1], types)

    @property
    def largest(self) -> object:
        """A microbatch of the shape with the most elements."""
        return max(self.given, key=lambda x: sum(np.size(leaf) for leaf in jax.tree.leaves(x)))

    def standing_for(self, one: object, ways: Set[type]) -> Microbatches:
        """Returns the object that the step gets for the list."""
        items = self.given if ReadsList in ways else None
        return Microbatches(self.path, one, np.int32(len(self.given)), len(self.given), CountsList in ways, items)


@dataclasses.dataclass(frozen=True)
class Bucketing:
    """Makes the step for one microbatch of each list."""

    read: Callable[[Sequence[object]], CallArguments]
    trace: Callable[[CallArguments, Mapping[int, Hint] | None], Traced]
    asked: list[Traced]  # the latest step for lists that a user's `.trace` returned; empty if there is none

    @property
    def compiled(self) -> Compiled | None:
        """The compiled step of `asked`, for the largest microbatches; None if it was not compiled."""
        lowered = [vars(traced).get("_lowered") for traced in self.asked]
        return next((vars(one).get("_compiled") for one in lowered if one is not None), None)

    def traced(self, ones: Sequence[object], known: Mapping[int, Hint] | None) -> Traced:
        """Traces the step for these microbatches, with the known layouts of other arguments."""
        return self.trace(self.read(ones), known)

    def for_lists(self, xs: Sequence["MicrobatchList"]) -> Traced:
        """Traces the step for the largest microbatch of each list. It can find the costs of the other microbatches."""
        largest = [x.largest for x in xs]

        @functools.cache
        def shapes(path: lists.Path, cuts: tuple[int, ...] | None) -> tuple[list[Traced], list[int]]:
            of = next(k for k, x in enumerate(xs) if x.path == path)
            kinds = dict(zip(xs[of].types, xs[of].items, strict=True))
            steps = [self.traced([*largest[:of], one, *largest[of + 1 :]], None) for one in kinds.values()]
            if cuts is not None:
                steps = [dataclasses.replace(t, _trace=with_given_cuts(t._trace, cuts)) for t in steps]
            return steps, [list(kinds).index(types) for types in xs[of].types]

        counts = {x.path: len(x.given) for x in xs}

        traced = with_infos(self.traced(largest, None), functools.partial(_of_lengths, counts))
        return dataclasses.replace(traced, _shapes=shapes)

    def positions(self, ones: Sequence[object]) -> dict[int, tuple[int, int]]:
        """Maps positions among all leaves to microbatch arrays: the number of the list, and of the array in it."""
        trees = [jax.tree.structure(one) for one in ones]
        numbered = [
            jax.tree.unflatten(tree, [_Leaf(k, n) for n in range(tree.num_leaves)]) for k, tree in enumerate(trees)
        ]
        leaves = self.read(numbered).leaves
        return {i: (x.of, x.number) for i, x in enumerate(leaves) if isinstance(x, _Leaf)}


def with_infos(traced: Traced, change: Callable[[LoopInfo], LoopInfo]) -> Traced:
    """Returns a traced step with other parameters of its loops."""

    def changed(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
        return eqn.replace(params={**eqn.params, "info": change(eqn.params["info"])})

    return dataclasses.replace(traced, _trace=traced._trace.with_loops(changed))


def _of_lengths(counts: Mapping[lists.Path, int], info: LoopInfo) -> LoopInfo:
    """Returns a loop for lists of these lengths: the trace may come from other lists."""
    number = info.num_microbatches if info.path is None else counts.get(info.path, info.num_microbatches)
    return dataclasses.replace(info, num_microbatches=number)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A placeholder for an array of a microbatch."""

    of: int
    number: int
    shape: tuple[int, ...] = ()
    dtype: DTypeLike = np.float32


class _Summing(enum.Enum):
    """How gradients of several stages, or of rows on several devices, are added up."""

    AT_THE_END = enum.auto()  # both in parts, which are added up once a step
    WHOLE = enum.auto()  # those of several stages for each microbatch
    IN_EACH_TASK = enum.auto()  # all for each microbatch


_SUMMED_IN_EACH_TASK = (
    "mpmd: the devices of a group divide the rows of some microbatches of a list and not of others, so sums over these"
    " devices are done for each microbatch in place of once a step. Give all microbatches a number of rows that the"
    " devices divide."
)


class Buckets:
    """The steps for all shapes in lists so far, with other arguments of one kind."""

    def __init__(self) -> None:
        self._numbers: list[dict[tuple, int]] = []  # per list, the bucket of each shape
        self._examples: list[object] = []  # a microbatch of each list
        self._positions: dict[int, tuple[int, int]] = {}
        self._step: BucketedStep | None = None
        self._sums = _Summing.AT_THE_END
        self._epoch = joining.epoch()
        self._earlier: Compiled | None = None  # a step whose programs the next one may use
        self._lock = threading.RLock()

    def fits(self, call: CallArguments) -> bool:
        """Returns whether it can be called with these arguments, which are without the microbatches."""
        return self._step is None or self._step.fits_apart(call.leaves, call.wishes)

    def prepared(
        self, bucketing: Bucketing, leaves: Sequence[ArrayLike], xs: Sequence[MicrobatchList]
    ) -> "tuple[BucketedStep, list[ArrayLike]]":
        """Returns the step, ready to run these lists, and its arguments; `leaves` are the other arguments.

        `bucketing` is of this call: it holds the call's arrays, which must not be kept.
        """
        with self._lock:
            if (epoch := joining.epoch()) != self._epoch:
                # A process has taken the place of a lost one, and has not seen the lists so far. All processes must
                # plan alike, so all begin again with this call's lists.
                self._epoch, self._earlier, self._step, self._sums = epoch, self._step, None, _Summing.AT_THE_END
            self._add_all(bucketing, xs)
        assert self._step is not None
        order = tuple(tuple(numbers[types] for types in x.types) for numbers, x in zip(self._numbers, xs, strict=True))
        return self._step, self._step.arguments(leaves, xs, order)

    def _add_all(self, bucketing: Bucketing, xs: Sequence[MicrobatchList]) -> None:
        """Makes the steps for new shapes. If they add up gradients in different ways, all begin again with other sums.

        A table of positions that is cut to the length of a microbatch is not cut for the longest one; and devices may
        divide the rows of some microbatches only.
        """
        before, first = dict(vars(self)), None
        for sums in list(_Summing)[list(_Summing).index(self._sums) :]:
            if first is not None:
                self._sums, self._earlier, self._step = sums, self._step, None
            try:
                self._add_new(bucketing, xs)
            except StageError as error:
                first = first or error
            else:
                if first is not None and sums is _Summing.IN_EACH_TASK:
                    warnings.warn(_SUMMED_IN_EACH_TASK, stacklevel=users_frame())
                return
        vars(self).update(before)
        assert first is not None
        raise first

    def _add_new(self, bucketing: Bucketing, xs: Sequence[MicrobatchList]) -> None:
        """Makes the steps for new shapes."""
        if self._step is None:
            self._paths = [x.path for x in xs]
            self._numbers, self._examples = [{} for _ in xs], [x.largest for x in xs]
            self._counts = {x.path: len(x.given) for x in xs}
        new = [
            {types: one for types, one in zip(x.types, x.items, strict=True) if types not in known}
            for known, x in zip(self._numbers, xs, strict=True)
        ]
        if not any(new):
            return
        # The first bucket, which defines the work outside the loops, has the largest shapes.
        ordered = [sorted(n.items(), key=lambda item: -sum(np.prod(t[0]) for t in item[0])) for n in new]
        with joining.compiling(), without_collection():
            for some in itertools.zip_longest(*ordered):
                ones = [e if s is None else s[1] for e, s in zip(self._examples, some, strict=True)]
                number = self._add(bucketing, ones)
                for known, s in zip(self._numbers, some, strict=True):
                    if s is not None:
                        known[s[0]] = number

    def _add(self, bucketing: Bucketing, ones: Sequence[object]) -> int:
        """Adds a step, and returns its number."""
        if self._step is not None:
            known = {i: hint for i, hint in enumerate(self._hints) if i not in self._positions}
            traced = self._traced(bucketing, ones, known)
            if (cuts := self._cuts) is not None:  # all buckets have the stages of the first
                traced = dataclasses.replace(traced, _trace=with_given_cuts(traced._trace, cuts))
            return self._step.add(traced._lowered)
        traced = self._traced(bucketing, ones, None)
        self._hints, self._positions = traced._hints, bucketing.positions(ones)
        lowered = traced._lowered
        self._cuts = lowered.cuts if len(lowered._outline.loops) == 1 else None
        step = lowered._begin_to_compile(kind=BucketedStep, others=bucketing.compiled or self._earlier)
        self._earlier = None
        assert isinstance(step, BucketedStep)
        step.begin(self._paths, self._positions, self._lock)
        self._step = step
        return 0

    def _traced(self, bucketing: Bucketing, ones: Sequence[object], known: Mapping[int, Hint] | None) -> Traced:
        def changed(info: LoopInfo) -> LoopInfo:
            info = _of_lengths(self._counts, info)
            if self._sums is not _Summing.AT_THE_END:
                info = dataclasses.replace(info, whole_sums=True)
            if self._sums is _Summing.IN_EACH_TASK:
                info = dataclasses.replace(info, operations=tuple(map(in_each_task, info.operations)))
            return info

        return with_infos(bucketing.traced(ones, known), changed)


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
        is_like_first = _check_alike(self._programs, lowered)
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
    for a, b in zip(first.loops, other.loops, strict=False):  # `_check_alike` reports other numbers of loops
        one, two = graph_of(a.schedule), graph_of(b.schedule)
        if one is not None and two is not None:
            schedules[b.number] = {"schedule": with_graph(b.schedule, dataclasses.replace(two, costs=one.costs))}
    return with_changes(other, schedules)


def _check_alike(first: StepPrograms, lowered: Lowered) -> bool:
    """Checks that a step for microbatches of another shape has the same work outside its loops, the same tasks, and
    transfers between the same groups (else a StageError). Returns whether its whole program is the same.
    """
    counts = {loop.number: loop.partition.info.num_microbatches for loop in first.outline.loops}
    one, two = first.outline, with_microbatches(lowered._outline, counts)
    for a, b in zip(_loops(one), _loops(two), strict=True):
        check_alike(a.params["jaxpr"].out_avals, b.params["jaxpr"].out_avals, a.params["info"].operations)
    donated = donations(two, first.mesh, lowered._donated)
    with without_collection():
        programs = [step_program(o, first.mesh.num_groups, d) for o, d in ((one, first.donated), (two, donated))]
    for what, a, b in (
        ("work around its loops", _segments(one), _segments(two)),
        ("sums", _accumulators(one), _accumulators(two)),
        ("instructions", *map(_skeleton, programs)),
        ("arguments and results", *((p.inputs, p.outputs) for p in programs)),
        ("tasks", _tasks(one), _tasks(two)),
    ):
        if a != b:
            raise StageError(
                f"treduce: the step has other {what} for microbatches of some shapes of the list than for others"
                f"{_first_difference(one, two)}.\n"
                "  Python code that looks at the shape of a microbatch may do that. Let what is around fun, and what a"
                " stage hands to the next, be the same for all shapes."
            )
    return programs[0].groups == programs[1].groups


def _skeleton(program: Program) -> list[list[Hashable]]:
    """Returns, per group, the tasks, transfers and calls in order, without the values that stay in a group."""
    return [[what for i in instructions if (what := _what(i)) is not None] for instructions in program.groups]


def _what(i: Instruction) -> Hashable:
    match i:
        case Run():
            return "run", i.tasks, i.loop
        case Free() if i.value.microbatch is not None:
            return None
        case Send() if i.value.microbatch is not None:
            return "send", i.to_group, i.value.microbatch
        case Recv() if i.value.microbatch is not None:
            return "receive", i.from_group, i.value.microbatch
    return i


def _loops(outline: Outline) -> list[compat.JaxprEqn]:
    return [eqn for eqn in outline.trace.jaxpr.eqns if eqn.primitive is treduce_p]


def _segments(outline: Outline) -> list[Hashable]:
    items = [item for item in outline.items if isinstance(item, Segment)]
    keys = [compat.traced_again_key(compat.make_jaxpr(s.reads, s.writes, s.eqns, s.name)) for s in items]
    return [(s.name, s.group, key) for s, key in zip(items, keys, strict=True)]


def _first_difference(one: Outline, two: Outline) -> str:
    """Returns where the first equation around the loops stands that differs; "" if none does."""

    def key(eqn: compat.JaxprEqn) -> Hashable:
        alone = compat.make_jaxpr(equations.free_variables([eqn]), equations.outputs(eqn), [eqn], "")
        return compat.traced_again_key(alone)

    first, second = ([e for item in o.items if isinstance(item, Segment) for e in item.eqns] for o in (one, two))
    differs = next((b for a, b in zip(first, second, strict=False) if key(a) != key(b)), None)
    line = "" if differs is None else compat.source_line(differs)
    return f", first at {line}" if line else ""


def _accumulators(outline: Outline) -> list[Hashable]:
    found = [(loop.number, a) for loop in outline.loops for a in loop.partition.accumulators]
    return [(n, a.place, a.operation, a.value.aval.shape, a.value.aval.dtype) for n, a in found]


def _tasks(outline: Outline) -> list[Hashable]:
    """Returns all tasks, and whether each is empty."""
    return [(loop.number, [(t.place, t.is_empty) for t in loop.partition.tasks]) for loop in outline.loops]
