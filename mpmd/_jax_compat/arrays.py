"""Arrays and their types, and objects that JAX accepts as arrays."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax._src import config, core, dtypes, stages, tree_util
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.core import ShapedArray
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from mpmd._jax_compat.described import Device

A = TypeVar("A", bound=jax.Array)


def typed_as(x: jax.Array, sharding: NamedSharding) -> ShapedArray:
    """Returns the type of an array of this shape, dtype and sharding."""
    return core.update_aval_with_sharding(ShapedArray(x.shape, x.dtype, x.weak_type), sharding)


def register_array_type(
    cls: type[A], read: Callable[[A], jax.Array], sharding: Callable[[A], NamedSharding], mismatch: Callable[..., str]
) -> None:
    """Lets JAX's functions accept objects of `cls` as the `jax.Array` `read(x)`, with the sharding `sharding(x)`.

    `jax.jit` sees each as a tree of one leaf, an array of that sharding. If `jax.jit` finds its arguments on different
    devices, the error text is `mismatch(x, devices, other_devices)`. A release without these names ignores all this;
    there such objects still work wherever JAX reads `__jax_array__` (`jnp.asarray`, operators).
    """
    needed = {
        core: ("pytype_aval_mappings",),
        dtypes: ("register_canonicalize_value_handler",),
        tree_util: ("tracing_registry", "dispatch_registry"),
    }
    if not all(hasattr(module, name) for module, names in needed.items() for name in names):
        return

    class Argument:
        """An object as `jax.jit` sees it. `jax.lax.scan` looks at its shape, and `jax.jvp` at its dtype."""

        __slots__ = ("dtype", "ndim", "of", "shape", "sharding")

        def __init__(self, of: A):
            self.of, self.sharding = of, sharding(of)
            self.shape, self.dtype, self.ndim = of.shape, of.dtype, of.ndim

    def aval(argument: Argument) -> ShapedArray:
        error = sys.exc_info()[1]  # JAX asks for the types once more to report a mismatch
        if error is not None and isinstance(error, getattr(stages, "DeviceAssignmentMismatchError", ())):
            first, second = error.args[0]
            raise ValueError(mismatch(argument.of, first.da, second.da)) from None
        return typed_as(argument.of, argument.sharding)

    def flattened(x: A) -> tuple[tuple[jax.Array | Argument], None]:
        try:
            return (read(x),), None  # a function may return its argument as it is
        except RuntimeError:  # its values are elsewhere, or gone; the type may be all that is wanted
            return (Argument(x),), None

    core.pytype_aval_mappings[cls] = lambda x: typed_as(x, sharding(x))
    dtypes.register_canonicalize_value_handler(cls, read)
    core.pytype_aval_mappings[Argument] = aval
    dtypes.register_canonicalize_value_handler(Argument, lambda argument: read(argument.of))
    tree_util.tracing_registry.register_node(cls, flattened, lambda _, leaves: leaves[0])
    tree_util.dispatch_registry.register_node(cls, lambda x: ((read(x),), None), lambda _, leaves: leaves[0])


def explain_mismatches(mismatch: Callable[..., str | None]) -> None:
    """Replaces JAX's error for arguments on different devices by `mismatch(devices, other_devices)`, unless it is None.

    A release of JAX that writes this error elsewhere keeps its own.
    """
    original = getattr(stages, "_device_assignment_mismatch_error", None)
    if original is None:
        return

    @functools.wraps(original)
    def explained(function: object, places: Iterable[object], *args: object, **kwargs: object) -> str:
        found = [getattr(place, "da", None) for place in places]
        text = mismatch(*found) if len(found) == 2 and None not in found else None
        return text or original(function, places, *args, **kwargs)

    stages._device_assignment_mismatch_error = explained


def devices(sharding: NamedSharding) -> np.ndarray:
    """Returns the devices of a sharding on a concrete mesh."""
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh.devices


def shards(x: jax.Array) -> dict[Device, jax.Array]:
    """Returns an array's data on this process's devices. Faster than `addressable_shards`, which also finds indices."""
    arrays = getattr(x, "_arrays", None)
    if arrays is None:
        return {shard.device: shard.data for shard in x.addressable_shards}
    return {array.device: array for array in arrays}


def put(source: NamedSharding, target: NamedSharding) -> Callable[[jax.Array], jax.Array] | None:
    """Returns a function that copies arrays from one mesh to another of the same shape and axes; None if it cannot.

    The function does the same as `jax.device_put(x, target)`, at a fifth of the cost.
    """
    here, there = devices(source), devices(target)
    same = here.shape == there.shape and source.mesh.axis_names == target.mesh.axis_names and source.spec == target.spec
    copy = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    if not same or copy is None or source.memory_kind != target.memory_kind:
        return None
    lists, shardings = [xla_client.DeviceList(tuple(there.flat))], [target]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT]
    return lambda x: copy([x], lists, shardings, semantics)[0]


def row_major(x: jax.Array) -> jax.Array:
    """Returns the array with its axes in order in memory, as compiled programs take them: a user may give it another
    `jax.experimental.layout.Layout`.
    """
    layout = None if x.ndim < 2 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else x.format.layout  # pyright: ignore[reportAttributeAccessIssue]
    order = tuple(range(x.ndim))
    if layout is None or getattr(layout, "major_to_minor", order) == order:
        return x
    return jax.device_put(x, Format(Layout(order), x.sharding))


def put_on_one_device(xs: Sequence[np.ndarray], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Puts each host array on the one device of its mesh, like `jax.device_put` at a fifth of the cost."""
    with config.explicit_device_put_scope():
        return [
            pxla.batched_device_put(_type(x.shape, x.dtype, s), s, [x], [devices(s).flat[0]])
            for x, s in zip(xs, shardings, strict=True)
        ]


@functools.lru_cache(maxsize=4096)
def _type(shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding) -> ShapedArray:
    return core.update_aval_with_sharding(ShapedArray(shape, dtype), sharding)
