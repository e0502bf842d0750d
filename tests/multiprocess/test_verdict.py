"""Who is to blame: pure functions from what the ranks say of themselves."""

import json

import pytest

from mpmd.job.verdict import (
    COMPILING_FACTOR,
    HELD_S,
    LEFT_S,
    SILENT_S,
    STARTING_S,
    Board,
    View,
    Wait,
    diagnose,
    suspect,
    table,
)

LIMIT_S = 10


def rank(number, *, silent_s=0.0, process="running", **board):
    return View(Board(number, host=f"host{number}", pid=100 + number, **board), silent_s, process)


def waiting(number, what, ranks, for_s, value=None, **board):
    silent_s, process = board.pop("silent_s", 0.0), board.pop("process", "running")
    board = {"still_s": for_s, **board}
    return rank(number, silent_s=silent_s, process=process, wait=Wait(what, ranks, for_s, value), **board)


def views(*ranks):
    return {v.board.rank: v for v in ranks}


GONE = {
    "nothing": ([rank(0), rank(1)], None),
    "failed": (
        [rank(0), rank(1, phase="failed", doing="ValueError: no (after step 2)")],
        (1, "ValueError: no (after step 2)"),
    ),
    "the first that failed": (
        [rank(0, phase="failed", doing="late", still_s=1.0), rank(1, phase="failed", doing="early", still_s=3.0)],
        (1, "early"),
    ),
    "a failure before the death that it caused": (
        [rank(0, process="gone"), rank(1, phase="failed", doing="early")],
        (1, "early"),
    ),
    "handed an error by one that failed later": (
        [
            rank(0, phase="failed", doing="JaxRuntimeError: INTERNAL: Error while transferring: bad", still_s=2.0),
            rank(1, phase="failed", doing="ValueError: bad (after step 2)", still_s=0.1),
        ],
        (1, "ValueError: bad (after step 2)"),
    ),
    "handed an error of a callback": (
        [
            rank(0, phase="failed", doing="JaxRuntimeError: INTERNAL: Error while transferring: bad", still_s=0.1),
            rank(1, raised="ValueError: bad in the host callback load (a.py:3)", step=3),
        ],
        (1, "ValueError: bad in the host callback load (a.py:3) (after step 3)"),
    ),
    "an error of a callback that somebody has caught": ([rank(0), rank(1, raised="ValueError: bad")], None),
    "handed an error, and whose is not known yet": (
        [rank(0, phase="failed", doing="JaxRuntimeError: INTERNAL: Error while transferring: bad", still_s=1.0)],
        None,
    ),
    "dead": (
        [rank(0), rank(1, process="gone", step=3)],
        (1, "died: process 101 on host1 is gone (after step 3)"),
    ),
    "dead in a step": (
        [rank(0, process="gone", phase="step", step=3, doing="1F2 in group 1"), rank(1)],
        (0, "died: process 100 on host0 is gone (step 3, in 1F2 in group 1)"),
    ),
    "finished is not dead": ([rank(0), rank(1, process="gone", phase="finished")], None),
    "silent on another machine": (
        [rank(0), rank(1, process="unknown", silent_s=SILENT_S + 1)],
        (
            1,
            "no sign of life from host1 for 21 s: process 101 died, or its machine cannot be reached (between steps)",
        ),
    ),
    "cut off, and so it ended itself": (
        [rank(0), rank(1, process="gone", silent_s=SILENT_S + 1, step=3)],
        (1, "no sign of life from host1 for 21 s: process 101 died, or its machine cannot be reached (after step 3)"),
    ),
    "silent there is no death": ([rank(0), rank(1, process="mute", silent_s=SILENT_S + 99)], None),
    "silent here is no death": ([rank(0), rank(1, process="stopped", silent_s=SILENT_S + 1)], None),
    "left": (
        [waiting(0, "F1.0[0]", (1,), LEFT_S + 1), rank(1, phase="finished", step=4, still_s=LEFT_S + 1)],
        (1, "left the program after step 4, while rank 0 waits for F1.0[0]"),
    ),
    "just left": ([waiting(0, "F1.0[0]", (1,), LEFT_S + 1), rank(1, phase="finished", step=4, still_s=0.1)], None),
    "left, and nobody waits": ([rank(0), rank(1, phase="finished", still_s=LEFT_S + 1)], None),
    "what others know of a wait is old": (
        [rank(0), rank(1, phase="finished", still_s=9), waiting(2, "F1.0[0]", (1,), 9)],
        None,
    ),
}


@pytest.mark.parametrize("name", GONE)
def test_who_died_failed_or_left(name):
    ranks, expected = GONE[name]
    assert diagnose(views(*ranks), me=0) == expected


STUCK = {
    "nobody waits": ([rank(0, still_s=99), rank(1, still_s=99)], None),
    "not for long enough": ([waiting(0, "F0", (1,), 9), rank(1, still_s=99)], None),
    "absent": (
        [waiting(0, "F0", (1,), 11), rank(1, still_s=12, step=3)],
        (1, "did not come to the next step for 12 s (after step 3); rank 0 waits for F0"),
    ),
    "in an instruction": (
        [waiting(0, "F0", (1,), 11), rank(1, still_s=12, step=3, phase="step", doing="1B2 in group 1")],
        (1, "no progress for 12 s (step 3, in 1B2 in group 1); rank 0 waits for F0"),
    ),
    "slow, but it moves": ([waiting(0, "F0", (1,), 99, step=3), rank(1, still_s=2, step=3)], None),
    "the end of the chain": (
        [waiting(0, "C", (3,), 11), rank(1, still_s=14), waiting(2, "A", (1,), 13), waiting(3, "B", (2,), 12)],
        (1, "did not come to the next step for 14 s (between steps); rank 2 waits for A"),
    ),
    "compiling": ([waiting(0, "F0", (1,), 50), rank(1, still_s=50, phase="compiling")], None),
    "compiling for too long": (
        [waiting(0, "F0", (1,), 101), rank(1, still_s=LIMIT_S * COMPILING_FACTOR + 1, phase="compiling")],
        (1, "no progress for 101 s (compiling); rank 0 waits for F0"),
    ),
    "stopped": (
        [waiting(0, "F0", (1,), 11), waiting(1, "F1", (0,), 1, silent_s=11, process="stopped")],
        (1, "process 101 on host1 is stopped for 11 s (between steps); rank 0 waits for F0"),
    ),
    "stopped, and nobody says that it waits": (
        [rank(0), rank(1, silent_s=11, process="stopped", step=3)],
        (1, "process 101 on host1 is stopped for 11 s (after step 3)"),
    ),
    "stopped at the end of its program": ([rank(0), rank(1, silent_s=11, process="stopped", phase="finished")], None),
    "stopped for a while": ([rank(0), rank(1, silent_s=9, process="stopped")], None),
    "stopped when it compiled": (
        [waiting(0, "F0", (1,), 11), rank(1, silent_s=11, process="stopped", phase="compiling", doing="compiling")],
        (1, "process 101 on host1 is stopped for 11 s (compiling); rank 0 waits for F0"),
    ),
    "held by C code": (
        [
            waiting(0, "F0", (1,), 11),
            waiting(1, "F1", (0,), 1, silent_s=11, process="held", line="a.py:3 in f", step=2),
        ],
        (1, "has held Python's lock for 11 s, in C code (after step 2, at a.py:3 in f); rank 0 waits for F0"),
    ),
    "held for a while, and still before": (
        [waiting(0, "F0", (1,), 11), rank(1, silent_s=5, still_s=6, process="held")],
        (
            1,
            "has held Python's lock for 5 s, in C code, and did not move for 11 s (between steps); rank 0 waits for F0",
        ),
    ),
    "on another machine": (
        [waiting(0, "F0", (1,), 11), rank(1, silent_s=11, process="mute")],
        (1, "has held Python's lock for 11 s, in C code (or is stopped) (between steps); rank 0 waits for F0"),
    ),
    "what it waited for has come since": (
        [waiting(0, "A", (1,), 11), waiting(1, "B", (2,), 2, value=7, silent_s=11, process="held"), rank(2, sent=(7,))],
        (1, "has held Python's lock for 11 s, in C code (between steps); rank 0 waits for A"),
    ),
    "its own devices": (
        [waiting(0, "F0", (1,), 11), waiting(1, "F0", (), 12)],
        (1, "its devices have not computed F0 for 12 s (between steps); rank 0 waits for F0"),
    ),
    "just its own devices": ([rank(0), waiting(1, "F0", (), 99)], None),
    "a callback inside a collective": (
        [waiting(0, "0F0", (1,), 11), waiting(1, "0F0", (0,), 11, callback="load (a.py:3)")],
        (1, "is in the host callback load (a.py:3) for 11 s (between steps); rank 0 waits for 0F0"),
    ),
    "lost": (
        [waiting(0, "A", (1,), 11, value=7), waiting(1, "B", (0,), 12, value=8, sent=(7,))],
        (1, "sent A, which did not reach rank 0 for 11 s (between steps)"),
    ),
    "lost, and the sender went on": (
        [waiting(0, "A", (1,), 11, value=7), rank(1, still_s=0, step=1, sent=(7,))],
        (1, "sent A, which did not reach rank 0 for 11 s (after step 1)"),
    ),
    "sent a moment ago": (
        [waiting(0, "C", (1,), 99, value=9), waiting(1, "A", (2,), 3, value=7), rank(2, step=1, sent=(7,))],
        None,
    ),
    "went on": (
        [waiting(0, "A", (1,), 11, step=3), rank(1, step=9)],
        (1, "went on to step 9, while rank 0 waits for A of step 3 for 11 s"),
    ),
    "a circle": (
        [waiting(0, "A", (1,), 11, step=3), waiting(1, "B", (0,), 12, step=2)],
        (1, "waits in a circle for B for 12 s (after step 2)"),
    ),
    "a process that starts": ([waiting(0, "A", (1, 2), 11), waiting(1, "A", (0, 2), 11)], None),
    "a process that does not start": (
        [waiting(r, "A", (2,), STARTING_S + 1, phase="agreeing", doing="a call") for r in range(2)],
        (0, "is at a point where others do not come: a call, for 61 s"),
    ),
    "another program": (
        [
            waiting(0, "F0", (2,), 11, step=4),
            waiting(1, "F1", (0,), 11, step=4),
            waiting(2, "comparing plans", (0, 1), 12, step=4, phase="agreeing", doing="comparing plans"),
        ],
        (2, "is at a point where others do not come: comparing plans, for 12 s"),
    ),
}


@pytest.mark.parametrize("name", STUCK)
def test_who_holds_up_the_others(name):
    ranks, expected = STUCK[name]
    assert suspect(views(*ranks), LIMIT_S) == expected


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_nobody_is_stuck(limit):
    assert suspect(views(waiting(0, "F0", (1,), 1e6), rank(1, still_s=1e6)), limit) is None


def test_the_table_has_a_row_for_each_rank():
    ranks = views(
        waiting(0, "the transfer of F1[0]", (1, 2), 7.25, step=3, still_s=7.25),
        rank(1, silent_s=6.5, process="stopped", step=3, phase="step", doing="1F0 in group 1"),
        rank(2, phase="failed", doing="ValueError: no", still_s=0.5),
        rank(3, process="gone", step=2),
    )
    assert table(ranks, 1, "process 101 on host1 is stopped").splitlines() == [
        "jax-mpmd: rank 1: process 101 on host1 is stopped",
        "  rank  host   pid  step  at                       waits for              from  seconds",
        "  0     host0  100  3     idle                     the transfer of F1[0]  1,2   7.2",
        "  1     host1  101  3     stopped: 1F0 in group 1                               6.5",
        "  2     host2  102  0     failed: ValueError: no                                0.5",
        "  3     host3  103  2     idle                                                  0.0",
    ]
    assert table(ranks, 3, "died").splitlines()[-1].split() == ["3", "host3", "103", "2", "gone", "0.0"]


def test_a_long_error_does_not_widen_the_table():
    failed = views(rank(0, phase="failed", doing="ValueError: " + 99 * "x"))
    assert f"failed: ValueError: {39 * 'x'}…  " in table(failed, 0, "failed")


def test_a_board_survives_the_way_through_the_store():
    board = Board(
        3, "h", 7, "m", 8, "step", 2, 5, "1F0", 1.5, Wait("A", (1, 2), 0.5, 77), (77, 78), "f (a.py:1)", "E: e"
    )
    assert Board.from_json(json.loads(json.dumps(board.to_json()))) == board


@pytest.mark.parametrize(
    ("view", "is_stuck"),
    [
        (rank(1, process="stopped", phase="step"), True),
        (rank(1, process="mute"), True),
        (rank(1, phase="idle", step=3), True),
        (waiting(1, "B0.0", (), 20.0, phase="step"), True),  # for its own devices
        (waiting(1, "B0.0", (2,), 20.0, phase="step"), False),
        (waiting(1, "B0.0", (2,), 20.0, phase="step", callback="load"), True),
        (rank(1, phase="agreeing", doing="a checkpoint"), False),
        (rank(1, process="gone"), False),
        (rank(1, process="unknown", silent_s=HELD_S + 1), False),  # its machine cannot be reached
        (rank(1, phase="failed", doing="ValueError: no"), False),
    ],
)
def test_a_rank_makes_way_for_a_spare_where_nobody_else_holds_it_up(view, is_stuck):
    assert view.is_stuck == is_stuck
