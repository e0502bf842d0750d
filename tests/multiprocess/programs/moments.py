"""Faults at a counted moment of a phase: before one of the instructions of a step, or amid the Python of some files.

The moment is counted in the process itself, so a case comes again as it was drawn, but for what runs beside it.
"""

import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from mpmd.job import joining
from mpmd.resilience import meeting
from mpmd.run.executor import Executor

# Instructions of a step, by how their texts begin. What stands in no other phase is a task.
INSTRUCTIONS = {"transfer": "the transfer of ", "update": "segment"}
# Parts of the names of files.
FILES = {
    "copy": ("/mpmd/resilience/copies.py", "/mpmd/resilience/keeper"),
    "checkpoint": ("/reshard/checkpoint/", "/reshard/_orbax_compat.py", "/orbax/"),
    "recovery": ("/mpmd/resilience/", "/mpmd/job/job.py", "/mpmd/job/calls.py"),
}


def strike(fault: dict) -> None:
    """Does to this process, or to the keeper of its host, what the fault says."""
    print(f"fault: {fault}", file=sys.stderr, flush=True)
    pid = os.getpid()
    if fault.get("keeper"):
        os.kill(keeper(), signal.SIGKILL)
    if wakes_s := fault.get("wakes_s"):
        subprocess.Popen(["sh", "-c", f"sleep {wakes_s}; kill -CONT {pid}"], start_new_session=True)
    if number := fault.get("signal"):
        os.kill(pid, number)


def keeper() -> int:
    """The process of this host that has the memory."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ["MPMD_KEEPER"].split(":")[1])
        return struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def later(fault: dict) -> None:
    """The same, so many seconds later."""
    if after_s := fault.get("after_s"):
        threading.Timer(after_s, strike, [fault]).start()
    else:
        strike(fault)


def prepare(fault: dict) -> None:
    """Lets this process strike when the phase of the fault has come to its count, from `fault["is_due"]` on.

    In a recovery it is due when all meet again.
    """
    is_meant, left = _meant(fault["phase"]), [fault["count"]]

    def profile(frame, event, argument):
        if left[0] > 0 and fault.get("is_due") and is_meant(frame, event, argument):
            left[0] -= 1
            if not left[0]:
                later(fault)

    threading.setprofile(profile)  # of the threads to come, as that of the copies
    sys.setprofile(profile)
    if fault["phase"] == "recovery":
        plain = meeting.Meeting.__init__

        @functools.wraps(plain)
        def meet(*arguments):
            job = joining.current()
            fault["is_due"] = bool(int(os.environ.get("MPMD_ATTEMPT", "0")) or (job and job.epoch))
            plain(*arguments)

        meeting.Meeting.__init__ = meet


def _meant(phase: str) -> Callable[[types.FrameType, str, Any], bool]:
    if phase in FILES:
        return lambda frame, event, argument: any(part in frame.f_code.co_filename for part in FILES[phase])

    def is_meant(frame: types.FrameType, event: str, argument: Any) -> bool:
        if frame.f_code is not Executor._walk.__code__ or argument is not time.perf_counter:
            return False
        text = frame.f_locals["self"].text(frame.f_locals["number"])
        found = next((name for name, begin in INSTRUCTIONS.items() if text.startswith(begin)), "task")
        return event == "c_call" and found == phase

    return is_meant
