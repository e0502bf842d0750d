"""Versions between jobs: one publishes them at an address, any number of others subscribe, whenever they start.

Every process that publishes serves its own part. The process with the lowest rank listens at the address, and tells
a subscriber where the others are.
"""

from collections.abc import Sequence

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import ReshardError
from mpmd.job import joining
from mpmd.job.job import Job
from mpmd.pytrees import PyTree
from reshard.streams.receiving import Subscription
from reshard.streams.sending import Sender, check_arrays, checked_version
from reshard.streams.serving import FarShelf, ShelfServer
from reshard.streams.stream import ranks_of_shardings
from reshard.trees import broadcast, flatten, sharding_of

_EVERYWHERE = ("", "0.0.0.0", "::", "*")


# The senders of this process at each address, by name; they live as long as the process.
_published: dict[str, tuple[ShelfServer, dict[str, Sender]]] = {}


@compat.api_boundary
@compat.no_mesh()
def publish(name: str, tree: PyTree, version: int, *, address: str, token: str) -> None:
    """Publishes a version of a tree for other jobs; starts its copies to the memory of the host, and returns.

    The next step may be called at once, even if the arrays are donated to it. All processes of the job call it alike.
    Subscribers read from the copies and delay nobody; each subscriber that is reading may keep one more version in
    memory. Without the token a subscriber is refused, but the data is not encrypted.

    Args:
        name: the tree's name; an address may have several trees.
        tree: arrays on devices, of the same types and shardings in each call.
        version: 0 or more, each larger than the one before.
        address: `host:port`. Among processes that have a part of the tree, the lowest rank listens there, the others
            on a free port of the same interface or, on other hosts, of the interface that their own call names.
        token: a secret that the subscribers know, the same in all calls.

    Raises:
        ReshardError: there is no token, the address cannot be used, the tree is not a tree of arrays on devices, or the
            version is not newer.
    """
    host, port = _checked(address, token, "publish")
    if not isinstance(name, str) or not name or "/" in name:
        raise ReshardError(f"publish: {name=} is no name: a text without slashes.")
    paths, leaves, _ = flatten(tree)
    if not leaves:
        raise ReshardError(f"publish: {name}: the tree has no arrays.")
    check_arrays(f"publish: {name}", paths, leaves)
    version = checked_version(f"publish: {name}", version)
    ranks = ranks_of_shardings([s for s in map(sharding_of, leaves) if s is not None])
    job = joining.current()
    if _rank(job) not in ranks:
        return
    if address not in _published:
        _published[address] = _opened(host, 0 if _rank(job) != ranks[0] else port, token), {}
    server, senders = _published[address]
    if server.token != token:
        raise ReshardError(f"publish: {address} was opened with another token.")
    if name in senders and not senders[name].is_current:  # a replacement process does not know the old one
        old = senders.pop(name)
        old.close()
        old.shelf.forget()
    if name not in senders:
        senders[name] = _new_sender(name, job, ranks, server)
    senders[name].send(tree, None, version)


def _rank(job: Job | None) -> int:
    return 0 if job is None else job.rank


def _opened(host: str, port: int, token: str) -> ShelfServer:
    try:
        return ShelfServer(host, port, token)
    except OSError as error:
        raise ReshardError(
            f"publish: cannot listen at {host}:{port}: {error.strerror or error}. Name an interface of this host."
        ) from None


def _new_sender(name: str, job: Job | None, ranks: Sequence[int], server: ShelfServer) -> Sender:
    """Starts to serve versions of one more tree."""
    what, peers = f"publish: {name}", []
    if job is None or len(ranks) < 2:
        sender = Sender(what, job, ranks, "", keeps_all=False)
    else:
        number = job.new_number(ranks, f"publishing {name}")
        sender = Sender(what, job, ranks, f"mpmd/published/{number}/", keeps_all=False)
        if job.rank != ranks[0]:
            server.serve(name, sender.shelf)
        said = job.exchange(f"saying where {name} is published", server.address, ranks)
        peers = [said[rank] for rank in ranks]
    server.serve(name, sender.shelf, peers)
    return sender


@compat.api_boundary
def subscribe(address: str, like: PyTree, shardings: PyTree, *, token: str) -> Subscription:
    """Subscribes to a tree that another job publishes, of any size and layout.

    Args:
        address: the `host:port` of `publish`, or `host:port/name` where several trees are published.
        like: a pytree of `jax.ShapeDtypeStruct` or arrays with the names of the published ones; floats are cast to its
            dtypes before they are sent.
        shardings: the same tree of shardings, `MpmdSharding` or JAX's, or a prefix of it.
        token: the publisher's secret.

    Raises:
        ReshardError: there is no token, the address is not valid, or something is not a sharding.
    """
    placed = broadcast(shardings, like, "shardings")
    leaves, treedef = jax.tree.flatten(like)
    for x, sharding in zip(leaves, placed, strict=True):
        if not isinstance(sharding, jax.sharding.Sharding):
            raise ReshardError(f"subscribe: {sharding!r} is a {type(sharding).__name__}, not a sharding of devices.")
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ReshardError(
                f"subscribe: `like` has {x!r}, which is a {type(x).__name__}, not a jax.ShapeDtypeStruct."
            )
    places = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, placed, strict=True)]
    door, _, name = str(address).partition("/")
    host, port = _checked(door, token, "subscribe")

    def connect() -> list[FarShelf]:
        first = FarShelf(f"{host}:{port}", name or None, token)
        return [first, *[FarShelf(peer, first.name, token) for peer in first.peers[1:]]]

    to = jax.tree.unflatten(treedef, places)
    return Subscription(f"subscribe: {address}", joining.current(), ranks_of_shardings(placed), (), connect, to)


def _checked(address: object, token: object, name: str) -> tuple[str, int]:
    """Returns host and port of an address. Raises a ReshardError if it names no interface, or there is no token."""
    if not isinstance(token, str) or not token:
        raise ReshardError(
            f"{name}: there is no token: give a secret that both sides know, as secrets.token_hex(16) makes it."
        )
    host, _, port = str(address).rpartition(":")
    if host.strip("[]") in _EVERYWHERE or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ReshardError(
            f"{name}: {address=}: expected host:port with the interface of one host, as '10.0.0.3:5000'."
        )
    return host.strip("[]"), int(port)
