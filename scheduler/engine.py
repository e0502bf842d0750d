"""Runs lists of work until each ends or has to wait: the one loop under every clock and every proof."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Event = TypeVar("Event", bound=Hashable)
Item = TypeVar("Item")


def run_until_blocked(
    lists: Sequence[Sequence[Item]], do: Callable[[int, Item, Callable[[Event], None]], Event | None]
) -> list[int]:
    """Does each list in order as far as it can, and continues it each time that the event it waits for has happened.

    Linear in the number of events and items. It ends: a list continues only after an event that it waited for, and an
    event wakes each list once.

    Args:
        lists: The items to do.
        do: Does an item of a list, given by its number, calls its third argument with each event that happens, and
            returns None. If the item has to wait, it does nothing and returns the event that the item waits for.

    Returns:
        The number of items of each list that are done.
    """
    position = [0] * len(lists)
    waiting: dict[Event, list[int]] = {}
    ready = deque(range(len(lists)))

    def happened(event: Event) -> None:
        if event in waiting:
            ready.extend(waiting.pop(event))

    while ready:
        one = ready.popleft()
        own, at = lists[one], position[one]
        while at < len(own):
            if (event := do(one, own[at], happened)) is not None:
                waiting.setdefault(event, []).append(one)
                break
            at += 1
        position[one] = at
    return position


def blocked(position: Sequence[int], lists: Sequence[Sequence[object]]) -> list[int]:
    """Returns the lists that have not come to their ends."""
    return [one for one, (at, own) in enumerate(zip(position, lists, strict=True)) if at < len(own)]
