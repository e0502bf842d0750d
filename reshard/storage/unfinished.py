"""A folder that is written next to its place and renamed at the end: there is a complete folder, or none."""

import contextlib
import errno
import glob
import os
import shutil
import time
from pathlib import Path as File


class UnfinishedFolder:
    """A folder of one writer, or of one job's processes: next to `target`, with `suffix`, until it is renamed."""

    def __init__(self, target: File, suffix: str):
        self.target, self.folder = target, target.parent / f"{target.name}{suffix}"

    def remove(self) -> None:
        """Removes everything written so far; repeatedly, because storage may still be writing."""
        for _ in range(20 if self.folder != self.target else 0):
            found = list(self.target.parent.glob(glob.escape(self.folder.name) + "*"))
            if not found:
                return
            for left in found:
                shutil.rmtree(str(left), ignore_errors=True)
            time.sleep(0.05)

    def rename(self, lasting: bool = False) -> int:
        """Puts the folder in place and returns 0. If that fails, removes it and returns the number of the error.

        EEXIST: the target exists already. A folder that is not empty is never replaced by a rename.

        Args:
            lasting: whether to wait until it would survive a crash of the machine. On many file systems that takes as
                long as writing all data that is not on the disk yet.
        """
        try:
            written = os.stat(self.folder)
            os.rename(self.folder, self.target)
            if not os.path.samestat(written, os.stat(self.target)):
                return errno.EEXIST
        except OSError as error:
            self.remove()
            taken = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
            return errno.EEXIST if error.errno in taken else error.errno or errno.EIO
        if lasting:
            descriptor = os.open(self.target.parent, os.O_RDONLY)
            with contextlib.suppress(OSError):  # not every file system can do this for a folder
                os.fsync(descriptor)
            os.close(descriptor)
        return 0
