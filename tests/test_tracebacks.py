"""What a user sees of an error: the frames of their own code and the message, unless JAX's filtering is off."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import reshard
import scheduler


def _mesh():
    return mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")


def _model(w, x):
    return jnp.mean(jnp.dot(x, w) ** 2)


def _step(w, xs):
    return mpmd.treduce(lambda x: jax.grad(_model)(w, x), xs, schedule=scheduler.OneFOneB(2))


def _call(step, *args):
    return mpmd.jit(step, mpmd_mesh=_mesh())(*args)


MISTAKES = {
    "no_mark": (lambda: _call(_step, jnp.eye(3), jnp.ones((4, 2, 3))), ["<lambda>", "_call"]),
    "in_the_model": (
        lambda: _call(_step, jnp.eye(3), jnp.ones((4, 2, 5))),
        ["<lambda>", "_call", "_step", "<lambda>", "_model"],
    ),
    "no_array": (lambda: _call(_step, "weights", 1), ["<lambda>", "_call"]),
    "no_such_axis": (lambda: mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "pipe"), ["<lambda>"]),
    "no_sharding": (lambda: reshard.mpmd_to_mpmd_reshard(_call(jnp.sin, 1.0), "stage"), ["<lambda>"]),
    "no_schedule": (lambda: mpmd.treduce(jnp.sin, np.ones(3), schedule="pipe"), ["<lambda>"]),
}


def _shown(mistake):
    """The functions of this file's frames, below the test's own, and the files of the others."""
    with pytest.raises((ValueError, TypeError)) as e:
        mistake()
    frames = traceback.extract_tb(e.value.__traceback__)[1:]
    assert e.value.__cause__ is None and (e.value.__context__ is None or e.value.__suppress_context__)
    return [f.name for f in frames if f.filename == __file__], {f.filename for f in frames} - {__file__}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_shows_the_users_frames_and_none_of_ours(mistake):
    call, functions = MISTAKES[mistake]
    names, others = _shown(call)
    assert names == functions
    assert not any(f"/{package}/" in other for other in others for package in ("mpmd", "reshard", "scheduler"))


def test_with_jaxs_filtering_off_all_frames_are_shown():
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        _, others = _shown(MISTAKES["no_such_axis"][0])
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert any(other.endswith("mpmd/arrays/mesh.py") for other in others)


def test_a_slow_loop_outside_of_a_jitted_function_is_told_at_the_users_line(monkeypatch):
    monkeypatch.setattr("mpmd.ops.loop_primitive._SLOW_S", -1)
    with pytest.warns(
        UserWarning, match=r"compiles its loop again in each call, which took \d+ s\. Call it in"
    ) as found:
        mpmd.treduce(jnp.sin, jnp.ones(3), schedule=None)
    assert [w.filename for w in found] == [__file__]
