"""Plans a reshard: which bytes stay, which move from where to where, in which rounds.

Planning is pure. It needs shapes, dtypes and shardings; no data, and no devices either (see `describe_mesh`).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.sharding import MpmdSharding
from mpmd.errors import ReshardError
from mpmd.pytrees import PyTree
from reshard.moving.rounds import Loads, Packer, Round
from reshard.moving.route import Places, Route, build
from reshard.moving.shards import Layout, cuts, layout, unit_shape
from reshard.places import HostMemory, Place, Placement
from reshard.sizes import threshold_nbytes
from reshard.trees import broadcast, fault_of_sharding, flatten, sharding_of
from scheduler.base.texts import counted, human, table, type_text

Described = jax.Array | np.ndarray | jax.ShapeDtypeStruct

# The most choices of replicas that arrays of one kind divide among them, to level the bytes that devices send.
_MAX_VARIANTS = 8


@dataclasses.dataclass(frozen=True)
class MovedLeaf:
    """One array to be moved, by its description. Typed keys are described by their key data."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: Placement
    target: Placement

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class PlannedArray:
    """An array and its route. `scale` is the number of elements of the array for one of the route, on each axis."""

    leaf: MovedLeaf
    route: Route
    scale: tuple[int, ...]

    @functools.cached_property
    def unit_bytes(self) -> int:
        """Bytes of the array for one element of the route."""
        return math.prod(self.scale) * self.leaf.dtype.itemsize


class Traffic(NamedTuple):
    """Bytes that reach the targets, by how far they travel."""

    stays: int = 0
    within_process: int = 0
    within_host: int = 0
    between_hosts: int = 0

    @property
    def moved(self) -> int:
        return self.within_process + self.within_host + self.between_hosts


@dataclasses.dataclass(frozen=True, repr=False)
class ReshardPlan:
    """A checked plan; `str()` is its summary and `explain()` adds a line for each array.

    Attributes:
        arrays: the moved arrays, with their routes.
        rounds: the order of the moves; see `reshard.moving.rounds`.
        threshold: the bound on working memory for each device, in bytes; None is no bound.
        peak_working_bytes: the most working memory that any device needs beyond source and target.
        bytes_moved: bytes that go from one device to another.
        bytes_lower_bound: bytes that are missing at the targets; no plan can move fewer.
        bytes_between_hosts: the part of `bytes_moved` that crosses hosts.
        bytes_between_hosts_lower_bound: bytes that are missing at the targets' hosts.
        sent, received: bytes by device.
    """

    arrays: tuple[PlannedArray, ...]
    rounds: tuple[Round, ...]
    threshold: int | None
    peak_working_bytes: int
    traffic: Traffic
    traffic_of: tuple[Traffic, ...]
    bytes_lower_bound: int
    bytes_between_hosts_lower_bound: int
    sent: dict[Place, int]
    received: dict[Place, int]

    @property
    def bytes_moved(self) -> int:
        return self.traffic.moved

    @property
    def bytes_between_hosts(self) -> int:
        return self.traffic.between_hosts

    def __str__(self) -> str:
        total = sum(a.leaf.nbytes for a in self.arrays)
        t, bound_between_hosts = self.traffic, self.bytes_between_hosts_lower_bound
        threshold = "none" if self.threshold is None else human(self.threshold)
        arrays, rounds = counted(len(self.arrays), "array"), counted(len(self.rounds), "round")
        return "\n".join(
            [
                f"reshard of {arrays}, {human(total)}, in {rounds}",
                f"  stays on its device     {human(t.stays)}",
                f"  moves                   {human(t.moved)} (lower bound {human(self.bytes_lower_bound)})",
                f"    inside a process      {human(t.within_process)}",
                f"    between processes     {human(t.within_host)}",
                f"    between hosts         {human(t.between_hosts)} (lower bound {human(bound_between_hosts)})",
                f"  busiest sender          {_busiest(self.sent)}",
                f"  busiest receiver        {_busiest(self.received)}",
                f"  peak working memory     {human(self.peak_working_bytes)} a device (threshold {threshold})",
            ]
        )

    __repr__ = __str__

    def explain(self, max_arrays: int | None = None) -> str:
        """Returns the summary, and for each array (the largest `max_arrays` if given) the bytes that stay and move."""
        order = sorted(range(len(self.arrays)), key=lambda i: -self.arrays[i].leaf.nbytes)
        rows: list[tuple[str, ...]] = [("array", "type", "from", "to", "stays", "process", "host", "hosts")]
        for i in order[:max_arrays]:
            leaf, t = self.arrays[i].leaf, self.traffic_of[i]
            kind = type_text(leaf.shape, leaf.dtype)
            moved = (t.stays, t.within_process, t.within_host, t.between_hosts)
            rows.append((leaf.path or ".", kind, _where(leaf.source), _where(leaf.target), *map(human, moved)))
        lines = table(rows, "<" * len(rows[0]))
        if left_out := len(order) - (len(rows) - 1):
            lines.append(f"… and {counted(left_out, 'smaller array')}")
        return "\n".join([str(self), "", *lines])


@compat.api_boundary
def plan(
    arrays_or_avals: PyTree, from_shardings: PyTree, to_shardings: PyTree, threshold: int | str | None = None
) -> ReshardPlan:
    """Plans a reshard without touching data.

    Args:
        arrays_or_avals: a pytree of arrays or of `jax.ShapeDtypeStruct`.
        from_shardings: where they are: a pytree of shardings (of JAX, `MpmdSharding`, `HostMemory`) or a prefix of
            one; None takes the arrays' own.
        to_shardings: where they go, likewise.
        threshold: bytes of working memory for each device, also as text (`"64MiB"`); None is no bound, 0 the need of
            the largest array alone.

    Returns:
        The plan; its `bytes_moved` equals its `bytes_lower_bound`. Planning takes about a millisecond for each pair of
        shardings on a thousand devices, and some microseconds for each array.

    Raises:
        ReshardError: names every array that cannot be moved as asked.

    Examples:
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> from reshard import describe_mesh, plan
        >>> mesh = describe_mesh({"stage": 4, "data": 2}, devices_per_host=2)
        >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
        >>> p = plan({"w": w}, NamedSharding(mesh, P("data")), NamedSharding(mesh, P("stage")))
        >>> p.bytes_moved == p.bytes_lower_bound
        True
    """
    paths, avals, _ = flatten(arrays_or_avals)
    avals = [as_jax_would(aval) for aval in avals]
    raise_faults(
        [
            f"{path or 'the array'}: is a {type(aval).__name__}, not an array"
            for path, aval in zip(paths, avals, strict=True)
            if not hasattr(aval, "shape")
        ]
    )
    if from_shardings is None:
        sources = [place_of(aval) for aval in avals]
    else:
        sources = broadcast(from_shardings, arrays_or_avals, "from_shardings")
    targets = broadcast(to_shardings, arrays_or_avals, "to_shardings")
    return plan_leaves(describe(paths, avals, sources, targets), threshold_nbytes(threshold))


def as_jax_would(x: Any) -> Any:
    """Converts host values to arrays of the dtype that they will have on devices (float64 is float32 unless enabled).
    Raises a ReshardError if an int does not fit.
    """
    if not isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)):
        return x
    array = np.asarray(x)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if type(x) is int and np.issubdtype(dtype, np.integer) and array.astype(dtype) != array:
        raise ReshardError(f"the int {x} is too large for {dtype}. Enable jax_enable_x64, or pass a float.")
    return array.astype(dtype, copy=False)


def place_of(x: Described) -> Placement:
    """Returns the place of an array; a numpy array is on this host."""
    return HostMemory(jax.process_index()) if isinstance(x, (np.ndarray, np.generic)) else sharding_of(x)


def describe(
    paths: Sequence[str], avals: Sequence[Described], sources: Sequence[Placement], targets: Sequence[Placement]
) -> list[MovedLeaf]:
    """Describes the arrays for the planner. A ReshardError names every array that does not fit its sharding."""
    leaves: list[MovedLeaf] = []
    faults: list[str] = []
    for path, aval, source, target in zip(paths, avals, sources, targets, strict=True):
        shape, dtype = tuple(aval.shape), aval.dtype
        for where, sharding in (("from", source), ("to", target)):
            if (fault := fault_of_sharding(sharding, shape)) is not None:
                faults.append(f"{path or 'the array'}: {where}: {fault}")
        source, target = (keys.data_sharding(s, shape, dtype) for s in (source, target))
        leaves.append(MovedLeaf(path, keys.data_shape(shape, dtype), keys.data_dtype(dtype), source, target))
    raise_faults(faults)
    return leaves


def raise_faults(faults: Sequence[str]) -> None:
    """Raises one error for all faults; does nothing if there are none."""
    if faults:
        raise ReshardError(
            "these arrays cannot be moved as asked; nothing was moved:\n" + "\n".join(f"  {fault}" for fault in faults)
        )


def plan_leaves(leaves: Sequence[MovedLeaf], threshold: int | None) -> ReshardPlan:
    """Plans the moves of described arrays: routes first, then rounds, the largest arrays of each group first."""
    if threshold == 0:  # one array at a time
        threshold = max((leaf.nbytes for leaf in leaves), default=1)
    kinds = _kinds(leaves)
    places = Places(layout for *both, _ in kinds for layout in both)
    routes: list[Route] = [None] * len(leaves)  # pyright: ignore[reportAssignmentType]
    scales: list[tuple[int, ...]] = [()] * len(leaves)
    # Arrays without a choice first, so that the others can balance what these must send.
    for source, target, unit in sorted(kinds, key=lambda kind: _num_replicas(kind[0])):
        members = sorted(kinds[source, target, unit], key=lambda i: -leaves[i].nbytes)
        for i in members:
            scales[i] = tuple(n // u if u else 1 for n, u in zip(leaves[i].shape, unit, strict=True))
        num_variants = min(len(members), _num_replicas(source), _MAX_VARIANTS)
        for variant in range(num_variants):
            mine = members[variant::num_variants]
            weight = sum(math.prod(scales[i]) * leaves[i].dtype.itemsize for i in mine)
            route = build(source, target, places, weight)
            for i in mine:
                routes[i] = route
    arrays = [PlannedArray(*parts) for parts in zip(leaves, routes, scales, strict=True)]
    return _packed(arrays, places, threshold)


def _num_replicas(source: Layout) -> int:
    return sum(grid.shards.shape[1] for grid in source.grids if all(starts[0] == 0 for starts in grid.starts))


def _kinds(leaves: Sequence[MovedLeaf]) -> dict[tuple[Layout, Layout, tuple[int, ...]], list[int]]:
    """Groups the arrays by pair of layouts; arrays without elements have no pieces and share empty layouts."""
    kinds: dict[tuple[Layout, Layout, tuple[int, ...]], list[int]] = {}
    for i, leaf in enumerate(leaves):
        unit = unit_shape(leaf.shape, cuts(leaf.source, leaf.shape), cuts(leaf.target, leaf.shape))
        kinds.setdefault((layout(leaf.source, unit), layout(leaf.target, unit), unit), []).append(i)
    return kinds


def _packed(arrays: Sequence[PlannedArray], places: Places, threshold: int | None) -> ReshardPlan:
    num_places = len(places.devices)
    if threshold is not None:
        raise_faults(
            [
                f"{a.leaf.path or 'the array'}: one element has {a.leaf.dtype.itemsize} bytes, more than {threshold=}"
                for a in arrays
                if a.leaf.dtype.itemsize > threshold and not (a.route.whole_source & a.route.whole_target).all()
            ]
        )
    packer = Packer(num_places, threshold)
    loads: dict[Route, Loads] = {}
    for i in _order(arrays):
        route = arrays[i].route
        if route not in loads:
            loads[route] = Loads(route, num_places)
        packer.add(i, loads[route], route, arrays[i].scale, arrays[i].leaf.dtype.itemsize)

    taken: dict[Route, int] = {}
    for array in arrays:
        taken[array.route] = taken.get(array.route, 0) + array.unit_bytes
    of_route = {route: _traffic(route, places) for route in taken}
    traffic_of = [Traffic(*[n * array.unit_bytes for n in of_route[array.route]]) for array in arrays]
    sent, received = np.zeros(num_places), np.zeros(num_places)
    for route, nbytes in taken.items():
        elements = route.elements * route.moves * float(nbytes)
        sent += np.bincount(route.sender_place, elements, num_places)
        received += np.bincount(route.receiver_place, elements, num_places)
    return ReshardPlan(
        arrays=tuple(arrays),
        rounds=packer.rounds,
        threshold=threshold,
        peak_working_bytes=packer.peak,
        traffic=Traffic(*map(sum, zip(*traffic_of, strict=True))),
        traffic_of=tuple(traffic_of),
        bytes_lower_bound=sum(route.missing * nbytes for route, nbytes in taken.items()),
        bytes_between_hosts_lower_bound=sum(route.missing_on_hosts * nbytes for route, nbytes in taken.items()),
        sent={device: int(n) for device, n in zip(places.devices, sent, strict=True)},
        received={device: int(n) for device, n in zip(places.devices, received, strict=True)},
    )


def _order(arrays: Sequence[PlannedArray]) -> list[int]:
    """Returns the order of the arrays: largest first, one of each target group (or source group) in turn."""
    by_group: dict[int, list[int]] = {}
    for i, array in enumerate(arrays):
        both = (array.leaf.target, array.leaf.source)
        group = next((s.groups[0] for s in both if isinstance(s, MpmdSharding)), 0)
        by_group.setdefault(group, []).append(i)
    queues = [sorted(members, key=lambda i: arrays[i].leaf.nbytes) for _, members in sorted(by_group.items())]
    order: list[int] = []
    while queues:
        order += [queue.pop() for queue in queues]
        queues = [queue for queue in queues if queue]
    return order


def _traffic(route: Route, places: Places) -> Traffic:
    sender, receiver = route.sender_place, route.receiver_place
    process = places.process[sender] == places.process[receiver]
    host = places.host[sender] == places.host[receiver]

    def total(which: np.ndarray) -> int:
        return int(route.elements[which].sum())

    kept = sum(route.target.boxes[t].size for _, t in route.kept)
    return Traffic(
        stays=kept + total(~route.moves),
        within_process=total(route.moves & process & host),
        within_host=total(route.moves & ~process & host),
        between_hosts=total(route.moves & ~host),
    )


def _where(sharding: Placement) -> str:
    if isinstance(sharding, MpmdSharding):
        groups = ",".join(map(str, sharding.groups))
        split = sharding.split_summary and f" {sharding.split_summary}"
        return f"group {groups} {sharding.spec}{split}"
    if isinstance(sharding, jax.sharding.NamedSharding):
        return str(sharding.spec)
    return "host" if isinstance(sharding, HostMemory) else type(sharding).__name__


def _busiest(by_device: dict[Place, int]) -> str:
    if not any(by_device.values()):
        return "none"
    device = max(by_device, key=lambda d: by_device[d])
    busy = [n for n in by_device.values() if n]
    return f"{human(by_device[device])}, {device} (average of {len(busy)}: {human(sum(busy) // len(busy))})"
