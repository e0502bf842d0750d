"""Puts versions of a tree on this process's shelf: copies that the devices make, and a thread that waits for them."""

import atexit
import collections
import json
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import jax
import numpy as np

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, part_boxes
from mpmd.arrays.mesh import is_local
from mpmd.errors import ReshardError
from mpmd.job.job import Job
from mpmd.job.notes import Note
from mpmd.pytrees import PyTree, TreeDef
from mpmd.resilience import copies, layout
from mpmd.resilience.layout import SHARED, KeptLeaf, KeptPiece, StateLayout
from reshard.storage.paths import escaped
from reshard.streams.shelf import Shelf, Shelved
from reshard.trees import broadcast, fault_of_sharding, flatten, sharding_of

_POLL_S = 0.005
_PATIENCE_S = 0.2  # reports show a wait for others after this time
_AT_EXIT_S = 10.0


def checked_version(what: str, version: object) -> int:
    """Returns the number of a version; raises a ReshardError if it is none."""
    if not isinstance(version, int | np.integer) or isinstance(version, bool) or version < 0:
        raise ReshardError(f"{what}: {version=} is not a whole number of 0 or more.")
    return int(version)


def check_arrays(
    what: str,
    paths: Sequence[str],
    leaves: Sequence[object],
    placed: Sequence[jax.sharding.Sharding] | None = None,
) -> None:
    """Raises a ReshardError if a leaf of a tree is no array on devices, or is in another sharding than it should be."""
    faults: list[str] = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        fault = None
        if not isinstance(leaf, jax.Array):
            fault = f"is a {type(leaf).__name__}, not an array on devices"
        elif leaf.is_deleted():
            fault = "has been deleted"
        elif placed is not None and not _fits(leaf, placed[i]):
            fault = f"is in {sharding_of(leaf)}, but the source sharding is {placed[i]}"
        if fault is not None:
            faults.append(f"\n  {path or 'the array'}: {fault}")
    if faults:
        raise ReshardError(f"{what}: the tree does not fit:{''.join(faults)}")


class Sender:
    """Sends the versions of one tree.

    Args:
        what: its name in messages.
        job: the processes; None if this one is alone.
        ranks: the ranks that send, this one among them.
        folder: a folder of the key-value store, for this sender alone.
        keeps_all: whether the shelf has all boxes of this process (because it receives, too), or only those for others.
    """

    def __init__(self, what: str, job: Job | None, ranks: Sequence[int], folder: str, keeps_all: bool):
        self.shelf = Shelf()
        self._what, self._job, self._ranks, self._folder, self._keeps_all = what, job, tuple(ranks), folder, keeps_all
        self._rank, self._epoch = 0 if job is None else job.rank, 0 if job is None else job.epoch
        self._last = -1
        self._signature: object = None
        self._description, self._layout = "", StateLayout((), (), 0)
        # A version on its way keeps its sender alive; the thread alone does not.
        self._due: queue.Queue[tuple[Sender, Shelved] | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._is_closed = False
        working = self._due, self.shelf, self._idle
        threading.Thread(target=_work, name="mpmd-stream-send", args=working, daemon=True).start()
        atexit.register(self._idle.wait, _AT_EXIT_S)
        weakref.finalize(self, self._due.put, None).atexit = False

    def send(self, tree: PyTree, shardings: PyTree, version: int) -> None:
        """Starts the copies of a version and returns.

        Waits first until all senders have the previous version on their shelves, which no receiver can delay.

        Raises:
            ReshardError: the tree does not fit the shardings, or the version is not newer than the last one.
        """
        paths, leaves, treedef = flatten(tree)
        if self._is_closed:
            raise ReshardError(f"{self._what}: it has been closed.")
        version = checked_version(self._what, version)
        if version <= self._last:
            raise ReshardError(f"{self._what}: version {version} after version {self._last}; each must be larger.")
        self._wait_until_idle()
        if (signature := (treedef, layout.signature(leaves))) != self._signature:
            placed = [sharding_of(x) for x in leaves] if shardings is None else broadcast(shardings, tree, self._what)
            check_arrays(self._what, paths, leaves, placed)
            names, structure = _described(tree, treedef)
            if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
                raise ReshardError(f"{self._what}: two tensors of the tree are named {twice[0]!r}; rename one of them.")
            self._layout, given = _planned(names, leaves, placed, self._rank, self._keeps_all)
            tensors = [tuple(leaf.__dict__.values()) for leaf in self._layout.leaves]
            self._description = json.dumps({"tree": structure, "leaves": tensors, "given": given})
            self._signature = signature
        else:
            check_arrays(self._what, paths, leaves)
        if self._job is not None:
            self._job.calls.note(self._ranks, Note(f"sent version {version} of {self._what}"))
        taken = copies.started(leaves, self._layout)
        self._last = version
        values: dict[int, list[tuple[Box, object]]] = {}
        for piece, value in zip(self._layout.pieces, taken.values, strict=True):
            values.setdefault(piece.leaf, []).append((piece.box, value))
        self._idle.clear()
        self._due.put((self, Shelved(version, self._description, values)))

    @property
    def is_current(self) -> bool:
        """Whether no rank was lost since it was made: a replacement process does not know of it."""
        return self._job is None or self._job.epoch == self._epoch

    def check(self) -> None:
        """Raises an error if a rank was lost.

        Raises:
            RankLostError: a rank was lost just now.
            ReshardError: a rank was lost earlier, and the others have continued.
        """
        if self._job is not None:
            self._job.check()
        if not self.is_current:
            raise ReshardError(
                f"{self._what}: a rank was lost since it was opened; close it and open it anew, in all processes."
            )

    def close(self) -> None:
        """Ends the thread after the last version; nothing is sent afterwards."""
        self._is_closed = True
        self._due.put(None)

    def _wait_until_idle(self) -> None:
        self.check()
        if not self._idle.wait(_PATIENCE_S):
            others = [rank for rank in self._ranks if rank != self._rank]
            waiting = nullcontext() if self._job is None else self._job.activity.during("reading", self._what)
            with waiting:
                while not self._idle.wait(1.0):  # in slices, so that Ctrl-C is heard
                    self.check()
                    if self._job is not None and self.shelf.versions(self._last - 1, 0.0):  # else it is still computed
                        self._job.activity.waits_for(others)
        if (error := self._error) is not None:
            self._error = None  # another version may get through
            raise error

    # --- the thread -------------------------------------------------------------------------------

    def put_on_shelf(self, shelved: Shelved) -> None:
        """Waits for the copies and for the other senders; drops the versions before."""
        try:
            jax.block_until_ready([value for boxes in shelved.values.values() for _, value in boxes])
            self.shelf.put(shelved)
            self._wait_for_others(shelved.version)
            self.shelf.drop_below(shelved.version)
        except BaseException as error:
            self._error = error

    def _wait_for_others(self, version: int) -> None:
        """Waits until all senders have a version on their shelves."""
        if self._job is None or len(self._ranks) == 1:
            return
        store = self._job.store
        store.key_value_set(f"{self._folder}{self._rank}", str(version), allow_overwrite=True)
        while True:
            told = [int(text) for _, text in store.key_value_dir_get(self._folder)]
            if len(told) == len(self._ranks) and min(told) >= version:
                return
            self.check()
            time.sleep(_POLL_S)


def _work(due: "queue.Queue[tuple[Sender, Shelved] | None]", shelf: Shelf, idle: threading.Event) -> None:
    while (item := due.get()) is not None:
        item[0].put_on_shelf(item[1])
        del item
        idle.set()
    shelf.close()
    atexit.unregister(idle.wait)


def _fits(leaf: jax.Array, sharding: jax.sharding.Sharding) -> bool:
    held = sharding_of(leaf)
    if fault_of_sharding(sharding, leaf.shape) is not None:
        return False
    return isinstance(leaf, MpmdArray) == hasattr(sharding, "mpmd_mesh") and sharding.is_equivalent_to(held, leaf.ndim)


def _described(tree: PyTree, treedef: TreeDef) -> tuple[list[str], str | None]:
    """Returns the names of the tensors, and the tree's structure if it is made of containers that JAX knows."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    try:
        text = treedef.serialize_using_proto().hex()
    except ValueError:
        text = None
    return [name_of(path) for path, _ in paths], text


def name_of(path: Sequence[object]) -> str:
    """Returns the name of a tensor: `params/layers/0/w`."""
    parts = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
    return "/".join(map(escaped, parts)) or "."


def _planned(
    names: Sequence[str], leaves: Sequence[jax.Array], placed: Sequence[jax.sharding.Sharding], rank: int,
    keeps_all: bool,
) -> tuple[StateLayout, list[object]]:  # fmt: skip
    """Returns the shards that this process copies, and the boxes that it sends to others. One process sends a box."""
    load: dict[int, int] = {}
    kept: list[KeptLeaf] = []
    given: list[object] = []
    pieces: list[KeptPiece] = []
    for i, (name, leaf, sharding) in enumerate(zip(names, leaves, placed, strict=True)):
        shape, dtype = keys.data_shape(leaf.shape, leaf.dtype), keys.data_dtype(leaf.dtype)
        kept.append(KeptLeaf(name, SHARED, shape, dtype.name, keys.implementation(leaf.dtype)))
        data_sharding = keys.data_sharding(sharding, leaf.shape, leaf.dtype)
        mine = layout.shared_boxes(data_sharding, shape, dtype.itemsize, rank, load)
        held = {shard: (part, device) for box, shard, part, device in mine if box.size}
        for shard in held:
            boxes = [box for box, other, *_ in mine if other == shard]
            boxes = [shard] if sum(box.size for box in boxes) == shard.size else boxes
            given += [(i, box.start, box.stop) for box in boxes if box.size]
        for part, boxes in part_boxes(data_sharding, shape).items() if keeps_all else ():
            held.update({box: (part, d) for d, box in boxes.items() if is_local(d) and box.size and box not in held})
        pieces += [KeptPiece(i, box, box, *where, 0, 0) for box, where in held.items()]
    return StateLayout(tuple(kept), tuple(pieces), 0), given
