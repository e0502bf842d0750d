"""Restores a state from the memory of keepers, into the layout of the given state.

Each process reads the boxes that its devices need, if possible from the keeper of its own host, and verifies the
checksum of each piece. The given state is used up only when all processes have all bytes on their hosts. Until then
another copy, another version or the given state can be used.
"""

import collections
import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, part_boxes
from mpmd.arrays.mesh import is_local
from mpmd.arrays.reading import as_weak
from mpmd.arrays.sharding import MpmdSharding
from mpmd.resilience import layout
from mpmd.resilience.keepers import Address, Connection
from mpmd.resilience.layout import NUMBER, NUMPY, SHARED, KeptLeaf
from mpmd.resilience.versions import Stored, Version

T = TypeVar("T")

_NUMBERS = {"bool": bool, "int": int, "float": float, "str": str}


class LostError(Exception):
    """An error for a version that cannot be read; its text is the part that is lost or does not fit."""


class _Entry(NamedTuple):
    """A piece of a record: its box in a leaf, and the place of its bytes."""

    box: Box
    offset: int
    nbytes: int
    sum: int
    owner: int


class Reading:
    """The reading of a version by this process.

    Attributes:
      leaves: the kept leaves. For leaves that each process has on its own, the ones of this process.
    """

    def __init__(self, version: Version, rank: int, num_ranks: int, connect: Callable[[Address], Connection]):
        self._version, self._rank, self._num_ranks = version, rank, num_ranks
        self._connect = connect
        self._connections: dict[Address, Connection] = {}
        self._entries: dict[int, list[_Entry]] = collections.defaultdict(list)
        self._numbers: list[dict[int, float | str]] = []
        self._kept: list[list[KeptLeaf]] = []
        self.leaves: list[KeptLeaf] = []

    def load(self, names: Sequence[str], given: Sequence[Any]) -> list[dict[Box | None, Any]]:
        """Reads this process's part of a state: for each leaf the values by box, or a number under None. Raises a
        LostError if the version does not fit the given state, or a part of it is in no copy any more.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [connection.close() for connection in self._connections.values()])
            self._read_headers()
            mine = [layout.describe(name, leaf) for name, leaf in zip(names, given, strict=True)]
            if what := layout.misfit(self.leaves, mine):
                raise LostError(what)
            return [self._leaf(i, leaf) for i, leaf in enumerate(given)]

    def _read_headers(self) -> None:
        for owner, copies in enumerate(self._version.records):
            header = json.loads(self._first(copies, f"the header of rank {owner}", self._header))
            self._kept.append([KeptLeaf(n, k, tuple(s), *rest) for n, k, s, *rest in header["leaves"]])
            for leaf, start, stop, offset, nbytes, sum in header["pieces"]:
                self._entries[leaf].append(_Entry(Box(tuple(start), tuple(stop)), offset, nbytes, sum, owner))
            self._numbers.append(dict(header["numbers"]))
        self.leaves = self._kept[self._rank if self._num_ranks == len(self._kept) else 0]

    def _leaf(self, number: int, given: Any) -> dict[Box | None, Any]:
        about = self.leaves[number]
        entries = self._entries[number]
        if about.kind != SHARED:
            owner = self._owner_of_own(number)
            if about.kind == NUMBER:
                return {None: self._numbers[owner][number]}
            entries = [entry for entry in entries if entry.owner == owner]
        dtype, pieces = jnp.dtype(about.dtype), {}
        return {box: self._box(number, box, dtype, entries, pieces) for box in wanted(given, about)}

    def _owner_of_own(self, number: int) -> int:
        """Returns the rank that provides an own leaf: the same rank, or any rank if all have the same value."""
        if self._num_ranks == len(self._version.records):
            return self._rank
        values = {(leaves[number], repr(n.get(number))) for leaves, n in zip(self._kept, self._numbers, strict=True)}
        if len(values) > 1 or len({entry.sum for entry in self._entries[number]}) > 1:
            there_were = len(self._version.records)
            raise LostError(
                f"{self.leaves[number].name} differs between the {there_were} processes of that time, and now there are"
                f" {self._num_ranks}"
            )
        return 0

    def _box(
        self, number: int, box: Box, dtype: np.dtype, entries: Sequence[_Entry], pieces: dict[_Entry, np.ndarray]
    ) -> np.ndarray:
        """Returns the values of a box, assembled from all pieces that overlap it."""
        value = np.empty(box.shape, dtype)
        missing = box.size
        for entry in entries:
            common = box & entry.box
            if not common.size:
                continue
            if entry not in pieces:
                what = f"{self.leaves[number].name} of rank {entry.owner}"
                data = self._first(self._version.records[entry.owner], what, lambda c, e=entry: self._piece(c, e))
                pieces[entry] = data.view(dtype).reshape(entry.box.shape)
            value[common.relative_to(box).slices] = pieces[entry][common.relative_to(entry.box).slices]
            missing -= common.size
        if missing:
            raise LostError(f"{self.leaves[number].name}: {missing} elements are in no copy")
        return value

    def _first(self, copies: Sequence[Stored], what: str, read: Callable[[Stored], T]) -> T:
        """Reads from the first copy that can be read; tries a copy on this host first."""
        errors: list[str] = []
        for copy in sorted(copies, key=lambda copy: not self._connection(copy.keeper, errors)):
            with _noting(errors):
                return read(copy)
            if (connection := self._connections.pop(copy.keeper, None)) is not None:
                connection.close()  # the answer to the failed request may still come
        raise LostError(f"{what} can be read from none of {len(copies)} copies ({'; '.join(errors)})")

    def _connection(self, address: Address, errors: list[str]) -> bool:
        """Opens a connection to a keeper; returns whether it is the keeper of this host."""
        with _noting(errors):
            if address not in self._connections:
                self._connections[address] = self._connect(address)
            return self._connections[address].shares_memory
        return False

    def _header(self, copy: Stored) -> str:
        return self._connections[copy.keeper].header(copy.number)

    def _piece(self, copy: Stored, entry: _Entry) -> np.ndarray:
        data = self._connections[copy.keeper].read(copy.number, entry.offset, entry.nbytes)
        if zlib.crc32(data.data) != entry.sum:
            raise OSError(f"damaged on {copy.keeper.host}")
        return data


@contextlib.contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError) as error:
        errors.append(str(error))


def wanted(given: object, about: KeptLeaf) -> list[Box]:
    """Returns the boxes of a leaf's data that this process needs for the layout of the given leaf."""
    if about.kind == NUMPY or not _is_placed(given):
        return [Box.whole(about.shape)]
    return local_boxes(given.mpmd_sharding if isinstance(given, MpmdArray) else given.sharding, about)


def local_boxes(sharding: jax.sharding.Sharding, about: KeptLeaf) -> list[Box]:
    """Returns the boxes of a leaf's data that this process has in a sharding of the leaf."""
    dtype: Any = jax.random.key_dtype(about.key) if about.key else jnp.dtype(about.dtype)
    by_part = part_boxes(keys.data_sharding(sharding, keys.shape_of_data(about.shape, dtype), dtype), about.shape)
    return list(dict.fromkeys(box for boxes in by_part.values() for d, box in boxes.items() if is_local(d)))


def _is_placed(given: object) -> TypeGuard[jax.Array]:
    return isinstance(given, jax.Array) and bool(given.committed)  # pyright: ignore[reportAttributeAccessIssue]


def put(given: Any, about: KeptLeaf, data: Mapping[Box | None, Any]) -> Any:
    """Returns the kept leaf in the layout of the given one, and uses up the given leaf's memory."""
    if about.kind == NUMBER:
        return _NUMBERS[about.dtype](data[None])
    if about.kind == NUMPY:
        (value,) = data.values()
        return value if isinstance(given, np.ndarray) or value.ndim else value[()]
    dtype: Any = jax.random.key_dtype(about.key) if about.key else jnp.dtype(about.dtype)
    if not _is_placed(given):
        (value,) = data.values()
        return as_weak(jnp.asarray(value)) if about.weak else keys.from_data(jnp.asarray(value), dtype)

    if isinstance(given, MpmdArray):
        given.delete()
        return assembled(given.mpmd_sharding, about, data)
    return assembled(given.sharding, about, data)


def assembled(sharding: jax.sharding.Sharding, about: KeptLeaf, data: Mapping[Box | None, np.ndarray]) -> jax.Array:
    """Returns the array with a sharding from this process's boxes."""
    dtype: Any = jax.random.key_dtype(about.key) if about.key else jnp.dtype(about.dtype)

    def array(sharding: jax.sharding.Sharding, shape: tuple[int, ...], offset: Sequence[int]) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            return data[Box.from_slices(index or (), shape).shifted(offset)]

        return keys.from_data(jax.make_array_from_callback(shape, sharding, part, jnp.dtype(about.dtype)), dtype)

    shape = keys.shape_of_data(about.shape, dtype)
    placed = keys.data_sharding(sharding, shape, dtype)
    if not isinstance(sharding, MpmdSharding):
        found = array(placed, about.shape, (0,) * len(about.shape))
        return as_weak(found) if about.weak else found
    parts = placed.local_parts(about.shape)
    arrays = {part.key: array(placed.group_sharding(part.group), part.shape, part.offset) for part in parts}
    return MpmdArray._unchecked(arrays, sharding, shape, dtype, about.weak)
