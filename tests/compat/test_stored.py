"""With a compilation cache folder, what an earlier process compiled is neither lowered nor compiled again."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import Primitive
from jax.interpreters import mlir as public_mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from programs.program import assert_same, host

import mpmd
import scheduler
from mpmd import _jax_compat as compat
from mpmd._jax_compat import stored_programs

X = jnp.ones((4, 4))


@pytest.fixture
def folder(tmp_path):
    """JAX's compilation cache folder, new and empty."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def _loss(w, x):
    for i, p in enumerate(w):
        x = jnp.tanh((mpmd.mark_stage_end(x) if i else x) @ p)
    return jnp.mean(jax.nn.relu(jnp.sort(x)) ** 2)


def _with_policy(w, xs):
    def layer(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    def loss(w, x):
        for i, p in enumerate(w):
            x = mpmd.mark_stage_end(x) if i else x
            x = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(p, x)
        return jnp.mean(x**2)

    grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(3))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def _step(w, xs):
    grads = mpmd.treduce(lambda x: jax.grad(_loss)(w, x), xs, schedule=scheduler.OneFOneB(3))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def _started(shape=(3, 1), axis_type=AxisType.Explicit, step=_step):
    """What a new process would find: how many programs were compiled, how many were stored, and the result."""
    jax.clear_caches()
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = mpmd.MpmdMesh(jax.make_mesh(shape, ("stage", "data"), (axis_type,) * 2, devices=devices), "stage")
    w, xs = [X + i for i in range(3)], jnp.ones((4, 2, 4))
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(w, xs).compile()
    found = compiled._programs.compiler
    return found.num_compiled, found.num_stored, host(compiled(w, xs))


@pytest.mark.parametrize(
    ("shape", "axis_type"),
    [
        pytest.param((3, 1), AxisType.Auto, marks=pytest.mark.exhaustive),
        ((3, 1), AxisType.Explicit),
        pytest.param((3, 2), AxisType.Auto, marks=pytest.mark.slow),
        pytest.param((3, 2), AxisType.Explicit, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_second_start_lowers_and_compiles_nothing(folder, shape, axis_type):
    num_compiled, none, first = _started(shape, axis_type)
    assert num_compiled > 3 and none == 0
    none, num_stored, second = _started(shape, axis_type)
    assert (none, num_stored) == (0, num_compiled)
    assert_same(second, first, 0)


@pytest.mark.slow
def test_programs_of_a_checkpoint_with_a_policy_are_found_by_the_second_start(folder):
    num_compiled, _, first = _started(step=_with_policy)
    none, num_stored, second = _started(step=_with_policy)
    assert (none, num_stored) == (0, num_compiled)
    assert_same(second, first, 0)


@pytest.mark.slow
def test_other_settings_find_nothing(folder):
    num_compiled, _, _ = _started()
    with jax.default_matmul_precision("float32"):
        assert _started()[:2] == (num_compiled, 0)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert _started()[:2] == (num_compiled, 0)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert _started()[:2] == (0, num_compiled)


@pytest.mark.parametrize("pattern", ["*-mpmd", pytest.param("*-cache", marks=pytest.mark.slow)])
def test_damaged_files_are_ignored_with_one_warning(folder, pattern, monkeypatch):
    num_compiled, _, first = _started()
    damaged = sorted(folder.glob(pattern))
    for i, file in enumerate(damaged):
        content = file.read_bytes()
        file.write_bytes((b"", b"[1]", content[: len(content) // 2], bytes(reversed(content)))[i % 4])
    stored_programs._warned.clear()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        none_stored = _started()
    (only,) = [str(w.message) for w in raised if "compilation cache" in str(w.message)]
    assert only.startswith("mpmd: A program in the compilation cache folder is ignored and compiled again: ")
    assert "\n" not in only and len(damaged) >= num_compiled
    assert none_stored[:2] == (num_compiled, 0)
    assert_same(none_stored[2], first, 0)


@pytest.mark.slow
def test_an_entry_that_jax_has_removed_is_compiled_and_kept_again(folder):
    num_compiled, _, _ = _started()
    for file in folder.glob("*-cache"):
        file.unlink()
    assert _started()[:2] == (num_compiled, 0)
    assert _started()[:2] == (0, num_compiled)


@pytest.mark.slow
def test_within_a_size_limit_no_files_of_removed_entries_pile_up(folder):
    jax.config.update("jax_compilation_cache_max_size", 1 << 30)
    compilation_cache.reset_cache()
    try:
        _started()
        for file in folder.glob("*-cache"):
            file.unlink()
        group = jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1])
        mpmd.jit(lambda x: jnp.sort(x @ x), mpmd_mesh=mpmd.MpmdMesh(group, "stage"))(X)
    finally:
        jax.config.update("jax_compilation_cache_max_size", -1)
    assert [len([*folder.glob(f"*-{kind}")]) for kind in ("mpmd", "cache")] == [1, 1]


@pytest.mark.slow
def test_what_calls_back_is_lowered_again(folder):
    def printing(w, xs):
        w = _step(w, xs)
        jax.debug.callback(lambda x: None, w[0][0, 0])
        return w

    num_compiled, _, first = _started(step=printing)
    again, num_stored, second = _started(step=printing)
    assert (again, num_stored) == (1, num_compiled - 1)
    assert_same(second, first, 0)


# --- fingerprints ---


def _fingerprint(fun, *args, name="program", donate=(), options=None, spec=None, device=0):
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[device : device + 1])
    closed = jax.make_jaxpr(fun)(*args)
    ins = [None if spec is None else NamedSharding(mesh, spec)] * len(args)
    return compat.fingerprint(name, closed, mesh, ins, [None] * len(closed.jaxpr.outvars), donate, options)


def _program(x, scale=2.0, length=3, mode="clip"):
    def body(carry, row):
        carry = jax.nn.relu(carry @ x) + jax.nn.logsumexp(row)
        return jax.lax.cond(carry[0, 0] > 0, jnp.sin, jnp.cos, carry), jnp.sort(row)

    key = jax.random.key(0)
    x, rows = jax.lax.scan(jax.checkpoint(body), x, jnp.ones((length, 4), x.dtype) * scale)
    return x.at[jnp.array([0, 1])].add(1.0, mode=mode) + jax.random.normal(key, x.shape, x.dtype), rows, np.arange(3)


CHANGES = {
    "a value": lambda: _fingerprint(lambda x: _program(x, scale=3.0), X),
    "a length": lambda: _fingerprint(lambda x: _program(x, length=4), X),
    "a parameter": lambda: _fingerprint(lambda x: _program(x, mode="drop"), X),
    "a type": lambda: _fingerprint(_program, X.astype(jnp.bfloat16)),
    "a name": lambda: _fingerprint(_program, X, name="another"),
    "a donation": lambda: _fingerprint(_program, X, donate=(0,)),
    "an option": lambda: _fingerprint(_program, X, options={"xla_cpu_enable_fast_min_max": True}),
    "a sharding": lambda: _fingerprint(_program, X, spec=PartitionSpec("data")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_covers(change):
    assert CHANGES[change]() not in (_fingerprint(_program, X), None)


def test_a_fingerprint_covers_constants_by_their_content():
    constants = [np.arange(64.0), np.arange(64.0), np.arange(64.0) + 1, jnp.arange(64.0)]
    found = [_fingerprint(lambda x, c=c: x * c.sum() + c[:4], X) for c in constants[:3]]
    assert found[0] == found[1] != found[2] and None not in found
    assert _fingerprint(lambda x: x + constants[3][:4], X) is not None


def test_a_fingerprint_does_not_depend_on_the_device_nor_on_variables():
    assert _fingerprint(_program, X) == _fingerprint(_program, X) == _fingerprint(_program, X, device=1)


IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:]
import test_stored
print(test_stored._fingerprint(test_stored._program, test_stored.X))
"""


@pytest.mark.slow
def test_a_fingerprint_is_the_same_in_every_process():
    paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    found = {
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, *paths],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {_fingerprint(_program, X)}


def _of_the_users_own():
    """A primitive with the name of one of JAX's."""
    own = Primitive("sin")
    own.def_abstract_eval(lambda x: x)
    public_mlir.register_lowering(own, public_mlir.lower_fun(jnp.cos, multiple_results=False))
    return own


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(lambda x: jax.debug.print("{}", x), id="print"),
        pytest.param(lambda x: jax.pure_callback(lambda x: x, x, x), id="pure_callback"),
        pytest.param(lambda x: jax.lax.map(lambda r: jax.pure_callback(lambda r: r, r, r), x), id="inside a loop"),
        pytest.param(lambda x: jax.ffi.ffi_call("mine", x)(x), id="ffi_call"),
        pytest.param(lambda x: _of_the_users_own().bind(x), id="a primitive of the user"),
    ],
)
def test_what_has_no_fingerprint(fun):
    assert _fingerprint(fun, X) is None


def test_a_lowering_that_the_user_has_replaced_has_no_fingerprint(monkeypatch):
    assert (as_it_is := _fingerprint(jnp.cbrt, X)) is not None
    with monkeypatch.context() as patched:
        patched.setattr(mlir, "_lowerings", dict(mlir._lowerings))
        public_mlir.register_lowering(jax.lax.cbrt_p, public_mlir.lower_fun(jnp.sin, multiple_results=False))
        assert _fingerprint(jnp.cbrt, X) != as_it_is
        public_mlir.register_lowering(jax.lax.cbrt_p, public_mlir.lower_fun(lambda x: x, multiple_results=False))
        assert _fingerprint(jnp.cbrt, X) is None
    assert _fingerprint(jnp.cbrt, X) == as_it_is
