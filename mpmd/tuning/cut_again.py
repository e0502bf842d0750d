"""Cuts a step again by the measured times of its tasks, which replace the estimated costs of layers."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from mpmd.cutting.choose import limits_of
from mpmd.cutting.cut import with_given_cuts
from mpmd.graphs.scheduled_loop import ScheduledLoop
from scheduler import Costs
from scheduler.optimize.cuts import choose_cut
from scheduler.optimize.units import CutProblem, Units

WORTHWHILE = 0.02  # another cut is tried if it saves more than this share of the time


class Recut(NamedTuple):
    """The prediction for a configuration from measured layers."""

    number: int  # the number of the configuration
    cuts: tuple[int, ...] | None  # another cut that takes less time; None if there is no better one
    own: Costs  # seconds of its tasks with its own cut
    costs: Costs  # seconds of its tasks with the other cut


def loop_info(lowered: Any) -> ScheduledLoop | None:
    """Returns the loop of a lowered step that is cut by layers; None if it has none or several, or marks end stages."""
    loops = lowered._outline.loops
    if len(loops) != 1 or loops[0].partition.info.cuts is None:
        return None
    return loops[0].partition.info


def units_of(lowered: Any) -> Units | None:
    """Returns the estimated costs of layers, if the cut was chosen by them."""
    info = loop_info(lowered)
    return None if info is None or info.choice is None else info.choice.units


def measured_units(lowered: Any, units: Units, costs: Costs) -> Units:
    """Returns the costs of layers from measured tasks."""
    info = loop_info(lowered)
    assert info is not None and info.cuts is not None
    return units.measured(CutProblem(units, info.schedule, info.num_microbatches).spans(info.cuts), costs)


def recuts(units: Units, measured: int, lowered: dict[int, Any], limit: float | None) -> Iterator[Recut]:
    """Yields predictions from the layers of a measured configuration, for it and others with equally many microbatches.

    `measured` and the keys of `lowered` are numbers of configurations; `limit` is bytes on each device.
    """
    first = loop_info(lowered[measured])
    assert first is not None
    best = float("inf")
    for number in [measured, *(n for n in lowered if n != measured)]:
        info = loop_info(lowered[number])
        if info is None or info.cuts is None or info.num_microbatches != first.num_microbatches:
            continue
        if not sum(info.cuts) <= units.num_places:
            continue  # the layers belong to other microbatches, or to another model
        problem = CutProblem(units, info.schedule, info.num_microbatches)
        now = problem.evaluate(info.cuts)[1]
        found = choose_cut(units, info.schedule, info.num_microbatches, limits_of(units, info.schedule, limit))
        own = problem.costs(info.cuts)
        better = found.makespan < now * (1 - WORTHWHILE) and not found.excess and found.makespan < best
        best = min(best, now, found.makespan)
        yield Recut(number, found.layers if better else None, own, problem.costs(found.layers) if better else own)


def with_cuts(traced: Any, cuts: tuple[int, ...]) -> Any:
    """Returns a traced step with other cuts of its loop."""
    return dataclasses.replace(traced, _trace=with_given_cuts(traced._trace, cuts))
