"""How an array is cut to go from one sharding to another: plans alone, nothing moves."""

import collections
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.arrays.boxes import Box, device_boxes
from mpmd.run.pieces import pieces


class Device:
    """As much of a device as plans look at."""

    platform = "cpu"
    device_kind = "cpu"
    client = None

    def __init__(self, number: int, process: int):
        self.id, self.process_index = number, process

    def __repr__(self):
        return f"device {self.id} of process {self.process_index}"


DEVICES = [Device(i, i // 2) for i in range(8)]
MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (4, 2)]


@st.composite
def layouts(draw, shape):
    """A sharding that fits the shape, on some of the devices in some order."""
    rows, columns = draw(st.sampled_from(MESHES))
    chosen = draw(st.permutations(DEVICES))[: rows * columns]
    mesh = Mesh(np.array(chosen).reshape(rows, columns), ("a", "b"))
    spec, used = [], set()
    for size in shape:
        entry = draw(st.sampled_from([None, "a", "b", ("a", "b")]))
        names = {entry} if isinstance(entry, str) else set(entry or ())
        if names & used or size % int(np.prod([mesh.shape[name] for name in names])):
            entry, names = None, set()
        used |= names
        spec.append(entry)
    return NamedSharding(mesh, PartitionSpec(*spec))


@st.composite
def moves(draw):
    shape = draw(st.sampled_from([(), (12,), (12, 4), (4, 12, 3), (0, 4)]))
    return draw(layouts(shape)), draw(layouts(shape)), shape


@settings(max_examples=200, deadline=None)
@given(moves())
def test_pieces_are_each_target_shard_once(move):
    source, target, shape = move
    found = pieces(source, target, shape)
    held, wanted = device_boxes(source, shape), device_boxes(target, shape)
    assert [p.number for p in found] == list(range(len(found)))
    for device, box in wanted.items():
        boxes = [p.box for p in found if p.target == device]
        assert not box.without(boxes)
        assert sum(b.size for b in boxes) == box.size
        assert all(not (a & b).size for a, b in itertools.combinations(boxes, 2))
    assert all(p.box in held[p.source] and p.box.size for p in found)


@settings(max_examples=200, deadline=None)
@given(moves())
def test_pieces_come_from_the_same_device_or_process_where_they_can(move):
    source, target, shape = move
    held = device_boxes(source, shape)
    for p in pieces(source, target, shape):
        holders = [d for d, box in held.items() if p.box in box]
        assert p.source == p.target or p.target not in holders
        own_process = any(d.process_index == p.target.process_index for d in holders)
        assert (p.source.process_index == p.target.process_index) == own_process


@settings(max_examples=50, deadline=None)
@given(moves())
def test_every_process_comes_to_the_same_pieces(move):
    source, target, shape = move
    again = NamedSharding(Mesh(source.mesh.devices.copy(), source.mesh.axis_names), source.spec)
    assert pieces(source, target, shape) == pieces(again, target, shape)


def test_replicas_take_turns_as_senders():
    """Four replicas feed four devices elsewhere: each sends once."""
    source = NamedSharding(Mesh(np.array(DEVICES[:4]), ("a",)), PartitionSpec())
    target = NamedSharding(Mesh(np.array(DEVICES[4:]), ("a",)), PartitionSpec())
    senders = collections.Counter(p.source for p in pieces(source, target, (6,)))
    assert set(senders.values()) == {1}
    assert len(senders) == 4


def test_rows_go_to_columns_in_quarters():
    source = NamedSharding(Mesh(np.array(DEVICES[:2]), ("a",)), PartitionSpec("a"))
    target = NamedSharding(Mesh(np.array(DEVICES[2:4]), ("a",)), PartitionSpec(None, "a"))
    assert [(p.source.id, p.target.id, p.box) for p in pieces(source, target, (4, 4))] == [
        (0, 2, Box((0, 0), (2, 2))),
        (1, 2, Box((2, 0), (4, 2))),
        (0, 3, Box((0, 2), (2, 4))),
        (1, 3, Box((2, 2), (4, 4))),
    ]


def test_two_devices_feed_three():
    source = NamedSharding(Mesh(np.array(DEVICES[:2]), ("a",)), PartitionSpec("a"))
    target = NamedSharding(Mesh(np.array(DEVICES[2:5]), ("a",)), PartitionSpec("a"))
    assert [(p.source.id, p.target.id, p.box) for p in pieces(source, target, (6,))] == [
        (0, 2, Box((0,), (2,))),
        (0, 3, Box((2,), (3,))),
        (1, 3, Box((3,), (4,))),
        (1, 4, Box((4,), (6,))),
    ]
