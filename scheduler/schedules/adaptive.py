"""A schedule whose groups may run another ready task than the planned one."""

from dataclasses import dataclass, field

from scheduler.schedules import catalogue
from scheduler.task import KINDS, Orders, Pairs, Schedule, check_schedule, reads_of


@dataclass(frozen=True)
class Adaptive(Schedule):
    """A schedule that is a plan: while the next task of a group waits for a value, the group may run a later one.

    The plan is the inner schedule's, and is proved as always. A group departs from it only within the plan's memory,
    and only where the result stays the same to the bit; ``scheduler/programs/ahead.py`` has the rule, and why it cannot
    deadlock. Everything that is computed about the schedule before it runs (simulation, memory, pictures) is about the
    plan.

    Args:
        schedule: The plan; or the name of a built-in schedule, for a loop whose marks say how many stages there are.
        ahead: The kinds of tasks that may run ahead, as in ``"W"`` or ``"FBIW"``. By default the kinds worth it in a
            simulation of the plan, with tasks that take 30 % more or less than expected; perhaps none.

    Raises:
        ValueError: There is no such schedule or kind, or the schedule is adaptive already.

    Examples:
        >>> from scheduler import ZeroBubbleH1
        >>> schedule = Adaptive(ZeroBubbleH1(4))
        >>> schedule.num_stages, schedule.orders(8) == ZeroBubbleH1(4).orders(8)
        (4, True)
    """

    schedule: Schedule | str
    ahead: str | None = None
    num_stages: int = field(init=False, repr=False, compare=False)
    num_groups: int = field(init=False, repr=False, compare=False)
    placement: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plan = self.schedule
        if isinstance(plan, Adaptive):
            raise ValueError(f"Adaptive: schedule is {plan}, which is adaptive already. Pass the schedule inside.")
        if self.ahead is not None and not (isinstance(self.ahead, str) and set(self.ahead) <= set(KINDS)):
            raise ValueError(
                f"Adaptive: ahead is {self.ahead!r}; expected kinds of tasks such as 'W' or 'FBIW', '' or None."
            )
        if isinstance(plan, str):
            try:
                catalogue.find(plan)
            except ValueError as e:
                raise ValueError(f"Adaptive: {e}") from None
            return
        check_schedule("Adaptive", plan)
        for name in ("num_stages", "num_groups", "placement"):
            object.__setattr__(self, name, getattr(plan, name))
        object.__setattr__(self, "reads", reads_of(plan))

    def __getattr__(self, name: str) -> object:
        if name in ("num_stages", "num_groups", "placement") and isinstance(vars(self).get("schedule"), str):
            raise AttributeError(f"Adaptive({self.schedule!r}) has no {name} yet: only the marks of a loop tell.")
        raise AttributeError(name)

    def __str__(self) -> str:
        return f"Adaptive({self.schedule})"

    def orders(self, num_microbatches: int) -> Orders:
        return self._plan.orders(num_microbatches)

    def fused(self, num_microbatches: int) -> Pairs:
        return self._plan.fused(num_microbatches)

    @property
    def _plan(self) -> Schedule:
        if isinstance(self.schedule, str):
            raise ValueError(
                f"Adaptive: {self.schedule!r} is a name, which is a schedule only in a loop of mpmd.treduce: its marks"
                f" say how many stages there are. Pass a schedule, such as scheduler.make({self.schedule!r}, 4)."
            )
        return self.schedule
