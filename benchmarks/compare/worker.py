"""Measures one library on one problem in this process, and prints what it found as JSON.

    python benchmarks/compare/worker.py plain_jit toy

The module of the library gives `start(problem)`: a state, and a step that returns a new state and the loss. The loss is
read after each step, as a training loop would.
"""

import importlib
import json
import resource
import statistics
import sys
import time

import problem

WARM_UP = 5  # steps after the first one that are not timed; their losses are compared


def main(library: str, name: str, num_steps: int) -> None:
    """Measures and prints."""
    task = problem.make(name)
    state, step = importlib.import_module(library).start(task)
    before = _peak_nbytes()

    seconds, cpu, losses = [], [], []
    for index in range(1 + WARM_UP + num_steps):
        x, y = task.batch(index)
        wall, process = time.perf_counter(), time.process_time()
        state, loss = step(state, x, y)
        loss = float(loss)
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - process)
        losses.append(loss)
    timed = slice(1 + WARM_UP, None)
    found = {
        "num_tasks": task.num_tasks,
        "first": seconds[0],
        "first_cpu": cpu[0],
        "step": statistics.median(seconds[timed]),
        "step_cpu": sum(cpu[timed]) / num_steps,
        "before": before,
        "peak": _peak_nbytes(),
        "losses": losses[: 1 + WARM_UP],
    }
    print(json.dumps(found))


def _peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
