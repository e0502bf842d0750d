"""A first call: what it does once only, and that it begins while later programs are compiled."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler
from mpmd import _jax_compat as compat
from mpmd.compile.executable import Executable

STATE = [np.eye(4, dtype=np.float32), np.eye(4, 3, dtype=np.float32)], np.int32(0)
XS = np.arange(24, dtype=np.float32).reshape(3, 2, 4) / 24


def loss(w, x):
    return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)


def step(state, xs):
    w, count = state
    grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), count + 1  # the count's memory is taken over, too


@pytest.fixture
def jitted():
    return mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage"), donate_argnums=0)


def test_a_loops_body_is_traced_once(monkeypatch):
    def traced_again(_):
        raise AssertionError("the body is traced again")

    monkeypatch.setattr(compat, "jaxpr_as_fun", traced_again)
    assert [v.aval.shape for v in jax.make_jaxpr(step)(STATE, XS).jaxpr.outvars] == [(4, 4), (4, 3), ()]


def test_tasks_run_while_the_update_is_compiled(jitted, monkeypatch):
    compile_program, call, has_run = compat.compile_program, Executable.__call__, threading.Event()

    def compile_later(lowered, program):
        assert "after_loop" not in program.name or has_run.wait(60), "no task runs before the update is compiled"
        return compile_program(lowered, program)

    def noted(self, *arrays):
        results = call(self, *arrays)
        has_run.set()
        return results

    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # threads that compile
    monkeypatch.setattr(compat, "compile_program", compile_later)
    monkeypatch.setattr(Executable, "__call__", noted)
    result = jitted(jax.tree.map(jnp.asarray, STATE), XS)
    expected = jax.jit(step)(STATE, XS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), result, expected)


def test_no_argument_is_lost_when_a_program_cannot_be_compiled(jitted, monkeypatch):
    state, compile_program = jitted(jax.tree.map(jnp.asarray, STATE), XS), compat.compile_program

    def compile_some(lowered, program):
        if "after_loop_group0" in program.name:  # what runs last
            raise RuntimeError("no memory to compile")
        return compile_program(lowered, program)

    jitted.clear_cache()
    monkeypatch.setattr(compat, "compile_program", compile_some)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory to compile"):
            jitted(state, XS)
    for kept in jax.tree.leaves(state):
        assert np.isfinite(np.asarray(kept)).all()
    monkeypatch.undo()
    expected = jax.jit(step)(mpmd.device_get(state), XS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jitted(state, XS), expected)
