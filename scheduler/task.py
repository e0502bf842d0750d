"""A task, and the interface of a schedule: one order of tasks for each group of devices."""

import operator
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

from scheduler.base.texts import counted
from scheduler.errors import ScheduleError

Kind = Literal["F", "B", "I", "W", "R"]
Orders = tuple[tuple["Task", ...], ...]
Pairs = frozenset[tuple["Task", "Task"]]
Reads = tuple[tuple[int, ...], ...]
"""For each stage, the earlier stages that it exchanges values with."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "R")
_TASK = re.compile(r"(\d+)([FBIWR])(\d+)")


class Task(NamedTuple):
    """One piece of work: what a stage does for one microbatch. Prints as ``2F0``.

    A tuple, because a large schedule holds millions of them. Tasks compare by stage, then kind, then microbatch.

    Args:
        stage: The pipeline stage, from 0.
        kind: ``F`` forward, ``B`` whole backward, or its two halves: ``I`` the gradient of the stage's input (the stage
            before waits for it) and ``W`` the gradient of its weights (nobody waits for it). ``R`` recomputes the
            residuals of the forward that ``I`` and ``W`` need; schedules leave it out, see
            ``scheduler.ordering.recomputing``.
        microbatch: The microbatch, from 0.

    Examples:
        >>> str(Task(2, "F", 0)), Task.parse("1B3")
        ('2F0', Task(stage=1, kind='B', microbatch=3))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Returns the task that prints as ``text``; raises ValueError for anything else."""
        match = _TASK.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"Task.parse: received {text!r}; expected a stage, one of F, B, I, W, R, and a microbatch, as in '2F0'."
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]

    @property
    def parts(self) -> "tuple[Task, ...]":
        """The task in kinds F, R, I and W: ``B`` stands for ``I`` and ``W``."""
        if self.kind != "B":
            return (self,)
        return Task(self.stage, "I", self.microbatch), Task(self.stage, "W", self.microbatch)


class Schedule:
    """The interface of every schedule: where stages live, and in which order each group runs its tasks.

    A schedule is a frozen dataclass: equal arguments make equal schedules, and nothing is computed before ``orders``
    is called. To write one, subclass this and set the three attributes, or hand finished orders to
    :class:`scheduler.CustomSchedule`.

    Attributes:
        num_stages: The number of pipeline stages.
        num_groups: The number of groups of devices.
        placement: For each stage, the group that runs it.
        reads: For each stage, the earlier stages that it exchanges values with; None for a chain.
    """

    num_stages: int
    num_groups: int
    placement: tuple[int, ...]
    reads: Reads | None = None

    def orders(self, num_microbatches: int) -> Orders:
        """Returns, for each group, its tasks in the order in which it runs them.

        Raises:
            ValueError: The schedule is not defined for this number of microbatches.
        """
        raise NotImplementedError

    def fused(self, num_microbatches: int) -> Pairs:
        """Returns the pairs of tasks, adjacent in an order, that should become one executable. By default none."""
        del num_microbatches
        return frozenset()


def reads_of(schedule: Schedule) -> Reads | None:
    """Returns the graph of a schedule's stages; None for a chain, and for a class without `reads`."""
    return getattr(schedule, "reads", None)


def is_schedule(x: object) -> bool:
    """Returns whether this is a schedule rather than a name, a class, or something else."""
    return not isinstance(x, type) and all(hasattr(x, name) for name in ("orders", "fused", "placement"))


def check_schedule(owner: str, schedule: object) -> None:
    """Raises a ValueError that names the argument if ``schedule`` is a name, a class, or not a schedule at all."""
    if not is_schedule(schedule):
        raise ValueError(
            f"{owner}: schedule is {schedule!r}; expected a schedule such as scheduler.OneFOneB(4). "
            "From a name: scheduler.make('1f1b', num_stages=4)."
        )


def orders_of(schedule: Schedule, num_microbatches: int) -> Orders:
    """Returns a schedule's orders as tuples; raises a ScheduleError if its class returned something else."""
    found: Any = schedule.orders(num_microbatches)
    try:
        orders: Orders = tuple(map(tuple, found))
    except TypeError:
        orders = ((found,),)
    strange = [x for order in orders for x in order if not isinstance(x, Task)]
    if strange or len(orders) != schedule.num_groups:
        what = f"{strange[0]!r:.60}" if strange else f"orders for {counted(len(orders), 'group')}"
        raise ScheduleError(
            f"{type(schedule).__name__}.orders({num_microbatches}) returned {what}; expected a sequence of "
            f"scheduler.Task for each of {counted(schedule.num_groups, 'group')}."
        )
    return orders


def check_count(owner: str, name: str, value: object) -> int:
    """Returns ``value`` if it is a whole number of at least 1, else raises a ValueError that names the argument."""
    number = operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
    if number is None or number < 1:
        raise ValueError(f"{owner}: {name} is {value!r}; expected a whole number of at least 1.")
    return number


def per_group(name: str, value: float | Sequence[float], num_groups: int) -> tuple[float, ...]:
    """Returns a number for each group, from one for each or one for all; a ValueError names a wrong argument."""
    if not isinstance(value, Sequence):
        return (value,) * num_groups
    if len(value) != num_groups:
        raise ValueError(f"{name} has {counted(len(value), 'entry')}; expected one for each of {num_groups} groups.")
    return tuple(value)
