"""Operations of `jax.numpy` and `jax.lax`, each with arguments that it takes.

An operation is `fun(*arrays)`; what else it needs (axes, shapes, functions) is fixed here. Names that say nothing of
arrays, change them in place or need another device's part of a value have no place here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of arrays and arguments for it: names of `VALUES`."""

    name: str
    fun: Callable[..., Any]
    values: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _values() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    matrix = (rng.random((4, 4)) + 4 * np.eye(4)).astype(np.float32)
    whole = rng.integers(0, 4, (4, 4)).astype(np.int32)
    return {
        "matrix": matrix,
        "other": (rng.random((4, 4)) + 0.1).astype(np.float32),
        "square": (matrix @ matrix.T).astype(np.float32),
        "vector": (rng.random(4) + 0.1).astype(np.float32),
        "row": rng.random((1, 4)).astype(np.float32),
        "scalar": np.float32(0.5),
        "whole": whole,
        "indices": np.array([2, 0, 3, 1], np.int32),
        "index": np.int32(2),
        "bytes": whole.astype(np.uint8),
        "mask": matrix > 0.5,
        "complex": (matrix + 1j * whole).astype(np.complex64),
        "cube": rng.random((2, 4, 4)).astype(np.float32),
        "image": rng.random((2, 3, 8, 8)).astype(np.float32),
        "filter": rng.random((5, 3, 3, 3)).astype(np.float32),
        "bits": np.array([1, 2, 3, 4], np.uint32),
    }


VALUES = _values()

# By the arguments that they take alone.
_NUMPY = {
    "matrix": """abs absolute acos acosh all amax amin angle any arccos arccosh arcsin arcsinh arctan arctanh argmax
        argmin argsort around array asarray asin asinh atan atanh atleast_1d atleast_2d atleast_3d average block
        broadcast_arrays cbrt ceil clip column_stack concat concatenate conj conjugate copy corrcoef cos cosh
        count_nonzero cov cumprod cumsum deg2rad degrees diag diag_indices_from diagflat diagonal diff dstack ediff1d
        empty_like exp exp2 expm1 fabs flip fliplr flipud floor frexp gradient histogram histogram_bin_edges
        histogramdd hstack i0 imag iscomplex isfinite isinf isnan isneginf isposinf isreal lexsort log log10 log1p log2
        logical_not matrix_transpose max mean median min modf nan_to_num nanargmax nanargmin nancumprod nancumsum
        nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar negative ones_like poly positive prod ptp rad2deg
        radians ravel real reciprocal rint rot90 round sign signbit sin sinc sinh sort sort_complex spacing sqrt square
        squeeze stack std sum tan tanh trace transpose trapezoid tril tril_indices_from triu triu_indices_from trunc
        unstack unwrap var vstack zeros_like""",
    "vector": "cumulative_prod cumulative_sum ix_ meshgrid polyder polyint vander",
    "whole": "bitwise_count bitwise_invert bitwise_not invert packbits",
    "bytes": "unpackbits",
    "matrix other": """add allclose append arctan2 array_equal array_equiv atan2 copysign divide divmod dot equal
        float_power floor_divide fmax fmin fmod full_like geomspace greater greater_equal heaviside hypot inner isclose
        isin kron less less_equal linspace logaddexp logaddexp2 logical_and logical_or logical_xor logspace matmul
        matvec maximum minimum mod multiply nextafter not_equal outer polyadd polysub polyval pow power remainder
        select subtract tensordot true_divide vdot vecdot vecmat""",
    "vector vector": """convolve correlate digitize histogram2d nanpercentile nanquantile percentile polydiv polymul
        quantile searchsorted""",
    "vector indices": "roll",
    "whole whole": """bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm left_shift
        right_shift""",
    "matrix whole": "ldexp take_along_axis",
    "matrix indices": "take",
    "mask matrix other": "where",
    "vector vector vector": "interp",
}
_LAX = {
    "matrix": """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil conj cos cosh cumlogsumexp cummax
        cummin cumprod cumsum digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg
        optimization_barrier reciprocal round rsqrt sign sin sinh sort sqrt square stop_gradient tan tanh""",
    "whole": "bitwise_not clz population_count",
    "complex": "imag real",
    "matrix other": """add atan2 broadcast_like complex div dot eq ge gt igamma igamma_grad_a igammac le lt max min mul
        ne nextafter polygamma pow random_gamma_grad rem sort_key_val sub zeta""",
    "matrix scalar": "full_like",
    "cube cube": "batch_matmul",
    "whole whole": """bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical""",
    "matrix other square": "betainc",
    "scalar matrix scalar": "clamp",
    "mask matrix other": "select",
    "mask matrix square": "select_n",
}
_LINALG = {
    "matrix": """cond det diagonal inv matrix_norm matrix_rank matrix_transpose norm pinv qr slogdet svdvals trace
        vector_norm""",
    "square": "cholesky eigvalsh",
    "matrix other": "matmul solve tensordot vecdot",
    "matrix vector": "lstsq tensorsolve",
    "vector vector": "outer",
}
_FFT = {
    "matrix": """fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftn""",
}


def _by_arguments():
    modules = (("jnp", jnp, _NUMPY), ("lax", lax, _LAX), ("linalg", jnp.linalg, _LINALG), ("fft", jnp.fft, _FFT))
    for prefix, module, table in modules:
        for values, names in table.items():
            for name in names.split():
                yield Operation(f"{prefix}.{name}", _called(getattr(module, name)), tuple(values.split()))


def _called(fun):
    return lambda *args: fun(*args)


def _with(values: str, **funs):
    for name, fun in funs.items():
        yield Operation(name.replace("__", "."), fun, tuple(values.split()))


def _shapes():
    yield from _with(
        "matrix",
        jnp__expand_dims=lambda x: jnp.expand_dims(x, 1),
        jnp__reshape=lambda x: jnp.reshape(x, (2, 8)),
        jnp__resize=lambda x: jnp.resize(x, (3, 5)),
        jnp__tile=lambda x: jnp.tile(x, (2, 1)),
        jnp__repeat=lambda x: jnp.repeat(x, 2, axis=0),
        jnp__pad=lambda x: jnp.pad(x, 1, mode="reflect"),
        jnp__pad_constant=lambda x: jnp.pad(x, ((0, 1), (2, 0))),
        jnp__moveaxis=lambda x: jnp.moveaxis(x, 0, 1),
        jnp__rollaxis=lambda x: jnp.rollaxis(x, 1),
        jnp__swapaxes=lambda x: jnp.swapaxes(x, 0, 1),
        jnp__permute_dims=lambda x: jnp.permute_dims(x, (1, 0)),
        jnp__split=lambda x: jnp.split(x, 2),
        jnp__array_split=lambda x: jnp.array_split(x, 3),
        jnp__hsplit=lambda x: jnp.hsplit(x, 2),
        jnp__vsplit=lambda x: jnp.vsplit(x, 2),
        jnp__delete=lambda x: jnp.delete(x, 1, axis=0),
        jnp__insert=lambda x: jnp.insert(x, 1, 7.0, axis=0),
        jnp__broadcast_to=lambda x: jnp.broadcast_to(x, (2, 4, 4)),
        jnp__astype=lambda x: jnp.astype(x, jnp.bfloat16),
        jnp__partition=lambda x: jnp.partition(x, 2),
        jnp__argpartition=lambda x: jnp.argpartition(x, 2),
        jnp__flatnonzero=lambda x: jnp.flatnonzero(x > 4, size=4),
        jnp__nonzero=lambda x: jnp.nonzero(x > 4, size=4),
        jnp__argwhere=lambda x: jnp.argwhere(x > 4, size=4),
        jnp__unique=lambda x: jnp.unique(jnp.round(x), size=8),
        jnp__fill_diagonal=lambda x: jnp.fill_diagonal(x, 1.0, inplace=False),
        jnp__apply_along_axis=lambda x: jnp.apply_along_axis(jnp.cumsum, 0, x),
        jnp__apply_over_axes=lambda x: jnp.apply_over_axes(jnp.sum, x, (0, 1)),
        jnp__vectorize=lambda x: jnp.vectorize(lambda r: r / r.sum(), signature="(n)->(n)")(x),
        jnp__index_basic=lambda x: x[1:, ::2],
        jnp__index_negative=lambda x: x[-1, :],
        jnp__index_mask=lambda x: jnp.where(x > 1, x, 0)[np.array([True, False, True, True])],
        lax__argmax=lambda x: lax.argmax(x, 1, jnp.int32),
        lax__argmin=lambda x: lax.argmin(x, 0, jnp.int32),
        lax__broadcast=lambda x: lax.broadcast(x, (2,)),
        lax__broadcast_in_dim=lambda x: lax.broadcast_in_dim(x, (4, 3, 4), (0, 2)),
        lax__broadcast_to_rank=lambda x: lax.broadcast_to_rank(x, 3),
        lax__collapse=lambda x: lax.collapse(x, 0, 2),
        lax__convert_element_type=lambda x: lax.convert_element_type(x, jnp.int32),
        lax__bitcast_convert_type=lambda x: lax.bitcast_convert_type(x, jnp.int32),
        lax__expand_dims=lambda x: lax.expand_dims(x, (0,)),
        lax__integer_pow=lambda x: lax.integer_pow(x, 3),
        lax__pad=lambda x: lax.pad(x, jnp.float32(0), ((1, 0, 1), (0, 2, 0))),
        lax__reduce_precision=lambda x: lax.reduce_precision(x, 8, 7),
        lax__reshape=lambda x: lax.reshape(x, (16,)),
        lax__rev=lambda x: lax.rev(x, (0,)),
        lax__slice=lambda x: lax.slice(x, (1, 0), (3, 4)),
        lax__slice_in_dim=lambda x: lax.slice_in_dim(x, 0, 4, 2),
        lax__index_in_dim=lambda x: lax.index_in_dim(x, 1),
        lax__split=lambda x: lax.split(x, (1, 3)),
        lax__tile=lambda x: lax.tile(x, (1, 2)),
        lax__top_k=lambda x: lax.top_k(x, 2),
        lax__transpose=lambda x: lax.transpose(x, (1, 0)),
        lax__sort_two_keys=lambda x: lax.sort((x, x * 2), num_keys=2),
        lax__approx_max_k=lambda x: lax.approx_max_k(x, 2),
        lax__fft=lambda x: lax.fft(x.astype(jnp.complex64), "FFT", (4,)),
        lax__squeeze=lambda x: lax.squeeze(x[None], (0,)),
    )
    yield from _with(
        "cube",
        jnp__dsplit=lambda x: jnp.dsplit(x, 2),
        linalg__multi_dot=lambda x: jnp.linalg.multi_dot([x[0], x[1], x[0]]),
    )


def _reductions():
    yield from _with(
        "matrix",
        lax__reduce=lambda x: lax.reduce(x, np.float32(0), lax.add, (0,)),
        lax__reduce_sum=lambda x: lax.reduce_sum(x, (0,)),
        lax__reduce_max=lambda x: lax.reduce_max(x, (1,)),
        lax__reduce_min=lambda x: lax.reduce_min(x, (1,)),
        lax__reduce_prod=lambda x: lax.reduce_prod(x, (0, 1)),
        lax__reduce_window=lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
        linalg__svd=lambda x: jnp.linalg.svd(x, compute_uv=False),
        linalg__eigh=lambda x: jnp.abs(jnp.linalg.eigh(x + x.T)[0]),
        linalg__matrix_power=lambda x: jnp.linalg.matrix_power(x, 3),
        jnp__sum_of_an_axis=lambda x: jnp.sum(x, 0, keepdims=True),
        jnp__argmax_of_an_axis=lambda x: jnp.argmax(x, 1),
        jnp__cumsum_of_an_axis=lambda x: jnp.cumsum(x, 1),
        nn__softmax=lambda x: jax.nn.softmax(x, -1),
        nn__logsumexp=lambda x: jax.nn.logsumexp(x, -1),
        nn__gelu=jax.nn.gelu,
        nn__standardize=jax.nn.standardize,
    )
    yield from _with(
        "mask",
        lax__reduce_and=lambda x: lax.reduce_and(x, (0,)),
        lax__reduce_or=lambda x: lax.reduce_or(x, (0,)),
        lax__reduce_xor=lambda x: lax.reduce_xor(x, (0,)),
    )
    yield from _with(
        "indices",
        jnp__bincount=lambda i: jnp.bincount(i, length=4),
        nn__one_hot=lambda i: jax.nn.one_hot(i, 4),
        jnp__unravel_index=lambda i: jnp.unravel_index(i, (2, 2)),
        random__fold_in=lambda i: jax.random.key_data(jax.random.fold_in(jax.random.key(0), i[0])),
        random__normal=lambda i: jax.random.normal(jax.random.key(i[0]), (4, 4)),
        random__permutation=lambda i: jax.random.permutation(jax.random.key(0), i),
        random__split=lambda i: jax.random.key_data(jax.random.split(jax.random.key(i[1]), 3)),
    )
    yield from _with(
        "vector",
        random__bernoulli=lambda p: jax.random.bernoulli(jax.random.key(0), p),
        random__categorical=lambda p: jax.random.categorical(jax.random.key(0), p),
        random__dirichlet=lambda p: jax.random.dirichlet(jax.random.key(0), p),
        random__gamma=lambda p: jax.random.gamma(jax.random.key(0), p),
        random__uniform=lambda p: jax.random.uniform(jax.random.key(0), (4,), maxval=p),
    )
    yield from _with("bits", lax__rng_bit_generator=lambda k: lax.rng_bit_generator(k, (4,)))


def _several():
    yield from _with(
        "matrix row index",
        lax__dynamic_update_slice=lambda x, r, i: lax.dynamic_update_slice(x, r, (i, i * 0)),
        lax__dynamic_update_slice_in_dim=lambda x, r, i: lax.dynamic_update_slice_in_dim(x, r, i, 0),
        lax__dynamic_update_index_in_dim=lambda x, r, i: lax.dynamic_update_index_in_dim(x, r, i, 0),
        lax__dynamic_slice=lambda x, r, i: lax.dynamic_slice(x, (i, 0), (1, 4)) + r,
        lax__dynamic_slice_in_dim=lambda x, r, i: lax.dynamic_slice_in_dim(x, i, 2) + r,
        lax__dynamic_index_in_dim=lambda x, r, i: lax.dynamic_index_in_dim(x, i) + r,
        lax__concatenate=lambda x, r, i: lax.concatenate([x, r], 0),
        jnp__at_set=lambda x, r, i: x.at[i].set(r[0]),
        jnp__at_add=lambda x, r, i: x.at[i].add(r[0]),
        jnp__at_mul=lambda x, r, i: x.at[i].multiply(r[0]),
        jnp__at_max=lambda x, r, i: x.at[i].max(r[0]),
        jnp__at_get=lambda x, r, i: x.at[i].get(mode="fill", fill_value=0) + r,
        lax__cond=lambda x, r, i: lax.cond(i > 1, lambda: x, lambda: x * 2),
        lax__cond_mixed=lambda x, r, i: lax.cond(i > 1, lambda: x, lambda: jnp.zeros((4, 4))),
        lax__switch=lambda x, r, i: lax.switch(i, [lambda: x, lambda: x + r, lambda: jnp.ones((4, 4))]),
        lax__scan=lambda x, r, i: lax.scan(lambda c, y: (c + y, c * r[0]), r[0], x),
        lax__scan_from_zeros=lambda x, r, i: lax.scan(lambda c, y: (c + y, None), jnp.zeros(4), x)[0],
        lax__scan_from_a_constant=lambda x, r, i: lax.scan(lambda c, y: (c + y, None), np.zeros(4, np.float32), x)[0],
        lax__fori_loop=lambda x, r, i: lax.fori_loop(0, 3, lambda k, c: c.at[k].set(r[0]), x),
        lax__fori_loop_of_an_argument=lambda x, r, i: lax.fori_loop(0, i, lambda k, c: c + r, x),
        lax__while_loop=lambda x, r, i: lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, c[1] + r), (i * 0, x)),
        lax__map=lambda x, r, i: lax.map(lambda y: y * r[0], x),
        lax__associative_scan=lambda x, r, i: lax.associative_scan(jnp.add, x + r),
        jnp__stack_of_two=lambda x, r, i: jnp.stack([x, x * r]),
        jnp__block_of_two=lambda x, r, i: jnp.block([[x], [r]]),
        jnp__select_of_two=lambda x, r, i: jnp.select([x > 1, x > r], [x, x * 2], i),
        jnp__piecewise=lambda x, r, i: jnp.piecewise(x, [x < 1, x >= 1], [lambda y: -y, lambda y: y]),
        jnp__choose=lambda x, r, i: jnp.choose(i, [x, x * r, x + r], mode="clip"),
        jnp__compress=lambda x, r, i: jnp.compress(r[0] > 0.5, x, axis=0, size=4),
        jnp__extract=lambda x, r, i: jnp.extract(x > r, x, size=4),
        jnp__put=lambda x, r, i: jnp.put(x, jnp.stack([i, i + 1]), r[0, :2], inplace=False),
        jnp__linspace_between=lambda x, r, i: jnp.linspace(x, r, 3),
        lax__custom_linear_solve=lambda x, r, i: lax.custom_linear_solve(
            lambda v: x @ v, r[0], lambda f, b: jnp.linalg.solve(x, b), symmetric=False
        ),
        lax__custom_root=lambda x, r, i: lax.custom_root(
            lambda v: v * 2 - r, r, lambda f, v: v / 2, lambda g, y: y / g(jnp.ones_like(y))
        ),
        lax__platform_dependent=lambda x, r, i: lax.platform_dependent(x, cpu=lambda y: y + 1, default=lambda y: y),
        lax__composite=lambda x, r, i: lax.composite(lambda y: y * 2, "test.double")(x),
        custom__vjp=lambda x, r, i: jax.grad(lambda y: (_doubled(y) * r).sum())(x),
        transform__grad=lambda x, r, i: jax.grad(lambda y: (jnp.tanh(y) * r).sum())(x),
        transform__jvp=lambda x, r, i: jax.jvp(jnp.sin, (x,), (x * r,)),
        transform__vmap=lambda x, r, i: jax.vmap(lambda y: y @ r[0] + i)(x),
        transform__hessian=lambda x, r, i: jax.hessian(lambda y: (y**3).sum())(r[0]),
        transform__checkpoint=lambda x, r, i: jax.grad(lambda y: jax.checkpoint(jnp.sin)(y @ x).sum())(r),
        transform__jit=lambda x, r, i: jax.jit(lambda y, z: y + z)(x, r),
    )


@jax.custom_vjp
def _doubled(x):
    return x * 2


_doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


def _products():
    yield from _with(
        "matrix other",
        jnp__einsum=lambda x, y: jnp.einsum("ij,kj->ik", x, y),
        jnp__einsum_of_three=lambda x, y: jnp.einsum("ij,jk,kl->il", x, y, x),
        jnp__cross=lambda x, y: jnp.cross(x[:, :3], y[:, :3]),
        lax__dot_general=lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        lax__dot_in_bfloat16=lambda x, y: lax.dot(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(jnp.float32),
        jnp__setdiff1d=lambda x, y: jnp.setdiff1d(x, y, size=16),
        jnp__union1d=lambda x, y: jnp.union1d(x, y, size=32),
        jnp__polyfit=lambda x, y: jnp.polyfit(x[0], y, 2),
        jnp__put_along_axis=lambda x, y: jnp.put_along_axis(x, jnp.argmax(y, 1, keepdims=True), 0.0, 1, inplace=False),
        jnp__histogram_of_weights=lambda x, y: jnp.histogram(x, 4, weights=y),
    )
    yield from _with(
        "image filter",
        lax__conv=lambda x, f: lax.conv(x, f, (1, 1), "SAME"),
        lax__conv_general_dilated=lambda x, f: lax.conv_general_dilated(x, f, (2, 2), "VALID", rhs_dilation=(2, 2)),
        lax__conv_with_general_padding=lambda x, f: lax.conv_with_general_padding(x, f, (1, 1), "SAME", None, None),
        lax__conv_transpose=lambda x, f: lax.conv_transpose(x[:, :, :4, :3], f, (1, 1), "SAME"),
    )
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    places = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    yield from _with(
        "matrix indices",
        lax__gather=lambda x, i: lax.gather(x, i[:, None], numbers, (1, 4)),
        lax__index_take=lambda x, i: lax.index_take(x, (i,), (0,)),
        jnp__index_by_array=lambda x, i: x[i],
        jnp__index_by_two_arrays=lambda x, i: x[i, i],
    )
    scatters = ("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub")
    for name in scatters:
        fun = functools.partial(lambda f, x, y, i: f(x, i[:, None], y, places), getattr(lax, name))
        yield Operation(f"lax.{name}", fun, ("matrix", "other", "indices"))
    yield from _with("matrix cube", lax__ragged_dot=lambda x, w: lax.ragged_dot(x, w, np.array([1, 3], np.int32)))


ALL = (*_by_arguments(), *_shapes(), *_reductions(), *_several(), *_products())
