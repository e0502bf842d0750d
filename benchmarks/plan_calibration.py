"""Compares a planned step with the same step run: measures costs first, then runs the steps planned from them.

    python benchmarks/plan_calibration.py

Accelerators are emulated, as in `pipeline_efficiency.py`: each task calls back to the host and sleeps, some stages
longer than others. Links can be emulated too: a value is then offered to its receiver only when it would have arrived.
Everything else is the unchanged library, in four processes that `scripts/launch_multihost.sh` starts.

For each kind of link, a first job measures the times of tasks (`Compiled.last_timeline`, with one schedule) and of
transfers (round trips of two sizes). This process plans steps with other schedules and numbers of microbatches from
these costs, as `python -m mpmd plan --costs` does. A second job runs these steps. Prints for each the predicted and the
measured seconds and their ratio, and ends with status 1 if a pair differs by more than 5 %.
"""

import argparse
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_STAGES = 4
FORWARD_MS = (20.0, 30.0, 20.0, 40.0)  # of each stage; a backward task takes twice as long
KBYTES = 256  # of a microbatch's activations
LINKS: dict[str, tuple[float, float] | None] = {
    "as it is": None,
    "emulated": (2e-3, 16e6),
}  # seconds, and bytes a second
MEASURED_WITH = ("1f1b", 8)
PREDICTED = (("1f1b", 16), ("gpipe", 16), ("zb-h1", 16), ("1f1b", 4))
TOLERANCE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="steps (default: %(default)s)")
    parser.add_argument("--only", choices=LINKS, help="this kind of link alone")
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" in os.environ:
        job = json.loads(os.environ["MPMD_CALIBRATION"])
        (measure if job["what"] == "measure" else run)(Path(job["folder"]), job["link"], args.steps)
        return 0
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for link in [args.only] if args.only else LINKS:
            start_job("measure", folder, link, args.steps)
            predicted = [predict(folder, *config) for config in PREDICTED]
            start_job("run", folder, link, args.steps)
            measured = json.loads((folder / "seconds.json").read_text())
            for (schedule, microbatches), p, m in zip(PREDICTED, predicted, measured, strict=True):
                worst = max(worst, abs(p / m - 1))
                print(
                    f"links {link:9} {schedule:6} {microbatches:3} microbatches: predicted {p * 1e3:7.1f} ms,"
                    f" measured {m * 1e3:7.1f} ms, ratio {p / m:.3f}",
                    flush=True,
                )
    print(f"worst: {worst:.1%} apart (aim: {TOLERANCE:.0%})")
    return int(worst > TOLERANCE)


def start_job(what: str, folder: Path, link: str, steps: int) -> None:
    """Runs this file in four processes, to the end."""
    job = json.dumps({"what": what, "folder": str(folder), "link": link})
    command = [str(ROOT / "scripts/launch_multihost.sh"), "-n", str(NUM_STAGES), "--cpu-devices", "1"]
    command += ["--env", "MPMD_CALIBRATION", "--", sys.executable, __file__, "--steps", str(steps)]
    found = subprocess.run(command, env=os.environ | {"MPMD_CALIBRATION": job}, capture_output=True, text=True)
    if found.returncode:
        sys.exit(found.stdout + found.stderr)


def build(mpmd_mesh, schedule="1f1b", num_microbatches=8):
    """Builds the step and its abstract arguments."""
    import jax
    import jax.numpy as jnp

    import mpmd

    def work(x, milliseconds):
        """Returns `x` after that time."""

        def wait(x):
            time.sleep(milliseconds / 1e3)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def stage(milliseconds):
        @jax.custom_vjp
        def apply(w, x):
            return work(x, milliseconds) * w

        def forward(w, x):
            return apply(w, x), (w, x)

        def backward(residuals, dy):
            # Each gradient needs only one of the two waits, so a schedule may split them. The first stage has no I.
            w, x = residuals
            return work(dy, milliseconds) * x, work(dy * 1.0, milliseconds) * w

        apply.defvjp(forward, backward)
        return apply

    stages = [stage(milliseconds) for milliseconds in FORWARD_MS]

    def loss(ws, x):
        for i, (apply, w) in enumerate(zip(stages, ws, strict=True)):
            x = apply(w, x)
            x = mpmd.mark_stage_end(x) if i < NUM_STAGES - 1 else x
        return (x * x).mean()

    def step(ws, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)
        return [w - 0.0 * g for w, g in zip(ws, grads, strict=True)], value

    w = jax.ShapeDtypeStruct((KBYTES << 8,), jnp.float32)
    xs = jax.ShapeDtypeStruct((num_microbatches, *w.shape), jnp.float32)
    return mpmd.jit(step, mpmd_mesh=mpmd_mesh, donate_argnums=0), ([w] * NUM_STAGES, xs)


def compiled(mesh, schedule: str, microbatches: int):
    step, arguments = build(mesh, schedule, microbatches)
    return step.lower(*arguments).compile()


def predict(folder: Path, schedule: str, microbatches: int) -> float:
    """Returns the planned seconds of a step, from the costs in the folder, in this process alone."""
    os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(NUM_STAGES))
    import jax

    import mpmd
    from mpmd.costs.machine import Machine
    from mpmd.planning.plan import plan_step
    from scheduler import Costs

    transfers = json.loads((folder / "transfers.json").read_text())
    rate = transfers["bytes_per_s"]
    target = dataclasses.replace(mpmd.Target.named("h100"), link_bandwidth=rate, network_bandwidth=rate)
    machine = Machine(target, link_efficiency=1.0, latency_s=transfers["latency_s"])
    costs = Costs.from_json((folder / "trace.json").read_text())
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_STAGES,), ("stage",)), "stage")
    found = compiled(mesh, schedule, microbatches)
    return plan_step(found._programs, found.program, machine, costs=costs).step.seconds


# --- in the job's processes -----------------------------------------------------------------------


def joined(link: str):
    """Joins the job. Returns the mesh, with the given links."""
    import jax

    import mpmd
    from mpmd.job import joining

    mpmd.initialize()
    if (figures := LINKS[link]) is not None:
        job = joining.current()
        assert job is not None
        wire, links = job.wire, {}
        offer = wire.send

        def send(number, array, target):
            if target not in links:
                links[target] = Link(*figures, offer)
            links[target].values.put((number, array, target))

        wire.send = send
    return mpmd.MpmdMesh(jax.make_mesh((NUM_STAGES,), ("stage",)), "stage")


class Link:
    """A link to one device: a value occupies it for its bytes, and arrives `latency_s` later."""

    def __init__(self, latency_s: float, bytes_per_s: float, offer):
        self.latency_s, self.bytes_per_s, self.offer = latency_s, bytes_per_s, offer
        self.values: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self.carry, daemon=True).start()

    def carry(self) -> None:
        free = 0.0
        while True:
            number, array, target = self.values.get()
            array.block_until_ready()
            free = max(free, time.perf_counter()) + array.nbytes / self.bytes_per_s
            timer = threading.Timer(free + self.latency_s - time.perf_counter(), self.offer, (number, array, target))
            timer.daemon = True
            timer.start()


def measure(folder: Path, link: str, steps: int) -> None:
    """Writes `trace.json`, the timeline of a step, and `transfers.json`."""
    import jax

    mesh = joined(link)
    found = compiled(mesh, *MEASURED_WITH)
    trace = found.last_timeline().to_chrome_trace()
    small, large = (round_trip(mesh, size, steps) / 2 for size in (1, KBYTES << 8))
    if jax.process_index() == 0:
        (folder / "trace.json").write_text(trace)
        bytes_per_s = (KBYTES << 10) / max(large - small, 1e-9)
        (folder / "transfers.json").write_text(json.dumps({"latency_s": small, "bytes_per_s": bytes_per_s}))


def round_trip(mesh, size: int, steps: int) -> float:
    """Returns the median seconds of a value of `size` floats from group 0 to group 1 and back."""
    import jax
    import jax.numpy as jnp

    import mpmd

    here = mpmd.MpmdSharding(mesh, {0}, jax.sharding.PartitionSpec())
    both_ways = mpmd.jit(
        lambda x: mpmd.place(mpmd.place(x, 1) + 0, 0) + 0, mpmd_mesh=mesh, in_shardings=here, out_shardings=here
    )
    x = both_ways(jnp.ones(size))
    times = []
    for _ in range(2 * steps + 1):
        start = time.perf_counter()
        x = both_ways(x)
        jax.block_until_ready(x.to_mpmd_local_array)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def run(folder: Path, link: str, steps: int) -> None:
    """Writes `seconds.json`: the median seconds of a step of each configuration."""
    import jax
    import numpy as np

    mesh = joined(link)
    seconds = []
    for schedule, microbatches in PREDICTED:
        step = compiled(mesh, schedule, microbatches)
        ws = [np.ones(KBYTES << 8, np.float32)] * NUM_STAGES
        xs = np.ones((microbatches, KBYTES << 8), np.float32)
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            ws, value = step(ws, xs)
            jax.block_until_ready([x.to_mpmd_local_array for x in (*ws, value)])
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times[1:]))
    if jax.process_index() == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    sys.exit(main())
