"""Why a job hung or was slow, from the flight records of its ranks: ``python -m mpmd replay DIR``."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import scheduler
from scheduler import Call, Instruction, Program, Recv, Run, ScheduleError, Send, Value
from scheduler.base import texts
from scheduler.base.texts import counted, in_seconds
from scheduler.engine import run_until_blocked

# A slow rank is reported if others wait for it for more than this share of the time.
_MUCH = 0.2
# Samples of a shorter time than this are ignored.
_SHORTEST_S = 2.0
# A wait that is not longer than this is ignored.
_SHORT_S = 0.25
# The longest time from the end of a wait to the record, where the end of another rank ended the wait.
_SHORTLY_S = 5.0
_MAX_CELL = 60

Record = dict[str, Any]


def replay(records: Mapping[int, Record], plans: Mapping[str, Program]) -> str:
    """Returns the report: the verdict, the plan, each rank's last instruction, who waited for whom, who was slow."""
    return "\n".join(_lines(records, plans))


def _lines(records: Mapping[int, Record], plans: Mapping[str, Program]) -> Iterator[str]:
    some = next(iter(records.values()))
    num_ranks = some["num_ranks"]
    missing = [r for r in range(num_ranks) if r not in records]
    without = f"; none of rank {', '.join(map(str, missing))}" if missing else ""
    yield f"records of {len(records)} of {num_ranks} ranks{without}"
    yield _verdict(records)
    boards = _boards(records)
    yield from (f"  {line}" for line in _table(records, boards))
    yield from _at(records)
    name, program, ranks = _last_program(records, plans)
    if program is not None:
        yield _checked(name, program)
    guilty = _guilty(records)
    yield from _chain(boards, guilty)
    if program is not None and guilty is not None:
        yield from _simulated(program, ranks, boards, guilty)
    yield from _slow(records)


def _verdict(records: Mapping[int, Record]) -> str:
    """Returns the most frequent verdict in the records; on a tie, one that names a rank."""
    records = _telling(records)
    said = [r["why"] for r in records.values()]
    most = max(sorted(set(said)), key=lambda why: (said.count(why), why.startswith("jax-mpmd: rank ")))
    ranks = [rank for rank, record in records.items() if record["why"] == most]
    return most if len(ranks) > 1 or most.startswith("jax-mpmd: ") else f"rank {ranks[0]}: {most}"


def _telling(records: Mapping[int, Record]) -> Mapping[int, Record]:
    """Returns the records about the end of the job: from outside, or by a verdict, whichever came first."""
    ended = {rank: r for rank, r in records.items() if r["why"] != "asked for"} or dict(records)
    first = min(ended.values(), key=lambda r: r.get("wall", 0.0))
    return {rank: r for rank, r in ended.items() if bool(r.get("interrupted")) == bool(first.get("interrupted"))}


def _guilty(records: Mapping[int, Record]) -> int | None:
    named = [r["guilty"] for r in _telling(records).values() if r.get("guilty") is not None]
    return max(sorted(set(named)), key=named.count) if named else None


def _boards(records: Mapping[int, Record]) -> dict[int, Record]:
    """Returns the last known view of each rank: from its own record, else from the record with its latest board."""
    telling = _telling(records)
    found: dict[int, Record] = {}
    for rank, record in telling.items():
        for key, view in record.get("views", {}).items():
            other = int(key)
            heard = found[other]["silent_s"] if other in found else view["silent_s"]
            if other == rank or (other not in telling and view["silent_s"] <= heard):
                found[other] = view
    for rank, record in records.items():
        own = found.get(rank)
        if own is not None and not own["board"].get("wait") and (wait := _last_wait(record)) is not None:
            found[rank] = {**own, "board": {**own["board"], "wait": wait}}
    return dict(sorted(found.items()))


def _last_wait(record: Record) -> Record | None:
    """Returns the wait of a rank until shortly before its record: when a rank ends, transfers from it fail."""
    for first, last, *_, what, ranks in reversed(record["samples"]):
        if last < record["now"] - _SHORTLY_S:
            return None
        if ranks and last - first > _SHORTLY_S / 5:
            return {"what": what, "ranks": ranks, "for_s": last - first}
    return None


def _table(records: Mapping[int, Record], boards: Mapping[int, Record]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("rank", "step", "last instruction", "seconds ago", "then", "waits for", "from", "seconds")
    ]
    for rank in sorted({*records, *boards}):
        view = boards.get(rank)
        board = {} if view is None else view["board"]
        last, ago = _last_instruction(records[rank]) if rank in records else (board.get("doing") or "not known", "")
        wait = board.get("wait") or {"what": "", "ranks": [], "for_s": 0.0}
        state = "" if view is None else view["process"] if view["process"] in ("gone", "stopped") else board["phase"]
        source, seconds = ",".join(map(str, wait["ranks"])), f"{wait['for_s']:.1f}" if wait["what"] else ""
        cells = (str(rank), str(board.get("step", "")), last, ago, state, wait["what"], source, seconds)
        rows.append(tuple(c if len(c) <= _MAX_CELL else c[: _MAX_CELL - 1] + "…" for c in cells))
    return texts.table(rows, "<" * len(rows[0]))


def _at(records: Mapping[int, Record]) -> Iterator[str]:
    """Yields the lines of the user's code that ranks were in."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, record in records.items():
        for thread, line in record.get("at", ()):
            ranks[line if thread == "MainThread" else f"{line} (in {thread})"].append(rank)
    for line, found in ranks.items():
        yield f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))} stood at {line}"


def _text(program: Record, step: Record, index: int) -> str:
    """Returns the instruction that a step ran at this position, in words."""
    return program["instructions"][step["numbers"][index] if "numbers" in step else index][1]


def _last_instruction(record: Record) -> tuple[str, str]:
    """Returns the instruction that a rank dispatched last, and how many seconds before its record."""
    found = [
        (step["times"][-1], _text(program, step, len(step["times"]) - 1))
        for program in record["programs"] for step in program["steps"] if step["times"]
    ]  # fmt: skip
    if not found:
        return "none", ""
    at, text = max(found)
    return text, f"{record['now'] - at:.1f}"


def _last_program(
    records: Mapping[int, Record], plans: Mapping[str, Program]
) -> tuple[str, Program | None, list[list[int]]]:
    """Returns the program that any rank ran last, and the ranks of each of its groups."""
    found = [
        (step["begun"], program["name"], program["plan"], program["ranks"])
        for record in records.values() for program in record["programs"] for step in program["steps"]
    ]  # fmt: skip
    if not found:
        return "", None, []
    _, name, plan, ranks = max(found)
    return name, plans.get(plan), ranks


def _checked(name: str, program: Program) -> str:
    try:
        report = scheduler.check(program)
    except ScheduleError as e:
        return f"the program of {name} is wrong: {e}"
    return (
        f"the program of {name} is right: {counted(program.num_groups, 'group')},"
        f" {counted(report.num_transfers, 'transfer')}, no deadlock; so the order of the instructions is not the cause"
    )


def _chain(boards: Mapping[int, Record], guilty: int | None) -> Iterator[str]:
    """Yields who waited for whom, from the rank with the longest wait."""
    waits = {r: v["board"]["wait"] for r, v in boards.items() if v["board"].get("wait")}
    waits = {r: w for r, w in waits.items() if w["ranks"] and (w["for_s"] > _SHORT_S or guilty in w["ranks"])}
    others = [r for r in waits if r != guilty] or list(waits)
    if not others and guilty is None:
        yield "no rank waited for another one for long"
        return
    rank = max(others, key=lambda r: waits[r]["for_s"]) if others else guilty
    assert rank is not None
    seen = [rank]
    while rank in waits and rank != guilty:
        wait = waits[rank]
        rank = guilty if guilty is not None and guilty in wait["ranks"] else wait["ranks"][0]
        yield f"rank {seen[-1]} waited {wait['for_s']:.1f} s for {wait['what']}, from rank {rank}"
        if rank in seen:
            yield f"  which is a circle: {', '.join(map(str, seen))}"
            return
        seen.append(rank)
    view = boards.get(rank)
    if view is not None:
        what = {"gone": "was gone", "stopped": "was stopped"}.get(view["process"], "waited for no other rank")
        board = view["board"]
        at = f"step {board['step']}, {board['phase']}" + (f": {board['doing']}" if board["doing"] else "")
        yield f"rank {rank} {what} ({at}; nothing moved there for {view['still_s']:.1f} s)"


def _simulated(program: Program, ranks: list[list[int]], boards: Mapping[int, Record], guilty: int) -> Iterator[str]:
    """Simulates the program with the guilty rank's groups stopped where others waited for them."""
    waits = {r: v["board"]["wait"] for r, v in boards.items() if v["board"].get("wait")}
    own = [g for g, members in enumerate(ranks) if guilty in members]
    asked = {w["what"] for r, w in waits.items() if r != guilty and guilty in w["ranks"]}
    stops = {g: i for g in own if (i := _first_send(program, g, asked)) is not None}
    if not stops:
        return
    for group, index in stops.items():
        value = program.groups[group][index].value  # pyright: ignore[reportAttributeAccessIssue]
        maker = next((i for i in program.groups[group] if isinstance(i, (Run, Call)) and value in i.writes), None)
        made = "" if maker is None else f", which {_words(maker, group)} makes"
        yield f"the program, run on a clock with rank {guilty} stopped before it sends {value}{made}:"
    same = 0
    stuck = reach(program, {**{g: 0 for g in own if g not in stops}, **stops} if len(stops) == len(own) else stops)
    for group, blocked in enumerate(stuck):
        if blocked is None or group in own:
            continue
        value, source = blocked
        what = f"the transfer of {value} from group {source} to {group}"
        recorded = [r for r in ranks[group] if waits.get(r, {}).get("what") == what]
        same += bool(recorded)
        yield f"  group {group} (rank {ranks[group][0]}) waits for {value} from group {source}" + (
            ", as it did" if recorded else ""
        )
    if same:
        yield f"so rank {guilty} explains what the others waited for"


def _first_send(program: Program, group: int, asked: set[str]) -> int | None:
    """Returns the position of the first send of a group that somebody waited for."""
    for index, i in enumerate(program.groups[group]):
        if isinstance(i, Send) and f"the transfer of {i.value} from group {group} to {i.to_group}" in asked:
            return index
    return None


def _words(instruction: Run | Call, group: int) -> str:
    name = "+".join(map(str, instruction.tasks)) if isinstance(instruction, Run) else instruction.name
    return f"{name} in group {group}"


def reach(program: Program, stopped: Mapping[int, int]) -> list[tuple[Value, int] | None]:
    """Simulates a program where some groups stop: returns the value and the source that each group waits for, or None.
    `stopped` has, for each group that stops, the first instruction that it does not run.
    """
    sent: set[tuple[Value, int, int]] = set()
    found: list[tuple[Value, int] | None] = [None] * program.num_groups

    def do(group: int, i: Instruction, happened: Callable[[Hashable], None]) -> Hashable | None:
        if isinstance(i, Recv) and (i.value, i.from_group, group) not in sent:
            found[group] = i.value, i.from_group
            return i.value, i.from_group, group
        if isinstance(i, Send):
            sent.add((i.value, group, i.to_group))
            happened((i.value, group, i.to_group))
        found[group] = None
        return None

    run_until_blocked([instructions[: stopped.get(g)] for g, instructions in enumerate(program.groups)], do)
    return found


# --- slow ranks -----------------------------------------------------------------------------------


def _slow(records: Mapping[int, Record]) -> Iterator[str]:
    """Yields the rank that others waited for (from the samples), and the times of the hosts (from the steps)."""
    windows = {r: s[-1][1] - s[0][0] for r, record in records.items() for s in [record["samples"]] if s}
    by: dict[int, dict[int, float]] = {r: _waited(record["samples"]) for r, record in records.items()}
    for_whom: dict[int, float] = defaultdict(float)
    for rank, waited in by.items():
        for other, seconds in waited.items():
            if windows.get(rank):
                for_whom[other] = max(for_whom[other], seconds / windows[rank])
    own = {r: sum(by[r].values()) / windows[r] for r in by if windows.get(r)}
    ranked = sorted(for_whom, key=lambda r: own.get(r, 0.0) - for_whom[r])
    longest = max(windows.values(), default=0.0)
    if ranked and for_whom[ranked[0]] > _MUCH and longest > _SHORTEST_S:
        slow = ranked[0]
        share = f"{own[slow]:.0%} of it" if slow in own else "a time that is not known"
        yield (
            f"in the last {in_seconds(longest)} others waited up to {for_whom[slow]:.0%} of the time for rank {slow},"
            f" which itself waited {share}"
        )
    for rank, record in records.items():
        yield from _host_times(rank, record)


def _waited(samples: list[list]) -> dict[int, float]:
    """Returns the seconds of waits for each rank."""
    found: dict[int, float] = defaultdict(float)
    for before, after in pairwise([*samples, [samples[-1][1]]] if samples else []):
        if before[6]:
            for other in before[6]:
                found[other] += (after[0] - before[0]) / len(before[6])
    return found


def _host_times(rank: int, record: Record) -> Iterator[str]:
    """Yields the host times of a rank's steps, and the instruction that held it up most."""
    for program in record["programs"]:
        steps = program["steps"]
        if len(steps) < 3:
            continue
        periods = [b["begun"] - a["begun"] for a, b in pairwise(steps)]
        outside = [b["begun"] - a["ended"] for a, b in pairwise(steps) if a["ended"] is not None]
        gap, text = max(
            (
                (later - at, _text(program, step, number))
                for step in steps
                for number, (at, later) in enumerate(pairwise([*step["times"], step["ended"] or record["now"]]))
            ),
            default=(0.0, ""),
        )
        median, most = statistics.median(periods), max(periods)
        between = f", {sum(outside) / sum(periods):.0%} of it between steps" if outside and sum(periods) else ""
        yield (
            f"rank {rank}: {len(steps)} steps of {program['name']}, {in_seconds(median)} each (median; at most"
            f" {in_seconds(most)}){between}; held up most by {text}: {in_seconds(gap)}"
        )
