"""A Hugging Face folder as what a conversion makes."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path as File

from reshard.conversion.copying import Copier, Written
from reshard.edits.entries import Entry
from reshard.storage import event_loops
from reshard.storage.huggingface import path_of
from reshard.storage.paths import dotted, matches
from reshard.storage.stored import EMPTY_TYPES, all_of
from reshard.storage.tensor_files import FILE_NBYTES, TensorFiles, TensorWriter, plan_folder


@dataclasses.dataclass(frozen=True)
class TensorTarget:
    """How to make the folder.

    Attributes:
        beside: a folder whose other files, such as config.json, are copied; tensors are divided among files as there.
        file_nbytes: how large a file may be.
    """

    beside: File | None = None
    file_nbytes: int = FILE_NBYTES


def plan_tensors(
    entries: Sequence[Entry], target: TensorTarget, keep: Sequence[str]
) -> tuple[list[Entry], TensorFiles]:
    """Names the tensors and divides them among files. What `keep` matches keeps its chunks.

    Raises:
        ReshardError: something cannot be a tensor; lists it.
    """
    arrays = [e for e in entries if e.value_type not in EMPTY_TYPES]
    files = plan_folder(arrays, target.file_nbytes, target.beside)

    def named(entry: Entry) -> Entry:
        chunk = entry.chunk if any(matches(pattern, entry.path) for pattern in keep) else entry.shape
        return dataclasses.replace(entry, path=path_of(dotted(entry.path)), chunk=chunk)

    return [named(entry) for entry in arrays], files


def write_tensors(folder: File, files: TensorFiles, copier: Copier, beside: File | None) -> None:
    """Makes the folder. Its index is written last."""
    folder.mkdir()
    with TensorWriter(folder, files) as writer:

        async def write(written: Sequence[Written]) -> None:
            await all_of([asyncio.to_thread(writer.write, dotted(e.path), box, data) for e, box, data in written])

        event_loops.run(copier.copy(write))
    files.finish(folder, beside)
