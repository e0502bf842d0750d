"""Plans and tunes a step for absent devices; explains why a job hung, and where its time went.

``python -m mpmd plan|tune|replay|goodput``
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import AxisType

import mpmd
import scheduler
from mpmd.api import Jitted, jit
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.targets import Target
from mpmd.arrays.topology import topology_mesh
from mpmd.costs.machine import Machine
from mpmd.goodput import ledgers, simulated
from mpmd.observe import flight_files
from mpmd.planning.plan import Plan, plan_lowered
from mpmd.report.replay import replay
from mpmd.tuning.ranked import Tuning
from mpmd.tuning.tune import NUM_MICROBATCHES, SCHEDULES, tuned
from scheduler.base.exits import run_and_exit
from scheduler.base.waiting import waiting
from scheduler.timing.costs import costs_in

FITS, BAD_INPUT, DOES_NOT_FIT = 0, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 if the step fits, 3 if it does not, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "replay":
            answer = replay(*flight_files.read(options.folder))
        elif options.command == "goodput":
            answer = _goodput(options)
        else:
            with _users_warnings(options.step):
                answer = _planned(options) if options.command == "plan" else _tuned(options)
        print(answer if isinstance(answer, str) or not options.json else answer.as_json())
    except BrokenPipeError:
        raise
    except (ValueError, ModuleNotFoundError, OSError) as e:
        print(f"python -m mpmd {options.command}: {e}", file=sys.stderr)
        return BAD_INPUT
    if isinstance(answer, str):
        return FITS
    fits = not answer.faults if isinstance(answer, Plan) else answer.fits
    return FITS if fits else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpmd", description="Plans a step before it is run; explains jobs that ended badly."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser(
        "replay",
        help="why a job hung or was slow, from the records that its ranks left",
        description="Reads what the flight recorder of each rank left in a folder, runs the program of the step through"
        " the checker and the simulator, and says which rank waited for which value from whom, and which was slow.",
    )
    again.add_argument("folder", type=Path, metavar="DIR", help="of the launcher's --log-dir, or of MPMD_FLIGHT_DIR")
    _add_goodput(commands)
    plan = commands.add_parser(
        "plan",
        help="what a step needs and takes on devices that are not here",
        description="Compiles the programs of a step for devices that are not here, and says what each group holds,"
        " computes and sends, whether it fits, and how long a step takes. Exit status 0: it fits; 3: it does not.",
    )
    _add_machine(plan)
    add = plan.add_argument
    add("--schedule", help="given to FUNCTION as schedule= (default: its own)")
    add("--microbatches", type=int, metavar="N", help="given to FUNCTION as num_microbatches= (default: its own)")
    add("--tokens", type=int, metavar="N", help="of a step; by default those of its largest argument of integers")
    add("--copies", type=int, metavar="N", help="say what it takes to keep the state on N other hosts (mpmd.resilient)")
    add(
        "--costs", metavar="FILE", type=Path, help="measured times of tasks: scheduler.Costs or a Chrome trace, as JSON"
    )
    tune = commands.add_parser(
        "tune",
        help="which schedule, number of microbatches and cut suit a step on devices that are not here",
        description="Predicts a step for each schedule and number of microbatches, and ranks them by time within the"
        " memory. FUNCTION takes schedule= and num_microbatches=. Exit status 0: one fits; 3: none does.",
    )
    _add_machine(tune)
    tune.add_argument("--schedules", metavar="A,B,…", help=f"default: {','.join(SCHEDULES)}")
    counts = ",".join(map(str, NUM_MICROBATCHES))
    tune.add_argument("--microbatches", metavar="N,M,…", default=counts, help="default: %(default)s")
    choose = "values to try for another argument of FUNCTION, as JSON or words: gathered_once=false,true; once for each"
    tune.add_argument("--choose", metavar="NAME=A,B,…", action="append", default=[], help=choose)
    return parser


def _add_goodput(commands: argparse._SubParsersAction) -> None:
    goodput = commands.add_parser(
        "goodput",
        help="where the time of a job went, or would go with so many failures",
        description="Reads the ledgers that the processes of a job wrote into a folder, and says how much of the time"
        " went to steps that count. With --simulate: what a job of a size would get, from the inputs that it prints.",
    )
    add = goodput.add_argument
    add("folder", type=Path, nargs="?", metavar="DIR", help="of the launcher's --log-dir, or of MPMD_LEDGER_DIR")
    add("--json", action="store_true", help="all figures as JSON")
    add(
        "--simulate",
        action="store_true",
        help="predict, from the options below, whose defaults are assumptions",
    )
    add("--gpus", type=int, metavar="N", help="that compute")
    add("--mtbf", type=float, metavar="H", help="hours between two failures of one GPU that stop the job")
    add("--failures-per-day", type=float, metavar="X", help="of the job, in place of --mtbf")
    add("--spares", metavar="N", default="1%", help="GPUs that wait, or their share, at least a host (default: 1%%)")
    _add_fields(goodput, simulated.FailureInputs)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the step to plan and for its devices."""
    add = parser.add_argument
    add("step", metavar="FILE.py:FUNCTION", help="FUNCTION(mpmd_mesh) returns (step, abstract arguments)")
    add("--target", default="h100", help=f"one of {', '.join(Target.known)} (default: %(default)s)")
    add("--groups", type=int, required=True, help="pipeline groups")
    add("--devices-per-group", type=int, default=8, metavar="N", help="devices of a group (default: %(default)s)")
    add("--devices-per-host", type=int, default=8, metavar="N", help="devices of a host (default: %(default)s)")
    add(
        "--axes",
        default="data",
        help="axes inside a group, with sizes where there are several: data=8,model=8 (default: %(default)s)",
    )
    add("--axis-types", choices=["auto", "explicit"], default="auto", help="of those axes (default: %(default)s)")
    add("--memory", type=float, metavar="GB", help="of a device, in place of the data sheet's")
    add("--link", type=float, metavar="GB/s", help="what a device sends to others of its host")
    add("--network", type=float, metavar="GB/s", help="what a device sends to other hosts")
    share = "share of a device's memory that JAX's allocator takes (default: what it takes by itself, 0.75 of a GPU)"
    add("--memory-fraction", type=float, metavar="X", help=share)
    _add_fields(parser, Machine)
    add("--json", action="store_true", help="all figures as JSON")


def _add_fields(parser: argparse.ArgumentParser, owner: type) -> None:
    """Adds an option for each field that is annotated with what it means."""
    for f in dataclasses.fields(owner):
        for what in _said_of(f):
            shown = "%(default)s" if f.default is not None else "what was measured of the target"
            flag, kind = "--" + f.name.replace("_", "-"), float if f.default is None else type(f.default)
            parser.add_argument(flag, type=kind, default=f.default, metavar="X", help=f"{what} (default: {shown})")


def _said_of(f: dataclasses.Field) -> tuple[str, ...]:
    return getattr(f.type, "__metadata__", ())


def _goodput(options: argparse.Namespace) -> str:
    if options.simulate:
        if options.folder is not None:
            raise ValueError(f"--simulate reads no ledgers: leave {options.folder} or --simulate out.")
        inputs = _failure_inputs(options)
        found = {name: of._asdict() for name, of in simulated.predicted(inputs).items()}
        return json.dumps(found, indent=2) if options.json else simulated.text_of(inputs)
    if options.folder is None:
        raise ValueError("name the folder of a job's ledgers, or --simulate.")
    if given := [name for name in ("gpus", "mtbf", "failures_per_day") if getattr(options, name) is not None]:
        raise ValueError(f"--{given[0].replace('_', '-')} is an option of --simulate, which reads no ledgers.")
    job = ledgers.put_together(ledgers.read(options.folder))
    return job.as_json() if options.json else str(job)


def _failure_inputs(options: argparse.Namespace) -> simulated.FailureInputs:
    if options.gpus is None or (options.mtbf is None) == (options.failures_per_day is None):
        raise ValueError("--simulate needs --gpus, and one of --mtbf and --failures-per-day.")
    if options.mtbf is not None and not options.mtbf > 0:
        raise ValueError(f"--mtbf {options.mtbf:g}: expected hours above 0.")
    number, percent, rest = options.spares.partition("%")
    if not number.replace(".", "", 1).isdecimal() or rest or ("." in number and not percent):
        raise ValueError(f"--spares {options.spares}: expected a number of GPUs, or a share as in 1%.")
    spares, host = math.ceil(options.gpus * float(number) / 100) if percent else int(number), options.gpus_per_host
    if percent and 0 < spares < host:
        spares = host if options.gpus > host else 0  # a part of a host takes no place
    failures = options.failures_per_day if options.mtbf is None else 24 * options.gpus / options.mtbf
    more = {f.name: getattr(options, f.name) for f in dataclasses.fields(simulated.FailureInputs) if _said_of(f)}
    return simulated.FailureInputs(options.gpus, failures, spares=spares, **more)


def _planned(options: argparse.Namespace) -> Plan:
    costs = costs_in(options.costs) if options.costs else None
    _check_numbers(options, ["groups", "devices_per_group", "devices_per_host", "microbatches", "tokens", "copies"])
    function = _loaded(options.step)
    machine, mesh = _machine_and_mesh(options)
    wanted = {"schedule": options.schedule, "num_microbatches": options.microbatches}
    step, arguments = _made(
        options.step, mesh, {n: value for n, value in wanted.items() if value is not None}, function
    )
    with _users_errors(options.step, "lowering the step of", but=ValueError):
        lowered = step.lower(*arguments)
    lowered.compile()
    shown = [("mpmd: planning", 0.0)]
    with waiting(lambda: shown[-1]):
        return plan_lowered(lowered, machine, options.tokens, costs=costs, copies=options.copies, told=shown.append)


def _tuned(options: argparse.Namespace) -> Tuning:
    texts = [text.strip() for text in options.microbatches.split(",")]
    counts = [int(text) for text in texts if text.isdecimal() and int(text) > 0]
    if len(counts) < len(texts):
        raise ValueError(f"--microbatches {options.microbatches}: expected numbers, as in 8,16,32.")
    names = options.schedules.split(",") if options.schedules else SCHEDULES
    _check_numbers(options, ["groups", "devices_per_group", "devices_per_host"])
    function = _loaded(options.step)
    choices: dict[str, list[Any]] = {}
    for name, values in map(_choice, options.choose):
        if name in ("schedule", "num_microbatches", *choices):
            raise ValueError(f"--choose {name}: give each name once; --schedules and --microbatches have their own.")
        choices[name] = values
    _check_takes(function, options.step, ["schedule", "num_microbatches", *choices])
    machine, mesh = _machine_and_mesh(options)

    def build(schedule: Any, num_microbatches: int, **chosen: Any) -> tuple[Any, tuple]:
        wanted = {"schedule": schedule, "num_microbatches": num_microbatches, **chosen}
        return _made(options.step, mesh, wanted, function)

    with _users_errors(options.step, "tracing the step of", but=(ValueError, AssertionError, JaxRuntimeError)):
        return tuned(build, names, counts, float(machine.usable_nbytes), machine, choices)


def _choice(text: str) -> tuple[str, list[Any]]:
    """Returns the name and the values of NAME=A,B,…"""
    name, _, values = text.partition("=")
    if not name.isidentifier() or not all(values.split(",")):
        raise ValueError(f"--choose {text}: expected a name and values, as in gathered_once=false,true.")

    def value(word: str) -> Any:
        with contextlib.suppress(ValueError):
            return json.loads(word)
        return word

    return name, [value(word) for word in values.split(",")]


def _check_numbers(options: argparse.Namespace, counts: Iterable[str]) -> None:
    for name in counts:
        if (count := getattr(options, name)) is not None and count < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count}: expected 1 or more.")
    for name in ("memory", "link", "network"):
        if (amount := getattr(options, name)) is not None and not 0 < amount * 1e9 < math.inf:
            raise ValueError(f"--{name} {amount:g}: expected a number above 0.")


def _machine_and_mesh(options: argparse.Namespace) -> tuple[Machine, MpmdMesh]:
    target = Target.named(options.target)
    changes = {"memory_nbytes": options.memory, "link_bandwidth": options.link, "network_bandwidth": options.network}
    target = dataclasses.replace(target, **{k: round(v * 1e9) for k, v in changes.items() if v is not None})
    constants = {f.name: getattr(options, f.name) for f in dataclasses.fields(Machine) if f.name != "target"}
    machine = Machine(target=target, **constants)
    names, sizes = _axes(options.axes, options.devices_per_group)
    kind = AxisType.Explicit if options.axis_types == "explicit" else AxisType.Auto
    mesh = topology_mesh(
        target,
        (options.groups, *sizes),
        ("stage", *names),
        "stage",
        devices_per_host=options.devices_per_host,
        axis_types=[kind] * (1 + len(names)),
    )
    return machine, mesh


def _axes(text: str, devices: int) -> tuple[list[str], list[int]]:
    """Returns names and sizes of `data=8,model=8`; one axis without a size has all devices."""
    entries = [entry.partition("=") for entry in text.split(",")]
    names = [name.strip() for name, _, _ in entries]
    if not all(names) or len({"stage", *names}) <= len(names):
        raise ValueError(f"--axes {text}: expected different names; 'stage' is the axis of the groups.")
    if len(entries) == 1 and not entries[0][2]:
        return names, [devices]
    if not all(size.isdecimal() for _, _, size in entries):
        raise ValueError(f"--axes {text}: expected name=size for each axis, as in data=8,model=8.")
    sizes = [int(size) for _, _, size in entries]
    if (product := math.prod(sizes)) != devices:
        raise ValueError(f"--axes {text} are {product} devices, but --devices-per-group is {devices}.")
    return names, sizes


def _made(where: str, mesh: MpmdMesh, wanted: dict[str, Any], function: Callable) -> tuple[Any, tuple]:
    """Calls the user's function, and returns the step, ready to be lowered, and its arguments."""
    _check_takes(function, where, wanted)
    with _users_errors(where, "calling"):
        made = function(mesh, **wanted)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        kinds = ", ".join(type(x).__name__ for x in made) if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{where} returned {kinds or 'nothing'}, expected (step, abstract arguments).")
    step, arguments = made
    arguments = tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)
    if isinstance(step, Jitted):
        if step.mpmd_mesh != mesh:
            raise ValueError(
                f"{where} returned a step for {step.mpmd_mesh}; expected one for the mesh that it is given."
            )
        return step, arguments
    if hasattr(step, "lower"):
        raise ValueError(
            f"{where} returned a step of {type(step).__module__.partition('.')[0]}; expected mpmd.jit(step,"
            " mpmd_mesh=mesh), or the function itself."
        )
    return jit(step, mpmd_mesh=mesh), arguments


def _check_takes(function: Callable, where: str, names: Iterable[str]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if missing := [name for name in names if name not in parameters]:
        raise ValueError(f"{where} takes no argument {missing[0]}, so it cannot be chosen here.")


@contextlib.contextmanager
def _users_errors(where: str, doing: str, but: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns an error in the user's file into one line with the line number there; a `sys.exit` counts as an error too.

    Args:
      but: errors that are not changed, since their messages say what is wrong and where.
    """
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as e:
        path = Path(where.rpartition(":")[0])
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).name == path.name]
        lines = [e.lineno] if isinstance(e, SyntaxError) else lines
        at = f" in line {lines[-1]}" if lines else ""
        text = (e.msg if isinstance(e, SyntaxError) else str(e)).strip().partition("\n")[0]
        raise ValueError(f"{doing} {where} raised {type(e).__name__}{at}{text and ': ' + text}") from e


@contextlib.contextmanager
def _users_warnings(where: str) -> Iterator[None]:
    """Makes warnings without a running line of the user point to the function that made the step."""
    name, _, function = where.rpartition(":")
    ours, show = ("<", *(os.path.dirname(m.__file__) for m in (mpmd, scheduler) if m.__file__)), warnings.showwarning

    def show_there(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        code = getattr(getattr(sys.modules.get(Path(name).stem), function, None), "__code__", None)
        if filename.startswith(ours) and code is not None:
            filename, lineno = name, code.co_firstlineno
        show(message, category, filename, lineno, *rest)

    with warnings.catch_warnings():
        warnings.showwarning = show_there
        yield


def _loaded(where: str) -> Callable:
    name, _, function = where.rpartition(":")
    path = Path(name)
    if not path.is_file() or path.suffix != ".py":
        fault = "names no function" if Path(where).is_file() else "names no Python file" if path.is_file() else ""
        fault = fault or "names no file"
        raise FileNotFoundError(f"{where!r} {fault}; expected FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    with _users_errors(where, "loading"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        found = [n for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == path.stem]
        raise ValueError(f"{path} has no function {function!r}. It has {', '.join(found)}.")
    return getattr(module, function)


if __name__ == "__main__":
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # nothing is run
    run_and_exit(main)
