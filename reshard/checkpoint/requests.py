"""Descriptions of requested arrays, and how parts of stored arrays are put together into them. Touches no file."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, device_boxes
from mpmd.arrays.sharding import Key, MpmdSharding
from mpmd.errors import ReshardError
from mpmd.pytrees import PyTree
from reshard.places import is_local
from reshard.trees import broadcast, sharding_of
from scheduler.base.texts import a, type_text

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


def abstract(tree: PyTree, shardings: PyTree = None) -> PyTree:
    """Returns the tree of descriptions into which a checkpoint is to be restored.

    It is what Orbax's own `StandardRestore(...)` and `checkpoint_utils.construct_restore_args(...)` take.

    Args:
        tree: arrays of any kind, or descriptions of them (`jax.eval_shape(init, key)`).
        shardings: `MpmdSharding`s or JAX shardings, the same tree or a prefix of it; None takes the leaves' own.

    Returns:
        The same tree of `jax.ShapeDtypeStruct`, each with its sharding; leaves that are not arrays stay as they are.

    Raises:
        ReshardError: `shardings` is not a prefix of the tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [None] * len(leaves) if shardings is None else broadcast(shardings, tree, "shardings")
    return jax.tree.unflatten(treedef, [_describe(leaf, s) for leaf, s in zip(leaves, places, strict=True)])


def _describe(leaf: Any, sharding: object) -> Any:
    sharding = sharding_of(leaf) if sharding is None else sharding
    if sharding is None:
        return leaf
    shape, dtype = jnp.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ReshardError(f"abstract: {sharding!r} is a {type(sharding).__name__}, not a sharding.")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def in_storage(box: Box, index: Index) -> Box:
    """Maps a box of a part to the box of the whole array: `part = whole[index]`."""
    start, stop = list(box.start), list(box.stop)
    for axis, entry in enumerate(index):
        if isinstance(entry, slice):
            start[axis] += entry.start
            stop[axis] += entry.start
        else:
            start.insert(axis, entry)
            stop.insert(axis, entry + 1)
    return Box(tuple(start), tuple(stop))


def index_text(index: Index) -> str:
    """Returns an index as text for messages: `[3, 0:8]`."""
    ends = [
        ("" if e is None else str(e) for e in (i.start, i.stop)) if isinstance(i, slice) else (str(i),) for i in index
    ]
    return "[" + ", ".join(":".join(e) for e in ends) + "]"


def _rank(dtype: DTypeLike) -> int:
    """Returns the rank of a dtype's kind. Numbers of the same or a lower rank can be cast to the dtype."""
    kinds = np.bool_, np.integer, np.floating, np.complexfloating
    return next((i for i, kind in enumerate(kinds) if jax.dtypes.issubdtype(dtype, kind)), 0)


@dataclasses.dataclass(frozen=True)
class Request:
    """A stored array, or a part of one, and where it goes."""

    name: str  # its name in messages
    shape: Shape | None  # of the part; for typed keys without the axes of the key data. None: the stored array's shape
    dtype: DTypeLike | None  # the dtype to cast to; None: as stored
    sharding: Any  # an `MpmdSharding`, a JAX sharding, or None for a numpy array
    index: Index = ()  # the part of the stored array, ints and slices of its leading axes; () is all of it
    strict: bool = True  # whether the shapes must agree; otherwise the end is cut off or filled with zeros
    source: tuple[str, ...] = ()  # the names of the stored leaf
    kind: type | None = None  # the Python type of the result; None for an array

    @property
    def expected(self) -> str:
        what = type_text(self.shape or (), self.dtype) if self.kind is None else a(self.kind)
        return f"{what} at {'/'.join(self.source)}{index_text(self.index)}" if self.index else what

    def completed(self, shape: Shape, dtype: DTypeLike | None, key_dtype: DTypeLike | None) -> "Request":
        """Fills in open fields from the stored array. Every slice then has both ends, and no number is negative."""
        if key_dtype is not None:
            shape, dtype = keys.shape_of_data(shape, key_dtype), key_dtype
        index = [
            slice(*i.indices(n)[:2]) if isinstance(i, slice) else int(i) % n
            for i, n in zip(self.index, shape, strict=False)
        ]
        return dataclasses.replace(
            self,
            shape=tuple(shape) if self.shape is None else self.shape,
            dtype=dtype if self.dtype is None else self.dtype,
            index=tuple(index),
        )

    def value(self, found: Any) -> Any:
        """Returns the leaf, made of the data that was read for it."""
        return found if self.kind in (None, str) else self.kind(found.item())


class LocalRequest:
    """The result of a request in this process: the box of each of its devices, and the shards made so far.

    Boxes count in the stored data; for typed keys, that has the axes of the key data after the axes of the array.

    Attributes:
        boxes: the wanted box, by device and by array to make (its sharding, and its start in the request); groups on
            the same mesh share their arrays.
    """

    def __init__(self, request: Request, key_dtype: DTypeLike | None):
        assert request.shape is not None
        self.request, self.key_dtype = request, key_dtype
        self.shape, self.sharding = request.shape, request.sharding
        self.dtype = None if keys.is_key(request.dtype) or key_dtype is not None else request.dtype
        if keys.is_key(request.dtype):
            if key_dtype is None:
                raise ReshardError(
                    f"{request.name}: expected {request.dtype}, but the checkpoint has no typed keys there."
                )
            self.shape = keys.data_shape(request.shape, key_dtype)
            self.sharding = keys.data_sharding(request.sharding, request.shape, key_dtype)
        sharding = self.sharding
        self._arrays: dict[Key, tuple[jax.sharding.Sharding, Shape, Shape]] = {}
        if isinstance(sharding, MpmdSharding):
            parts = sharding.local_parts(self.shape)
            self._arrays = {p.key: (sharding.group_sharding(p.group), p.offset, p.shape) for p in parts}
        elif sharding is not None:
            self._arrays = {0: (sharding, (0,) * len(self.shape), self.shape)}
        self.boxes: dict[Any, Box] = {None: Box.whole(self.shape)} if sharding is None else {}
        for array in self._arrays.values():
            placed, offset, shape = array
            boxes = device_boxes(placed, shape).items()
            self.boxes |= {(array, device): box.shifted(offset) for device, box in boxes if is_local(device)}
        self._made: dict[Any, Any] = {}

    def check(self, stored: Sequence[int], dtype: DTypeLike) -> None:
        """Raises a ReshardError if the stored array has another shape, or a cast would lose more than digits."""
        index, stored = self.request.index, tuple(stored)
        whole = in_storage(Box.whole(self.shape), index)
        fits = len(whole.stop) == len(stored)
        if fits and index:
            fits = whole in Box.whole(stored)
        elif fits and self.request.strict:
            fits = whole.stop == stored
        if not fits:
            part = self.request.name + (index_text(index) if index else "")
            raise ReshardError(f"{part}: expected shape {self.shape}, but the checkpoint has {stored}.")
        if self.dtype is not None and _rank(self.dtype) < _rank(dtype):
            raise ReshardError(
                f"{self.request.name}: expected {type_text(self.shape, self.dtype)}, but the checkpoint has"
                f" {type_text(stored, dtype)}, of which a cast would lose more than digits."
            )

    def put(self, box: Box, wanted: Sequence[Box], data: np.ndarray, is_own: bool = True) -> None:
        """Brings the data of a box to the devices that want boxes in it. `is_own`: no other request gets the data."""
        for key, part in self.boxes.items():
            place = in_storage(part, self.request.index)
            if place not in wanted:
                continue
            view = data[(*place.relative_to(box).slices, ...)].reshape(part.shape)
            if self.dtype is not None and view.dtype != self.dtype:
                view = view.astype(self.dtype)
            keeps = is_own and view.size == data.size  # otherwise it would keep the whole array in memory
            if key is None:
                self._made[key] = view if keeps else view.copy()
            else:
                (placed, *_), device = key
                self._check_width(view)
                there = SingleDeviceSharding(device, memory_kind=placed.memory_kind)
                self._made[key] = jax.device_put(view, there, may_alias=None if keeps else False)

    def _check_width(self, data: np.ndarray) -> None:
        """Raises a ReshardError if JAX would cut integers to 32 bits that need more: it does so without a word."""
        narrow = jax.dtypes.canonicalize_dtype(data.dtype)
        if narrow != data.dtype and narrow.kind in "iu" and data.size:
            least, most = np.iinfo(narrow).min, np.iinfo(narrow).max
            if data.min() < least or data.max() > most:
                raise ReshardError(
                    f"{self.request.name}: the checkpoint has numbers beyond {narrow}. Set jax_enable_x64, or restore"
                    " it without a sharding, as a numpy array."
                )

    def finish(self) -> jax.Array | np.ndarray:
        """Returns the array, made of the data that was put; in a process that wants nothing of it, its description."""
        if self.sharding is None:
            data = self._made[None] if self._made else np.zeros(self.shape, self.dtype)
            return data if self.key_dtype is None else keys.from_data(jax.numpy.asarray(data), self.key_dtype)
        made: dict[object, jax.Array] = {}
        dtype = self.request.dtype if self.key_dtype is None else self.key_dtype
        assert dtype is not None, "the request is completed"
        type_of_data = jax.dtypes.canonicalize_dtype(keys.data_dtype(dtype))
        for array in self._arrays.values():
            if array not in made:
                shards = [x for (where, _), x in self._made.items() if where == array]  # none where all are elsewhere
                data = jax.make_array_from_single_device_arrays(array[2], array[0], shards, dtype=type_of_data)
                made[array] = keys.from_data(data, self.key_dtype)
        arrays = {key: made[array] for key, array in self._arrays.items()}
        if not isinstance(self.sharding, MpmdSharding):
            return arrays[0]
        shape, dtype, sharding = self.request.shape, self.request.dtype, self.request.sharding
        if self.key_dtype is not None and not keys.is_key(dtype):  # asked for as the integers that are stored
            shape, dtype = keys.shape_of_data(self.shape, self.key_dtype), self.key_dtype
            sharding = sharding.replace(spec=tuple(sharding.spec)[: len(shape)])
        if arrays:
            return MpmdArray(arrays, sharding, shape)
        return MpmdArray({}, sharding, shape, dtype if keys.is_key(dtype) else jax.dtypes.canonicalize_dtype(dtype))
