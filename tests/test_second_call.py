"""The second and the third call, with new values, of everything that can be called: nothing may be stale."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import BY_NAME
from programs.parts import WIDTH, chain, momentum_state, normal, regression_batch, squared_error, stages_params, train
from programs.pipelines import make_mesh, shared_device
from programs.program import Tools, assert_same, host, pipelined, plain_loop
from samples import slow_first

import mpmd
import scheduler

NUM_STAGES = 3
SCHEDULE = scheduler.OneFOneB(NUM_STAGES)


def _mesh(where):
    if where == "shared":
        return shared_device(NUM_STAGES)
    return mpmd.MpmdMesh(make_mesh(NUM_STAGES, {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[where]), "stage")


def _train_step(tools):
    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    return train(tools, loss)


def _evaluate_in_a_loop(tools):
    def evaluate(params, batch):
        def one(microbatch):
            y = chain(tools, params, microbatch["x"])
            return {"loss": squared_error(y, microbatch["y"]), "y": y}

        return tools.reduce(one, batch, operation={"loss": mpmd.Mean, "y": mpmd.Concat})

    return evaluate


def _evaluate_without_a_loop(tools):
    def evaluate(params, batch):
        y = chain(tools, params, batch["x"][0])
        return {"loss": squared_error(y, batch["y"][0]), "y": y}

    return evaluate


def _initialise(key, scale):
    return jax.tree.map(lambda p: p * scale, momentum_state(stages_params(key, NUM_STAGES)))


def _state(seed):
    return momentum_state(stages_params(jax.random.key(seed), NUM_STAGES))


def _batch(seed):
    return regression_batch(jax.random.key(100 + seed))


def _as_numpy(tree, mpmd_mesh):
    return jax.tree.map(np.asarray, tree)


def _as_device_arrays(tree, mpmd_mesh):
    return jax.tree.map(jnp.asarray, tree)


def _as_arrays_of_the_whole_mesh(tree, mpmd_mesh):
    if mpmd_mesh.jax_mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    return jax.device_put(tree, NamedSharding(mpmd_mesh.jax_mesh, P()))


def _as_arrays_elsewhere(tree, mpmd_mesh):
    return jax.device_put(tree, jax.devices()[-1])


def _as_mpmd_arrays(tree, mpmd_mesh):
    """Replicated in all groups, made by a program of the library itself."""
    sharding = mpmd.MpmdSharding(mpmd_mesh, range(mpmd_mesh.num_groups), P())
    return mpmd.jit(lambda tree: tree, mpmd_mesh=mpmd_mesh, out_shardings=sharding)(tree)


_FORMS = {
    "numpy": _as_numpy,
    "device arrays": _as_device_arrays,
    "arrays of the whole mesh": _as_arrays_of_the_whole_mesh,
    "arrays elsewhere": _as_arrays_elsewhere,
    "MpmdArrays": _as_mpmd_arrays,
}


@functools.cache
def _reference(build):
    return jax.jit(build(plain_loop()))


def _check_calls(step, build, mpmd_mesh, first, forms=_FORMS):
    """In each form three calls with new values of every argument, then one with the first values again."""
    for form in forms:
        for seed in (0, 1, 2, 0):
            args = first(seed), _batch(seed)
            expected = host(_reference(build)(*args))
            try:
                assert_same(host(step(*(_FORMS[form](arg, mpmd_mesh) for arg in args))), expected, 2e-5)
            except Exception as error:
                error.add_note(f"from {form}, values of seed {seed}")
                raise


_IN_TURNS = [
    pytest.param(form, where, marks=() if form == "device arrays" else pytest.mark.slow)
    for form, where in zip(_FORMS, itertools.cycle(["auto", "explicit", "shared"]))
]


@pytest.mark.parametrize(("form", "where"), _IN_TURNS)
def test_each_call_of_a_training_step_uses_its_own_values(form, where):
    mpmd_mesh = _mesh(where)
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    _check_calls(step, _train_step, mpmd_mesh, _state, [form])


@pytest.mark.parametrize("where", slow_first("shared", "auto", "explicit"))
def test_each_call_of_a_compiled_training_step_uses_its_own_values(where):
    mpmd_mesh = _mesh(where)
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    compiled = step.lower(_state(7), _batch(7)).compile()
    _check_calls(compiled, _train_step, mpmd_mesh, _state)


@pytest.mark.slow
def test_each_call_of_a_forward_only_loop_uses_its_own_values():
    mpmd_mesh = _mesh("auto")
    step = mpmd.jit(_evaluate_in_a_loop(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    _check_calls(step, _evaluate_in_a_loop, mpmd_mesh, lambda seed: _state(seed)["params"])


def test_each_call_of_a_function_without_a_loop_uses_its_own_values():
    mpmd_mesh = _mesh("explicit")
    step = mpmd.jit(_evaluate_without_a_loop(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    _check_calls(step, _evaluate_without_a_loop, mpmd_mesh, lambda seed: _state(seed)["params"])


@pytest.mark.slow
def test_an_unchanged_state_may_be_mixed_with_new_values():
    """Only the batch is new in the second call, only one stage's parameters in the third."""
    mpmd_mesh = _mesh("auto")
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    reference = _reference(_train_step)
    state, other = _state(0), _state(1)
    changed = {**state, "params": [state["params"][0], other["params"][1], state["params"][2]]}
    for form in _FORMS.values():
        made = {id(tree): form(tree, mpmd_mesh) for tree in (state, changed)}
        for tree, seed in ((state, 0), (state, 1), (changed, 1), (state, 1)):
            assert_same(host(step(made[id(tree)], _batch(seed))), host(reference(tree, _batch(seed))), 2e-5)


@pytest.mark.parametrize(
    "scale", [pytest.param(2.0, marks=pytest.mark.slow), jnp.full(WIDTH, 0.5)], ids=["number", "weak"]
)
def test_a_weakly_typed_value_that_comes_back_as_it_was_is_not_traced_again(scale):
    traced = []

    def step(state, batch):
        traced.append(1)
        params, scale = state

        def loss(params, m):
            return squared_error(chain(pipelined(SCHEDULE), params, m["x"] * scale), m["y"])

        grads = mpmd.treduce(lambda m: jax.grad(loss)(params, m), batch, schedule=SCHEDULE)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), scale

    step = mpmd.jit(step, mpmd_mesh=_mesh("auto"))
    state = stages_params(jax.random.key(0), NUM_STAGES), scale
    for seed in range(3):
        state = step(state, _batch(seed))
        assert state[1].weak_type
    assert len(traced) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "donate"),
    slow_first(("explicit", (0,)), ("auto", ()), ("shared", (0,))),
    ids=["explicit-donated", "auto-kept", "shared-donated"],
)
def test_a_state_initialised_into_its_layout_trains_as_under_jax_jit(where, donate):
    mpmd_mesh = _mesh(where)
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh, donate_argnums=donate)
    compiled = step.lower(jax.eval_shape(_initialise, jax.random.key(0), 1.0), _batch(0)).compile()
    layout = compiled.input_shardings[0][0]
    initialise = mpmd.jit(_initialise, mpmd_mesh=mpmd_mesh, out_shardings=layout)
    reference = _reference(_train_step)
    for seed, scale in ((0, 1.0), (1, 1.0), (1, 0.5)):
        key = jax.random.key(seed)
        state, expected = initialise(key, scale), _initialise(key, scale)
        assert_same(host(state), host(expected), 1e-6)
        for leaf, sharding in zip(*map(jax.tree.leaves, (state, layout)), strict=True):
            assert leaf.mpmd_sharding.is_equivalent_to(sharding, leaf.ndim)
        for batch in map(_batch, range(3)):
            state, metrics = compiled(state, batch)
            expected, expected_metrics = reference(expected, batch)
            assert_same(host((state, metrics)), host((expected, expected_metrics)), 2e-5)


@pytest.mark.parametrize(
    "make_key", [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.slow)], ids=["typed", "raw"]
)
def test_an_initialiser_makes_other_values_from_another_key(make_key):
    initialise = mpmd.jit(lambda key: _initialise(key, 1.0), mpmd_mesh=_mesh("explicit"))
    for seed in (0, 1, 2, 0):
        assert_same(host(initialise(make_key(seed))), host(_initialise(make_key(seed), 1.0)), 1e-6)


@pytest.mark.slow
def test_the_state_of_one_step_evaluates_and_trains_in_others():
    """Three compiled functions hand one state to each other, several times around."""
    mpmd_mesh = _mesh("explicit")
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    evaluate = mpmd.jit(_evaluate_in_a_loop(pipelined(scheduler.GPipe(NUM_STAGES))), mpmd_mesh=mpmd_mesh)
    predict = mpmd.jit(_evaluate_without_a_loop(pipelined(None)), mpmd_mesh=mpmd_mesh)
    state = expected = _state(0)
    for seed in range(3):
        state, metrics = step(state, _batch(seed))
        expected, expected_metrics = _reference(_train_step)(expected, _batch(seed))
        assert_same(host((state, metrics)), host((expected, expected_metrics)), 2e-5)
        for function, build in ((evaluate, _evaluate_in_a_loop), (predict, _evaluate_without_a_loop)):
            args = state["params"], _batch(seed + 10)
            expected_outputs = _reference(build)(expected["params"], _batch(seed + 10))
            assert_same(host(function(*args)), host(expected_outputs), 2e-5)


@pytest.mark.slow
def test_where_the_user_says_to_what_place_an_argument_goes_all_calls_are_of_one_program():
    mesh = _mesh("auto")
    (x,) = mpmd.jit(lambda x: (x * 2,), mpmd_mesh=mesh, out_shardings=mpmd.MpmdSharding(mesh, 2))(np.arange(4.0))
    traced = []
    for wish in mpmd.MpmdSharding(mesh, 1), P():

        def double(x):
            traced.append(x)
            return x * 2

        step = mpmd.jit(double, mpmd_mesh=mesh, in_shardings=wish)
        for _ in range(4):
            np.testing.assert_array_equal(step(x), 2 * x)
        assert [len(found) for found in step._cache.values()] == [1]
    assert len(traced) == 2


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # by jit
def test_arrays_of_64_bits_from_elsewhere_are_taken_as_jit_takes_them():
    mesh = _mesh("auto")
    step, plain = mpmd.jit(lambda x: x * 2, mpmd_mesh=mesh), jax.jit(lambda x: x * 2)
    with jax.enable_x64(True):
        values = [jnp.arange(3.0) / 3, jnp.asarray(3), jnp.asarray([1, 2])]
        wide = [step(x) for x in values]
    for x, of_step in zip(values, wide, strict=True):
        assert_same(host(step(x)), host(plain(x)), 0)
        assert_same(host(step(of_step)), host(plain(plain(x))), 1e-6)


@pytest.mark.slow
def test_a_state_moves_between_pipelines_of_different_schedules():
    """Loop placement and chain placement put stages in different groups; the state of one enters the other."""
    program = BY_NAME["residual_mlp"]
    mpmd_mesh = shared_device(2)
    interleaved = mpmd.jit(program.build(pipelined(scheduler.InterleavedOneFOneB(4, 2))), mpmd_mesh=mpmd_mesh)
    chain_of_two = BY_NAME["residual_mlp"].build(
        Tools(**{**vars(pipelined(scheduler.OneFOneB(2))), "mark": _every_second_mark()})
    )
    state, steps = program.state(), [interleaved, mpmd.jit(chain_of_two, mpmd_mesh=mpmd_mesh), interleaved]
    for step, batch, (expected_state, _) in zip(steps, program.batches(), program.expected, strict=True):
        state, _ = step(state, batch)
        assert_same(host(state), expected_state, 2e-5)


def _every_second_mark():
    """Marks only the second of three boundaries: four stages' worth of layers in two."""
    calls = []

    def mark(x):
        calls.append(None)
        return mpmd.mark_stage_end(x) if len(calls) % 3 == 2 else x

    return mark


def test_results_are_not_overwritten_by_later_calls():
    mpmd_mesh = _mesh("auto")
    evaluate = mpmd.jit(_evaluate_in_a_loop(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    params = _state(0)["params"]
    results = [evaluate(params, _batch(seed)) for seed in range(3)]
    for seed, result in enumerate(results):
        assert_same(host(result), host(_reference(_evaluate_in_a_loop)(params, _batch(seed))), 2e-5)


def test_arguments_overwritten_after_the_call_do_not_change_its_result():
    """The caller may reuse its numpy buffers as soon as the call has returned."""
    mpmd_mesh = _mesh("auto")
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    state = _state(0)
    buffer = jax.tree.map(np.array, _batch(0))
    results = []
    for seed in range(3):
        for name, value in _batch(seed).items():
            buffer[name][...] = value
        results.append(step(state, buffer))
        for value in buffer.values():
            value[...] = np.nan
    for seed, result in enumerate(results):
        assert_same(host(result), host(_reference(_train_step)(state, _batch(seed))), 2e-5)


@pytest.mark.slow
def test_arithmetic_on_results_between_calls_is_seen_by_the_next_call():
    """An MpmdArray behaves as an array: what is made of it goes back in."""
    mpmd_mesh = _mesh("auto")
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    state = expected = _state(0)
    for seed in range(3):
        state, _ = step(state, _batch(seed))
        expected, _ = _reference(_train_step)(expected, _batch(seed))
        state = {**state, "params": jax.tree.map(lambda p: 0.5 * p, state["params"])}
        expected = {**expected, "params": jax.tree.map(lambda p: 0.5 * p, expected["params"])}
    assert_same(host(state), host(expected), 2e-5)


@pytest.mark.slow
def test_new_values_of_a_closed_over_array_need_a_new_jit_and_get_it():
    def build(tools, scale):
        def evaluate(params, xs):
            return tools.reduce(lambda x: jnp.sum(scale * chain(tools, params, x)), xs)

        return evaluate

    params = stages_params(jax.random.key(0), 2)
    for seed in range(3):
        scale, xs = normal(jax.random.key(seed), WIDTH), _batch(seed)["x"]
        evaluate = mpmd.jit(build(pipelined(scheduler.GPipe(2)), scale), mpmd_mesh=shared_device(2))
        assert_same(host(evaluate(params, xs)), host(build(plain_loop(), scale)(params, xs)), 2e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_the_user_does_with_a_captured_array_does_not_reach_the_step(schedule):
    """On CPU devices an array may stay where numpy has it (where that begins at a multiple of 64 bytes)."""
    memory = np.zeros(4 * 64 + 16, np.float32)
    first = (-memory.ctypes.data % 64) // 4
    table = memory[first : first + 4 * 64].reshape(4, 64)
    table[:] = 1
    start = jnp.ones((64, 4))

    def step(w, xs):
        loss = lambda w, x: jnp.mean((mpmd.mark_stage_end(x @ w) @ table) ** 2)  # noqa: E731
        grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule)
        return w - 0.01 * grads - 0.1 * (w - start)

    xs, expected = np.ones((2, 3, 64), np.float32), np.ones((64, 4), np.float32)
    plain, train = jax.jit(step), mpmd.jit(step, mpmd_mesh=shared_device(2), donate_argnums=0)
    w = start
    for _ in range(3):
        expected, w = plain(expected, xs), train(w, xs)
        table[:] += 1
    assert start.is_deleted()
    assert_same(host(w), host(expected), 2e-5)


def test_a_decorated_step_is_called_as_one_that_is_wrapped():
    mpmd_mesh = _mesh("auto")

    @mpmd.jit(mpmd_mesh=mpmd_mesh, donate_argnums=(0,))
    def step(state, batch):
        """What the user wrote."""
        return _train_step(pipelined(SCHEDULE))(state, batch)

    assert step.__name__ == "step" and step.__doc__ == "What the user wrote."
    state = expected = _state(0)
    state = jax.tree.map(jnp.copy, state)
    for seed in range(3):
        state, _ = step(state, _batch(seed))
        expected, _ = _reference(_train_step)(expected, _batch(seed))
    assert_same(host(state), host(expected), 2e-5)


def test_the_same_step_on_plain_jit_uses_its_own_values():
    step = jax.jit(_train_step(pipelined(SCHEDULE)))
    for seed in (0, 1, 2):
        expected = host(_reference(_train_step)(_state(seed), _batch(seed)))
        assert_same(host(step(_state(seed), _batch(seed))), expected, 2e-5)


def test_a_call_after_a_failed_one_is_right():
    mpmd_mesh = _mesh("auto")
    step = mpmd.jit(_train_step(pipelined(SCHEDULE)), mpmd_mesh=mpmd_mesh)
    state = _state(0)
    step(state, _batch(0))
    with pytest.raises(KeyError):
        step(state, {"x": _batch(1)["x"]})
    with pytest.raises(ValueError, match="different lengths"):
        step({**state, "params": state["params"][:2]}, _batch(1))
    with pytest.raises(TypeError):
        step(state, {"x": _batch(1)["x"], "y": _batch(1)["y"][..., :3]})
    assert_same(host(step(state, _batch(2))), host(_reference(_train_step)(state, _batch(2))), 2e-5)
