"""How the schedules compare with those of the same name in torch, how far a search gets, and how fast the simulator is.

python benchmarks/schedules.py peers     # needs torch: pip install torch
python benchmarks/schedules.py search    # faster and further with: pip install jax-mpmd[search]
python benchmarks/schedules.py scale     # 1,024 groups, 4,096 microbatches
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from types import SimpleNamespace
from typing import Any

from scheduler import Costs, OneFOneB, Task, investigate, simulate
from scheduler.catalogue import make
from scheduler.ordering import order_faults
from scheduler.simulate import simulate_orders
from scheduler.task import Orders

TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-gpipe": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def cost_sets(num_stages: int) -> dict[str, Costs]:
    """The four settings that are compared."""
    rng = random.Random(num_stages)

    def spread() -> tuple[float, ...]:
        return tuple(1 + rng.uniform(-0.2, 0.2) for _ in range(num_stages))

    heavy = (*[1.0] * (num_stages - 1), 2.0)
    return {
        "uniform": Costs(),
        "transfers": Costs(1.0, 1.1, 0.8, transfer_s=0.2),
        "heavy last stage": Costs(heavy, heavy, heavy),
        "uneven": Costs(spread(), spread(), spread()),
    }


def peers() -> int:
    """Prints both makespans wherever the peer's order is right; returns how often it is shorter at no higher peak."""
    try:
        from torch.distributed.pipelining import schedules as torch_schedules  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("torch is not installed: nothing to compare with")
        return 0
    shorter = 0
    for p in (4, 8, 16):
        for m in (p, 2 * p, 4 * p):
            for name, peer_name in TORCH.items():
                several = name.startswith("interleaved")
                schedule = make(name, 2 * p if several else None, p)
                try:
                    ours = schedule.orders(m)
                    theirs = _torch_orders(torch_schedules, peer_name, schedule.placement, p, m)
                except ValueError as error:
                    print(f"{name:18} p={p:2} m={m:2}  left out: {str(error).splitlines()[0]}")
                    continue
                faults = order_faults(theirs, schedule.placement, m)
                if faults:
                    print(
                        f"{name:18} p={p:2} m={m:2}  torch's order is wrong: {len(faults)} faults, first: {faults[0]}"
                    )
                    continue
                cells = []
                for setting, costs in cost_sets(schedule.num_stages).items():
                    one = simulate_orders(ours, schedule.placement, m, costs)
                    other = simulate_orders(theirs, schedule.placement, m, costs)
                    fits = all(a <= b for a, b in zip(other.peak_activations, one.peak_activations, strict=True))
                    lost = fits and other.makespan < one.makespan - 1e-9
                    shorter += lost
                    cells.append(f"{setting} {one.makespan:g}/{other.makespan:g}{' SHORTER' if lost else ''}")
                peaks = f"peak {max(one.peak_activations)}/{max(other.peak_activations)}"
                print(f"{name:18} p={p:2} m={m:2}  ours/torch: {', '.join(cells)}, {peaks}")
    print(f"torch is shorter at no higher peak in {shorter} cases")
    return shorter


def _torch_orders(module: Any, name: str, placement: tuple[int, ...], num_groups: int, num_microbatches: int) -> Orders:
    """The table of orders that torch makes, without building any stage."""
    kind = getattr(module, name)
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(placement),
            group_size=num_groups,
            group_rank=0,
            has_backward=True,
            submod=module.torch.nn.Identity(),
            is_first=stage == 0,
            is_last=stage == len(placement) - 1,
        )
        for stage, group in enumerate(placement)
        if group == 0
    ]
    single = issubclass(kind, module.PipelineScheduleSingle)
    made = kind(stages[0] if single else stages, num_microbatches, loss_fn=lambda *_: 0)
    table = made._get_pipeline_order() if single else made.pipeline_order
    orders: list[list[Task]] = [[] for _ in range(num_groups)]
    for rank, actions in table.items():
        for action in actions:
            text = str(action)
            if action is None or "REDUCE" in text:
                continue
            cells = text[1 : text.index(")")].split(";") if text.startswith("(") else [text]
            orders[rank] += map(Task.parse, cells)
    return tuple(map(tuple, orders))


def search(seconds: float) -> None:
    """Searches at 8 groups and 16 microbatches for each setting and three memory limits."""
    for setting, costs in cost_sets(16).items():
        for limit in (16, 10, 8):
            begin = time.perf_counter()
            found = investigate(16, 8, 16, costs, placement="v", memory_limit=limit, seconds=seconds)
            took = time.perf_counter() - begin
            print(
                f"{setting}, at most {limit}: {took:.1f} s, {found.tries} tries\n  " + str(found).replace("\n", "\n  ")
            )


def scale() -> None:
    """Times the largest simulation that is promised."""
    begin = time.perf_counter()
    timeline = simulate(OneFOneB(1024), 4096)
    took = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"1,024 groups × 4,096 microbatches of 1F1B: makespan {timeline.makespan:g}, {took:.1f} s, {memory:.1f} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["peers", "search", "scale"])
    parser.add_argument("--seconds", type=float, default=10, help="for each search (default 10)")
    options = parser.parse_args()
    if options.what == "peers":
        return int(peers() > 0)
    if options.what == "search":
        search(options.seconds)
    else:
        scale()
    return 0


if __name__ == "__main__":
    sys.exit(main())
