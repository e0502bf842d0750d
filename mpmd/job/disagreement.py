"""Describes how the calls of some ranks differ: a pure function of each rank's note of one call."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

_MAX_SHOWN = 5
_MAX_SHOWN_TEXT = 120
_SAME_VALUES = (
    "  Host arrays, numbers and keys are given alike in every process. What each has a part of is an MpmdArray, or a"
    " jax.Array made by jax.make_array_from_process_local_data. A state is the result of the same call in every"
    " process. If one process made a call more than the others, this is where they begin to differ."
)
_SAME_CALLS = (
    "  Every process makes the same calls in the same order: steps, evaluations, device_get, reshards, saves, restores."
    " Other static arguments, shapes or dtypes make another program of a step."
)


class Disagreement(NamedTuple):
    """How the calls of ranks differ."""

    rank: int  # a rank that differs from most others
    text: str  # the difference, first in one line


def disagreement(said: Mapping[int, Sequence]) -> Disagreement | None:
    """Returns how the ranks' notes of one call, as plain data, differ; None if they do not. A value that a rank cannot
    read equals any other.
    """
    said = dict(sorted(said.items()))
    parts = _parted({r: (did, program) for r, (did, program, *_) in said.items()})
    dids = [said[ranks[0]][0] for ranks in parts]
    where = f"in step {max(step for _, _, step, *_ in said.values())}"
    is_one_step = len(set(dids)) == 1
    if len(parts) == 1:
        makers, values = ({r: note[k] for r, note in said.items()} for k in (-4, -3))
        found = _other_kinds(values) + _other_values(values, "gave other values of")
        found, rule = found + _other_values(makers, "gave other results as"), _SAME_VALUES
    else:
        found, rule = [], _SAME_CALLS
        if is_one_step:
            found = other_ways({r: types for r, (*_, types, _) in said.items()})
            found = found or other_ways({r: structure for r, (*_, structure) in said.items()})
        if not found:
            more = " as another program" * is_one_step
            others = [f"{_ranks(ranks)} {did}{more}" for ranks, did in zip(parts[1:], dids[1:], strict=True)]
            line = f"{', '.join(others)} where {_ranks(parts[0])} {dids[0]}, {where}"
            return Disagreement(parts[1][0], f"{line}\n{rule}")
    if not found:
        return None
    (rank, head), *rest = found[:_MAX_SHOWN]
    head = f"{head} {where} ({dids[0].removeprefix('called ')})"
    return Disagreement(rank, "\n".join([head, *(f"  {line}" for _, line in rest), rule]))


def _other_kinds(values: Mapping[int, Mapping[str, str | None]]) -> list[tuple[int, str]]:
    """Returns a line for each argument that only some ranks gave from their host, with one of these ranks.

    The others gave arrays on devices, such as results of a step, and nobody knows whether these hold the same.
    """
    found, way = [], {True: "from the host", False: "as an array on devices"}
    for name in dict.fromkeys(name for given in values.values() for name in given):
        most, *others = _parted({r: name in given for r, given in values.items()})
        for odd in others:
            is_host = name in values[odd[0]]
            found.append((odd[0], f"{_ranks(odd)} gave {name} {way[is_host]}, {_ranks(most)} {way[not is_host]}"))
    return found


def _other_values(values: Mapping[int, Mapping[str, str | None]], did: str) -> list[tuple[int, str]]:
    """Returns lines about the arguments for which some ranks gave other values, each with one of these ranks."""
    names = dict.fromkeys(name for given in values.values() for name in given)
    told = {n: {r: given[n] for r, given in values.items() if given.get(n) is not None} for n in names}
    alike: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, of_ranks in told.items():
        if len(parts := _parted(of_ranks)) > 1:
            alike.setdefault(tuple(map(tuple, parts)), []).append(name)
    found = []
    for (most, *others), names in alike.items():
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        odd, named = " and ".join(map(_ranks, others)), ", ".join(names[:_MAX_SHOWN])
        found.append((others[0][0], f"{odd} {did} {named}{more} than {_ranks(most)}"))
    return found


def other_ways(given: Mapping[int, Mapping[str, str]]) -> list[tuple[int, str]]:
    """Returns a line for each argument that some ranks gave in another way, with one of these ranks.

    Args:
      given: per rank, the way in which it gave each argument, such as `{"x": "as float32[8]"}`.
    """
    found = []
    for name in dict.fromkeys(name for ways in given.values() for name in ways):
        ways = {r: of_rank.get(name, "not at all") for r, of_rank in given.items()}
        most, *others = _parted(ways)
        if others:
            ways = _from_difference(ways)
            (first, *rest), way = [*others, most], ways[others[0][0]]
            told = [f"{_ranks(ranks)} {ways[ranks[0]]}" for ranks in rest]
            found.append((first[0], f"{_ranks(first)} gave {name} {way}, {', '.join(told)}"))
    return found


def _from_difference(ways: Mapping[int, str]) -> Mapping[int, str]:
    """Cuts long texts: they begin a little before the place where they differ."""
    if max(map(len, ways.values())) <= _MAX_SHOWN_TEXT:
        return ways
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*ways.values(), strict=False))
    start = max(0, sum(1 for _ in same) - _MAX_SHOWN_TEXT // 2)
    before = "..." * (start > 0)
    return {
        r: f"{before}{text[start : start + _MAX_SHOWN_TEXT]}{'...' * (start + _MAX_SHOWN_TEXT < len(text))}"
        for r, text in ways.items()
    }


def _parted(said: Mapping[int, Hashable]) -> list[list[int]]:
    """Groups the ranks with equal values, the largest group first."""
    parts: dict[Hashable, list[int]] = {}
    for rank, what in said.items():
        parts.setdefault(what, []).append(rank)
    return sorted(parts.values(), key=lambda ranks: (-len(ranks), ranks))


def _ranks(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
