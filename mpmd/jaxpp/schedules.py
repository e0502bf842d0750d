"""JaxPP's schedules: each returns its tasks in JaxPP's terms, and is a `scheduler.Schedule` with the same orders."""

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar

import scheduler
from mpmd.errors import ScheduleError
from scheduler.base.texts import counted
from scheduler.ordering import paired
from scheduler.schedules.one_f_one_b import looped
from scheduler.task import Kind, Orders, Pairs, check_count


class TaskType(enum.Enum):
    """The kind of a task: a forward, a whole backward, or only the gradients of the input or of the weights."""

    FWD = "F"
    BWD = "B"
    BWD_I = "I"
    BWD_W = "W"

    @property
    def default_latency(self) -> int:
        return 2 if self is TaskType.BWD else 1


_PREFIXES = {TaskType.FWD: "fwd", TaskType.BWD: "bwd", TaskType.BWD_I: "bwdA", TaskType.BWD_W: "bwdW"}


@dataclass(frozen=True)
class JaxppTask:
    """`scheduler.Task` in JaxPP's terms; prints as `fwd_2__0`."""

    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType
    latency: int = field(default=1, hash=False, compare=False)

    @classmethod
    def make(cls, stage_id: int, mubatch_idx: int, fwd_or_bwd: TaskType, latency: int | None = None) -> "JaxppTask":
        return cls(stage_id, mubatch_idx, fwd_or_bwd, fwd_or_bwd.default_latency if latency is None else latency)

    def __str__(self) -> str:
        return f"{_PREFIXES[self.fwd_or_bwd]}_{self.stage_id}__{self.mubatch_idx}"


class FusedTask(tuple[JaxppTask, ...]):
    """Successive tasks of an order that run as one program."""

    @property
    def latency(self) -> int:
        return sum(task.latency for task in self)

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self))})"


Tasks = list[Any]  # the tasks of a group: JaxppTask, FusedTask, and None for a pause


@dataclass(frozen=True)
class BaseSchedule(scheduler.Schedule):
    """A schedule in JaxPP's terms: subclasses implement `tasks`, and `get_mpmd_idx` if a group has several stages.

    It is a `Schedule`, so `mpmd.jaxpp.treduce`, `mpmd.treduce`, `scheduler.simulate` and so on accept it. Its tasks are
    checked: every task once, in its group, and no deadlock.

    Examples:
      >>> from mpmd.jaxpp import schedules
      >>> class Forwards(schedules.BaseSchedule):  # GPipe, written by hand
      ...     def tasks(self, n_mubatches):
      ...         kinds = schedules.TaskType.FWD, schedules.TaskType.BWD
      ...         make = schedules.Task.make
      ...         return [[make(s, i, k) for k in kinds for i in range(n_mubatches)] for s in range(self.num_stages)]
      >>> print(*Forwards(2).orders(2)[1])
      1F0 1F1 1B0 1B1
    """

    num_stages: int
    is_partial_bwd: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_count("num_stages", self.num_stages)

    def _check_count(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(self).__name__}: {name} is {value!r}. The argument `{name}` must be `>= 0`, whole and not 0."
            )

    def tasks(self, n_mubatches: int) -> list[Tasks]:
        """Returns the tasks of each group in order. A tuple (`FusedTask`) runs as one program; None is a pause."""
        raise NotImplementedError(f"{type(self).__name__}.tasks")

    def get_mpmd_idx(self, stage_id: int) -> int:
        """Returns the group that runs a stage."""
        return stage_id

    @property
    def placement(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(int(self.get_mpmd_idx(stage)) for stage in range(self.num_stages))

    @property
    def num_groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(self.placement) + 1

    def orders(self, num_microbatches: int) -> Orders:
        return self._translated(num_microbatches).task_orders

    def fused(self, num_microbatches: int) -> Pairs:
        return self._translated(num_microbatches).pairs

    def _translated(self, num_microbatches: int) -> scheduler.CustomSchedule:
        # Kept by the object: a subclass may have attributes of its own, which its equality does not see.
        known = vars(self).setdefault("_known", {})
        if num_microbatches not in known:
            known[num_microbatches] = _as_custom(self, num_microbatches)
        return known[num_microbatches]

    def __str__(self) -> str:
        return f"{type(self).__name__}({counted(self.num_stages, 'stage')} on {counted(self.num_groups, 'group')})"


def _as_custom(schedule: BaseSchedule, num_microbatches: int) -> scheduler.CustomSchedule:
    check_count(type(schedule).__name__, "num_microbatches", num_microbatches)
    orders, pairs = [], set()
    for row in schedule.tasks(num_microbatches):
        order, together = _order(schedule, row)
        orders.append(order)
        pairs |= together
    try:
        return scheduler.CustomSchedule(orders, schedule.placement, pairs)
    except ScheduleError as error:
        message = str(error).replace("CustomSchedule", f"{type(schedule).__name__}.tasks({num_microbatches})", 1)
        raise ScheduleError(message, error.faults) from None


def _order(
    schedule: BaseSchedule, row: Tasks
) -> tuple[list[scheduler.Task], set[tuple[scheduler.Task, scheduler.Task]]]:
    """Returns a group's tasks as `scheduler.Task`, and the pairs of them that can run as one program.

    If the halves of a backward are fused, they become a whole backward. In the first stage they also do so when they
    are successive, because its input has no gradient. Tasks of one microbatch wait for each other, and form no pair.
    """
    order: list[scheduler.Task] = []
    ends: list[tuple[int, int]] = []  # the range of each entry
    for entry in row:
        if entry is None:
            continue
        begin, is_fused = len(order), isinstance(entry, tuple)
        for one in entry if is_fused else (entry,):
            task = _task(schedule, one)
            is_rest = bool(order) and task.kind == "W" and order[-1] == task._replace(kind="I")
            if is_rest and (task.stage == 0 or (is_fused and len(order) > begin)):
                order[-1] = task._replace(kind="B")
            else:
                order.append(task)
        ends.append((begin, len(order)))
    pairs = {(order[begin], order[begin + 1]) for begin, end in ends if end == begin + 2}
    return order, {(one, other) for one, other in pairs if one.microbatch != other.microbatch}


def _task(schedule: BaseSchedule, one: object) -> scheduler.Task:
    if not isinstance(one, JaxppTask):
        raise ScheduleError(
            f"{type(schedule).__name__}.tasks: {one!r} is a {type(one).__name__}. Make tasks by"
            " mpmd.jaxpp.Task.make(stage_id, mubatch_idx, mpmd.jaxpp.TaskType.FWD), None for a step without work.",
            (),
        )
    return scheduler.Task(one.stage_id, one.fwd_or_bwd.value, one.mubatch_idx)


def _tasks_of(orders: Orders, pairs: Pairs = frozenset()) -> list[Tasks]:
    """Returns orders of `scheduler.Task` in JaxPP's terms."""
    second = dict(pairs)
    rows = []
    for order in orders:
        units = ([JaxppTask.make(s, i, TaskType(kind)) for s, kind, i in unit] for unit in paired(order, second))
        rows.append([FusedTask(unit) if len(unit) > 1 else unit[0] for unit in units])
    return rows


# --- JaxPP's own schedules --------------------------------------------------------------------------


@dataclass(frozen=True)
class InterleavedBaseSchedule(BaseSchedule):
    """Several stages per group, dealt out like cards."""

    mpmd_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("mpmd_dim", self.mpmd_dim)
        if self.num_stages % self.mpmd_dim:
            raise ValueError(
                f"{type(self).__name__}: num_stages {self.num_stages} can not be evenly divided by mpmd_dim"
                f" {self.mpmd_dim}, to give every group as many."
            )

    @property
    def vp(self) -> int:
        """The number of stages per group."""
        return self.num_stages // self.mpmd_dim

    def get_mpmd_idx(self, stage_id: int) -> int:
        return stage_id % self.mpmd_dim

    def microbatch_round_sizes(self, n_microbatches: int) -> tuple[int, ...]:
        """Returns how many microbatches a group runs in a stage before its next stage: one for each group, or more."""
        rounds = max(1, n_microbatches // self.mpmd_dim)
        return tuple(n_microbatches // rounds + (i < n_microbatches % rounds) for i in range(rounds))

    def _looped(self, group: int, kind: Kind, n_mubatches: int) -> list[scheduler.Task]:
        """Returns a group's tasks of one kind, round by round: stage after stage, for backwards from the last stage."""
        return looped(self, group, kind, self.microbatch_round_sizes(n_mubatches))


@dataclass(frozen=True)
class _OneStageEach(InterleavedBaseSchedule):
    """One stage per group, so `mpmd_dim` is optional and there is only one round."""

    mpmd_dim: int = None  # pyright: ignore[reportAssignmentType]  as many as stages
    _of_several: ClassVar[str] = "Interleaved1F1B"  # the schedule for several stages per group

    def __post_init__(self) -> None:
        if self.mpmd_dim is None:
            object.__setattr__(self, "mpmd_dim", self.num_stages)
        super().__post_init__()
        if self.mpmd_dim != self.num_stages:
            raise ValueError(
                f"{type(self).__name__}: mpmd_dim is {self.mpmd_dim} and num_stages {self.num_stages}. It requires"
                f" mpmd_dim == num_stages: use {self._of_several}."
            )

    def microbatch_round_sizes(self, n_microbatches: int) -> tuple[int, ...]:
        return (n_microbatches,)


@dataclass(frozen=True)
class Interleaved1F1B(InterleavedBaseSchedule):
    """`scheduler.InterleavedOneFOneB`, for any number of microbatches.

    Args:
      fuse_steady_state: whether each forward and the backward after it are one program.
    """

    fuse_steady_state: bool = False

    def get_rank_warmup_ops(self, mpmd_idx: int, n_microbatches: int) -> int:
        """Returns how many forwards a group runs before its first backward."""
        first = self.microbatch_round_sizes(n_microbatches)[0]
        return min(self._warmup(mpmd_idx, first), n_microbatches * self.vp)

    def _warmup(self, mpmd_idx: int, round_size: int) -> int:
        return (self.vp - 1) * round_size + 2 * (self.mpmd_dim - 1 - mpmd_idx)

    def _fuses(self, forward: scheduler.Task) -> bool:
        return self.fuse_steady_state or forward.stage == self.num_stages - 1

    def tasks(self, n_mubatches: int) -> list[Tasks]:
        orders, pairs = [], set()
        for group in range(self.mpmd_dim):
            forwards, backwards = (self._looped(group, kind, n_mubatches) for kind in ("F", "B"))
            warmup = self.get_rank_warmup_ops(group, n_mubatches)
            steady = list(zip(forwards[warmup:], backwards, strict=False))
            pairs.update(pair for pair in steady if self._fuses(pair[0]))
            turns = [task for pair in steady for task in pair]
            orders.append((*forwards[:warmup], *turns, *backwards[len(steady) :]))
        return _tasks_of(tuple(orders), frozenset(pairs))


@dataclass(frozen=True)
class Eager1F1B(_OneStageEach, Interleaved1F1B):
    """`scheduler.EagerOneFOneB`."""

    fuse_steady_state: bool = field(default=False, init=False)


@dataclass(frozen=True)
class Std1F1B(_OneStageEach, Interleaved1F1B):
    """`scheduler.OneFOneB`."""

    fuse_steady_state: bool = field(default=False, init=False)

    def _warmup(self, mpmd_idx: int, round_size: int) -> int:
        return self.num_stages - 1 - mpmd_idx

    def _fuses(self, forward: scheduler.Task) -> bool:
        return False


class _KimiK2(Interleaved1F1B):
    """Interleaved 1F1B with one more forward at the start. (`scheduler.KimiK2` splits the backwards, too.)"""

    def _warmup(self, mpmd_idx: int, round_size: int) -> int:
        return super()._warmup(mpmd_idx, round_size) + 1


@dataclass(frozen=True)
class _InterleavedGPipe(InterleavedBaseSchedule):
    """All forwards, then all backwards, with several stages per group, in rounds."""

    def tasks(self, n_mubatches: int) -> list[Tasks]:
        groups = range(self.mpmd_dim)
        return _tasks_of(
            tuple((*self._looped(g, "F", n_mubatches), *self._looped(g, "B", n_mubatches)) for g in groups)
        )


@dataclass(frozen=True)
class _GPipe(_OneStageEach, _InterleavedGPipe):
    """`scheduler.GPipe`."""

    _of_several: ClassVar[str] = "InterleavedGPipe"


@dataclass(frozen=True)
class _InterleavedZeroBubble(InterleavedBaseSchedule):
    """Interleaved 1F1B with split backwards: I and F in turn at the start, then I, W and F in turn."""

    is_partial_bwd: ClassVar[bool] = True

    def tasks(self, n_mubatches: int) -> list[Tasks]:
        return _tasks_of(tuple(self._order(group, n_mubatches) for group in range(self.mpmd_dim)))

    def _order(self, group: int, n_mubatches: int) -> tuple[scheduler.Task, ...]:
        backwards = self._looped(group, "I", n_mubatches)
        weights = [task._replace(kind="W") for task in backwards]
        left = {"F": self._looped(group, "F", n_mubatches)[::-1], "I": backwards[::-1], "W": weights[::-1]}
        warmup = (self.vp - 1) * self.microbatch_round_sizes(n_mubatches)[0] + self.mpmd_dim - group
        order = [left["F"].pop() for _ in range(min(len(left["F"]), warmup))]
        turns = "IF" * group
        while any(left.values()):
            for kind in turns or "IWF":
                if left[kind]:
                    order.append(left[kind].pop())
            turns = ""
        return tuple(order)


@dataclass(frozen=True)
class ZeroBubble(_OneStageEach, _InterleavedZeroBubble):
    """`scheduler.ZeroBubbleH1` in JaxPP's order."""

    _of_several: ClassVar[str] = "InterleavedZeroBubble"


@dataclass(frozen=True)
class _DualPipeV(InterleavedBaseSchedule):
    """`scheduler.DualPipeV`, with two stages per group."""

    is_partial_bwd: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_stages != 2 * self.mpmd_dim:
            raise ValueError(
                f"DualPipeV only supports 2 * mpmd_dim stages, self.num_stages={self.num_stages} requested with"
                f" self.mpmd_dim={self.mpmd_dim}: use {2 * self.mpmd_dim}."
            )

    @property
    def _ours(self) -> scheduler.DualPipeV:
        return scheduler.DualPipeV(self.mpmd_dim)

    def get_mpmd_idx(self, stage_id: int) -> int:
        return self._ours.placement[stage_id]

    def orders(self, num_microbatches: int) -> Orders:
        if type(self).tasks is not _DualPipeV.tasks:  # a subclass has its own
            return super().orders(num_microbatches)
        check_count("DualPipeV", "num_microbatches", num_microbatches)
        if num_microbatches < self.num_stages:
            raise ValueError(
                f"DualPipeV requires n_mubatches={num_microbatches} >= self.num_stages={self.num_stages}:"
                " its pairs need two microbatches a group."
            )
        return self._ours.orders(num_microbatches)

    def fused(self, num_microbatches: int) -> Pairs:
        is_ours = type(self).tasks is _DualPipeV.tasks
        return self._ours.fused(num_microbatches) if is_ours else super().fused(num_microbatches)

    def tasks(self, n_mubatches: int) -> list[Tasks]:
        return _tasks_of(self.orders(n_mubatches), self.fused(n_mubatches))


# `scheduler` has classes with the same names.
for _kind in (_GPipe, _KimiK2, _InterleavedGPipe, _InterleavedZeroBubble, _DualPipeV):
    _kind.__name__ = _kind.__qualname__ = _kind.__name__.removeprefix("_")

Task = JaxppTask
GPipe = _GPipe
KimiK2 = _KimiK2
InterleavedGPipe = _InterleavedGPipe
InterleavedZeroBubble = _InterleavedZeroBubble
DualPipeV = _DualPipeV
