"""Where the numbers of a run go, and how fast it is.

A writer is a function of a step and a dict of numbers; add your own in ten lines.
"""

import contextlib
import csv
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

Writer = Callable[[int, Mapping[str, float]], None]


def to_terminal(num_steps: int) -> Writer:
    """Returns a writer of a line for each reported step."""

    def write(step: int, numbers: Mapping[str, float]) -> None:
        apart = {name: x for name, x in numbers.items() if name == "eta_s" or name.startswith("busy_s/")}
        shown = "  ".join(f"{name} {value:,.4g}" for name, value in numbers.items() if name not in apart)
        if busy := [f"{x:.3g}" for name, x in apart.items() if name != "eta_s"]:
            shown += f"  busy_s {' '.join(busy)}"
        eta = time.strftime("%H:%M:%S", time.gmtime(numbers["eta_s"])) if "eta_s" in numbers else ""
        print(f"step {step}/{num_steps}  {shown}" + (f"  {eta} left" if eta else ""), file=sys.stderr, flush=True)

    return write


def to_csv(path: Path) -> Writer:
    """Returns a writer of a row for each step. A run that continues replaces the rows of steps that it repeats."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows.extend(csv.DictReader(file))
    names: list[str] = []

    def write(step: int, numbers: Mapping[str, float]) -> None:
        is_again = not names or int(rows[-1]["step"]) >= step  # continues after a restart, or a lost process
        if is_again:
            rows[:] = [row for row in rows if int(row["step"]) < step]
            names[:] = dict.fromkeys(["step", *(name for row in rows for name in row)])
        rows.append({"step": step} | {name: f"{value:.9g}" for name, value in numbers.items()})
        new = [name for name in rows[-1] if name not in names]
        names.extend(new)
        with path.open("w" if new or is_again else "a", newline="") as file:
            table = csv.DictWriter(file, names)
            if new or is_again:  # new names: earlier steps lack these numbers
                table.writeheader()
                table.writerows(rows[:-1])
            table.writerow(rows[-1])

    return write


def to_tensorboard(folder: Path) -> Writer:
    """Returns a writer of events for TensorBoard. Needs tensorboardX."""
    from tensorboardX import SummaryWriter

    events = SummaryWriter(str(folder))

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def writers(num_steps: int, folder: str | None) -> list[Writer]:
    """Returns the writers: terminal, with a folder also CSV and, where tensorboardX is installed, TensorBoard."""
    found = [to_terminal(num_steps)]
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found.append(to_csv(Path(folder) / "metrics.csv"))
        with contextlib.suppress(ModuleNotFoundError):
            found.append(to_tensorboard(Path(folder)))
    return found


class Speed:
    """Tokens and seconds of the steps since `start`.

    Args:
      num_steps: the steps of the whole run.
      tokens: the tokens of a step; with buckets, the mean over a pass.
      ideal_s: seconds of a step at the devices' peak, where it is known.
    """

    def __init__(self, num_steps: int, tokens: float, ideal_s: float | None):
        self.num_steps, self.tokens, self.ideal_s = num_steps, tokens, ideal_s
        self.start(num_steps)  # nothing has ended yet, and no step comes after this one

    def start(self, step: int) -> None:
        """Begins to measure after a step that has ended."""
        self.began, self.step = time.perf_counter(), step

    def numbers(self, step: int, busy: Sequence[float]) -> dict[str, float]:
        """Returns the numbers to report after a finished step, in which each group computed for `busy` seconds."""
        seconds = (time.perf_counter() - self.began) / (step - self.step)
        found = {"tokens_per_s": self.tokens / seconds, "step_s": seconds, "eta_s": (self.num_steps - step) * seconds}
        if self.ideal_s:
            found["mfu"] = self.ideal_s / seconds
        return found | {f"busy_s/group{group}": x for group, x in enumerate(busy)}


class Trace:
    """A profile of some steps, for xprof or Perfetto.

    Args:
      steps: the first and the last one, or None.
      folder: the folder that it is written to.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: str):
        self.steps, self.folder, self.is_on = steps or (-1, -1), folder, False

    def before(self, step: int) -> None:
        if step == self.steps[0]:
            jax.profiler.start_trace(self.folder)
            self.is_on = True

    def after(self, step: int, results: Any) -> None:
        if self.is_on and step >= self.steps[1]:
            self.end(results)

    def end(self, results: Any) -> None:
        if self.is_on:
            jax.block_until_ready(results)
            jax.profiler.stop_trace()
            self.is_on = False
