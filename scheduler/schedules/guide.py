"""The guide to the schedules: what they say of themselves, and what the simulator measures."""

from __future__ import annotations

import inspect
from pathlib import Path

from scheduler.schedules.catalogue import SCHEDULES, make, on_groups, split_costs
from scheduler.timing.simulate import Costs, simulate

_GROUPS, _MICROBATCHES = 4, 8
_TABLE_GROUPS, _TABLE_MICROBATCHES = 8, 32

_TABLE_TEXT = (
    "F, I and W of a group take 1 each for a microbatch, transfers nothing. Memory is the most that a group holds, in "
    "activations of one stage a group; idle in span is the most that a group waits between its first and last task. "
    "Made by"
)

_HEAD = """\
# Schedules

A schedule says in which order each group of devices runs its tasks: `F` (forward), `B` (whole backward) or its halves
`I` (gradient of the stage's input, which the stage before waits for) and `W` (gradient of its weights, which nobody
waits for). Every schedule here is proved before it runs (`scheduler.check`) and can be looked at without JAX:

    python -m scheduler show 1f1b --stages 4 --microbatches 8
    python -m scheduler compare --stages 8 --microbatches 32
    python -m scheduler search --stages 16 --groups 8 --microbatches 16 --placement v --memory 10
    python -m scheduler check orders.csv

This page and its pictures are made by `python -m scheduler documents docs`.

## Which one to choose

- **Start with `OneFOneB`.** One executable a task kind, the least memory of all with one stage a group, and no bubble
  that more microbatches do not make small: its share of the time is (p − 1)/(m + p − 1).
- **Few microbatches for many groups** (m below about 4p): the bubble is what you pay for. If the model can be
  cut into two stages a group, `ZeroBubbleV` has the smallest bubble at 1F1B's memory, and its last stage lives
  beside its first (loss and embedding in one group). With one stage a group take `ZeroBubbleH1`, at 1F1B's peak in
  every group.
- **Memory is short**: `VHalf` and `VMin` hold about half and a third of 1F1B's peak, evenly over the groups. 1F1B
  itself holds little in the last groups, so look at the group that is full.
- **Memory is plenty and steps follow each other without a barrier**: `ZeroBubbleH2`.
- **Transfers are slow**: `EagerOneFOneB` posts forwards earlier; `DualPipeV` pairs a forward with a backward in one
  executable so that the compiler can overlap one's communication with the other's compute; `KimiK2` does so with W.
- **Weights are sharded and gathered for each stage**: `InterleavedGPipe` finishes a stage in one go.
- **Splitting the backward is not free**: I and W keep what both need between them, and a kernel that makes both
  gradients at once is cheaper than two. Measure B against I + W before choosing a schedule with W.
- **Uneven stages, costly transfers, a memory limit between these**: `search` starts from all of them and gives
  an order that is never longer, with its distance from the lower bound.

## Elsewhere

`python benchmarks/schedules.py peers` takes orders from other packages, as far as they are installed, and times them on
the same clock: torch.distributed.pipelining, the ZB-H1 of sail-sg (`zbpp_light`), and DeepSeek's DualPipe (`dualpipe`,
cut in half, which makes it a V). With 4, 8 and 16 groups, 1, 2 and 4 microbatches a group, and four sets of costs (all
1; transfers of 0.2; a last stage twice as slow; all stages off by up to a fifth) none of them is shorter at peaks
that are no higher. JaxPP and sail-sg's V-half and V-min come in no package of an index, so this benchmark leaves them
out. Orders that any other program writes as CSV can be looked at and checked:

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
    for named in on_groups(_TABLE_GROUPS):
        timeline = simulate(named.schedule, _TABLE_MICROBATCHES, split_costs(Costs(), named.schedule))
        rows.append(
            f"| {type(named.schedule).__name__} | {named.schedule.num_stages} | {timeline.makespan:g} | "
            f"{timeline.bubble_fraction:.1%} | {max(timeline.idle_within_span):g} | {max(timeline.peak_bytes):g} |"
        )
    return "\n".join(rows) + "\n"


def _description(kind: type) -> str:
    """The docstring up to its example."""
    text = inspect.getdoc(kind) or ""
    return text.split("Example:")[0].rstrip()
