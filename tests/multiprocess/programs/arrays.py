"""What an MpmdArray says of itself in each process, whichever groups the process has.

arrays.py        2 processes of 4 devices; prints, as JSON, what has to be alike in every process
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.job import joining
from mpmd.job.wires import NUM_NUMBERS

VALUE = np.arange(8, dtype=np.float32).reshape(4, 2)


def put(mesh, ids, spec, split=None, memory_kind=None):
    sharding = mpmd.MpmdSharding(mesh, ids, spec, split=split, memory_kind=memory_kind)
    arrays = [
        jax.device_put(VALUE[part.offset[0] :][: part.shape[0]], sharding.group_sharding(part.group))
        for part in sorted(sharding.local_parts(VALUE.shape), key=lambda part: -part.group)
    ]
    return mpmd.MpmdArray(arrays, sharding, VALUE.shape, VALUE.dtype)


def said(x) -> list:
    """What an array says; and whether it fits the `jax.Array` on the same devices, which both processes make."""
    everywhere = jax.make_array_from_callback(VALUE.shape, x.sharding, lambda index: VALUE[index], dtype=VALUE.dtype)
    theirs = {s.device: s for s in everywhere.global_shards}
    assert [s.device for s in x.addressable_shards] == [s.device for s in everywhere.addressable_shards]
    assert {s.device for s in x.global_shards} == set(theirs)
    for ours in x.global_shards:
        wanted = theirs[ours.device]
        assert (ours.index, ours.replica_id, ours.data is None) == (
            wanted.index,
            wanted.replica_id,
            wanted.data is None,
        )
        if wanted.data is not None:
            np.testing.assert_array_equal(ours.data, wanted.data)
    assert x.is_partially_addressable == bool(x.addressable_shards) == (x.to_mpmd_local_array is not None)
    assert x.is_fully_addressable == everywhere.is_fully_addressable
    shards = [(s.device.id, str(s.index), s.replica_id, s.group) for s in x.global_shards]
    return [str(x.sharding), sorted(d.id for d in x.devices()), shards, x.mpmd_idxs, x.is_mpmd_replicated]


def check_split(x):
    """Each process has its rows, and device_get brings all of them."""
    np.testing.assert_array_equal(mpmd.device_get({"x": x})["x"], VALUE)
    mine, theirs = ([1, 2], 0) if jax.process_index() == 0 else ([0, 3], 1)
    assert sorted(row for start, stop in x.pieces for row in range(start, stop)) == mine
    for row in mine:
        np.testing.assert_array_equal(x[row], VALUE[row])
    for read in (np.asarray, lambda x: x[theirs], lambda x: x + 1):
        try:
            read(x)
        except RuntimeError as error:
            assert "Call mpmd.device_get(x) in every process" in str(error)
        else:
            raise AssertionError("read of what is not here")


def main():
    mpmd.initialize()
    mesh = mpmd.MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
    if jax.process_index() == 0:  # as after half a million calls: the numbers of transfers begin again among these
        joining.current().store.key_value_increment("mpmd/brief numbers", NUM_NUMBERS - 2)
    alike = [said(put(mesh, ids, spec)) for ids in ({0}, {1, 2}, {0, 1, 3}, {3}) for spec in (P(), P("data"))]

    alike += [said(put(mesh, ids, P("stage"))) for ids in (range(4), {1, 2}, {2, 3})]
    check_split(put(mesh, {0, 3}, P(), split={3: ((0, 1), (3, 4)), 0: ((1, 3),)}))

    for spec in (P(), P("data")):  # in the memory of the host: of the first process, read by all, and sent by a step
        on_host = put(mesh, {0}, spec, memory_kind="pinned_host")
        np.testing.assert_array_equal(mpmd.device_get(on_host), VALUE)
        layouts = {"in_shardings": (on_host.mpmd_sharding,), "out_shardings": mpmd.MpmdSharding(mesh, 3, P("data"))}
        add = lambda x: jax.device_put(x, jax.memory.Space.Device) + 1  # noqa: E731
        np.testing.assert_array_equal(mpmd.device_get(mpmd.jit(add, mpmd_mesh=mesh, **layouts)(on_host)), VALUE + 1)

    # A loss that both processes have: each reads and computes with its own, without the other.
    loss = mpmd.jit(lambda x: jnp.sum(x), mpmd_mesh=mesh)(VALUE)
    assert float(loss) == float(jax.jit(lambda x: x * 2)(loss)) / 2 == 28.0
    assert "28.0" in str({"loss": loss})
    if jax.process_index() == 0:
        assert float(jnp.log(loss)) == float(np.log(np.float32(28)))

    elsewhere = put(mesh, {3 - 3 * jax.process_index()}, P())  # the other process's, alike in name alone
    try:
        serialization.to_bytes({"x": elsewhere})
    except RuntimeError as error:
        assert "Call mpmd.device_get(x) in every process" in str(error)
    else:
        raise AssertionError("to_bytes of what is not here")
    print(json.dumps(alike))


if __name__ == "__main__":
    main()
