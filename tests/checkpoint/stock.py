"""Stock Orbax in a process that never imports this library: `python stock.py WHAT FOLDER [ZARR3]`."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

try:
    from orbax.checkpoint.experimental import v1
except ImportError:  # an older release
    v1 = None
from jax.sharding import NamedSharding, PartitionSpec


def check_on_one_device_and_on_a_mesh(folder: Path) -> None:
    expected = list(np.load(folder / "expected.npz").values())
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder / "state")
    check(found, expected)
    meta = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    for place in (
        lambda shape: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        lambda shape: NamedSharding(mesh, PartitionSpec(*["x" if n % 2 == 0 else None for n in shape[:1]])),
        lambda shape: NamedSharding(mesh, PartitionSpec()),
    ):

        def target(x, place=place):
            if isinstance(x, ocp.metadata.ScalarMetadata):
                return x.dtype.type(0).item()
            if x.dtype == np.int64:  # a numpy array, which stays one
                return jax.ShapeDtypeStruct(x.shape, x.dtype)
            shape = () if x.dtype == np.uint32 else x.shape  # the data of a key cannot be sharded
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(shape))

        like = jax.tree.map(target, meta, is_leaf=lambda x: isinstance(x, ocp.metadata.Metadata))
        with ocp.StandardCheckpointer() as checkpointer:
            check(checkpointer.restore(folder / "state", like), expected)
        if v1 is not None:
            path = folder / "saved" if (folder / "saved").exists() else folder / "state"
            check(v1.load(path, jax.tree.map(as_numpy, like)), expected)


def as_numpy(x):
    """What describes a numpy array to Orbax's v1."""
    return np.empty(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None else x


def check(tree, expected) -> None:
    leaves = jax.tree.leaves(tree)
    assert len(leaves) == len(expected)
    for leaf, value in zip(leaves, expected, strict=True):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        if value.dtype.kind == "V":  # bfloat16, which numpy's files do not know
            value = value.view(leaf.dtype)
        np.testing.assert_array_equal(leaf, value)


def save_sharded(folder: Path, zarr3: str) -> None:
    """The tree of `layouts.random_values`, each array sharded over the devices where one of its axes allows."""
    leaves = list(np.load(folder / "expected.npz").values())
    mesh = jax.make_mesh((4,), ("x",))

    def place(x):
        axis = next((i for i, n in enumerate(x.shape) if n % 4 == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "x")
        return jax.device_put(x, NamedSharding(mesh, spec))

    layers, (split, stack, step, tied) = leaves[:8], leaves[8:]
    tree = {
        "layers": [{"b": b, "w": w} for b, w in zip(layers[::2], layers[1::2], strict=True)],
        "split": split,
        "stack": stack,
        "step": step,
        "tied": tied,
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=bool(int(zarr3)))) as checkpointer:
        checkpointer.save(folder / "state", args=ocp.args.PyTreeSave(jax.tree.map(place, tree)))


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    {"check_on_one_device_and_on_a_mesh": check_on_one_device_and_on_a_mesh, "save_sharded": save_sharded}[what](
        Path(where), *rest
    )
    assert not {"mpmd", "reshard"} & set(sys.modules)
    print("without this library")
