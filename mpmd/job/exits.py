"""Finds out how a process ends: the status of `sys.exit`, the stacks of its threads, the text of an error."""

import faulthandler
import inspect
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence

# The exit status of a process that SIGTERM ended after its step. Another process takes its place.
TOLD_TO_END = 128 + 15
_OF_ORBAX = "Cannot serialize host local jax.Array"


class _Exit(SystemExit):
    """The exception of `sys.exit` after `note_exits`. Python itself reads `code` when nobody has caught it."""

    noted: int | None = None

    @property
    def code(self) -> object:
        code = self.args[0]
        try:
            sys._getframe(1)
        except ValueError:  # no Python function reads it: the interpreter does, and ends the process with it
            _Exit.noted = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        return code

    @code.setter
    def code(self, value: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.args = (value,)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def status_text(status: int) -> str:
    """Returns the text that a process publishes about its end."""
    return f"exit status {status}"


def note_exits() -> None:
    """Makes `sys.exit` leave its status for `exit_status`: Python passes the status to nobody, not even to `atexit`."""
    plain = sys.exit

    def exit(status: str | int | None = None, /) -> None:
        if threading.current_thread() is not threading.main_thread():
            plain(status)  # ends the thread, not the process
        raise _Exit(status)

    exit.__doc__ = plain.__doc__
    sys.exit = exit


def exit_status() -> int:
    """Returns, at the end of the program, the status of `sys.exit`; 0 also where it was not called."""
    return _Exit.noted or 0


def stacks() -> list[tuple[str, list[str]]]:
    """Returns the name and the stack of each Python thread, the outermost call first, without the `mpmd-…` threads.

    `faulthandler` reads all stacks in C, while no thread can run. A walk in Python over the frames of a running thread
    can crash the process.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    try:
        with open(os.memfd_create("stacks"), "w+") as file:  # needs no writable folder
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read()
    except OSError:  # there are no descriptors left
        return []
    found = []
    for part in text.split("\n\n"):
        head, *lines = part.strip().splitlines()
        if "0x" not in head:  # it leaves out the threads after the first 100
            continue
        name = names.get(int(head.split("0x", 1)[1].split()[0], 16), "a thread of JAX")
        if not name.startswith("mpmd-"):
            found.append((name, lines[::-1]))
    return found


def user_lines() -> list[tuple[str, str]]:
    """Returns the name and the innermost user line (`train.py:62 in load`) of each thread in the user's code."""
    return [(name, line) for name, lines in stacks() if (line := _user_line(lines))]


def main_line() -> str:
    """Returns the innermost line of the user's code that the main thread is in; empty if it is in none."""
    return dict(user_lines()).get("MainThread", "")


def line_of(text: str) -> str:
    """Returns the innermost user line of the thread that took the signal, from another process's stacks in text."""
    thread = next((part for part in text.split("\n\n") if part.startswith("Current thread")), "")
    return _user_line(thread.splitlines()[:0:-1])


def _user_line(lines: Sequence[str]) -> str:
    """Returns the innermost line of the user's code in a stack, the outermost call first; empty if there is none."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ours = [os.path.join(root, package, "") for package in ("mpmd", "reshard", "scheduler")]
    others = (*ours, sysconfig.get_paths()["stdlib"], "<frozen ")
    for line in reversed(lines):
        match = re.match(r'\s*File "(.+)", line (\d+) in (.+)', line)
        if match is not None and not match[1].startswith(others) and "-packages/" not in match[1]:
            return f"{match[1]}:{match[2]} in {match[3]}"
    return ""


def function_text(function: Callable) -> str:
    """Returns a function's name and where it is defined: `load (/home/me/data.py:12)`."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def error_text(error: BaseException) -> str:
    """Returns the first line of an error, with its type. A long message of Orbax is replaced by advice."""
    if _OF_ORBAX in str(error):
        return (
            f"{type(error).__name__}: {_OF_ORBAX}: Orbax takes arrays of a pipeline after `import reshard.checkpoint`"
        )
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
