"""Kernels in steps for H100s that are not here: those that compile, and what is said about those that cannot."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plugins import HAS_CUDA, needs_plugin

import mpmd

HAS_RUNTIME = HAS_CUDA and importlib.util.find_spec("nvidia.cuda_runtime") is not None
WIDTH, ROWS = 256, 1024


def compiled_with(kernel):
    """A step of two stages, of which the second one begins with the kernel of (rows, WIDTH), and its programs."""
    mesh = mpmd.topology_mesh("h100", (2, 8), ("stage", "data"), "stage", axis_types=(AxisType.Auto,) * 2)
    special = jax.custom_vjp(lambda x: kernel(mesh, x))
    special.defvjp(lambda x: (special(x), None), lambda _, gradient: (gradient,))

    def loss(weights, x):
        x = mpmd.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jnp.mean((special(x) @ weights[1]).astype(jnp.float32) ** 2)

    def step(weights, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule="1f1b")

    rows = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    xs = jax.ShapeDtypeStruct((2, ROWS, WIDTH), jnp.bfloat16, sharding=rows)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * 2
    return mpmd.jit(step, mpmd_mesh=mesh).lower(weights, xs).compile()


@needs_plugin
@pytest.mark.skipif(not HAS_RUNTIME, reason="needs NVIDIA's runtime library: pip install '.[topology]'")
def test_mosaic_attention_compiles_in_a_stage():
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2)

    def attention(mesh, x):
        def of_device(q):
            return attention_mgpu.attention(q, q, q, config)

        q = x.astype(jnp.float16).reshape(8, -1, 4, 64)
        group = mesh.lowering_mesh().abstract_mesh
        y = jax.shard_map(of_device, mesh=group, in_specs=P("data"), out_specs=P("data"), check_vma=False)(q)
        return y.reshape(x.shape).astype(x.dtype)

    compiled = compiled_with(attention)
    assert 'custom_call_target="mosaic_gpu' in compiled.as_text(stage=1, kind="F")
    assert "group 1 on" in compiled.explain()


def printed(mesh, x):
    jax.debug.print("{}", x[0, 0])
    return x


def of_a_library(mesh, x):
    return jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@needs_plugin
@pytest.mark.parametrize(
    ("kernel", "error", "need"),
    [
        (
            printed,
            "Unknown backend: 'gpu' requested",
            (
                "  It has debug_print at {file}:{line}:4 (printed):"
                " a program that calls Python is compiled where the device is."
            ),
        ),
        (
            of_a_library,
            "NOT_FOUND: No FFI handler registered for a_kernel on a platform CUDA",
            (
                "  It has ffi_call of 'a_kernel' at {file}:{line}:11 (of_a_library): the library of the kernel has to"
                ' be loaded, and the kernel registered for CUDA (jax.ffi.register_ffi_target(..., platform="CUDA")).'
            ),
        ),
    ],
)
def test_what_needs_the_device_is_named_with_its_stage_and_line(kernel, error, need):
    with pytest.raises(ValueError) as caught:
        compiled_with(kernel)
    first, second, last = str(caught.value).splitlines()
    assert first.startswith(f"step_stage1_F cannot be compiled for NVIDIA H100 80GB HBM3, which is not here: {error}")
    assert second == need.format(file=__file__, line=kernel.__code__.co_firstlineno + 1)
    assert last == "  Leave it out for the plan, or compile on a machine that has such a device."
