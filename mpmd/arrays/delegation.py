"""Makes an object that holds a `jax.Array` behave like that array: operators, conversions, methods."""

# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import TypeGuard

import jax
import numpy as np
from jax.typing import DTypeLike

# The held array answers these. The holder answers questions about the place of the array.
_METHODS = """
T __array_namespace__ __dlpack__ __dlpack_device__ all any argmax argmin argpartition argsort astype at byteswap
choose clip compress conj conjugate copy_to_host_async cumprod cumsum diagonal dot flat flatten format is_ready item mT
max mean min nonzero on_device_size_in_bytes platform prod ptp ravel real repeat reshape round searchsorted sort squeeze
std sum swapaxes take to_device tobytes tolist trace traceback transpose unsafe_buffer_pointer var view
"""
# They ask about memory or for values, for which a weak type makes no difference.
_OF_HELD = set("format item on_device_size_in_bytes platform tobytes tolist traceback unsafe_buffer_pointer".split())
_BETWEEN = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul
and rand or ror xor rxor lshift rlshift rshift rrshift eq ne lt le gt ge
"""


def _delegated(name: str) -> property:
    """Returns an attribute that reads the same attribute of the held array."""
    doc = f"As `jax.Array.{name}`, of what is held here."
    if name in _OF_HELD:
        return property(lambda self: getattr(self._held(), name), doc=doc)
    return property(lambda self: getattr(self._readable(), name), doc=doc)


def _unary(name: str, readable: str) -> Callable[["ReadableArray"], object]:
    """Returns an operator that applies to the array from the method `readable`."""

    def forward(self: "ReadableArray") -> object:
        return getattr(getattr(self, readable)(), name)()

    forward.__name__ = name
    return forward


def _binary(name: str) -> Callable[["ReadableArray", object], object]:
    """Returns an operator between the held array and another operand."""

    def forward(self: "ReadableArray", other: object) -> object:
        mine, other = self._operands(other)
        return getattr(mine, name)(other)

    forward.__name__ = name
    return forward


class ReadableArray(jax.Array):
    """Everything that `jnp` and numpy ask of an array, answered by the array that `_readable` returns.

    It is a `jax.Array` to `isinstance`: `jax.random` recognises keys by that, and Flax, Equinox and Optax recognise
    arrays by it. numpy leaves `numpy_array + x` to this class, as it does for `jax.Array`.
    """

    __slots__ = ()
    __array_priority__ = 100

    # Return the array to compute with, and one with all values in this process, or raise the user's error.
    _held: Callable[[], jax.Array]
    _readable: Callable[[], jax.Array]
    _host_readable: Callable[[], jax.Array | np.ndarray]
    _operands: Callable[[object], tuple[jax.Array, object]]  # both sides of an operator with something else

    def __jax_array__(self) -> jax.Array:
        return self._readable()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self._host_readable())
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"{self!r} cannot become {np.dtype(dtype)} without a copy.")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def imag(self) -> jax.Array:
        """Like `jax.Array.imag`, which on Explicit axes needs a mesh that is set to make the zeros of a real array."""
        x = self._readable()
        return x.imag if np.issubdtype(x.dtype, np.complexfloating) else jax.numpy.zeros_like(x)

    def __setitem__(self, index: object, value: object) -> None:
        self._readable()[index] = value  # raises JAX's error, with its remedy

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __contains__(self, item: object) -> bool:
        return item in self._readable()  # pyright: ignore[reportOperatorIssue]

    def __round__(self, ndigits: int | None = None) -> jax.Array:
        return self._readable().__round__(ndigits)

    def __format__(self, spec: str) -> str:
        return format(self._host_readable(), spec) if spec else str(self)

    __hash__ = None  # as for jax.Array: == is elementwise


def is_plain(x: object) -> TypeGuard[jax.Array]:
    """Returns whether it is one of JAX's own arrays; `isinstance` also takes an MpmdArray for a `jax.Array`."""
    return isinstance(x, jax.Array) and not isinstance(x, ReadableArray)


for _name in _METHODS.split():
    setattr(ReadableArray, _name, _delegated(_name))
for _name in ("__neg__", "__pos__", "__abs__", "__invert__"):
    setattr(ReadableArray, _name, _unary(_name, "_readable"))
for _name in ("__bool__", "__int__", "__float__", "__complex__", "__index__"):
    setattr(ReadableArray, _name, _unary(_name, "_host_readable"))
for _name in _BETWEEN.split():
    setattr(ReadableArray, f"__{_name}__", _binary(f"__{_name}__"))
