"""Lets a group do an instruction out of turn, if memory, results and freedom from deadlock stay as in the plan.

A *plan* is the work of all groups, in one order that is free of deadlock (the order of :func:`scheduler.merge`). An
*event* of it is a task, or a transfer, which is in the lists of both its groups. An event may happen if

1. every event before it that writes or frees its inputs, or that reads or writes what it writes or frees, is done;
   tasks of one stage and kind keep their order. So each task reads the values of the plan, and every sum is added up
   in the plan's order: same bits.
2. it fits: if it happens now, and each of its groups then does the rest of its list in order, the group never holds
   more than its peak in the plan. The first event of a list fits already, by this condition for the events that
   happened before it.

No choice leads to a deadlock. Take the first event of the plan that is left. All that it needs came before it, and
is done. In the list of each of its groups, it is the first event that is left, so it fits. Hence some event may always
happen, until all are done. It does not matter in which process the groups are, nor what each of them chose.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scheduler.programs.instructions import TRANSFERS, Free, Program, Recv, Run, Send, Transfer
from scheduler.programs.merging import merge

# So many events of a list are considered.
WINDOW = 64
# A group is given its next planned task while one runs; another task, only when it is idle.
MOST_IN_FLIGHT = 2


class PlannedEvent(NamedTuple):
    """A task or call of one group, or a transfer between two."""

    groups: tuple[int, ...]  # The groups that have it in their lists
    reads: tuple[int, ...]  # Slots, numbers of values in groups
    writes: tuple[int, ...]  # Slots
    frees: tuple[int, ...] = ()  # Slots
    kind: str = ""  # For a task F, B, I, W or R (for a fused pair both), for a transfer empty, for other work ``call``
    key: Hashable = None  # Tasks of one key keep their order
    may_move: bool = True  # Out of turn. An event that may not is a barrier for the events after it


class EventPlan:
    """Events in an order that is free of deadlock, and tables derived from it.

    Args:
        size_of: For a slot, its group and its bytes.
        held: The bytes that each group holds before the first event, without bytes that no event frees.

    Attributes:
        feeds: For each task, the transfers that bring its inputs.
        makers: For each event, the tasks that make its inputs.
    """

    def __init__(
        self,
        events: Sequence[PlannedEvent],
        num_groups: int,
        size_of: Mapping[int, tuple[int, int]],
        held: Sequence[int] = (),
    ) -> None:
        self.events = events
        self.lists: list[list[int]] = [[] for _ in range(num_groups)]  # For each group, its events in order
        for number, event in enumerate(events):
            for group in event.groups:
                self.lists[group].append(number)
        self.before = [sorted(found) for found in _conflicts(events)]  # For each event, those that must be done before
        self.followers: list[list[int]] = [[] for _ in events]  # For each event, those that must wait for it
        for number, found in enumerate(self.before):
            for earlier in found:
                self.followers[earlier].append(number)
        brings = {slot: number for number, e in enumerate(events) if not e.kind for slot in e.writes}
        self.feeds = [[brings[slot] for slot in e.reads if slot in brings] if e.kind else [] for e in events]
        made = {slot: number for number, e in enumerate(events) for slot in e.writes if e.kind}
        self.makers = [[made[slot] for slot in e.reads if slot in made] for e in events]
        self.held = list(held) or [0] * num_groups
        self._count_bytes(size_of)
        self.peaks = [self._peak(group) for group in range(num_groups)]  # The most bytes that each group holds

    def _count_bytes(self, size_of: Mapping[int, tuple[int, int]]) -> None:
        """Counts the bytes that each event adds in its groups, and the bytes that it frees there afterwards."""
        there: set[int] = set()
        self.adds: list[dict[int, int]] = []
        self.drops: list[dict[int, int]] = []
        for event in self.events:
            adds, drops = dict.fromkeys(event.groups, 0), dict.fromkeys(event.groups, 0)
            for slots, found in ((set(event.writes) - there, adds), (set(event.frees), drops)):
                for slot in slots:
                    group, nbytes = size_of.get(slot, (-1, 0))
                    if group in found:
                        found[group] += nbytes
            there.update(event.writes)
            there.difference_update(event.frees)
            self.adds.append(adds)
            self.drops.append(drops)

    def _peak(self, group: int) -> int:
        held = peak = self.held[group]
        for number in self.lists[group]:
            held += self.adds[number][group]
            peak = max(peak, held)
            held -= self.drops[number][group]
        return peak

    @classmethod
    def of(cls, program: Program) -> "EventPlan":
        """Returns the plan of a program, without a device."""
        slots: dict[Hashable, int] = {}
        size_of: dict[int, tuple[int, int]] = {}

        def slot(group: int, value: Hashable, nbytes: int) -> int:
            number = slots.setdefault((group, value), len(slots))
            size_of[number] = group, nbytes
            return number

        events: list[PlannedEvent] = []
        last: dict[int, int] = {}
        for group, i in merge(program):
            if isinstance(i, Recv):  # its Send is before it
                continue
            if isinstance(i, Free):
                at = last[group]
                freed = slot(group, i.value, program.nbytes.get(i.value.name, 0))
                events[at] = events[at]._replace(frees=(*events[at].frees, freed))
                continue
            if isinstance(i, TRANSFERS):
                value, source, target = Transfer.of(group, i)
                nbytes = program.nbytes.get(value.name, 0)
                ends = [slot(g, value, nbytes) for g in (source, target)]
                event = PlannedEvent((source, target), (ends[0],), (ends[1],))
            else:
                reads, writes = (
                    tuple(slot(group, v, program.nbytes.get(v.name, 0)) for v in values)
                    for values in (i.reads, i.writes)
                )
                key = (group, i.loop, *((t.stage, t.kind) for t in i.tasks)) if isinstance(i, Run) else None
                kind = "".join(t.kind for t in i.tasks) if isinstance(i, Run) else "call"
                event = PlannedEvent((group,), reads, writes, (), kind, key, isinstance(i, Run))
            last[group] = len(events)
            if isinstance(i, Send):
                last[i.to_group] = len(events)
            events.append(event)
        return cls(events, program.num_groups, size_of)


def _conflicts(events: Iterable[PlannedEvent]) -> Iterator[set[int]]:
    """Yields, for each event, the events that must be done before it."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    latest: dict[Hashable, int] = {}
    for number, event in enumerate(events):
        found = {writer[slot] for slot in event.reads if slot in writer}
        for slot in (*event.writes, *event.frees):
            found.update(readers.pop(slot, ()))
            if slot in writer:
                found.add(writer[slot])
        for slot in event.reads:
            readers.setdefault(slot, []).append(number)
        for slot in (*event.writes, *event.frees):
            writer[slot], readers[slot] = number, []
        if event.key is not None:
            if event.key in latest:
                found.add(latest[event.key])
            latest[event.key] = number
        yield found - {number}


class PlanProgress:
    """The progress of a plan, and what may happen next."""

    def __init__(self, plan: EventPlan, kinds: str) -> None:
        self.plan, self.kinds = plan, kinds
        self.num_left = len(plan.events)
        self.is_done = bytearray(len(plan.events))
        self.held = plan.held.copy()
        self._num_before = list(map(len, plan.before))
        self._front = [0] * len(plan.lists)

    def left(self, group: int) -> Iterator[int]:
        """Yields the next events of a group's list that are left."""
        events, is_done = self.plan.lists[group], self.is_done
        at = self._front[group]
        while at < len(events) and is_done[events[at]]:
            at += 1
        self._front[group] = at
        for number in events[at : at + WINDOW]:
            if not is_done[number]:
                yield number

    def may(self, number: int) -> bool:
        """Returns whether an event may happen now."""
        if self.is_done[number] or self._num_before[number]:
            return False
        event = self.plan.events[number]
        if not event.may_move:
            return all(next(self.left(group)) == number for group in event.groups)
        return all(self._fits(number, group) for group in event.groups)

    def _fits(self, number: int, group: int) -> bool:
        adds, drops, peak = self.plan.adds, self.plan.drops, self.plan.peaks[group]
        held = self.held[group] + adds[number][group]
        if held > peak:
            return False
        held -= drops[number][group]
        for other in self.left(group):
            if other == number:
                return True
            if not self.plan.events[other].may_move or held + adds[other][group] > peak:
                return False
            held += adds[other][group] - drops[other][group]
        return False  # too far ahead to be considered

    def do(self, number: int) -> None:
        """Records that an event happens."""
        self.is_done[number] = True
        self.num_left -= 1
        for group in self.plan.events[number].groups:
            self.held[group] += self.plan.adds[number][group] - self.plan.drops[number][group]
        for later in self.plan.followers[number]:
            self._num_before[later] -= 1

    def next(self, group: int, has_arrived: Callable[[int], bool], num_in_flight: int) -> int | None:
        """Returns the next event of a group: by its plan, or else a ready task ahead of it if the group is idle.

        A group without any choice also gets the next planned task, before the task's inputs have arrived.

        Args:
            has_arrived: Whether all inputs of a task from other groups have arrived.
            num_in_flight: Tasks of the group that have been dispatched to its devices and are not done.
        """
        events, head, has_choice, seen = self.plan.events, None, False, set()
        for number in self.left(group):
            event = events[number]
            if not event.may_move:
                if head is None:
                    return number if self.may(number) else None
                break
            if not event.kind:
                if head is None and self.may(number):
                    return number
            elif head is None:
                if num_in_flight >= MOST_IN_FLIGHT:
                    return None
                if self.may(number) and has_arrived(number):
                    return number
                head = number
                seen.add(event.key)
            elif event.key not in seen and set(event.kind) <= set(self.kinds):
                seen.add(event.key)
                if not self._is_choice(number, group):
                    continue
                has_choice = True
                if num_in_flight:
                    return None
                for transfer in self.plan.feeds[number]:
                    if self.may(transfer):
                        return transfer
                if self.may(number) and has_arrived(number):
                    return number
        return head if head is not None and not has_choice and self.may(head) else None

    def _is_choice(self, number: int, group: int) -> bool:
        """Returns whether a task lacks nothing but values from other groups."""
        before = (e for e in self.plan.before[number] if self.plan.events[e].kind)
        return all(self.is_done[e] for e in before) and self._fits(number, group)
