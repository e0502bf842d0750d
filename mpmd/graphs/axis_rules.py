"""Along which axes an equation can be done piece by piece: a table by primitive.

A *factor* of an equation is an axis of its result together with the axes of its operands that it comes from. Applied to
rows `a … b` of these operands, the equation computes rows `a … b` of its result; operands without such an axis are read
whole. If the result has no such axis either, it is the sum (maximum, …) of the results of the pieces.

This is the only table about axes: the cut of arrays (`cutting/spread.py`), the shardings inside a group
(`sharded_axes.py`) and the sums over its devices (`partition/local_sums.py`) all call `factors`. `linearity.py` lists
the linear primitives.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from mpmd import _jax_compat as compat
from mpmd.tracing.new_equations import Atom

Combine = Callable[[jax.Array, jax.Array], jax.Array]
Params = dict[str, Any]


class Factor(NamedTuple):
    """One axis along which an equation can be done piece by piece."""

    ins: tuple[int | None, ...]  # per operand, the axis that is cut, or None
    outs: tuple[int | None, ...]  # per result, the axis that is cut, or None
    combine: Combine | None = None  # combines the results of two pieces, where no result is cut


def factors(eqn: compat.JaxprEqn) -> list[Factor]:
    """Returns the factors of an equation; none if it has to be done as a whole."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or eqn.effects:
        return []
    return list(rule(eqn))


def piece_params(eqn: compat.JaxprEqn, factor: Factor, rows: int) -> Params:
    """Returns the parameters of an equation on a piece with this number of rows."""
    params = dict(eqn.params)
    for key in ("sharding", "out_sharding", "dst_sharding"):
        if isinstance(params.get(key), NamedSharding) and factor.outs[0] is not None:
            params[key] = _on_rows(params[key], factor.outs[0], rows)
    key, axis = _SIZES.get(eqn.primitive.name), factor.outs[0]
    if eqn.primitive.name == "gather":  # the slice has all rows of the piece, unless each is a lookup of its own
        axis = factor.ins[0]
        key = None if axis in eqn.params["dimension_numbers"].operand_batching_dims else "slice_sizes"
    if key is not None and axis is not None:
        params[key] = (*params[key][:axis], rows, *params[key][axis + 1 :])
    return params


# The parameter that holds the shape of the result, or its end.
_SIZES = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "iota": "shape",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


def _on_rows(sharding: NamedSharding, axis: int, rows: int) -> NamedSharding:
    """Returns a sharding that leaves `axis` whole if its devices do not divide the rows."""
    entries = list(sharding.spec.partitions)
    if axis >= len(entries) or entries[axis] is None:
        return sharding
    names = entries[axis] if isinstance(entries[axis], tuple) else (entries[axis],)
    if rows % math.prod(sharding.mesh.shape[n] for n in names) == 0:
        return sharding
    entries[axis] = None
    return sharding.update(spec=sharding.spec.update(partitions=tuple(entries)))


# --- rules ----------------------------------------------------------------------------------------

Factors = Iterator[Factor]
Rule = Callable[[compat.JaxprEqn], Factors]


def _shapes(atoms: Sequence[Atom]) -> list[tuple[int, ...]]:
    return [tuple(getattr(v.aval, "shape", ())) for v in atoms]


def _elementwise(eqn: compat.JaxprEqn) -> Factors:
    """All operands have one shape, up to axes of length 1; scalars are read whole."""
    ins, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
    if any(s and len(s) != len(outs[0]) for s in ins) or any(s != outs[0] for s in outs):
        return
    for a, n in enumerate(outs[0]):
        if all(not s or s[a] in (1, n) for s in ins):
            yield Factor(tuple(a if s and s[a] == n else None for s in ins), (a,) * len(outs))


def _along_other_axes(name: str) -> Rule:
    """All operands and results have the same axes; the axes that the parameter `name` lists are never cut."""

    def rule(eqn: compat.JaxprEqn) -> Factors:
        own = eqn.params[name] if isinstance(eqn.params[name], (tuple, list)) else (eqn.params[name],)
        ranks = {len(s) for s in (*_shapes(eqn.invars), *_shapes(eqn.outvars))}
        for a in range(min(ranks)):
            if len(ranks) == 1 and a not in own:
                yield Factor((a,) * len(eqn.invars), (a,) * len(eqn.outvars))

    return rule


def _leading(*, own: int) -> Rule:
    """The leading axes that all operands and results share are a batch; the last `own` axes of each operand are not."""

    def rule(eqn: compat.JaxprEqn) -> Factors:
        ins, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
        for a in range(min(len(s) for s in ins) - own):
            if len({s[: a + 1] for s in (*ins, *outs)}) == 1:
                yield Factor((a,) * len(ins), (a,) * len(outs))

    return rule


def _broadcast_in_dim(eqn: compat.JaxprEqn) -> Factors:
    """All axes of the result. Where the operand is repeated along one, no axis of the operand corresponds to it."""
    x, out, axes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    for b, n in enumerate(out):
        a = axes.index(b) if b in axes else None
        if len(eqn.invars) == 1:  # further operands are computed sizes (dynamic shapes)
            yield Factor((a if a is not None and x[a] == n else None,), (b,))


def _reshape(eqn: compat.JaxprEqn) -> Factors:
    """The axes that the reshape keeps: of the same length, with as many elements before them."""
    x, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for a in range(len(x)):
        for b in range(len(out)):
            before = math.prod(x[:a]) == math.prod(out[:b])
            if before and x[a] == out[b] and x[a] > 1 and eqn.params["dimensions"] is None:
                yield Factor((a,), (b,))


def _transpose(eqn: compat.JaxprEqn) -> Factors:
    for b, a in enumerate(eqn.params["permutation"]):
        yield Factor((a,), (b,))


def _stack(eqn: compat.JaxprEqn) -> Factors:
    """The axes of the operands; in the result, those behind the stacking axis move up by one."""
    for a in range(eqn.invars[0].aval.ndim):
        yield Factor((a,) * len(eqn.invars), (a + (a >= eqn.params["axis"]),))


def _unstack(eqn: compat.JaxprEqn) -> Factors:
    """The axes of the results, like those of the operands of a stack."""
    for a in range(eqn.outvars[0].aval.ndim):
        yield Factor((a + (a >= eqn.params["axis"]),), (a,) * len(eqn.outvars))


def _reduce(combine: Combine | None, name: str = "axes") -> Rule:
    """The axes that the parameter `name` lists are reduced; they can be cut if partial results can be combined."""

    def rule(eqn: compat.JaxprEqn) -> Factors:
        axes = eqn.params[name]
        kept = [a for a in range(eqn.invars[0].aval.ndim) if a not in axes]
        for b, a in enumerate(kept):
            yield Factor((a,), (b,))
        for a in axes if combine else ():
            yield Factor((a,), (None,), combine)

    return rule


def _dot_general(eqn: compat.JaxprEqn) -> Factors:
    """The batch axes, then the free axes of either operand; along a contracted axis, partial products are summed."""
    (contract_x, contract_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    x, y = (range(v.aval.ndim) for v in eqn.invars)
    axis = 0
    for a, b in zip(batch_x, batch_y, strict=True):
        yield Factor((a, b), (axis,))
        axis += 1
    for a in x:
        if a not in batch_x and a not in contract_x:
            yield Factor((a, None), (axis,))
            axis += 1
    for b in y:
        if b not in batch_y and b not in contract_y:
            yield Factor((None, b), (axis,))
            axis += 1
    for a, b in zip(contract_x, contract_y, strict=True):
        yield Factor((a, b), (None,), jax.lax.add)


def _convolution(eqn: compat.JaxprEqn) -> Factors:
    """The batch, the output features, and the input features, which are summed. Never the positions: their windows
    overlap. Feature groups tie features to each other, so that features are then done as a whole.
    """
    numbers = eqn.params["dimension_numbers"]
    (rows, features), (made, read), out = numbers.lhs_spec[:2], numbers.rhs_spec[:2], numbers.out_spec
    if eqn.params["batch_group_count"] == 1:
        yield Factor((rows, None), (out[0],))
        if eqn.params["feature_group_count"] == 1:
            yield Factor((None, made), (out[1],))
            yield Factor((features, read), (None,), jax.lax.add)


def _pad(eqn: compat.JaxprEqn) -> Factors:
    """The axes that are not padded; the second operand is the value to pad with."""
    for a, config in enumerate(eqn.params["padding_config"]):
        if not any(config):
            yield Factor((a, None), (a,))


def _slice(eqn: compat.JaxprEqn) -> Factors:
    """The axes that the slice takes whole; further operands are start indices."""
    for a, n in enumerate(eqn.outvars[0].aval.shape):
        if eqn.invars[0].aval.shape[a] == n:
            yield Factor((a, *[None] * (len(eqn.invars) - 1)), (a,))


def _dynamic_update_slice(eqn: compat.JaxprEqn) -> Factors:
    """The axes that the update covers; the operands after the first two are start indices."""
    x, update = _shapes(eqn.invars[:2])
    for a, n in enumerate(x):
        if update[a] == n:
            yield Factor((a, a, *[None] * (len(eqn.invars) - 2)), (a,))


def _gather(eqn: compat.JaxprEqn) -> Factors:
    """The axes of the indices, and the axes of the operand that each lookup takes whole.

    The last axis of the indices holds one lookup and is no axis of the result. A batching axis is one of both operands:
    each of its rows is looked up in its own part of the first operand.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    x, indices = _shapes(eqn.invars)
    out_batch = [b for b in range(eqn.outvars[0].aval.ndim) if b not in numbers.offset_dims]
    for i, b in enumerate(out_batch):
        if i in numbers.start_indices_batching_dims:
            at = numbers.start_indices_batching_dims.index(i)
            yield Factor((numbers.operand_batching_dims[at], i), (b,))
        elif i < len(indices) - 1:
            yield Factor((None, i), (b,))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    for a, b in zip((a for a in range(len(x)) if a not in gone), numbers.offset_dims, strict=True):
        if sizes[a] == x[a]:
            yield Factor((a, None), (b,))


def _attention(eqn: compat.JaxprEqn) -> Factors:
    """The batch axis of cuDNN's attention. Unused operands are empty."""
    ins, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
    rows = ins[0][0]
    if all(s[0] in (0, rows) for s in (*ins, *outs)):
        yield Factor(tuple(0 if s[0] else None for s in ins), (0,) * len(outs))


def _iota(eqn: compat.JaxprEqn) -> Factors:
    """All axes except the one along which it counts."""
    for b in range(len(eqn.params["shape"])):
        if b != eqn.params["dimension"]:
            yield Factor((), (b,))


def _keys(eqn: compat.JaxprEqn) -> Factors:
    """Each key is independent: the axes of the array of keys are the first axes of the result."""
    shape = eqn.invars[0].aval.shape
    rank = eqn.outvars[0].aval.ndim if eqn.primitive.name == "random_wrap" else len(shape)
    for a in range(rank):
        yield Factor((a,), (a,))


def _of_threefry(rule: Rule) -> Rule:
    """The rule for keys of the kind threefry. Of other kinds (`rbg`), JAX draws the numbers of a batch of keys from the
    first key, so a piece of the batch has other numbers.
    """
    return lambda eqn: rule(eqn) if eqn.invars[0].aval.dtype == jax.random.key_dtype("threefry2x32") else iter(())


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1
floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg
nextafter not one_minus_square optimization_barrier or place polygamma polynomial population_count pow
random_seed real reduce_precision rem reshard round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 to_edtype
from_edtype xor zeta pvary
""".split()

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("random_wrap", "random_unwrap"), _keys),
    **dict.fromkeys(("random_bits", "random_split"), _of_threefry(_keys)),
    "random_fold_in": _of_threefry(_elementwise),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along_other_axes("axis")),
    **dict.fromkeys(("cholesky", "eigh", "qr", "svd", "lu", "triangular_solve", "schur", "eig"), _leading(own=2)),
    **dict.fromkeys(("householder_product", "geqrf"), _leading(own=2)),
    "argmax": _reduce(None),
    "argmin": _reduce(None),
    "reduce_sum": _reduce(jax.lax.add),
    "reduce_prod": _reduce(jax.lax.mul),
    "reduce_max": _reduce(jax.lax.max),
    "reduce_min": _reduce(jax.lax.min),
    "reduce_and": _reduce(jax.lax.bitwise_and),
    "reduce_or": _reduce(jax.lax.bitwise_or),
    "reduce_xor": _reduce(jax.lax.bitwise_xor),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _along_other_axes("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    **dict.fromkeys(("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"), _attention),
    "dynamic_slice": _slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along_other_axes("dimensions"),
    "slice": _slice,
    "sort": _along_other_axes("dimension"),
    "split": _along_other_axes("axis"),
    "squeeze": _reduce(None, "dimensions"),
    "stack": _stack,
    "top_k": _along_other_axes("axis"),
    "transpose": _transpose,
    "unstack": _unstack,
}
