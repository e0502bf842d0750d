"""`mpmd.role` and the table of `mpmd.jit`: what each role computes runs in its groups, whatever graph they make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.role_graphs import RoleGraph
from samples import slow_first

import mpmd
import scheduler
from scheduler.ordering import longest_paths

D = 6


def mesh_of(num_groups):
    return mpmd.MpmdMesh(jax.make_mesh((num_groups,), ("stage",), devices=jax.devices()[:num_groups]), "stage")


@pytest.mark.parametrize("seed", slow_first(*range(120)))
def test_any_graph_of_roles_computes_what_jit_computes(seed):
    RoleGraph(seed, 3).check(mesh_of(3))


def dense(w, x):
    return jnp.tanh(x @ w)


def layers(w, x):
    for k in range(4):
        x = mpmd.mark_layer_end(jnp.tanh(x @ w[k]))
    return x


policy, reference, critic = (mpmd.role(name)(layers) for name in ("policy", "reference", "critic"))
TABLE = {"policy": (0, 1), "reference": 2, "critic": 3}


def loss(params, frozen, x):
    """A reference that is not trained, a critic beside the policy, and all three in the loss."""
    near = jax.lax.stop_gradient(reference(frozen, x))
    value = critic(params["critic"], x)
    y = policy(params["policy"], x)
    return jnp.mean((y - near) ** 2) + jnp.mean((value - x) ** 2) + jnp.mean(y * jax.lax.stop_gradient(value))


def step(params, frozen, xs, schedule="1f1b"):
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, frozen, x), xs, schedule)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def data(seed=0):
    rng = np.random.default_rng(seed)
    weights = [(rng.normal(size=(4, D, D)) / 2).astype(np.float32) for _ in range(3)]
    return {"policy": weights[0], "critic": weights[1]}, weights[2], rng.normal(size=(6, 3, D)).astype(np.float32)


def test_a_policy_its_reference_and_its_critic_have_groups_of_their_own():
    """The bits of `jax.jit`; and the reference runs ahead by no more than what waits for the policy."""
    params, frozen, xs = data()
    train = mpmd.jit(step, mpmd_mesh=mesh_of(4), roles=TABLE)
    state, expected = params, params
    for _ in range(2):
        state, value = train(state, frozen, xs)
        expected, other = jax.jit(step)(expected, frozen, xs)
        assert float(value) == float(other)
        jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(state), expected)
    assert state["policy"].mpmd_idxs == (0, 1) and state["critic"].mpmd_idxs == (3,)
    compiled = train.lower(state, frozen, xs).compile()
    assert compiled.input_shardings[0][1].mesh_ids == {2}
    text = compiled.explain()
    for stage, name in enumerate(("reference", "critic", "policy.0", "policy.1")):
        assert f"stage {stage} ({name})" in text
    (loop,) = train.lower(state, frozen, xs)._outline.loops
    assert loop.schedule.reads == ((), (), (), (0, 1, 2)) and loop.schedule.placement == (2, 3, 0, 1)
    assert max(loop.simulated().peak_activations) <= 2
    assert loop.schedule.costs.input_grad[0] == 0 < loop.schedule.costs.input_grad[1]
    assert "bubble" in str(compiled.profile((state, frozen, xs), steps=1))


def test_a_role_without_a_loop_runs_in_its_groups_and_leaves_its_result_there():
    params, frozen, xs = data(1)

    def answer(params, frozen, x):
        found = policy(params["policy"], x), reference(frozen, x), mpmd.role("critic")(lambda x: x + 1)(x)
        return [y.T for y in found]  # of another shape than `x`, or one would take its place

    run = mpmd.jit(answer, mpmd_mesh=mesh_of(4), roles=TABLE)
    found = run(params, frozen, xs[0])
    assert [x.mpmd_idxs for x in found] == [(1,), (2,), (3,)]
    jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(found), jax.jit(answer)(params, frozen, xs[0]))
    where = run.lower(params, frozen, xs[0]).compile().input_shardings[0]
    assert where[0]["policy"].mesh_ids == {0, 1} and where[1].mesh_ids == {2}
    gradient = mpmd.jit(jax.grad(loss), mpmd_mesh=mesh_of(4), roles=TABLE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        mpmd.device_get(gradient(params, frozen, xs[0])),
        jax.jit(jax.grad(loss))(params, frozen, xs[0]),
    )


def scanned_layers(w, x):
    return jax.lax.scan(lambda x, w: (mpmd.mark_layer_end(jnp.tanh(x @ w)), None), x, w)[0]


@pytest.mark.parametrize("model", [layers, scanned_layers])
@pytest.mark.parametrize("groups", [(0, 1), (1, 0)])
def test_gradients_without_a_loop_are_where_the_layers_of_the_role_are(model, groups):
    first, last = groups
    params, x = list(np.ones((4, 64, 64), np.float32) / 64), np.ones((32, 64), np.float32)
    params = np.stack(params) if model is scanned_layers else params
    gradient = jax.grad(lambda params, x: jnp.mean(mpmd.role("policy")(model)(params, x) ** 2))
    compiled = mpmd.jit(gradient, mpmd_mesh=mesh_of(2), roles={"policy": groups}).lower(params, x).compile()
    held, rows = compiled.input_shardings[0]
    if model is scanned_layers:
        assert held.split == {first: ((0, 2),), last: ((2, 4),)}
    else:
        assert [one.mesh_ids for one in held] == [{first}, {first}, {last}, {last}]
    assert rows.mesh_ids == {first}
    found, expected = compiled(params, x), jax.jit(gradient)(params, x)
    assert jax.tree.map(lambda x: x.mpmd_sharding, found) == held
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), mpmd.device_get(found), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_meet_in_a_group_that_has_two_of_the_roles(schedule):
    """Those of `aside` are two terms, and one of them has met that of `other` before, in the encoder's stage."""
    encoder, aside, other = (mpmd.role(name) for name in ("encoder", "aside", "other"))

    def loss(params, x):
        h = encoder(dense)(params[0], x)
        y, z = aside(lambda w, h: h + dense(w, h))(params[1], h), other(dense)(params[2], h)
        return jnp.mean((y - x) ** 2) + jnp.mean(z**2)

    def train(params, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule)

    params, xs = list(data()[0]["policy"][:3]), data()[2]
    found = mpmd.jit(train, mpmd_mesh=mesh_of(2), roles={"encoder": 0, "aside": 0, "other": 1})(params, xs)
    expected = jax.jit(train)(params, xs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), mpmd.device_get(found), expected)


def test_two_loops_of_a_step_have_their_stages_in_different_groups():
    params, _, xs = data()

    def twice(params, xs):
        near = mpmd.treduce(lambda x: critic(params["critic"], x), xs, "1f1b", operation=mpmd.Concat)
        far = mpmd.treduce(lambda x: policy(params["policy"], x), xs, "1f1b", operation=mpmd.Concat)
        return near, far

    run = mpmd.jit(twice, mpmd_mesh=mesh_of(4), roles=TABLE)
    found = run(params, xs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        mpmd.device_get(found),
        jax.jit(twice)(params, xs),
    )
    where = run.lower(params, xs).compile().input_shardings[0][0]
    assert where["critic"].mesh_ids == {3} and where["policy"].mesh_ids == {0, 1}


@pytest.mark.slow
def test_lists_of_microbatches_pass_roles():
    params, frozen, xs = data(2)
    batches = [xs[0], xs[1, :2], xs[2], xs[3, :1], xs[4, :2]]
    found, expected = mpmd.jit(step, mpmd_mesh=mesh_of(4), roles=TABLE)(params, frozen, batches), params
    value, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
    for x in batches:
        one, more = jax.jit(jax.value_and_grad(loss))(params, frozen, x)
        value, grads = value + one, jax.tree.map(jnp.add, grads, more)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    np.testing.assert_allclose(float(found[1]), value, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), mpmd.device_get(found[0]), expected)


def test_without_a_table_a_role_is_a_stage_of_that_name():
    params, _, xs = data(3)

    def plain(w, xs):
        def one(x):
            return jax.grad(lambda w: jnp.sum(mpmd.role("tail")(dense)(w[1], mpmd.role("head")(dense)(w[0], x))))(w)

        return mpmd.treduce(one, xs, schedule=scheduler.OneFOneB(2))

    lowered = mpmd.jit(plain, mpmd_mesh=mesh_of(2)).lower(params["policy"], xs)
    assert lowered._outline.loops[0].schedule == scheduler.OneFOneB(2)
    assert float(mpmd.role("alone")(jnp.sum)(jnp.ones(3))) == 3.0


def trained(roles, fun=None, schedule="1f1b", cuts=None, num_groups=4):
    params, frozen, xs = data()

    def one(params, frozen, xs):
        return mpmd.treduce(lambda x: jax.grad(fun or loss)(params, frozen, x), xs, schedule, cuts=cuts)

    return mpmd.jit(one, mpmd_mesh=mesh_of(num_groups), roles=roles).lower(params, frozen, xs)


def scanned(params, frozen, x):
    return jnp.sum(jax.lax.scan(lambda c, w: (policy(params["policy"], c) + w[0, 0], None), x, frozen)[0])


def unmarked(params, frozen, x):
    return jnp.sum(mpmd.role("policy")(dense)(params["policy"][0], x))


def marked_after(params, frozen, x):
    return jnp.sum(mpmd.mark_stage_end(mpmd.role("critic")(dense)(params["critic"][0], x)) ** 2)


def marked_layers_after(params, frozen, x):
    return jnp.sum(mpmd.mark_layer_end(mpmd.role("critic")(dense)(params["critic"][0], x)) ** 2)


def test_layer_ends_behind_the_last_role_say_nothing():
    assert trained({"critic": 2}, marked_layers_after)._outline.loops[0].schedule.placement == (2,)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mpmd.role(3), TypeError, "Pass a name"),
        (lambda: mpmd.role("x")(lambda: None)(), TypeError, "role 'x': got PyTreeDef(None), which holds no array"),
        (lambda: trained([0]), ValueError, "Pass the groups of each role"),
        (lambda: trained({"policy": 4}), ValueError, "the mesh has groups 0..3"),
        (lambda: trained({"policy": ()}), ValueError, "Pass a group or a tuple of groups"),
        (lambda: trained({"policy": (1, 1)}), ValueError, "names a group twice"),
        (lambda: trained({"policy": 0, "critic": 1}), mpmd.StageError, "is not in the table: roles has 'policy', 'cri"),
        (lambda: trained(TABLE, scanned), mpmd.StageError, "role 'policy' inside scan"),
        (lambda: trained(TABLE, unmarked), mpmd.StageError, "its function no marks: a stage is in one group"),
        (lambda: trained(TABLE, marked_after), mpmd.StageError, "follows the last role of the loop"),
        (lambda: trained(TABLE, cuts=(1, 1, 1, 1)), mpmd.StageError, "and its stages are roles"),
        (lambda: trained(TABLE, schedule=scheduler.OneFOneB(4)), mpmd.StageError, "the roles of the loop are in (2, 3"),
        (lambda: trained(TABLE, schedule="zb-v"), mpmd.StageError, "Take '1f1b' or 'gpipe'"),
        (lambda: scheduler.GraphSchedule(((1,), ()), (0, 1)), ValueError, "a stage reads earlier ones only"),
        (lambda: scheduler.GraphSchedule(((), ()), (0, 2), num_groups=2), ValueError, "placed in group 2"),
        (lambda: scheduler.GraphSchedule(((),), (0, 1)), ValueError, "expected one for each stage"),
        (lambda: scheduler.GraphSchedule(((),), (0,), "zb"), ValueError, "expected one of 1f1b, gpipe"),
    ],
)
def test_mistakes_are_said_with_what_to_do(make, error, words):
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value)


def test_a_schedule_over_a_chain_is_1f1b_or_gpipe():
    for p in range(1, 6):
        for m in (1, 3, 8):
            chain = tuple((s - 1,) if s else () for s in range(p))
            assert scheduler.GraphSchedule(chain, range(p)).orders(m) == scheduler.OneFOneB(p).orders(m)
            assert scheduler.GraphSchedule(chain, range(p), "gpipe").orders(m) == scheduler.GPipe(p).orders(m)


@pytest.mark.parametrize("seed", range(20))
def test_orders_over_random_graphs_run_and_hold_no_more_than_the_longest_way(seed):
    """Of any graph and placement; groups may be without a stage. Proved by `check`, too, and adaptive ones alike."""
    rng = np.random.default_rng(seed)
    stages, groups, m = (int(rng.integers(1, k)) for k in (8, 5, 9))
    reads = tuple(tuple(rng.permutation(s)[: rng.integers(0, s + 1)].tolist()) for s in range(stages))
    schedule = scheduler.GraphSchedule(reads, rng.integers(groups, size=stages).tolist(), num_groups=groups)
    timeline = scheduler.simulate(schedule, m, scheduler.Costs(transfer_s=float(rng.random())))
    assert timeline.critical_path and str(timeline)
    most = longest_paths(schedule.reads)
    for group, held in enumerate(timeline.peak_activations):
        assert held <= sum(min(m, most[s]) for s in range(stages) if schedule.placement[s] == group)
    graph = scheduler.TaskGraph.over(schedule.reads)
    for one in (schedule, scheduler.Adaptive(schedule), scheduler.CustomSchedule.from_schedule(schedule, m)):
        scheduler.check(scheduler.lower(graph, one, m))
