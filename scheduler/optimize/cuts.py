"""Chooses the cut of a model into stages: the shortest simulated step that fits the memory of the groups.

First a dynamic program finds the cut with the least lower bound; this bound holds for every cut. Then that cut and the
even one are improved by moving layers, with each candidate on the clock. Then branch and bound searches all cuts
with a bound below the best makespan, within a budget; if it finishes, no cut is better. Where one stage dominates (a
large head), different cuts of the other stages take equally long; the most even one is chosen, for costs are estimates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from scheduler.optimize.units import CutProblem, Layers, Units, even_layers
from scheduler.task import Schedule

_BUDGET = 300_000
"""Tasks put on the clock by each of the two searches: about a quarter of a second together. A number and not a time, so
that all processes of a job choose alike."""
_NODE = 8
"""The cost of a node of branch and bound, in tasks."""
_GAIN = 1 - 1e-9


@dataclass(frozen=True)
class Cut:
    """A cut of a model into stages, and the cost of others.

    Attributes:
        near, near_makespan: The best cut with one layer in another stage, and its seconds; the cut itself if there is
            no other. If the even cut is chosen because it is about as fast: the fastest cut.
    """

    layers: Layers  # For each stage, the number of layers that end in it
    makespan: float  # Seconds of the simulated loop
    bound: float  # A lower bound for all cuts, in seconds
    is_best: bool  # Whether it is proved that no cut is faster
    excess: float  # Bytes by which the worst group exceeds its memory; 0 if it fits
    even: Layers  # The even cut
    even_makespan: float
    even_excess: float  # Bytes by which the even cut exceeds the memory
    near: Layers
    near_makespan: float
    units: Units = field(repr=False)  # The costs by which the cut was chosen

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a fraction of the bound."""
        return self.makespan / self.bound - 1 if self.bound else 0.0


def choose_cut(
    units: Units,
    schedule: Schedule,
    num_microbatches: int,
    memory_limit: tuple[float, ...] | None = None,
    budget: int = _BUDGET,
) -> Cut:
    """Returns the best cut found: exact for small models (`.is_best`), never worse than the even cut.

    If no cut fits the memory, it is the cut that exceeds it least.

    Args:
      schedule: The schedule, which determines the number of stages.
      memory_limit: Bytes that each group may use.
      budget: How much to search: the number of tasks to put on the clock.

    Raises:
      ValueError: There are fewer places than stage ends.

    Examples:
      >>> from scheduler import OneFOneB
      >>> layer = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0)   # five layers, and a head as heavy as two
      >>> choose_cut(Units(layer, layer, layer), OneFOneB(3), 8).layers
      (3, 2, 0)
    """
    if units.num_places < schedule.num_stages - 1:
        raise ValueError(f"{units.num_places} places where a stage may end are too few for {schedule}.")
    problem = CutProblem(units, schedule, num_microbatches, memory_limit)
    even = even_layers(units.num_places, problem.num_stages)
    search = _CutSearch(problem, even, budget)
    bound, start = search.least_bound()
    for cut in (even, start):
        search.improve(cut)
    is_best = search.branch_and_bound()
    best = search.best
    search.left = budget // 4
    near = search.best_moved(best, math.inf)
    if _is_better(problem.evaluate(near), problem.evaluate(best)):
        best, near = near, best
    best = search.evened(best)
    excess, makespan = problem.evaluate(best)
    even_excess, even_makespan = problem.evaluate(even)
    if is_best and not excess:
        bound = makespan
    return Cut(
        best, makespan, min(max(bound, problem.load_bound()), makespan), is_best, excess, even, even_makespan,
        even_excess, near, problem.evaluate(near)[1], units,
    )  # fmt: skip


def _moved(layers: Layers) -> Iterator[Layers]:
    """Yields the cuts with one layer in another stage."""
    last = len(layers) - 1
    for source, count in enumerate(layers):
        if count > (source < last):
            for target in range(len(layers)):
                if target != source:
                    new = list(layers)
                    new[source] -= 1
                    new[target] += 1
                    yield tuple(new)


class _CutSearch:
    """The best cut so far, and ways to improve it."""

    def __init__(self, problem: CutProblem, start: Layers, budget: int) -> None:
        self.problem, self.best, self.budget = problem, start, budget
        self.left = budget
        self._bounds: dict[tuple[int, int, int], float] = {}
        self._rest: list[list[float]] = []

    def bound(self, stage: int, first: int, stop: int) -> float:
        key = stage, first, stop
        if (found := self._bounds.get(key)) is None:
            found = self._bounds[key] = self.problem.bound(stage, first, stop)
        return found

    def stops(self, stage: int, first: int) -> range:
        """Returns where a stage that begins at unit `first` may stop."""
        last, num_units = self.problem.num_stages - 1, len(self.problem.units.forward)
        return range(num_units, num_units + 1) if stage == last else range(first + 1, num_units - (last - stage) + 1)

    def least_bound(self) -> tuple[float, Layers]:
        """Returns the least lower bound of any cut, and a cut that has it (the even one if nothing fits)."""
        p = self.problem
        num_units = len(p.units.forward)
        rest = [[math.inf] * (num_units + 1) for _ in range(p.num_stages + 1)]
        rest[-1][num_units] = -math.inf
        chosen = [[0] * (num_units + 1) for _ in range(p.num_stages)]
        for stage in reversed(range(p.num_stages)):
            for first in range(stage, num_units if stage else 1):
                for stop in self.stops(stage, first):
                    behind = rest[stage + 1][stop]
                    own = self.bound(stage, first, stop)
                    if max(own, behind) < rest[stage][first]:
                        rest[stage][first], chosen[stage][first] = max(own, behind), stop
                    if own >= rest[stage][first]:
                        break  # more units in this stage do not lower its bound
        self._rest = rest
        if rest[0][0] == math.inf:
            return 0.0, self.best
        layers, first = [], 0
        for stage in range(p.num_stages):
            stop = chosen[stage][first]
            layers.append(stop - first)
            first = stop
        layers[-1] -= 1  # the last unit does not end with a place
        return rest[0][0], tuple(layers)

    def bound_of(self, layers: Layers) -> float:
        """Returns a lower bound of one cut."""
        return max(self.bound(stage, a, b) for stage, (a, b) in enumerate(self.problem.spans(layers)))

    def best_moved(self, layers: Layers, limit: float) -> Layers:
        """Returns the best of the cuts with one layer in another stage, if it takes less than `limit`; else `layers`.

        The most promising cuts come first, and cuts with a bound no better than the best so far are skipped.
        """
        p = self.problem
        fits = not p.evaluate(layers)[0]
        found, value = layers, (0.0 if fits else math.inf, limit)
        for bound, moved in sorted((self.bound_of(cut) if fits else 0.0, cut) for cut in _moved(layers)):
            if bound >= value[1] * _GAIN and fits:
                break
            if self.left < 0:
                break
            self.left -= p.replay.num_tasks
            if _is_better(p.evaluate(moved), value):
                found, value = moved, p.evaluate(moved)
        return found

    def improve(self, start: Layers) -> None:
        """Moves one layer at a time, the best move first, as long as that helps."""
        p = self.problem
        self.left = self.budget // 2
        here = start
        while _is_better(p.evaluate(moved := self.best_moved(here, p.evaluate(here)[1])), p.evaluate(here)):
            here = moved
        if _is_better(p.evaluate(here), p.evaluate(self.best)):
            self.best = here

    def evened(self, layers: Layers) -> Layers:
        """Returns the cut with layers moved as long as it takes no longer and the groups' work becomes more even."""
        p = self.problem
        self.left = self.budget // 4
        here, limit = layers, p.evaluate(layers)
        while True:
            bound = p.unevenness(here) * _GAIN
            for moved in sorted((one for one in _moved(here) if p.unevenness(one) < bound), key=p.unevenness):
                self.left -= p.replay.num_tasks
                if self.left < 0:
                    return here
                if not _is_better(limit, p.evaluate(moved)):
                    here = moved  # less uneven each time
                    break
            else:
                return here

    def branch_and_bound(self) -> bool:
        """Searches all cuts that may be better; returns whether it finished within the budget."""
        p = self.problem
        left = self.budget
        excess, limit = p.evaluate(self.best)
        limit = math.inf if excess else limit
        stack: list[tuple[int, ...]] = [(0,)]
        while stack:
            starts = stack.pop()
            stage, first = len(starts) - 1, starts[-1]
            if self._rest[stage][first] >= limit * _GAIN:
                continue
            if stage == p.num_stages - 1:
                layers = (*(b - a for a, b in pairwise(starts)), p.units.num_places - first)
                left -= p.replay.num_tasks
                over, makespan = p.evaluate(layers)
                if not over and makespan < limit * _GAIN:
                    self.best, limit = layers, makespan
            else:
                for stop in self.stops(stage, first):
                    if max(self.bound(stage, first, stop), self._rest[stage + 1][stop]) < limit * _GAIN:
                        stack.append((*starts, stop))
                        left -= _NODE
            if left < 0:
                return False
        return True


def _is_better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1] * _GAIN)
