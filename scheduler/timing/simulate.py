"""Makes timelines: of a schedule on a clock, and of tasks that ran."""

from collections.abc import Iterable, Sequence

from scheduler.base.collector import without_collection
from scheduler.ordering import recomputing
from scheduler.task import Kind, Orders, Pairs, Reads, Schedule, Task, check_count, check_schedule, orders_of, reads_of
from scheduler.timing.clock import run_on_clock
from scheduler.timing.costs import Costs, check_costs
from scheduler.timing.timeline import Timeline


def simulate(schedule: Schedule, num_microbatches: int, costs: Costs | None = None, *, fuse: bool = False) -> Timeline:
    """Runs a schedule on a clock: each group in order, each task as soon as all that it waits for has arrived.

    Linear in tasks.

    Args:
        schedule: Any schedule.
        num_microbatches: How often the loop body runs.
        costs: The time and memory of tasks, of all microbatches or of each; by default 1 for F, I and W each, and
            transfers take nothing.
        fuse: Counts each pair that the schedule wants fused as one unit, which starts when both tasks could and hands
            on its results at its end. By default the pair's tasks run one after the other.

    Raises:
        ScheduleError: The orders deadlock; the message has the cycle.
        ValueError: The schedule is not defined for this number of microbatches, or a cost has the wrong length.

    Examples:
        >>> from scheduler import OneFOneB
        >>> timeline = simulate(OneFOneB(4), 8)
        >>> timeline.makespan, timeline.peak_activations
        (33.0, (4, 3, 2, 1))
    """
    check_schedule("simulate", schedule)
    check_count("simulate", "num_microbatches", num_microbatches)
    check_costs("simulate", costs := Costs() if costs is None else costs)
    with without_collection():
        stages = costs.recomputed(schedule.num_stages)
        orders = recomputing(schedule, num_microbatches, orders_of(schedule, num_microbatches), stages)
    pairs = schedule.fused(num_microbatches) if fuse else frozenset()
    name, reads = type(schedule).__name__, reads_of(schedule)
    return simulate_orders(orders, schedule.placement, num_microbatches, costs, pairs, name, reads)


def simulate_orders(
    orders: Orders,
    placement: Sequence[int],
    num_microbatches: int,
    costs: Costs | None = None,
    fused: Pairs = frozenset(),
    name: str = "schedule",
    reads: Reads | None = None,
) -> Timeline:
    """Runs orders at hand on a clock, like :func:`simulate`."""
    costs = Costs() if costs is None else costs
    starts, ends = run_on_clock(orders, fused, placement, num_microbatches, costs, reads)
    counts, nbytes = peaks(orders, len(placement), costs, num_microbatches)
    return Timeline(orders, starts, ends, tuple(placement), costs, counts, nbytes, fused, name, reads)


def timeline_of(
    runs: Iterable[tuple[int, Sequence[Task], float, float]], placement: Sequence[int], name: str
) -> Timeline:
    """Returns the timeline of tasks that ran, from the first start on; its costs are the median durations.

    Args:
        runs: For each run, its group, its tasks (two of a fused pair take half of it each), its start and its end.

    Raises:
        ValueError: Nothing ran.
    """
    runs = sorted(runs, key=lambda run: run[2])
    rows: list[list[tuple[Task, float, float]]] = [[] for _ in range(max(placement) + 1)]
    for group, tasks, start, end in runs:
        share, start = (end - start) / len(tasks), start - runs[0][2]
        rows[group] += [(task, start + k * share, start + (k + 1) * share) for k, task in enumerate(tasks)]
    costs = Costs.measured((task, (end - start) / len(tasks)) for _, tasks, start, end in runs for task in tasks)
    orders = tuple(tuple(task for task, _, _ in row) for row in rows)
    starts, ends = (tuple(tuple(times[k] for _, *times in row) for row in rows) for k in range(2))
    has_forward = {task.stage for order in orders for task in order if task.kind == "F"}  # the others hold nothing
    holding = [[t for t in order if t.stage in has_forward] for order in orders]
    held, nbytes = peaks(holding, len(placement), Costs(), 1 + max(t.microbatch for _, ts, _, _ in runs for t in ts))
    fused = frozenset((tasks[0], tasks[1]) for _, tasks, _, _ in runs if len(tasks) == 2)
    return Timeline(orders, starts, ends, tuple(placement), costs, held, nbytes, fused, name)


def peaks(
    orders: Sequence[Sequence[Task]], num_stages: int, costs: Costs, num_microbatches: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the most activations and the most bytes that each group holds. They follow from its order alone."""
    added: dict[Kind, list[float]] = {}
    for kind in ("F", "I", "W"):
        added[kind] = costs.flat(num_microbatches, lambda one, kind=kind: one.memory(num_stages)[kind])
    added["B"] = [-nbytes for nbytes in added["F"]]
    added["R"] = [0.0] * len(added["F"])
    counts, nbytes = [], []
    for order in orders:
        count = most = 0
        size = largest = 0.0
        for stage, kind, microbatch in order:
            size += added[kind][stage * num_microbatches + microbatch]
            if kind == "F":
                count += 1
                if count > most:
                    most = count
                if size > largest:
                    largest = size
            elif kind not in "IR":
                count -= 1
        counts.append(most)
        nbytes.append(largest)
    return tuple(counts), tuple(nbytes)
