"""The results of `tune`: configurations of a step, the best first, as a table and as JSON."""

import dataclasses
import json
from typing import Any

from mpmd.planning.plan import Plan
from mpmd.tuning.predict import Prediction
from scheduler import Schedule
from scheduler.base.texts import counted, in_bytes, in_seconds, table


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run a step.

    Attributes:
      is_cut_again: whether `cuts` follow from measured tasks. The library does not choose these cuts otherwise, so pass
        them as `treduce(..., cuts=...)`.
    """

    schedule: Schedule | str  # an argument of `build`
    num_microbatches: int  # an argument of `build`
    choices: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # further arguments of `build`
    cuts: tuple | None = None  # how many layers each stage gets (`Lowered.cuts`); None where marks end stages
    num_stages: int = 0  # how many stages the schedule has
    prediction: Prediction | None = None  # its time and memory; None if it cannot be built
    num_elements: int = 1  # the size of a step's data
    fault: str | None = None  # why it cannot be built, or None
    fits: bool = True  # whether it fits the memory as it is
    is_measured: bool = False  # whether the times of its tasks are measured
    measured_s: float | None = None  # seconds of a step that ran, or None
    is_cut_again: bool = False

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """A key for sorting, smaller is better: it can be built, it fits, and it takes little time for its data."""
        if self.prediction is None:
            return True, True, 0.0
        return False, not self.fits, self.prediction.seconds / max(1, self.num_elements)

    @property
    def chosen(self) -> str:
        """The further arguments of `build` as text."""
        return ", ".join(f"{name}={value}" for name, value in self.choices.items())

    @property
    def binds(self) -> str:
        """The limit that keeps it from being faster or smaller."""
        p = self.prediction
        if p is None:
            return f"not possible: {self.fault}"
        group = max(range(len(p.memory)), key=p.memory.__getitem__)
        if p.recomputed:
            return f"memory: fits if stages {', '.join(map(str, p.recomputed))} recompute their forward"
        if not self.fits:
            return f"memory: group {group} needs {in_bytes(p.memory[group])}"
        busy = max(range(len(p.busy)), key=p.busy.__getitem__)
        return f"group {busy} computes {p.busy[busy] / p.seconds:.0%} of the step"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Configurations of a step, the best first. `str()` prints them.

    Attributes:
      configurations: all configurations that were tried.
      memory_limit: bytes that a step may use on each device, or None.
      basis: the source of the seconds.
      plan: the plan of the best compiled configuration, where the devices have a data sheet.
      verdict: whether to pipeline at all, where that is known.
    """

    configurations: tuple[Configuration, ...]
    memory_limit: float | None
    basis: str
    plan: Plan | None
    verdict: str

    @property
    def best(self) -> Configuration:
        """The fastest configuration that fits.

        Raises:
          ValueError: none can be built, or none fits.
        """
        first = self.configurations[0]
        if not self.fits:
            raise ValueError(f"tune: no configuration {'fits' if first.prediction else 'can be built'}.\n{self}")
        return first

    @property
    def fits(self) -> bool:
        """Whether some configuration fits the memory."""
        return self.configurations[0].prediction is not None and self.configurations[0].fits

    def as_json(self) -> str:
        """Returns all figures, in bytes and seconds."""
        shown = [{**dataclasses.asdict(c), "schedule": str(c.schedule), "binds": c.binds} for c in self.configurations]
        answer = {"configurations": shown, "memory_limit": self.memory_limit, "basis": self.basis}
        return json.dumps({**answer, "verdict": self.verdict}, indent=2, default=str)

    def __str__(self) -> str:
        some = any(c.choices for c in self.configurations)
        rows = [
            ["schedule", "microbatches", *["choices"] * some, "layers of each stage", "step", "", "idle", "memory",
             "binds", "measured"]
        ]  # fmt: skip
        first = self.configurations[0].rank[2]
        faults: dict[str, list[str]] = {}
        for c in self.configurations:
            if (p := c.prediction) is None:
                which = f"{c.schedule} with {c.num_microbatches}" + (f" and {c.chosen}" if c.chosen else "")
                faults.setdefault(c.fault or "", []).append(which)
                continue
            relative = f"{c.rank[2] / first - 1:+.1%}" if first else ""
            of_loops = c.cuts if c.cuts and not isinstance(c.cuts[0], int) else (c.cuts,)
            cuts = "; ".join("as marked" if one is None else ",".join(map(str, one)) for one in of_loops)
            ran = "" if c.measured_s is None else in_seconds(c.measured_s)
            rows.append(
                [str(c.schedule), str(c.num_microbatches), *[c.chosen] * some, cuts, in_seconds(p.seconds), relative,
                 f"{p.idle:.0%}", in_bytes(max(p.memory)), c.binds, ran]
            )  # fmt: skip
        lines = [f"seconds {self.basis}; memory is the most of any device", *table(rows, "<>" + "<" * some + "<>>>><>")]
        lines += [f"not possible: {', '.join(which)}: {why}" for why, which in faults.items()]
        best = self.configurations[0]
        if best.prediction is not None and self.fits:
            memory = ", ".join(map(in_bytes, best.prediction.memory))
            cuts = f", cuts={best.cuts}" if best.is_cut_again else ""
            microbatches = counted(best.num_microbatches, "microbatch")
            chosen = f", {best.chosen}" if best.chosen else ""
            lines.append(f"best: {best.schedule}, {microbatches}{chosen}{cuts}; memory of each group: {memory}")
            if cuts:
                lines.append("its cuts follow from the measured tasks: pass them as treduce(..., cuts=...)")
        else:
            lines.append("best: none fits")
        faster = [c for c in self.configurations if c.prediction and c.prediction.recomputed and c.rank[2] < first]
        if faster:
            fastest = min(faster, key=lambda c: c.rank[2])
            lines.append(f"faster with recomputation (jax.checkpoint), estimated: {fastest.schedule}")
        return "\n".join([*lines, *([self.verdict] if self.verdict else [])])
