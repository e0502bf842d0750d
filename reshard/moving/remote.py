"""Sends pieces to other processes and receives theirs.

All processes walk the same plan and number its pieces alike. Sent data must stay until it has been received, so each
`settle` sends a message from each receiver to each of its senders that all has arrived.
"""

import itertools
import json
import re
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mpmd.arrays.boxes import Box
from mpmd.arrays.mesh import Device
from mpmd.errors import ReshardError
from mpmd.job.job import Job
from mpmd.job.notes import Note
from mpmd.job.wires import NUMBER_BITS, receive_piece
from reshard.moving.local import Shard, Sink, cut, is_host_memory
from reshard.moving.plan import MovedLeaf
from reshard.places import HostMemory, Place, aligned_empty

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_RECEIPT = np.zeros(1, np.uint8)


class WireCarrier:
    """Carries pieces to and from other processes during one reshard."""

    def __init__(self, job: Job):
        ranks = range(job.num_ranks)
        self.rank = job.rank
        self._job = job
        number = job.new_number(ranks, "a reshard", ", which every process must call", is_brief=True)
        self._numbers = itertools.count(number << NUMBER_BITS)
        self._coming: list[tuple[jax.Array, Sink, Box]] = []
        self._pairs: set[tuple[int, int]] = set()

    def carry(
        self,
        start: tuple[int, Place],
        end: tuple[int, Place],
        source: Callable[[], tuple[Shard, Box]],
        sink: Callable[[], tuple[Sink, Box]],
        dtype: np.dtype,
    ) -> tuple[int, int]:
        """Sends one piece from rank to rank; every process calls it for every piece between ranks, in the same order.

        Args:
          start: the sending rank, and the device or `HostMemory` where the source shard is.
          end: the receiving rank, and where the target shard is.
          source: returns the source shard and the box of it to send; called on the sender.
          sink: returns the target shard and the box of it to fill; called on the receiver.

        Returns:
          The bytes of working memory on the sender and on the receiver, as far as they are here.
        """
        (sender, from_device), (receiver, to_device) = start, end
        number = next(self._numbers)
        self._pairs.add((sender, receiver))
        if sender == self.rank:
            shard, at = source()
            data, nbytes = _part(shard, at, _device(from_device, sender))
            self._job.wire.send(number, data, _device(to_device, receiver))
            return nbytes, 0
        if receiver == self.rank:
            shard, into = sink()
            away, home = _device(from_device, sender), _device(to_device, receiver)
            data = receive_piece(self._job, number, into.shape, dtype, away, home, "a piece of a reshard")
            self._coming.append((data, shard, into))
            return 0, 0 if shard.takes(data) else into.nbytes(dtype.itemsize)
        return 0, 0

    def settle(self) -> None:
        """Waits until all pieces so far have arrived, as far as this process takes part in them."""
        for data, sink, into in self._coming:
            data.block_until_ready()
            sink.write(into, data)
        self._coming.clear()
        receipts = []
        for sender, receiver in sorted(self._pairs):
            number = next(self._numbers)
            giver, taker = _first_device(receiver), _first_device(sender)
            if receiver == self.rank:
                self._job.wire.send(number, jax.device_put(_RECEIPT, giver), taker)
            elif sender == self.rank:
                text = "the receipt for pieces of a reshard"
                receipts.append(receive_piece(self._job, number, (1,), np.uint8, giver, taker, text))
        self._pairs.clear()
        jax.block_until_ready(receipts)


def _first_device(rank: int) -> Device:
    return jax.local_devices(process_index=rank)[0]


def _device(place: Place, rank: int) -> Device:
    """Returns the device that pieces of a shard travel through."""
    return _first_device(rank) if isinstance(place, HostMemory) else place


def _part(source: Shard, box: Box, device: Device) -> tuple[jax.Array, int]:
    """Returns a box of a shard as an array of its own on `device`, or the shard itself, and the bytes that it took."""
    whole = box.shape == tuple(source.shape)
    if isinstance(source, jax.Array) and whole and source.sharding.memory_kind == device.default_memory().kind:
        return source, 0
    nbytes = box.nbytes(source.dtype.itemsize)
    if isinstance(source, np.ndarray) or is_host_memory(device):
        data = aligned_empty(box.shape, source.dtype)
        data[...] = np.asarray(source)[box.slices]
        return jax.device_put(data, device, may_alias=True), nbytes
    return jax.device_put(cut(source, box), SingleDeviceSharding(device)), nbytes


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns where two lists begin to differ: the end of the shorter one, if the longer one continues from there."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def agree(job: Job, leaves: Sequence[MovedLeaf], threshold: int, data: Sequence[jax.Array | np.ndarray]) -> int:
    """Checks that all processes move the same arrays; returns the least threshold that any of them has.

    Values of host arrays are compared like those passed to a step: a difference is an error of a later call.

    Raises:
      ReshardError: the processes differ; raised in every process.
    """
    lines = [_ADDRESS.sub("0x", str(leaf)) for leaf in leaves]
    hashes = [zlib.crc32(line.encode()) for line in lines]
    said = job.exchange("comparing reshards", json.dumps([threshold, hashes]), range(job.num_ranks))
    told = {rank: json.loads(text) for rank, text in said.items()}
    different = next((rank for rank, (_, theirs) in told.items() if theirs != told[0][1]), None)
    if different is None:
        values = [(i, x) for i, x in enumerate(data) if isinstance(x, np.ndarray)]
        names = [leaf.path or "the array" for leaf in leaves]
        note = Note("called a reshard", step=job.activity.step, names=names, values=values)
        note.read()  # at once: the user may change them after the reshard
        job.calls.note(range(job.num_ranks), note)
        return min(least for least, _ in told.values())
    at = first_difference(told[0][1], told[different][1])
    mine = lines[at] if at < len(lines) else "nothing"
    texts = job.exchange("saying how reshards differ", mine, range(job.num_ranks))
    raise ReshardError(
        f"the processes are about to move different arrays; array {at} differs:\n"
        f"  rank 0: {texts[0]}\n  rank {different}: {texts[different]}\n"
        "  Every process must call the reshard with the same tree, shapes, dtypes and shardings."
    )
