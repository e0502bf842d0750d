"""Compares the schedules with those of other packages, and measures the search and the simulator.

python benchmarks/schedules.py peers     # with the packages that are installed: pip install torch dualpipe zbpp_light
python benchmarks/schedules.py search    # faster and better with: pip install -e '.[search]'
python benchmarks/schedules.py recompute  # split backwards under jax.checkpoint, by the products of each task
python benchmarks/schedules.py scale --groups 256 --microbatches 1024     # what a plan costs
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from scheduler import Costs, OneFOneB, Task, TaskGraph, check, investigate, lower, merge, simulate
from scheduler.ordering import order_faults
from scheduler.schedules.catalogue import make
from scheduler.task import Orders
from scheduler.timing.simulate import simulate_orders

Orderer = Callable[[str, tuple[int, ...], int, int], Orders]
PEERS: dict[str, dict[str, str]] = {
    "torch": {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved-gpipe": "ScheduleLoopedBFS",
        "interleaved-1f1b": "ScheduleInterleaved1F1B",
        "interleaved-zb": "ScheduleInterleavedZeroBubble",
        "zb-v": "ScheduleZBVZeroBubble",
        "dualpipe-v": "ScheduleDualPipeV",
    },
    "zbpp_light": {"zb-h1": "auto_schedule"},
    "dualpipe": {"dualpipe-v": "DualPipe"},
}


def cost_sets(num_stages: int) -> dict[str, Costs]:
    """Returns the four sets of costs under which schedules are compared."""
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
    """Prints both makespans where the peer's order is valid. Returns how often it is shorter at no higher peak."""
    makers: dict[str, Callable[[], Orderer]] = {"torch": _torch, "zbpp_light": _zbpp_light, "dualpipe": _dualpipe}
    shorter = cases = 0
    for peer, names in PEERS.items():
        try:
            orders_of = makers[peer]()
        except ImportError:
            print(f"{peer} is not installed: nothing to compare with")
            continue
        for p, factor, (name, peer_name) in itertools.product((4, 8, 16), (1, 2, 4), names.items()):
            more_cases, lost = _compare(peer, orders_of, name, peer_name, p, factor * p)
            cases += more_cases
            shorter += lost
    print(f"{cases} cases; a peer is shorter at no higher peak in {shorter}")
    return shorter


def _compare(peer: str, orders_of: Orderer, name: str, peer_name: str, p: int, m: int) -> tuple[int, int]:
    """Compares one schedule of one peer under all costs. Returns the numbers of cases and of the peer's wins."""
    head = f"{peer:10} {name:18} p={p:2} m={m:2} "
    schedule = make(name, 2 * p if name.startswith("interleaved") else None, p)
    try:
        ours = schedule.orders(m)
        theirs = orders_of(peer_name, tuple(schedule.placement), p, m)
    except (ValueError, AssertionError) as error:
        print(f"{head} left out: {str(error).splitlines()[0]}")
        return 0, 0
    faults = order_faults(theirs, schedule.placement, m)
    if faults:
        print(f"{head} the peer's order is wrong: {len(faults)} faults, first: {faults[0]}")
        return 0, 0
    shorter, cells, peaks = 0, [], ""
    for setting, costs in cost_sets(schedule.num_stages).items():
        one = simulate_orders(ours, schedule.placement, m, costs)
        other = simulate_orders(theirs, schedule.placement, m, costs)
        fits = all(a <= b for a, b in zip(other.peak_activations, one.peak_activations, strict=True))
        lost = fits and other.makespan < one.makespan - 1e-9
        shorter += lost
        cells.append(f"{setting} {one.makespan:g}/{other.makespan:g}{' SHORTER' if lost else ''}")
        peaks = f"peak {max(one.peak_activations)}/{max(other.peak_activations)}"
    print(f"{head} ours/theirs: {', '.join(cells)}, {peaks}")
    return len(cells), shorter


def _zbpp_light() -> Orderer:
    """Returns ZB-H1 of sail-sg's zero-bubble. This package calls the input gradient B."""
    from zbpp_light.auto_schedule import auto_schedule  # pyright: ignore[reportMissingImports]

    def orders_of(_: str, placement: tuple[int, ...], num_groups: int, num_microbatches: int) -> Orders:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = auto_schedule(num_groups, num_microbatches)
        kinds: dict[str, Any] = {"F": "F", "B": "I", "W": "W"}
        return tuple(
            tuple(Task(group, kinds[node.type], node.minibatch) for node in row if node.type in kinds)
            for group, row in zip(placement, rows, strict=True)
        )

    return orders_of


def _dualpipe() -> Orderer:
    """Returns half of DeepSeek's DualPipe: the first p of its 2p ranks. Its two directions are the two legs of the V.

    It runs the package's own step, with chunks that only record that they were called.
    """
    import dualpipe  # pyright: ignore[reportMissingImports]

    class Noted(dualpipe.DualPipe):
        def __init__(self, num_groups: int, group: int) -> None:
            object.__setattr__(self, "order", [])
            self.stages = (group, 2 * num_groups - 1 - group)
            self.next = {("F", 0): 0, ("F", 1): 0, ("I", 0): 0, ("I", 1): 0}
            self.waiting: list[Task] = []
            self.rank, self.num_ranks, self.batch_dim = group, 2 * num_groups, 0
            self.is_first_rank = self.is_last_rank = self.is_in_second_half = False
            self.is_middle_rank = group == num_groups - 1

        def _note(self, kind: Any, phase: int) -> Task:
            task = Task(self.stages[phase], kind, self.next[kind, phase])
            self.next[kind, phase] += 1
            self.order.append(task)
            return task

        def _forward_chunk(self, phase: int, recv: bool = True, send: bool = True) -> None:
            self._note("F", phase)

        def _backward_chunk(self, phase: int, enable_zb: bool = False, recv: bool = True, send: bool = True) -> None:
            task = self._note("I", phase)
            if enable_zb:
                self.waiting.append(task._replace(kind="W"))
            else:
                self.order[-1] = task._replace(kind="B")

        def _forward_backward_chunk(self, phase0: int, phase1: int, recv0: bool = True) -> None:
            self._forward_chunk(phase0)
            self._backward_chunk(phase1)

        def _weight_chunk(self) -> None:
            self.order.append(self.waiting.pop(0))

        def _nothing(self, *_: Any) -> None:
            pass

        _recv_forward = _send_forward = _recv_backward = _send_backward = _nothing
        _commit_and_wait_comm = _nothing

    def orders_of(_: str, placement: tuple[int, ...], num_groups: int, num_microbatches: int) -> Orders:
        del placement
        dualpipe.set_p2p_tensor_shapes([(1,)])
        dualpipe.set_p2p_tensor_dtype(float)
        orders = []
        for group in range(num_groups):
            noted = Noted(num_groups, group)
            noted.step(num_chunks=2 * num_microbatches)
            orders.append(tuple(noted.order))
        return tuple(orders)

    return orders_of


def _torch() -> Orderer:
    from torch.distributed.pipelining import schedules  # pyright: ignore[reportMissingImports]

    return functools.partial(_torch_orders, schedules)


def _torch_orders(module: Any, name: str, placement: tuple[int, ...], num_groups: int, num_microbatches: int) -> Orders:
    """Returns the table of orders that torch makes, without building stages."""
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
    """Searches with 8 groups and 16 microbatches, for each set of costs and three memory limits."""
    for setting, costs in cost_sets(16).items():
        for limit in (16, 10, 8):
            begin = time.perf_counter()
            found = investigate(16, 8, 16, costs, placement="v", memory_limit=limit, seconds=seconds)
            took = time.perf_counter() - begin
            print(
                f"{setting}, at most {limit}: {took:.1f} s, {found.tries} tries\n  " + str(found).replace("\n", "\n  ")
            )


def recompute() -> None:
    """Simulates transformer stages in 8 groups, with and without `jax.checkpoint`; a task costs its matrix products."""
    for name in ("zb-h1", "zb-v", "dualpipe-v"):
        schedule = make(name, None, 8)
        plain, again = (_products_of_tasks(schedule, is_checkpointed) for is_checkpointed in (False, True))
        unit = plain["F"][1]
        added = [0.0] * schedule.num_groups
        for stage, group in enumerate(schedule.placement):
            added[group] += sum(again[kind][stage] - plain[kind][stage] for kind in "FRIW") / unit
        in_i = again | {"R": [0.0] * schedule.num_stages, "I": _sums(again["R"], again["I"])}
        whole = in_i | {"I": _sums(in_i["I"], in_i["W"]), "W": [0.0] * schedule.num_stages}
        for m in (16, 32):
            spans = [
                simulate(schedule, m, Costs(tuple(c["F"]), tuple(c["I"]), tuple(c["W"]), recompute=tuple(c["R"])))
                for c in (plain, again, in_i, whole)
            ]
            without, ahead, waiting, undivided = (timeline.makespan / unit for timeline in spans)
            bound = without + m * max(added)
            print(
                f"{name:10} {m} microbatches: without {without:.0f}, plus the recomputation {bound:.0f};"
                f" checkpointed {ahead:.0f} ({ahead / bound - 1:+.1%}), recomputation inside I {waiting:.0f}"
                f" ({waiting / bound - 1:+.1%}), and without W {undivided:.0f}"
            )


def _sums(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _products_of_tasks(schedule: Any, is_checkpointed: bool) -> dict[str, list[float]]:
    """Counts operations of matrix products in the tasks of each stage: two layers, of width and length 256."""
    import jax
    import jax.numpy as jnp

    import mpmd
    from mpmd.costs.work import work_of_equation

    def layer(p: Any, x: Any) -> Any:
        q, k, v = jnp.split(jnp.tanh(x) @ p["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), -1) @ v @ p["out"]
        return x + jax.nn.gelu(jnp.tanh(x) @ p["up"]) @ p["down"]

    layer = jax.checkpoint(layer) if is_checkpointed else layer

    def loss(params: Any, x: Any) -> Any:
        for stage, p in enumerate(params):
            x = jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0]
            x = mpmd.mark_stage_end(x) if stage < schedule.num_stages - 1 else x
        return jnp.mean(x**2)

    jax.config.update("jax_num_cpu_devices", 8)
    mesh = mpmd.MpmdMesh(jax.make_mesh((8,), ("stage",)), "stage")
    widths = {"qkv": (256, 768), "out": (256, 256), "up": (256, 1024), "down": (1024, 256)}
    params = [{n: jax.ShapeDtypeStruct((2, *s), jnp.float32) for n, s in widths.items()}] * schedule.num_stages
    step = mpmd.jit(
        lambda params, xs: mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule=schedule), mpmd_mesh=mesh
    )
    lowered = step.lower(params, jax.ShapeDtypeStruct((16, 2, 256, 256), jnp.float32))
    found = {kind: [0.0] * schedule.num_stages for kind in "FRIW"}
    for task in lowered._outline.loops[0].partition.tasks:
        found[task.place.kind][task.place.stage] = sum(work_of_equation(e).products for e in task.eqns)
    return found


def scale(num_groups: int, num_microbatches: int) -> None:
    """Times the simulation of 1F1B, and its plan: orders, instructions, proof, and the merged list of one group."""

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = function()
        took = time.perf_counter() - begin
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        each = took / (2 * num_groups * num_microbatches) * 1e6
        print(f"  {name:9} {took:6.1f} s, {each:5.1f} µs a task, {memory:.1f} GiB at most so far", flush=True)
        return result

    print(f"{num_groups:,} groups × {num_microbatches:,} microbatches of 1F1B")
    schedule = OneFOneB(num_groups)
    timed("simulate", lambda: simulate(schedule, num_microbatches))
    orders = timed("orders", lambda: schedule.orders(num_microbatches))
    graph = TaskGraph.chain(num_groups)
    program = timed("lower", lambda: lower(graph, schedule, num_microbatches, orders=orders))
    timed("check", lambda: check(program))
    timed("merge", lambda: merge(program, {num_groups // 2}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["peers", "search", "recompute", "scale"])
    parser.add_argument("--groups", type=int, default=1024, help="for scale (default 1024)")
    parser.add_argument("--microbatches", type=int, default=4096, help="for scale (default 4096)")
    parser.add_argument("--seconds", type=float, default=10, help="for each search (default 10)")
    options = parser.parse_args()
    if options.what == "peers":
        return int(peers() > 0)
    if options.what == "search":
        search(options.seconds)
    elif options.what == "recompute":
        recompute()
    else:
        scale(options.groups, options.microbatches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
