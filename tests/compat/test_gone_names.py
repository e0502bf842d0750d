"""Names of JAX and Orbax that they do not document: in a release without them, steps and checkpoints still work."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
from jax.extend.core import Primitive

from mpmd import _jax_compat as compat
from mpmd._jax_compat import processes
from reshard.checkpoint import orbax_calls

ROOT = Path(__file__).parents[2]

# In a process of its own: hooks stay once they are there.
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax._src import dtypes
del dtypes.register_canonicalize_value_handler
import mpmd, scheduler
from mpmd._jax_compat import tracing_hooks
tracing_hooks._HOOKS = {f"{name}_of_a_release": hook for name, hook in tracing_hooks._HOOKS.items()}
import reshard._orbax_compat
reshard._orbax_compat.optional = lambda *names: None
assert "reshard.checkpoint" not in sys.modules
import reshard.checkpoint

mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")

def loss(w, x):
    return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

def step(w, xs):
    grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

w, xs = [np.eye(3, dtype=np.float32)] * 2, np.arange(24, dtype=np.float32).reshape(4, 2, 3) / 24
found = mpmd.jit(step, mpmd_mesh=mesh)(w, xs)
for a, b in zip(found, jax.jit(step)(w, xs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(jnp.asarray(a) + a, 2 * b, rtol=1e-6)
reshard.checkpoint.save(sys.argv[1], found)
again = reshard.checkpoint.restore(sys.argv[1], reshard.checkpoint.abstract(found))
assert all(np.array_equal(a, b) and a.mpmd_sharding == b.mpmd_sharding for a, b in zip(again, found, strict=True))
"""


@pytest.mark.slow
def test_steps_and_checkpoints_work_without_the_names_that_hooks_stand_on(tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")], env=environment, text=True, capture_output=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("live_inputs", [(), ([True, True],)])  # since 0.12 JAX gives them, too
def test_the_rule_for_dead_code_is_asked_as_older_and_newer_releases_ask(live_inputs):
    def rule(used, eqn):
        return [used, True], eqn

    primitive = Primitive("of_this_test")
    compat.register_dce_rule(primitive, rule)
    assert compat.pe.dce_rules.pop(primitive)([False], *live_inputs, "eqn") == ([[False], True], "eqn")


def test_callbacks_that_cannot_be_observed_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(processes, "callback", types.SimpleNamespace())
    processes.observe_callbacks(lambda function: None)
    assert vars(processes.callback) == {}


def test_threads_of_orbax_without_the_functions_that_are_wrapped_are_left_as_they_are():
    for name in ("start_async_commit", "_thread_func"):
        kind = type("_AsyncManager", (), {name: lambda self: None})
        before = dict(vars(kind))
        orbax_calls._goes_on_with_call(kind, "start_async_commit", "_thread_func", "_exception")
        assert dict(vars(kind)) == before


def test_a_thread_of_orbax_that_keeps_its_error_elsewhere_ends_as_it_does_by_itself(monkeypatch):
    def done(self):
        self.is_done = True

    thread = type("_SignalingThread", (), {"run": done})
    monkeypatch.setattr(orbax_calls.future, "_SignalingThread", thread)
    monkeypatch.setattr(orbax_calls, "optional", lambda *_: type("Client", (), {}))
    orbax_calls._end_waiting_for_folders()
    assert thread.run is not done
    one = thread()
    one.run()
    assert one.is_done


@pytest.mark.parametrize(
    "gone",
    [
        (
            "from orbax.checkpoint._src import futures\n"
            "sys.modules['orbax.checkpoint._src.futures.future'] = None; vars(futures).pop('future', None)"
        ),
        pytest.param(
            "from orbax.checkpoint._src.serialization import jax_array_handlers\n"
            "del jax_array_handlers._async_serialize_replica_slices",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_orbax_without_a_name_that_must_be_there_is_told_from_one_that_is_broken(gone):
    program = f"import sys, orbax.checkpoint\n{gone}\nimport reshard.checkpoint"
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: reshard.checkpoint: orbax-checkpoint 0.") and last.endswith(
        "Install the release that jax-mpmd was tested with: orbax-checkpoint==0.12.8."
    )
