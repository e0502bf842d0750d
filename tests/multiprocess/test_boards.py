"""What a process that was cut off says counts for nobody once a spare has its place, and it hears so itself."""

import dataclasses
import json
import threading
import time

from mpmd.job.boards import Boards, StatusFile
from mpmd.job.spares import Taken
from mpmd.job.verdict import Board
from mpmd.job.watchdog import _may_be_cut_off


class _Store(dict):
    """A key-value store of one process, with the calls of JAX's client."""

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self
        self[key] = value

    def key_value_try_get(self, key):
        return self[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.items() if key.startswith(folder)]

    def key_value_delete(self, key):
        self.pop(key, None)


@dataclasses.dataclass
class _Activity:
    rank: int
    pid: int

    def board(self, others):
        return Board(self.rank, pid=self.pid)


def boards_of(store, rank, number, taken=()):
    return Boards(rank, 2, _Activity(rank, 100 + number), store, None, number, taken)  # pyright: ignore[reportArgumentType]


def test_a_process_whose_place_is_taken_is_not_heard_and_hears_so():
    store = _Store()
    other, old = boards_of(store, 0, 0), boards_of(store, 1, 1)
    for boards in (other, old, other):
        boards.publish()
        boards.read()
    assert other.views()[1].board.pid == 101
    new = boards_of(store, 1, 2, [Taken(1, 2)])
    other.forget(1, 2)
    old.publish()  # the cable is mended
    other.read()
    assert 1 not in other.views() and old.newer is None
    for boards in (new, old, other):
        boards.publish()
        boards.read()
    assert other.views()[1].board.pid == 102
    assert (old.newer, new.newer, other.newer) == (2, None, None)


def test_what_the_launcher_reads_stays_whole_and_keeps_the_verdict(tmp_path):
    status = StatusFile(tmp_path / "rank-0.json")
    threads = [threading.Thread(target=status.write, args=(Board(0, doing="Größe"), v)) for v in [*[None] * 20, "no"]]
    for thread in threads:
        thread.start()
        thread.join(0.001)
    for thread in threads:
        thread.join()
    status.write(Board(0, doing="Größe"))
    text = (tmp_path / "rank-0.json").read_text("utf-8")
    assert json.loads(text)["verdict"] == "no" and "Größe" in text


def test_a_verdict_counts_for_those_that_know_of_the_same_losses():
    store = _Store()
    other, old = boards_of(store, 0, 0), boards_of(store, 1, 1)
    assert old.first_verdict(0, "no sign of life") == (0, "no sign of life", True)
    other.forget(1, 2)
    other.read()
    assert other.verdict is None
    assert other.first_verdict(1, "died") == (1, "died", True)
    new = boards_of(store, 1, 2, [Taken(1, 2)])
    new.read()
    assert new.verdict == (1, "died") == tuple(json.loads(store["mpmd/board/verdict-1"]))


def test_in_a_large_job_nobody_looks_cut_off_between_two_boards():
    """The more ranks, the less often they publish."""
    for num_ranks, is_long in ((64, True), (1024, False)):
        boards = Boards(0, num_ranks, _Activity(0, 100), _Store(), None, 0, ())  # pyright: ignore[reportArgumentType]
        boards._seen[1] = "", time.monotonic() - 6.0, Board(1, pid=101)
        view = boards.views()[1]
        assert view.process == "unknown" and _may_be_cut_off(view) == is_long == (not view.is_stuck)
