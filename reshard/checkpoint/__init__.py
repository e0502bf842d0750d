"""Checkpoints that know nothing of groups: a model's arrays under their names, whole, for any layout to restore.

Importing this module makes Orbax's own checkpointers (`CheckpointManager`, `StandardCheckpointer`,
`AsyncCheckpointer` with `StandardSave`, `StandardRestore`, `PyTreeSave`, `PyTreeRestore`) take trees with
`MpmdArray`s. What they write is an ordinary Orbax checkpoint. `save` and `restore` are the short forms.
"""

import collections
import os
from collections.abc import Callable, Sequence
from pathlib import Path as File

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.errors import ReshardError
from mpmd.job import joining
from mpmd.observe import ledger
from mpmd.pytrees import PyTree
from reshard.checkpoint import leaf_handler
from reshard.checkpoint.alike import about_save, compared_restore
from reshard.checkpoint.commit import Working
from reshard.checkpoint.failures import failure_of
from reshard.checkpoint.matching import Part, check_fit, leaves_by_name, requests_of, tree_path
from reshard.checkpoint.meeting import meetings
from reshard.checkpoint.reading import read_parts
from reshard.checkpoint.requests import abstract
from reshard.checkpoint.tensors import TensorFormat, as_wanted, save_tensors
from reshard.edits.mapping import Mapping
from reshard.sizes import threshold_nbytes
from reshard.storage.arrays import IN_FLIGHT_NBYTES, Reads
from reshard.storage.finder import find
from reshard.storage.stored import absolute, check_target
from scheduler.base.texts import a, human
from scheduler.base.waiting import waiting

__all__ = ["Part", "Reads", "TensorFormat", "abstract", "restore", "save"]

leaf_handler.register()


@compat.api_boundary
def save(
    path: str | os.PathLike[str],
    tree: PyTree,
    *,
    use_zarr3: bool = False,
    timeout_s: int = 300,
    tensors: TensorFormat | None = None,
    use_compression: bool = False,
) -> None:
    """Saves a tree as an Orbax checkpoint, or a Hugging Face folder. Returns when the checkpoint is complete.

    Every process calls it with the same tree. Each byte is written once, by one of the processes that hold it, and
    processes with the same data share the work. Host memory: a copy of the data that this process writes (on CPU
    devices there is none), and 256 MiB of data being written.

    For saves in the background of the training, and to keep only the last few, use Orbax's `CheckpointManager`.

    Args:
        path: the folder to make. It must not exist.
        tree: a pytree of `MpmdArray`, `jax.Array`, numpy arrays, numbers and strings.
        use_zarr3: writes the format Zarr 3 instead of 2.
        timeout_s: how long processes wait for the last one to call it.
        tensors: makes a Hugging Face folder of safetensors, in this format.
        use_compression: compresses `MpmdArray`s, and `jax.Array`s in the same tree, as Orbax does by default (zstd).
            It makes trained weights only a little smaller, and saving and restoring slower. A tree without any
            `MpmdArray` has no checksums and is always compressed.

    Raises:
        FileExistsError: `path` exists already, or another job has made it meanwhile.
        ReshardError: the tree has leaves that cannot be saved (names each), or Orbax could not read `path`;
            or the processes save to different paths, or trees of different names, shapes, dtypes or groups.
        ScheduleError: the processes have called different steps, or steps with different values, so the tree cannot be
            trusted.
        OSError: the checkpoint cannot be written there. Earlier checkpoints are untouched.
        TimeoutError: another process did not call `save` in time.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/step7"
        >>> save(folder, {"w": np.arange(6.0), "step": 7})
        >>> restore(folder, {"w": np.zeros(6), "step": 0})
        {'step': 7, 'w': array([0., 1., 2., 3., 4., 5.])}
    """
    with meetings.together("save", about=about_save(path, tree)):
        joining.settle()
        joining.compare("called reshard.save", {}, {})
        folder = absolute(path)
        check_target("save", folder)
        _check_leaves(tree)
        with Working(folder, timeout_s) as working:
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                written: list[int] = []
                with waiting(_how_much_is_written(folder, tree, written)):
                    if tensors is None:
                        options = {"use_zarr3": use_zarr3, "use_compression": use_compression}
                        leaf_handler.write_tree(working.folder, tree, **options)
                    else:
                        save_tensors(working, tree, tensors, timeout_s, written)
            except ReshardError:
                raise
            except Exception as error:
                raise failure_of(error, folder) from error
            working.put_in_place(timeout_s)


@compat.api_boundary
def restore(
    path: str | os.PathLike[str],
    like: PyTree,
    shardings: PyTree = None,
    *,
    partial: bool = False,
    mapping: str | File | Mapping | None = None,
    reads: Reads | None = None,
    threshold: int | str | None = None,
) -> PyTree:
    """Restores a checkpoint into any layout, whoever wrote it and on whatever mesh.

    Each process reads only the bytes that its devices need, rounded up to whole chunks, each chunk once for all of
    its devices. It reads nothing of arrays in groups of other processes. Beyond the result it needs memory for the
    reads in flight: `threshold`, or the largest shard.

    Args:
        path: the folder of a checkpoint, or of a step of a `CheckpointManager`; or a Hugging Face folder of
            safetensors, with floating-point arrays cast to the dtypes of `like`.
        like: the tree that is wanted: descriptions (`jax.eval_shape(init, key)`), arrays, numbers and strings, and
            `Part`s of stored arrays.
        shardings: `MpmdSharding`s or JAX shardings, the same tree or a prefix of it. None takes the shardings of the
            leaves of `like`; a leaf without one becomes a numpy array.
        partial: whether the checkpoint may have leaves that `like` lacks.
        mapping: how the tensors of a Hugging Face folder become the arrays of `like`: the name of a built-in mapping
            (`"llama"`), a file, or "auto" to choose by config.json. None: the tensor `a.b.c` is `a/b/c`.
        reads: counts the bytes that are read.
        threshold: bytes of reads in flight; None is 256 MiB.

    Returns:
        The tree, of `MpmdArray`, `jax.Array`, numpy arrays, numbers and strings.

    Raises:
        FileNotFoundError: there is no finished checkpoint at `path`.
        ReshardError: tree, shapes or dtypes differ from the checkpoint (names all faults), or it is damaged; or
            `threshold` is not a number of bytes.
        TypeError: `partial` is not a boolean.
        ScheduleError: `shardings` are of several processes, and these restore different checkpoints, or into different
            trees. (One checkpoint may have a different path in each process.)
    """
    counted = Reads() if reads is None else reads
    if not isinstance(partial, bool):
        raise TypeError(f"restore: partial is {partial!r}. Pass True or False.")
    limit = threshold_nbytes(IN_FLIGHT_NBYTES if threshold is None else threshold)
    with ledger.during(ledger.CHECKPOINT):
        requests, treedef = requests_of(like, shardings)
        with compared_restore(path, requests) as found:
            found.append(find(path, by_path=True))
            checkpoint = as_wanted(found[0], mapping, requests)
            stored = leaves_by_name(checkpoint)
            check_fit(requests, checkpoint.folder, stored, partial)
        wanted = [(stored[request.source], request) for request in requests]
        with waiting(lambda: _how_much_is_read(checkpoint.folder, counted)):
            values = read_parts(checkpoint, wanted, counted, limit)
    return jax.tree.unflatten(treedef, [request.value(x) for request, x in zip(requests, values, strict=True)])


def _how_much_is_read(folder: File, reads: Reads) -> tuple[str, float]:
    """Returns the progress of a restore, as `waiting` shows it."""
    done, whole = reads.nbytes, reads.nbytes_expected
    return f"restore: {human(done)} of {human(whole)} read of {folder}", min(1.0, done / max(1, whole))


def _how_much_is_written(folder: File, tree: PyTree, written: Sequence[int]) -> Callable[[], tuple[str, float]]:
    """Returns a function for the progress of a save, as `waiting` shows it. Takes all processes to write equally much.
    `written` are bytes in files that TensorStore did not write.
    """
    whole = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree)) / jax.process_count()
    before = leaf_handler.nbytes_written()

    def far() -> tuple[str, float]:
        done = sum(written) + leaf_handler.nbytes_written() - before  # it may be compressed
        return f"save: {human(done)} of about {human(whole)} written to {folder}", min(0.99, done / max(1, whole))

    return far


def _check_leaves(tree: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    faults = [
        f"{'/'.join(tree_path(keys)) or 'the tree'}: {fault}"
        for keys, leaf in leaves
        if (fault := _fault_of_leaf(leaf)) is not None
    ]
    stored = collections.Counter(".".join(tree_path(keys)) for keys, _ in leaves)
    faults += [f"{name}: {count} leaves would be stored by this name" for name, count in stored.items() if count > 1]
    faults += [f"{name!r}: a name with such characters is none" for name in stored if not name.isprintable()]
    if not leaves:
        faults.append("it has no leaves")
    if faults:
        raise ReshardError("save: the tree cannot be saved:\n" + "\n".join(f"  {fault}" for fault in faults))


def _fault_of_leaf(leaf: object) -> str | None:
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf_handler.fault_of_array(leaf)
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return f"{leaf} does not fit in 64 bits"
    if isinstance(leaf, (str, bool, int, float)) and not isinstance(leaf, np.generic):
        return None
    if isinstance(leaf, np.generic) and not isinstance(leaf, np.flexible):
        if isinstance(leaf, np.number) and leaf.dtype.isbuiltin == 1 and leaf.dtype.char not in "gG":
            return None
        plain = "bool" if isinstance(leaf, np.bool_) else "float"
        return f"a numpy.{type(leaf).__name__.rstrip('_')} is not stored by Orbax; give {plain}(…), or an array"
    return f"{a(type(leaf))} is no array, number or string"
