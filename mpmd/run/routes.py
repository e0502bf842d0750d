"""Moves values between processes: pieces (`pieces.py`) over the job's wire (`wires.py`). Waits for no value."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.layouts import memory_kind
from mpmd.arrays.mesh import Device, is_local
from mpmd.job.job import Job
from mpmd.job.wires import receive_piece
from mpmd.run.pieces import Piece, share


class ValueRoute:
    """This process's part in moving one value between two shardings.

    Args:
      first: the number of the transfer's first piece, among all pieces of a program.
      keep: whether to send copies, since the user may donate or delete the source later.
    """

    def __init__(
        self,
        job: Job,
        source: jax.sharding.Sharding,
        target: NamedSharding,
        aval: compat.Aval | jax.ShapeDtypeStruct,
        first: int,
        keep: bool,
        text: str,
    ):
        self.share = share(source, target, tuple(aval.shape))
        self.text = text  # the transfer in words
        self._job, self._target, self._aval, self._first, self._keep = job, target, aval, first, keep

    def carry(self, x: jax.Array | None, base: int) -> jax.Array | None:
        """Sends this process's pieces and receives those for its devices, in the order that all processes share.

        `x` and the result are this process's parts of the value, if it has any; `base` is added to the pieces' numbers.
        """
        if self.share.only is not None:
            return self._receive(self.share.only, base)
        shards = {} if x is None else compat.shards(x)
        parts: dict[Device, list[jax.Array]] = {d: [] for d in self.share.targets}
        for piece in self.share.mine:
            if not is_local(piece.source):
                parts[piece.target].append(self._receive(piece, base))
            elif is_local(piece.target):
                part = self._part(shards[piece.source], piece)
                parts[piece.target].append(jax.device_put(part, piece.target, may_alias=False))
            else:
                self._send(shards[piece.source], piece, base)
        return self._assembled(parts) if parts else None

    def _assembled(self, parts: dict[Device, list[jax.Array]]) -> jax.Array:
        arrived: list[jax.Array] = []
        for device, found in parts.items():
            shape = self.share.targets[device].shape
            if not found:  # the shard is empty
                arrived.append(keys.zeros(shape, self._aval.dtype, device))
            elif len(found) == 1 and found[0].shape == shape:
                arrived.append(found[0])
            else:
                arrived.append(_join(shape, self.share.starts[device], found))
        memory = memory_kind(self._target)
        if len(arrived) == 1 and self._target.mesh.size == 1 and memory is None:
            return arrived[0]
        on_device = self._target if memory is None else self._target.with_memory_kind("device")
        value = jax.make_array_from_single_device_arrays(self._aval.shape, on_device, arrived)
        return value if memory is None else jax.device_put(value, self._target)

    def _send(self, shard: jax.Array, piece: Piece, base: int) -> None:
        part = self._part(shard, piece)
        if part is shard and self._keep:
            part = _copied(part)
        part = keys.to_data(part)
        number = base + self._first + piece.number
        self._job.wire.send(number, part, piece.target)
        self._job.activity.expect(part, self.text, (), number)

    def _receive(self, piece: Piece, base: int) -> jax.Array:
        shape, dtype = keys.data_shape(piece.box.shape, self._aval.dtype), keys.data_dtype(self._aval.dtype)
        number = base + self._first + piece.number
        data = receive_piece(self._job, number, shape, dtype, piece.source, piece.target, self.text)
        return keys.from_data(data, self._aval.dtype)

    def _part(self, shard: jax.Array, piece: Piece) -> jax.Array:
        """Returns the piece of a shard, in device memory."""
        held = self.share.sources[piece.source]
        if shard.sharding.memory_kind not in (None, piece.source.default_memory().kind):
            shard = jax.device_put(shard, SingleDeviceSharding(piece.source))
        if held == piece.box:
            return shard
        return _cut(shard, piece.box.relative_to(held).start, piece.box.shape)


_copied = jax.jit(jnp.copy)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(shard: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(shard, start, tuple(a + n for a, n in zip(start, shape, strict=True)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _join(shape: tuple[int, ...], starts: Sequence[Sequence[int]], parts: list[jax.Array]) -> jax.Array:
    dtype = parts[0].dtype
    whole = jnp.zeros(keys.data_shape(shape, dtype), keys.data_dtype(dtype))
    for start, part in zip(starts, map(keys.to_data, parts), strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, (*start, *[0] * (whole.ndim - len(start))))
    return keys.from_data(whole, dtype)
