"""The processes of a job, for its copies: what they exchange at the start, and the version that each has kept."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from mpmd.job.job import Job
from mpmd.job.verdict import Board

_FOLDER = "mpmd/kept/"


class JobRanks:
    """The processes of a job."""

    def __init__(self, job: Job):
        self.rank, self.num_ranks, self.address = job.rank, job.num_ranks, job.address
        self.patience_s = job.hang_timeout_s or math.inf  # how long other ranks wait for this one
        self._job, self._epoch, self._folder = job, job.epoch, f"{_FOLDER}{job.epoch}/"

    def exchange(self, what: str, text: str) -> dict[int, str]:
        """Exchanges texts among all processes; returns the text of each."""
        return self._job.exchange(what, text, range(self.num_ranks), ", which every process must call")

    def publish(self, kept: str) -> None:
        """Publishes the version that this process has kept."""
        self._job.store.key_value_set(f"{self._folder}{self.rank}", kept, allow_overwrite=True)

    def published(self) -> dict[int, str]:
        """Returns the last version that each process has published."""
        return {int(key.rsplit("/", 1)[1]): text for key, text in self._job.store.key_value_dir_get(self._folder)}

    def calls_until_now(self) -> Callable[[], None]:
        """Returns a function for any thread, which waits until the common calls up to now have been compared."""
        return self._job.calls.until_now()

    def waiting(self, what: str, ranks: Sequence[int]) -> AbstractContextManager:
        """Marks a wait for others, for the report when they do not come."""
        return self._job.activity.during("agreeing", what, ranks)

    def check(self) -> None:
        """Raises if a rank was lost and is replaced."""
        self._job.check(self._epoch)

    def end_by(self, end: Callable[[Board, int], None], wait_until_kept: Callable[[], bool]) -> None:
        """Registers how to end a rank's process by a signal, for a spare to replace it, and how to wait before that."""
        self._job.end_process, self._job.wait_until_kept = end, wait_until_kept


class OnlyRank:
    """The counterpart of `JobRanks` for a process that is alone under the launcher."""

    rank, num_ranks, address = 0, 1, "127.0.0.1"
    patience_s = math.inf

    def __init__(self):
        self._kept: dict[int, str] = {}

    def exchange(self, what: str, text: str) -> dict[int, str]:
        return {0: text}

    def publish(self, kept: str) -> None:
        self._kept[0] = kept

    def published(self) -> dict[int, str]:
        return self._kept

    def calls_until_now(self) -> Callable[[], None]:
        return lambda: None

    def waiting(self, what: str, ranks: Sequence[int]) -> AbstractContextManager:
        return nullcontext()

    def check(self) -> None:
        pass

    def end_by(self, end: Callable[[Board, int], None], wait_until_kept: Callable[[], bool]) -> None:
        pass


Ranks = JobRanks | OnlyRank
