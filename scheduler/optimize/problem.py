"""Checks the arguments of a search and makes one problem of them."""

import math
from collections.abc import Sequence

from scheduler.schedules.list_scheduling import Problem
from scheduler.schedules.v_shaped import v_placement
from scheduler.task import check_count, per_group
from scheduler.timing.costs import Costs


def problem_for(
    num_stages: int,
    num_groups: int,
    num_microbatches: int,
    costs: Costs | None,
    placement: str | Sequence[int],
    memory_limit: float | Sequence[float] | None,
    seconds: float,
) -> Problem:
    """Returns the problem for the arguments of :func:`scheduler.search`, which it checks."""
    check_count("search", "num_stages", num_stages)
    check_count("search", "num_groups", num_groups)
    check_count("search", "num_microbatches", num_microbatches)
    if placement == "loop":
        groups = tuple(stage % num_groups for stage in range(num_stages))
    elif placement == "v":
        if num_stages != 2 * num_groups:
            raise ValueError(f"search: placement 'v' needs two stages a group; received {num_stages} and {num_groups}.")
        groups = v_placement(num_groups)
    elif isinstance(placement, str):
        raise ValueError(f"search: placement is {placement!r}; expected 'loop', 'v', or a group for each stage.")
    else:
        groups = tuple(placement)
        if len(groups) != num_stages or any(group not in range(num_groups) for group in groups):
            raise ValueError(
                f"search: placement is {groups}; expected {num_stages} groups, each from 0 to {num_groups - 1}."
            )
    if not 0 <= seconds < math.inf:
        raise ValueError(f"search: seconds is {seconds!r}; expected a number of at least 0.")
    limits: tuple[float, ...] = ()
    if memory_limit is not None:
        limits = per_group("search: memory_limit", memory_limit, num_groups)
        if not all(limit >= 0 for limit in limits):
            raise ValueError(f"search: memory_limit is {memory_limit!r}; expected numbers of at least 0.")
    return Problem(groups, num_groups, num_microbatches, costs or Costs(), limits)
