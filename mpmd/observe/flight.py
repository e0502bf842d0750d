"""The flight recorder: when a process dispatched its last instructions, kept in memory until a job ends badly."""

import bisect
import math
import time
from collections import deque
from typing import NamedTuple

# A program keeps the times of about this many instructions, from at least two and at most `_MOST_STEPS` steps.
_INSTRUCTIONS, _MOST_STEPS = 4096, 64
_SAMPLES = 2048


class Flight:
    """The last steps of one program in this process. The slots are made once and used in turn."""

    def __init__(self, num_instructions: int):
        kept = max(2, min(_MOST_STEPS, _INSTRUCTIONS // max(1, num_instructions)))
        self._zeros = [0.0] * num_instructions
        self._slots = [self._zeros.copy() for _ in range(kept)]
        self._about: list[tuple[int, float, float]] = [(0, math.nan, math.nan)] * kept
        self._count = 0
        self.times = self._slots[0]  # when each instruction was dispatched, by `time.perf_counter`; 0 if not yet

    def begin(self, step: int) -> None:
        """Begins a step."""
        self._count += 1
        at = self._count % len(self._slots)
        self.times = self._slots[at]
        self.times[:] = self._zeros
        self._about[at] = step, time.perf_counter(), math.nan

    def end(self) -> None:
        """Ends the step: all of its instructions have been dispatched, or it has failed."""
        at = self._count % len(self._slots)
        step, begun, _ = self._about[at]
        self._about[at] = step, begun, time.perf_counter()

    @property
    def position(self) -> int:
        """The instruction of the current step that began last."""
        times = self.times
        return max(0, bisect.bisect_left(times, True, key=lambda t: t == 0.0) - 1)

    def steps(self) -> list[dict[str, object]]:
        """Returns the kept steps, the oldest first: times, and the numbers of the instructions if out of order."""
        kept = len(self._slots)
        numbers = range(max(1, self._count - kept + 1), self._count + 1)
        found = []
        for number in numbers:
            step, begun, ended = self._about[number % kept]
            done = sorted((t, k) for k, t in enumerate(self._slots[number % kept]) if t)
            times, numbers_done = [t for t, _ in done], [k for _, k in done]
            of_step = {"step": step, "begun": begun, "ended": None if math.isnan(ended) else ended, "times": times}
            found.append(of_step if numbers_done == list(range(len(done))) else {**of_step, "numbers": numbers_done})
        return found


class Sample(NamedTuple):
    """The activity and the wait of a rank from `first` to `last` (on `time.monotonic`'s clock)."""

    first: float
    last: float
    phase: str
    step: int
    doing: str
    what: str
    ranks: tuple[int, ...]


class Samples:
    """The activity of a rank, a few times a second. While it stays the same, it is one sample."""

    def __init__(self):
        self._kept: deque[Sample] = deque(maxlen=_SAMPLES)

    def add(self, phase: str, step: int, doing: str, what: str, ranks: tuple[int, ...]) -> None:
        """Adds the current activity."""
        now = time.monotonic()
        if self._kept and self._kept[-1][2:] == (phase, step, doing, what, ranks):
            self._kept[-1] = self._kept[-1]._replace(last=now)
        else:
            self._kept.append(Sample(now, now, phase, step, doing, what, ranks))

    def list(self) -> list[Sample]:
        """Returns all kept samples."""
        return list(self._kept)
