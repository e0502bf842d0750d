"""Reads files that others wrote. A file that is not plain, too large or nested too deeply is an error, not a hang."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_NBYTES = 64 << 20


def read_text(path: str | Path, most_nbytes: int = MOST_NBYTES) -> str:
    """Returns the text of a plain file, without a byte-order mark.

    Raises:
        OSError: It cannot be read, is a pipe or a device, or holds more than ``most_nbytes``; names the file.
        UnicodeDecodeError: It is not UTF-8.
    """
    mode = os.stat(path).st_mode  # before it is opened: opening a pipe without a writer would hang
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    with open(path, "rb") as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise OSError(errno.EFBIG, f"it holds more than {most_nbytes >> 20} MiB", str(path))
    return data.decode("utf-8-sig")


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text; raises a ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
