"""Tells of Ctrl-C and SIGTERM at once, also while the main thread is in C++ and runs no handler of Python."""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import threading
import types
from collections.abc import Callable

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def listen(note: Callable[[str], None]) -> None:
    """Calls `note` with the name of each such signal, in a thread of its own.

    The signals do what they did before: where nobody handles SIGTERM, it ends the process as soon as `note` returns.
    Nothing happens outside of the main thread, or where an event loop is told of signals in the same way.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
    os.register_at_fork(after_in_child=_forget)  # a child would tell its parent's thread of its own signals
    atexit.register(_forget)  # Python at its end runs no thread any more
    threading.Thread(target=_read, args=(reader, writer, note), name="mpmd-signals", daemon=True).start()


def _leave_it_to_the_thread(number: int, frame: types.FrameType | None) -> None:
    pass


def _forget() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _read(reader: socket.socket, writer: socket.socket, note: Callable[[str], None]) -> None:
    assert writer.fileno() >= 0  # it lives as long as this thread
    while data := reader.recv(64):
        for number in data:
            if number not in _NUMBERS:
                continue
            with contextlib.suppress(Exception):  # a signal ends the process, whatever becomes of the note
                note(signal.Signals(number).name)
            if number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
                set_handler = ctypes.CDLL(None).signal  # Python's own lets the main thread do so alone
                set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
                set_handler(number, None)
                os.kill(os.getpid(), number)
