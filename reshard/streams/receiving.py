"""Reads a version from the shelves of all its senders, and makes arrays of it.

The reads are planned once: each byte once of the boxes that this process's devices want and that do not lie here.
All receivers of a stream take the same version, and have all of it before any of them continues.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeGuard, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from mpmd.job.job import Job
from mpmd.job.verdict import SECONDHAND
from mpmd.pytrees import PyTree, TreeDef
from mpmd.resilience.layout import SHARED, KeptLeaf
from mpmd.resilience.restoring import assembled, local_boxes
from reshard.places import aligned_empty
from reshard.streams import renaming
from reshard.streams.renaming import Names, Origins
from reshard.streams.sending import name_of
from reshard.streams.serving import FarShelf, NearShelf, SentPart
from reshard.trees import broadcast, fault_of_sharding, is_sharding
from scheduler.base.texts import first_of

_PART_NBYTES = 16 << 20
_WAIT_S = 1.0
_PAUSE_S = 0.2
_VERDICT_S = 45.0  # for the watchdog to name the lost process, before this process reports its own error


T = TypeVar("T")


def is_place(x: object) -> bool:
    """Returns whether a value says where a tensor goes: a sharding, or a description that has one."""
    return is_sharding(x) or isinstance(x, jax.ShapeDtypeStruct)


def shown(ranks: Iterable[int]) -> str:
    """Returns ranks in words."""
    return " and ".join(f"rank {rank}" for rank in ranks)


class _ReceivePlan:
    """The reads of this process for every version with these descriptions.

    Args:
        descriptions: one from each sender.
        near: this process's number as a sender, and the boxes that lie here; None if it sends nothing.
        places: where the tensors go, a pytree or a prefix of one.
        part_nbytes: the bytes that are read at once.
    """

    def __init__(
        self, descriptions: Sequence[str], near: tuple[int, Mapping[int, list[Box]]] | None, places: PyTree,
        names: Names | None,
        part_nbytes: int,
    ):  # fmt: skip
        told = [json.loads(text) for text in descriptions]
        leaves = [KeptLeaf(n, k, tuple(shape), *rest) for n, k, shape, *rest in told[0]["leaves"]]
        if any(t["leaves"] != told[0]["leaves"] for t in told):
            raise ReshardError("the senders do not have the same tensors: the trees that they send differ.")
        made = renaming.identity(leaves) if names is None else renaming.renamed(leaves, names)
        self._treedef, self._placed, targets = _matched(made, told[0]["tree"], places, names is None)
        self._given: dict[int, list[tuple[int, Box]]] = {}
        for sender, t in enumerate(told):
            for leaf, start, stop in t["given"]:
                self._given.setdefault(leaf, []).append((sender, Box(tuple(start), tuple(stop))))
        self._near, self._part_nbytes = near, part_nbytes
        self._targets = [about for about, _ in targets]
        self._wanted = [local_boxes(place, about) for about, place in zip(self._targets, self._placed, strict=True)]
        self.parts: list[SentPart] = []
        for target, (about, origins) in enumerate(targets):
            for i, box in enumerate(self._wanted[target]):
                for rest in box.without(self._wanted[target][:i]):
                    self.parts += self._parts(target, about, origins, box, rest)

    def _parts(self, target: int, about: KeptLeaf, origins: Origins, wanted: Box, box: Box) -> list[SentPart]:
        dtype = jnp.dtype(about.dtype)
        most = max(1, self._part_nbytes // dtype.itemsize)
        parts: list[SentPart] = []
        for leaf, source, move in origins(box):
            for sender, found in self._holders(leaf, source):
                for chunk, _ in found.split_sized(most):
                    for one, into, origin in move(chunk):
                        relative = into.relative_to(wanted)
                        parts.append(SentPart(sender, leaf, one, dtype, target, wanted, relative, origin))
        return parts

    def _holders(self, leaf: int, box: Box) -> list[tuple[int, Box]]:
        """Divides a box among senders: this process for the part that lies here, then the others, each byte once.
        Raises a ReshardError if there is a part that none of them sends.
        """
        rest, found = [box], []
        near = [] if self._near is None else [(self._near[0], b) for b in self._near[1].get(leaf, ())]
        for sender, held in (*near, *self._given.get(leaf, ())):
            common = [part for r in rest if (part := r & held).size]
            found += [(sender, part) for part in common]
            rest = [left for r in rest for left in r - held] if common else rest
        if rest:
            raise ReshardError(f"no sender gives a part of tensor {leaf}, {rest[0]}: the senders' shardings differ.")
        return found

    def buffers(self) -> dict[tuple[int, Box], np.ndarray]:
        """Allocates memory for everything that this process wants."""
        return {
            (target, box): aligned_empty(box.shape, jnp.dtype(about.dtype))
            for target, about in enumerate(self._targets)
            for box in self._wanted[target]
        }

    def tree(self, buffers: Mapping[tuple[int, Box], np.ndarray]) -> PyTree:
        """Returns the tree of arrays, when all parts are in their places."""
        arrays: list[object] = []
        for target, (about, place) in enumerate(zip(self._targets, self._placed, strict=True)):
            boxes = self._wanted[target]
            for i, box in enumerate(boxes):
                for other in boxes[:i]:  # the common part of two boxes is read once
                    if (common := box & other).size:
                        from_other = buffers[target, other][common.relative_to(other).slices]
                        buffers[target, box][(*common.relative_to(box).slices, ...)] = from_other
            arrays.append(assembled(place, about, {box: buffers[target, box] for box in boxes}))
        return jax.tree.unflatten(self._treedef, arrays)


def _matched(
    made: Mapping[str, tuple[KeptLeaf, Origins]], tree: str | None, places: PyTree, same: bool
) -> tuple[TreeDef, list[jax.sharding.Sharding], list[tuple[KeptLeaf, Origins]]]:
    """Returns the structure of the received tree, and for each of its leaves the sharding, tensor and origins."""
    found, treedef = jax.tree_util.tree_flatten_with_path(places, is_leaf=is_place)
    names, placed = [name_of(path) for path, _ in found], [place for _, place in found]
    sent = _sent(made, names)
    is_full = len(sent) == len(names) == len(made) or any(_is_described(place) for place in placed)
    if same and tree is not None and not is_full:
        registry = jax.tree_util.default_registry
        treedef = jax.tree_util.PyTreeDef.deserialize_using_proto(registry, bytes.fromhex(tree))
        names = list(made)
        sent = dict(zip(names, names, strict=True))
        placed = broadcast(places, jax.tree.unflatten(treedef, names), "target_shardings", is_leaf=is_place)
    targets: list[tuple[KeptLeaf, Origins]] = []
    faults = [f"there is no place for {name}" for name in sorted(made.keys() - set(sent.values()))]
    shardings: list[jax.sharding.Sharding] = []
    for name, place in zip(names, placed, strict=True):
        if (own := sent.get(name)) is None:
            faults.append(f"nobody sends {name}")
            continue
        about, origins = made[own]
        about, fault = _as_wanted(about, place)
        if fault is not None:
            faults.append(f"{name}: {fault}")
        targets.append((about, origins))
        shardings.append(place.sharding if _is_described(place) else place)
    if faults:
        hint = ""
        if same and tree is None and not is_full:
            hint = (
                "\nIts structure, which has nodes such as named tuples or dicts with numbers as keys, cannot be sent:"
                " give target_shardings for the whole tree."
            )
        raise ReshardError(f"what is sent does not fit the targets:\n{first_of(faults)}{hint}")
    return treedef, shardings, targets


def _sent(made: Mapping[str, object], names: Sequence[str]) -> dict[str, str]:
    """Maps each wanted tensor to the sent one of its name, or else of its name in the other notation."""
    found = {name: name for name in names if name in made}
    left = {_slashed(name): name for name in made if name not in found}
    for name in names:
        if name not in found and (own := left.pop(_slashed(name), None)) is not None:
            found[name] = own
    return found


def _slashed(name: str) -> str:
    """Writes dots as slashes: tensors of a folder are named with dots, or nested."""
    return name.replace(".", "/")


def _is_described(place: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    return isinstance(place, jax.ShapeDtypeStruct)


def _as_wanted(about: KeptLeaf, place: object) -> tuple[KeptLeaf, str | None]:
    """Returns a tensor's description as it arrives, and why it cannot arrive (None if it can)."""
    dtype: Any = jax.random.key_dtype(about.key) if about.key else jnp.dtype(about.dtype)
    shape = keys.shape_of_data(about.shape, dtype)
    if not _is_described(place):
        return about, fault_of_sharding(place, shape)
    if place.shape != shape:
        return about, f"its shape is {shape}, but the target has {place.shape}"
    if place.sharding is None:
        return about, "the target has no sharding"
    fault = fault_of_sharding(place.sharding, shape)
    if place.dtype == dtype:
        return about, fault
    if about.key or not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(place.dtype, jnp.floating)):
        return about, f"its dtype is {dtype}, but the target has {place.dtype}: only floats are cast, to floats"
    return KeptLeaf(about.name, SHARED, about.shape, jnp.dtype(place.dtype).name), fault


class Subscription:
    """Versions of a tree as this process receives them, together with the other receivers: each whole, and the newest.

    Args:
        what: its name in messages.
        job, ranks: the processes, and the ranks that receive.
        senders: the ranks of the same job that send; none if another job sends.
        connect: returns the shelves of all senders; the first one announces new versions.
        places, names: as in `stream`.
        part_nbytes: the bytes that are read at once; None is 16 MiB.
    """

    def __init__(
        self, what: str, job: Job | None, ranks: Sequence[int], senders: Sequence[int],
        connect: Callable[[], Iterable[NearShelf | FarShelf]], places: PyTree, names: Names | None = None,
        part_nbytes: int | None = None,
    ):  # fmt: skip
        self._what, self._job, self._rank, self._ranks = what, job, 0 if job is None else job.rank, sorted(ranks)
        self._senders, self._connect = [rank for rank in senders if rank != self._rank], connect
        self._places, self._names, self._part_nbytes = places, names, part_nbytes or _PART_NBYTES
        self._shelves: list[NearShelf | FarShelf] = []
        self._last, self._run, self._bytes_before = -1, "", 0
        self._plan: tuple[list[str], _ReceivePlan] | None = None

    @property
    def receives(self) -> bool:
        """Whether a part of the tree goes to this process."""
        return self._rank in self._ranks

    @property
    def bytes_received(self) -> int:
        """Bytes of tensors that this process has read from other processes."""
        return self._bytes_before + sum(shelf.bytes_received for shelf in self._shelves)

    @overload
    def receive(self, *, wait: Literal[True] = True) -> tuple[PyTree, int]: ...
    @overload
    def receive(self, *, wait: bool) -> tuple[PyTree, int] | None: ...

    @compat.api_boundary
    @compat.no_mesh()
    def receive(self, *, wait: bool = True) -> tuple[PyTree, int] | None:
        """Receives the newest version that all senders have, once; versions in between are skipped.

        All processes that have a target device call it alike, and get the same version. Work dispatched before runs on
        meanwhile. After an error, trees received before are still valid: continue with them, and call again.

        Args:
            wait: whether to wait for a version newer than the last one; otherwise returns None if there is none. (All
                versions of a publishing job that was restarted are new, whatever their numbers.)

        Returns:
            The tree in the target shardings, and its version.

        Raises:
            ReshardError: this process has no target, the sent tree does not fit, or another job does not publish, is
                lost on the way, or has another token: in one line.
        """
        if not self.receives:
            raise ReshardError(f"receive: this process has no target; {shown(self._ranks)} may receive.")
        version, error = self._try(lambda: self._choose(wait)) if self._rank == self._ranks[0] else (None, None)
        version, error = self._agree("which version", version, error)
        read = None
        if version is not None and error is None:
            read, error = self._try(lambda: self._read(version))
            _, error = self._agree("having a version", None, error)
        if error is not None:
            self.close()
            raise ReshardError(f"{self._what}: {error}")
        if version is None or read is None:
            return None
        try:
            for shelf in self._shelves:
                shelf.hold(None)
        except OSError:  # the version is here; the next call will notice
            pass
        except BaseException:  # as in `_try`
            self.close()
            raise
        self._last = version
        plan, buffers = read
        return plan.tree(buffers), version

    def close(self) -> None:
        """Leaves the senders; another `receive` connects again."""
        self._bytes_before = self.bytes_received
        for shelf in self._shelves:
            shelf.close()
        self._shelves = []

    def _try(self, act: Callable[[], T]) -> tuple[T | None, str | None]:
        """Returns the result of `act`, or its error as text; all receivers learn of it before any of them raises."""
        try:
            return act(), None
        except ReshardError as error:
            return None, str(error)
        except OSError as error:
            ended = isinstance(error, BrokenPipeError | ConnectionResetError)
            why = "the connection has ended" if ended else f"{error.strerror or error or type(error).__name__}"
            if not self._senders:
                return None, why
            with self._waiting(f"a version of {self._what}", self._senders):
                end = time.monotonic() + _VERDICT_S + (0.0 if self._job is None else self._job.hang_timeout_s or 0.0)
                while self._job is not None and time.monotonic() < end:
                    self._job.check()
                    time.sleep(_PAUSE_S)
            return None, f"{SECONDHAND} a version: {why}"
        except BaseException:  # such as Ctrl-C: an answer may still be on its way; another call connects again
            self.close()
            raise

    def _waiting(self, text: str, ranks: Sequence[int] = ()) -> AbstractContextManager:
        return nullcontext() if self._job is None else self._job.activity.during("reading", text, ranks)

    def _moves(self, text: str) -> None:
        """Reports that this process makes progress, whatever it waits for."""
        if self._job is not None:
            self._job.activity.say("reading", text)

    def _agree(self, what: str, version: int | None, error: str | None) -> tuple[int | None, str | None]:
        """Returns the version of the first receiver, and the first error of any."""
        if self._job is None or len(self._ranks) == 1:
            return version, error
        said = self._job.exchange(f"{what} of {self._what}", json.dumps([version, error]), self._ranks)
        told = [json.loads(said[rank]) for rank in self._ranks]
        return told[0][0], next((e for _, e in told if e is not None), None)

    def _connected(self) -> list[NearShelf | FarShelf]:
        if not self._shelves:
            self._shelves = list(self._connect())
            if self._shelves[0].run != self._run:  # started again, perhaps from an older version
                self._run, self._last = self._shelves[0].run, -1
        return self._shelves

    def _choose(self, wait: bool) -> int | None:
        """Chooses the newest version that all senders have; all of them hold it from here on."""
        text = f"a version after {self._last} of {self._what}"
        with self._waiting(text, self._senders):
            first, *others = self._connected()
            while True:
                found = set(first.versions(self._last, _WAIT_S if wait else 0.0))
                for other in others:
                    found &= set(other.versions(self._last, _WAIT_S if wait and found else 0.0))
                if found and all(shelf.hold(max(found)) is not None for shelf in (first, *others)):
                    return max(found)
                if not found and not wait:
                    return None
                if not self._senders:  # another job may take its time
                    self._moves(text)

    def _read(self, version: int) -> tuple[_ReceivePlan, dict[tuple[int, Box], np.ndarray]]:
        """Reads everything that this process wants of a held version."""
        text = f"version {version} of {self._what}"
        with self._waiting(text):  # waits for no rank: the senders may have come to the end of their programs
            shelves = self._connected()
            descriptions = [told for shelf in shelves if (told := shelf.hold(version)) is not None]
            if len(descriptions) < len(shelves):
                raise OSError(f"version {version} has gone")
            if self._plan is None or self._plan[0] != descriptions:
                near = next(((i, s.boxes) for i, s in enumerate(shelves) if isinstance(s, NearShelf)), None)
                plan = _ReceivePlan(descriptions, near, self._places, self._names, self._part_nbytes)
                self._plan = descriptions, plan
            plan, buffers = self._plan[1], self._plan[1].buffers()
            parts: list[list[tuple[SentPart, np.ndarray]]] = [[] for _ in shelves]
            before = self.bytes_received
            for part in plan.parts:
                view = buffers[part.target, part.wanted][(*part.into.slices, ...)]
                parts[part.sender].append((part, view))
            with ThreadPoolExecutor(len(shelves)) as pool:
                reads = [pool.submit(shelf.read, p) for shelf, p in zip(shelves, parts, strict=True) if p]
                while futures.wait(reads, _WAIT_S).not_done:  # in slices, so that Ctrl-C is heard
                    if (count := self.bytes_received) > before:
                        before = count
                        self._moves(text)
            for read in reads:
                read.result()
            return plan, buffers
