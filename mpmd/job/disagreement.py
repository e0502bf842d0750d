"""Says how the calls of some ranks differ: a pure function of what each rank has noted of one call."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

_MAX_SHOWN = 5
_SAME_VALUES = (
    "  Host arrays, numbers and keys are given alike in every process. What each has a part of is an MpmdArray, or a"
    " jax.Array made by jax.make_array_from_process_local_data."
)
_SAME_CALLS = (
    "  Every process makes the same calls in the same order: steps, evaluations, device_get, reshards. Other static"
    " arguments, shapes or dtypes make another program of a step."
)


class Disagreement(NamedTuple):
    """How the calls of ranks differ.

    Attributes:
      rank: one of the fewest that did something of their own.
      text: what differs, first in one line.
    """

    rank: int
    text: str


def disagreement(said: Mapping[int, Sequence[Any]]) -> Disagreement | None:
    """How the notes of one call differ; None if they do not. A value that a rank cannot tell differs from none.

    Args:
      said: per rank, the plain data of its note.
    """
    where = f" in step {max(step for _, _, step, _ in said.values())}"
    if len(parts := _parted({r: (did, program) for r, (did, program, *_) in said.items()})) > 1:
        dids = [said[ranks[0]][0] for ranks in parts]
        more = [f"{_ranks(ranks)} {did}" for ranks, did in zip(parts[1:], dids[1:], strict=True)]
        if len(set(dids)) == 1:
            more = [f"{_ranks(ranks)} {dids[0]} as another program" for ranks in parts[1:]]
        return Disagreement(parts[1][0], f"{', '.join(more)} where {_ranks(parts[0])} {dids[0]},{where}\n{_SAME_CALLS}")
    did = next(iter(said.values()))[0]
    names = dict.fromkeys(name for *_, values in said.values() for name in values)
    values = {n: {r: given[n] for r, (*_, given) in said.items() if given.get(n) is not None} for n in names}
    unlike = {n: parts for n in names if len(parts := _parted(values[n])) > 1}
    if not unlike:
        return None
    alike: dict[str, list[str]] = {}
    for name, parts in unlike.items():
        alike.setdefault(" and ".join(map(_ranks, parts[1:])) + "|" + _ranks(parts[0]), []).append(name)
    lines = []
    for ranks, names in alike.items():
        odd, _, most = ranks.partition("|")
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        lines.append(f"{odd} gave other values of {', '.join(names[:_MAX_SHOWN])}{more} than {most}")
    head, *rest = lines[:_MAX_SHOWN]
    text = "\n".join([f"{head}{where} ({did.removeprefix('called ')})", *(f"  {line}" for line in rest), _SAME_VALUES])
    return Disagreement(next(iter(unlike.values()))[1][0], text)


def _parted(said: Mapping[int, Hashable]) -> list[list[int]]:
    """The ranks that said the same, together; the most first."""
    parts: dict[Hashable, list[int]] = {}
    for rank, what in sorted(said.items()):
        parts.setdefault(what, []).append(rank)
    return sorted(parts.values(), key=lambda ranks: (-len(ranks), ranks))


def _ranks(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
