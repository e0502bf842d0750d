"""Reports Ctrl-C and SIGTERM at once, also while the main thread is in C++ and runs no handler of Python."""

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import socket
import threading
import types
from collections.abc import Callable, Iterator

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


# The listeners. There is one wakeup descriptor per process, and one thread that reads it.
_notes: list[Callable[[str], object]] = []
_wakeup: list[int] = []


def listen(note: Callable[[str], object]) -> None:
    """Calls `note` with the name of each such signal, in a separate thread.

    The signals keep their effect: where nobody handles SIGTERM, it ends the process as soon as all listeners have
    returned. If a listener returns True, the process continues, and that listener will end it.
    The call has no effect outside of the main thread, or where an event loop already has the wakeup descriptor.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if not _is_installed():
        return
    _notes.append(note)


@contextlib.contextmanager
def listening(note: Callable[[str], object]) -> Iterator[None]:
    """Listens while the context lasts. Otherwise like `listen`."""
    listen(note)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _notes.remove(note)


@functools.cache
def _is_installed() -> bool:
    """Starts the thread; returns False where other code has the wakeup descriptor."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False
    _wakeup.append(writer.fileno())
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
    os.register_at_fork(after_in_child=_forget)  # a child would report its own signals to its parent's thread
    atexit.register(_forget)  # at its end, Python runs no thread any more
    threading.Thread(target=_read, args=(reader, writer), name="mpmd-signals", daemon=True).start()
    return True


def _leave_it_to_the_thread(number: int, frame: types.FrameType | None) -> None:
    """Leaves the number to the thread, which reads it from the wakeup descriptor. If an event loop has taken that away,
    writes it there.
    """
    current = signal.set_wakeup_fd(_wakeup[0], warn_on_full_buffer=False)
    if current == _wakeup[0]:
        return
    if current != -1:  # of a loop that is running; afterwards it is -1
        signal.set_wakeup_fd(current)
    with contextlib.suppress(OSError):
        os.write(_wakeup[0], bytes((number,)))


def _forget() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _read(reader: socket.socket, writer: socket.socket) -> None:
    assert writer.fileno() >= 0  # it lives as long as this thread
    while data := reader.recv(64):
        for number in data:
            if number not in _NUMBERS:
                continue
            is_held = False
            for note in list(_notes):
                with contextlib.suppress(Exception):  # a signal ends the process, also when a listener fails
                    is_held |= note(signal.Signals(number).name) is True
            if number == signal.SIGTERM and not is_held and signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
                set_handler = ctypes.CDLL(None).signal  # Python's own may be called in the main thread only
                set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
                set_handler(number, None)
                os.kill(os.getpid(), number)
