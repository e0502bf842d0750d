"""Look at schedules, compare them, search for better ones, and check those of others: ``python -m scheduler``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler.bounds import lower_bound
from scheduler.catalogue import SCHEDULES, make, on_groups, split_costs
from scheduler.custom import CustomSchedule
from scheduler.documents import write_documents
from scheduler.instructions import TaskGraph
from scheduler.listing import Problem
from scheduler.lowering import lower
from scheduler.search import investigate
from scheduler.simulate import Costs, Timeline, simulate
from scheduler.validate import check
from scheduler.visualize import critical_path_text, to_text

_NAMES = ", ".join(SCHEDULES)
_COSTS = """\
Costs are JSON, an object with some of: forward, input_grad, weight_grad (seconds), transfer_s, transfer_bytes,
bytes_per_s, activation_bytes, released_at_input_grad; each a number, or a list with one for each stage. A Chrome trace
whose events are named like tasks (2F0) will do too: its medians are taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 1 if the schedule or the arguments are wrong."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        if getattr(options, "json", False):
            faults = [line.strip().removesuffix(".") for line in str(error).splitlines()[1:]]
            print(json.dumps({"right": False, "error": str(error), "faults": faults}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1


def _show(options: argparse.Namespace) -> int:
    path = Path(options.schedule)
    if path.suffix == ".csv":
        schedule: Any = CustomSchedule.from_csv(path)
        num_microbatches = schedule.num_microbatches
    else:
        if options.microbatches is None:
            raise ValueError("show: --microbatches is missing.")
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


def _compare(options: argparse.Namespace) -> int:
    groups = options.groups or options.stages
    if groups is None or options.microbatches is None:
        raise ValueError("compare: give --stages (or --groups) and --microbatches.")
    base = _costs(options)
    rows, skipped = [], []
    for named in on_groups(groups, options.stages_per_group):
        schedule = named.schedule
        costs = split_costs(base, schedule)
        try:
            timeline = simulate(schedule, options.microbatches, costs)
        except ValueError as error:
            skipped.append({"schedule": named.name, "reason": str(error)})
            continue
        problem = Problem(schedule.placement, groups, options.microbatches, costs)
        row = {"schedule": named.name} | _facts(timeline)
        row["above_bound"] = lower_bound(problem).above(timeline.makespan)
        if options.memory is None or max(timeline.peak_bytes) <= options.memory + 1e-9:
            rows.append(row)
        else:
            skipped.append({"schedule": named.name, "reason": f"holds {max(timeline.peak_bytes):g}"})
    rows.sort(key=lambda row: (row["makespan"], max(row["peak_bytes"])))
    if options.json:
        print(json.dumps({"groups": groups, "microbatches": options.microbatches, "rows": rows, "skipped": skipped}))
        return 0
    print(
        f"{groups} groups, {options.microbatches} microbatches; schedules with several stages a group split the work.\n"
        "Most held: activations of one stage. Memory: in the costs' unit (by default 1 for all stages of a group).\n"
    )
    head = ("schedule", "stages", "makespan", "bubble", "idle in span", "most held", "memory", "above bound")
    table = [head] + [
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
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    for line in table:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]))
    for one in skipped:
        print(f"left out: {one['schedule']}: {one['reason']}")
    return 0


def _search(options: argparse.Namespace) -> int:
    groups = options.groups or (options.stages // 2 if options.placement == "v" else options.stages)
    placement: Any = options.placement
    if "," in placement:
        placement = [int(group) for group in placement.split(",")]
    memory: Any = None
    if options.memory is not None:
        values = [float(value) for value in options.memory.split(",")]
        memory = values[0] if len(values) == 1 else values
    found = investigate(
        options.stages,
        groups,
        options.microbatches,
        _costs(options),
        placement=placement,
        memory_limit=memory,
        seconds=options.seconds,
        seed=options.seed,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
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


def _check(options: argparse.Namespace) -> int:
    schedule = CustomSchedule.from_csv(options.file)
    forward_only = all(task.kind == "F" for order in schedule.task_orders for task in order)
    graph = TaskGraph.chain(schedule.num_stages, forward_only=forward_only)
    report = check(lower(graph, schedule, schedule.num_microbatches))
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
            f"{options.file}: right; {schedule.num_groups} groups, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches, {report.num_transfers} transfers"
        )
    return 0


def _documents(options: argparse.Namespace) -> int:
    for path in write_documents(Path(options.folder)):
        print(path)
    return 0


def _facts(timeline: Timeline) -> dict[str, Any]:
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
    return Costs.from_json(Path(options.costs).read_text()) if options.costs else Costs()


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m scheduler", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"Example: python -m scheduler {example}\n\n{_COSTS}",
            formatter_class=raw,
        )
        one.set_defaults(run=run)
        one.add_argument("--json", action="store_true", help="print JSON instead of text")
        return one

    def sizes(one: argparse.ArgumentParser, required: bool) -> None:
        one.add_argument("--stages", type=int, required=required, metavar="S", help="number of stages")
        one.add_argument("--groups", type=int, metavar="P", help="number of groups of devices")
        one.add_argument("--microbatches", type=int, required=required, metavar="M", help="number of microbatches")
        one.add_argument("--costs", metavar="FILE", help="what tasks take and hold (JSON); by default 1 each")

    def pictures(one: argparse.ArgumentParser) -> None:
        one.add_argument("--svg", metavar="FILE", help="write a picture")
        one.add_argument("--trace", metavar="FILE", help="write a Chrome trace, which ui.perfetto.dev opens")
        one.add_argument("--csv", metavar="FILE", help="write the orders as torch.distributed.pipelining reads them")

    one = command("show", _show, "Draw one schedule.", "show 1f1b --stages 4 --microbatches 8 --svg 1f1b.svg")
    one.add_argument("schedule", help=f"a CSV file of orders, or one of {_NAMES}")
    sizes(one, required=False)
    pictures(one)
    one.add_argument("--fuse", action="store_true", help="count fused pairs as one unit")
    one.add_argument("--width", type=int, default=150, help="characters for the picture (default 150)")

    one = command(
        "compare", _compare, "A table of all built-in schedules.", "compare --stages 8 --microbatches 32 --memory 8"
    )
    sizes(one, required=False)
    one.add_argument("--stages-per-group", type=int, default=2, metavar="V", help="for looped schedules (default 2)")
    one.add_argument("--memory", type=float, metavar="X", help="leave out what holds more in some group")

    one = command(
        "search",
        _search,
        "Search for a better order than the built-in ones.",
        "search --stages 16 --groups 8 --microbatches 16 --placement v --memory 10 --csv found.csv",
    )
    sizes(one, required=True)
    pictures(one)
    one.add_argument("--placement", default="loop", help="loop (default), v, or groups as 0,1,1,0")
    one.add_argument("--memory", metavar="X", help="the most a group may hold: one number, or one a group (a,b,…)")
    one.add_argument("--seconds", type=float, default=10, help="time to spend (default 10)")
    one.add_argument("--seed", type=int, default=0, help="for the random choices (default 0)")

    one = command("check", _check, "Prove that orders in a file are right, or list every fault.", "check orders.csv")
    one.add_argument("file", help="orders, one row a rank, cells such as 2F0, 1B0, 1I0, 1W0")

    one = command("documents", _documents, "Write the guide to all schedules with its pictures.", "documents docs")
    one.add_argument("folder", help="where schedules.md and the folder schedules/ go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
