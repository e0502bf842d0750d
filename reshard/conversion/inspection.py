"""A checkpoint as text and as JSON: its tree, shapes, dtypes, bytes and chunks."""

import json
from collections import Counter

from reshard.storage.paths import show
from reshard.storage.stored import Checkpoint, Leaf
from scheduler.base.texts import counted, human, table

_CHUNKS = "A reader gets whole chunks: a part of an array costs all chunks that it touches."


def to_text(checkpoint: Checkpoint) -> str:
    """Returns the tree as a table, with totals."""
    arrays = [leaf for leaf in checkpoint.leaves if leaf.is_array]
    in_files = any(leaf.files for leaf in arrays)
    rows = [("path", "dtype", "shape", "bytes", "files" if in_files else "chunks"), *map(_row, checkpoint.leaves)]
    step = f", step {checkpoint.step}" if checkpoint.step is not None else ""
    item = f", item {checkpoint.item}" if checkpoint.item is not None else ""
    lines = [f"{checkpoint.folder}{step}{item}: {checkpoint.driver}", *table(rows, "<<<><")]
    others = len(checkpoint.leaves) - len(arrays)
    chunks = "" if in_files else " in " + counted(sum(leaf.num_chunks for leaf in arrays), "chunk")
    lines.append(
        f"{counted(len(arrays), 'array')}, {human(checkpoint.nbytes)}{chunks}, "
        f"{human(checkpoint.stored_nbytes())} on disk" + (f"; {others} without data" if others else "")
    )
    by_dtype: Counter[str] = Counter()
    for leaf in arrays:
        by_dtype[str(leaf.dtype)] += leaf.nbytes
    lines += [f"  {dtype}: {human(nbytes)}" for dtype, nbytes in sorted(by_dtype.items())]
    if checkpoint.other_items:
        lines.append(f"beside it: {', '.join(checkpoint.other_items)}")
    if any(leaf.num_chunks > 1 and not leaf.files for leaf in arrays):
        lines.append(_CHUNKS)
    return "\n".join(lines)


def _row(leaf: Leaf) -> tuple[str, str, str, str, str]:
    if not leaf.is_array:
        return show(leaf.path), "", leaf.value_type, "", ""
    shape = "scalar" if leaf.value_type == "scalar" else str(list(leaf.shape))
    if leaf.files:
        more = f" and {len(leaf.files) - 1} more" if len(leaf.files) > 1 else ""
        return show(leaf.path), str(leaf.dtype), shape, human(leaf.nbytes), "".join(leaf.files[:1]) + more
    whole = leaf.num_chunks == 1
    chunks = "1" if whole else f"{leaf.num_chunks} of {list(leaf.chunk)}, {human(leaf.chunk_nbytes)} each"
    extra = "".join(f", {what}: {value}" for what, value in json.loads(leaf.extra or "{}").items())
    return show(leaf.path), str(leaf.dtype), shape, human(leaf.nbytes), chunks + extra


def to_json(checkpoint: Checkpoint) -> dict[str, object]:
    """Returns the tree as a JSON document."""
    return {
        "folder": str(checkpoint.folder),
        "step": checkpoint.step,
        "item": checkpoint.item,
        "other_items": list(checkpoint.other_items),
        "driver": checkpoint.format,
        "ocdbt": checkpoint.ocdbt,
        "arrays": sum(leaf.is_array for leaf in checkpoint.leaves),
        "bytes": checkpoint.nbytes,
        "stored_bytes": checkpoint.stored_nbytes(),
        "leaves": [_leaf(leaf) for leaf in checkpoint.leaves],
    }


def _leaf(leaf: Leaf) -> dict[str, object]:
    keys = [int(key.name) if key.sequence else key.name for key in leaf.path]
    document: dict[str, object] = {"path": show(leaf.path), "keys": keys, "type": leaf.value_type}
    if leaf.is_array:
        document |= {
            "dtype": str(leaf.dtype),
            "shape": list(leaf.shape),
            "bytes": leaf.nbytes,
            "chunk": list(leaf.chunk),
            "chunk_bytes": leaf.chunk_nbytes,
            "chunks": leaf.num_chunks,
        }
    if leaf.files:
        document["files"] = list(leaf.files)
    if leaf.extra:
        document["extra"] = json.loads(leaf.extra)
    return document
