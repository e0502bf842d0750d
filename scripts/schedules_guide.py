"""Writes the guide to the schedules: what they say of themselves, and what the simulator measures.

python scripts/schedules_guide.py docs
"""

import inspect
import sys
from pathlib import Path

from scheduler.schedules.catalogue import SCHEDULES, make, on_groups, split_costs
from scheduler.timing.costs import Costs
from scheduler.timing.simulate import simulate

_GROUPS, _MICROBATCHES = 4, 8
_TABLE_GROUPS, _TABLE_MICROBATCHES = 8, 32

_TABLE_TEXT = (
    "F, I and W of a group each take 1 for a microbatch, and transfers take no time. Memory is the most that a group "
    "holds at a time; its unit is the activations of one microbatch in all stages of a group. Idle in span is the most "
    "that a group waits between its first and its last task. The figures are those of"
)

_HEAD = """\
# Schedules

A schedule says in which order each group of devices runs its tasks: `F` (forward) and `B` (whole backward). Some
schedules split B into two halves: `I` is the gradient of the stage's input, for which the previous stage waits, and `W`
is the gradient of the stage's weights, for which no other task waits. Every schedule is checked before it runs
(`scheduler.check`), and can be shown without JAX:

    python -m scheduler show 1f1b --stages 4 --microbatches 8
    python -m scheduler compare --stages 8 --microbatches 32
    python -m scheduler search --stages 16 --groups 8 --microbatches 16 --placement v --memory 10
    python -m scheduler check orders.csv

This page and its pictures are made by `python scripts/schedules_guide.py docs`.

## Which one to choose

On this page p is the number of groups, r the index of a group, v the number of stages per group, and m the number of
microbatches ("any m": the schedule takes every number).

- **Start with `OneFOneB`.** It has one executable per kind of task, and the least memory of all schedules with one
  stage per group. Its bubble is (p − 1)/(m + p − 1) of the time, so more microbatches make it small.
- **Few microbatches for many groups** (m below about 4p): the bubble is now the main cost. If the model can be cut into
  two stages per group, `ZeroBubbleV` has the smallest bubble at 1F1B's memory. Its first and its last stage are in one
  group, and so are embedding and loss. With one stage per group take `ZeroBubbleH1`, which needs 1F1B's peak memory in
  every group.
- **Memory is short**: `VHalf` and `VMin` hold about half and a third of 1F1B's peak, evenly over the groups. 1F1B
  itself holds little in the last groups, so look at the group that holds most.
- **There is enough memory, and steps follow each other without a barrier**: `ZeroBubbleH2`.
- **Transfers are slow**: `EagerOneFOneB` runs forwards earlier. `DualPipeV` pairs a forward with a backward in one
  executable, so that the compiler can overlap the communication of one with the compute of the other. `KimiK2` overlaps
  communication with W.
- **Weights are sharded and gathered for each stage**: `InterleavedGPipe` finishes a stage before the next one begins.
- **A split backward has a cost**: values that both I and W need stay in memory between the two, and a kernel that makes
  both gradients at once is cheaper than two kernels. Measure B against I + W before you choose a schedule with W.
- **Uneven stages, costly transfers, or a memory limit between these**: `search` starts from all these schedules and
  finds an order that is never longer, with its distance from the lower bound. For a V it also tries the building blocks
  between these schedules: with 8 groups and 16 microbatches, `VMin` takes 61.5, and `search` finds 59.5 in the same
  memory (`python -m scheduler search --stages 16 --groups 8 --microbatches 16 --placement v --memory 8`, which counts
  119 halves).
- **Stages that are no chain**, such as two joined towers or a policy with its reference and its critic:
  `GraphSchedule` is 1F1B or GPipe over any graph of stages. [Roles](stages.md#roles-stages-that-are-no-chain) make one.

## Orders that adapt

Tasks do not take equal times: experts get uneven loads, devices throttle, links are slow. With
`schedule=mpmd.Adaptive(OneFOneB(4))` (or `mpmd.Adaptive("1f1b")` in `treduce`, where the marks say how many stages
there are) the schedule is a plan. While a group waits for the inputs of its next task, it may run a later task of its
list, within these bounds:

- Each task has the same inputs as in the plan, tasks of one stage and kind keep their order, and every sum is added up
  in the plan's order. So the results are the same to the bit.
- A task runs ahead only if the group stays within the plan's peak memory, now and when it then does the rest of its
  list in order.
- *No deadlock, whatever groups choose.* Write the whole plan as one list in topological order, and strike out
  finished entries. All inputs of the first remaining entry came before it, so they are done. It is the first entry of
  its group (a transfer: of both its groups), so it fits into the memory. Hence some group can always continue. The
  tests cover all states that can be reached with 2 to 4 groups and up to 5 microbatches, and random choices.

Simulations, memory and `explain()` follow the plan; `last_timeline()` and the flight recorder have the actual order.

The gain is small. A plan with little memory leaves little choice: 1F1B holds only the microbatches of one round trip,
so a delay anywhere delays all groups. And a backward that runs early, before a late forward, delays that forward, for
which the next groups wait. So before a loop runs, its plan is simulated with random durations (30 %, log-normal). Kinds
of tasks run ahead only if that makes the step at least 1 % shorter, and not longer where all tasks take as long as
planned. Among the schedules on this page, with 4 groups and 16 microbatches, that is GPipe (about 4 %). `explain()`
prints the decision and its reason. If your cluster has other delays, name the kinds yourself: `Adaptive(schedule,
ahead="W")` (`"FBIW"` for all). [The benchmarks](benchmarks.md#orders-that-adapt) have the numbers. A different plan
helps more against jitter: with jitter of 30 % a fixed `EagerOneFOneB` is 1.13 times as fast as a fixed 1F1B, and
`ZeroBubbleH1` 1.18 times.

A group keeps its planned order where the runtime needs it: where groups share devices; in a job whose processes
exchange values by cross-host `device_put` (GPUs), or whose groups have several devices; in loops without gradients;
for lists of microbatches; in audited calls; and where tasks take less than 1 ms. The host follows the step, so a call
returns near its end.

## Other packages

`python benchmarks/schedules.py peers` takes orders from other packages, if they are installed, and simulates them
with the same costs. The packages are torch.distributed.pipelining, the ZB-H1 of sail-sg (`zbpp_light`), and
DeepSeek's DualPipe (`dualpipe`, cut in half, which makes it a V). The cases are 4, 8 and 16 groups, 1, 2 and 4
microbatches per group, and four sets of costs (all 1; transfers of 0.2; a last stage twice as slow; all stages off by
up to a fifth). In no case is their order shorter without a higher peak. No package index has JaxPP, or sail-sg's
V-half and V-min, so this benchmark leaves them out. You can show and check orders that any other program writes as
CSV:

    python -m scheduler show orders.csv --costs costs.json
    python -m scheduler check orders.csv --stages 4 --microbatches 8
"""


def write_documents(folder: Path) -> list[Path]:
    """Writes ``schedules.md`` and a picture for each schedule below ``folder``; returns what was written."""
    pictures = folder / "schedules"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [_HEAD, _table(), "## The schedules\n"]
    written = []
    for name, kind in SCHEDULES.items():
        several = name.startswith(("interleaved", "kimi"))
        schedule = make(name, 2 * _GROUPS if several else None, _GROUPS)
        timeline = simulate(schedule, _MICROBATCHES, fuse=True)
        path = pictures / f"{name}.svg"
        path.write_text(timeline.to_svg())
        written.append(path)
        parts.append(f"### {kind.__name__}\n\n![{kind.__name__}](schedules/{name}.svg)\n\n{_description(kind)}\n")
    page = folder / "schedules.md"
    page.write_text("\n".join(parts).rstrip() + "\n")
    return [page, *written]


def _table() -> str:
    rows = [
        (
            f"## Side by side\n\n{_TABLE_GROUPS} groups and {_TABLE_MICROBATCHES} microbatches; {_TABLE_TEXT} "
            f"`python -m scheduler compare --stages {_TABLE_GROUPS} --microbatches {_TABLE_MICROBATCHES}`.\n"
        ),
        "| schedule | stages | makespan | bubble | idle in span | memory |",
        "|---|---|---|---|---|---|",
    ]
    for schedule in on_groups(_TABLE_GROUPS).values():
        timeline = simulate(schedule, _TABLE_MICROBATCHES, split_costs(Costs(), schedule))
        rows.append(
            f"| {type(schedule).__name__} | {schedule.num_stages} | {timeline.makespan:g} | "
            f"{timeline.bubble_fraction:.1%} | {max(timeline.idle_within_span):g} | {max(timeline.peak_bytes):g} |"
        )
    return "\n".join(rows) + "\n"


def _description(kind: type) -> str:
    """The docstring up to its example."""
    text = inspect.getdoc(kind) or ""
    return text.split("Examples:")[0].rstrip()


if __name__ == "__main__":
    print(*write_documents(Path(sys.argv[1])), sep="\n")
