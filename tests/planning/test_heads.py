"""`mpmd.tune` divides the head over all groups where that is faster."""

import jax
import jax.numpy as jnp
import pytest
from plugins import needs_plugin

import mpmd
import scheduler

GROUPS, WIDTH, LAYERS, TOKENS = 4, 2048, 16, 4096
GRAPH = scheduler.GraphSchedule(((),) * (2 * GROUPS + 1), (*range(GROUPS), *range(GROUPS), GROUPS - 1))
ROLES = {"trunk": tuple(range(GROUPS)), "loss": GROUPS - 1} | {f"words {k}": k for k in range(GROUPS)}


def trunk(params, tokens):
    x = params["embed"][tokens]
    for p in params["layers"]:
        x = mpmd.mark_layer_end(x + jnp.tanh(x @ p["up"]) @ p["down"])
    return x


def words(w, first, x, labels):
    z, own = (x @ w).astype(jnp.float32), labels - first
    top = jax.lax.stop_gradient(z.max(-1))
    hit = jnp.take_along_axis(z, own.clip(0, w.shape[1] - 1)[..., None], -1)[..., 0]
    return top, jnp.exp(z - top[..., None]).sum(-1), jnp.where((own >= 0) & (own < w.shape[1]), hit, 0)


def cross_entropy(parts):
    tops, sums, hits = (jnp.stack(x) for x in zip(*parts, strict=True))
    top = tops.max(0)
    return jnp.mean(top + jnp.log((sums * jnp.exp(tops - top)).sum(0)) - hits.sum(0))


def divided(params, tokens):
    x, labels = mpmd.role("trunk")(trunk)(params, tokens), jnp.roll(tokens, -1)
    heads = enumerate(params["head"])
    parts = [mpmd.role(f"words {k}")(words)(w, k * w.shape[1], x, labels) for k, w in heads]
    return mpmd.role("loss")(cross_entropy)(parts)


def whole(params, tokens):
    z = (trunk(params, tokens) @ params["head"]).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, jnp.roll(tokens, -1)[..., None], -1)[..., 0])


@needs_plugin
@pytest.mark.parametrize(("num_words", "wins"), [(4096, "1f1b"), (131072, GRAPH)])
def test_the_head_is_divided_where_that_is_faster(num_words, wins):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def build(schedule, num_microbatches):
        loss, head = whole, array(WIDTH, num_words)
        if schedule is GRAPH:
            loss, head = divided, [array(WIDTH, num_words // GROUPS)] * GROUPS
        layer = {"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)}
        params = {"embed": array(num_words, WIDTH), "layers": [layer] * LAYERS, "head": head}

        def step(params, batches):
            grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), batches, schedule, operation=mpmd.Mean)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

        mesh = mpmd.topology_mesh("h100", (GROUPS, 1), ("stage", "data"), "stage")
        batches = jax.ShapeDtypeStruct((num_microbatches, TOKENS), jnp.int32)
        return mpmd.jit(step, mpmd_mesh=mesh, roles=ROLES, donate_argnums=0), (params, batches)

    tuning = mpmd.tune(build, schedules=["1f1b", GRAPH], num_microbatches=[32])
    print(tuning)
    assert tuning.best.schedule == wins
