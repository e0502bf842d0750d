"""`mpmd.tune`: finds the schedule, microbatches, cut and other choices that make a step fastest within the memory."""

import dataclasses
import itertools
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpmd import _jax_compat as compat
from mpmd.costs.devices import machine_of
from mpmd.costs.devices import memory_limit as memory_of
from mpmd.costs.machine import Machine
from mpmd.planning.costs import StepCosts
from mpmd.planning.plan import Plan, plan_lowered
from mpmd.tuning.cut_again import measured_units, recuts, units_of, with_cuts
from mpmd.tuning.predict import Predictor
from mpmd.tuning.ranked import Configuration, Tuning
from scheduler import Costs, Schedule
from scheduler.base.waiting import waiting
from scheduler.optimize.units import Units
from scheduler.schedules import catalogue

SCHEDULES = tuple(catalogue.SCHEDULES)
NUM_MICROBATCHES = (8, 16, 32)
_MOST_COMPILED = 6  # configurations
_DOUBT = 1.5  # the estimate of the memory may be this many times XLA's need
_CALLS = 5  # measured calls


@compat.api_boundary
def tune(
    build: Callable[..., tuple[Any, Any]],
    *,
    schedules: Iterable[Schedule | str] | None = None,
    num_microbatches: int | Iterable[int] | None = None,
    memory_limit: float | None = None,
    choices: Mapping[str, Iterable[Any]] | None = None,
) -> Tuning:
    """Ranks schedules, numbers of microbatches, cuts and choices by predicted step time, within the devices' memory.

    Each configuration is lowered and simulated; only the best few are compiled. On a `topology_mesh` everything is
    predicted. On present devices, the tasks of the best configuration are measured, and all predictions are corrected
    by the measurement. This is repeated until the best configuration is a measured one (six times at most). If measured
    layers suggest other cuts, these are tried too (`Configuration.is_cut_again`). For a configuration that needs too
    much memory, the prediction includes the recomputation that would make it fit, by an estimate.

    Args:
      build: `build(schedule, num_microbatches)` returns the step (of `mpmd.jit`) and its arguments, which may be
        abstract. The arguments are not used up: measurements run on zeros. With `mark_layer_end` in the model, each
        schedule gets the cut that suits it.
      schedules: schedules or their names. None: all schedules of the catalogue, by name.
      num_microbatches: a number, or several to try. None: 8, 16 and 32.
      memory_limit: bytes that a step may use on each device. None: the devices' memory, if that is known. If a step
        needs more, split backwards compute nothing again ahead of their gradients. A real step decides this by the
        devices' own memory, so limit that memory too (on GPUs by `XLA_PYTHON_CLIENT_MEM_FRACTION`). The cut follows the
        devices' own memory even here.
      choices: further arguments of `build`, by name, each with the values to try. `{"whole": (False, True)}` tries
        `build(schedule, num_microbatches, whole=False)` and `whole=True`: parameters gathered in each task or once a
        step, for example. The best configuration of each combination is compiled.

    Returns:
      All configurations, the best first. They are compared by the time divided by the size of a step's data.

    Raises:
      TypeError: `num_microbatches` has a bool, or `build` returns something else.
      ValueError: there are no configurations to try, or `choices` has a name without values.
      Exception: `build` or its step raises in every configuration.

    Example:
      >>> tuning = mpmd.tune(build, schedules=["1f1b", "zb-h1"], num_microbatches=[8, 16])  # doctest: +SKIP
      >>> print(tuning)  # doctest: +SKIP
      >>> step, args = build(tuning.best.schedule, tuning.best.num_microbatches)  # doctest: +SKIP
    """
    return tuned(build, schedules, num_microbatches, memory_limit, None, choices or {})


def tuned(
    build: Callable[..., tuple[Any, Any]],
    schedules: Iterable[Schedule | str] | None,
    num_microbatches: int | Iterable[int] | None,
    limit: float | None,
    machine: Machine | None,
    choices: Mapping[str, Iterable[Any]],
) -> Tuning:
    """Ranks configurations like `tune`, on a machine with given constants."""
    search = _Search(build, limit, machine)
    counts = NUM_MICROBATCHES if num_microbatches is None else num_microbatches
    names = SCHEDULES if schedules is None else schedules
    counts = tuple(counts) if isinstance(counts, Iterable) else (counts,)
    names = (names,) if isinstance(names, (str, Schedule)) else tuple(names)
    if wrong := [count for count in counts if isinstance(count, bool)]:
        raise TypeError(f"tune: num_microbatches has {wrong[0]}. Pass a number, or several: num_microbatches=(8, 16).")
    counts = tuple(map(operator.index, counts))
    for name in names:
        if isinstance(name, str):
            catalogue.find(name)  # raises for an unknown name
    values = {name: _values(name, given) for name, given in choices.items()}
    search.choices = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    wanted = list(itertools.product(names, counts, search.choices))

    def far() -> tuple[str, float]:
        done = len(search.found)
        return f"mpmd: predicted {done} of {len(wanted)} configurations", done / len(wanted)

    with waiting(far):
        for configuration in wanted:
            search.add(*configuration)
    if search.error is not None and all(one.traced is None for one in search.found):
        raise search.error
    search.compile_the_best()
    return search.result()


def _values(name: str, given: Iterable[Any]) -> tuple[Any, ...]:
    values = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
    if not values:
        raise ValueError(f"tune: choices[{name!r}] is {given!r}. Pass the values to try: {{{name!r}: (False, True)}}.")
    return values


@dataclasses.dataclass(eq=False)
class _Try:
    """A configuration, and the results for it so far."""

    configuration: Configuration
    traced: Any = None  # None where it cannot be built, as `lowered` and `predictor`
    lowered: Any = None
    scale: dict[str, float] = dataclasses.field(default_factory=dict)
    """The ratio of seconds to those by the roofline, by kind of task, from a compiled step with the same choices."""
    predictor: Predictor | None = None
    measured: dict[int, Costs] | None = None  # by loop, seconds of its tasks, if they ran
    expected: dict[int, Costs] | None = None  # the same by the measured layers of another configuration
    units: Units | None = None  # the costs of its layers, if they are known
    plan: Plan | None = None  # its plan, if it is compiled for devices that have a data sheet

    def note(self, **changes: object) -> None:
        """Changes some fields of the configuration."""
        self.configuration = dataclasses.replace(self.configuration, **changes)


class _Search:
    """The configurations of a search, and its measurements."""

    def __init__(self, build: Callable, limit: float | None, machine: Machine | None):
        self.build, self.limit, self.machine = build, limit, machine
        self.choices: list[dict[str, Any]] = []
        """The combinations of choices to try; [{}] if there are none."""
        self.found: list[_Try] = []
        self.error: Exception | None = None
        """The first error of `build` or its step that is no ValueError; raised if no configuration can be built."""

    def add(self, schedule: Schedule | str, count: int, choices: dict[str, Any]) -> None:
        """Lowers and predicts a configuration. One that cannot be cut or scheduled is kept with the reason."""
        fault = traced = None
        try:
            made = self.build(schedule, count, **choices)
            if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "lower")):
                raise TypeError(
                    f"tune: build returned {made!r:.60}, expected (step, arguments) with a step of mpmd.jit."
                )
            step, arguments = made
            traced = step.trace(*(arguments if isinstance(arguments, (tuple, list)) else (arguments,)))
        except Exception as e:
            fault = _reason(e)
            if not isinstance(e, ValueError):
                fault = f"{type(e).__name__}: {fault}"
                self.error = self.error or e
        self._add(Configuration(schedule, count, choices, fault=fault), traced)

    def _add(self, configuration: Configuration, traced: Any) -> _Try:
        """Lowers and predicts a traced configuration."""
        new = _Try(configuration, traced)
        self.found.append(new)
        if traced is None:
            return new
        try:
            new.lowered = traced.lower() if self.limit is None else traced._lowered_within(self.limit)
            if self.machine is None:
                self.machine = machine_of(new.lowered._mesh)
            if self.limit is None:
                self.limit = memory_of(new.lowered._mesh, self.machine)
            predictor = new.predictor = Predictor(new.lowered, self.machine)
        except ValueError as e:
            new.note(fault=_reason(e))
            return new
        num_stages = max((loop.schedule.num_stages for loop in predictor.outline.loops), default=1)
        new.note(cuts=new.lowered.cuts, num_stages=num_stages, num_elements=predictor.num_elements)
        self.predict(new)
        return new

    def predict(self, one: _Try) -> None:
        """Predicts a configuration from the results so far."""
        if (predictor := one.predictor) is None:
            return
        recomputed: frozenset[int] = frozenset()
        fits = True
        if self.limit is not None and max(predictor.memory.values()) > self.limit:
            fits = False
            recomputed = predictor.recomputation(self.limit) or recomputed
        prediction = predictor.predict(one.scale, one.measured or one.expected, recomputed)
        one.note(prediction=prediction, fits=fits, is_measured=one.measured is not None)

    def compile_the_best(self) -> None:
        """Compiles the best configuration of each combination of choices, then the best of all, one after the other,
        until the best one is already compiled.
        """
        done: list[_Try] = []
        for number in range(max(_MOST_COMPILED, len(self.choices))):
            chosen = self.choices[number] if number < len(self.choices) > 1 else None
            found = (one for one in self.found if chosen in (None, one.configuration.choices))
            best = min(found, key=lambda one: self._hope(one, done), default=None)
            if best is not None and best not in done and self._hope(best, done)[:2] == (False, False):
                done.append(best)
                self.compile(best, done)
            elif chosen is None:
                return

    def _hope(self, one: _Try, done: Sequence[_Try]) -> tuple[bool, bool, float]:
        """Returns the rank of a configuration, if uncompiled ones need less memory than estimated."""
        cannot, lacks, seconds = one.configuration.rank
        if lacks and one.predictor is not None and self.limit is not None and one not in done:
            lacks = max(one.predictor.memory.values()) > _DOUBT * self.limit
        return cannot, lacks, seconds

    def compile(self, one: _Try, done: Sequence[_Try]) -> None:
        """Compiles a configuration, for its memory by XLA, its collectives and, on present devices, the times of its
        tasks. Corrects the predictions of the others by them, except the compiled ones in `done`, and those with other
        choices: these have other collectives and other programs.
        """
        predictor = one.predictor
        assert predictor is not None and self.machine is not None
        compiled = one.lowered.compile()
        scale = one.scale
        if self.machine.target.platform != "cpu":
            one.plan = plan_lowered(one.lowered, self.machine)
            predictor.compiled = StepCosts(compiled._programs, self.machine, shares=predictor.shares)
            scale = _scale(predictor.corrections())
        estimated = max(predictor.memory.values())
        for group, memory in compiled.memory_analysis().items():
            predictor.memory[group] = memory["peak"]
        ratio = max(predictor.memory.values()) / max(1, estimated)
        for other in self._with_choices_of(one):
            if other.predictor is not None and other not in done:
                other.predictor.correct_memory(ratio)
        if not predictor.mesh.is_described and predictor.outline.loops:
            profile = compiled._profile_on_zeros()
            one.measured = {profile.loops[k].number: profile.costs(k) for k in profile.measured_loops}
            # Medians, as in the measured costs, because predictions from both are compared.
            scale = _scale(
                (place.kind, costs.duration(place.kind, place.stage), predictor.task_s(number, *place))
                for number, costs in one.measured.items()
                for place in compiled._programs.loops[number].executables
            )
            if not predictor.shares.lists:  # a call on zeros runs the largest microbatch in place of each
                one.note(measured_s=statistics.median(compiled._seconds_of_calls(_CALLS)))
            self._cut_again(one)
        for other in self._with_choices_of(one):
            other.scale = scale
            self.predict(other)

    def _with_choices_of(self, one: _Try) -> list[_Try]:
        return [other for other in self.found if other.configuration.choices == one.configuration.choices]

    def _cut_again(self, one: _Try) -> None:
        """Predicts the configurations with the same choices by the measured layers of one; adds better cuts."""
        if not one.measured or (units := one.units or units_of(one.lowered)) is None:
            return
        (measured,) = one.measured.values()
        units = measured_units(one.lowered, units, measured)
        own = {
            n: x.lowered
            for n, x in enumerate(self.found)
            if x.lowered is not None
            and x.configuration.choices == one.configuration.choices
            and (x.units or units_of(x.lowered)) is not None
        }
        for again in list(recuts(units, self.found.index(one), own, self.limit)):
            base = self.found[again.number]
            if base.measured is None:
                base.expected = dict.fromkeys(one.measured, again.own)
            chosen = base.configuration.schedule, base.configuration.num_microbatches, base.configuration.choices
            known = [(c.schedule, c.num_microbatches, c.choices, c.cuts) for c in (x.configuration for x in self.found)]
            if again.cuts is not None and (*chosen, again.cuts) not in known:
                added = self._add(Configuration(*chosen, is_cut_again=True), with_cuts(base.traced, again.cuts))
                added.units, added.expected = units, dict.fromkeys(one.measured, again.costs)

    def result(self) -> Tuning:
        """Returns all configurations, the best first."""
        if not self.found:
            raise ValueError(
                "tune: there is nothing to try; pass at least one schedule and one number of microbatches."
            )
        ranked = sorted(self.found, key=lambda one: one.configuration.rank)
        basis = "by the roofline"
        if self.machine is not None and self.machine.target.platform != "cpu":
            basis += f" of {self.machine.target.name}"
        if num_measured := sum(one.measured is not None for one in self.found):
            basis = f"measured for {num_measured} of the configurations, the others scaled by these"
        plan = next((one.plan for one in ranked if one.plan is not None), None)
        configurations = tuple(one.configuration for one in ranked)
        return Tuning(configurations, self.limit, basis, plan, self._verdict(ranked[0].configuration, plan))

    def _verdict(self, best: Configuration, plan: Plan | None) -> str:
        """Returns whether a pipeline is worth it."""
        predictor = next((one.predictor for one in self.found if one.predictor is not None), None)
        if predictor is not None and predictor.mesh.groups_share_devices:
            return "do not pipeline on these devices: groups share them, so they take turns"
        if plan is None or best.prediction is None:
            return ""
        return plan.unpipelined.verdict(best.prediction.seconds, self.limit)


def _reason(error: Exception) -> str:
    """Returns the first line of an error, with a full stop instead of a colon."""
    line = str(error).strip().partition("\n")[0]
    return line[:-1] + "." if line.endswith(":") else line


def _scale(durations: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Returns the ratio of seconds to those by the roofline, by kind of task ("" for programs that run once a step)."""
    sums: dict[str, list[float]] = {}
    for kind, seconds, by_roofline in durations:
        total = sums.setdefault(kind, [0.0, 0.0])
        total[0] += seconds
        total[1] += by_roofline
    scale = {kind: real / model for kind, (real, model) in sums.items() if model}
    back = [x for kind, x in scale.items() if kind not in ("F", "")]
    for kind in "BIWR":  # another schedule has other kinds
        scale.setdefault(kind, sum(back) / len(back) if back else scale.get("F", 1.0))
    scale.setdefault("", scale.get("F", 1.0))
    return scale
