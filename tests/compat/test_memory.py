"""Memory: rematerialisation, values and states in host memory, and what the step is said to need."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs.parts import chain, regression_batch, residual, squared_error, stages_params, stages_state, train_stages
from programs.pipelines import make_mesh, pipeline, shared_device
from programs.program import Program, assert_same, assert_same_history, host, pipelined, plain_loop

import mpmd
import scheduler

RUNS = [("OneFOneB", "auto"), ("ZeroBubbleH1", "explicit")]
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "offload_names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"],
        offload_src="device", offload_dst="pinned_host",
    ),
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}  # fmt: skip


def _two_layers(p, x):
    hidden = checkpoint_name(jnp.sin(residual(p, x)), "hidden")
    return residual(p, jnp.cos(hidden))


def _checkpointed(policy):
    return functools.partial(train_stages, apply=jax.checkpoint(_two_layers, policy=POLICIES[policy]))


def _two_stages(key):
    return stages_state(key, 2)


@pytest.mark.parametrize(
    ("policy", "schedule", "where"),
    [
        pytest.param("nothing", *RUNS[0], marks=pytest.mark.exhaustive),
        pytest.param("names", *RUNS[1], marks=pytest.mark.slow),
        pytest.param("offload_names", *RUNS[0], marks=pytest.mark.exhaustive),
        pytest.param("offload_names", *RUNS[1], marks=pytest.mark.exhaustive),
        pytest.param("offload_dots", *RUNS[1], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_policy_in_each_stage_equals_plain_jax(policy, schedule, where):
    program = Program(policy, _two_stages, regression_batch, _checkpointed(policy), num_stages=2)
    assert_same_history(program.run(pipeline(program, schedule, where), 2), program.expected[:2], program.rtol)


@pytest.mark.parametrize(("schedule", "where"), [RUNS[0], pytest.param(*RUNS[1], marks=pytest.mark.exhaustive)])
def test_what_a_policy_offloads_waits_in_host_memory(schedule, where):
    program = Program("offload", _two_stages, regression_batch, _checkpointed("offload_names"), num_stages=2)
    compiled = pipeline(program, schedule, where).lower(program.state(), next(program.batches(1))).compile()
    (forward,) = [t for p, t in compiled._programs.loops[0].tasks.items() if str(p) == "F0"]
    kinds = [s.memory_kind for s in forward.executable.out_shardings]
    assert "pinned_host" in kinds, kinds


def _adam_step(tools):
    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(state, batch):
        def loss(params, m):
            return squared_error(chain(tools, params, m["x"]), m["y"])

        value, grads = tools.reduce(lambda m: jax.value_and_grad(loss)(state["params"], m), batch, operation=mpmd.Mean)
        opt = jax.device_put(state["opt"], jax.memory.Space.Device)
        updates, opt = optimizer.update(grads, opt, state["params"])
        opt = jax.device_put(opt, jax.memory.Space.Host)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return step


def _adam_state(key):
    params = stages_params(key, 2)
    return {"params": params, "opt": optax.adam(1e-2, eps=1e-3).init(params)}


@pytest.mark.parametrize(
    ("schedule", "axis_type"),
    [
        ("OneFOneB", AxisType.Auto),
        pytest.param("ZeroBubbleH1", AxisType.Explicit, marks=pytest.mark.exhaustive),
    ],
)
def test_optimizer_state_is_kept_in_host_memory_from_step_to_step(schedule, axis_type):
    mesh = mpmd.MpmdMesh(make_mesh(2, axis_type, ("data",)), "stage")
    state, batches = _adam_state(jax.random.key(0)), [regression_batch(jax.random.key(s)) for s in (1, 2)]

    def kept(tree, group):
        sharding = mpmd.MpmdSharding(mesh, group, P(), "pinned_host")
        return jax.tree.map(lambda _: sharding, tree)

    opt = state["opt"][0]
    host_opt = (
        opt._replace(
            count=mpmd.MpmdSharding(mesh, {0, 1}, P(), "pinned_host"),
            mu=[kept(p, g) for g, p in enumerate(opt.mu)], nu=[kept(p, g) for g, p in enumerate(opt.nu)],
        ),
        state["opt"][1],
    )  # fmt: skip
    layout = {"params": None, "opt": host_opt}
    step = mpmd.jit(
        _adam_step(pipelined(getattr(scheduler, schedule)(2))), mpmd_mesh=mesh, in_shardings=(layout, None),
        out_shardings=(layout, None), donate_argnums=0,
    )  # fmt: skip
    plain = jax.jit(_adam_step_on_device)
    expected = jax.tree.map(jnp.copy, state)
    for batch in batches:
        state, out = step(state, batch)
        expected, wanted = plain(expected, batch)
        assert_same(host((state, out)), host((expected, wanted)), 2e-5)
        for leaf in jax.tree.leaves(state["opt"]):
            assert leaf.mpmd_sharding.memory_kind == "pinned_host"
            assert leaf.first_mpmd_replica.sharding.memory_kind == "pinned_host"


def _momentum(params, momenta, xs):
    """One step; the momenta go back to the memory of the host."""

    def loss(p, x):
        return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ p)) @ p.T - x) ** 2)

    grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule="1f1b")
    momenta = jax.device_put(momenta, jax.memory.Space.Device) * 0.9 + grads
    return params - 0.1 * momenta, jax.device_put(momenta, jax.memory.Space.Host)


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_what_a_step_puts_into_host_memory_is_there_wherever_it_stands(num_devices, axis_type):
    """Momenta that begin on the device, before or after the parameters, of which they have the type; donated or not."""
    devices = jax.devices()[: 2 * num_devices]
    axes = jax.make_mesh((2, num_devices), ("stage", "data"), (axis_type,) * 2, devices=devices)
    mesh = mpmd.MpmdMesh(axes, "stage")
    orders = [
        (_momentum, lambda params, momenta: (params, momenta)),
        (lambda m, p, xs: _momentum(p, m, xs), lambda params, momenta: (momenta, params)),
        (lambda m, p, xs: _momentum(p, m, xs)[::-1], None),
    ]
    params, xs = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32), np.ones((4, 4, 8), np.float32)
    for step, order in orders:
        found = []
        for jit, options in ((jax.jit, {}), (mpmd.jit, {"mpmd_mesh": mesh, "donate_argnums": (0, 1)})):
            compiled, state, kinds = jit(step, **options), None, []
            for _ in range(2):
                given = state or (order or (lambda p, m: (m, p)))(params, np.zeros_like(params))
                results = compiled(*given, xs)
                kinds.append([x.sharding.memory_kind for x in results])
                state = order(*results) if order else results
            found.append((kinds, [np.asarray(mpmd.device_get(x)) for x in results]))
        (wanted, expected), (kinds, values) = found
        assert kinds == wanted
        for value, one in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, one, rtol=1e-5, atol=1e-6)


def test_a_sum_on_the_device_does_not_give_its_memory_to_what_goes_to_the_host():
    """Where XLA chooses the layout of one of the results, and the momenta have the type of the sums."""
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Auto, ("data",)), "stage")

    def loss(p, x):
        hidden = mpmd.mark_stage_end(jnp.tanh(x @ p["both"] @ p["w"][0]))
        return jnp.mean((jnp.tanh(hidden @ p["w"][1]) @ p["both"].T - x) ** 2)

    def step(state, xs):
        params, momenta = state
        grads = mpmd.treduce(
            lambda x: jax.grad(loss)(params, x), xs, schedule="1f1b", operation=mpmd.Mean, weights=lambda x: x.shape[0]
        )
        momenta = jax.tree.map(lambda m, g: jax.device_put(m, jax.memory.Space.Device) * 0.9 + g, momenta, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta)
        return params, jax.tree.map(lambda m: jax.device_put(m, jax.memory.Space.Host), momenta)

    random = np.random.default_rng(0)
    params = {"both": random.normal(size=(8, 8)).astype(np.float32), "w": np.ones((2, 8, 8), np.float32) / 8}
    xs = [np.ones((rows, 8), np.float32) for rows in (2, 4, 2)]
    state = params, jax.tree.map(np.zeros_like, params)
    found, expected = mpmd.jit(step, mpmd_mesh=mesh)(state, xs), jax.jit(step)(state, xs)
    assert_same(host(found), host(expected), 1e-5)


def test_an_argument_says_its_memory_and_leaves_its_group_open():
    """A type whose spec divides nothing; and nobody says that donated memory is of no use."""
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Auto, ("data",)), "stage")
    state, batch = _adam_state(jax.random.key(0)), regression_batch(jax.random.key(1))

    def typed(x, kind):
        sharding = jax.NamedSharding(mesh.tracing_mesh(), P(), memory_kind=kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    like = {name: jax.tree.map(lambda x, kind=kind: typed(x, kind), state[name]) for name, kind in _KINDS.items()}
    step = mpmd.jit(_adam_step(pipelined(scheduler.OneFOneB(2))), mpmd_mesh=mesh, donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = step.lower(like, batch).compile()
    layout = compiled.input_shardings[0][0]
    assert {name: {s.memory_kind for s in jax.tree.leaves(layout[name])} for name in layout} == {
        name: {kind} for name, kind in _KINDS.items()
    }
    expected = host(jax.jit(_adam_step_on_device)(state, batch))
    new, out = compiled(state, batch)
    assert_same(host((new, out)), expected, 2e-5)
    assert jax.tree.map(lambda x: x.mpmd_sharding, new) == layout


_KINDS = {"params": None, "opt": "pinned_host"}


def _adam_step_on_device(state, batch):
    optimizer = optax.adam(1e-2, eps=1e-3)

    def loss(params, m):
        return squared_error(chain(plain_loop(), params, m["x"]), m["y"])

    value, grads = plain_loop().reduce(
        lambda m: jax.value_and_grad(loss)(state["params"], m), batch, operation=mpmd.Mean
    )
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}


def test_a_memory_kind_that_the_devices_lack_is_refused():
    mesh = shared_device(2)
    with pytest.raises(ValueError) as raised:
        mpmd.MpmdSharding(mesh, 0, P(), "tape")
    assert str(raised.value).startswith("MpmdSharding: spec=P() does not fit:\n  group 0: ")
    assert "tape" in str(raised.value) and "pinned_host" in str(raised.value)


# --- what a step is said to need ------------------------------------------------------------------


def _wide_step(tools, width, rows_spec=None):
    """Four stages of two wide layers under Adam."""
    optimizer = optax.adam(1e-3)

    def loss(params, m):
        x = m["x"] if rows_spec is None else tools.constrain(m["x"], *rows_spec)
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return squared_error(x, m["y"])

    def step(state, batch):
        value, grads = tools.reduce(lambda m: jax.value_and_grad(loss)(state["params"], m), batch, operation=mpmd.Mean)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    def arguments(rows):
        params = [{"up": jnp.zeros((width, 2 * width)), "down": jnp.zeros((2 * width, width))} for _ in range(4)]
        batch = {name: jnp.zeros((8, rows, width)) for name in ("x", "y")}
        state = {"params": params, "opt": optimizer.init(params)}
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))

    return step, arguments


def _xlas_own(compiled, group):
    """Per device of a group: argument, output and temporary bytes of each executable, as XLA reports them."""
    programs = compiled._programs
    mesh = programs.mesh.groups[group]
    found = {}
    for place, task in programs.loops[0].tasks.items():
        if task.executable is not None and task.executable.mesh == mesh:
            found[str(place)] = task.executable.call.memory_analysis()
    for name, executable in programs.segments.items():
        if executable.mesh == mesh:
            found[name] = executable.call.memory_analysis()
    return found


_CASES = {
    "parameters": (64, 8, (), None),
    "activations": (32, 256, (), None),
    "sharded": (32, 256, ("data",), ("data", None)),
}


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        pytest.param("parameters", "OneFOneB", marks=pytest.mark.slow),
        pytest.param("activations", "OneFOneB", marks=pytest.mark.exhaustive),
        ("activations", "ZeroBubbleH1"),
        pytest.param("sharded", "GPipe", marks=pytest.mark.slow),
    ],
)
def test_memory_is_measured_and_estimated(case, schedule):
    width, rows, axes, spec = _CASES[case]
    mesh = make_mesh(4, AxisType.Auto, axes)
    step, arguments = _wide_step(pipelined(getattr(scheduler, schedule)(4), mesh), width, spec)
    lowered = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"), donate_argnums=0).lower(*arguments(rows))
    guessed = lowered.estimate()
    compiled = lowered.compile()
    found = compiled.memory_analysis()
    matrices = 2 * width * 2 * width * 4
    for group in range(4):
        m, xla = found[group], _xlas_own(compiled, group)
        assert m["parameters"] == matrices
        assert m["state"] == 2 * matrices + 4
        assert m["temporaries"] == max(a.temp_size_in_bytes for a in xla.values())
        # What the optimizer's segment takes and gives, by XLA's count: parameters, state, and as many gradients.
        (update,) = [a for n, a in xla.items() if n.startswith("segment") and a.argument_size_in_bytes > 3 * matrices]
        ours = m["parameters"] + m["state"] + matrices
        assert ours == pytest.approx(update.argument_size_in_bytes, rel=0.1)
        # At the peak of a backward task: what stays, what is in flight, and what the task itself takes.
        backward = max(a.temp_size_in_bytes + a.output_size_in_bytes for n, a in xla.items() if n[0] in "BIW")
        assert m["peak"] <= m["arguments"] + m["gradients"] + m["activations"] + m["temporaries"]
        assert m["peak"] >= m["arguments"] + backward - matrices
        assert guessed[group]["peak"] == pytest.approx(m["peak"], rel=0.25), (group, guessed[group], m)
        for kind in ("parameters", "state", "data", "gradients", "activations"):
            assert guessed[group][kind] == pytest.approx(m[kind], rel=0.25, abs=256), (kind, guessed[group], m)
    if schedule == "OneFOneB":
        assert found[0]["activations"] > found[3]["activations"]


@pytest.mark.slow
def test_parameters_and_rows_that_are_divided_along_one_axis_are_estimated():
    mesh = make_mesh(4, AxisType.Auto, ("data",))
    step, arguments = _wide_step(pipelined(scheduler.OneFOneB(4), mesh), 32, ("data", None))
    state, batch = arguments(256)
    divided = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "data") if x.ndim else P(), state)
    jitted = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"), donate_argnums=0, in_shardings=(divided, None))
    lowered = jitted.lower(state, batch)
    guessed, found = lowered.estimate(), lowered.compile().memory_analysis()
    for group in range(4):
        assert found[group]["parameters"] == 2 * 32 * 2 * 32 * 4 // 2
        for kind in ("parameters", "state", "data", "gradients", "activations"):
            assert guessed[group][kind] == pytest.approx(found[group][kind], rel=0.25, abs=256), (kind, guessed, found)


def test_an_estimate_compiles_nothing_and_counts_host_memory_apart():
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiles.append(event))
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage")
    sharding = mpmd.MpmdSharding(mesh, 0, P(), "pinned_host")
    step = mpmd.jit(lambda a, b: (a, b + 1), mpmd_mesh=mesh, in_shardings=(sharding, None))
    a = jax.ShapeDtypeStruct((100,), jnp.float32)
    guessed = step.lower(a, a).estimate()
    assert "/jax/core/compile/backend_compile_duration" not in compiles
    assert guessed[0]["host"] == 400 and guessed[0]["arguments"] == 400
    assert np.isfinite(list(guessed[1].values())).all()
