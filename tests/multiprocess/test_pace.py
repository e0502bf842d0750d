"""Who is slow: pure functions of what processes measure and say, and what is done about it."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.job import joining, judge
from mpmd.job.job import Job
from mpmd.job.judge import Judge
from mpmd.job.verdict import Board, View
from mpmd.job.watchdog import Watchdog
from mpmd.observe import pace
from mpmd.observe.pace import History, Pace, straggler

STEADY = Pace(0.3, (1.0, 1.1, 0.9))


def paces_of(*samples_of_ranks):
    """What ranks say that have measured so many seconds one after the other."""
    found = {}
    for rank, samples in enumerate(samples_of_ranks):
        history = History()
        found[rank] = [history.add((), s) for s in samples][-1]
    return {rank: said for rank, said in found.items() if said is not None}


def test_a_process_compares_its_last_samples_with_the_median_of_its_earlier_ones():
    history = History()
    assert [history.add((), s) for s in (9.0, 1.0, 2.0, 2.0, 2.0, 4.0, 6.0)] == [None] * 7
    assert history.add((), 8.0) == Pace(2.0, (2.0, 3.0, 4.0))
    assert history.add((), 2.0) == Pace(2.0, (3.0, 4.0, 1.0))
    for _ in range(1000):
        history.add((), 3.0)
    assert history.add((), 3.0) == Pace(3.0, (1.0, 1.0, 1.0))  # what was long ago does not count


def test_samples_of_different_work_are_compared_with_earlier_ones_of_as_much():
    history = History()
    for _ in range(5):
        for work, seconds in enumerate((1.0, 4.0)):
            history.add(work, seconds)
    assert [history.add(work, 8.0) for work in (0, 0)] == [None] * 2
    assert history.add(1, 8.0) == Pace(4.0, (8.0, 8.0, 2.0))
    assert [history.add(work, 1.0) for work in (2, 0, 0)] == [None] * 3  # there are no earlier ones like one of them
    assert history.add(0, 1.0) == Pace(1.0, (1.0, 1.0, 1.0))


FAST, SLOW = [0.3] * 8, [0.3] * 5 + [1.2] * 3
CASES = {
    "nobody": ([FAST] * 3, None),
    "one": ([FAST, FAST, SLOW], 2),
    "one of two": ([SLOW, FAST], 0),
    "all alike": ([SLOW] * 4, None),
    "half of them": ([SLOW, SLOW, FAST, FAST], 0),
    "the others nearly as much": ([[0.3] * 5 + [0.6] * 3, SLOW, [0.3] * 5 + [0.6] * 3], None),
    "work that grew in all, and one that is slower still": ([SLOW, [0.3] * 5 + [9.0] * 3, SLOW], 1),
    "the others faster than ever": ([[0.3] * 5 + [0.7] * 3, [0.3] * 5 + [0.1] * 3], None),
    "a single step that was long": ([FAST, [*FAST, 9.0]], None),
    "two of three steps": ([FAST, [*FAST, 9.0, 9.0]], None),
    "the slower of two": ([FAST, SLOW, FAST, [0.3] * 5 + [2.0] * 3, FAST], 3),
    "all alike, and one is a sample behind": ([SLOW, SLOW[:-1], SLOW[:-1]], None),
    "more work, which is its own usual": ([FAST, [3.0] * 8], None),
    "others that have measured too little": ([SLOW, FAST[:4]], None),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_slow(name):
    samples, expected = CASES[name]
    found = straggler(paces_of(*samples), 3.0)
    assert (found and found[0]) == expected


def test_what_is_said_of_a_slow_process():
    slow = Pace(0.3123, (4.0, 4.13, 4.2))
    assert straggler({0: STEADY, 2: slow}, 3.5) == (
        2, "takes 4.1 times its usual 0.31 s a step (3 measured steps, others 1.0)"
    )  # fmt: skip
    assert straggler({0: STEADY, 2: slow}, 4.01) is None
    assert straggler({0: STEADY, 2: Pace(1.0, (1.2, 1.2, 1.2))}, 1.1) is not None


@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=9),
    st.lists(st.floats(0.5, 2), min_size=8, max_size=30),
    st.floats(1.01, 20),
)
def test_nobody_is_slow_where_all_take_longer_alike(usual, growth, factor):
    growth = [*growth, *[100.0] * 3]
    assert straggler(paces_of(*([u * g for g in growth] for u in usual)), factor) is None


def test_a_board_says_the_pace():
    assert Board.from_json(Board(1, pace=STEADY).to_json()).pace == STEADY
    assert Board.from_json({"rank": 1}).pace is None


# --- what is done about it ------------------------------------------------------------------------


def seen(*paces, process="running", **board):
    views = [Board(rank, pid=100 + rank, pace=p, **board) for rank, p in enumerate(paces)]
    return {b.rank: View(b, 0.0, process) for b in views}


def test_a_rank_is_slow_that_still_is_when_all_have_spoken_again(monkeypatch):
    now, slow = [0.0], Pace(0.3, (4.0, 4.0, 4.0))
    monkeypatch.setattr(judge.time, "monotonic", lambda: now[0])
    of = Judge(SimpleNamespace(rank=0, period_s=0.25), None, False, 3.0)  # pyright: ignore[reportArgumentType]
    found = []
    for second, paces in enumerate([(STEADY, slow), (slow, slow), (STEADY, slow), (STEADY, slow), (STEADY, slow)]):
        now[0] = 0.6 * second
        found.append(of.straggler(seen(*paces)))
    assert [f and f[0] for f in found] == [None, None, None, None, 1]
    assert of.straggler(seen(STEADY, slow, process="gone")) is None
    assert of.straggler(seen(STEADY, slow, phase="finished")) is None
    assert of.straggler(seen(None, slow)) is None


def test_one_rank_speaks_of_a_slow_one_once_unless_it_could_not_be_replaced():
    said, views = [], seen(STEADY, STEADY, STEADY)

    def watchdog(rank, answers):
        def make_way(board, what, is_slow):
            said.append((rank, board.rank, what, is_slow))
            return answers.pop(0)

        boards: Any = SimpleNamespace(rank=rank, verdict=None)
        nothing: Any = None
        return Watchdog(3, nothing, boards, nothing, nothing, nothing, False, lambda: None, make_way)

    def told(of, slow):
        before, threads = len(said), set(threading.enumerate())
        of._after_slowness(views, slow, "is slow")
        for thread in {*threading.enumerate()} - threads:
            thread.join()
        return said[before:]

    first, second = watchdog(0, [False, True, True]), watchdog(1, [True])
    assert told(second, 2) == [] and told(second, 0) == [(1, 0, "is slow", True)]
    assert told(first, 2) == told(first, 2) == [(0, 2, "is slow", True)] and told(first, 2) == []
    views[2] = View(Board(2, pid=999), 0.0, "running")
    assert told(first, 2) == [(0, 2, "is slow", True)]  # another process, in the place of the first


@pytest.mark.parametrize(
    "num_left, is_slow, waits, answer, lines",
    [
        (1, True, True, True, ["is slow; it is killed, to be replaced", "the end of 102 by SIGRTMAX"]),
        (1, True, False, False, []),  # the loop is at its end, or another rank was lost
        (1, False, False, True, ["is slow; it is killed, to be replaced", "the end of 102 by SIGKILL"]),
        (0, True, True, True, ["is slow; no spare can take its place"]),
        (0, False, False, True, ["is slow; it is killed, to be replaced", "the end of 102 by SIGKILL"]),
    ],
)
def test_a_slow_rank_is_ended_between_states_and_without_a_spare_only_named(
    num_left, is_slow, waits, answer, lines, capsys
):
    job: Any = object.__new__(Job)
    job._register, job.activity = SimpleNamespace(num_left=num_left), SimpleNamespace(goes_on=True)
    ended: list[str] = []
    job.end_process = lambda board, number: ended.append(f"the end of {board.pid} by {signal.Signals(number).name}")
    job.wait_until_kept = lambda: waits
    assert job._make_way(Board(2, pid=102), "is slow", is_slow) == answer
    printed = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("jax-mpmd: rank 2: ") for line in printed] + ended == lines


def test_the_option_is_a_number_above_one_in_a_job_with_spares():
    assert joining._slow_factor({}) is None
    assert joining._slow_factor({pace.VARIABLE: "2.5", "MPMD_NUM_SPARES": "1"}) == 2.5
    for text, spares in (("2", "0"), ("1", "1"), ("nan", "1"), ("inf", "1"), ("-3", "1"), ("much", "1")):
        with pytest.raises(ValueError) as e:
            joining._slow_factor({pace.VARIABLE: text, "MPMD_NUM_SPARES": spares})
        assert str(e.value) == (
            f"mpmd.initialize: MPMD_REPLACE_SLOW={text!r}: expected a number above 1, in a job with --spares."
        )
