"""Asks the kernel about the processes of this machine."""

import contextlib
import os
import pathlib


def machine() -> str:
    """Returns a key that is equal for processes that see each other's pids; empty if it cannot be known."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    return ""


def started(pid: int) -> int:
    """Returns when a process started, in the kernel's ticks; 0 if it cannot be known."""
    stat = _stat(pid)
    return int(stat[19]) if stat else 0


def state(pid: int, started: int) -> str:
    """Returns the state of the process with this pid and start: running, stopped or gone."""
    stat = _stat(pid)
    if stat is None or int(stat[19]) != started or stat[0] in "ZX":
        return "gone"
    return "stopped" if stat[0] in "Tt" else "running"


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of `/proc/pid/stat` from the state on; None if there is no such process."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rsplit(")", 1)[1].split()
