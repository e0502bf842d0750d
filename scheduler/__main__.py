"""Look at schedules, compare them, search for better ones, and check those of others: ``python -m scheduler``."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from scheduler import commands
from scheduler.base.exits import run_and_exit
from scheduler.errors import ScheduleError
from scheduler.schedules.catalogue import SCHEDULES

_NAMES = ", ".join(SCHEDULES)
_MOST_TASKS = 250_000
_COSTS = """\
Costs are JSON, an object with some of: forward, input_grad, weight_grad (seconds), transfer_s, transfer_bytes,
bytes_per_s, activation_bytes, released_at_input_grad; each a number, or a list with one for each stage. microbatches
has for each microbatch how many times these it takes, or such an object of its own. A Chrome trace whose events are
named like tasks (2F0) will do too: its medians are taken."""


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments like any other error: in one line, which is JSON if that is asked for."""

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


def _check_size(options: argparse.Namespace) -> None:
    """Refuses sizes that would take too long: a task costs up to 1 ms in all."""
    stages = max(getattr(options, name, None) or 1 for name in ("stages", "groups"))
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
    parser = _Parser("python -m scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_show, _add_compare, _add_search, _add_check):
        add(subparsers)
    return parser


def _add_command(
    subparsers: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
) -> argparse.ArgumentParser:
    command = subparsers.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"Example: python -m scheduler {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return command


def _add_sizes(command: argparse.ArgumentParser, required: bool) -> None:
    command.add_argument("--stages", type=_count, required=required, metavar="S", help="number of stages")
    command.add_argument("--groups", type=_count, metavar="P", help="number of groups of devices")
    command.add_argument("--microbatches", type=_count, required=required, metavar="M", help="number of microbatches")
    command.add_argument("--costs", metavar="FILE", help="what tasks take and hold (JSON); by default 1 each")
    command.epilog = f"{command.epilog}\n\n{_COSTS}"


def _add_pictures(command: argparse.ArgumentParser) -> None:
    command.add_argument("--svg", metavar="FILE", help="write a picture")
    command.add_argument("--trace", metavar="FILE", help="write a Chrome trace, which ui.perfetto.dev opens")
    command.add_argument("--csv", metavar="FILE", help="write the orders as torch.distributed.pipelining reads them")


def _add_show(subparsers: argparse._SubParsersAction) -> None:
    example = "show 1f1b --stages 4 --microbatches 8 --svg 1f1b.svg"
    command = _add_command(subparsers, "show", commands.show, "Draw one schedule.", example)
    command.add_argument("schedule", help=f"a CSV file of orders, or one of {_NAMES}")
    _add_sizes(command, required=False)
    _add_pictures(command)
    command.add_argument("--fuse", action="store_true", help="count fused pairs as one unit")
    command.add_argument("--width", type=_count, default=150, help="characters for the picture (default 150)")


def _add_compare(subparsers: argparse._SubParsersAction) -> None:
    text, example = "A table of all built-in schedules.", "compare --stages 8 --microbatches 32 --memory 8"
    command = _add_command(subparsers, "compare", commands.compare, text, example)
    _add_sizes(command, required=False)
    command.add_argument(
        "--stages-per-group", type=_count, default=2, metavar="V", help="for looped schedules (default 2)"
    )
    command.add_argument("--memory", type=_number, metavar="X", help="leave out what holds more in some group")


def _add_search(subparsers: argparse._SubParsersAction) -> None:
    text = "Search for a better order than the built-in ones."
    example = "search --stages 16 --groups 8 --microbatches 16 --placement v --memory 10 --csv found.csv"
    command = _add_command(subparsers, "search", commands.search, text, example)
    _add_sizes(command, required=True)
    _add_pictures(command)
    command.add_argument("--placement", type=_placement, default="loop", help="loop (default), v, or groups as 0,1,1,0")
    command.add_argument(
        "--memory", type=_numbers, metavar="X", help="the most a group may hold: one number, or one a group (a,b,…)"
    )
    command.add_argument("--seconds", type=_number, default=10, help="time to spend (default 10)")
    command.add_argument("--seed", type=int, default=0, help="for the random choices (default 0)")


def _add_check(subparsers: argparse._SubParsersAction) -> None:
    text, example = "Prove that orders in a file are right, or list the faults.", "check orders.csv --stages 4"
    command = _add_command(subparsers, "check", commands.check, text, example)
    command.add_argument("file", help="orders, one row a rank, cells such as 2F0, 1B0, 1I0, 1W0")
    for name in ("stages", "groups", "microbatches"):
        command.add_argument(f"--{name}", type=_count, metavar=name[0].upper(), help=f"how many {name} it must be for")
    command.add_argument("--forward-only", action="store_true", help="the orders have no backward")


if __name__ == "__main__":
    run_and_exit(main)
