"""Scales and histories of FP8: state that a step overwrites with what comes as its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.parts import normal

import mpmd

pytest.importorskip("flax")
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp, fm32


@pytest.mark.slow
def test_scales_of_the_type_that_is_combined_by_maximum_are_as_under_jit(tmp_path):
    layer = nn.Dense(16, dot_general_cls=functools.partial(Fp8DirectDotGeneralOp, amax_history_length=8))
    params = [layer.init(jax.random.key(i), jnp.ones((4, 16))) for i in range(2)]
    xs = normal(jax.random.key(3), 4, 4, 16)

    def scales_as(dtype, leaves):
        convert = functools.partial(jax.lax.convert_element_type, new_dtype=dtype)
        return [{**p, OVERWRITE_WITH_GRADIENT: jax.tree.map(convert, p[OVERWRITE_WITH_GRADIENT])} for p in leaves]

    def loss(params, x):
        return jnp.mean(layer.apply(params[1], mpmd.mark_stage_end(jnp.tanh(layer.apply(params[0], x)))) ** 2)

    def step(params, xs, schedule, end=jnp.float32):
        def one(x):
            value, grads = jax.value_and_grad(loss, allow_int=True)(scales_as(fm32, params), x)
            return value, scales_as(end, grads)

        kinds = [{"params": mpmd.Add, OVERWRITE_WITH_GRADIENT: mpmd.Max}] * 2
        return mpmd.treduce(one, xs, schedule=schedule, operation=(mpmd.Add, kinds))

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    plain = jax.jit(functools.partial(step, schedule=None))(params, xs)
    pipelined = mpmd.jit(functools.partial(step, schedule="1f1b"), mpmd_mesh=mesh)
    compiled = pipelined.lower(params, xs).compile()
    jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(compiled(params, xs)), jax.device_get(plain))
    compiled.report(tmp_path / "report.html")
    compiled.explain()
    with pytest.raises(mpmd.StageError) as error:
        mpmd.jit(functools.partial(step, schedule="1f1b", end=fm32), mpmd_mesh=mesh)(params, xs)
    assert "fun returns an array of fp8_meta32, which cannot be reduced. Return it as floats" in str(error.value)
