"""A pipeline of one stage a rank in which one rank goes wrong in a given way.

    faults.py FAULT GUILTY    prints `step N` before each step, `about to FAULT` in the guilty rank, `done` at the end

The ranks other than the guilty one go on as if nothing happened.
"""

import argparse
import contextlib
import ctypes
import os
import re
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import mpmd
import scheduler
from mpmd.job import joining, wires

WIDTH, ROWS, MICROBATCHES = 4, 2, 4
NUM_STEPS = 8
FAULT_STEP = 4
FOR_EVER_S = 600


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("guilty", type=int)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long a slow thing takes")
    parser.add_argument("--timeout", default="300", help="hang_timeout_s of mpmd.initialize, or None")
    return parser.parse_args()


def groups_of(fault: str) -> list[list]:
    """One device a group; where a collective gets stuck, two ranks a group."""
    devices = jax.devices()
    if fault == "collective":
        return [devices[i : i + 2] for i in range(0, len(devices), 2)]
    return [[d] for d in devices]


class Pipeline:
    """The step; where a fault wants it, the guilty rank's stage calls the host, which may sleep."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.guilty = options.guilty == jax.process_index()
        self.sleeps, self.raises = 0.0, False
        groups = groups_of(options.fault)
        self.num_stages = len(groups)
        self.mesh = mpmd.MpmdMesh.from_groups([Mesh(np.array(g), ("data",)) for g in groups])
        other = options.fault == "schedule" and self.guilty
        self.schedule = (scheduler.GPipe if other else scheduler.OneFOneB)(self.num_stages)
        self.step = mpmd.jit(self.run, mpmd_mesh=self.mesh)

    def on_host(self, x):
        if self.raises:
            raise ValueError("a bad callback")
        if self.sleeps:
            time.sleep(self.sleeps)
        return x

    def called_back(self, x):
        return jax.pure_callback(self.on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    def stage(self, number, w, x):
        x = jnp.tanh(x @ w)
        if self.options.fault in ("callback", "slow", "raise") and number == self.options.guilty:
            return self.called_back(x)
        if self.options.fault == "collective" and number == self.options.guilty // 2:
            rows = PartitionSpec("data")

            def summed(x):
                return jax.lax.psum(self.called_back(x), "data") + 0 * x

            return jax.shard_map(summed, in_specs=rows, out_specs=rows, check_vma=False)(x)
        return x

    def run(self, ws, xs):
        def loss(x):
            for number, w in enumerate(ws):
                x = self.stage(number, w, x if number == 0 else mpmd.mark_stage_end(x))
            return jnp.mean(x**2)

        if self.options.fault == "long_trace" and self.guilty:
            time.sleep(self.options.seconds)
        return mpmd.treduce(loss, xs, schedule=self.schedule, operation=mpmd.Mean)


def lose_one_transfer() -> None:
    """The next send of this rank goes nowhere."""
    send = wires.PullWire.send
    lost = []

    def lossy(self, number, array, target):
        if not lost:
            lost.append(number)
            return None
        return send(self, number, array, target)

    wires.PullWire.send = lossy


class LateStore:
    """The key-value store, whose answers take some seconds; they are waited for in C++, as ever."""

    def __init__(self, store, seconds: float):
        self._store, self._seconds = store, seconds

    def __getattr__(self, name):
        return getattr(self._store, name)

    def key_value_dir_get(self, key):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.blocking_key_value_get("never", round(1000 * self._seconds))
        return self._store.key_value_dir_get(key)


def go_wrong(fault: str, pipeline: Pipeline) -> None:
    """What the guilty rank does in its `FAULT_STEP`-th step."""
    print(f"about to {fault}", flush=True)
    if fault == "exception":
        raise ValueError("a bad batch\nin two lines")
    if fault == "memory":
        raise MemoryError("no room for the batch")
    if fault == "exit0":
        sys.exit(0)
    if fault == "exit3":
        sys.exit(3)
    if fault == "exit_text":
        sys.exit("no data")
    if fault == "raise_exit":
        raise SystemExit(4)
    if fault == "raise":
        pipeline.raises = True
    if fault == "os_exit":
        os._exit(7)
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "absent":
        time.sleep(FOR_EVER_S)
    if fault == "hold":
        ctypes.PyDLL(None).sleep(round(pipeline.options.seconds))
    if fault == "hold_for_ever":
        re.match("(a+)+$", 60 * "a" + "b")
    if fault == "lost":
        lose_one_transfer()
    if fault in ("callback", "collective"):
        pipeline.sleeps = FOR_EVER_S
    if fault == "slow":
        pipeline.sleeps = pipeline.options.seconds / MICROBATCHES
    if fault == "late":
        time.sleep(pipeline.options.seconds)
    if fault == "late_store":
        boards = joining.current().watchdog.boards
        boards.store = LateStore(boards.store, pipeline.options.seconds)


def main() -> None:
    options = parse()
    mpmd.initialize(hang_timeout_s=None if options.timeout == "None" else float(options.timeout))
    pipeline = Pipeline(options)
    ws = [np.eye(WIDTH, dtype=np.float32)] * pipeline.num_stages
    rows = 2 * ROWS if options.fault == "shape" and pipeline.guilty else ROWS
    last = None
    for number in range(NUM_STEPS):
        print(f"step {number}", flush=True)
        if number == FAULT_STEP:
            if pipeline.guilty:
                go_wrong(options.fault, pipeline)
            if options.fault == "idle":  # all of them, one later than the others
                time.sleep(options.seconds * (1 + 0.1 * pipeline.guilty))
        last = float(pipeline.step(ws, np.full((MICROBATCHES, rows, WIDTH), 0.1 * number, np.float32)))
        pipeline.sleeps = 0.0
    print(f"done {last:.6f}", flush=True)


if __name__ == "__main__":
    main()
