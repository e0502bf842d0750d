"""Makes one checkpoint out of another, Orbax's or a Hugging Face folder, and never leaves half a target.

First the new tree is planned from metadata alone (`tree_edits.py`), then the memory (`copying.py`); a plan that
cannot work is refused before a byte is written. The target is written next to its place, read again if asked, and
moved there by one rename.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path as File

import numpy as np
import tensorstore as ts

from mpmd.errors import ReshardError
from reshard.conversion import copying
from reshard.conversion.copying import Copier, CopyPlan, CopyProgress, CopyStats, Written
from reshard.edits import tree_edits
from reshard.edits.edited import Edited
from reshard.edits.entries import Entry, described
from reshard.edits.tree_edits import Change
from reshard.storage import event_loops
from reshard.storage.finder import find
from reshard.storage.huggingface import path_of
from reshard.storage.paths import dotted, matches, show
from reshard.storage.stored import EMPTY_TYPES, Leaf, all_of, check_target, fault_of_type, said
from reshard.storage.tensor_files import TensorFiles, TensorTarget, plan_folder, writing
from reshard.storage.unfinished import UnfinishedFolder
from scheduler.base.texts import counted, first_of, human, table

_WORKING = ".converting-"
_MOST_CHUNKS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A planned conversion: `tree` describes the content of the target. Prints itself."""

    tree: Edited
    target: File
    copy: CopyPlan
    zarr3: bool
    notes: tuple[str, ...]
    tensors: TensorFiles | None = None

    def __str__(self) -> str:
        source = self.tree.stored
        taken = {id(part.leaf) for entry in self.tree.leaves for part in entry.origins}
        left = [leaf for leaf in source.leaves if id(leaf) not in taken]
        lines = table([_row(entry) for entry in self.tree.leaves], "<<<")
        lines += [f"left out: {show(leaf.path)}" for leaf in left]
        lines += [f"note: {note}" for note in self.notes]
        how = f"{'zarr3' if self.zarr3 else 'zarr'} in OCDBT"
        if self.tensors is not None:
            how = f"safetensors, {counted(len(self.tensors.files), 'file')}"
        lines.append(
            f"{source.folder} ({human(source.nbytes)}) -> {self.target} ({human(self.tree.nbytes)}), "
            f"{how}, in {human(self.copy.threshold)} of memory"
        )
        return "\n".join(lines)


def _row(entry: Entry) -> tuple[str, str, str]:
    origin = entry.origins[0]
    first = origin.leaf
    if not entry.is_array:
        return show(entry.path), described(entry), "" if first.path == entry.path else f"from {show(first.path)}"
    notes = []
    if len(entry.origins) > 1:
        notes.append(f"from {show(first.path)} and {len(entry.origins) - 1} more")
    elif first.path != entry.path or not origin.is_whole:
        notes.append(f"from {origin}")
    if first.dtype != entry.dtype:
        notes.append(f"cast from {first.dtype}")
    if entry.shape:
        notes.append(f"chunks {list(entry.chunk)}")
    return show(entry.path), described(entry), ", ".join(notes)


def plan_conversion(
    source: str | File,
    target: str | File,
    changes: Sequence[Change] = (),
    *,
    step: int | None = None,
    item: str | None = None,
    dtypes: Sequence[tuple[str | None, np.dtype]] = (),
    chunks: Sequence[tuple[str, Sequence[int]]] = (),
    threshold: int | None = None,
    zarr3: bool = False,
    tensors: TensorTarget | None = None,
) -> Conversion:
    """Plans without reading or writing an array.

    Args:
        source: a folder for `reshard.stored.find`, with `step` and `item`.
        target: the folder to make; it must not exist.
        changes: from `reshard.edits`, in order.
        dtypes: pairs of pattern (None: everything) and dtype, for floating-point arrays; the last match counts.
        chunks: pairs of pattern and sizes; other arrays keep their chunks, a stack has one layer a chunk, and chunks
            larger than 64 MiB are cut.
        threshold: bytes of memory for array data; None takes as much as needed to read each chunk once.
        tensors: makes a Hugging Face folder instead of an Orbax checkpoint.

    Raises:
        ReshardError: the source cannot be read, the target cannot be made, or the changes do not fit the tree.
    """
    checkpoint = find(source, step, item)
    target = File(target).expanduser().absolute()
    notes = _check_target(target, checkpoint.folder, File(source).expanduser().absolute())
    entries = [Entry.of(leaf) for leaf in checkpoint.leaves]
    for change in changes:
        entries = change(entries)
    for pattern, dtype in dtypes:
        entries = tree_edits.cast(pattern, dtype)(entries)
    for pattern, sizes in chunks:
        entries = tree_edits.rechunk(pattern, sizes)(entries)

    def keeps_chunks(entry: Entry) -> bool:
        return any(matches(pattern, entry.path) for pattern, _ in chunks)

    files, of_tree = None, []
    if tensors is None:
        check_target("convert", target)
        entries, of_tree = tree_edits.checked_paths(entries)
        faults = [(e, fault_of_type(e.shape, e.dtype)) for e in entries if e.is_array and e.dtype is not None]
        if named := [f"{show(e.path)}: {fault}" for e, fault in faults if fault is not None]:
            raise ReshardError(f"a checkpoint cannot hold these; leave them out (--drop):\n{first_of(named)}")
    else:
        entries = [entry for entry in entries if entry.value_type not in EMPTY_TYPES]
        files = plan_folder(entries, tensors)
        entries = [
            dataclasses.replace(e, path=path_of(dotted(e.path)), chunk=e.chunk if keeps_chunks(e) else e.shape)
            for e in entries
        ]
    _check_size({part.leaf.path: part.leaf for entry in entries for part in entry.origins}.values())
    entries = copying.with_writable_chunks(entries, threshold, keeps_chunks)
    entries.sort(key=lambda e: [(int(k.name) if k.sequence else 0, k.name) for k in e.path])
    if checkpoint.other_items:
        notes.append(f"only the tree is converted, not {', '.join(checkpoint.other_items)}")
    plan = copying.plan_copy(entries, threshold)
    return Conversion(Edited.of(checkpoint, entries), target, plan, zarr3, (*notes, *of_tree), files)


def _check_size(leaves: Iterable[Leaf]) -> None:
    """Refuses arrays that no machine can read, before memory is asked for; a damaged header may have such sizes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_chunks = 0
    for leaf in leaves:
        num_chunks += leaf.num_chunks
        if leaf.is_array and leaf.chunk_nbytes > memory:
            raise ReshardError(
                f"{show(leaf.path)} {list(leaf.shape)} has chunks of {human(leaf.chunk_nbytes)}, and this machine has "
                f"{human(memory)} of memory."
            )
        if num_chunks > _MOST_CHUNKS:
            raise ReshardError(
                f"{show(leaf.path)} {list(leaf.shape)} has {leaf.num_chunks} chunks of {list(leaf.chunk)}; more than "
                f"{_MOST_CHUNKS} in all cannot be copied at once. Pick some of the arrays with --only."
            )


def _check_target(target: File, source: File, given: File) -> list[str]:
    if os.path.lexists(target):
        raise ReshardError(f"{target} exists already; name a folder that does not.")
    resolved = target.resolve()
    for folder in (source.resolve(), given.resolve()):
        if resolved == folder or folder in resolved.parents:
            raise ReshardError(f"{target} is within the source, {folder}, which is not touched; name another place.")
    parent = target.parent
    if not parent.is_dir():
        raise ReshardError(f"{parent}, where {target.name} is to be made, is not a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ReshardError(f"{parent}, where {target.name} is to be made, cannot be written to.")
    left = sorted(entry.name for entry in parent.iterdir() if entry.name.startswith(target.name + _WORKING))
    return [f"{parent / name} is what a conversion that was killed has left; delete it" for name in left]


def convert(
    conversion: Conversion,
    *,
    verify: bool = False,
    progress: Callable[[CopyProgress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CopyStats:
    """Carries out a plan; returns the statistics of the copying, without the reads of `verify`.

    Args:
        verify: whether to check the source against the checksums that this library leaves, and to read source and
            target again and compare them before the target is put in place.
        progress: called before each batch of chunks.
        should_stop: called before each batch; True stops the work.

    Raises:
        ReshardError: something could not be read or written, or has wrong values. There is no target then.
        copying.Stopped: `should_stop` returned True. There is no target then.
    """
    working = UnfinishedFolder(conversion.target, f"{_WORKING}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    copier = Copier(conversion.tree.stored, conversion.copy, progress, should_stop)
    if verify:
        event_loops.run(copier.check_source())
    with _write_errors(conversion), contextlib.ExitStack() as at_error:
        at_error.callback(working.remove)
        _write(conversion, working.folder, copier)
        copied = dataclasses.replace(copier.stats)
        if verify:
            _verify(conversion, working.folder, copier)
        _check_target(conversion.target, conversion.tree.folder, conversion.tree.folder)
        if code := working.rename(lasting=True):
            raise OSError(code, os.strerror(code))
        at_error.pop_all()
    return copied


def _write(conversion: Conversion, working: File, copier: Copier) -> None:
    if conversion.tensors is not None:
        return _write_tensors(working, conversion.tensors, copier)
    from reshard.conversion import orbax_writer

    async def fill(targets: dict[int, ts.TensorStore]) -> None:
        await copier.copy(functools.partial(orbax_writer.write_boxes, targets))

    def value(entry: Entry) -> object:
        if entry.is_array:
            return orbax_writer.ARRAYS[entry.value_type](entry)
        if entry.value_type == "string":
            return conversion.tree.text(entry.path)
        return EMPTY_TYPES[entry.value_type]

    tree = tree_edits.nested(conversion.tree.leaves, value)
    return orbax_writer.write(working, tree, fill, zarr3=conversion.zarr3)


def _write_tensors(folder: File, files: TensorFiles, copier: Copier) -> None:
    """Makes a Hugging Face folder. Its index is written last."""
    folder.mkdir()
    with writing(folder, files) as writer:

        async def write(written: Sequence[Written]) -> None:
            await all_of([asyncio.to_thread(writer.write, dotted(e.path), box, data) for e, box, data in written])

        event_loops.run(copier.copy(write))
    files.finish(folder)


def _verify(conversion: Conversion, folder: File, copier: Copier) -> None:
    written = find(folder)
    found = {leaf.path: (leaf.value_type, leaf.shape, leaf.dtype, leaf.extra) for leaf in written.leaves}
    expected = {}
    for entry in conversion.tree.leaves:
        value_type = "None" if entry.value_type == "NamedTuple" else entry.value_type
        value_type = "jax.Array" if conversion.tensors is not None else value_type
        expected[entry.path] = (value_type, entry.shape, entry.dtype, entry.extra)
    for path in sorted(found.keys() | expected.keys()):
        if found.get(path) != expected.get(path):
            raise ReshardError(
                f"{folder}: {show(path)} is not what was written.\n"
                f"  expected: {expected.get(path)}\n  found: {found.get(path)}"
            )
        if expected[path][0] == "string" and written.text(path) != conversion.tree.text(path):
            raise ReshardError(f"{folder}: the text {show(path)} is not what was written.")
    event_loops.run(copier.compare(written))


@contextlib.contextmanager
def _write_errors(conversion: Conversion) -> Iterator[None]:
    """Turns errors of Orbax and tensorstore in writing into an error that says what to do."""
    try:
        yield
    except (ReshardError, copying.Stopped):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        parent = conversion.target.parent
        text = str(error)
        if "No space left" in text or "Disk quota" in text:
            free = shutil.disk_usage(parent).free
            raise ReshardError(
                f"{parent} is full: up to {human(conversion.tree.nbytes)} are needed, {human(free)} were free. "
                "Nothing was kept."
            ) from error
        raise ReshardError(f"{conversion.target} cannot be written: {said(error)}. Nothing was kept.") from error
