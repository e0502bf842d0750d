"""The time and memory of tasks: specified, measured in a run, or read from a file."""

import math
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from scheduler.base.files import parse_json, read_text
from scheduler.base.texts import counted
from scheduler.task import Kind, Task

PerStage = float | tuple[float, ...]
# The costs that grow with a larger microbatch.
_GROWING = (
    "forward",
    "input_grad",
    "weight_grad",
    "recompute",
    "activation_bytes",
    "released_at_input_grad",
    "transfer_bytes",
)


class Timed(Protocol):
    """A run that knows how long each of its tasks took: a `Timeline`."""

    @property
    def durations(self) -> Iterable[tuple[Task, float]]: ...


@dataclass(frozen=True)
class Costs:
    """The time and memory of tasks. Each cost is one number, or a tuple with one number for each stage.

    Any unit of time and of memory will do, if it is the same throughout.

    Args:
        forward: Seconds of F.
        input_grad: Seconds of I.
        weight_grad: Seconds of W. B takes input_grad + weight_grad.
        transfer_s: Seconds from the end of a task until another group can read its result; for stage s, over the
            boundary between s and s + 1, in either direction. Transfers take no time of the devices and never queue.
        transfer_bytes: Bytes that cross that boundary for each microbatch and direction.
        bytes_per_s: Bandwidth: transfers take transfer_s + transfer_bytes / bytes_per_s.
        activation_bytes: Bytes that a stage holds for a microbatch from its F until its B or W.
        released_at_input_grad: The part of activation_bytes that is released already after I.
        recompute: Seconds of R, which recomputes residuals of the forward that I and W need. It runs right before I,
            and does not wait for the gradient that I waits for.
        microbatches: For each microbatch its own Costs, or a number that multiplies the seconds and bytes given here.
            Empty if all cost the same.

    Examples:
        >>> Costs(forward=(1.0, 2.0)).duration("F", 1)
        2.0
        >>> Costs(forward=(1.0, 2.0), microbatches=(1.0, 0.5)).microbatches[1].forward
        (0.5, 1.0)
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    transfer_s: PerStage = 0.0
    activation_bytes: PerStage = 1.0
    released_at_input_grad: PerStage = 0.0
    transfer_bytes: PerStage = 0.0
    bytes_per_s: float = math.inf
    recompute: PerStage = 0.0
    microbatches: "Sequence[Costs | float]" = ()

    def __post_init__(self) -> None:
        faults = []
        for one in fields(self)[:-1]:
            value = getattr(self, one.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, one.name, value)
            for number in value if isinstance(value, tuple) else (value,):
                most = math.inf if one.name == "bytes_per_s" else sys.float_info.max
                if not isinstance(number, int | float) or not 0 <= number <= most:
                    faults.append(f"{one.name} holds {number!r}")
        if isinstance(self.bytes_per_s, tuple):
            faults.append("bytes_per_s is not one number for all")
        elif not self.bytes_per_s:
            faults.append("bytes_per_s is 0")
        if faults:
            wanted = "numbers of at least 0 (bytes_per_s: above 0), or one for each stage"
            raise ValueError(f"Costs: {'; '.join(faults)}. Expected {wanted}.")
        self._check_released()
        object.__setattr__(self, "microbatches", tuple(self._microbatches()))

    def _microbatches(self) -> "Iterator[Costs]":
        """Yields the costs of each microbatch, from the argument; microbatches of equal numbers share one object."""
        known: dict[float, Costs] = {}
        if not isinstance(self.microbatches, Iterable) or isinstance(self.microbatches, str):
            raise ValueError(f"Costs: microbatches is {self.microbatches!r}; expected one entry for each microbatch.")
        for one in self.microbatches:
            if isinstance(one, Mapping):  # from JSON
                _check_names(one)
                if "microbatches" in one:
                    raise ValueError("Costs: an entry of microbatches has microbatches itself.")
                one = replace(self, microbatches=(), **one)
            if isinstance(one, Costs):
                if one.microbatches:
                    raise ValueError("Costs: an entry of microbatches has microbatches itself.")
                yield one
                continue
            if not isinstance(one, int | float) or not 0 <= one < math.inf:
                raise ValueError(f"Costs: microbatches holds {one!r}; expected Costs, or numbers of at least 0.")
            if one not in known:
                known[one] = self._times(one)
            yield known[one]

    def _times(self, factor: float) -> "Costs":
        values = {name: getattr(self, name) for name in _GROWING}
        scaled = {k: tuple(x * factor for x in v) if isinstance(v, tuple) else v * factor for k, v in values.items()}
        return replace(self, **scaled, microbatches=())

    def _check_released(self) -> None:
        held, early = self.activation_bytes, self.released_at_input_grad
        num = max([len(one) for one in (held, early) if isinstance(one, tuple)], default=1)
        pairs = zip(*(one if isinstance(one, tuple) else (one,) * num for one in (held, early)), strict=False)
        for all_of_it, part in pairs:
            if part > all_of_it:
                raise ValueError(
                    f"Costs: released_at_input_grad holds {part!r} where activation_bytes holds {all_of_it!r}; "
                    "what is let go after I is a part of what is held, so it cannot be more."
                )

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """Returns the cost called ``name`` as a list with one number for each stage."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return [value] * num_stages
        if len(value) != num_stages:
            raise ValueError(
                f"Costs: {name} has {counted(len(value), 'entry')} and the schedule {counted(num_stages, 'stage')}; "
                "give one number or one for each stage."
            )
        return list(value)

    def recomputed(self, num_stages: int) -> set[int]:
        """Returns the stages with an R that takes time."""
        every = {id(one): one for one in self.microbatches or (self,)}.values()
        return {s for one in every for s, seconds in enumerate(one.per_stage("recompute", num_stages)) if seconds}  # type: ignore[union-attr]

    def of_microbatches(self, num_microbatches: int) -> "list[Costs]":
        """Returns the costs of each microbatch.

        Raises:
            ValueError: The costs are for another number of microbatches.
        """
        if not self.microbatches:
            return [self] * num_microbatches
        if len(self.microbatches) != num_microbatches:
            raise ValueError(
                f"Costs: microbatches has {counted(len(self.microbatches), 'entry')} and the loop {num_microbatches}"
                " microbatches; give one entry for each."
            )
        return [one for one in self.microbatches if isinstance(one, Costs)]

    def flat(self, num_microbatches: int, of_stages: "Callable[[Costs], Sequence[float]]") -> list[float]:
        """Returns a number for each stage and microbatch, stage after stage, from the numbers of each microbatch."""
        every = self.of_microbatches(num_microbatches)
        rows: dict[int, Sequence[float]] = {}
        for one in every:
            if id(one) not in rows:
                rows[id(one)] = of_stages(one)
        if len(rows) == 1:
            return [x for x in rows[id(every[0])] for _ in every]
        return [x for column in zip(*(rows[id(one)] for one in every), strict=True) for x in column]

    def of_mean(self, num_stages: int) -> "Costs":
        """Returns the costs of a mean microbatch."""
        if not self.microbatches:
            return self
        every = self.of_microbatches(len(self.microbatches))
        rows = {name: [c.per_stage(name, num_stages) for c in every] for name in _GROWING}
        means = {name: tuple(map(statistics.fmean, zip(*row, strict=True))) for name, row in rows.items()}
        return replace(self, **means, microbatches=())

    def in_order(self, order: Sequence[int]) -> "Costs":
        """Returns the costs of the same microbatches in another order: number ``order[k]`` in place k."""
        return replace(self, microbatches=tuple(self.microbatches[i] for i in order))

    def duration(self, kind: Kind, stage: int) -> float:
        """Returns the seconds of a task, if all microbatches cost the same."""
        if kind == "B":
            return self.duration("I", stage) + self.duration("W", stage)
        value = {"F": self.forward, "I": self.input_grad, "W": self.weight_grad, "R": self.recompute}[kind]
        return value[stage] if isinstance(value, tuple) else value

    def seconds(self, num_stages: int) -> dict[Kind, list[float]]:
        """Returns, for each of the kinds F, I and W, the seconds of each stage's task."""
        return {
            "F": self.per_stage("forward", num_stages),
            "I": self.per_stage("input_grad", num_stages),
            "W": self.per_stage("weight_grad", num_stages),
        }

    def memory(self, num_stages: int) -> dict[Kind, list[float]]:
        """Returns, for each of the kinds F, I and W, the bytes that each stage's task adds to the held memory."""
        held = self.per_stage("activation_bytes", num_stages)
        early = self.per_stage("released_at_input_grad", num_stages)
        late = [one - other for one, other in zip(early, held, strict=True)]
        return {"F": held, "I": [-one for one in early], "W": late}

    def transfers(self, num_stages: int) -> list[float]:
        """Returns the seconds over the boundary after each stage."""
        latency, nbytes = self.per_stage("transfer_s", num_stages), self.per_stage("transfer_bytes", num_stages)
        return [one + size / self.bytes_per_s for one, size in zip(latency, nbytes, strict=True)]

    def transfers_between(self, placement: Sequence[int]) -> list[float]:
        """Returns the seconds over the boundary after each stage, and 0 if the next stage lives in the same group."""
        seconds = self.transfers(len(placement))
        for stage, (here, there) in enumerate(pairwise(placement)):
            if here == there:
                seconds[stage] = 0.0
        return seconds

    @classmethod
    def measured(
        cls, durations: Timed | Iterable[tuple[Task, float]], *, shapes: Sequence[Hashable] | None = None, **others: Any
    ) -> "Costs":
        """Returns costs from the times of a real run: the median for each kind and stage.

        If a run has B and no I and W, half of B counts for each. A stage without a task of some kind takes 0.

        Args:
            durations: The timeline of a run, or pairs of task and seconds; leave out the first microbatches of a cold
                run.
            shapes: For each microbatch of the run, its shape. Then each shape is measured on its own, and the result is
                the costs of a loop over these microbatches.
            **others: The costs that a timeline does not show (transfer_s, activation_bytes, …).

        Raises:
            ValueError: There are no durations, or none of some shape, or too few shapes.

        Examples:
            >>> seen = [("0F0", 1.0), ("0F1", 1.2), ("0F2", 5.0), ("0B0", 3.0)]
            >>> costs = Costs.measured((Task.parse(name), seconds) for name, seconds in seen)
            >>> costs.forward, costs.input_grad, costs.weight_grad
            ((1.2,), (1.5,), (1.5,))
        """
        pairs = list(durations if isinstance(durations, Iterable) else durations.durations)
        if shapes is not None:
            num = 1 + max((task.microbatch for task, _ in pairs), default=-1)
            if num > len(shapes):
                raise ValueError(
                    f"Costs.measured: shapes has {counted(len(shapes), 'entry')}, and a task is of microbatch"
                    f" {num - 1}; give one for each microbatch of the run."
                )
            of_shape = {
                shape: cls.measured([(t, s) for t, s in pairs if shapes[t.microbatch] == shape], **others)
                for shape in dict.fromkeys(shapes)
            }
            others = {**others, "microbatches": tuple(of_shape[shape] for shape in shapes)}
        seconds: dict[tuple[int, str], list[float]] = {}
        for task, duration in pairs:
            seconds.setdefault((task.stage, task.kind), []).append(duration)
        if not seconds:
            raise ValueError("Costs.measured: received no durations; expected pairs of Task and seconds.")
        num_stages = 1 + max(stage for stage, _ in seconds)

        def median(kind: str) -> tuple[float, ...]:
            found = []
            for stage in range(num_stages):
                own, whole = seconds.get((stage, kind)), seconds.get((stage, "B"))
                if own is None and kind in "IW" and whole is not None:
                    own = [duration / 2 for duration in whole]
                found.append(statistics.median(own or [0.0]))
            return tuple(found)

        if any(kind == "R" for _, kind in seconds):
            others = {"recompute": median("R"), **others}
        return cls(forward=median("F"), input_grad=median("I"), weight_grad=median("W"), **others)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Reads costs from JSON: an object with the arguments' names, or a Chrome trace with events named as tasks.

        Raises:
            ValueError: The text is not JSON, or neither of these two.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"Costs: this is not JSON: {error}.") from None
        if isinstance(data, dict) and "traceEvents" not in data:
            _check_names(data)
            return cls(**data)
        events = data["traceEvents"] if isinstance(data, dict) else data
        if not isinstance(events, list):
            raise ValueError("Costs: the JSON is neither an object with costs nor a Chrome trace.")
        durations = []
        for event in events:
            if isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("dur"), int | float):
                try:
                    durations.append((Task.parse(str(event.get("name"))), event["dur"] / 1e6))
                except (ValueError, OverflowError):
                    continue
        if not durations:
            raise ValueError("Costs: the Chrome trace has no complete event (ph X, with dur) named like a task, 2F0.")
        stages = 1 + max(task.stage for task, _ in durations)
        if stages > 10 * len(durations) + 1000:
            raise ValueError(f"Costs: the Chrome trace names stage {stages - 1}, and holds {len(durations)} tasks.")
        return cls.measured(durations)


def costs_in(path: str | Path) -> Costs:
    """Returns the costs in a file of JSON that the option `--costs` names; errors name both."""
    try:
        return Costs.from_json(read_text(path))
    except UnicodeDecodeError:
        raise ValueError(f"--costs {path}: this is not text; expected JSON.") from None
    except ValueError as error:
        raise ValueError(f"--costs {path}: {error}") from None


def _check_names(given: Mapping[str, object]) -> None:
    known = {one.name for one in fields(Costs)}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"Costs: unknown names {unknown}; expected some of {sorted(known)}, or a Chrome trace.")


def check_costs(owner: str, costs: object) -> None:
    """Raises a ValueError that names the argument if these are not costs."""
    if not isinstance(costs, Costs):
        raise ValueError(f"{owner}: costs is {costs!r:.60}; expected scheduler.Costs(...).")
