"""The results of an audited call, to check that their bits do not change while they are in device memory."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import memory_kind
from mpmd.arrays.mesh import Device
from mpmd.job import audits
from mpmd.job.job import Job
from mpmd.run.digests import digests


class ResultsAtRest:
    """The results of a call, and digests that the devices make of them at once, for a later comparison.

    Arrays in host memory are left out: they may not fit into device memory.

    Args:
      what: a description of one result, for messages.
      results: per result, `{group: array}`.
      job: None where all groups belong to this process.
    """

    def __init__(self, what: str, results: Sequence[Mapping[int, jax.Array]], job: Job | None):
        self._what, self._job = what, job
        self._lock = threading.Lock()
        arrays = [(g, x) for of_result in results for g, x in of_result.items() if memory_kind(x.sharding) is None]
        self._arrays = [(group, weakref.ref(x)) for group, x in arrays]  # the user may delete them
        self._first = self._digests(dict(enumerate(arrays)))

    def look(self, *, is_last: bool = False) -> Callable[[], None] | None:
        """Starts new digests of the results that still exist; returns a function that compares them.

        Args:
          is_last: later looks find no results, since a step may take over their memory.
        """
        with self._lock:  # no result is donated before another thread has queued the programs that look at it
            there = {
                k: (group, x)
                for k, (group, ref) in enumerate(self._arrays)
                if (x := ref()) is not None and not x.is_deleted()
            }
            if is_last:
                self._arrays = []
            try:
                now = self._digests(there)
            except (RuntimeError, ValueError):  # deleted, or its program has failed: reading it raises the error
                return None
        return functools.partial(self._compare, now) if now else None

    def _digests(
        self, arrays: Mapping[int, tuple[int, jax.Array]]
    ) -> dict[tuple[int, Device], tuple[list[int], jax.Array]]:
        """Returns, per group and device, the numbers of the arrays that it holds, and their digests."""
        found: dict[tuple[int, Device], dict[int, jax.Array]] = {}
        for k, (group, x) in arrays.items():
            for device, block in compat.shards(x).items():
                found.setdefault((group, device), {})[k] = block
        return {place: ([*blocks], digests(*blocks.values())) for place, blocks in found.items()}

    def _compare(self, now: Mapping[tuple[int, Device], tuple[list[int], jax.Array]]) -> None:
        changed: dict[int, list[str]] = {}
        for place, (numbers, found) in now.items():
            all_numbers, first = self._first[place]
            before = dict(zip(all_numbers, np.asarray(first).tolist(), strict=True))
            if [before[k] for k in numbers] != np.asarray(found).tolist():
                group, device = place
                changed.setdefault(group, []).append(f"rank {device.process_index}: {device}")
        if changed:
            self._arrays = []  # the change is reported once
            places = (f"group {group} ({', '.join(names)})" for group, names in changed.items())
            text = f"{' and '.join(places)}: {self._what} has changed in memory"
            audits.found_faulty(text, self._job, can_be_replaced=True)
