"""Counts the operations and bytes of a program in its equations, for devices whose compiler reports nothing.

Products and convolutions count two operations for each multiply-add, everything else one for each element that it
makes or reduces. Bytes are those of large operations and of the program's own arguments and results: elementwise work
between them is taken to be fused into them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from mpmd import _jax_compat as compat
from mpmd.partition import equations


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations and bytes of a program, over all devices of its group.

    Attributes:
      products: operations of matrix products and convolutions, which matrix units do.
      other: all other operations.
      nbytes: read from and written to device memory.
      float32: the part of `products` whose operands are float32 or wider.
      recomputed: the part of `products` that `jax.checkpoint` does a second time, for the backward pass.
    """

    products: float = 0.0
    other: float = 0.0
    nbytes: float = 0.0
    float32: float = 0.0
    recomputed: float = 0.0

    @property
    def flops(self) -> float:
        """All operations."""
        return self.products + self.other

    def __add__(self, other: "Work") -> "Work":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))

    def times(self, count: float) -> "Work":
        """This work, done `count` times."""
        return Work(*(x * count for x in dataclasses.astuple(self)))


def work_of(jaxpr: compat.Jaxpr) -> Work:
    """The work of a whole program."""
    atoms = [*jaxpr.invars, *jaxpr.outvars]
    edges = sum(equations.nbytes(v.aval) for v in equations.variables(atoms))
    return _inner(jaxpr) + Work(nbytes=edges)


def _inner(jaxpr: compat.Jaxpr) -> Work:
    return sum(map(work_of_equation, jaxpr.eqns), Work())


def work_of_equation(eqn: compat.JaxprEqn) -> Work:
    """The work of one equation, with what it holds."""
    work = _work_of(eqn)
    return dataclasses.replace(work, recomputed=work.products) if compat.is_recomputed(eqn) else work


def _work_of(eqn: compat.JaxprEqn) -> Work:
    name = eqn.primitive.name
    if (count := _PRODUCTS.get(name)) is not None:
        products = count(eqn)
        wide = max(v.aval.dtype.itemsize for v in eqn.invars[:2]) >= 4
        return Work(products=products, nbytes=_moved(eqn), float32=products if wide else 0.0)
    inner = [_inner(jaxpr) for jaxpr in compat.jaxprs_in(eqn.params)]
    if inner:
        if name == "cond":
            return max(inner, key=lambda work: work.flops)
        total = sum(inner, Work())
        times = eqn.params["length"] if name == "scan" else 1
        if name == "shard_map":  # its body is written for one device
            times = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
        return total.times(times)
    if equations.is_view(eqn):
        return Work()
    made = sum(equations.size(v.aval) for v in eqn.outvars)
    if name.startswith(("reduce", "arg", "cum")):
        made = max(made, sum(equations.size(v.aval) for v in eqn.invars))
    return Work(other=made, nbytes=_moved(eqn) if equations.is_heavy(eqn) or name == "gather" else 0.0)


def _moved(eqn: compat.JaxprEqn) -> float:
    return sum(equations.nbytes(v.aval) for v in (*equations.variables(eqn.invars), *eqn.outvars))


def _dot_general(eqn: compat.JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * equations.size(eqn.outvars[0].aval) * math.prod(left[axis] for axis in contracted)


def _ragged_dot(eqn: compat.JaxprEqn) -> float:
    rows, depth = eqn.invars[0].aval.shape[-2:]
    return 2.0 * rows * depth * eqn.invars[1].aval.shape[-1]


def _convolution(eqn: compat.JaxprEqn) -> float:
    kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    features = kernel.shape[numbers.rhs_spec[0]]
    return 2.0 * equations.size(eqn.outvars[0].aval) * equations.size(kernel) / features


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot_general,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
