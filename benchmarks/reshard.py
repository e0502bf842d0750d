"""Measures bytes, time and peak memory of `reshard`, against the ways of plain JAX.

    python benchmarks/reshard.py [--mib 1024] [--repeat 3] [--cold]
    python benchmarks/reshard.py --plan      # 10,000 arrays onto 1,024 devices, nothing moved
    python benchmarks/reshard.py --small     # CPU time for many small arrays, against one batched device_put

There are 4 groups of 2 CPU devices. An SPMD state, sharded over all 8 devices, goes to stages that each own a quarter
of the arrays, and back. Each way runs in its own process, so that its peak resident memory can be measured. The times
are for warm runs, unless `--cold` is given. A run ends when the result is there and the source is freed.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import threading
import time

WAYS = ("device_put", "jit identity", "reshard, no limit", "reshard, 64 MiB", "reshard, 8 MiB", "reshard, 1 MiB")
THRESHOLDS = {"no limit": None, "64 MiB": 64 << 20, "8 MiB": 8 << 20, "1 MiB": 1 << 20}
CASES = ("rows to rows", "rows to columns", "replicated to stages", "stages to rows")


def measure(way: str, case: str, mib: int, repeat: int, cold: bool) -> dict[str, float | int | str]:
    """Returns seconds, bytes moved, and peak resident memory beyond the memory in use before, for one way."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    reshard = library()
    from mpmd.arrays.array import MpmdArray
    from mpmd.arrays.mesh import MpmdMesh
    from mpmd.arrays.sharding import MpmdSharding

    whole = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    mesh = MpmdMesh(whole, "stage")
    num_arrays = 16
    columns = 2048
    rows = mib * 2**20 // num_arrays // columns // 4
    source_spec = {"rows to columns": P(("stage", "data")), "replicated to stages": P("data")}.get(
        case, P(("stage", "data"))
    )
    target_spec = {"rows to columns": P(None, "data")}.get(case, P("data"))
    spmd = NamedSharding(whole, source_spec)
    stages = [MpmdSharding(mesh, i * 4 // num_arrays, target_spec) for i in range(num_arrays)]
    host = [np.full((rows, columns), i, np.float32) for i in range(num_arrays)]

    def make() -> list:
        if case == "stages to rows":
            return [
                MpmdArray([jax.device_put(v, s.group_sharding(s.groups[0]), may_alias=False)], s)
                for v, s in zip(host, stages, strict=True)
            ]
        return [jax.device_put(v, spmd, may_alias=False) for v in host]

    def run(arrays: list) -> list:
        if way.startswith("reshard"):
            threshold = THRESHOLDS[way.removeprefix("reshard, ")] or 1 << 62
            if case == "stages to rows":
                return reshard.mpmd_to_spmd_reshard(mesh, arrays, spmd, threshold)
            return reshard.spmd_to_mpmd_reshard(mesh, arrays, stages, threshold)
        plain = [a.first_mpmd_replica if isinstance(a, MpmdArray) else a for a in arrays]
        if case == "stages to rows":
            targets = [spmd] * num_arrays
        else:
            targets = [s.group_sharding(s.groups[0]) for s in stages]
        if way == "device_put":
            return jax.device_put(plain, targets)
        # A program has one set of devices, so it replicates the result over the stages. A user would drop the surplus.
        if case == "stages to rows":
            return []
        everywhere = [NamedSharding(whole, target_spec)] * num_arrays
        return jax.jit(lambda xs: xs, out_shardings=everywhere)(plain)

    seconds = []
    extra = 0
    for i in range(repeat + (not cold)):
        arrays = jax.block_until_ready(make())
        peak = Peak()
        start = time.perf_counter()
        moved = jax.block_until_ready(run(arrays))
        del arrays  # reshard has donated them already
        elapsed = time.perf_counter() - start
        extra = max(extra, peak.stop())
        if moved and case != "stages to rows" and way != "jit identity":
            assert all((np.asarray(m) == v).all() for m, v in zip(moved, host, strict=True))
        del moved
        if cold or i:
            seconds.append(elapsed)
        if cold:
            break
    if way == "jit identity" and case == "stages to rows":
        return {}
    nbytes = (
        reshard.last_stats().bytes_moved if way.startswith("reshard") else planned_bytes(way, case, spmd, stages, host)
    )
    return {"seconds": min(seconds), "moved": nbytes, "peak": extra}


def planned_bytes(way: str, case: str, spmd, stages: list, host: list) -> int:
    """Returns the bytes that JAX moves.

    A jitted identity moves the bytes that its result lacks; `device_put` a whole array, unless all of it stays.
    """
    from jax.sharding import NamedSharding

    plan = library().plan
    if way == "jit identity":
        everywhere = [NamedSharding(spmd.mesh, s.spec) for s in stages]
        return plan(host, [spmd] * len(host), everywhere).bytes_lower_bound
    pair = (stages, [spmd] * len(host)) if case == "stages to rows" else ([spmd] * len(host), stages)
    through_host = [traffic.moved > 0 for traffic in plan(host, *pair).traffic_of]
    return sum(v.nbytes for v, moves in zip(host, through_host, strict=True) if moves)


def measure_planning() -> None:
    """Prints seconds and memory to plan 10,000 arrays of 200 shapes and 25 pairs of shardings on 1,024 devices."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from mpmd.arrays.mesh import MpmdMesh
    from mpmd.arrays.sharding import MpmdSharding

    reshard = library()
    rng = np.random.default_rng(0)
    whole = reshard.describe_mesh({"stage": 8, "data": 16, "model": 8})
    mesh = MpmdMesh(whole, "stage")
    everything = ("stage", "data", "model")
    spmd = [P(("stage", "data"), "model"), P("model", ("stage", "data")), P(None, everything), P("data"), P(everything)]
    stages = [P("data", "model"), P("model", "data"), P(None, "model"), P(("data", "model")), P()]
    arrays = [jax.ShapeDtypeStruct((1024 * int(k), 2048), np.float16) for k in rng.integers(1, 201, 10_000)]
    here = [NamedSharding(whole, spmd[i]) for i in rng.integers(5, size=10_000)]
    there = [MpmdSharding(mesh, i * 8 // 10_000, stages[j]) for i, j in enumerate(rng.integers(5, size=10_000))]
    for source, target, threshold in ((here, there, 1 << 28), (there, here, 1 << 24)):
        start = time.perf_counter()
        plan = reshard.plan(arrays, source, target, threshold)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{plan}\n  planned in {seconds:.1f} s, peak resident memory {peak:.2f} GiB\n", flush=True)


def measure_small(way: str, num_arrays: int, nbytes: int) -> float:
    """Returns CPU seconds to bring float32 arrays of this size from rows over all devices to rows over stages."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    reshard = library()
    from mpmd.arrays.mesh import MpmdMesh
    from mpmd.arrays.sharding import MpmdSharding

    whole = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    mesh = MpmdMesh(whole, "stage")
    spmd = NamedSharding(whole, P(("stage", "data")))
    stages = [MpmdSharding(mesh, i * 4 // num_arrays, P("data")) for i in range(num_arrays)]
    host = [np.full((nbytes // 64, 16), i, np.float32) for i in range(num_arrays)]
    seconds = []
    for _ in range(5):
        arrays = jax.block_until_ready(jax.device_put(host, [spmd] * num_arrays))
        start = time.process_time()
        if way == "device_put":
            moved = jax.device_put(arrays, [s.group_sharding(s.groups[0]) for s in stages])
        else:
            moved = reshard.spmd_to_mpmd_reshard(mesh, arrays, stages)
        jax.block_until_ready(moved)
        del arrays
        seconds.append(time.process_time() - start)
        assert all((np.asarray(m) == v).all() for m, v in zip(moved, host, strict=True))
        del moved
    return min(seconds[1:])


def compare_small() -> None:
    """Prints both ways side by side, each in its own process."""
    print(f"{'arrays':>8} {'bytes':>9} {'device_put':>11} {'reshard':>9} {'ratio':>6}")
    for num_arrays, nbytes in ((10_000, 1 << 10), (300, 1 << 20)):
        found = []
        for way in ("device_put", "reshard"):
            command = [sys.executable, __file__, "--small", way, str(num_arrays), str(nbytes)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(float(done.stdout.splitlines()[-1]))
        put, ours = found
        print(f"{num_arrays:8} {nbytes:9} {put:10.2f}s {ours:8.2f}s {ours / put:5.2f}x", flush=True)


def library():
    """Returns the package `reshard`, which has the same name as this file."""
    return importlib.import_module("reshard")


class Peak:
    """Peak resident memory since this object was made, beyond the memory in use then. Sampled every millisecond."""

    def __init__(self) -> None:
        self._before = self._most = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._most = max(self._most, resident())

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._most - self._before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default 1024)")
    parser.add_argument("--repeat", type=int, default=3, help="number of runs; the fastest counts (default 3)")
    parser.add_argument("--cold", action="store_true", help="the first run in the process, with compilation")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true", help="measure planning instead")
    parser.add_argument("--small", nargs="*", help="measure many small arrays instead")
    args = parser.parse_args()
    if args.small:
        way, num_arrays, nbytes = args.small
        print(measure_small(way, int(num_arrays), int(nbytes)))
        return
    if args.small is not None:
        compare_small()
        return
    if args.plan:
        measure_planning()
        return
    if args.one:
        way, case = args.one
        print(json.dumps(measure(way, case, args.mib, args.repeat, args.cold)))
        return
    print(f"{args.mib} MiB of float32 in 16 arrays, 4 groups x 2 CPU devices, {'cold' if args.cold else 'warm'}")
    for case in args.case or CASES:
        print(f"\n{case}\n  {'way':20} {'seconds':>8} {'moved':>9} {'memory':>9}")
        for way in WAYS:
            command = [sys.executable, __file__, "--one", way, case, "--mib", str(args.mib)]
            command += ["--repeat", str(args.repeat)] + ["--cold"] * args.cold
            # With this setting freed memory goes back to the system at once, so resident memory is memory in use.
            env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
            line = done.stdout.splitlines()[-1]
            if result := json.loads(line):
                moved, peak = (f"{result[key] / 2**20:.0f} MiB" for key in ("moved", "peak"))
                print(f"  {way:20} {result['seconds']:8.3f} {moved:>9} {peak:>9}", flush=True)


if __name__ == "__main__":
    main()
