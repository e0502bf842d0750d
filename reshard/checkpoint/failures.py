"""Turns errors of storage into errors that a user understands: the disk is full, the folder may not be written."""

import errno
from collections.abc import Iterator
from pathlib import Path as File

from reshard.checkpoint.meeting import heard, meetings
from reshard.storage.stored import said

_CASES = (
    (errno.ENOSPC, ("No space left", "RESOURCE_EXHAUSTED", "Errno 28"), "the disk is full"),
    (errno.EDQUOT, ("quota exceeded", "Errno 122"), "the disk quota is used up"),
    (errno.EROFS, ("Read-only file system", "Errno 30"), "the file system is read-only"),
    (errno.EACCES, ("Permission denied", "PERMISSION_DENIED", "Errno 13"), "this user may not write there"),
)


def known_failure(error: BaseException, folder: File | str) -> OSError | None:
    """Returns the error of a save as the user is to see it; None for an error that this file does not know."""
    text = "\n".join(map(str, _chain(error)))
    for code, signs, what in _CASES:
        if any(sign in text for sign in signs):
            return OSError(
                code, f"save: {what}; nothing was saved, and what was saved before is untouched", str(folder)
            )
    return None


def failure_of(error: BaseException, folder: File | str) -> OSError:
    """Returns the error of a save, whatever it is, as the user is to see it."""
    if isinstance(told := heard(error), OSError):
        return type(told)(told.errno, told.strerror, str(folder)) if told.errno is not None else told
    if (known := known_failure(error, folder)) is not None:
        return known
    chain = list(_chain(error))
    if any("DEADLINE_EXCEEDED" in str(e) or isinstance(e, TimeoutError) for e in chain):
        return TimeoutError(f"save: other processes did not take part in saving {folder}: {said(error)}")
    known = error.errno if isinstance(error, OSError) else None
    code = errno.ENOTDIR if known == errno.EEXIST else known or errno.EIO  # a folder could not be made: a file is there
    return OSError(code, f"save: it could not be written ({said(error)}); nothing was saved", str(folder))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None and error is not meetings.handled:
        yield error
        error = error.__cause__ or error.__context__
