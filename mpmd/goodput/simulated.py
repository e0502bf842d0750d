"""Predicts how much of a job's time would count, from stated inputs, for each way to continue after a failure.

A closed form, in averages. Each failure stops all devices until the job is back, and the steps that were not kept are
repeated. Failures are counted one by one: each costs its whole stop, even where two stops would overlap. A failure
while the job is stopped adds no repeated steps.
"""

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from scheduler.base import texts

# Repeated steps where the state after each step is kept: the step before the failure, and on average half of the
# current step.
_STEPS_AGAIN = 1.5


@dataclasses.dataclass(frozen=True)
class FailureInputs:
    """The inputs of a prediction, options of `python -m mpmd goodput`. A ValueError names all impossible numbers."""

    gpus: int  # the number of GPUs that compute
    failures_per_day: float  # the number of failures that stop the job
    step_s: Annotated[float, "seconds of a step"] = 10.0
    checkpoint_every_s: Annotated[float, "seconds of training between two checkpoints on disk"] = 3600.0
    checkpoint_s: Annotated[float, "seconds for which each holds up the training"] = 30.0
    copy_s: Annotated[float, "seconds for which the copies in memory hold up a step"] = 0.0
    detect_s: Annotated[float, "seconds from a failure until all processes know"] = 30.0
    restart_s: Annotated[float, "seconds from then to the next step, all processes anew, the state from disk"] = 600.0
    from_memory_s: Annotated[float, "the same with the state from memory"] = 300.0
    in_place_s: Annotated[float, "the same with a spare in the place, and all others as they are"] = 60.0
    spares: int = 0  # the number of GPUs that wait
    gpus_per_host: Annotated[int, "a failure takes them all"] = 8
    host_repair_h: Annotated[float, "hours until a host is a spare again"] = 24.0

    def __post_init__(self):
        above = {"gpus", "step_s", "checkpoint_every_s", "gpus_per_host"}
        faults = []
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < math.inf or (name in above and value == 0):
                faults.append(f"{name} is {value:g}; it must be {'above' if name in above else 'at least'} 0")
        if faults:
            raise ValueError("; ".join(faults) + ".")


class TimeShares(NamedTuple):
    """Shares of the time of all GPUs, including spares. They add up to 1."""

    useful: float  # steps that count
    stopped: float  # from failures until the job is back
    repeated: float  # steps done again
    saving: float  # held up by checkpoints on disk
    copying: float  # held up by copies in memory
    idle: float  # spares


def shares(inputs: FailureInputs, *, in_memory: bool, in_place: bool) -> TimeShares:
    """Predicts the shares of the time.

    Args:
      in_memory: whether the state after each step is kept in the memory of other hosts (`mpmd.resilient`).
      in_place: whether a spare also takes the place of a failed host, if one is free.

    Examples:
      >>> of = FailureInputs(gpus=8, failures_per_day=24, checkpoint_every_s=600, checkpoint_s=0)
      >>> [round(share, 3) for share in shares(of, in_memory=False, in_place=False)]
      [0.756, 0.175, 0.069, 0.0, 0.0, 0.0]
    """
    rate = inputs.failures_per_day / 86400
    place = spare_is_free(inputs) if in_place else 0.0
    memory = 1 - place if in_memory else 0.0
    disk = 1 - place - memory
    back_s = place * inputs.in_place_s + memory * inputs.from_memory_s + disk * inputs.restart_s
    again_s = disk * inputs.checkpoint_every_s / 2 + (1 - disk) * _STEPS_AGAIN * inputs.step_s
    stopped = min(1.0, rate * (inputs.detect_s + back_s))
    running = 1 - stopped
    saving = running * inputs.checkpoint_s / (inputs.checkpoint_every_s + inputs.checkpoint_s)
    copying = (running - saving) * inputs.copy_s / (inputs.step_s + inputs.copy_s) if in_memory else 0.0
    repeated = min(running - saving - copying, rate * running * again_s)
    useful = running - saving - copying - repeated
    busy = inputs.gpus / (inputs.gpus + inputs.spares) if in_place else 1.0
    return TimeShares(busy * useful, busy * stopped, busy * repeated, busy * saving, busy * copying, 1 - busy)


def spare_is_free(inputs: FailureInputs) -> float:
    """Returns the share of failures for which a spare host is free (Erlang's loss formula): others are in repair."""
    busy = inputs.failures_per_day / 24 * inputs.host_repair_h
    blocked = 1.0
    for number in range(1, inputs.spares // inputs.gpus_per_host + 1):
        blocked = busy * blocked / (number + busy * blocked)
        if not blocked:
            break
    return 1 - blocked


def predicted(inputs: FailureInputs) -> dict[str, TimeShares]:
    """Returns predictions for checkpoints alone, with copies in memory too, and with spares too if there are any."""
    found = {
        "checkpoints on disk": shares(inputs, in_memory=False, in_place=False),
        "and copies in memory": shares(inputs, in_memory=True, in_place=False),
    }
    return found | ({"and spares": shares(inputs, in_memory=True, in_place=True)} if inputs.spares else {})


def text_of(inputs: FailureInputs) -> str:
    """Returns the inputs and the prediction as text."""
    return "\n".join(_lines(inputs))


def _lines(inputs: FailureInputs) -> Iterator[str]:
    stated = {f.name.replace("_", "-"): getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    inputs_text = "inputs: " + ", ".join(f"{name} {value:,.6g}" for name, value in stated.items())
    yield textwrap.fill(inputs_text, 110, subsequent_indent="  ", break_on_hyphens=False)
    if inputs.failures_per_day:
        yield (
            f"a failure every {24 / inputs.failures_per_day:.3g} h: of one GPU every"
            f" {24 * inputs.gpus / inputs.failures_per_day:,.0f} h"
        )
    if inputs.spares:
        yield f"a spare host is free for {spare_is_free(inputs):.1%} of the failures"
    rows = [("a job with", *TimeShares._fields)]
    rows += [(name, *(f"{share:.1%}" for share in found)) for name, found in predicted(inputs).items()]
    yield from texts.table(rows, "<" + ">" * len(TimeShares._fields))
