"""A search for better orders than the built-in ones, for given costs, placement and memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from scheduler.errors import ScheduleError
from scheduler.optimize.annealing import can_compile, improve
from scheduler.optimize.bounds import Bound, lower_bound
from scheduler.optimize.exact import can_solve, solve
from scheduler.optimize.problem import problem_for
from scheduler.optimize.rankings import neighbour, random_genes, ranking_from
from scheduler.schedules.catalogue import SCHEDULES
from scheduler.schedules.custom import CustomSchedule
from scheduler.schedules.list_scheduling import Problem, list_schedule
from scheduler.schedules.one_f_one_b import ChainSchedule, LoopSchedule
from scheduler.schedules.v_shaped import VSchedule
from scheduler.task import Orders, Pairs
from scheduler.timing.simulate import Costs, Timeline, simulate_orders

_CLOSE = 1e-9
_NOISE = 0.1
# Tasks placed or moved a second by one slow core. The budget of time is spent as a number of tries that follows
# from these, so that a seed gives the same orders on any machine that is not slower.
_PLACED_PER_SECOND = 120_000
_MOVED_PER_SECOND = 900_000
_MOVED_PER_SECOND_COMPILED = 400_000_000


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        schedule: The best orders, ready to run.
        timeline: They on the clock of the costs.
        bound: No order is shorter than this.
        seed_name: The best built-in schedule that fits the placement and the memory; empty if none does.
        seed_makespan: Its makespan; infinite if there is none.
        noisy_gain: The mean gain over that schedule when each cost is off by up to 10%, as a fraction.
        tries: How many orders were looked at.
        complete: False if time ran out before the planned number of tries, so that another run may differ.
        proved: Whether no order is shorter even where the bound is (one stage a group, with OR-tools; to a thousandth
            of a task's time).
    """

    schedule: CustomSchedule
    timeline: Timeline
    bound: Bound
    seed_name: str
    seed_makespan: float
    noisy_gain: float
    tries: int
    complete: bool
    proved: bool

    @property
    def gain(self) -> float:
        """By how much it is shorter than the best built-in schedule, as a fraction of that one."""
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
        if self.proved:
            lines.append("proved: no order is shorter")
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
    """The best order found for given costs; never longer than the best built-in schedule that fits.

    Starts from every built-in schedule with this placement that keeps to the memory, stops at once if one is as short
    as the lower bound, then lets groups take what is due first under many rankings, then improves the best orders by
    small moves. The moves are compiled where numba is installed (``pip install jax-mpmd[search]``), and far more are
    tried then; the same extra has OR-tools, which looks for the best order where each group has one stage.
    :func:`investigate` takes the same arguments and returns all that was found out.

    Args:
        num_stages: The number of stages.
        num_groups: The number of groups.
        num_microbatches: The number of microbatches.
        costs: What tasks take and hold.
        placement: ``"loop"`` (stage s in group s mod num_groups), ``"v"`` (down and up again), or a group for each
            stage.
        memory_limit: The most a group may hold, in the unit of ``costs.activation_bytes``: one number, or one a group.
        seconds: The time to spend, at least 0; the number of tries follows from it.
        seed: For the random choices. Equal arguments give equal orders, with the same extras installed.
        progress: Called with a line of text now and then.

    Raises:
        ScheduleError: No order keeps to the memory limit, or the time ran out before one was found.
        ValueError: An argument is not of the kind described.

    Example:
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
    """What :func:`search` finds, with the bound, the best built-in schedule, and the gain over it."""
    problem = problem_for(num_stages, num_groups, num_microbatches, costs, placement, memory_limit, seconds)
    return _Search(problem, seconds, seed, progress or (lambda line: None)).run()


@dataclass
class _Candidate:
    makespan: float
    orders: Orders
    pairs: Pairs = frozenset()


class _Search:
    def __init__(self, problem: Problem, seconds: float, seed: int, progress: Callable[[str], object]) -> None:
        self.problem = problem
        self.seconds = seconds
        self.seed = seed
        self.random = random.Random(seed)
        self.progress = progress
        self.deadline = time.monotonic() + seconds
        self.bound = lower_bound(problem)
        self.pool: list[_Candidate] = []
        self.tries = 0
        self.complete = True
        self.proved = False

    def run(self) -> Found:
        least = _least(self.problem)
        if any(need > self.problem.limit(group) + _CLOSE for group, need in enumerate(least)):
            needs = ", ".join(f"{need:g} in group {group}" for group, need in enumerate(least))
            raise ScheduleError(
                f"search: no order keeps to memory_limit; the oldest microbatch alone needs {needs}."
                " Raise the limit, or lower activation_bytes (rematerialise)."
            )
        seed_name, best_seed = "", None
        for name, candidate in self._seeds():
            self._add(candidate)
            if best_seed is None or candidate.makespan < best_seed.makespan - _CLOSE:
                seed_name, best_seed = name, candidate
        if best_seed is not None:
            self.progress(f"best built-in: {seed_name} with {best_seed.makespan:g}; bound {self.bound}")
        if not self._done():
            self._rank_randomly()
        if not self.pool:
            raise ScheduleError(
                f"search: the time ran out (seconds={self.seconds:g}) when {self.tries} orders had been tried, before"
                " one was found that keeps to memory_limit. Allow more seconds, or raise the limit."
            )
        exactly = not self._done() and can_solve(self.problem)
        if exactly:
            self._solve()
        if not self._done() and not self.proved:
            self._move(0.25 if exactly else 0.6)
        best = self.pool[0]
        placement = self.problem.placement
        timeline = simulate_orders(
            best.orders, placement, self.problem.num_microbatches, self.problem.costs, name="search"
        )
        return Found(
            CustomSchedule(best.orders, placement, best.pairs),
            timeline,
            self.bound,
            seed_name,
            best_seed.makespan if best_seed else float("inf"),
            self._noisy_gain(best_seed.orders, best.orders) if best_seed else 0.0,
            self.tries,
            self.complete,
            self.proved,
        )

    def _done(self) -> bool:
        return bool(self.pool) and self.pool[0].makespan <= self.bound.makespan * (1 + _CLOSE)

    def _late(self) -> bool:
        if time.monotonic() > self.deadline:
            self.complete = False
            return True
        return False

    def _add(self, candidate: _Candidate) -> None:
        self.tries += 1
        if any(abs(candidate.makespan - known.makespan) < _CLOSE for known in self.pool):
            return
        self.pool.append(candidate)
        self.pool.sort(key=lambda one: one.makespan)
        del self.pool[8:]

    def _seeds(self) -> Iterator[tuple[str, _Candidate]]:
        """Every built-in schedule with this placement that keeps to the memory, as it is and with B split."""
        problem = self.problem
        for name, kind in SCHEDULES.items():
            try:
                if issubclass(kind, ChainSchedule):
                    schedule = kind(problem.num_stages)
                elif issubclass(kind, LoopSchedule):
                    schedule = kind(problem.num_stages, problem.num_groups)
                else:
                    assert issubclass(kind, VSchedule)
                    schedule = kind(problem.num_groups)
                if schedule.placement != problem.placement or schedule.num_groups != problem.num_groups:
                    continue
                orders = schedule.orders(problem.num_microbatches)
                pairs = schedule.fused(problem.num_microbatches)
            except ValueError:
                continue
            whole = self._time(orders)
            if whole is not None:
                yield name, replace(whole, pairs=pairs)
            if any(task.kind == "B" for order in orders for task in order):
                split = self._time(tuple(tuple(part for task in order for part in task.parts) for order in orders))
                if split is not None and (whole is None or split.makespan < whole.makespan - _CLOSE):
                    yield f"{name} with B split", split

    def _time(self, orders: Orders) -> _Candidate | None:
        """The orders with their makespan, or None if they need too much memory."""
        problem = self.problem
        timeline = simulate_orders(orders, problem.placement, problem.num_microbatches, problem.costs)
        for group, peak in enumerate(timeline.peak_bytes):
            if peak > problem.limit(group) + _CLOSE:
                return None
        return _Candidate(timeline.makespan, orders)

    def _rank_randomly(self) -> None:
        """List schedules under many rankings: at first anything, later neighbours of the best so far."""
        problem = self.problem
        tasks = 3 * problem.num_stages * problem.num_microbatches
        count = max(20, int(0.3 * self.seconds * _PLACED_PER_SECOND / tasks))
        best: tuple[float, dict[str, float]] | None = None
        for index in range(count):
            if index and index % 16 == 0 and self._late():  # some are tried however slow the machine is
                break
            genes = random_genes(self.random)
            if best is not None and self.random.random() < 0.6:
                genes = neighbour(self.random, best[1], genes)
            orders = list_schedule(problem, ranking_from(problem, genes))
            if orders is None:
                self.tries += 1
                continue
            candidate = self._time(orders)
            assert candidate is not None
            if best is None or candidate.makespan < best[0] - _CLOSE:
                best = (candidate.makespan, genes)
                self.progress(f"ranking {index + 1} of {count}: {candidate.makespan:g}")
            self._add(candidate)
            if self._done():
                break

    def _solve(self) -> None:
        """One stage a group, and OR-tools installed: the best order, if the time suffices."""
        hint = tuple(tuple(part for task in order for part in task.parts) for order in self.pool[0].orders)
        orders, self.proved = solve(self.problem, hint, 0.2 * self.seconds, self.random.randrange(2**31))
        candidate = self._time(orders)
        if candidate is not None and candidate.makespan < self.pool[0].makespan - _CLOSE:
            self.progress(f"constraint programming: {candidate.makespan:g}{', the best' if self.proved else ''}")
            self._add(candidate)

    def _move(self, share: float) -> None:
        """Small moves, from the best few orders, for a share of the time."""
        problem = self.problem
        compiled = can_compile()
        tasks = 3 * problem.num_stages * problem.num_microbatches
        rate = _MOVED_PER_SECOND_COMPILED if compiled else _MOVED_PER_SECOND
        starts = self.pool[: 4 if compiled else 2]
        rounds = 2
        budget = share * self.seconds * rate / tasks
        steps = max(50, int(budget / len(starts) / rounds))
        times = sum(sum(problem.costs.per_stage(name, problem.num_stages)) for name in _TIMES)
        scale = times / (3 * problem.num_stages) or starts[0].makespan / tasks  # where just transfers take time
        for number, start in enumerate(starts):
            orders = tuple(tuple(part for task in order for part in task.parts) for order in start.orders)
            for index in range(rounds):
                if self._late():
                    return
                makespan, orders = improve(
                    problem,
                    orders,
                    steps=steps,
                    hot=0.08 * scale / (1 + index),
                    cold=0.006 * scale,
                    target=self.bound.makespan * (1 + _CLOSE),
                    seed=self.random.randrange(2**31),
                    compiled=compiled,
                )
                self.tries += steps
                if makespan < self.pool[0].makespan - _CLOSE:
                    self.progress(f"moves, start {number + 1}, round {index + 1} of {rounds}: {makespan:g}")
                    self._add(_Candidate(makespan, orders))
                if self._done():
                    return

    def _noisy_gain(self, before: Orders, after: Orders, samples: int = 12) -> float:
        """The mean gain when every cost is off by up to a tenth."""
        problem, rng = self.problem, random.Random(self.seed + 1)
        gains = []
        for _ in range(samples):
            changed = {
                name: tuple(
                    value * (1 + rng.uniform(-_NOISE, _NOISE))
                    for value in problem.costs.per_stage(name, problem.num_stages)
                )
                for name in _TIMES
            }
            costs = replace(problem.costs, **changed)
            spans = [
                simulate_orders(orders, problem.placement, problem.num_microbatches, costs).makespan
                for orders in (before, after)
            ]
            gains.append(1 - spans[1] / spans[0] if spans[0] else 0.0)
        return sum(gains) / len(gains)


_TIMES = ("forward", "input_grad", "weight_grad")


def _least(problem: Problem) -> list[float]:
    need = problem.needed_to_start()
    return [
        max((need[stage] for stage in problem.stages_of(group)), default=0.0) for group in range(problem.num_groups)
    ]
