"""Runs the same two models in plain `jax.jit`, this library and its alternatives, each in an environment of its own.

    python benchmarks/compare.py [--repeats 3] [--folder ENVIRONMENTS] [--only jax_mpmd,spectrax_lib]

A toy whose work is nearly all the starting of tasks, and a small GPT (`compare/problem.py`), in four stages, trained with
Adam from the same weights on the same batches. Each library has a file in `benchmarks/compare/` with all that its user
writes beside the model. The first losses must be those of plain `jax.jit`, or the row says so.

An environment is made with `python -m venv` and `pip` (with the options that pip finds in its own variables, such as
PIP_INDEX_URL). `--folder` keeps the environments for the next run. `--python torch_pipelining=/path/to/python` takes one
that exists, `--package torch_pipelining=torch==2.13.0+cpu` another version. JaxPP is measured where `import jaxpp` works,
in this Python or in that of `--python jaxpp_lib=...`. A library that cannot be installed or fails has a row with the
reason.

The JAX libraries run in one process with four CPU devices. torch.distributed.pipelining runs in four processes, with one
thread each, as `torchrun` does: its seconds are those of the slowest process; processor time and memory are sums.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "compare"
PROBLEMS = {"toy": 40, "gpt": 20}  # with the number of steps that are timed
NUM_STAGES = 4
TIMEOUT_S = 600
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of the comparison: its name for people, the packages to install, and in how many processes it runs."""

    title: str
    packages: tuple[str, ...] | None
    version_of: str
    num_processes: int = 1


LIBRARIES = {
    "plain_jit": Library("plain `jax.jit`", (*DEPENDENCIES, "optax"), "jax"),
    "jax_mpmd": Library("jax-mpmd", (*DEPENDENCIES, "optax"), "jax"),
    "spectrax_lib": Library("SpectraX", ("spectrax-lib", "optax"), "spectrax-lib"),
    "torch_pipelining": Library("torch.distributed.pipelining", ("torch", "numpy"), "torch", NUM_STAGES),
    "jaxpp_lib": Library("JaxPP", None, "jaxpp"),
}


class Failed(Exception):
    """Why a library has no figures, in a few words."""


def main() -> int:
    """Makes the environments, measures, and prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds; in each, all libraries take turns (default 3)")
    parser.add_argument(
        "--folder", type=Path, help="where environments are made and kept (default: a temporary folder)"
    )
    parser.add_argument("--only", default=",".join(LIBRARIES), help="libraries, with commas; plain_jit is always there")
    parser.add_argument(
        "--python", action="append", default=[], metavar="LIBRARY=PATH", help="an environment that exists"
    )
    parser.add_argument(
        "--package", action="append", default=[], metavar="LIBRARY=PACKAGE", help="what to install instead"
    )
    args = parser.parse_args()
    names = [name for name in LIBRARIES if name in ("plain_jit", *args.only.split(","))]
    given = dict(text.split("=", 1) for text in args.python)
    packages = dict(text.split("=", 1) for text in args.package)
    for name in {*given, *packages, *args.only.split(",")} - set(LIBRARIES):
        parser.error(f"there is no library {name!r}; there are {', '.join(LIBRARIES)}")

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        pythons, failures = {}, {}
        for name in names:
            try:
                pythons[name] = given.get(name) or _make_environment(name, folder, packages.get(name))
                _version(name, pythons[name])
            except Failed as error:
                failures[name] = str(error)
        found = _measure_in_turns(pythons, args.repeats, failures)
    if "plain_jit" in failures:
        sys.exit(f"plain jax.jit: {failures['plain_jit']}")
    print(table(names, found, failures))
    return int("jax_mpmd" in failures)


def _make_environment(name: str, folder: Path, package: str | None) -> str:
    """The Python of an environment with this library. Nothing is installed for JaxPP: who has it names its Python."""
    library = LIBRARIES[name]
    if library.packages is None:
        return sys.executable
    # Plain jax.jit and this library share an environment, as they share all packages.
    place = folder / ("jax" if name in ("plain_jit", "jax_mpmd") else name)
    python = place / "bin" / "python"
    if (place / "done").exists():
        return str(python)
    print(f"making {place} ...", file=sys.stderr)
    wanted = [package, *library.packages[1:]] if package else library.packages
    for command in ([sys.executable, "-m", "venv", place], [python, "-m", "pip", "install", "-q", *wanted]):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise Failed(f"not installed: {_last_line(result.stderr)[:200]}")
    (place / "done").touch()
    return str(python)


def _version(name: str, python: str) -> str:
    """The version of the library, asked in its own Python."""
    package = LIBRARIES[name].version_of
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if result.returncode:
        raise Failed(f"not installed in {python}" if name != "jaxpp_lib" else "not installed")
    return result.stdout.strip()


def _measure_in_turns(pythons: dict[str, str], repeats: int, failures: dict[str, str]) -> dict[str, dict]:
    """Medians of what the rounds found, by library and problem. What fails is left out and noted in `failures`."""
    rounds: dict[str, dict[str, list[dict]]] = {name: {problem: [] for problem in PROBLEMS} for name in pythons}
    for problem in PROBLEMS:
        for _ in range(repeats):
            for name, python in pythons.items():
                if name in failures:
                    continue
                print(f"{problem}: {name} ...", file=sys.stderr)
                try:
                    rounds[name][problem].append(_measure(name, python, problem))
                except Failed as error:
                    failures[name] = f"{problem}: {error}"
    found = {}
    for name in pythons:
        if name not in failures:
            found[name] = {problem: _medians(runs) for problem, runs in rounds[name].items()}
            found[name]["version"] = f"{LIBRARIES[name].version_of} {_version(name, pythons[name])}"
    for name in found if "plain_jit" in found else ():
        for problem in PROBLEMS:
            losses, expected = found[name][problem]["losses"], found["plain_jit"][problem]["losses"]
            if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(losses, expected, strict=True)):
                failures[name] = f"{problem}: its losses {losses} are not those of plain jax.jit, {expected}"
    return found


def _measure(name: str, python: str, problem: str) -> dict:
    """What one run finds, over the processes of the library. If one of them fails, the others are ended."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    processes = [_start(name, python, problem, rank, port) for rank in range(LIBRARIES[name].num_processes)]
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        runs = [pool.submit(_result, process) for process in processes]
        done, _ = concurrent.futures.wait(runs, TIMEOUT_S, concurrent.futures.FIRST_EXCEPTION)
        for process in processes:
            process.kill()
    if len(done) < len(runs) and not any(run.exception() for run in done):
        raise Failed(f"no answer within {TIMEOUT_S} s")
    found = [run.result() for run in sorted(runs, key=lambda run: run not in done)]
    return {
        "first": max(run["first"] for run in found),
        "step": max(run["step"] for run in found),
        "losses": runs[-1].result()["losses"],
        "num_tasks": found[0]["num_tasks"],
        **{key: sum(run[key] for run in found) for key in ("first_cpu", "step_cpu", "before", "peak")},
    }


def _start(name: str, python: str, problem: str, rank: int, port: int) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(NUM_STAGES)}
    environment |= {"LOGGING_LEVEL_ED": "ERROR"}  # SpectraX writes a long line for each step otherwise
    if LIBRARIES[name].num_processes > 1:
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_STAGES), "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [python, str(FOLDER / "worker.py"), name, problem, str(PROBLEMS[problem])]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen) -> dict:
    output, errors = process.communicate()
    if process.returncode:
        raise Failed(_last_line(errors)[:200])
    return json.loads(_last_line(output))


def _medians(runs: Sequence[dict]) -> dict:
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "losses"}
    return {**medians, "losses": runs[0]["losses"]}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def num_lines(name: str) -> int:
    """Lines of code that a user writes beside the model: without docstrings, comments and blank lines."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def table(names: Iterable[str], found: dict[str, dict], failures: dict[str, str]) -> str:
    """The results as a Markdown table. Figures in brackets are processor time."""
    head = (
        "library",
        "toy: µs a task",
        "toy: step / plain",
        "GPT: step / plain",
        "GPT: first call",
        "GPT: peak memory",
    )
    rows = [(*head, "lines")]
    for name in names:
        library = LIBRARIES[name]
        if name in failures:
            rows.append((library.title, failures[name], *[""] * 4, str(num_lines(name))))
            continue
        toy, gpt, plain = found[name]["toy"], found[name]["gpt"], found["plain_jit"]
        rows.append(
            (
                f"{library.title} ({found[name]['version']})",
                f"{1e6 * toy['step'] / toy['num_tasks']:.0f} ({1e6 * toy['step_cpu'] / toy['num_tasks']:.0f})",
                _ratio(toy, plain["toy"], "step"),
                _ratio(gpt, plain["gpt"], "step"),
                f"{gpt['first']:.1f} s; {_ratio(gpt, plain['gpt'], 'first')}",
                f"{gpt['peak'] / 1e6:.0f} MB, {(gpt['peak'] - gpt['before']) / 1e6:.0f} by the steps",
                str(num_lines(name)),
            )
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _ratio(run: dict, plain: dict, key: str) -> str:
    return f"{run[key] / plain[key]:.2f} ({run[key + '_cpu'] / plain[key + '_cpu']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
