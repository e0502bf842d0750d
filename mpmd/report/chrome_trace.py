"""A profile as a Chrome trace, which Perfetto opens."""

from collections.abc import Iterator, Mapping, Sequence

from mpmd.observe.records import Ran
from mpmd.report.steps import Step


def trace_events(
    steps: Sequence[Step], ranks_of: Sequence[Sequence[int]], shapes: Mapping[int, Sequence[str]]
) -> Iterator[dict[str, object]]:
    """Yields the events of a Chrome trace: a process for each rank, with its host, its groups' devices, and transfers.

    Args:
      shapes: the shape of each microbatch, by the number of a loop; "" where there is only one shape.
    """
    first = min((s.start for s in steps), default=0.0)
    ranks = sorted({r for ranks in ranks_of for r in ranks})
    per_rank = 1 + len(ranks_of)
    # The thread of each rank's host; group g adds g + 1. Perfetto takes id 0, and the process id, for the main thread.
    threads = {rank: ranks[-1] + 1 + i * per_rank for i, rank in enumerate(ranks)}
    for rank, host in threads.items():
        yield _named("process_name", rank, host, name=f"rank {rank}")
        yield _named("process_sort_index", rank, host, sort_index=rank)
        yield _named("thread_name", rank, host, name="host: starts programs")
        for group, of_group in enumerate(ranks_of):
            if rank in of_group:
                yield _named("thread_name", rank, host + 1 + group, name=f"group {group}: devices")
    number = 0
    for count, step in enumerate(steps):
        for r in step.runs:
            shape = shapes[r.loop][r.tasks[0].microbatch] if r.tasks else ""
            yield from _run_events(r, count, first, threads[r.rank], {"shape": shape} if shape else {})
        for m in step.moves:
            number += 1
            common = {"cat": "transfer", "id2": {"local": hex(number)}, "pid": m.rank, "tid": threads[m.rank]}
            common["name"] = f"from group {m.way.source} to {m.way.target}"  # Perfetto shows a row for each name
            args = {"value": str(m.way.value), "bytes": m.nbytes, "step": count}
            yield {**common, "ph": "b", "ts": _micros(m.start - first), "args": args}
            yield {**common, "ph": "e", "ts": max(_micros(m.start - first), _micros(m.end - first))}


def _run_events(r: Ran, step: int, first: float, host: int, more: Mapping[str, str]) -> Iterator[dict[str, object]]:
    args: dict[str, object] = {"step": step, "program": r.name, **more}
    if r.tasks:
        task = r.tasks[0]
        args |= {"stage": task.stage, "kind": "+".join(t.kind for t in r.tasks), "microbatch": task.microbatch}
        args["loop"] = r.loop
    if r.by is not None:
        args["waited for"] = str(r.by)
    for tid, start, end in ((host, r.dispatched, r.returned), (host + 1 + r.group, r.start, r.end)):
        yield {
            "ph": "X", "name": r.title, "cat": "task" if r.tasks else "call", "pid": r.rank, "tid": tid,
            "ts": _micros(start - first), "dur": max(0.0, _micros(end - first) - _micros(start - first)), "args": args,
        }  # fmt: skip


def _named(what: str, pid: int, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
