"""Typed PRNG keys as the integers that they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.arrays import keys


@pytest.fixture
def sharding():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data")), "stage")
    return mpmd.MpmdSharding(mesh, {0, 1}, P("data"))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_shape_dtype_and_implementation_of_keys_are_those_of_jax(impl):
    x = jax.random.split(jax.random.key(1, impl=impl), 4)
    data = jax.random.key_data(x)
    assert keys.is_key(x.dtype) and not keys.is_key(data.dtype) and not keys.is_key(jnp.float32)
    assert (keys.data_shape(x.shape, x.dtype), keys.data_dtype(x.dtype)) == (data.shape, data.dtype)
    assert keys.shape_of_data(data.shape, x.dtype) == x.shape
    assert keys.implementation(x.dtype) == impl and keys.implementation(data.dtype) is None
    assert (keys.from_data(keys.to_data(x), x.dtype) == x).all()
    assert not np.any(keys.to_data(keys.zeros((3,), x.dtype)))


def test_keys_in_groups_become_integers_in_the_same_places_and_keys_again(sharding):
    x = jax.random.split(jax.random.key(1), 4)
    arrays = {group: jax.device_put(x, sharding.group_sharding(group)) for group in (0, 1)}
    in_groups = mpmd.MpmdArray(arrays, sharding)
    data = keys.to_data(in_groups)
    assert data.shape == (4, 2) and data.mpmd_sharding.spec == P("data", None)
    for group in (0, 1):
        np.testing.assert_array_equal(data.array_in(group), jax.random.key_data(x))
    again = keys.from_data(data, x.dtype, sharding)
    assert (again.dtype, again.shape, again.mpmd_sharding) == (x.dtype, x.shape, sharding)
    assert (again.array_in(1) == arrays[1]).all()


def test_other_arrays_are_left_as_they_are(sharding):
    x = jnp.arange(4.0)
    assert keys.to_data(x) is x and keys.from_data(x, x.dtype) is x
    assert keys.data_sharding(sharding, (4,), x.dtype) is sharding
    assert keys.data_shape((4,), x.dtype) == keys.shape_of_data((4,), x.dtype) == (4,)
