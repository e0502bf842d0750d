"""Finds a checkpoint: a folder that Orbax wrote, a step or item of a `CheckpointManager`, or a Hugging Face folder."""

import os
import re
from pathlib import Path as File

from mpmd.errors import ReshardError
from reshard.storage.huggingface import is_folder, missing_weights, open_folder
from reshard.storage.stored import METADATA, UNFINISHED, Checkpoint, absolute, open_tree, said

_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_STEP = re.compile(r"(?:.*_)?(\d+)")
# A folder, the item and the step that it is, and the other items of the step.
_Tree = tuple[File, str | None, int | None, tuple[str, ...]]


class MissingCheckpoint(ReshardError, FileNotFoundError):
    """There is no checkpoint, or no finished one."""


def find(
    folder: str | os.PathLike[str], step: int | None = None, item: str | None = None, *, by_path: bool = False
) -> Checkpoint:
    """Opens a checkpoint folder, a folder of a `CheckpointManager` (its latest step), or one of its steps.

    Args:
        folder: the folder that was passed to `save`, or to the manager.
        step: which step, if it is a manager's folder.
        item: which of a step's items, if there are several trees.
        by_path: whether the path names the checkpoint: no step is chosen, and what is unfinished is none.

    Raises:
        MissingCheckpoint: there is no finished checkpoint; lists what the folder has.
        ReshardError: it has no such step or item, or its metadata cannot be read; names the folder.
    """
    path = _without_links(folder)
    try:
        if is_folder(path):
            if step is not None or item is not None:
                raise ReshardError(f"{path} holds safetensors: it has neither steps nor items.")
            return open_folder(path)
        found = _find(path, step, item, by_path)
        try:
            return open_tree(*found)
        except ReshardError as error:
            if not by_path:
                raise
            raise ReshardError(f"the checkpoint at {found[0]} is damaged: {said(error)}") from error
    except ReshardError:  # which may be a FileNotFoundError
        raise
    except OSError as error:
        raise ReshardError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None


def _without_links(folder: str | os.PathLike[str]) -> File:
    """Returns the absolute path of a folder without links: a link such as `latest` may be replaced while it is read."""
    try:
        path = absolute(folder)
        path.exists()
        return path if "://" in str(path) else path.resolve()
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        # It may not be read, is too long, a link to itself or no name; no library for `gs://`.
        raise ReshardError(f"{str(folder)[:200]!r}: {getattr(error, 'strerror', None) or said(error)}.") from None


def _find(folder: File, step: int | None, item: str | None, by_path: bool) -> _Tree:
    """Returns the folder of a tree, the item and the step that it is, and the other items of the step."""
    if not folder.exists():
        raise MissingCheckpoint(f"there is no checkpoint at {folder}.{_hint_beside(folder)}")
    if not folder.is_dir():
        raise MissingCheckpoint(f"{folder} is a file; a checkpoint is a folder.")
    if UNFINISHED in folder.name or (by_path and not _is_finished(folder)):
        raise MissingCheckpoint(f"{folder} is what an unfinished save has left; it is not a checkpoint.")
    is_tree, items = (folder / METADATA).is_file(), _items(folder)
    if is_tree or items:
        if step is not None:
            raise ReshardError(f"{folder} is one checkpoint, not a manager's folder: it has no step {step}.")
        return _step(folder, item, None if is_tree else step_of(folder.name), by_path)
    if not (found := steps(folder)):
        raise MissingCheckpoint(missing_weights(folder) or f"{folder} is not a checkpoint: {_what_it_is(folder)}")
    if step is None:
        if by_path:
            known = ", ".join(map(str, sorted(found)))
            hint = f"it is a CheckpointManager's folder with steps {known}; give {found[max(found)]}"
            raise MissingCheckpoint(f"{folder} is not a checkpoint: {hint}.")
        step = max(found)
    if step not in found:
        raise ReshardError(f"{folder} has no step {step}; it has {', '.join(map(str, sorted(found)))}.")
    return _step(found[step], item, step, by_path)


def _is_finished(folder: File) -> bool:
    """Returns whether Orbax has finished a folder: in an object store, which has no rename, a file shows it."""
    import orbax.checkpoint as ocp  # takes a second, and `python -m reshard inspect` does not need it

    return ocp.utils.is_checkpoint_finalized(folder)


def _hint_beside(folder: File) -> str:
    if not folder.parent.is_dir():
        return ""
    if left := sorted(p.name for p in folder.parent.glob(f"{folder.name}{UNFINISHED}*")):
        return f"\n  A save that was not finished has left {', '.join(left)} beside it."
    found = sorted(steps(folder.parent))
    return f"\n  {folder.parent} has the steps {', '.join(map(str, found))}." if found else ""


def _what_it_is(folder: File) -> str:
    """Describes a folder that has no tree, items or steps."""
    names = sorted(entry.name for entry in folder.iterdir())
    if inside := [name for name in names if (folder / name / METADATA).exists()]:
        return f"it has checkpoints in it, {', '.join(inside)}; give the path of one of them."
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"it has no {METADATA}, no items that have one, and no steps.\n  It holds {shown or 'nothing'}."


def _items(folder: File) -> tuple[str, ...]:
    """Returns the trees of one step. A folder with Orbax's second metadata file is a checkpoint itself, not an item."""
    is_step = (folder / _CHECKPOINT_METADATA).is_file()
    return tuple(
        sorted(
            entry.name
            for entry in folder.iterdir()
            if (entry / METADATA).is_file() and (is_step or not (entry / _CHECKPOINT_METADATA).is_file())
        )
    )


def steps(folder: File) -> dict[int, File]:
    """Returns the steps in a `CheckpointManager`'s folder, by their names."""
    found = {}
    for entry in folder.iterdir():
        step = step_of(entry.name)
        if step is not None and entry.is_dir() and ((entry / METADATA).is_file() or _items(entry)):
            found[step] = entry
    return found


def step_of(name: str) -> int | None:
    """Returns the step whose folder has this name; None for other names."""
    named = _STEP.fullmatch(name)
    return int(named[1]) if named else None


def _step(folder: File, item: str | None, step: int | None, by_path: bool) -> _Tree:
    if (folder / METADATA).is_file():
        if item is not None:
            raise ReshardError(f"{folder} is one tree: it has no items, so not {item!r} either.")
        return folder, None, step, ()
    items = _items(folder)
    if item is None:
        first, *more = items
        if more and "default" not in items:
            how = "give the path of one of them" if by_path else "say which with --item"
            raise MissingCheckpoint(f"{folder} has {len(items)} trees; {how}: {', '.join(items)}.")
        item = "default" if more else first
    if item not in items:
        raise ReshardError(f"{folder} has no item {item!r}; it has {', '.join(items)}.")
    folder_names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    others = tuple(sorted(name for name in folder_names if name != item and not name.startswith(("_", "."))))
    return folder / item, item, step, others
