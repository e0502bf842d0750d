"""Parts of stored arrays that are asked for, and how they become arrays on devices. No file is touched here."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, device_boxes
from mpmd.arrays.sharding import MpmdSharding
from mpmd.errors import ReshardError
from reshard.places import is_local

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


def in_storage(box: Box, index: Index) -> Box:
    """A box of a part as a box of the whole array: `part = whole[index]`."""
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
    """`[3, 0:8]`, for messages."""
    ends = [
        ("" if e is None else str(e) for e in (i.start, i.stop)) if isinstance(i, slice) else (str(i),) for i in index
    ]
    return "[" + ", ".join(":".join(e) for e in ends) + "]"


@dataclasses.dataclass(frozen=True)
class Request:
    """A part of a stored array, and where it goes.

    Attributes:
        shape: of the part; for typed keys without the axes of the key data. None: that of the stored array.
        dtype: what to cast to; None: as stored.
        sharding: an `MpmdSharding`, a JAX sharding, or None for a numpy array.
        index: the part of the stored array, ints and slices of its leading axes; () is all of it.
        strict: whether the shapes must agree; otherwise the end is cut off or filled with zeros.
    """

    shape: Shape | None
    dtype: Any
    sharding: Any
    index: Index = ()
    strict: bool = True

    def completed(self, shape: Shape, dtype: Any, key_dtype: Any) -> "Request":
        """With what it left to the stored array."""
        if key_dtype is not None:
            shape, dtype = keys.shape_of_data(shape, key_dtype), key_dtype
        return dataclasses.replace(
            self,
            shape=tuple(shape) if self.shape is None else self.shape,
            dtype=dtype if self.dtype is None else self.dtype,
        )


class _LocalArray(NamedTuple):
    """One `jax.Array` to make, and where it begins in what is asked for."""

    sharding: Any
    offset: Shape
    shape: Shape


class LocalRequest:
    """One request, as this process sees it: the box of each of its devices, and the shards made so far.

    Boxes count in the data that is stored, which for typed keys has the key data's axes behind those of the array.

    Attributes:
        boxes: by (`_LocalArray`, device), the box that is wanted there; groups on the same mesh share their arrays.
    """

    def __init__(self, name: str, request: Request, key_dtype: Any):
        assert request.shape is not None
        self.name, self.request, self.key_dtype = name, request, key_dtype
        self.shape, self.sharding = request.shape, request.sharding
        self.dtype = None if keys.is_key(request.dtype) or key_dtype is not None else request.dtype
        if keys.is_key(request.dtype):
            if key_dtype is None:
                raise ReshardError(f"{name}: expected {request.dtype}, but the checkpoint has no typed keys there.")
            self.shape = keys.data_shape(request.shape, key_dtype)
            self.sharding = keys.data_sharding(request.sharding, request.shape, key_dtype)
        self.boxes: dict[Any, Box] = {}
        for _, part in self._parts():
            for device, box in device_boxes(part.sharding, part.shape).items():
                if is_local(device):
                    self.boxes[part, device] = box.shifted(part.offset)
        if self.sharding is None:
            self.boxes[None] = Box.whole(self.shape)
        self._made: dict[Any, Any] = {}

    def _parts(self) -> list[tuple[Any, "_LocalArray"]]:
        """The arrays to make, by the key that they have in an `MpmdArray`."""
        if isinstance(self.sharding, MpmdSharding):
            parts = self.sharding.local_parts(self.shape)
            return [(p.key, _LocalArray(self.sharding.group_sharding(p.group), p.offset, p.shape)) for p in parts]
        return [] if self.sharding is None else [(0, _LocalArray(self.sharding, (0,) * len(self.shape), self.shape))]

    def check(self, stored: Sequence[int]) -> None:
        """Raises a ReshardError if what is stored has another shape."""
        whole, stored = in_storage(Box.whole(self.shape), self.request.index), tuple(stored)
        fits = len(whole.stop) == len(stored)
        if fits and self.request.index:
            fits = whole in Box.whole(stored)
        elif fits and self.request.strict:
            fits = whole.stop == stored
        if not fits:
            part = index_text(self.request.index) if self.request.index else ""
            raise ReshardError(f"{self.name}{part}: expected shape {self.shape}, but the checkpoint has {stored}.")

    def put(self, box: Box, wanted: Sequence[Box], data: np.ndarray) -> None:
        """Brings what has been read to the devices that want it."""
        for key, part in self.boxes.items():
            place = in_storage(part, self.request.index)
            if place not in wanted:
                continue
            view = data[place.relative_to(box).slices].reshape(part.shape)
            if self.dtype is not None and view.dtype != self.dtype:
                view = view.astype(self.dtype)
            if key is None:
                self._made[key] = view if view.size == data.size else view.copy()
            else:
                part_of, device = key
                there = SingleDeviceSharding(device, memory_kind=part_of.sharding.memory_kind)
                is_all = view.size == data.size  # else it would keep in memory what it is cut from
                self._made[key] = jax.device_put(view, there, may_alias=None if is_all else False)

    def finish(self) -> Any:
        """The array, made of what was put; in a process that wants nothing of it, its description."""
        if self.sharding is None:
            data = self._made[None] if self._made else np.zeros(self.shape, self.dtype)
            return data if self.key_dtype is None else keys.from_data(jax.numpy.asarray(data), self.key_dtype)
        arrays: dict[Any, jax.Array] = {}
        made: dict[_LocalArray, jax.Array] = {}
        for key, part in self._parts():
            if part not in made:
                shards = [x for (where, _), x in self._made.items() if where == part]
                array = jax.make_array_from_single_device_arrays(part.shape, part.sharding, shards)
                made[part] = keys.from_data(array, self.key_dtype)
            arrays[key] = made[part]
        if not isinstance(self.sharding, MpmdSharding):
            return arrays[0]
        shape, dtype, sharding = self.request.shape, self.request.dtype, self.request.sharding
        if self.key_dtype is not None and not keys.is_key(dtype):  # asked for as the integers that are stored
            shape, dtype = keys.shape_of_data(self.shape, self.key_dtype), self.key_dtype
            sharding = sharding.replace(spec=tuple(sharding.spec)[: len(shape)])
        if arrays:
            return MpmdArray(arrays, sharding, shape)
        return MpmdArray({}, sharding, shape, dtype if keys.is_key(dtype) else jax.dtypes.canonicalize_dtype(dtype))
