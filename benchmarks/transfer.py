"""Measures values between two CPU processes: through this library, and by bare pulls of `jax.experimental.transfer`.

    python benchmarks/transfer.py

Both ways use one transfer server and take turns in one run. Prints for each size the time per value (each value is
pulled and waited for before the next), the bandwidth of many values at once, and the ratios. Aims: at least 0.9 of the
bare bandwidth for large values, at most 1.3 times the bare latency for small ones.
"""

import argparse
import os
import statistics
import sys
import time

from ranks import start_ranks

SIZES = (4, 4 << 10, 256 << 10, 4 << 20, 32 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=7, help="rounds of each measurement; the median counts (default: %(default)s)"
    )
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" in os.environ:
        run(args.repeats)
        return 0
    return start_ranks(2)


def run(repeats: int) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import mpmd
    from mpmd.job import joining
    from mpmd.run.routes import ValueRoute

    mpmd.initialize()
    job = joining.current()
    assert job is not None
    here, there = (next(d for d in jax.devices() if d.process_index == p) for p in (0, 1))
    source, target = (NamedSharding(Mesh(np.array([d]), ("data",)), PartitionSpec()) for d in (here, there))
    numbers = iter(range(1 << 50, 1 << 60))

    def bare(x, aval):
        number = next(numbers)
        if job.rank == 0:
            job.wire.send(number, x, there)
            return None
        return job.wire.receive(number, aval.shape, aval.dtype, here, there)

    def ours(x, aval):
        # A program makes a route once for each of its edges; the number of the route's piece changes with every step.
        route = routes.setdefault(aval.shape, ValueRoute(job, source, target, aval, 0, False, "benchmark"))
        number = next(numbers)
        return route.carry(x, number)

    def measure(move, x, aval, count, at_once):
        job.exchange("benchmark", "", (0, 1))
        if job.rank == 0:
            for _ in range(count):
                move(x, aval)
            job.exchange("benchmark", "", (0, 1))
            return 0.0
        time.sleep(0.02)  # gives the other process time to offer all values
        start = time.perf_counter()
        values = []
        for _ in range(count):
            value = move(None, aval)
            if at_once:
                values.append(value)
            else:
                value.block_until_ready()
        jax.block_until_ready(values)
        seconds = (time.perf_counter() - start) / count
        job.exchange("benchmark", "", (0, 1))
        return seconds

    routes: dict = {}
    for nbytes in SIZES:
        aval = jax.ShapeDtypeStruct((nbytes // 4,), np.float32)
        x = jax.device_put(np.ones(aval.shape, np.float32), here) if job.rank == 0 else None
        count = max(4, min(200, (64 << 20) // nbytes))
        found: dict[tuple[str, bool], list[float]] = {}
        for _ in range(repeats + 1):
            for name, move in (("bare", bare), ("ours", ours)):
                for at_once in (False, True):
                    found.setdefault((name, at_once), []).append(measure(move, x, aval, count, at_once))
        if job.rank == 1:
            t = {key: statistics.median(seconds[1:]) for key, seconds in found.items()}
            rates = {name: nbytes / t[name, True] / 1e9 for name in ("bare", "ours")}
            print(
                f"{nbytes:>9} B  one: bare {t['bare', False] * 1e6:8.0f} us, ours {t['ours', False] * 1e6:8.0f} us, "
                f"ratio {t['ours', False] / t['bare', False]:.2f}   {count:3} at once: bare {rates['bare']:6.3f} GB/s, "
                f"ours {rates['ours']:6.3f} GB/s, ratio {rates['ours'] / rates['bare']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
