"""With a compilation cache folder, the programs of GPUs that are not here are kept there, serialized."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from plugins import needs_plugin

import mpmd
import scheduler
from mpmd._jax_compat import stored_programs


def _compiled():
    """A step for two groups of four H100s."""

    def loss(w, x):
        return jnp.mean(jnp.sin(mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    def step(w, xs):
        grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2))
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    mesh = mpmd.topology_mesh("h100", (2, 4), ("stage", "data"), "stage")
    w, xs = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4, 8, 64), jnp.float32)
    jax.clear_caches()
    rows = jax.P(None, "data")
    compiled = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, rows)).lower([w, w], xs).compile()
    compiler = compiled._programs.compiler
    for distinct in compiler._distinct.values():
        distinct.on(distinct.program.mesh)  # waits for it
    return compiler


@needs_plugin
@pytest.mark.slow
def test_programs_for_gpus_are_stored_in_the_folder(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        compiler = _compiled()
        compiler.close()
        entries = [stored_programs._extracted(f.read_bytes()) for f in sorted(tmp_path.glob("*-cache"))]
        assert len(entries) == compiler.num_compiled > 3 and all(b"sm_90" in e or b"\x7fELF" in e for e in entries)
        assert len(list(tmp_path.glob("*-mpmd"))) == len(entries)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*must be constructed with a Client")
            assert _compiled().num_compiled == compiler.num_compiled  # what is for another machine is not loaded
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
