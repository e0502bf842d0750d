"""The parts of a model between the places where a stage may end: their costs, and the costs of a cut."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from scheduler.ordering import chain
from scheduler.schedules.graph import graph_of, with_graph
from scheduler.task import Schedule, per_group, reads_of
from scheduler.timing.costs import Costs
from scheduler.timing.replay import Replay

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """Costs of a model, unit by unit: unit k ends with the k-th place where a stage may end.

    The last unit comes after the last of these places (head, loss), so there is one more unit than places. Everything
    before the first layer (an embedding) is part of the first unit.
    """

    forward: tuple[float, ...]  # Seconds of F, for each unit
    input_grad: tuple[float, ...]  # Seconds of I
    weight_grad: tuple[float, ...]  # Seconds of W
    transfer_s: tuple[float, ...] = ()  # Seconds over the boundary after a unit where a stage ends; the last is unused
    held: tuple[float, ...] = ()  # Bytes that a unit needs at all times: parameters, their gradients, optimizer state
    activations: tuple[float, ...] = ()  # Bytes that a unit holds for a microbatch from its F until its B or W
    once_s: tuple[float, ...] = ()  # Seconds that a unit takes once, after the loop: its part of the optimizer's update
    shared: tuple[tuple[float, tuple[int, ...]], ...] = ()  # For data that a group holds once: its bytes, the units
    task_s: float = 0.0  # Seconds that a task takes in addition to its units

    def __post_init__(self) -> None:
        for name in ("transfer_s", "held", "activations", "once_s"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * len(self.forward))
        lengths = {len(getattr(self, name)) for name in _PER_UNIT}
        if len(lengths) != 1 or not self.forward:
            raise ValueError(f"Units: the costs have {sorted(lengths)} entries; expected one number for each unit.")

    @property
    def num_places(self) -> int:
        """The number of places where a stage may end."""
        return len(self.forward) - 1

    def measured(self, spans: Sequence[tuple[int, int]], costs: Costs) -> "Units":
        """Returns the units with the seconds of a run: those of each stage are divided among its units as before.

        Args:
            spans: For each stage of that run, its first unit and the one after its last.
        """
        changed = {}
        for name in _WORK:
            values: list[float] = list(getattr(self, name))
            for (first, stop), real in zip(spans, costs.per_stage(name, len(spans)), strict=True):
                total = sum(values[first:stop])
                for unit in range(first, stop):
                    values[unit] = values[unit] * real / total if total else real / (stop - first)
            changed[name] = tuple(values)
        return replace(self, task_s=0.0, **changed)


_WORK = ("forward", "input_grad", "weight_grad")
_PER_UNIT = (*_WORK, "transfer_s", "held", "activations", "once_s")


def even_layers(num_layers: int, num_stages: int) -> Layers:
    """Divides layers evenly among stages; if they do not divide evenly, later stages get one less.

    Example:
        >>> even_layers(6, 4)
        (2, 2, 1, 1)
    """
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


@dataclass
class CutProblem:
    """The costs of cuts under a schedule. A cut is the number of places in each stage; the last may be 0.

    For a schedule over a graph, the units are a chain: the stages' reads are found when they are cut.
    """

    units: Units
    schedule: Schedule
    num_microbatches: int
    memory_limit: Sequence[float] | None = None  # Bytes that each group may use
    _known: dict[Layers, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (graph := graph_of(self.schedule)) is not None:
            self.schedule = with_graph(self.schedule, replace(graph, reads=chain(graph.num_stages)))
        orders = self.schedule.orders(self.num_microbatches)
        self.replay = Replay(orders, self.schedule.placement, reads=reads_of(self.schedule))
        self.warmup, self.late = _positions(orders, self.num_stages)
        """For each stage, the number of F before its first I or B, and of W after its last I."""
        self.is_whole = all(kind in "FB" for order in orders for _, kind, _ in order)
        self._sums = {name: tuple(accumulate(getattr(self.units, name), initial=0.0)) for name in _PER_UNIT}
        if self.memory_limit is not None:
            self.memory_limit = per_group("memory_limit", self.memory_limit, self.schedule.num_groups)

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    def _between(self, name: str, first: int, stop: int) -> float:
        """Returns the sum of some costs over units."""
        sums = self._sums[name]
        return sums[stop] - sums[first]

    def spans(self, layers: Layers) -> list[tuple[int, int]]:
        """Returns, for each stage, its first unit and the one after its last."""
        stops = [*accumulate(layers[:-1]), len(self.units.forward)]
        return list(pairwise([0, *stops]))

    def seconds(self, first: int, stop: int) -> tuple[float, float, float]:
        """Returns the seconds of F, I and W of a stage with these units."""
        forward, input_grad, weight_grad = (self._between(name, first, stop) for name in _WORK)
        task = self.units.task_s
        return forward + task, input_grad + task, weight_grad + (0.0 if self.is_whole else task)

    def costs(self, layers: Layers) -> Costs:
        """Returns the costs of a cut, as :func:`scheduler.simulate` takes them."""
        spans = self.spans(layers)
        forward, input_grad, weight_grad = zip(*(self.seconds(a, b) for a, b in spans), strict=True)
        over = tuple(self.units.transfer_s[stop - 1] for _, stop in spans)
        held = tuple(self._between("activations", *span) for span in spans)
        return Costs(forward, input_grad, weight_grad, transfer_s=over, activation_bytes=held)

    def memory(self, layers: Layers) -> list[float]:
        """Returns, for each group, the bytes that it needs."""
        spans = self.spans(layers)
        peaks = self.replay.peaks([self._between("activations", *span) for span in spans])
        placement = self.schedule.placement
        for group in range(self.schedule.num_groups):
            peaks[group] += self._kept([span for span, g in zip(spans, placement, strict=True) if g == group])
        return peaks

    def _kept(self, spans: Sequence[tuple[int, int]]) -> float:
        """Returns the bytes of parameters and their companions in a group with these stages."""
        total = sum(self._between("held", *span) for span in spans)
        for nbytes, units in self.units.shared:
            if any(a <= unit < b for unit in units for a, b in spans):
                total += nbytes
        return total

    def evaluate(self, layers: Layers) -> tuple[float, float]:
        """Returns the bytes of the worst group above its memory (0: it fits), and the makespan. Smaller is better."""
        if (known := self._known.get(layers)) is None:
            over = 0.0
            if self.memory_limit is not None:
                needs = self.memory(layers)
                over = max(0.0, *(n - limit for n, limit in zip(needs, self.memory_limit, strict=True)))
            c = self.costs(layers)
            after = [0.0] * self.schedule.num_groups
            for span, group in zip(self.spans(layers), self.schedule.placement, strict=True):
                after[group] += self._between("once_s", *span)
            makespan = self.replay.makespan(c.forward, c.input_grad, c.weight_grad, c.transfer_s, after)  # type: ignore[arg-type]
            known = self._known[layers] = over, makespan
        return known

    def unevenness(self, layers: Layers) -> float:
        """Returns the sum of the squares of the seconds that each group works on a microbatch."""
        busy = [0.0] * self.schedule.num_groups
        for span, group in zip(self.spans(layers), self.schedule.placement, strict=True):
            busy[group] += sum(self.seconds(*span))
        return sum(seconds**2 for seconds in busy)

    def bound(self, stage: int, first: int, stop: int) -> float:
        """Returns a lower bound of the makespan of cuts in which a stage has these units; infinite if they do not fit.

        The stage's first F comes after one F of all earlier stages. All its own work follows, and after its last B or I
        one backward of all earlier stages. Its first backward comes after one F and one backward of all later stages;
        before that it can run only as many F as its order has first.
        """
        m, units = self.num_microbatches, self.units
        forward, input_grad, weight_grad = self.seconds(first, stop)
        if self.memory_limit is not None:
            group = self.schedule.placement[stage]
            held = self.replay.counts[stage] * self._between("activations", first, stop)
            if self._kept([(first, stop)]) + held > self.memory_limit[group]:
                return math.inf
        task, before, behind = units.task_s, stage, self.num_stages - 1 - stage
        back = [0.0, 0.0]
        for i, (a, b, count) in enumerate(((0, first, before), (stop, len(units.forward), behind))):
            back[i] = self._between("input_grad", a, b) + count * task
            if self.is_whole:
                back[i] += self._between("weight_grad", a, b)
        head = self._between("forward", 0, first) + before * task
        down = self._between("forward", stop, len(units.forward)) + behind * task
        work = m * (forward + input_grad + weight_grad)
        late = self.late[stage] * weight_grad
        early = self.warmup[stage] * forward
        way = head + forward + down + back[1]
        once = self._between("once_s", first, stop)
        return max(
            head + work + once, head + work - late + back[0], way + work - early, way + work - early - late + back[0]
        )

    def load_bound(self) -> float:
        """Returns a lower bound for any cut: the mean work of a group, and the way of one microbatch."""
        total = [self._sums[name][-1] + self.num_stages * self.units.task_s * (name != "weight_grad") for name in _WORK]
        one = total[0] + total[1] + (total[2] if self.is_whole else 0.0)
        return max(self.num_microbatches * sum(total) / self.schedule.num_groups, one)


def _positions(orders: Sequence[Sequence[tuple[int, str, int]]], num_stages: int) -> tuple[list[int], list[int]]:
    warmup, late, started = [0] * num_stages, [0] * num_stages, [False] * num_stages
    for order in orders:
        for stage, kind, _ in order:
            if kind == "F":
                warmup[stage] += not started[stage]
            elif kind == "W":
                late[stage] += 1
            else:
                started[stage] = True
                late[stage] = 0
    return warmup, late
