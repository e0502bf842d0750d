"""What JAX does not document about array types of one's own.

`register_array_type` stands on `core.pytype_aval_mappings`, `core.ShapedArray`, `core.update_aval_with_sharding`
and `dtypes.register_canonicalize_value_handler`. Without it arrays of the type still work wherever JAX reads
`__jax_array__` (`jnp.asarray`, `jnp.where`, operators), but not as arguments of jitted functions.
"""

from collections.abc import Callable
from typing import Any

from jax._src import core, dtypes


def register_array_type(cls: type, read: Callable[[Any], Any]) -> None:
    """Lets jitted functions take objects of `cls`; `read(x)` gives the `jax.Array` to compute with."""
    core.pytype_aval_mappings[cls] = _aval
    dtypes.register_canonicalize_value_handler(cls, read)


def _aval(x: Any) -> core.ShapedArray:
    return core.update_aval_with_sharding(core.ShapedArray(x.shape, x.dtype, x.weak_type), x.sharding)
