"""Reads the ledgers of all processes of a job, and adds up where its time went."""

import bisect
import dataclasses
import datetime
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpmd.observe import ledger, rank_files
from scheduler.base import texts

REPEATED = "repeated"
_HEAD = re.compile(r"# jax-mpmd: .* process (\d+) went, attempt (\d+), on .*; begun (.*)Z")
_LINE = re.compile(r"(.*)Z \| ([\d.]+) s \| (?:steps? (\d+)(?: to (\d+))?, )?(?:\d+ calls?)? ?\| (.*?) ?\|(?: (.*))?")
_ABOUT = {
    ledger.COMPUTE: "devices ran programs",
    ledger.BUBBLE: "they waited for other groups, or for values on their way from other processes",
    ledger.TRANSFERS: "they waited for values on their way between groups of one process",
    ledger.HOST: "they had nothing to do: data, reading results, starting programs",
    ledger.UNDIVIDED: "calls that there was no memory to measure: compute and waits",
    REPEATED: "steps that were done again",
    ledger.LOST: "steps that were not finished",
    ledger.RECOVERY: "from the loss of a process to the next step",
    ledger.CHECKPOINT: "saving, restoring, copies for other hosts",
    ledger.COMPILING: "tracing, compiling, first calls",
    ledger.STARTING: "before the steps",
    ledger.IDLE: "spares that waited",
    ledger.OTHER: "outside of steps",
}


class LedgerLine(NamedTuple):
    """A line of a process: its time (seconds since 1970), the seconds by part since the line before, and an event."""

    at: float
    parts: dict[str, float]
    steps: tuple[int, int] | None  # the first and the last of the steps that ended; None outside of `mpmd.resilient`
    text: str


@dataclasses.dataclass(frozen=True)
class ProcessLedger:
    """The ledger of a process."""

    number: int
    attempt: int
    begun: float
    lines: tuple[LedgerLine, ...]

    @property
    def end(self) -> float:
        """The time of its last line."""
        return self.lines[-1].at if self.lines else self.begun

    @property
    def taken(self) -> tuple[int, float] | None:
        """The rank that a spare became, and when."""
        found = [line for line in self.lines if line.text.startswith(ledger.TAKES)]
        return (int(found[0].text.removeprefix(ledger.TAKES)), found[0].at) if found else None


@dataclasses.dataclass(frozen=True)
class JobLedger:
    """The ledger of a job."""

    num_ranks: int
    num_spares: int  # the number of all spares that have waited, also one after the other
    num_restarts: int
    seconds: dict[str, float]  # by part, of all processes together, with the time in which a rank had no process
    begun: float  # of the first process, in seconds since 1970
    end: float  # of the last process, likewise
    events: tuple[str, ...]  # the events with their times

    @property
    def total(self) -> float:
        """Seconds of all processes."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time in which devices computed steps that count."""
        return self.seconds.get(ledger.COMPUTE, 0.0) / self.total if self.total else 0.0

    @property
    def effective(self) -> float:
        """The share of the time that went to steps that count, whatever the devices did in them."""
        return sum(self.seconds.get(part, 0.0) for part in ledger.IN_STEPS) / self.total if self.total else 0.0

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        counts = ((self.num_ranks, "rank"), (self.num_spares, "spare"), (self.num_restarts, "restart"))
        told = ", ".join(texts.counted(count, noun) for count, noun in counts if count)
        yield f"{told}; {_time(self.begun, day=True)} to {_time(self.end)} UTC"
        rows = [("seconds", "share", "of all processes")]
        for part, about in _ABOUT.items():
            if (seconds := self.seconds.get(part, 0.0)) > 0:
                rows.append((f"{seconds:.1f}", f"{seconds / self.total:.1%}", f"{part}: {about}"))
        rows.append((f"{self.total:.1f}", "100.0%", "in all"))
        yield from (f"  {line}" for line in texts.table(rows, ">><"))
        yield f"goodput: {self.goodput:.1%} of the time devices computed steps that count"
        yield f"effective training time: {self.effective:.1%} went to steps that count, with all waits in them"
        yield from (f"  {event}" for event in self.events)

    def as_json(self) -> str:
        """Returns all figures."""
        return json.dumps({
            **dataclasses.asdict(self), "total": self.total, "goodput": self.goodput, "effective": self.effective
        }, indent=2)  # fmt: skip


def _time(at: float, day: bool = False) -> str:
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):{'%Y-%m-%d ' * day}%H:%M:%S}"


def read(where: Path) -> list[ProcessLedger]:
    """Returns the ledgers of all processes in a folder, without unfinished lines. Raises a FileNotFoundError if there
    is no folder or no ledger in it, and a ValueError if a file is no ledger.
    """
    files = rank_files.found_in(where, ledger.ENDING)
    found = [one for *_, path in files if (one := _read(path)) is not None]
    if not found:
        raise FileNotFoundError(
            f"{where} holds no rank-N.ledger. A job writes them into the folder of the launcher's --log-dir or of"
            f" {ledger.VARIABLE}."
        )
    return found


def _read(path: Path) -> ProcessLedger | None:
    *whole, _ = path.read_text(errors="replace").split("\n")
    if not whole:
        return None
    head, lines = _HEAD.fullmatch(whole[0]), [_LINE.fullmatch(line) for line in whole[1:]]
    if head is None or None in lines:
        number = 1 if head is None else 2 + lines.index(None)
        raise ValueError(f"{path} is no ledger of this library: line {number} is {whole[number - 1]!r:.80}")
    return ProcessLedger(int(head[1]), int(head[2]), _seconds(head[3]), tuple(_line(m) for m in lines if m))


def _line(match: re.Match[str]) -> LedgerLine:
    steps = None if match[3] is None else (int(match[3]), int(match[4] or match[3]))
    parts = (entry.rpartition(" ") for entry in filter(None, match[5].split(", ")))
    return LedgerLine(_seconds(match[1]), {name: float(seconds) for name, _, seconds in parts}, steps, match[6] or "")


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


def put_together(processes: Sequence[ProcessLedger]) -> JobLedger:
    """Returns the ledger of a job from the processes of all attempts, including spares."""
    seconds: defaultdict[str, float] = defaultdict(float)
    histories = [_History(process) for process in processes]
    for process in processes:
        for part, amount in _counted(process, histories):
            seconds[part] += amount
    seconds[ledger.RECOVERY] += _seconds_without_process(processes)
    spares = {p.number for p in processes if any(ledger.IDLE in line.parts for line in p.lines)}
    num_restarts = max(p.attempt for p in processes) - min(p.attempt for p in processes)
    begun, end = min(p.begun for p in processes), max(p.end for p in processes)
    ranks = {p.number for p in processes} - spares
    # Spares have higher numbers than ranks; one that was lost at once has left no ledger, but a gap.
    num_ranks = next(n for n in itertools.count() if n not in ranks)
    return JobLedger(
        num_ranks, len(spares), num_restarts, dict(seconds), begun, end, tuple(_events(processes, histories))
    )


class _History:
    """The steps of a process by time. A month has hundreds of thousands of lines, so questions use binary search."""

    def __init__(self, process: ProcessLedger):
        steps = [(line.at, line.steps[1]) for line in process.lines if line.steps is not None]
        self._ats, self._steps = np.array([at for at, _ in steps]), np.array([step for _, step in steps])
        self._over = [line.at for line in process.lines if line.text == ledger.LOOP + "is over"]
        self._begins = [(line.at, _first_step(line.text)) for line in process.lines if _begins(line)]
        self._attempt = process.attempt

    def over(self, until: float) -> float:
        """Returns when the last loop that had ended by this time ended; 0 if there is none."""
        number = bisect.bisect_right(self._over, until)
        return self._over[number - 1] if number else 0.0

    def last(self, after: float, until: float) -> tuple[float, int] | None:
        """Returns the time of the last line with steps in a stretch of time, and the highest step; None without one."""
        begin, end = np.searchsorted(self._ats, (after, until), side="right")
        return (float(self._ats[end - 1]), int(self._steps[begin:end].max())) if end > begin else None

    def continued(self, line: LedgerLine, since: float, attempt: int) -> float:
        """Returns when this process continued with the step of a line, before or after the line.

        Args:
          since: when the process of the line continued the last time before.
          attempt: the attempt of the line; for processes of other attempts the time of the line is returned.
        """
        begins = self._begins if self._attempt == attempt else ()
        alike = [at for at, step in begins if at > since and step == _first_step(line.text)]
        return min(alike, key=lambda at: abs(at - line.at), default=line.at)


def _last_before(histories: Sequence[_History], until: Sequence[float]) -> tuple[float, int] | None:
    """Returns the time and the number of the last step of the loop that runs, up to a time for each process."""
    over = max((h.over(at) for h, at in zip(histories, until, strict=True)), default=0.0)
    found = [last for h, at in zip(histories, until, strict=True) if (last := h.last(over, at)) is not None]
    return (max(at for at, _ in found), max(step for _, step in found)) if found else None


def _counted(process: ProcessLedger, histories: Sequence[_History]) -> Iterator[tuple[str, float]]:
    """Yields seconds by part of a process. The share of a line's steps that are done again is REPEATED."""
    done, since = -1, process.begun  # the last step that was done before; when the process last continued
    for line in process.lines:
        again = 0.0
        if line.steps is not None:
            first, last = line.steps
            again = max(0, min(last, done) - first + 1) / (last - first + 1)
        for part, amount in line.parts.items():
            share = again if part in ledger.IN_STEPS else 0.0
            yield REPEATED, share * amount
            yield part, (1 - share) * amount
        if _begins(line):
            before = _last_before(histories, [h.continued(line, since, process.attempt) for h in histories])
            done, since = -1 if before is None else before[1], line.at


def _begins(line: LedgerLine) -> bool:
    return line.text.startswith((f"{ledger.LOOP}begins", f"{ledger.LOOP}goes on"))


def _first_step(text: str) -> int:
    """Returns the first step of a loop that begins or continues."""
    return int(re.findall(r"step (\d+)", text)[0]) + ("goes on after" in text)


def _seconds_without_process(processes: Sequence[ProcessLedger]) -> float:
    """Returns the seconds in which ranks and spares had no process, before another process came."""
    filled: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for p in processes:
        rank, since = p.taken or (p.number, p.begun)
        filled[rank].append((since, p.end))
    found = 0.0
    for times in filled.values():
        free = min(begun for begun, _ in times)
        for begun, end in sorted(times):
            found += max(0.0, begun - free)
            free = max(free, end)
    return found


def _events(processes: Sequence[ProcessLedger], histories: Sequence[_History]) -> Iterator[str]:
    """Yields the events in the order of time. Equal events of several processes come once."""
    lines = [(line.at, p, line) for p in processes for line in p.lines if line.text]
    said: set[tuple[int, str]] = set()
    for at, process, line in sorted(lines, key=lambda entry: entry[0]):
        kind = line.text.partition(": ")[0] if line.text.startswith(ledger.ENDED) else line.text
        text = line.text.removeprefix(ledger.LOOP)
        if line.text.startswith(ledger.TAKES):
            kind = text = f"spare {process.number} {text}"
        if (process.attempt, kind) in said or text in (f"{ledger.ENDED}{ledger.AT_END}", "is over"):
            continue
        said.add((process.attempt, kind))
        if _begins(line) and (before := _last_before(histories, [at] * len(histories))) is not None:
            (last_at, last), first = before, _first_step(text)
            text += f", {at - last_at:.1f} s after the last step before"
            text += f"; {texts.counted(last - first + 1, 'step')} again" if last >= first else ""
        yield f"{_time(at)} {f'attempt {process.attempt}: ' if process.attempt else ''}{text}"
