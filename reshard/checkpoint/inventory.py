"""What is in a checkpoint folder: where in it the arrays are, their names and shapes, and how to read parts of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mpmd.arrays import keys
from mpmd.errors import ReshardError
from reshard.checkpoint.leaf_handler import ReadArgs, byte_limiter, first_line, key_impls
from reshard.checkpoint.read_plan import Request

UNFINISHED = ".orbax-checkpoint-tmp"
METADATA_FILE = "_METADATA"
STEP_FILE = "_CHECKPOINT_METADATA"
IN_FLIGHT_NBYTES = 256 << 20

TreePath = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One leaf of a checkpoint's tree.

    Attributes:
        path: the keys that lead to it; `layers/3/w` is its `name`.
        kind: `"array"`, `"scalar"` (a Python number) or `"string"`.
        shape: its shape; for typed keys without the axes of the key data.
        dtype: its dtype, a key dtype for typed keys; None for a string.
        chunk_shape: what is read at once, in the axes of the data that is stored; None for a string.
    """

    path: TreePath
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    chunk_shape: tuple[int, ...] | None

    @property
    def name(self) -> str:
        return "/".join(self.path)

    def __str__(self) -> str:
        return "a string" if self.kind == "string" else type_text(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """All leaves of a checkpoint, by their paths, and `tree`, the nested dicts and lists that they stand in."""

    directory: epath.Path
    leaves: Mapping[TreePath, StoredLeaf]
    tree: Any


def type_text(shape: Sequence[int], dtype: Any) -> str:
    """A type as messages show it: `float32[2,3]`."""
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"


def find_item(path: Any) -> epath.Path:
    """The folder that has the arrays: `path` itself, or the one item of a step of a `CheckpointManager`.

    Raises:
        FileNotFoundError: there is no finished checkpoint at `path`; says what is there.
    """
    folder = absolute(path)
    if UNFINISHED in folder.name:
        raise FileNotFoundError(f"{folder} is what an unfinished save has left; it is not a checkpoint.")
    if not folder.exists():
        left = (
            sorted(p.name for p in folder.parent.glob(f"{folder.name}{UNFINISHED}*")) if folder.parent.exists() else []
        )
        steps = _steps(folder.parent)
        if left:
            hint = f"\n  A save that was not finished has left {', '.join(left)} beside it."
        else:
            hint = f"\n  {folder.parent} has the steps {', '.join(map(str, steps))}." if steps else ""
        raise FileNotFoundError(f"there is no checkpoint at {folder}.{hint}")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is a file; a checkpoint is a folder.")
    if not ocp.utils.is_checkpoint_finalized(folder):
        raise FileNotFoundError(f"the checkpoint at {folder} is unfinished: its save was interrupted.")
    if (folder / METADATA_FILE).exists():
        return folder
    items = sorted(p for p in folder.iterdir() if (p / METADATA_FILE).exists())
    if len(items) == 1 and (folder / STEP_FILE).exists():
        return items[0]
    steps = _steps(folder)
    if items:
        hint = f"it has checkpoints in it, {', '.join(p.name for p in items)}; give the path of one of them"
    elif steps:
        known = ", ".join(map(str, steps))
        hint = f"it is a CheckpointManager's folder with steps {known}; give {folder / str(steps[-1])}"
    else:
        hint = f"it has no file {METADATA_FILE}"
    raise FileNotFoundError(f"{folder} is not a checkpoint: {hint}.")


def _steps(folder: epath.Path) -> list[int]:
    """The steps in a `CheckpointManager`'s folder, by their names."""
    return sorted({int(p.name) for p in folder.iterdir() if p.name.isdigit()}) if folder.is_dir() else []


def read_tree(path: Any) -> StoredTree:
    """Names, shapes, dtypes and chunks of what is stored. Reads no values.

    Raises:
        FileNotFoundError: there is no finished checkpoint at `path`.
        ReshardError: its description cannot be read.
    """
    directory = find_item(path)
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(directory).tree
        impls = key_impls(directory)
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise ReshardError(f"the checkpoint at {directory} is damaged: {first_line(error)}") from error
    with_paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_metadata)[0]
    leaves = {path: _leaf(path, meta, impls) for path, meta in [(tree_path(keys), meta) for keys, meta in with_paths]}
    return StoredTree(directory, leaves, tree)


def tree_path(keys: Any) -> TreePath:
    """The keys of a leaf as strings, the way a checkpoint names them."""
    return tuple(map(str, ocp.utils.tuple_path_from_keypath(keys)))


def _is_metadata(x: Any) -> bool:
    return isinstance(x, ocp.metadata.Metadata)


def _leaf(path: TreePath, meta: Any, impls: Mapping[str, str]) -> StoredLeaf:
    if isinstance(meta, ocp.metadata.StringMetadata):
        return StoredLeaf(path, "string", (), None, None)
    if isinstance(meta, ocp.metadata.ScalarMetadata):
        return StoredLeaf(path, "scalar", (), np.dtype(meta.dtype), ())
    shape, dtype = tuple(meta.shape), meta.dtype
    if (impl := impls.get(meta.name)) is not None:
        dtype = jax.random.key_dtype(impl)
        shape = keys.shape_of_data(shape, dtype)
    chunk = None if meta.storage is None else meta.storage.chunk_shape
    return StoredLeaf(path, "array", shape, dtype, None if chunk is None else tuple(chunk))


def read_parts(stored: StoredTree, requests: Mapping[TreePath, Sequence[Request]]) -> dict[TreePath, Any]:
    """Reads parts of stored arrays, just what this process's devices need; what is not asked for is not touched.

    Args:
        stored: what `read_tree` gave.
        requests: for each leaf that is wanted, its parts; no parts is the Python value of a scalar or a string.

    Returns:
        For each of them, the list of its parts, or its value.

    Raises:
        ReshardError: something cannot be read; names the array.
    """
    limiter = byte_limiter(IN_FLIGHT_NBYTES)

    def args(keys: Any, _: Any) -> Any:
        path = tree_path(keys)
        if path not in requests:
            return ocp.RestoreArgs(restore_type=type(ocp.PLACEHOLDER))
        return ReadArgs(requests=tuple(requests[path]), limiter=limiter) if requests[path] else ocp.RestoreArgs()

    def wanted(keys: Any, meta: Any) -> Any:
        return meta if tree_path(keys) in requests else ocp.PLACEHOLDER

    item = jax.tree_util.tree_map_with_path(wanted, stored.tree, is_leaf=_is_metadata)
    restore_args = jax.tree_util.tree_map_with_path(args, stored.tree, is_leaf=_is_metadata)
    try:
        found = ocp.PyTreeCheckpointHandler().restore(
            stored.directory, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
        )
    except ReshardError:
        raise
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise ReshardError(f"the checkpoint at {stored.directory} cannot be read: {first_line(error)}") from error

    values: dict[TreePath, Any] = {}
    for path in requests:
        value = found
        for key in path:
            value = value[int(key)] if isinstance(value, (list, tuple)) else value[key]
        values[path] = value
    return values


def absolute(path: Any) -> epath.Path:
    """The path as Orbax wants it: absolute, unless it is in a store of objects (`gs://…`)."""
    return epath.Path(path) if "://" in str(path) else epath.Path(str(Path(path).absolute()))


def a(kind: type) -> str:
    """`an int`, `a str`, for messages."""
    return f"a{'n' if kind.__name__[0] in 'aeiou' else ''} {kind.__name__}"
