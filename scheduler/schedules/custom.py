"""Orders from anywhere: written by hand, found by a search, or read from a file."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from scheduler.base.files import read_text
from scheduler.base.texts import counted
from scheduler.errors import ScheduleError
from scheduler.ordering import order_faults, paired, raise_faults
from scheduler.task import Orders, Pairs, Reads, Schedule, Task, check_schedule, reads_of

_PAIR = re.compile(r"\((?P<first>\w+);(?P<second>\w+)\)OVERLAP_F_B")
# torch.distributed.pipelining may also write communication and parameter sharding, which lower() makes itself.
_IGNORED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


@dataclass(frozen=True, init=False)
class CustomSchedule(Schedule):
    """A schedule from finished orders, for the one number of microbatches that they hold.

    Nothing is assumed about the orders except that each stage lives in one group. They are checked when the schedule is
    made: every task once, in its group, B or both I and W, and no deadlock.

    Args:
        orders: For each group, its tasks in order; tasks may be given as text.
        placement: For each stage, its group.
        pairs: Pairs of neighbours in an order that should become one executable.
        reads: For each stage, the earlier stages that it exchanges values with; None for a chain.

    Raises:
        ScheduleError: With every fault of the orders.

    Examples:
        >>> schedule = CustomSchedule((("0F0", "0F1", "0B0", "0B1"),), (0,))
        >>> schedule.num_microbatches, str(schedule.orders(2)[0][3])
        (2, '0B1')
    """

    task_orders: Orders
    placement: tuple[int, ...]
    pairs: Pairs
    reads: Reads | None = field(repr=False)
    num_stages: int = field(init=False, repr=False, compare=False)
    num_groups: int = field(init=False, repr=False, compare=False)
    num_microbatches: int = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        orders: Iterable[Iterable[Task | str]],
        placement: Sequence[int],
        pairs: Iterable[tuple[Task, Task]] = (),
        *,
        reads: Reads | None = None,
    ) -> None:
        orders = tuple(
            tuple(task if isinstance(task, Task) else Task.parse(task) for task in order) for order in orders
        )
        pairs = frozenset(pairs)
        microbatches = {task.microbatch for order in orders for task in order}
        values = {
            "task_orders": orders,
            "placement": tuple(placement),
            "pairs": pairs,
            "reads": reads,
            "num_stages": len(placement),
            "num_groups": len(orders),
            "num_microbatches": max(microbatches, default=-1) + 1,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if not microbatches:
            raise ScheduleError("CustomSchedule: the orders hold no tasks; expected at least 0F0 and 0B0.")
        forward_only = all(task.kind == "F" for order in orders for task in order)
        faults = [
            f"stage {stage} is placed in group {group!r}; expected 0 to {len(orders) - 1}"
            for stage, group in enumerate(placement)
            if group not in range(len(orders))
        ]
        if reads is not None and len(reads) != len(placement):
            faults.append(f"reads has {counted(len(reads), 'entry')}, and there are {counted(len(placement), 'stage')}")
        else:
            faults += order_faults(orders, placement, self.num_microbatches, forward_only, reads)
        neighbours = {pair for order in orders for pair in pairwise(order)}
        faults += [f"{one} and {other} are not neighbours in an order" for one, other in sorted(pairs - neighbours)]
        counts = Counter(task for pair in pairs for task in pair)
        faults += [f"{task} is in {count} pairs; expected one" for task, count in sorted(counts.items()) if count > 1]
        raise_faults("CustomSchedule", faults)

    def __str__(self) -> str:
        """Returns a summary, without its thousands of tasks."""
        return (
            f"CustomSchedule({counted(self.num_stages, 'stage')} on {counted(self.num_groups, 'group')}, "
            f"{counted(self.num_microbatches, 'microbatch')})"
        )

    def orders(self, num_microbatches: int) -> Orders:
        if num_microbatches != self.num_microbatches:
            raise ValueError(
                f"CustomSchedule: num_microbatches is {num_microbatches}; these orders are for "
                f"{self.num_microbatches}. Use that number, or make other orders."
            )
        return self.task_orders

    def fused(self, num_microbatches: int) -> Pairs:
        self.orders(num_microbatches)
        return self.pairs

    @classmethod
    def from_schedule(cls, schedule: Schedule, num_microbatches: int) -> "CustomSchedule":
        """Takes any schedule's orders for one number of microbatches, to be edited or written to a file."""
        check_schedule("CustomSchedule.from_schedule", schedule)
        orders, pairs = schedule.orders(num_microbatches), schedule.fused(num_microbatches)
        return cls(orders, tuple(schedule.placement), pairs, reads=reads_of(schedule))

    @classmethod
    def from_csv(cls, path: str | Path) -> "CustomSchedule":
        """Reads the file that torch.distributed.pipelining writes and reads: one row a rank, one cell a task.

        Cells are ``2F0``, ``1B0``, ``1I0``, ``1W0`` (stage, kind, microbatch), ``(2F1;1B0)OVERLAP_F_B`` for a fused
        pair, or empty for a step without work. Communication cells are skipped: :func:`scheduler.lower` makes its
        own.

        Raises:
            ScheduleError: With every cell that cannot be read, or every fault of the orders.
        """
        orders, pairs, faults = _tasks_in(_rows(path))
        if not any(orders):
            first = f"; {faults[0]}" if faults else ""
            raise ScheduleError(
                f"CustomSchedule.from_csv: {path} is no orders file: it holds no task{first}. "
                "Expected one row a rank, with cells such as 2F0, 1B0."
            )
        num_tasks = sum(map(len, orders))
        stages = 1 + max(task.stage for order in orders for task in order)
        microbatches = 1 + max(task.microbatch for order in orders for task in order)
        if stages * microbatches > 10 * num_tasks + 1000:
            raise ScheduleError(
                f"CustomSchedule.from_csv: {path} names stage {stages - 1} and microbatch {microbatches - 1}, and "
                f"holds {num_tasks} tasks; so many stages and microbatches need at least {2 * stages * microbatches}."
            )
        placement, misplaced = _placement_of(orders)
        raise_faults(f"CustomSchedule.from_csv: {path}", faults + misplaced)
        try:
            return cls(tuple(map(tuple, orders)), placement, frozenset(pairs))
        except ScheduleError as error:
            message = str(error).replace("CustomSchedule", f"CustomSchedule.from_csv: {path}", 1)
            raise ScheduleError(message, error.faults) from None

    def to_csv(self, path: str | Path) -> None:
        """Writes the file that :meth:`from_csv` reads, tasks side by side without empty steps."""
        second = dict(self.pairs)
        rows = []
        for order in self.task_orders:
            units = [list(map(str, unit)) for unit in paired(order, second)]
            cells = [f"({';'.join(unit)})OVERLAP_F_B" if len(unit) > 1 else unit[0] for unit in units]
            rows.append(",".join(cells) or '""')  # a line without any cell would be no row
        Path(path).write_text("\n".join(rows) + "\n")


def _rows(path: str | Path) -> list[list[str]]:
    try:
        return [row for row in csv.reader(read_text(path).splitlines()) if row]
    except (UnicodeDecodeError, csv.Error):
        raise ScheduleError(
            f"CustomSchedule.from_csv: {path} is no orders file: it is not text. "
            "Expected one row a rank, with cells such as 2F0, 1B0."
        ) from None


def _tasks_in(rows: list[list[str]]) -> tuple[list[list[Task]], set[tuple[Task, Task]], list[str]]:
    """Returns each row's tasks, the fused pairs, and the cells that cannot be read."""
    orders: list[list[Task]] = []
    pairs: set[tuple[Task, Task]] = set()
    faults: list[str] = []
    for rank, row in enumerate(rows):
        order: list[Task] = []
        for column, cell in enumerate(row):
            text = cell.strip()
            if not text or _IGNORED.fullmatch(text):
                continue
            try:
                if match := _PAIR.fullmatch(text):
                    pair = Task.parse(match["first"]), Task.parse(match["second"])
                    pairs.add(pair)
                    order += pair
                else:
                    order.append(Task.parse(text))
            except ValueError:
                shown = text if len(text) <= 40 else f"{text[:39]}…"
                faults.append(f"row {rank + 1}, column {column + 1} holds {shown!r}, which is no task such as 2F0")
        orders.append(order)
    return orders, pairs, faults


def _placement_of(orders: list[list[Task]]) -> tuple[tuple[int, ...], list[str]]:
    """Returns, for each stage, the group that runs its tasks; and the stages with tasks in several groups."""
    groups_of: dict[int, set[int]] = {}
    for group, order in enumerate(orders):
        for task in order:
            groups_of.setdefault(task.stage, set()).add(group)
    faults = []
    for stage in range(max(groups_of, default=-1) + 1):
        if stage not in groups_of:
            faults.append(f"stage {stage} has no task in any row")
        elif len(groups_of[stage]) > 1:
            rows = sorted(groups_of[stage])
            shown = ", ".join(str(group + 1) for group in rows[:8])
            shown += f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            faults.append(f"stage {stage} has tasks in rows {shown}; expected one row")
    return tuple(min(groups_of[stage]) if stage in groups_of else 0 for stage in range(len(groups_of))), faults
