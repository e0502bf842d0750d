"""Runs lists of work until each is through or has to wait: the one loop under every clock and every proof."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Event = TypeVar("Event", bound=Hashable)


def run_until_blocked(num_lists: int, advance: Callable[[int, Callable[[Event], None]], Event | None]) -> None:
    """Advances each list, and again each time that what it waits for has happened. Linear in what happens.

    It ends: a list is only advanced again after an event that it waited for, and an event wakes each list once.

    Args:
        num_lists: How many there are.
        advance: Goes on with a list, given by its number, as far as it can, and calls its second argument with each
            event that happens. It returns the event that the list waits for now, or None at the end of the list.
    """
    waiting: dict[Event, list[int]] = {}
    ready = deque(range(num_lists))

    def happened(event: Event) -> None:
        if event in waiting:
            ready.extend(waiting.pop(event))

    while ready:
        one = ready.popleft()
        if (event := advance(one, happened)) is not None:
            waiting.setdefault(event, []).append(one)


def blocked(position: Sequence[int], lists: Sequence[Sequence[object]]) -> list[int]:
    """The lists that have not come to their ends."""
    return [one for one, (at, own) in enumerate(zip(position, lists, strict=True)) if at < len(own)]
