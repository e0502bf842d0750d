"""What is said while something takes long: programs that are compiled, and whatever else."""

import io
import time

import pytest

from mpmd.compile.progress import CompileProgress
from scheduler.base.waiting import waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _lines(stream):
    return stream.getvalue().replace("\r\x1b[K", "\n").splitlines()[1:]


def _wait_for(stream, text=""):
    until = time.monotonic() + 20
    while not (stream.getvalue() and text in stream.getvalue()) and time.monotonic() < until:
        time.sleep(0.005)


def test_the_line_says_which_program_of_how_many_and_goes_away_with_the_last_one_even_if_that_fails():
    stream = Terminal()
    progress = CompileProgress(stream, patience_s=0.1)
    now = "mpmd: compiled 1 of 2 programs, now step_stage1_F"
    for _ in range(2):
        progress.expect()
    with progress.compiling("step_stage0_F"):
        pass
    progress.close()
    with pytest.raises(RuntimeError), progress.compiling("step_stage1_F"):
        _wait_for(stream, now)
        raise RuntimeError("no memory")
    assert any(line.startswith(now) for line in _lines(stream))
    assert stream.getvalue().endswith("\r\x1b[K")


def test_whatever_takes_long_says_how_far_it_is_and_goes_away():
    stream = Terminal()
    with waiting(lambda: ("read 3 of 4 files", 0.75), stream, patience_s=0.0):
        _wait_for(stream)
        with waiting(lambda: ("inside of it", 0.0), inner := Terminal(), patience_s=0.0):
            time.sleep(0.01)
    assert _lines(stream)[0] == "read 3 of 4 files" and stream.getvalue().endswith("\r\x1b[K")
    assert inner.getvalue() == ""


def test_a_log_gets_whole_lines_of_the_first_process_and_none_of_what_is_quick(monkeypatch):
    log = io.StringIO()
    with waiting(lambda: ("read 3 of 4 files", 0.75), log, patience_s=0.0):
        _wait_for(log)
    assert log.getvalue() == "read 3 of 4 files\n"  # the next one is due in ten seconds
    monkeypatch.setenv("MPMD_PROCESS_ID", "1")
    silent = io.StringIO()
    for quiet, patience_s in ((Terminal(), 60.0), (silent, 0.0), (silent, None)):
        with waiting(lambda: ("read", 0.0), quiet, patience_s):
            time.sleep(0.01)
        assert quiet.getvalue() == ""
