"""Runs the same two models in plain `jax.jit`, this library and its alternatives, each in its own environment.

    python benchmarks/compare.py [--repeats 3] [--folder ENVIRONMENTS] [--only jax_mpmd,spectrax_lib]

A toy with hardly any work but the start of tasks, and a small GPT (`compare/problem.py`), in four stages, trained with
Adam from the same weights on the same batches. Each library has a file in `benchmarks/compare/` with all code that its
user adds to the model. The first losses must equal those of plain `jax.jit`, or the row says so.

An environment is made with `python -m venv` and `pip` (with the options in pip's own variables, such as PIP_INDEX_URL).
`--folder` keeps the environments for the next run. `--python torch_pipelining=/path/to/python` takes an existing
environment, `--package torch_pipelining=torch==2.13.0+cpu` another version. JaxPP is measured where `import jaxpp`
works, in this Python or in the Python of `--python jaxpp_lib=...`. A library that cannot be installed or fails has a
row with the reason.

The JAX libraries run in one process with four CPU devices. torch.distributed.pipelining runs in four processes, with
one thread each, like `torchrun`: its seconds are the slowest process's; processor time and memory are sums.
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
TIMEOUT_S = 1200
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of the comparison: its displayed name, the packages to install, and its number of processes."""

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


Failures = dict[str, dict[str, str]]  # by library and problem: the reason for missing figures


class Failed(Exception):
    """The reason that a library has no figures, in a few words."""


def main() -> int:
    """Makes the environments, measures, and prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds; in each, all libraries take turns (default 3)")
    parser.add_argument(
        "--folder", type=Path, help="where environments are made and kept (default: a temporary folder)"
    )
    parser.add_argument(
        "--only",
        default=",".join(LIBRARIES),
        help="libraries, with commas; plain_jit is always there (default: %(default)s)",
    )
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
        pythons, titles = {}, {name: LIBRARIES[name].title for name in names}
        failures: Failures = {}
        for name in names:
            try:
                pythons[name] = given.get(name) or _make_environment(name, folder, packages.get(name))
                titles[name] += f" ({LIBRARIES[name].version_of} {_version(name, pythons[name])})"
            except Failed as error:
                failures[name] = dict.fromkeys(PROBLEMS, str(error))
        found = _measure_in_turns(pythons, args.repeats, failures)
    if "plain_jit" in failures:
        sys.exit(f"plain jax.jit: {failures['plain_jit']}")
    print(table(titles.items(), found, failures))
    return int("jax_mpmd" in failures)


def _make_environment(name: str, folder: Path, package: str | None) -> str:
    """Returns the Python of an environment with this library. JaxPP is not installed: name a Python that has it."""
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
    """Asks the library's own Python for its version."""
    package = LIBRARIES[name].version_of
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if result.returncode:
        raise Failed(f"not installed in {python}" if name != "jaxpp_lib" else "not installed")
    return result.stdout.strip()


def _measure_in_turns(pythons: dict[str, str], repeats: int, failures: Failures) -> dict[str, dict[str, dict]]:
    """Returns medians over the rounds, by library and problem. Leaves failures out and notes them in `failures`."""
    found: dict[str, dict[str, dict]] = {name: {} for name in pythons}
    for problem in PROBLEMS:
        rounds: dict[str, list[dict]] = {name: [] for name in pythons if name not in failures}
        for _ in range(repeats):
            for name in list(rounds):
                print(f"{problem}: {name} ...", file=sys.stderr)
                try:
                    rounds[name].append(_measure(name, pythons[name], problem))
                except Failed as error:
                    failures.setdefault(name, {})[problem] = str(error)
                    del rounds[name]
        for name, runs in rounds.items():
            losses, expected = runs[0]["losses"], rounds["plain_jit"][0]["losses"] if "plain_jit" in rounds else ()
            found[name][problem] = _medians(runs)
            if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(losses, expected, strict=False)):
                failures.setdefault(name, {})[problem] = (
                    f"its losses {losses} are not those of plain jax.jit, {expected}"
                )
    return found


def _measure(name: str, python: str, problem: str) -> dict:
    """Returns the figures of one run, over the processes of the library. If one of them fails, ends the others."""
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
    """Counts the lines of code that a user adds to the model: without docstrings, comments and blank lines."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def table(rows: Iterable[tuple[str, str]], found: dict[str, dict[str, dict]], failures: Failures) -> str:
    """Formats the results as a Markdown table. Figures in brackets are processor time.

    Args:
      rows: names and titles of the libraries.
    """
    head = (
        "library",
        "toy: µs a task",
        "toy: step / plain",
        "GPT: step / plain",
        "GPT: first call",
        "GPT: peak memory",
    )
    lines = ["| " + " | ".join((*head, "lines")) + " |", "|" + "---|" * (len(head) + 1)]
    for name, title in rows:
        failed = failures.get(name, {})
        toy = [failed["toy"], ""] if "toy" in failed else _toy_cells(found[name]["toy"], found["plain_jit"]["toy"])
        gpt = [failed["gpt"], "", ""] if "gpt" in failed else _gpt_cells(found[name]["gpt"], found["plain_jit"]["gpt"])
        if len(set(failed.values())) == 1 and len(failed) == len(PROBLEMS):
            gpt[0] = ""
        lines.append("| " + " | ".join((title, *toy, *gpt, str(num_lines(name)))) + " |")
    return "\n".join(lines)


def _toy_cells(run: dict, plain: dict) -> list[str]:
    per_task, used = (1e6 * run[key] / run["num_tasks"] for key in ("step", "step_cpu"))
    return [f"{per_task:.0f} ({used:.0f})", _ratio(run, plain, "step")]


def _gpt_cells(run: dict, plain: dict) -> list[str]:
    return [
        _ratio(run, plain, "step"),
        f"{run['first']:.1f} s ({run['first_cpu']:.1f}); {_ratio(run, plain, 'first')}",
        f"{run['peak'] / 1e6:.0f} MB, {(run['peak'] - run['before']) / 1e6:.0f} by the steps",
    ]


def _ratio(run: dict, plain: dict, key: str) -> str:
    return f"{run[key] / plain[key]:.2f} ({run[key + '_cpu'] / plain[key + '_cpu']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
