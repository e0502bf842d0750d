"""Operations and bytes counted in equations, against XLA's own count and against what a person counts."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from mpmd.arrays.targets import Target
from mpmd.costs.machine import Machine
from mpmd.costs.work import work_of, works


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


PROGRAMS = {
    "product": (lambda x, w: x @ w, (f32(16, 32), f32(32, 64))),
    "batched": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (f32(3, 16, 32), f32(3, 32, 8))),
    "convolution": (lambda x, k: lax.conv(x, k, (1, 1), "VALID"), (f32(2, 3, 16, 16), f32(8, 3, 3, 3))),
    "gradient": (jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), (f32(32, 64), f32(16, 32))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operations_are_those_that_xla_counts(name):
    fun, args = PROGRAMS[name]
    found = work_of(jax.make_jaxpr(fun)(*args).jaxpr)
    expected = jax.jit(fun).lower(*args).compile().cost_analysis()
    assert found.flops == pytest.approx(expected["flops"], rel=0.03)
    assert found.float32 == found.products > 0


def _strided(x, k):
    return jnp.sum(lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2)


@pytest.mark.parametrize(
    ("fun", "args", "count", "each"),
    [
        (jax.grad(lambda x, w, n: lax.ragged_dot(x, w, n).sum(), (0, 1)), (f32(64, 16), f32(4, 16, 128), i32(4)), 3,
         2 * 64 * 16 * 128),
        (jax.vmap(lax.ragged_dot), (f32(3, 64, 16), f32(3, 4, 16, 128), i32(3, 4)), 1, 3 * 2 * 64 * 16 * 128),
        (jax.grad(_strided, (0, 1)), (f32(8, 32, 32, 16), f32(3, 3, 16, 32)), 3, 2 * 8 * 16 * 16 * 9 * 16 * 32),
        (lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), (f32(8, 16, 16, 32), f32(3, 3, 32, 16)), 1,
         2 * 8 * 16 * 16 * 9 * 16 * 32),
    ],
    ids=["ragged", "batch of ragged", "convolution with a stride", "transposed convolution"],
)  # fmt: skip
def test_a_product_and_its_gradients_take_as_many_operations(fun, args, count, each):
    assert work_of(jax.make_jaxpr(fun)(*args).jaxpr).products == count * each


def test_scaled_products_and_their_gradients_are_done_at_the_speed_of_their_operands():
    config = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3

    def product(x, w):
        return jax.nn.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), configs=config).sum()

    work = work_of(jax.make_jaxpr(jax.value_and_grad(product, (0, 1)))(f32(64, 128), f32(128, 256)).jaxpr)
    assert (work.products, work.float8, work.float32) == (3 * 2 * 64 * 128 * 256, work.products, 0)


def test_a_scan_counts_each_of_its_steps_and_a_cond_its_larger_branch():
    def step(x, w):
        return lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: x), None

    jaxpr = jax.make_jaxpr(lambda x, ws: lax.scan(step, x, ws))(f32(4, 8), f32(5, 8, 8)).jaxpr
    assert work_of(jaxpr).products == 5 * 2 * 4 * 8 * 8


def test_bytes_are_those_of_products_and_of_the_edges_of_the_program():
    def fun(x, w):
        return jnp.tanh(x @ w) * 2

    work = work_of(jax.make_jaxpr(fun)(f32(4, 8), f32(8, 16)).jaxpr)
    product, edge = 4 * (4 * 8 + 8 * 16 + 4 * 16), 4 * 4 * 16  # of what is made of the product
    assert work.nbytes == product + edge
    assert work.other == 2 * 4 * 16


def test_a_product_is_as_fast_as_its_operands_are_narrow():
    def seconds(dtype, target):
        x = jax.ShapeDtypeStruct((8192, 8192), dtype)
        product = functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16)
        return Machine(Target.named(target)).work_s(works(jax.make_jaxpr(product)(x, x).eqns), 1)

    wide, narrow = (seconds(dtype, "h100") for dtype in (jnp.bfloat16, jnp.float8_e4m3fn))
    assert wide / narrow == pytest.approx(2, rel=1e-3)
    assert seconds(jnp.float8_e4m3fn, "a100") == seconds(jnp.bfloat16, "a100")  # its matrix units know no float8


def test_a_product_of_narrow_operands_is_not_counted_as_float32():
    bf16 = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    assert work_of(jax.make_jaxpr(jnp.matmul)(bf16, bf16).jaxpr).float32 == 0


def test_what_is_computed_again_is_counted_apart():
    def loss(w, x):
        again = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w))  # each sine needs its product once more
        return jnp.sum(jax.lax.scan(lambda x, w: (again(w, x), None), x, w)[0])

    work = work_of(jax.make_jaxpr(jax.grad(loss, (0, 1)))(f32(3, 8, 8), f32(4, 8)).jaxpr)
    product = 2 * 4 * 8 * 8
    assert work.products == 3 * 8 * product
    assert work.recomputed == 3 * 2 * product


def test_a_shard_map_counts_what_all_devices_do():
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    p = jax.sharding.PartitionSpec("d")
    fun = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(p, jax.sharding.PartitionSpec()), out_specs=p)
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, p))
    assert work_of(jax.make_jaxpr(fun)(x, f32(8, 4)).jaxpr).products == 2 * 16 * 8 * 4


@pytest.mark.parametrize("stated", [None, (1_000_000, 300_000)])
def test_a_kernel_of_pallas_counts_each_step_of_its_grid_or_what_its_author_states(stated):
    def product(x, y, out):
        out[...] = x[...] @ y[...]

    kernel = pl.pallas_call(
        product, out_shape=f32(512, 256), grid=(4, 2),
        in_specs=[pl.BlockSpec((128, 64), lambda i, j: (i, 0)), pl.BlockSpec((64, 128), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
        cost_estimate=stated and pl.CostEstimate(flops=stated[0], bytes_accessed=stated[1], transcendentals=0),
    )  # fmt: skip
    found = work_of(jax.make_jaxpr(kernel)(f32(512, 64), f32(64, 256)).jaxpr)
    flops, nbytes = stated or (2 * 512 * 64 * 256, 4 * (512 * 64 + 64 * 256 + 512 * 256))
    assert found.products == pytest.approx(flops) and found.nbytes == nbytes
    assert found.float32 == pytest.approx(flops)
