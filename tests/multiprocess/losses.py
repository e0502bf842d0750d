"""Random losses for jobs under `mpmd.resilient`: which are drawn, and what a job has to say for itself after them."""

import itertools
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NUM_RANKS = 4
# How many moments of a phase there are in a step of a process, or (recovery) in all until the loop goes on.
MOMENTS = {"transfer": 13, "update": 3, "task": 9, "copy": 600, "checkpoint": 16_000, "recovery": 5_000}
# What a process prints that kills the keeper of its host.
KEEPER_LOST = "'keeper': True"


class Losses(NamedTuple):
    """What happens to a job.

    Attributes:
      options: of the launcher.
      saves: whether the program writes checkpoints.
      faults: as the program takes them.
    """

    options: list[str]
    saves: bool
    faults: list[dict[str, Any]]

    def environment(self, folder: Path) -> dict[str, str]:
        """What the program is told beside them: the folder of its checkpoints."""
        return {"TEST_SAVES": str(folder)} if self.saves else {}


def draw(chance: random.Random, num_steps: int, num_spares: int) -> Losses:
    """Two or three losses of processes, of a keeper among them, on one host or two; the same with any spares."""
    hosts = chance.choice(["-n 4", "-n 4", "-H localhost:2,127.0.0.1:2"])
    first = chance.sample(range(NUM_RANKS), 3)
    faults, step = list[dict[str, Any]](), 1
    numbers = [first[0], chance.choice([first[1], NUM_RANKS]), chance.choice([first[2], NUM_RANKS + 1])]
    for number in numbers[: chance.randint(2, 3)]:
        step = chance.randint(step, num_steps - 2)
        faults.append(_fault(chance, 0, number, step, [phase for phase in MOMENTS if faults or phase != "recovery"]))
    if chance.random() < 0.3:  # in case that all start over
        faults.append(
            _fault(chance, 1, chance.randrange(NUM_RANKS), chance.randint(step, num_steps - 1), list(MOMENTS))
        )
    if chance.random() < 0.15:
        waits = {"attempt": 0, "rank": NUM_RANKS, "step": -2, "what": "soon", "after_s": chance.uniform(0, 8)}
        faults.append({**waits, "signal": int(chance.choice([*[signal.SIGKILL] * 3, signal.SIGSTOP]))})
    saves = any(fault.get("phase") == "checkpoint" for fault in faults)
    options = f"{hosts} --spares {num_spares} --cpu-devices 1 --restarts 4 --hang-timeout 8".split()
    return Losses(options, saves, faults)


def _fault(chance: random.Random, attempt: int, number: int, step: int, phases: list[str]) -> dict[str, Any]:
    phase = chance.choice(phases)
    fault: dict[str, Any] = {"attempt": attempt, "rank": number, "step": step, "what": "moment", "phase": phase}
    fault["count"] = max(1, round(MOMENTS[phase] ** chance.random()))
    if chance.random() < 0.4:
        fault["after_s"] = chance.uniform(0, 0.03)
    how = chance.choices(["kill", "stop", "pause", "term", "keeper", "both"], [10, 3, 1, 1.5, 2, 0.5])[0]
    if how in ("keeper", "both"):
        fault["keeper"] = True
    if how != "keeper":
        names = {"term": signal.SIGTERM, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
        fault["signal"] = int(names.get(how, signal.SIGKILL))
    if how == "pause":
        fault["wakes_s"] = chance.choice([1, 4, 9, 14])
    return fault


class Found(NamedTuple):
    """What became of a job.

    Attributes:
      in_place, restarts, given: how often a spare has taken a place, all have started over, and the loop has begun
        with the given state for want of a kept one.
      repeated: for each time that the loop went on, how many finished steps came again.
      seen: the same of the process that was furthest.
    """

    in_place: int
    restarts: int
    given: int
    repeated: list[int]
    seen: list[int]


def read(out: str, err: str) -> Found:
    """What the lines of a job say. A step is finished when every process of the time has gone on to the next one."""
    begun: dict[tuple[int, int], dict[str, list[int]]] = {}
    for number, step, attempt, epoch in re.findall(r"^\[(\d+)\] begins (\d+) (\d+) (\d+)$", out, re.MULTILINE):
        begun.setdefault((int(attempt), int(epoch)), {}).setdefault(number, []).append(int(step))
    lives = [begun[life] for life in sorted(begun)]
    given = len(re.findall(r"mpmd\.resilient: begins with step 0 and the given state", err))
    repeated = [_finished(before) - first(after) for before, after in itertools.pairwise(lives)]
    places = len(
        re.findall(r"^jax-mpmd: rank \d+: killed.*; spare \d+ (?:takes|is started in) its place$", err, re.MULTILINE)
    )
    furthest = [max(steps[-1] for steps in before.values()) for before in lives]
    seen = [step - first(after) for step, after in zip(furthest, lives[1:], strict=False)]
    return Found(places, err.count("jax-mpmd: starts over in"), given, repeated, seen)


def first(life: Mapping[str, list[int]]) -> int:
    """The step that the loop began with."""
    return min(steps[0] for steps in life.values())


def _finished(life: Mapping[str, list[int]]) -> int:
    """The step that came after the last finished one."""
    return min(steps[-1] for steps in life.values()) if len(life) == NUM_RANKS else first(life)
