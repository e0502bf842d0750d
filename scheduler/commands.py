"""The commands of ``python -m scheduler``. Each prints its answer and returns the exit status."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from scheduler.base.texts import counted, table
from scheduler.base.waiting import waiting
from scheduler.errors import ScheduleError
from scheduler.optimize.bounds import lower_bound
from scheduler.optimize.search import investigate
from scheduler.ordering import order_faults, raise_faults
from scheduler.programs.check import check as prove
from scheduler.programs.instructions import TaskGraph
from scheduler.programs.lowering import lower
from scheduler.schedules.catalogue import make, on_groups, split_costs
from scheduler.schedules.custom import CustomSchedule
from scheduler.schedules.list_scheduling import Problem
from scheduler.task import Schedule
from scheduler.timing.costs import Costs, costs_in
from scheduler.timing.simulate import simulate
from scheduler.timing.timeline import Timeline, critical_path_text, to_text


def show(options: argparse.Namespace) -> int:
    """Prints a picture of one schedule."""
    path = Path(options.schedule)
    if path.suffix == ".csv":
        schedule: Schedule = CustomSchedule.from_csv(path)
        num_microbatches = schedule.num_microbatches
        _check_sizes(options, str(path), schedule)
    else:
        if options.microbatches is None:
            raise ValueError("show: --microbatches is missing; give it, or a CSV file of orders.")
        schedule, num_microbatches = make(options.schedule, options.stages, options.groups), options.microbatches
    timeline = simulate(schedule, num_microbatches, _costs(options), fuse=options.fuse)
    _write(options, timeline)
    if options.csv:
        CustomSchedule.from_schedule(schedule, num_microbatches).to_csv(options.csv)
    if options.json:
        print(json.dumps(_facts(timeline) | {"critical_path": [str(task) for task in timeline.critical_path]}))
    else:
        print(to_text(timeline, options.width))
        print(critical_path_text(timeline))
    return 0


def compare(options: argparse.Namespace) -> int:
    """Prints a table of all built-in schedules."""
    groups = options.groups or options.stages
    if groups is None or options.microbatches is None:
        raise ValueError("compare: give --stages (or --groups) and --microbatches.")
    if options.stages not in (None, groups):
        raise ValueError(
            f"compare: --stages is {options.stages} and --groups {groups}, but schedules with one stage a group and "
            "with several are compared on the same groups. Give --groups alone, and --stages-per-group for the latter."
        )
    rows, skipped = _comparison(groups, options.stages_per_group, options.microbatches, _costs(options), options.memory)
    if options.json:
        print(json.dumps({"groups": groups, "microbatches": options.microbatches, "rows": rows, "skipped": skipped}))
        return 0
    print(
        f"{counted(groups, 'group')}, {counted(options.microbatches, 'microbatch')}; schedules with several stages a"
        " group split the work.\n"
        "Most held: activations of one stage. Memory: in the costs' unit (by default 1 for all stages of a group).\n"
    )
    cells = [
        (
            row["schedule"],
            str(row["stages"]),
            f"{row['makespan']:g}",
            f"{row['bubble_fraction']:.1%}",
            f"{max(row['idle_within_span']):g}",
            str(max(row["peak_activations"])),
            f"{max(row['peak_bytes']):g}",
            f"{row['above_bound']:.1%}",
        )
        for row in rows
    ]
    head = ("schedule", "stages", "makespan", "bubble", "idle in span", "most held", "memory", "above bound")
    print(*table([head, *cells], "<" + ">" * (len(head) - 1)), sep="\n")
    for one in skipped:
        print(f"left out: {one['schedule']}: {one['reason']}")
    return 0


def _comparison(
    num_groups: int, stages_per_group: int, num_microbatches: int, base: Costs, memory: float | None
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Returns the facts about each built-in schedule, shortest first; and the schedules left out, with the reason."""
    rows, skipped = [], []
    for name, schedule in on_groups(num_groups, stages_per_group).items():
        costs = split_costs(base, schedule)
        try:
            timeline = simulate(schedule, num_microbatches, costs)
        except ValueError as error:
            skipped.append({"schedule": name, "reason": str(error)})
            continue
        if memory is not None and max(timeline.peak_bytes) > memory + 1e-9:
            skipped.append({"schedule": name, "reason": f"holds {max(timeline.peak_bytes):g}"})
            continue
        bound = lower_bound(Problem(schedule.placement, num_groups, num_microbatches, costs))
        rows.append({"schedule": name} | _facts(timeline) | {"above_bound": max(0.0, bound.above(timeline.makespan))})
    rows.sort(key=lambda row: (row["makespan"], max(row["peak_bytes"])))
    return rows, skipped


def search(options: argparse.Namespace) -> int:
    """Prints a better order than the built-in ones."""
    latest, begun = ["starts"], time.monotonic()
    with waiting(lambda: (f"search: {latest[-1]}", min(1.0, (time.monotonic() - begun) / max(1e-9, options.seconds)))):
        found = investigate(
            options.stages,
            options.groups or _groups_of(options.placement, options.stages),
            options.microbatches,
            _costs(options),
            placement=options.placement,
            memory_limit=options.memory,
            seconds=options.seconds,
            seed=options.seed,
            progress=latest.append,
        )
    _write(options, found.timeline)
    if options.csv:
        found.schedule.to_csv(options.csv)
    if options.json:
        facts = _facts(found.timeline) | {
            "bound": found.bound.makespan,
            "at_bound": found.at_bound,
            "above_bound": found.bound.above(found.timeline.makespan),
            "best_built_in": found.seed_name or None,
            "gain": found.gain,
            "gain_under_noise": found.noisy_gain,
            "orders": [[str(task) for task in order] for order in found.timeline.orders],
        }
        print(json.dumps(facts))
    else:
        print(found)
        print(to_text(found.timeline))
    return 0


def _groups_of(placement: str | list[int], num_stages: int) -> int:
    """Returns the number of groups of a placement, for when it is not given."""
    if isinstance(placement, str):
        return num_stages // 2 if placement == "v" else num_stages
    return max(placement) + 1


def check(options: argparse.Namespace) -> int:
    """Prints the proof that the orders of a file are right, or their faults."""
    schedule = CustomSchedule.from_csv(options.file)
    _check_sizes(options, options.file, schedule)
    if not options.forward_only:
        faults = order_faults(schedule.task_orders, schedule.placement, schedule.num_microbatches)
        raise_faults(f"{options.file} (--forward-only would do without backward)", faults)
    graph = TaskGraph.chain(schedule.num_stages, forward_only=options.forward_only)
    report = prove(lower(graph, schedule, schedule.num_microbatches))
    if options.json:
        facts = {
            "right": True,
            "stages": schedule.num_stages,
            "groups": schedule.num_groups,
            "microbatches": schedule.num_microbatches,
            "transfers": report.num_transfers,
            "instructions": report.num_instructions,
        }
        print(json.dumps(facts))
    else:
        print(
            f"{options.file}: right; groups: {schedule.num_groups}, stages: {schedule.num_stages}, "
            f"microbatches: {schedule.num_microbatches}, transfers: {report.num_transfers}"
        )
    return 0


def _check_sizes(options: argparse.Namespace, file: str, schedule: CustomSchedule) -> None:
    for name in ("stages", "groups", "microbatches"):
        found, wanted = getattr(schedule, f"num_{name}"), getattr(options, name)
        if wanted not in (None, found):
            raise ScheduleError(f"{file}: the number of {name} is {found}; expected {wanted}. Is it cut off?")


def _facts(timeline: Timeline) -> dict[str, object]:
    return {
        "name": timeline.name,
        "groups": timeline.num_groups,
        "stages": len(timeline.placement),
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "idle_within_span": timeline.idle_within_span,
        "peak_activations": timeline.peak_activations,
        "peak_bytes": timeline.peak_bytes,
    }


def _write(options: argparse.Namespace, timeline: Timeline) -> None:
    if options.svg:
        Path(options.svg).write_text(timeline.to_svg())
    if options.trace:
        Path(options.trace).write_text(timeline.to_chrome_trace())


def _costs(options: argparse.Namespace) -> Costs:
    return costs_in(options.costs) if options.costs else Costs()
