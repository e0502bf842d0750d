"""Where the numbers of a run go. A writer is a function of a step and a dict of numbers; add your own in ten lines."""

import contextlib
import csv
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Writer = Callable[[int, Mapping[str, float]], None]


def to_terminal(num_steps: int) -> Writer:
    """A line for each step that is reported."""

    def write(step: int, numbers: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {value:,.4g}" for name, value in numbers.items() if name != "eta_s")
        eta = time.strftime("%H:%M:%S", time.gmtime(numbers["eta_s"])) if "eta_s" in numbers else ""
        print(f"step {step}/{num_steps}  {shown}" + (f"  {eta} left" if eta else ""), file=sys.stderr, flush=True)

    return write


def to_csv(path: Path) -> Writer:
    """A row for each number: step, name, value. A run that goes on adds to the file."""
    is_new = not path.exists()
    file = path.open("a", newline="")
    rows = csv.writer(file)
    if is_new:
        rows.writerow(["step", "name", "value"])

    def write(step: int, numbers: Mapping[str, float]) -> None:
        rows.writerows([step, name, f"{value:.9g}"] for name, value in numbers.items())
        file.flush()

    return write


def to_tensorboard(folder: Path) -> Writer:
    """Events that TensorBoard shows. Needs tensorboardX."""
    from tensorboardX import SummaryWriter

    events = SummaryWriter(str(folder))

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def writers(num_steps: int, folder: str | None) -> list[Writer]:
    """The terminal, and with a folder also CSV and, where tensorboardX is installed, TensorBoard."""
    found = [to_terminal(num_steps)]
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found.append(to_csv(Path(folder) / "metrics.csv"))
        with contextlib.suppress(ModuleNotFoundError):
            found.append(to_tensorboard(Path(folder)))
    return found
