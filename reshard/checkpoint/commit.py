"""Writes a checkpoint into a temporary folder and renames it at the end. If two jobs save to one path, one succeeds.

Orbax names its temporary folder by the target, so two jobs would write into the same one and remove each other's files.
"""

import errno
import os
import re
import shutil
import uuid
import zlib
from pathlib import Path as File
from typing import Self

import jax

from mpmd.job.processes import machine, started, state
from reshard.checkpoint.meeting import meetings, store
from reshard.storage.stored import UNFINISHED
from reshard.storage.unfinished import UnfinishedFolder

# The folders that calls of this process write now.
_writing: set[str] = set()


class Working(UnfinishedFolder):
    """The folder in which the processes of one job write a checkpoint; each process constructs one at the same point.

    In an object store, which has no rename, it is the target.
    """

    def __init__(self, target: File, timeout_s: int):
        """Returns when all processes have come, which are in a shared call.

        Raises:
            FileExistsError: the first process finds something at `target`; raised in all processes.
            TimeoutError: a process has not come in time.
        """
        self.target = target
        self._is_shared = jax.process_count() > 1
        self._key = meetings.call.place("save") if meetings.call is not None else ""
        self._is_renamed = "://" not in str(target)
        suffix = ""
        if jax.process_index() == 0:
            if not (target.exists() or (self._is_renamed and target.is_symlink())):
                self._remove_left()
                suffix = f"{UNFINISHED}-{_machine():08x}-{_own()}-{uuid.uuid4().hex[:8]}"
            if self._is_shared:
                store().key_value_set(self._key, suffix)
        self.wait_for_all("come", timeout_s)
        if jax.process_index():
            suffix = store().blocking_key_value_get(self._key, timeout_s * 1000)
        if not suffix:
            what = "save: there is something already; give another path, or delete it first"
            raise FileExistsError(errno.EEXIST, what, str(target))
        super().__init__(target, suffix if self._is_renamed else "")
        _writing.add(self.folder.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes what an error or an interrupt leaves; storage that still writes leaves the rest to the next save."""
        _writing.discard(self.folder.name)
        if kind is not None and jax.process_index() == 0:
            self.remove()

    def put_in_place(self, timeout_s: int) -> None:
        """Renames the finished folder to the target: the first process does it, and all learn the result.

        Raises:
            FileExistsError: the target was made by somebody else meanwhile. The finished folder is removed.
            OSError: the folder cannot be renamed.
            TimeoutError: the first process does not report the result in time.
            RankLostError: a process was lost, perhaps the first one.
        """
        if not self._is_renamed:
            return
        code = 0
        if jax.process_index() == 0:
            code = self.rename()
            if self._is_shared:
                store().key_value_set(f"{self._key}/outcome", str(code))
        else:
            code = int(meetings.find(f"{self._key}/outcome", timeout_s))
        if code == errno.EEXIST:
            raise FileExistsError(
                code,
                "save: another job has put something there while this one was saving, and nothing of this save was"
                " kept; give each job a path of its own",
                str(self.target),
            )
        if code:
            raise OSError(code, f"save: it could not be put in place ({os.strerror(code)})", str(self.target))

    def wait_for_all(self, where: str, timeout_s: int) -> None:
        """Returns when every process that saves this folder has come to the same point, or raises a TimeoutError."""
        if not self._is_shared:
            return
        try:
            meetings.meet(f"{where}:{self.target}", timeout_s * 1000)
        except (TimeoutError, jax.errors.JaxRuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TimeoutError(
                f"save: after {timeout_s} s, not all processes had come to save {self.target}; nothing was saved.\n"
                f"  {reason}"
            ) from error

    def _remove_left(self) -> None:
        if not self._is_renamed or not self.target.parent.exists():
            return
        for left in self.target.parent.glob(f"{self.target.name}{UNFINISHED}-*"):
            found = re.match(
                r"-([0-9a-f]{8})-(\d+)\.(\d+)-[0-9a-f]{8}\b", left.name.removeprefix(self.target.name + UNFINISHED)
            )
            if found is None or int(found[1], 16) != _machine():  # another machine's save may be running
                continue
            is_own = f"{found[2]}.{found[3]}" == _own()
            if (is_own and left.name not in _writing) or state(int(found[2]), int(found[3])) == "gone":
                shutil.rmtree(str(left), ignore_errors=True)


def _own() -> str:
    """Returns this process's pid and start: a later process may have the same pid."""
    return f"{os.getpid()}.{started(os.getpid())}"


def _machine() -> int:
    return zlib.crc32(machine().encode())
