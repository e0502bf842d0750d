"""A search for better orders than the built-in ones, for given costs, placement and memory."""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import add, mul

from scheduler.errors import ScheduleError
from scheduler.optimize.annealing import can_compile, improve
from scheduler.optimize.bounds import Bound, lower_bound
from scheduler.optimize.problem import problem_for
from scheduler.ordering import with_recomputing
from scheduler.schedules.building_block import blocks_within, orders_of
from scheduler.schedules.catalogue import SCHEDULES, make
from scheduler.schedules.custom import CustomSchedule
from scheduler.schedules.list_scheduling import Problem, list_schedule
from scheduler.schedules.rankings import Genes, neighbour, random_genes, ranking_from
from scheduler.schedules.v_shaped import v_placement
from scheduler.task import Orders, Pairs
from scheduler.timing.costs import Costs
from scheduler.timing.simulate import simulate_orders
from scheduler.timing.timeline import Timeline

_CLOSE = 1e-9
_NOISE = 0.1
_SAMPLES = 12
# Tasks placed or moved a second by one slow core. The time budget is converted to a number of tries with these
# rates, so that a seed leads to the same orders on any machine that is not slower.
_PLACED_PER_SECOND = 120_000
_ORDERS_PER_BLOCK = 8
_MOVED_PER_SECOND = 900_000
_MOVED_PER_SECOND_COMPILED = 400_000_000


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        schedule: The best orders, ready to run.
        timeline: The best orders on the clock of the costs.
        bound: No order is shorter than this.
        seed_name: The best built-in schedule that fits the placement and the memory; empty if none does.
        seed_makespan: The makespan of that schedule; infinite if there is none.
        noisy_gain: The mean gain over that schedule if each cost is off by up to 10%, as a fraction.
        tries: The number of orders tried.
        complete: False if time ran out before the planned number of tries, so that another run may differ.
    """

    schedule: CustomSchedule
    timeline: Timeline
    bound: Bound
    seed_name: str
    seed_makespan: float
    noisy_gain: float
    tries: int
    complete: bool

    @property
    def gain(self) -> float:
        """By how much it is shorter than the best built-in schedule, as a fraction of that schedule's makespan."""
        return 1 - self.timeline.makespan / self.seed_makespan if self.seed_name and self.seed_makespan else 0.0

    @property
    def at_bound(self) -> bool:
        return self.timeline.makespan <= self.bound.makespan * (1 + _CLOSE)

    def __str__(self) -> str:
        makespan = self.timeline.makespan
        distance = "at the bound" if self.at_bound else f"{self.bound.above(makespan):.1%} above the bound"
        lines = [f"makespan {makespan:g}, {distance} {self.bound}"]
        if self.seed_name:
            lines.append(
                f"best built-in that fits: {self.seed_name} with {self.seed_makespan:g}; "
                f"gain {self.gain:.1%}, and {self.noisy_gain:.1%} on average with costs off by up to {_NOISE:.0%}"
            )
        else:
            lines.append("no built-in schedule fits this placement and memory")
        held = ", ".join(f"{nbytes:g}" for nbytes in self.timeline.peak_bytes)
        lines.append(f"most held in each group: {held}; {self.tries} orders tried")
        if not self.complete:
            lines.append("time ran out before all planned tries: another run may end elsewhere")
        return "\n".join(lines)


def search(
    num_stages: int,
    num_groups: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    placement: str | Sequence[int] = "loop",
    memory_limit: float | Sequence[float] | None = None,
    seconds: float = 10,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> CustomSchedule:
    """Returns the best order found for given costs; never longer than the best built-in schedule that fits.

    Starts from every built-in schedule with this placement that keeps to the memory, and stops at once if one is as
    short as the lower bound. For a V it then repeats many building blocks that fit into the memory, including ones
    between the built-in V schedules. Then it tries list scheduling under many rankings, and improves the best orders by
    small moves. The moves are compiled if numba is installed (extra ``search``), and far more are tried then.
    :func:`investigate` takes the same arguments and returns all that was found out.

    Args:
        num_stages: The number of stages.
        num_groups: The number of groups.
        num_microbatches: The number of microbatches.
        costs: The time and memory of tasks, of all microbatches or of each. Microbatches stay in their order
            (:func:`order_microbatches` finds a better one).
        placement: ``"loop"`` (stage s in group s mod num_groups), ``"v"`` (down and up again), or a group for each
            stage.
        memory_limit: The most a group may hold, in the unit of ``costs.activation_bytes``: one number, or one a group.
        seconds: The time to spend, at least 0; the number of tries follows from it. However short it is, all built-in
            schedules and some rankings are tried: that took 7 s for 32 stages and 96 microbatches.
        seed: The seed of the random choices. Equal arguments return equal orders, with the same extras installed.
        progress: Called with a line of text now and then.

    Raises:
        ScheduleError: No order keeps to the memory limit, or the time ran out before one was found.
        ValueError: An argument is not as described.

    Examples:
        >>> from scheduler import ZeroBubbleV, simulate
        >>> costs = Costs(forward=(1.0, 1.0, 1.0, 2.0))
        >>> found = search(4, 2, 4, costs, placement="v", seconds=0.2)
        >>> simulate(found, 4, costs).makespan <= simulate(ZeroBubbleV(2), 4, costs).makespan
        True
    """
    return investigate(
        num_stages,
        num_groups,
        num_microbatches,
        costs,
        placement=placement,
        memory_limit=memory_limit,
        seconds=seconds,
        seed=seed,
        progress=progress,
    ).schedule


def investigate(
    num_stages: int,
    num_groups: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    placement: str | Sequence[int] = "loop",
    memory_limit: float | Sequence[float] | None = None,
    seconds: float = 10,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> Found:
    """Returns the result of :func:`search` with the bound, the best built-in schedule, and the gain over it."""
    problem = problem_for(num_stages, num_groups, num_microbatches, costs, placement, memory_limit, seconds)
    return _OrderSearch(problem, seconds, seed, progress or (lambda line: None)).run()


@dataclass
class _Candidate:
    makespan: float
    orders: Orders
    pairs: Pairs = frozenset()


class _Pool:
    """The best candidates so far, shortest first, with different makespans."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.candidates: list[_Candidate] = []
        self.tries = 0  # The number of orders tried

    @property
    def best(self) -> _Candidate:
        return self.candidates[0]

    def add(self, candidate: _Candidate) -> None:
        self.tries += 1
        if any(abs(candidate.makespan - known.makespan) < _CLOSE for known in self.candidates):
            return
        self.candidates.append(candidate)
        self.candidates.sort(key=lambda one: one.makespan)
        del self.candidates[8:]

    def improves(self, makespan: float) -> bool:
        return makespan < self.best.makespan - _CLOSE

    def is_at_bound(self) -> bool:
        """Returns whether the search is done: no order is shorter."""
        return bool(self.candidates) and self.best.makespan <= self.bound.makespan * (1 + _CLOSE)


class _OrderSearch:
    def __init__(self, problem: Problem, seconds: float, seed: int, progress: Callable[[str], object]) -> None:
        self.problem = problem
        self.joined = replace(problem, costs=_joined(problem.costs, problem.num_stages))
        """The problem for methods that know no R: it is part of I."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.is_late = False
        """Whether the search has stopped because of the time."""
        self.seed = seed
        self.random = random.Random(seed)
        self.progress = progress
        self.pool = _Pool(lower_bound(problem))

    def run(self) -> Found:
        self._check_memory()
        pool = self.pool
        seed_name, best_seed = "", None
        for name, candidate in _seeds(self.problem):
            pool.add(candidate)
            if best_seed is None or candidate.makespan < best_seed.makespan - _CLOSE:
                seed_name, best_seed = name, candidate
        if best_seed is not None:
            self.progress(f"best built-in: {seed_name} with {best_seed.makespan:g}; bound {pool.bound}")
        self._improve()
        best = pool.best
        return Found(
            CustomSchedule(best.orders, self.problem.placement, best.pairs),
            _simulated(self.problem, best),
            pool.bound,
            seed_name,
            best_seed.makespan if best_seed else math.inf,
            _noisy_gain(self.problem, best_seed, best, self.seed + 1) if best_seed else 0.0,
            pool.tries,
            not self.is_late,
        )

    def _check_memory(self) -> None:
        problem, need = self.problem, list(map(max, zip(*self.problem.needed_to_start(), strict=True)))
        least = [max((need[s] for s in problem.stages_of(group)), default=0.0) for group in range(problem.num_groups)]
        if any(nbytes > problem.limit(group) + _CLOSE for group, nbytes in enumerate(least)):
            needs = ", ".join(f"{nbytes:g} in group {group}" for group, nbytes in enumerate(least))
            raise ScheduleError(
                f"search: no order keeps to memory_limit; the oldest microbatch alone needs {needs}."
                " Raise the limit, or lower activation_bytes (rematerialise)."
            )

    def _is_over(self) -> bool:
        self.is_late = self.is_late or time.monotonic() > self.deadline
        return self.is_late

    def _improve(self) -> None:
        """Tries each way to better orders in turn, until the bound is reached or the time is over."""
        if not self.pool.is_at_bound() and self.problem.placement == v_placement(self.problem.num_groups):
            self._repeat_blocks()
        if not self.pool.is_at_bound():
            self._rank_randomly()
        if not self.pool.candidates:
            raise ScheduleError(
                f"search: the time ran out (seconds={self.seconds:g}) when {self.pool.tries} orders had been"
                " tried, before one was found that keeps to memory_limit. Allow more seconds, or raise the limit."
            )
        if not self.pool.is_at_bound():
            self._anneal()

    def _repeat_blocks(self) -> None:
        """Repeats building blocks with activations that fit into the memory, as V-half and V-min do with one or two."""
        problem, pool = self.problem, self.pool
        held = problem.costs.of_mean(problem.num_stages).per_stage("activation_bytes", problem.num_stages)
        fewest = min(map(problem.limit, range(problem.num_groups)))
        memory = int(min(problem.num_stages, fewest / max(held) + _CLOSE)) if max(held) else problem.num_stages
        count = int(0.1 * self.seconds * _PLACED_PER_SECOND / (problem.num_tasks * _ORDERS_PER_BLOCK))
        for block in islice(blocks_within(problem.num_groups, problem.num_microbatches, memory), count):
            for orders in orders_of(block, problem, memory):
                candidate = _timed(problem, orders)
                if candidate is None:
                    pool.tries += 1
                    continue
                if not pool.candidates or pool.improves(candidate.makespan):
                    self.progress(f"building block: {candidate.makespan:g}")
                pool.add(candidate)
            if self._is_over() or pool.is_at_bound():
                break

    def _rank_randomly(self) -> None:
        """Makes list schedules under many rankings: at first random ones, later neighbours of the best so far."""
        problem = self.joined
        count = max(20, int(0.3 * self.seconds * _PLACED_PER_SECOND / problem.num_tasks))
        best: tuple[float, Genes] | None = None
        for index in range(count):
            if index and index % 16 == 0 and self._is_over():  # some are tried however slow the machine is
                break
            genes = random_genes(self.random)
            if best is not None and self.random.random() < 0.6:
                genes = neighbour(self.random, best[1], genes)
            orders = list_schedule(problem, ranking_from(problem, genes))
            if orders is None:
                self.pool.tries += 1
                continue
            candidate = _timed(self.problem, orders)
            assert candidate is not None
            if best is None or candidate.makespan < best[0] - _CLOSE:
                best = (candidate.makespan, genes)
                self.progress(f"ranking {index + 1} of {count}: {candidate.makespan:g}")
            self.pool.add(candidate)
            if self.pool.is_at_bound():
                break

    def _anneal(self) -> None:
        """Makes small moves, from the best few orders, for most of the time."""
        problem, pool, compiled = self.joined, self.pool, can_compile()
        rate = _MOVED_PER_SECOND_COMPILED if compiled else _MOVED_PER_SECOND
        starts = pool.candidates[: 4 if compiled else 2]
        rounds = 2
        budget = 0.6 * self.seconds * rate / problem.num_tasks
        steps = max(50, int(budget / len(starts) / rounds))
        mean = problem.costs.of_mean(problem.num_stages)
        times = sum(map(sum, mean.seconds(problem.num_stages).values()))
        # The mean task, if tasks take time; otherwise the mean share of the makespan.
        scale = times / (3 * problem.num_stages) or starts[0].makespan / problem.num_tasks
        for number, start in enumerate(starts):
            orders = _split(start.orders)
            for index in range(rounds):
                if self._is_over():
                    return
                _, orders = improve(
                    problem,
                    orders,
                    steps=steps,
                    hot=0.08 * scale / (1 + index),
                    cold=0.006 * scale,
                    target=pool.bound.makespan * (1 + _CLOSE),
                    seed=self.random.randrange(2**31),
                    compiled=compiled,
                )
                pool.tries += steps
                candidate = _timed(self.problem, orders)
                if candidate is not None and pool.improves(candidate.makespan):
                    self.progress(f"moves, start {number + 1}, round {index + 1} of {rounds}: {candidate.makespan:g}")
                    pool.add(candidate)
                if pool.is_at_bound():
                    return


def _seeds(problem: Problem) -> Iterator[tuple[str, _Candidate]]:
    """Yields every built-in schedule with this placement that keeps to the memory, as it is and with B split."""
    for name in SCHEDULES:
        try:
            schedule = make(name, problem.num_stages, problem.num_groups)
            if schedule.placement != problem.placement or schedule.num_groups != problem.num_groups:
                continue
            orders = schedule.orders(problem.num_microbatches)
            pairs = schedule.fused(problem.num_microbatches)
        except ValueError:
            continue
        whole = _timed(problem, orders, pairs)
        if whole is not None:
            yield name, whole
        if any(task.kind == "B" for order in orders for task in order):
            halves = _timed(problem, _split(orders))
            if halves is not None and (whole is None or halves.makespan < whole.makespan - _CLOSE):
                yield f"{name} with B split", halves


def _split(orders: Orders) -> Orders:
    """Returns the orders with I and W instead of each B."""
    return tuple(tuple(part for task in order for part in task.parts) for order in orders)


def _simulated(problem: Problem, candidate: _Candidate, costs: Costs | None = None) -> Timeline:
    """Runs the orders on the clock, with the R of their stages."""
    stages = problem.costs.recomputed(problem.num_stages)
    orders = with_recomputing(candidate.orders, stages, candidate.pairs) if stages else candidate.orders
    return simulate_orders(orders, problem.placement, problem.num_microbatches, costs or problem.costs, name="search")


def _timed(problem: Problem, orders: Orders, pairs: Pairs = frozenset()) -> _Candidate | None:
    """Returns the orders with their makespan, or None if they need too much memory."""
    timeline = _simulated(problem, candidate := _Candidate(math.inf, orders, pairs))
    if any(peak > problem.limit(group) + _CLOSE for group, peak in enumerate(timeline.peak_bytes)):
        return None
    return replace(candidate, makespan=timeline.makespan)


def _noisy_gain(problem: Problem, before: _Candidate, after: _Candidate, seed: int) -> float:
    """Returns the mean gain if every cost is off by up to a tenth."""
    rng = random.Random(seed)
    gains = []
    for _ in range(_SAMPLES):
        n = problem.num_stages
        off = [[1 + rng.uniform(-_NOISE, _NOISE) for _ in range(n)] for _ in range(3)]
        every = problem.of_microbatches() if problem.costs.microbatches else []
        costs = replace(_off(problem.costs, n, off), microbatches=[_off(one, n, off) for one in every])
        spans = [_simulated(problem, one, costs).makespan for one in (before, after)]
        gains.append(1 - spans[1] / spans[0] if spans[0] else 0.0)
    return sum(gains) / len(gains)


def _joined(costs: Costs, num_stages: int) -> Costs:
    """Returns the costs with R as a part of I."""
    if not costs.recomputed(num_stages):
        return costs
    both = (costs.per_stage(name, num_stages) for name in ("input_grad", "recompute"))
    every = [_joined(one, num_stages) for one in costs.microbatches if isinstance(one, Costs)]
    return replace(costs, input_grad=tuple(map(add, *both)), recompute=0.0, microbatches=every)


def _off(costs: Costs, num_stages: int, factors: Sequence[Sequence[float]]) -> Costs:
    """Returns costs with the seconds of F, I and W multiplied by a factor for each stage."""
    rows = zip(costs.seconds(num_stages).values(), factors, strict=True)
    changed = (tuple(map(mul, seconds, row)) for seconds, row in rows)
    return replace(costs, **dict(zip(("forward", "input_grad", "weight_grad"), changed, strict=True)))
