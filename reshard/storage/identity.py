"""A number for the content of a checkpoint: the same for a copy, and at any path; another for another step of a run."""

import zlib
from collections.abc import Iterable
from pathlib import Path as File

from reshard.storage import checksums, event_loops
from reshard.storage.huggingface import TensorFolder
from reshard.storage.stored import Checkpoint

# For files without checksums: the number of places that are read, and the bytes at each.
_NUM_PLACES, _PLACE_NBYTES = 256, 256


def identity(checkpoint: Checkpoint, leaves: Iterable[tuple[str, ...]]) -> int:
    """Returns a number for the stored content. Cheap: reads checksums, the index of the store, or samples of the files.
    `leaves` are the keys of each wanted leaf; checksums of other leaves do not count.
    """
    if not isinstance(checkpoint, TensorFolder):
        sums, names = event_loops.run(checksums.read(checkpoint.folder)), sorted(set(map(".".join, leaves)))
        if found := [(name, sorted(map(str, sums[name]))) for name in names if name in sums]:
            return zlib.crc32(repr(found).encode())
        manifest = checkpoint.folder / "manifest.ocdbt"  # it names files that no other save has
        if manifest.exists():
            return zlib.crc32(manifest.read_bytes())
        found = checkpoint.folder.rglob("*")
        files = sorted(f for f in found if f.is_file() and not f.name.startswith((".", "_")))
    else:
        files = checkpoint.files()
    number = len(files)
    some = files[:: -(-len(files) // _NUM_PLACES) or 1]
    for file in some:
        number = zlib.crc32(_sampled(file, max(2, _NUM_PLACES // len(some))), number)
    return number


def _sampled(file: File, num_places: int) -> bytes:
    """Returns the size of a file, and its content at a few places, its ends among them."""
    nbytes = file.stat().st_size
    found = [str(nbytes).encode()]
    with file.open("rb") as opened:
        for i in range(num_places):
            opened.seek(max(0, nbytes - _PLACE_NBYTES) * i // (num_places - 1))
            found.append(opened.read(_PLACE_NBYTES))
    return b"".join(found)
