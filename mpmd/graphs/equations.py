"""Sizes of equations, and which are heavy: passes ask before they move or copy an equation."""

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mpmd import _jax_compat as compat
from mpmd.tracing.new_equations import Atom

_HEAVY = {
    "dot_general", "ragged_dot_general", "scaled_dot", "scaled_matmul_wrapper", "conv_general_dilated", "scan", "while",
    "cond", "sort", "fft", "cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "householder_product",
    "triangular_solve", "tridiagonal_solve", "custom_linear_solve", "pallas_call", "mpmd_map", compat.CHECKPOINT,
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window", "reduce_window_sum", "reduce_window_max",
    "reduce_window_min", "top_k", "approx_top_k", "ffi_call", "pure_callback", "io_callback", "scatter", "scatter-add",
    "scatter-max", "scatter-min", "scatter-mul", "select_and_scatter_add", "select_and_gather_add", "call_exported",
    "foreign", "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
}  # fmt: skip
# As heavy as the equations inside.
_HOLDERS = {"scan", "while", "cond", "shard_map", "jit", compat.CHECKPOINT}
_CALLS = {"jit", "shard_map"}  # for these, `is_heavy` looks at the equations inside
_RANDOM = {"random_bits", "threefry2x32", "random_gamma", "rng_bit_generator"}
_VIEWS = {
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "unstack", "expand_dims", "iota", "rev", "copy",
}  # fmt: skip

# A large reduction is worth sending rather than computing in two places.
_LARGE_REDUCTION = 64
_SMALL_RANDOM = 16
_SMALL_SCATTER = 4096


def size(aval: compat.Aval) -> int:
    """Returns the number of elements."""
    return math.prod(getattr(aval, "shape", ()))


def nbytes(aval: compat.Aval) -> int:
    """Returns the bytes of an array of this type; for PRNG keys and other extended types, of the underlying array.

    Barriers in a kernel have none.
    """
    if getattr(aval, "dtype", None) is None:
        return 0
    made_of = compat.physical_aval(aval)
    return size(made_of) * getattr(made_of.dtype, "itemsize", 0)


def variables(atoms: Iterable[Atom]) -> list[compat.Var]:
    """Returns the variables among `atoms`, each once, in order."""
    return list({v: None for v in atoms if not isinstance(v, compat.Literal)})


def is_zero(atom: Atom) -> bool:
    """Returns whether this is a literal of zeros."""
    return isinstance(atom, compat.Literal) and not np.any(atom.val)


def free_variables(eqns: Sequence[compat.JaxprEqn], results: Iterable[Atom] = ()) -> list[compat.Var]:
    """Returns the free variables of equations, each once, in order; `results` are read after the equations."""
    made = {v for e in eqns for v in e.outvars}
    return [v for v in variables([*(v for e in eqns for v in e.invars), *results]) if v not in made]


def outputs(eqn: compat.JaxprEqn) -> list[compat.Var]:
    """Returns the variables that an equation binds, without dropped ones."""
    return [v for v in eqn.outvars if not isinstance(v, compat.DropVar)]


def live_equations(
    eqns: Sequence[compat.JaxprEqn], wanted: Iterable[Atom], primitives: Collection[compat.Primitive] = ()
) -> list[compat.JaxprEqn]:
    """Returns the equations that `wanted`, an effect or an equation of `primitives` needs, in order."""
    needed = set(variables(wanted))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or eqn.primitive in primitives or any(v in needed for v in eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def is_heavy(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the equation should run in one place only."""
    name = eqn.primitive.name
    if name in _HEAVY or eqn.effects or changes_memory(eqn):
        return True
    if name in _CALLS:
        inner = (e for jaxpr in compat.jaxprs_in(eqn.params) for e in jaxpr.eqns)
        return any(is_heavy(e) or _communicates(e) for e in inner)
    if name in _RANDOM:
        return sum(size(v.aval) for v in eqn.outvars) > _SMALL_RANDOM
    if not name.startswith(("reduce", "arg")):
        return False
    out, read = (sum(size(v.aval) for v in vs) for vs in (eqn.outvars, eqn.invars))
    return read > _LARGE_REDUCTION * max(out, 1)


def works_hard(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the equation, or one inside it, is heavy by its kind: a matrix product, a kernel, a scatter."""
    if eqn.primitive.name in _HOLDERS:
        return any(works_hard(e) for jaxpr in compat.jaxprs_in(eqn.params) for e in jaxpr.eqns)
    return eqn.primitive.name in _HEAVY


def _communicates(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the devices of a `shard_map` communicate: the equation names axes of the mesh."""
    named = eqn.params.get("axis_name"), eqn.params.get("axes")
    axes = [axis for entry in named for axis in (entry if isinstance(entry, (tuple, list)) else (entry,))]
    return any(isinstance(axis, str) for axis in axes) and eqn.primitive.name not in ("axis_index", "pvary")


def is_small_scatter(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the equation is a scatter of so few elements that starting a program would cost more."""
    touched = sum(size(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name in ("scatter", "scatter-add") and touched <= _SMALL_SCATTER


def changes_memory(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the equation moves its operand between memories, as an offload to the host does."""
    return eqn.primitive.name == "device_put" and any(
        a.aval.memory_space != b.aval.memory_space for a, b in zip(eqn.invars, eqn.outvars, strict=True)
    )


def is_view(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the equation is a view of its operand: free inside a compiled program."""
    return eqn.primitive.name in _VIEWS


def grows(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the outputs are larger than the operands, so that sending the operands is cheaper."""
    read = sum(nbytes(v.aval) for v in variables(eqn.invars))
    return sum(nbytes(v.aval) for v in eqn.outvars) > read


def shrinks(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the outputs are smaller than the operands."""
    read = sum(nbytes(v.aval) for v in variables(eqn.invars))
    return sum(nbytes(v.aval) for v in eqn.outvars) < read


def is_free_view(eqn: compat.JaxprEqn) -> bool:
    """Returns whether each reader makes the view again, so that only the viewed array is kept or sent."""
    return is_view(eqn) and not shrinks(eqn)


def is_scalar_work(eqn: compat.JaxprEqn) -> bool:
    """Returns whether all operands and results are scalars (or PRNG keys)."""
    return all(size(v.aval) <= 2 for v in (*eqn.invars, *eqn.outvars))
