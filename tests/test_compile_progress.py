"""What a terminal shows while something takes long: programs that are compiled, and whatever else."""

import io
import time

from mpmd.compile.progress import Progress
from scheduler.waiting import waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _lines(stream):
    return stream.getvalue().replace("\r\x1b[K", "\n").splitlines()[1:]


def _wait_for(stream):
    until = time.monotonic() + 20
    while not stream.getvalue() and time.monotonic() < until:
        time.sleep(0.005)


def test_the_line_says_which_program_of_how_many_and_goes_away():
    stream = Terminal()
    progress = Progress(stream, patience_s=0.1)  # both programs are expected before anything is shown
    for _ in range(2):
        progress.expect()
    _wait_for(stream)
    for name in ("step_stage0_F", "step_stage1_F"):
        with progress.compiling(name):
            pass
    progress.close()
    assert _lines(stream) == [
        "mpmd: compiled 0 of 2 programs",
        "mpmd: compiled 0 of 2 programs: step_stage0_F",
        "mpmd: compiled 1 of 2 programs",
        "mpmd: compiled 1 of 2 programs: step_stage1_F",
        "mpmd: compiled 2 of 2 programs",
    ]
    assert stream.getvalue().endswith("\r\x1b[K")


def test_what_is_quick_and_what_is_no_terminal_shows_nothing():
    for stream, patience_s in ((Terminal(), 60.0), (io.StringIO(), 0.0)):
        progress = Progress(stream, patience_s)
        progress.expect()
        with progress.compiling("step_stage0_F"):
            time.sleep(0.01)
        progress.close()
        assert stream.getvalue() == ""


def test_a_program_that_cannot_be_compiled_counts_as_done():
    stream = Terminal()
    progress = Progress(stream, patience_s=0.0)
    progress.expect()
    _wait_for(stream)
    try:
        with progress.compiling("step_stage0_F"):
            raise RuntimeError("no memory")
    except RuntimeError:
        pass
    progress.close()
    assert stream.getvalue().endswith("programs\r\x1b[K")


def test_whatever_takes_long_says_how_far_it_is_and_goes_away():
    stream = Terminal()
    with waiting(lambda: ("read 3 of 4 files", 0.75), stream, patience_s=0.0):
        _wait_for(stream)
    assert _lines(stream)[0] == "read 3 of 4 files" and stream.getvalue().endswith("\r\x1b[K")
    for quiet, patience_s in ((Terminal(), 60.0), (io.StringIO(), 0.0)):
        with waiting(lambda: ("read", 0.0), quiet, patience_s):
            time.sleep(0.01)
        assert quiet.getvalue() == ""
