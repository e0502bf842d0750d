"""Compares bit by bit the results that groups computed from the same values, to find the group with a faulty device.

A step hands over digests, which the devices of this process will compute. A thread waits for them, publishes them,
reads the others, and finds the odd one out. Arrays that stay in device memory are compared with their earlier bits.
"""

import collections
import functools
import json
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

import jax

from mpmd.errors import CorruptionError, HangError
from mpmd.job.job import Job
from mpmd.job.spares import UNFIT

_POLL_S, _MOST_POLL_S = 0.01, 0.1  # polls get rarer: other processes may have most of the step before them
_KEPT = 64  # audits that stay readable for slower processes
MEMORY = "memory"  # the digest of arguments that have changed in a group's own memory

# XLA's flag for GPUs. Without it, each process tries kernels and takes the fastest, and some kernels add up in the
# order in which their threads come.
SAME_BITS = "xla_gpu_deterministic_ops"

# Of one group: its digests as text, by the number of the device in the group.
Sign = Mapping[int, str]


class Finding(NamedTuple):
    """A group that differs from the others."""

    groups: tuple[int, ...]  # the faulty group; both groups where two differ and no third one decides
    devices: tuple[int, ...]  # their devices that differ, as numbers in the group
    at_rest: bool = False  # whether arrays have changed while they stayed in the memory of the group


class Audit(NamedTuple):
    """One instruction that several groups have run."""

    key: str  # a key that no other audit of the job has
    what: str  # the instruction, the step and the call, for people
    owners: Mapping[int, Sequence[int]]  # per group, the process of each of its devices; the step's group comes first
    names: Mapping[int, Sequence[str]]  # per group, the name of each of its devices
    found: Mapping[int, Callable[[], Sign]]  # per group of this process: waits for, and returns, its devices' digests
    job: Job | None  # None where all groups are this process's
    epoch: int = 0  # the epoch of the job in which the instruction ran


class Lying(Protocol):
    """Arrays that stay in the memory of devices. Nobody may change them in place."""

    def look(self, *, is_last: bool = False) -> Callable[[], None] | None:
        """Starts to compare the arrays that still exist with their earlier bits (`is_last`: the last time). Any thread
        may call it. Returns a function that waits for the bits, and calls `found_faulty` if they have changed.
        """


class _Comparisons:
    """A background thread that compares."""

    def __init__(self):
        self._due: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self.errors: list[Exception] = []
        self._num_raised = 0
        self._thread: threading.Thread | None = None

    def add(self, compare: Callable[[], None]) -> None:
        with self._changed:
            self._num_left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpmd-audits", daemon=True)
                self._thread.start()
        self._due.put(compare)

    def wait(self, but: int, known: int | None) -> None:
        with self._changed:
            seen = self._num_raised if known is None else known
            self._changed.wait_for(lambda: self._num_left <= but or len(self.errors) > seen)
            if len(self.errors) > seen:
                self._num_raised = len(self.errors)
                raise self.errors[-1]

    def _run(self) -> None:
        while True:
            compare, error = self._due.get(), None
            try:
                compare()
            except (jax.errors.JaxRuntimeError, HangError):
                pass  # the step has failed, or a rank was lost: whoever uses its results gets that error
            except Exception as e:
                error = e
            with self._changed:
                self.errors += [] if error is None else [error]
                self._num_left -= 1
                self._changed.notify_all()


_comparisons = _Comparisons()
_published: collections.deque[str] = collections.deque()  # keys of this process in the store
_lying: weakref.WeakSet[Lying] = weakref.WeakSet()
_adding = threading.Lock()


def put_down(audit: Audit) -> None:
    """Adds an audit that this process takes part in. It is compared in the background."""
    _comparisons.add(functools.partial(_compare, audit))


def watch(arrays: Lying) -> None:
    """Makes `settle` check the arrays, as long as the caller keeps `arrays`."""
    with _adding:
        _lying.add(arrays)


def look_at(arrays: Lying, *, is_last: bool = False) -> None:
    """Compares the bits of arrays with their earlier ones, in the background."""
    if (look := arrays.look(is_last=is_last)) is not None:
        _comparisons.add(look)


def num_found() -> int:
    """Returns how many errors have been found so far."""
    return len(_comparisons.errors)


def settle(but: int = 0, known: int | None = None) -> None:
    """Returns when all audits except the last `but` have passed. Without `but`, also checks the arrays in memory.

    Args:
      known: raises an error if more than this many (`num_found`) are known; by default, one that was not raised yet.

    Raises:
      CorruptionError: a group computes other bits than others do. Where a spare can take its place, the process of that
        group ends instead.
    """
    with _adding:
        lying = () if but else list(_lying)
    for arrays in lying:
        look_at(arrays)
    _comparisons.wait(but, known)


def _compare(audit: Audit) -> None:
    job = audit.job
    signs = {group: dict(found()) for group, found in audit.found.items()}
    finding = odd_one_out(signs if job is None else _heard(audit, job, signs))
    rank = 0 if job is None else job.rank
    if finding is None or not any(rank in audit.owners[group] for group in finding.groups):
        return
    found_faulty(_text(audit, finding), job, can_be_replaced=len(finding.groups) == 1)


def _heard(audit: Audit, job: Job, own: Mapping[int, Sign]) -> dict[int, Sign]:
    """Waits for the other processes, and returns the digests of all groups, in the order of the groups."""
    folder = f"mpmd/audits/{audit.key}/"
    job.store.key_value_set(f"{folder}{job.rank}", json.dumps(own), allow_overwrite=True)
    _published.append(f"{folder}{job.rank}")
    while len(_published) > _KEPT:
        job.store.key_value_delete(_published.popleft())
    wanted, poll_s = {rank for owners in audit.owners.values() for rank in owners}, _POLL_S
    while True:
        said = {int(key.rsplit("/", 1)[1]): text for key, text in job.store.key_value_dir_get(folder)}
        if wanted <= said.keys():
            break
        job.check(audit.epoch)  # a process that was lost meanwhile publishes no digest any more
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _MOST_POLL_S)
    found: dict[int, dict[int, str]] = {group: {} for group in audit.owners}
    for text in said.values():
        for group, sign in json.loads(text).items():
            found[int(group)] |= {int(device): digest for device, digest in sign.items()}
    return dict(found)


def odd_one_out(signs: Mapping[int, Sign]) -> Finding | None:
    """Returns the group that differs, if any does. The first group of `signs`, each group's digests, is the step's own.

    Examples:
      >>> odd_one_out({1: {0: "a"}, 2: {0: "a"}, 3: {0: "a"}})
      >>> odd_one_out({1: {0: "b"}, 2: {0: "a"}, 3: {0: "a"}})
      Finding(groups=(1,), devices=(0,), at_rest=False)
      >>> odd_one_out({1: {0: "b"}, 2: {0: "a"}})
      Finding(groups=(1, 2), devices=(0,), at_rest=False)
    """
    (first, own), *_ = signs.items()
    if at_rest := tuple(d for d, text in own.items() if text.startswith(MEMORY)):
        return Finding((first,), at_rest, True)
    counts = collections.Counter(json.dumps(sign, sort_keys=True) for sign in signs.values())
    if len(counts) == 1:
        return None
    (most, number), *_ = counts.most_common()
    if number == 1:
        groups, right = tuple(signs), own
    else:
        right = {int(d): text for d, text in json.loads(most).items()}
        groups = tuple(g for g, sign in signs.items() if dict(sign) != right)
    devices = {d for g in groups for d, text in signs[g].items() if right.get(d) != text}
    return Finding(groups, tuple(sorted(devices)) or tuple(own))


def found_faulty(text: str, job: Job | None, can_be_replaced: bool) -> NoReturn:
    """Ends this process, which has a faulty device, if a spare can take its place. Raises otherwise."""
    if job is not None and can_be_replaced and job.may_be_replaced:
        print(f"jax-mpmd: rank {job.rank}: {text}; it is killed, to be replaced", file=sys.stderr, flush=True)
        os.kill(os.getpid(), UNFIT)
    raise CorruptionError(
        f"mpmd: {text}.\n  What was computed from this call on is not to be trusted: go on from a state before it,"
        " as mpmd.resilient does, and without that device if it happens again."
    )


def _text(audit: Audit, finding: Finding) -> str:
    devices = ", ".join(audit.names[g][d] for g in finding.groups for d in finding.devices)
    group, *more = finding.groups
    if more:
        groups = " and ".join(map(str, finding.groups))
        return f"groups {groups} ({devices}) get different bits for {audit.what}, and no third one says which is right"
    if finding.at_rest:
        return f"group {group} ({devices}): arguments of {audit.what} have changed in its memory"
    others = [str(g) for g in audit.owners if g != group]
    return f"group {group} ({devices}) gets other bits than group {' and group '.join(others)} for {audit.what}"
