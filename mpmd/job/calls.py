"""Compares the calls of all ranks of a job, with their values from the host.

Ranks that call other steps, or the same step with other data, may hang, or silently train on one rank's inputs and
another's labels. The main thread only notes its calls. A thread publishes the notes. The lowest of the ranks that make
the calls together compares them, and the next call of each rank raises if they differ.
"""

import contextlib
import itertools
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import ScheduleError
from mpmd.job.activity import Activity
from mpmd.job.boards import PUBLISH_S
from mpmd.job.disagreement import Disagreement, disagreement
from mpmd.job.notes import Note

# The thread publishes this many calls together, if they come faster than it looks.
WINDOW = 128
# The high bits of a call's number are the number of losses before it; the low bits are room for its results.
_EPOCH_BITS, _RESULT_BITS = 46, 16
# If more calls than this come between two looks of the thread, it looks half as often: a look costs as much as some
# thirty notes.
_MANY = 48
# At most twice this many bytes wait for the thread; the main thread reads the values beyond that.
_MAX_HELD_NBYTES = 64 << 20
# A rank is at most this many calls ahead of the comparison.
MAX_AHEAD = 256
# The first and the longest delay between two looks while somebody waits for a comparison.
_SOON_S, _LATE_S = 0.001, 0.05
# After this time, a disagreement is reported without the ranks that have not come to the call.
_PATIENCE_S = 5.0
# A rank waits this long before it raises, so that the others come to their next call, which raises the same.
_HEARD_S = 4 * PUBLISH_S
# If no rank comes to a next call within this time, because each waits for the other, the job ends.
# (If a rank has left while others wait for it, the watchdog reports that earlier.)
_UNHEARD_S = 10.0
# At the end of the program, the comparison of the last calls may take this long.
_END_S = 10.0


class SharedCalls:
    """The calls that some ranks make together, as one of them sees them."""

    def __init__(self, ranks: tuple[int, ...], rank: int, store: compat.KeyValueStore, epoch: int = 0):
        self.ranks = ranks
        self.count = 0
        self.notes: deque[Note] = deque()  # not compared yet, the oldest first
        self._rank, self._store = rank, store
        self._folder = f"mpmd/calls/{zlib.crc32(repr(ranks).encode()):08x}{f'.{epoch}' if epoch else ''}"
        self._digests: deque[int] = deque()  # of the notes with values that were read
        self.num_compared = self._published = 0
        self._asked: tuple[int, float] | None = None  # the call with different notes, and since when that is known
        self._answered: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the ranks' digests of a call differ, and the difference is not known yet."""
        return self._asked is not None

    def turn(self) -> Disagreement | None:
        """Publishes new digests; compares all (on the lowest rank), or reads the result of the comparison."""
        for note in list(self.notes)[len(self._digests) :]:
            if not note.is_ready:
                break
            self._digests.append(note.digest)
        said = self.num_compared, list(self._digests)
        if self._rank == self.ranks[0]:
            return self._compare({self._rank: said, **self._read("said")})
        if not self.notes:
            return None
        if self.num_compared + len(self._digests) > self._published:
            self._published = self.num_compared + len(self._digests)
            self._set(f"said/{self._rank}", said)
        return self._hear()

    def _hear(self) -> Disagreement | None:
        compared, is_asked, found = self._read("found").get(self.ranks[0], (0, False, None))
        self._advance(compared)
        self._asked = (compared, 0.0) if is_asked else None
        if is_asked and self._answered != compared and self._digests:
            self._set(f"details/{self._rank}", [compared, self.notes[0].to_json()])
            self._answered = compared
        return None if found is None else Disagreement(*found)

    def _compare(self, said: Mapping[int, tuple[int, Sequence[int]]]) -> Disagreement | None:
        before, asked, found = self.num_compared, self._asked, None
        for k in itertools.count(self.num_compared):
            at = {r: digests[k - first] for r, (first, digests) in said.items() if first <= k < first + len(digests)}
            if len(set(at.values())) > 1:
                is_told, found = self._inquire(k)
                if not is_told or found is not None:
                    break
            elif len(at) < len(self.ranks):
                break
            self._asked = None
            self._advance(k + 1)
        if self.num_compared > before or self._asked != asked or found is not None:
            self._set(f"found/{self._rank}", [self.num_compared, self._asked is not None, found])
        return found

    def _inquire(self, k: int) -> tuple[bool, Disagreement | None]:
        """Asks for the notes of a call that differ. Returns whether all ranks have answered, and the difference."""
        if self._asked is None:
            self._asked = k, time.monotonic()
        told = {r: note for r, (at, note) in self._read("details").items() if at == k}
        if self._digests:
            told[self._rank] = self.notes[0].to_json()
        have_all = len(told) == len(self.ranks)
        if not have_all and time.monotonic() - self._asked[1] < _PATIENCE_S:
            return False, None
        return have_all, disagreement(told) if len(told) > 1 else None

    def _advance(self, compared: int) -> None:
        for _ in range(compared - self.num_compared):
            self.notes.popleft()
            self._digests.popleft()
        self.num_compared = compared

    def _set(self, name: str, data: object) -> None:
        self._store.key_value_set(f"{self._folder}/{name}", json.dumps(data), allow_overwrite=True)

    def _read(self, name: str) -> dict[int, Any]:
        found = self._store.key_value_dir_get(f"{self._folder}/{name}/")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}


class Calls:
    """The calls that this rank makes together with others.

    Args:
      end: ends all processes with a verdict, which is a rank and its act.
      check_ranks: raises if a rank was lost (since an epoch), so that nobody waits for its calls.
    """

    def __init__(
        self, rank: int, num_ranks: int, store: compat.KeyValueStore, activity: Activity,
        end: Callable[[int, str], None], check_ranks: Callable[[int], None],
    ):  # fmt: skip
        self._rank, self._store, self._activity, self._end = rank, store, activity, end
        self._check_ranks = check_ranks
        ranks = tuple(range(num_ranks))
        self._streams = {ranks: SharedCalls(ranks, rank, store)}
        self._all, self._epoch = ranks, 0
        self.is_apart = False  # if True, the calls of this process are not compared
        self._found: Disagreement | None = None
        self._cause: Exception | None = None
        self._is_raised = self._is_over = False
        self._num_waiting = self._held_nbytes = 0
        self._wake = threading.Event()
        self._turned = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="mpmd-calls", daemon=True)
        self._thread.start()

    def note(self, ranks: Sequence[int], note: Note) -> int:
        """Adds a call that this rank makes together with `ranks`. Waits only if it is far ahead of them.

        Returns:
          The number of the call, the same in all of them, with room for its results; 0 if it is not compared.

        Raises:
          ScheduleError: an earlier call of theirs differs.
        """
        self.check()
        if self.is_apart:
            return 0
        if (stream := self._streams.get(ranks := tuple(ranks))) is None:
            stream = self._streams[ranks] = SharedCalls(ranks, self._rank, self._store, epoch=self._epoch)
        if self._epoch:  # the successor of a lost rank has results of earlier calls from elsewhere
            note.makers = [maker if maker >> _EPOCH_BITS == self._epoch else 0 for maker in note.makers]
        self._held_nbytes += note.nbytes()
        if self._held_nbytes > _MAX_HELD_NBYTES and note.is_ready:
            note.read()
        stream.notes.append(note)
        stream.count += 1
        if stream.count % WINDOW == 0 or self._held_nbytes > _MAX_HELD_NBYTES // 8:
            self._wake.set()
        if len(stream.notes) > MAX_AHEAD:
            self._wait([stream], MAX_AHEAD)
        return (self._epoch << _EPOCH_BITS) + (stream.count << _RESULT_BITS)

    def begin_again(self, epoch: int) -> None:
        """Drops the calls up to now, which are not compared any more."""
        self._epoch, self.is_apart = epoch, False
        self._streams = {self._all: SharedCalls(self._all, self._rank, self._store, epoch=epoch)}

    def settle(self, ranks: Sequence[int] | None = None) -> None:
        """Returns when all calls up to now (with these ranks) have been compared.

        Raises:
          ScheduleError: some differ.
          RankLostError: one of the ranks was lost.
        """
        self.check()
        self._wait([s for s in self._streams.values() if ranks in (None, s.ranks)], 0)

    def until_now(self) -> Callable[[], None]:
        """Returns a function for any thread. It returns when the calls made before `until_now` have been compared.

        It raises a ScheduleError if some differ, and a RankLostError if a rank was lost before.
        """
        made, epoch = [(stream, stream.count) for stream in self._streams.values()], self._epoch

        def compare() -> None:
            with self._waiting():
                while any(stream.num_compared < count for stream, count in made) and self._found is None:
                    self._turned.wait(PUBLISH_S)
                    self._check_ranks(epoch)
            if self._found is not None:
                raise ScheduleError(self._found.text)

        return compare

    def check(self) -> None:
        """Raises a ScheduleError if calls were found to differ."""
        if self._found is not None:
            if not self._is_raised:
                time.sleep(_HEARD_S)
            self._is_raised = True
            raise ScheduleError(self._found.text) from self._cause

    @property
    def have_differed(self) -> bool:
        """Whether some calls differed."""
        return self._found is not None

    def finish(self) -> None:
        """Adds the last call: this rank comes to the end of its program."""
        for stream in list(self._streams.values()):
            stream.notes.append(Note("came to the end of its program"))
        self._is_raised = True  # the caller of `last` raises it
        self._wake.set()

    def last(self) -> str:
        """Waits until all ranks have come to the end; returns how their calls differed, empty if they did not."""
        end = time.monotonic() + _END_S
        with self._waiting():
            while any(s.notes for s in self._streams.values()) and self._found is None and time.monotonic() < end:
                self._turned.wait(_LATE_S)
        return "" if self._found is None else self._found.text

    def stop(self, limit_s: float) -> None:
        """Ends the thread: if it returned from C++ to a Python that is gone, it would abort the process."""
        self._is_over = True
        self._wake.set()
        self._thread.join(limit_s)

    def _wait(self, streams: Sequence[SharedCalls], most: int) -> None:
        """Returns when at most this many calls of each stream are still to be compared."""
        behind = [s for s in streams if len(s.notes) > most]
        if not behind:
            return
        others = sorted({r for s in behind for r in s.ranks} - {self._rank})
        with self._activity.during("agreeing", "comparing calls", others), self._waiting():
            while any(len(s.notes) > most for s in behind) and self._found is None:
                self._turned.wait(PUBLISH_S)
                self._check_ranks(self._epoch)
        self.check()

    @contextlib.contextmanager
    def _waiting(self):
        """Keeps the thread from resting while the context lasts."""
        with self._turned:
            self._num_waiting += 1
            self._wake.set()
            try:
                yield
            finally:
                self._num_waiting -= 1

    # --- the thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        delay, before, are_many = _SOON_S, 0, False
        while not self._is_over and self._found is None:
            streams = list(self._streams.values())
            is_hurried = self._num_waiting or any(s.is_asked for s in streams)
            delay = min(_LATE_S, 1.5 * delay) if is_hurried else _SOON_S
            ranks = max((len(s.ranks) for s in streams), default=1)
            rest = PUBLISH_S * max(1.0, ranks / 64) * (1 + are_many)
            self._wake.wait(delay if is_hurried else rest)
            self._wake.clear()
            count = sum(s.count for s in streams)
            are_many, before = count - before > _MANY, count
            self._held_nbytes = 0
            try:
                for stream in streams:
                    self._found = self._found or stream.turn()
            except jax.errors.JaxRuntimeError:
                pass  # the store is gone: the judge sees that
            except Exception as e:  # an error in this thread: nobody should wait for it
                self._cause = e
                why = f"could not compare its calls with those of the others: {type(e).__name__}: {e}"
                self._found = Disagreement(self._rank, f"rank {self._rank} {why}")
            with self._turned:
                self._turned.notify_all()
        end = time.monotonic() + _UNHEARD_S
        while not self._is_over and not self._is_raised and time.monotonic() < end:
            time.sleep(PUBLISH_S)
        if self._found is not None and not self._is_over and not self._is_raised:
            self._end(self._found.rank, self._found.text.splitlines()[0].removeprefix(f"rank {self._found.rank} "))
