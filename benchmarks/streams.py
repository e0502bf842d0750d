"""Measures a stream of weights between processes against one batched transfer, and what it costs the trainer.

    python benchmarks/streams.py [--senders 1] [--receivers 1] [--mib 1024] [--rounds 7]

First the rate. A tree of 16 MiB tensors, with one stage for each sender, goes to receivers that divide its rows: by a
stream, by a reshard, and by bare pulls of `jax.experimental.transfer`, one for each tensor and receiver, of arrays that
are cut beforehand, all started at once. The three take turns. Prints the median and the least time by the clock, the
median processor time of all processes together, and the bare pulls' part of each. Aim: 0.8.

Then the trainer: steps of `--step-ms` on an emulated accelerator, which sleeps. In turns three steps send nothing, and
three send the tree, which receivers take during the next one. Aim: at most 3 % longer.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable

from ranks import start_ranks

_TENSOR = (4096, 1024)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--senders", type=int, default=1, help="processes that send (default: %(default)s)")
    parser.add_argument("--receivers", type=int, default=1, help="processes that receive (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=1024, help="size of a version (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=2000.0, help="of the trainer (default: %(default)s)")
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" not in os.environ:
        return start_ranks(args.senders + args.receivers)
    run(args)
    return 0


def run(args) -> None:
    del sys.path[0]  # this folder, whose reshard.py would hide the package
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import mpmd
    from mpmd.job import joining
    from reshard.api import mpmd_to_mpmd_reshard, spmd_to_mpmd_reshard
    from reshard.streams.stream import stream as stream_between

    mpmd.initialize()
    job = joining.current()
    assert job is not None
    devices = sorted(jax.devices(), key=lambda d: d.process_index)
    stages, receivers = (
        mpmd.MpmdMesh(Mesh(np.array(some).reshape(shape), ("stage", "rows")), "stage")
        for some, shape in ((devices[: args.senders], (-1, 1)), (devices[args.senders :], (1, -1)))
    )
    names = [f"w{i:03}" for i in range(args.mib // 16)]
    sources = {name: mpmd.MpmdSharding(stages, i % args.senders) for i, name in enumerate(names)}
    targets = dict.fromkeys(names, mpmd.MpmdSharding(receivers, 0, P("rows")))
    params = spmd_to_mpmd_reshard(stages, {name: np.ones(_TENSOR, np.float32) for name in names}, sources)
    stream, versions, numbers = stream_between(sources, targets), itertools.count(), itertools.count(1 << 50)
    rows = _TENSOR[0] // args.receivers
    pulls = [(devices[i % args.senders], there) for i in range(len(names)) for there in devices[args.senders :]]
    cut = [
        jax.numpy.ones((rows, _TENSOR[1]), np.float32) if here.id == devices[job.rank].id else None for here, _ in pulls
    ]

    def by_pulls():
        pulled = []
        for (here, there), x in zip(pulls, cut, strict=True):
            number = next(numbers)
            if x is not None:
                job.wire.send(number, x, there)
            elif there.process_index == job.rank:
                pulled.append(job.wire.receive(number, (rows, _TENSOR[1]), np.float32, here, there))
        return pulled

    def by_stream():
        version = next(versions)
        if stream.sends:
            stream.send(params, version)
        return stream.receive()[0] if stream.receives else None

    def step(sends: bool) -> None:
        version = next(versions)
        time.sleep(args.step_ms / 1000)
        if sends and stream.sends:
            stream.send(params, version)
        elif sends:
            stream.receive(wait=False)

    ways = {
        "bare pulls": by_pulls,
        "a reshard": lambda: mpmd_to_mpmd_reshard(params, targets, donate=False),
        "a stream": by_stream,
    }
    jax.block_until_ready((params, cut))
    rates(args, job, {way: lambda move=move: jax.block_until_ready(move()) for way, move in ways.items()})
    steps(args, job, step)


def rates(args, job, ways: dict[str, Callable]) -> None:
    """Times the ways in turns."""
    everyone = range(job.num_ranks)
    clock, work = ({way: [] for way in ways} for _ in range(2))
    for _ in range(args.rounds + 1):
        for way, move in ways.items():
            job.exchange("benchmark", "", everyone)
            begun, used = time.perf_counter(), time.process_time()
            result = move()
            job.exchange("benchmark", "", everyone)
            clock[way].append(time.perf_counter() - begun)
            used = job.exchange("benchmark", str(time.process_time() - used), everyone)
            work[way].append(sum(map(float, used.values())))
            del result
    if job.rank:
        return
    print(f"{args.mib} MiB from {args.senders} to {args.receivers} processes")
    for way in ways:
        found = {}
        for name, how, all in (
            ("median", statistics.median, clock),
            ("least", min, clock),
            ("cpu", statistics.median, work),
        ):
            found[name], bare = how(all[way][1:]), how(all["bare pulls"][1:])
            found[f"{name} part"] = bare / found[name]
        print(
            f"  {way:10}  {found['median']:6.3f} s ({found['median part']:.2f}), least {found['least']:6.3f} s"
            f" ({found['least part']:.2f}, {args.mib * 2**20 / found['least'] / 1e9:.2f} GB/s),"
            f" processor {found['cpu']:6.3f} s ({found['cpu part']:.2f})",
            flush=True,
        )


def steps(args, job, step: Callable[[bool], None]) -> None:
    """Times steps that send nothing, and steps that send, in turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for sends in seconds:
            job.exchange("benchmark", "", range(job.num_ranks))
            for _ in range(3):
                begun = time.perf_counter()
                step(sends)
                seconds[sends].append(time.perf_counter() - begun)
    if job.rank == 0:
        alone, beside = (1e3 * statistics.median(found) for found in seconds.values())
        more = 100 * (beside / alone - 1)
        print(f"a step of the trainer: {alone:.1f} ms alone, {beside:.1f} ms with a stream: {more:+.1f} %")


if __name__ == "__main__":
    sys.exit(main())
