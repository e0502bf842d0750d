"""Measures saving and restoring a state in stages, against stock Orbax with the same arrays in an SPMD layout.

    python benchmarks/checkpoint.py [--mib 1024] [--repeat 3] [--folder DIR]

There are 4 groups of 2 CPU devices in one process. For stock Orbax, each array is sharded over all 8 devices, and this
library is not imported. In stages, each group has a quarter of the arrays, sharded over its 2 devices. Each way runs in
its own process, so that its peak memory can be measured. The data is random, because trained parameters compress no
better than random numbers.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WAYS = ("stock Orbax, SPMD", "StandardCheckpointer, stages", "reshard.checkpoint, stages")
NUM_ARRAYS = 16
COLUMNS = 2048


def measure(way: str, mib: int, folder: Path) -> dict[str, float]:
    """Returns seconds and peak memory beyond the arrays of one save and one restore, and the bytes on disk."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    rows = mib * 2**20 // NUM_ARRAYS // COLUMNS // 4
    rng = np.random.default_rng(0)
    if way == WAYS[0]:
        everywhere = NamedSharding(mesh, PartitionSpec(("stage", "data")))
        places: list[Any] = [everywhere] * NUM_ARRAYS
    else:
        from mpmd.arrays.mesh import MpmdMesh
        from mpmd.arrays.sharding import MpmdSharding

        groups = MpmdMesh(mesh, "stage")
        places = [MpmdSharding(groups, i * 4 // NUM_ARRAYS, PartitionSpec("data")) for i in range(NUM_ARRAYS)]

    def make(place: Any) -> Any:
        values = rng.standard_normal((rows, COLUMNS), np.float32)
        if way == WAYS[0]:
            return jax.device_put(values, place, may_alias=False)
        from mpmd.arrays.array import MpmdArray

        group = place.groups[0]
        return MpmdArray([jax.device_put(values, place.group_sharding(group), may_alias=False)], place)

    if way != WAYS[0]:
        import reshard.checkpoint
    tree = {f"w{i}": make(place) for i, place in enumerate(places)}
    jax.block_until_ready([a.addressable_shards[0].data for a in tree.values()])
    shardings = dict(zip(tree, places, strict=True))
    like = {name: jax.ShapeDtypeStruct((rows, COLUMNS), np.float32) for name in tree}
    path = folder / "state"
    shutil.rmtree(path, ignore_errors=True)

    def save() -> None:
        if way == WAYS[2]:
            reshard.checkpoint.save(path, tree)
        else:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path, tree)
                checkpointer.wait_until_finished()

    def restore() -> Any:
        if way == WAYS[2]:
            return reshard.checkpoint.restore(path, like, shardings)
        if way == WAYS[1]:
            target = reshard.checkpoint.abstract(like, shardings)
        else:
            target = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in like.items()}
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, target)

    save_s, save_cpu, save_peak, _ = timed(save)
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    restore_s, restore_cpu, restore_peak, restored = timed(lambda: jax.block_until_ready(_arrays(restore())))
    for name, array in zip(sorted(tree), restored, strict=True):
        assert (np.asarray(array) == np.asarray(tree[name])).all(), name
    shutil.rmtree(path)
    return {
        "save": save_s,
        "save_cpu": save_cpu,
        "save_peak": save_peak,
        "restore": restore_s,
        "restore_cpu": restore_cpu,
        "restore_peak": restore_peak - mib * 2**20,
        "disk": on_disk,
    }


def _arrays(tree: dict[str, Any]) -> list[Any]:
    return [getattr(tree[name], "first_mpmd_replica", tree[name]) for name in sorted(tree)]


def timed(run: Any) -> tuple[float, float, int, Any]:
    """Returns seconds, CPU seconds of all cores, peak memory beyond the memory in use before, and the result."""
    before = most = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    result = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    watcher.join()
    return seconds, cpu, most - before, result


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default 1024)")
    parser.add_argument(
        "--repeat", type=int, default=3, help="timed runs of each way, in turn; the fastest counts (default 3)"
    )
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.mib, args.folder)))
        return
    best: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for repeat in range(1 + args.repeat):
            for way in WAYS:
                command = [sys.executable, __file__, "--one", way, "--mib", str(args.mib), "--folder", folder]
                # In the first run freed memory goes back to the system at once, so resident memory is memory in use.
                # It costs time; the other runs are timed.
                env = os.environ | ({} if repeat else {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)})
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
                found = json.loads(done.stdout.splitlines()[-1])
                for key, value in found.items():
                    if key.endswith("_peak") == (repeat == 0):
                        best[way][key] = min(value, best[way].get(key, value))
    print(f"{args.mib} MiB of float32 in {NUM_ARRAYS} arrays, 4 groups x 2 CPU devices; best of {args.repeat}")
    print("memory: the peak beyond the arrays; cpu: seconds of all cores, which other programs change less than time")
    columns = ("save", "ratio", "cpu", "memory", "restore", "ratio", "cpu", "memory", "on disk")
    print(f"  {'way':30}" + "".join(f"{column:>9}" for column in columns))
    base = best[WAYS[0]]
    for way, found in best.items():
        cells: list[str] = []
        for what in ("save", "restore"):
            cells += [f"{found[what]:.2f}s", f"{found[what] / base[what]:.2f}", f"{found[what + '_cpu']:.2f}s"]
            cells.append(f"{max(0, found[what + '_peak']) / 2**20:.0f} MiB")
        cells.append(f"{found['disk'] / 2**20:.0f} MiB")
        print(f"  {way:30}" + "".join(f"{cell:>9}" for cell in cells))


if __name__ == "__main__":
    main()
