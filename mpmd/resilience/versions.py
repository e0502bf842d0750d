"""Finds the copies that make up a whole state, and the hosts for copies: pure functions of the keepers' lists.

A *record* is one rank's kept part of the state after one step. A *version* is whole when keepers have the records of
all ranks that the job had then.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpmd.resilience.keepers import Address


class Stored(NamedTuple):
    """One record, and its place."""

    attempt: int  # how often the launcher had restarted the job; all records of a version have the same attempt
    call: int  # the number of the call of `resilient` in the program
    step: int  # the record is a part of the result of this step
    owner: int  # the rank that has kept it
    num_ranks: int  # at that time
    keeper: Address  # the keeper that has it
    number: int  # its number there


class Version(NamedTuple):
    """A whole state."""

    step: int
    attempt: int
    records: tuple[tuple[Stored, ...], ...]  # for each rank that the job had, the copies of its record


def stored(answers: Mapping[Address, Iterable[Mapping[str, int]]]) -> list[Stored]:
    """Returns the records in the keepers' lists."""
    return [Stored(**record, keeper=address) for address, records in answers.items() for record in records]


def whole(records: Iterable[Stored], call: int) -> list[Version]:
    """Returns the whole versions of one call, the newest first."""
    found: dict[tuple[int, int], list[list[Stored]]] = {}
    for record in records:
        if record.call == call:
            owners = found.setdefault((record.step, record.attempt), [[] for _ in range(record.num_ranks)])
            owners[record.owner].append(record)
    return [
        Version(step, attempt, tuple([tuple(copies) for copies in owners]))
        for (step, attempt), owners in sorted(found.items(), reverse=True)
        if all(owners)
    ]


def lost_text(records: Iterable[Stored], call: int) -> str:
    """Returns why no version is whole, in words."""
    mine = [record for record in records if record.call == call]
    if not mine:
        return "no keeper has a copy" + ("" if not any(records) else " of this loop")
    newest = max(mine, key=lambda record: (record.step, record.attempt))
    same = [r for r in mine if (r.step, r.attempt) == (newest.step, newest.attempt)]
    missing = sorted(set(range(newest.num_ranks)) - {record.owner for record in same})
    what = f"rank {missing[0]}" if len(missing) == 1 else f"the ranks {', '.join(map(str, missing))}"
    return f"of the state after step {newest.step} every copy of {what} is lost"


def buddies(hosts: Sequence[Address], own: Address, copies: int) -> list[Address]:
    """Returns the keepers that keep another copy of the records of `own`: the next ones in a ring of hosts.

    Keepers at the same address do not count: a machine that the launcher got under two names is lost with both keepers.
    """
    first = hosts.index(own)
    return [host for host in (*hosts[first + 1 :], *hosts[:first]) if host.host != own.host][:copies]
