"""Look at schedules, compare them, search for better ones, and check those of others: ``python -m scheduler``."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from scheduler.errors import ScheduleError
from scheduler.files import read_text
from scheduler.optimize.bounds import lower_bound
from scheduler.optimize.search import investigate
from scheduler.ordering import order_faults, raise_faults
from scheduler.programs.check import check
from scheduler.programs.instructions import TaskGraph
from scheduler.programs.lowering import lower
from scheduler.schedules.catalogue import SCHEDULES, make, on_groups, split_costs
from scheduler.schedules.custom import CustomSchedule
from scheduler.schedules.guide import write_documents
from scheduler.schedules.list_scheduling import Problem
from scheduler.timing.costs import Costs
from scheduler.timing.pictures import critical_path_text, to_text
from scheduler.timing.simulate import simulate
from scheduler.timing.timeline import Timeline

_NAMES = ", ".join(SCHEDULES)
_MOST_TASKS = 250_000
_COSTS = """\
Costs are JSON, an object with some of: forward, input_grad, weight_grad (seconds), transfer_s, transfer_bytes,
bytes_per_s, activation_bytes, released_at_input_grad; each a number, or a list with one for each stage. A Chrome trace
whose events are named like tasks (2F0) will do too: its medians are taken."""


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are an error like any other: one line, in JSON if that is asked for."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 if a schedule is wrong, 2 if an argument or a file is."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(given)
        _check_size(options)
        return options.run(options)
    except ScheduleError as error:
        message, faults, status = str(error), list(error.faults), 1
    except BrokenPipeError:
        raise
    except OSError as error:
        message, faults, status = f"{error.filename}: {error.strerror}.", [], 2
    except ValueError as error:
        message, faults, status = str(error), [], 2
    if "--json" in given:
        print(json.dumps({"right": False, "error": message, "faults": faults}))
    else:
        print(f"error: {message}", file=sys.stderr)
    return status


def _show(options: argparse.Namespace) -> int:
    path = Path(options.schedule)
    if path.suffix == ".csv":
        schedule: Any = CustomSchedule.from_csv(path)
        num_microbatches = schedule.num_microbatches
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


def _compare(options: argparse.Namespace) -> int:
    groups = options.groups or options.stages
    if groups is None or options.microbatches is None:
        raise ValueError("compare: give --stages (or --groups) and --microbatches.")
    if options.stages not in (None, groups):
        raise ValueError(
            f"compare: --stages is {options.stages} and --groups {groups}, but schedules with one stage a group and "
            "with several are compared on the same groups. Give --groups alone, and --stages-per-group for the latter."
        )
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
    found = investigate(
        options.stages,
        options.groups or _groups_of(options.placement, options.stages),
        options.microbatches,
        _costs(options),
        placement=options.placement,
        memory_limit=options.memory,
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


def _groups_of(placement: str | list[int], num_stages: int) -> int:
    """How many groups a placement is for, if that is not said."""
    if isinstance(placement, str):
        return num_stages // 2 if placement == "v" else num_stages
    return max(placement) + 1


def _check(options: argparse.Namespace) -> int:
    schedule = CustomSchedule.from_csv(options.file)
    for name, found in (
        ("stages", schedule.num_stages),
        ("groups", schedule.num_groups),
        ("microbatches", schedule.num_microbatches),
    ):
        wanted = getattr(options, name)
        if wanted not in (None, found):
            raise ScheduleError(f"{options.file}: the number of {name} is {found}; expected {wanted}. Is it cut off?")
    if not options.forward_only:
        faults = order_faults(schedule.task_orders, schedule.placement, schedule.num_microbatches)
        raise_faults(ScheduleError, f"{options.file} (--forward-only would do without backward)", faults)
    graph = TaskGraph.chain(schedule.num_stages, forward_only=options.forward_only)
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
            f"{options.file}: right; groups: {schedule.num_groups}, stages: {schedule.num_stages}, "
            f"microbatches: {schedule.num_microbatches}, transfers: {report.num_transfers}"
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
    if not options.costs:
        return Costs()
    try:
        return Costs.from_json(read_text(options.costs))
    except UnicodeDecodeError:
        raise ValueError(f"--costs {options.costs}: this is not text; expected JSON.") from None
    except ValueError as error:
        raise ValueError(f"--costs {options.costs}: {error}") from None


def _check_size(options: argparse.Namespace) -> None:
    """A task costs up to 1 ms in all."""
    stages = getattr(options, "stages", None) or getattr(options, "groups", None) or 1
    stages *= getattr(options, "stages_per_group", 1)
    microbatches = getattr(options, "microbatches", None) or 1
    if stages * microbatches > _MOST_TASKS:
        raise ValueError(
            f"{stages} stages and {microbatches} microbatches are more than {_MOST_TASKS} tasks of a kind."
        )


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def _numbers(text: str) -> float | list[float]:
    values = [_number(one) for one in text.split(",")]
    return values if len(values) > 1 else values[0]


def _placement(text: str) -> str | list[int]:
    groups = text.split(",")
    if text in ("loop", "v"):
        return text
    if not all(group.strip().isdecimal() for group in groups):
        raise argparse.ArgumentTypeError(f"{text!r} is neither loop nor v nor a group for each stage, as in 0,1,1,0")
    return [int(group) for group in groups]


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("python -m scheduler", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"Example: python -m scheduler {example}",
            formatter_class=raw,
        )
        one.set_defaults(run=run)
        one.add_argument("--json", action="store_true", help="print JSON instead of text")
        return one

    def sizes(one: argparse.ArgumentParser, required: bool) -> None:
        one.add_argument("--stages", type=_count, required=required, metavar="S", help="number of stages")
        one.add_argument("--groups", type=_count, metavar="P", help="number of groups of devices")
        one.add_argument("--microbatches", type=_count, required=required, metavar="M", help="number of microbatches")
        one.add_argument("--costs", metavar="FILE", help="what tasks take and hold (JSON); by default 1 each")
        one.epilog = f"{one.epilog}\n\n{_COSTS}"

    def pictures(one: argparse.ArgumentParser) -> None:
        one.add_argument("--svg", metavar="FILE", help="write a picture")
        one.add_argument("--trace", metavar="FILE", help="write a Chrome trace, which ui.perfetto.dev opens")
        one.add_argument("--csv", metavar="FILE", help="write the orders as torch.distributed.pipelining reads them")

    one = command("show", _show, "Draw one schedule.", "show 1f1b --stages 4 --microbatches 8 --svg 1f1b.svg")
    one.add_argument("schedule", help=f"a CSV file of orders, or one of {_NAMES}")
    sizes(one, required=False)
    pictures(one)
    one.add_argument("--fuse", action="store_true", help="count fused pairs as one unit")
    one.add_argument("--width", type=_count, default=150, help="characters for the picture (default 150)")

    one = command(
        "compare", _compare, "A table of all built-in schedules.", "compare --stages 8 --microbatches 32 --memory 8"
    )
    sizes(one, required=False)
    one.add_argument("--stages-per-group", type=_count, default=2, metavar="V", help="for looped schedules (default 2)")
    one.add_argument("--memory", type=_number, metavar="X", help="leave out what holds more in some group")

    one = command(
        "search",
        _search,
        "Search for a better order than the built-in ones.",
        "search --stages 16 --groups 8 --microbatches 16 --placement v --memory 10 --csv found.csv",
    )
    sizes(one, required=True)
    pictures(one)
    one.add_argument("--placement", type=_placement, default="loop", help="loop (default), v, or groups as 0,1,1,0")
    one.add_argument(
        "--memory", type=_numbers, metavar="X", help="the most a group may hold: one number, or one a group (a,b,…)"
    )
    one.add_argument("--seconds", type=_number, default=10, help="time to spend (default 10)")
    one.add_argument("--seed", type=int, default=0, help="for the random choices (default 0)")

    one = command(
        "check", _check, "Prove that orders in a file are right, or list the faults.", "check orders.csv --stages 4"
    )
    one.add_argument("file", help="orders, one row a rank, cells such as 2F0, 1B0, 1I0, 1W0")
    for name in ("stages", "groups", "microbatches"):
        one.add_argument(f"--{name}", type=_count, metavar=name[0].upper(), help=f"how many {name} it must be for")
    one.add_argument("--forward-only", action="store_true", help="the orders have no backward")

    one = command("documents", _documents, "Write the guide to all schedules with its pictures.", "documents docs")
    one.add_argument("folder", help="where schedules.md and the folder schedules/ go")
    return parser


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
