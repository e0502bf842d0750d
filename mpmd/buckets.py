"""Steps that take lists of microbatches of several shapes: an ordinary step for each distinct shape, and one program.

Each shape is a *bucket*: the step, traced, cut and compiled for microbatches of this shape only. A check ensures that
all buckets have the same work outside the loops, and the same inputs and outputs of tasks. So one program runs any
number of microbatches in any order of their shapes, each task with the executable of its microbatch's bucket.
"""

import dataclasses
import enum
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.bucketed_step import BucketedStep
from mpmd.compiled import Compiled
from mpmd.cutting.cut import with_given_cuts
from mpmd.errors import StageError
from mpmd.job import joining
from mpmd.microbatch_list import MicrobatchList
from mpmd.ops import lists
from mpmd.ops.loop_primitive import LoopInfo
from mpmd.ops.reductions import in_each_task
from mpmd.stages import Traced
from mpmd.tracing.arguments import CallArguments, Hint
from mpmd.tracing.trace import Trace
from mpmd.users_frame import users_frame
from scheduler.base.collector import without_collection


@dataclasses.dataclass(frozen=True)
class Bucketing:
    """Makes the step for one microbatch of each list."""

    read: Callable[[Sequence[object]], CallArguments]
    trace: Callable[[CallArguments, Mapping[int, Hint] | None], Traced]
    asked: list[Traced]  # the latest step for lists that a user's `.trace` returned; empty if there is none
    without_constants: list[lists.Path]  # the lists of loops whose programs do not hold captured arrays

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


def _are_equal(one: object, two: object) -> bool:
    """Returns whether two captured arrays have the same type and the same bits."""
    if one is two:
        return True
    if jax.typeof(one) != jax.typeof(two) or not all(getattr(x, "is_fully_addressable", True) for x in (one, two)):
        return False
    return np.asarray(keys.to_data(one)).tobytes() == np.asarray(keys.to_data(two)).tobytes()


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
        step = self._step  # another thread may make all begin again
        return step is None or step.fits_apart(call.leaves, call.wishes)

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
            orders = ([of[types] for types in x.types] for of, x in zip(self._numbers, xs, strict=True))
            return self._step, self._step.arguments(leaves, xs, tuple(map(tuple, orders)))

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
            self._check_constants(bucketing, traced._trace)
            if (cuts := self._cuts) is not None:  # all buckets have the stages of the first
                traced = dataclasses.replace(traced, _trace=with_given_cuts(traced._trace, cuts))
            return self._step.add(traced._lowered)
        traced = self._traced(bucketing, ones, None)
        self._hints, self._positions, self._constants = traced._hints, bucketing.positions(ones), traced._trace.consts
        lowered = traced._lowered
        self._cuts = lowered.cuts if len(lowered._outline.loops) == 1 else None
        step = lowered._begin_to_compile(kind=BucketedStep, others=bucketing.compiled or self._earlier)
        self._earlier = None
        assert isinstance(step, BucketedStep)
        step.begin(self._paths, self._positions, self._lock)
        self._step = step
        return 0

    def _check_constants(self, bucketing: Bucketing, trace: Trace) -> None:
        """Checks that the step captures the same arrays for all shapes: a call gets one set of them, for all buckets.

        A table may be chosen by the length of a microbatch. Then all begin again, and each program holds its own.
        """
        mine, theirs = self._constants, trace.consts
        if len(mine) == len(theirs) and all(map(_are_equal, mine, theirs)):
            return
        if bucketing.without_constants:
            raise lists.HoldsConstants(bucketing.without_constants[0])
        raise StageError(
            "treduce: the step captures other arrays for microbatches of some shapes than for others, around its loops"
            " or on devices of other processes.\n  Pass them as arguments of the step, or as NumPy arrays."
        )

    def _traced(self, bucketing: Bucketing, ones: Sequence[object], known: Mapping[int, Hint] | None) -> Traced:
        def changed(info: LoopInfo) -> LoopInfo:
            info = _of_lengths(self._counts, info)
            if self._sums is not _Summing.AT_THE_END:
                info = dataclasses.replace(info, whole_sums=True)
            if self._sums is _Summing.IN_EACH_TASK:
                info = dataclasses.replace(info, operations=tuple(map(in_each_task, info.operations)))
            return info

        return with_infos(bucketing.traced(ones, known), changed)
