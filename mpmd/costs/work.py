"""Counts the operations and bytes of a program in its equations, for devices whose compiler reports nothing.

Products and convolutions count two operations for each multiply-add, everything else one for each element that it makes
or reduces. Bytes are counted for large operations, and for arguments and results of the program that no large operation
reads or writes: elementwise work is assumed to be fused with its neighbours.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.tracing.new_equations import Atom


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations and bytes of a program, over all devices of its group."""

    products: float = 0.0  # operations of matrix products and convolutions, on matrix units
    other: float = 0.0  # all other operations
    nbytes: float = 0.0  # read from and written to device memory
    float32: float = 0.0  # the part of `products` whose operands are float32 or wider
    recomputed: float = 0.0  # the part of `products` that `jax.checkpoint` repeats for the backward pass
    float8: float = 0.0  # the part of `products` whose operands both have eight bits
    attention: float = 0.0  # the part of `products` in cuDNN's attention, which has other work between its products
    between: float = 0.0  # the part of `nbytes` of no product or kernel. XLA's text is more exact (`traffic_of`)

    @property
    def flops(self) -> float:
        """All operations."""
        return self.products + self.other

    def __add__(self, other: "Work") -> "Work":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))

    def times(self, count: float) -> "Work":
        """Returns this work, repeated `count` times."""
        return Work(*(x * count for x in dataclasses.astuple(self)))


def work_of(jaxpr: compat.Jaxpr) -> Work:
    """Returns the work of a whole program."""
    return sum(works_of_program(jaxpr.eqns, [*jaxpr.invars, *jaxpr.outvars]), Work())


def works_of_program(eqns: Sequence[compat.JaxprEqn], edges: Sequence[Atom]) -> list[Work]:
    """Returns the work of each equation of a program, and the bytes of those `edges`, its arguments and results, that
    only elementwise work reads or writes.
    """
    moved = {v for eqn in eqns if _is_moving(eqn) for v in (*equations.variables(eqn.invars), *eqn.outvars)}
    nbytes = sum(equations.nbytes(v.aval) for v in equations.variables(edges) if v not in moved)
    return [*works(eqns), Work(nbytes=nbytes, between=nbytes)]


def works(eqns: Iterable[compat.JaxprEqn], fused: dict[Atom, int] | None = None) -> list[Work]:
    """Returns the work of each equation, and of the equations inside it, which a device does one after the other.

    Args:
      fused: the bytes read to make a value of elementwise work, which is not stored. Entries for `eqns` are added.
    """
    fused = {} if fused is None else fused
    found: list[Work] = []
    for eqn in eqns:
        if eqn.primitive.name == "pallas_call":
            own = [_work_of_kernel(eqn)]
        elif jaxprs := list(compat.jaxprs_in(eqn.params)):
            branches = [_works_inside(eqn, jaxpr, fused) for jaxpr in jaxprs]
            if eqn.primitive.name in ("cond", "custom_linear_solve"):  # one branch; the solver, not its transposes
                branches = [max(branches, key=lambda branch: sum(branch, Work()).flops)]
            own = [work.times(_times(eqn)) for branch in branches for work in branch]
        else:
            if not _is_moving(eqn):
                read = max((_read(v, fused) for v in equations.variables(eqn.invars)), default=0)
                fused.update((v, min(read, equations.nbytes(v.aval))) for v in eqn.outvars)
            own = [_work_of(eqn, fused)]
        if compat.is_recomputed(eqn):
            own = [dataclasses.replace(work, recomputed=work.products) for work in own]
        found += own
    return found


def _work_of_kernel(eqn: compat.JaxprEqn) -> Work:
    """Returns the work of a Pallas kernel: as its author states it; else its body for each step of the grid, and each
    operand and result once from or to device memory. Steps that the kernel skips count too; a grid of unknown size
    counts as one step.
    """
    steps, stated = compat.kernel_grid(eqn.params)
    body = sum(works(eqn.params["jaxpr"].eqns), Work()).times(steps)
    nbytes = sum(equations.nbytes(v.aval) for v in (*equations.variables(eqn.invars), *eqn.outvars))
    if stated is None:
        return dataclasses.replace(body, nbytes=nbytes)
    scale = stated[0] / body.products if body.products else 0.0
    if not scale:
        return Work(other=stated[0], nbytes=stated[1])
    return Work(stated[0], 0.0, stated[1], body.float32 * scale, float8=body.float8 * scale)


def _works_inside(eqn: compat.JaxprEqn, jaxpr: compat.Jaxpr, fused: dict[Atom, int]) -> list[Work]:
    """Returns the work of an inner jaxpr, once. A call (`jnp.where`, say) is fused with its surroundings."""
    if len(jaxpr.invars) != len(eqn.invars) or len(jaxpr.outvars) != len(eqn.outvars) or _times(eqn) > 1:
        return works(jaxpr.eqns)
    inner = {v: _read(x, fused) for v, x in zip(jaxpr.invars, eqn.invars, strict=True)}
    found = works(jaxpr.eqns, inner)
    fused.update((v, _read(x, inner)) for v, x in zip(eqn.outvars, jaxpr.outvars, strict=True))
    return found


def _read(v: Atom, fused: Mapping[Atom, int]) -> int:
    """Returns the bytes that are read for a value."""
    return 0 if isinstance(v, compat.Literal) else fused.get(v, equations.nbytes(v.aval))


def work_of_equation(eqn: compat.JaxprEqn) -> Work:
    """Returns the work of one equation, with the equations inside it."""
    return sum(works([eqn]), Work())


def _times(eqn: compat.JaxprEqn) -> int:
    """Returns how often all devices together run the equations inside an equation."""
    if eqn.primitive.name == "shard_map":  # its body is written for one device
        return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def _work_of(eqn: compat.JaxprEqn, fused: Mapping[Atom, int]) -> Work:
    """Returns the work of an equation that holds no others; a reduction reads the inputs of its fused operand."""
    name = eqn.primitive.name
    is_reduction = name.startswith(("reduce", "arg", "cum"))
    known = fused if is_reduction else {}
    moved = sum(_read(v, known) for v in (*equations.variables(eqn.invars), *eqn.outvars))
    if (count := _PRODUCTS.get(name)) is not None:
        products = count(eqn)
        width = max(v.aval.dtype.itemsize for v in eqn.invars[:2])
        float32, float8 = (products if is_so else 0.0 for is_so in (width >= 4, width == 1))
        attention = products if name.startswith("dot_product_attention") else 0.0
        return Work(products=products, nbytes=moved, float32=float32, float8=float8, attention=attention)
    if equations.is_view(eqn):
        return Work()
    made = sum(equations.size(v.aval) for v in eqn.outvars)
    if is_reduction:
        made = max(made, sum(equations.size(v.aval) for v in eqn.invars))
    nbytes = moved if _is_moving(eqn) else 0.0
    return Work(other=made, nbytes=nbytes, between=nbytes)


def _is_moving(eqn: compat.JaxprEqn) -> bool:
    """Returns whether an equation reads its operands from device memory and writes its results there."""
    return equations.is_heavy(eqn) or eqn.primitive.name == "gather" or eqn.primitive.name in _PRODUCTS


def _dot_general(eqn: compat.JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * equations.size(eqn.outvars[0].aval) * math.prod(left[axis] for axis in contracted)


def _scaled_matmul(eqn: compat.JaxprEqn) -> float:
    """Takes operands of shape (batch, rows, contracted) and (batch, columns, contracted), with a scale per block."""
    return 2.0 * equations.size(eqn.outvars[0].aval) * eqn.invars[0].aval.shape[-1]


def _ragged_dot(eqn: compat.JaxprEqn) -> float:
    """Counts each left element once for each right element of the same group, contracted row and batch."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = (v.aval for v in eqn.invars[:2])
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2.0 * equations.size(left) * math.prod(n for axis, n in enumerate(right.shape) if axis not in shared)


def _convolution(eqn: compat.JaxprEqn) -> float:
    """Does not count multiplications by the zeros that dilation puts between elements of the left operand."""
    kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    features = kernel.shape[numbers.rhs_spec[0]]
    products = 2.0 * equations.size(eqn.outvars[0].aval) * equations.size(kernel) / features
    return products / math.prod(eqn.params["lhs_dilation"])


def _attention(products: int) -> Callable[[compat.JaxprEqn], float]:
    """Counts cuDNN's attention as this many matrix products over the pairs of a query and a key that see each other."""

    def count(eqn: compat.JaxprEqn) -> float:
        (*_, size), keys = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[2 if eqn.params["layout"] else 1]
        pairs = equations.size(eqn.invars[0].aval) / size * keys
        if "CAUSAL" in eqn.params["mask_type"].name:
            seen = min(eqn.params["sliding_window_length"] or keys, keys)  # by a late query, with itself
            pairs *= seen / keys * (1 - (seen - 1) / (2 * keys))
        return 2.0 * products * pairs * size

    return count


_PRODUCTS: dict[str, Callable[[compat.JaxprEqn], float]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "scaled_dot": _dot_general,
    "scaled_matmul_wrapper": _scaled_matmul,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": _attention(2),
    "dot_product_attention_bwd_wrapper": _attention(5),  # the scores once more, and the gradients of four operands
}
