"""The processes of a job, as its copies need them: what all say at the start, and which version each has kept."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from mpmd.errors import RankLostError
from mpmd.job.job import Job
from mpmd.job.verdict import Board

_FOLDER = "mpmd/kept/"


class JobRanks:
    """The processes of a job."""

    def __init__(self, job: Job):
        self.rank, self.num_ranks, self.address = job.rank, job.num_ranks, job.address
        self._job, self._epoch, self._folder = job, job.epoch, f"{_FOLDER}{job.epoch}/"

    def exchange(self, what: str, text: str) -> dict[int, str]:
        """What each says here; returns when all have."""
        return self._job.exchange(what, text, range(self.num_ranks), ", which every process must call")

    def publish(self, kept: str) -> None:
        """Says which version this process has kept."""
        self._job.store.key_value_set(f"{self._folder}{self.rank}", kept, allow_overwrite=True)

    def published(self) -> dict[int, str]:
        """What each has published last."""
        return {int(key.rsplit("/", 1)[1]): text for key, text in self._job.store.key_value_dir_get(self._folder)}

    def calls_until_now(self) -> Callable[[], None]:
        """What returns when all that they have called together up to now has been compared; for any thread."""
        return self._job.calls.until_now()

    def waiting(self, what: str, ranks: Sequence[int]) -> AbstractContextManager:
        """While this process waits for others, for the report when they do not come."""
        return self._job.activity.during("agreeing", what, ranks)

    def check(self) -> None:
        """Raises where a rank was lost whose place is taken."""
        self._job.check()
        if self._job.epoch != self._epoch:
            raise RankLostError("mpmd: a rank was lost, and the processes have gone on since")

    def end_by(self, end: Callable[[Board, int], None], wait_until_kept: Callable[[], bool]) -> None:
        """Says how a signal ends a rank's process, for a spare to take its place, and when that of a slow rank may."""
        self._job.end_process, self._job.wait_until_kept = end, wait_until_kept


class OnlyRank:
    """A process that is alone under the launcher, as `JobRanks`."""

    rank, num_ranks, address = 0, 1, "127.0.0.1"

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
