"""Real processes for the tests: each runs one function of `scenarios.py`, and prints what it found as JSON."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forked import Forked
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
SCENARIOS = Path(__file__).parent / "scenarios.py"
LIMIT_S = 150


def environment(num_devices: int = 1) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return kept | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SCENARIOS.parent}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
    }


# Before a command: it sees this folder on a file system that it cannot write to.
READ_ONLY = ["unshare", "--mount", "bash", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"']


def start(
    scenario: str, num_processes: int, devices: int = 1, prefixes: dict[int, list[str]] | None = None, **arguments: Any
) -> list[subprocess.Popen]:
    """Starts the processes, the words of `prefixes` before the commands of some; the caller ends them."""
    command = [sys.executable, *map(str, _words(scenario, num_processes))]
    return [
        subprocess.Popen(
            [*(prefixes or {}).get(i, ()), *command, str(i), json.dumps(arguments)],
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(num_processes)
    ]


def finish(processes: list[subprocess.Popen], limit_s: float = LIMIT_S) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each; at the limit kills them all, and shows what they said and do."""
    end, late = time.monotonic() + limit_s, []

    def ended(process: subprocess.Popen) -> tuple[int, str, str]:
        try:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(process)
            process.kill()
            out, err = process.communicate()
        return process.returncode, out, err

    try:  # all at once: a process waits for whoever reads what it says
        with ThreadPoolExecutor(len(processes)) as pool:
            found = list(pool.map(ended, processes))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert not late, f"not within {limit_s} s:\n" + "\n".join(f"{status}: {err[-8000:]}" for status, _, err in found)
    return found


def run_stock(scenario: str, num_processes: int, devices: int = 1, **arguments: Any) -> None:
    """Runs a scenario in processes that have not imported the packages."""
    for status, _, err in finish(start(scenario, num_processes, devices, **arguments)):
        assert status == 0, err[-8000:]


def run(scenario: str, num_processes: int, devices: int = 1, **arguments: Any) -> list[Any]:
    """Runs a scenario to its end; what each process found."""
    words = _words(scenario, num_processes)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * num_processes)]
        outs, errs = files[::2], files[1::2]
        processes = [
            Forked([*words, i, json.dumps(arguments)], environment(devices), outs[i], errs[i])
            for i in range(num_processes)
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        end = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.01)
        for i, process in enumerate(processes):
            said = os.pread(errs[i].fileno(), 1 << 20, 0).decode(errors="replace")
            assert process.returncode == 0, f"process {i} of {scenario}: status {process.returncode}\n{said[-9000:]}"
        return [json.loads(os.pread(out.fileno(), 1 << 20, 0).splitlines()[-1]) for out in outs]


def _words(scenario: str, num_processes: int) -> list[Any]:
    """The program and its arguments, but for the number of the process and those of the scenario."""
    return [SCENARIOS, scenario, f"127.0.0.1:{free_port()}", num_processes]
