"""How a process ends: statuses that it was told, and stacks of threads that run."""

import subprocess
import sys
import threading
import time

import pytest

from mpmd.job import exits

PROGRAM = """
import atexit, sys, threading
from mpmd.job import exits
exits.note_exits()
atexit.register(lambda: print(exits.exit_status()))
try:
    sys.exit(9)
except SystemExit as e:
    assert e.code == 9 and str(e) == "9", e
thread = threading.Thread(target=lambda: sys.exit(8))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("last", "status", "noted", "err"),
    [
        ("", 0, 0, ""),
        ("sys.exit()", 0, 0, ""),
        ("sys.exit(3)", 3, 3, ""),
        ("sys.exit(-1)", 255, 255, ""),
        ("sys.exit('no data')", 1, 1, "no data\n"),
        ("sys.exit((1, 2))", 1, 1, "(1, 2)\n"),
        ("import argparse; argparse.ArgumentParser(usage='u').parse_args(['x'])", 2, 2, "usage: u\n-c: error: "),
    ],
)
def test_the_status_that_ends_the_program_is_known_at_its_end(last, status, noted, err):
    done = subprocess.run([sys.executable, "-c", PROGRAM + last], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, f"{noted}\n")
    assert done.stderr.startswith(err) and bool(done.stderr) == bool(err)


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


def test_a_function_is_named_with_its_place():
    assert exits.function_text(PROGRAM.join) == "join"
    text = exits.function_text(test_a_function_is_named_with_its_place)
    assert text.startswith("test_a_function_is_named_with_its_place (") and "test_leaving.py:" in text
