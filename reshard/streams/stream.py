"""Streams inside a job: some of its processes send versions of a tree, some receive the newest whole one."""

import itertools
import json
import secrets
import weakref
import zlib
from collections.abc import Iterable, Iterator

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import ReshardError
from mpmd.job import joining
from mpmd.job.job import Job
from mpmd.pytrees import PyTree
from reshard.sizes import threshold_nbytes
from reshard.streams.receiving import Subscription, is_place, shown
from reshard.streams.renaming import Names
from reshard.streams.sending import Sender
from reshard.streams.serving import FarShelf, NearShelf, ShelfServer

_NAME = "stream"


class Stream(Subscription):
    """Versions of a tree of arrays, on their way from the processes that train to those that use them.

    A receiver never delays a sender. A sender's host holds at most three versions of its part of the tree: one that is
    being read, the newest whole one, and one on its way there.

    Attributes:
        source_ranks, target_ranks: the sending and the receiving processes.
    """

    def __init__(
        self, source_shardings: PyTree, target_shardings: PyTree, part_nbytes: int | None, names: Names | None
    ):
        self._sources, self.source_ranks = _plain(source_shardings, "source_shardings")
        self.target_ranks = _plain(target_shardings, "target_shardings")[1]
        job = joining.current()
        rank = 0 if job is None else job.rank
        ranks = sorted({*self.source_ranks, *self.target_ranks})
        if job is None and ranks != [0]:
            raise ReshardError(f"stream: this process is alone, but the shardings have devices of {shown(ranks)}.")
        number, several = 0, job if rank in ranks and len(ranks) > 1 else None
        if several is not None:
            number = several.new_number(ranks, "opening a stream", ", which all that send or receive must open")
        what = f"{_NAME} {number}" if number else _NAME
        to = target_shardings, names, part_nbytes
        super().__init__(what, job, self.target_ranks, self.source_ranks, self._connected_to, *to)
        self._server: ShelfServer | None = None
        self._sender: Sender | None = None
        if rank in self.source_ranks:
            self._sender = Sender(what, job, self.source_ranks, f"mpmd/streams/{number}/", self.receives)
            if several is not None:
                self._server = ShelfServer(several.address, 0, secrets.token_hex(16))
                self._server.serve(_NAME, self._sender.shelf)
                weakref.finalize(self, self._server.close).atexit = False
        if several is not None:
            self._doors = self._agreed(several, ranks, (source_shardings, target_shardings, names))

    def _connected_to(self) -> Iterator[NearShelf | FarShelf]:
        for source in self.source_ranks:
            sender = self._sender if source == self._rank else None
            yield FarShelf(*self._doors[source]) if sender is None else NearShelf(sender.shelf)

    def _agreed(self, job: Job, ranks: list[int], given: tuple[object, ...]) -> dict[int, tuple[str, str, str]]:
        """Returns address, name and token of each sender's shelf. Raises a ReshardError if processes were given
        different shardings or names.
        """
        told = jax.tree.map(str, given, is_leaf=is_place)
        digest = zlib.crc32(repr(told).encode())
        door = ("", "") if self._server is None else (self._server.address, self._server.token)
        said = job.exchange("comparing streams", json.dumps([digest, *door]), ranks)
        doors = {r: json.loads(text) for r, text in said.items()}
        if (other := next((r for r in ranks if doors[r][0] != doors[ranks[0]][0]), None)) is not None:
            raise ReshardError(
                f"stream: rank {ranks[0]} and rank {other} were given other shardings or names; all that send or"
                " receive must call it alike."
            )
        return {r: (address, _NAME, token) for r, (_, address, token) in doors.items()}

    @property
    def sends(self) -> bool:
        """Whether this process sends a part of the tree."""
        return self._sender is not None

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that other processes have read from this one."""
        return 0 if self._server is None else self._server.bytes_sent

    @compat.api_boundary
    @compat.no_mesh()
    def send(self, tree: PyTree, version: int) -> None:
        """Sends a version: starts its copies to the memory of the host, and returns.

        The next step may be called at once, even if the arrays are donated to it. Waits until all senders have the
        previous version on their hosts, but never for a receiver. All senders send the same versions.

        Args:
            tree: the arrays, in the source shardings.
            version: 0 or more, each larger than the one before.

        Raises:
            ReshardError: this process has no source, the tree does not fit the shardings, or the version is not newer.
        """
        if self._sender is None:
            raise ReshardError(f"send: this process has no source; {shown(self.source_ranks)} may send.")
        self._sender.send(tree, self._sources, version)

    def close(self) -> None:
        """Ends this process's part; call it when the receivers have received all that they need."""
        super().close()
        if self._sender is not None:
            self._sender.close()
        if self._server is not None:
            self._server.close()


def _plain(shardings: PyTree, name: str) -> tuple[PyTree, tuple[int, ...]]:
    """Returns the shardings without dtypes, and their devices' processes. Raises a ReshardError for other values."""
    leaves, treedef = jax.tree.flatten(shardings, is_leaf=is_place)
    plain = [leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    for leaf in plain:
        if not isinstance(leaf, jax.sharding.Sharding):
            raise ReshardError(f"stream: {name} has {leaf!r}, which is a {type(leaf).__name__}, not a sharding.")
    if not plain:
        raise ReshardError(f"stream: {name} has no sharding.")
    return jax.tree.unflatten(treedef, plain), ranks_of_shardings(plain)


def ranks_of_shardings(shardings: Iterable[jax.sharding.Sharding]) -> tuple[int, ...]:
    """Returns the processes of the devices of shardings."""
    devices = itertools.chain.from_iterable(sharding.device_set for sharding in set(shardings))
    return tuple(sorted({device.process_index for device in devices}))


@compat.api_boundary
def stream(
    source_shardings: PyTree,
    target_shardings: PyTree,
    *,
    threshold: int | str | None = None,
    names: Names | None = None,
) -> Stream:
    """Opens a stream: versions of a tree flow from the source shardings to the target shardings, each whole.

    Every process with a device in either of them calls it, with the same arguments. A process receives each byte that
    it lacks once, in parts with checksums, from a copy in the memory of a sender's host.

    Args:
        source_shardings: where the sent tree is: a pytree of shardings (`MpmdSharding` or JAX's), or a prefix of one.
        target_shardings: where it goes, likewise. A leaf may be a `jax.ShapeDtypeStruct` with a sharding: floats are
            cast to its dtype before they are sent. Pass the whole tree if `names` is given, or if the sent tree has
            nodes of your own classes, named tuples (like Optax's states) or dicts with numbers as keys.
        threshold: bytes that are read from a sender at once, also as text (`"64MiB"`); the default is 16 MiB.
        names: how the sent tensors become the received ones: a mapping as for checkpoints, by name, as a file, or its
            content as a dict. None: by their names.

    Raises:
        ReshardError: something is not a sharding or a mapping, or processes call it with different arguments.

    Examples:
        >>> import jax, jax.numpy as jnp, reshard
        >>> here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> weights = reshard.stream(here, {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16, sharding=here)})
        >>> weights.send({"w": jax.device_put(jnp.ones(2), here)}, version=0)
        >>> tree, version = weights.receive()
        >>> tree["w"].dtype, version
        (dtype(bfloat16), 0)
    """
    return Stream(source_shardings, target_shardings, threshold_nbytes(threshold), names)
