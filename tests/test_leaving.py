"""How a process ends: statuses that it was told, and stacks of threads that run."""

import subprocess
import sys
import threading
import time

import pytest

from mpmd.job import exits

# Importing takes a second: one process imports, and a fork of it for each of `ENDS` runs the program.
IMPORTED = """
import atexit, os, sys, threading
from mpmd.job import exits
folder, *ends = sys.argv[1:]
for number, end in enumerate(ends):
    if os.fork() == 0:
        for name, fd in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), fd)
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    os._exit(0)
"""
PROGRAM = """
exits.note_exits()
atexit.register(lambda: print(exits.exit_status()))
try:
    sys.exit(9)
except SystemExit as e:
    assert e.code == 9 and str(e) == "9", e
thread = threading.Thread(target=lambda: sys.exit(8))
thread.start()
thread.join()
exec(end)
"""
# The last line of a program: its status, the status that is noted, and how what it writes to stderr begins.
ENDS = {
    "": (0, 0, ""),
    "sys.exit()": (0, 0, ""),
    "sys.exit(3)": (3, 3, ""),
    "sys.exit(-1)": (255, 255, ""),
    "sys.exit('no data')": (1, 1, "no data\n"),
    "sys.exit((1, 2))": (1, 1, "(1, 2)\n"),
    "import argparse; argparse.ArgumentParser(usage='u').parse_args(['x'])": (2, 2, "usage: u\n-c: error: "),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """For each of `ENDS`, the status and what was written to stdout and to stderr."""
    folder = tmp_path_factory.mktemp("ended")
    command = [sys.executable, "-c", IMPORTED + PROGRAM, str(folder), *ENDS]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=True)
    written = [[(folder / f"{n}.{name}").read_text() for name in ("out", "err")] for n in range(len(ENDS))]
    return dict(zip(ENDS, [(int(s), *w) for s, w in zip(done.stdout.split(), written, strict=True)], strict=True))


@pytest.mark.parametrize("end", ENDS)
def test_the_status_that_ends_the_program_is_known_at_its_end(end, ended):
    (status, noted, begins), (found, out, err) = ENDS[end], ended[end]
    assert (found, out) == (status, f"{noted}\n")
    assert err.startswith(begins) and bool(err) == bool(begins)


def test_stacks_of_threads_that_run_can_be_taken_again_and_again():
    end = threading.Event()

    def deeper(depth):
        return deeper(depth - 1) if depth else sum(range(10))

    def run():
        while not end.is_set():
            deeper(20)

    threads = [threading.Thread(target=run, name=name) for name in ("busy", "mpmd-own")]
    for thread in threads:
        thread.start()
    try:
        stop = time.monotonic() + 0.5
        while time.monotonic() < stop:
            found = dict(exits.stacks())
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert found.keys() >= {"MainThread", "busy"} and "mpmd-own" not in found
    assert found["MainThread"][-1].endswith("in stacks") and "in run" in "".join(found["busy"])


def test_of_more_than_a_hundred_threads_those_are_told_that_are_known():
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(120)]
    for thread in threads:
        thread.start()
    try:
        assert len(exits.stacks()) > 50
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_a_function_is_named_with_its_place():
    assert exits.function_text(PROGRAM.join) == "join"
    text = exits.function_text(test_a_function_is_named_with_its_place)
    assert text.startswith("test_a_function_is_named_with_its_place (") and "test_leaving.py:" in text
