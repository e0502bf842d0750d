"""Programs of several parts, more than a chain of stages: where each part is, is tested by `test_places`."""

import functools

import jax
import jax.numpy as jnp
import test_partition as partition
from test_partition import D, M, R, V, array, dense, equal_batch, mark, squared_error, training

import mpmd
import scheduler

PROGRAMS = {}


def program(build):
    """Registers a function from a schedule to `(step, args)` under its name."""
    PROGRAMS[build.__name__] = build
    partition.program(functools.wraps(build)(lambda: build(scheduler.OneFOneB(4))))
    return build


def layers(num):
    return [array(D, D) for _ in range(num)]


def tower(ws, x):
    for w in ws:
        x = x + dense(w, x)
    return x


@program
def two_towers(schedule):
    """A frozen reference in stages 0 and 1, then the policy in stages 2 and 3, which starts from the data (DPO)."""

    def loss(params, batch, reference):
        r = mark(tower(reference[:2], batch["x"]))
        r = mark(jax.lax.stop_gradient(tower(reference[2:], r)))
        h = mark(tower(params[:2], batch["x"]))
        return squared_error(tower(params[2:], h), r + batch["y"])

    def step(params, reference, batch):
        value, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss)(params, mb, reference), batch, schedule=schedule
        )
        return partition.sgd(params, grads), value

    return step, (layers(4), layers(4), equal_batch())


@program
def two_trained_towers(schedule):
    """Two encoders of two stages, compared at the end (retrieval); nothing of the first goes through the last mark."""
    batch = {"query": array(M, R, D), "item": array(M, R, D)}

    def loss(params, batch):
        q = tower(params["query"][2:], mark(tower(params["query"][:2], batch["query"])))
        item, q = mark((batch["item"], q))
        k = tower(params["item"][2:], mark(tower(params["item"][:2], item)))
        return -jnp.mean(jax.nn.log_softmax(q @ k.T))

    return training(loss, {"query": layers(4), "item": layers(4)}, batch, schedule=schedule)


@program
def actor_and_critic(schedule):
    """Both start from the data; the marks that end the actor's stages do not see the critic."""

    def loss(params, batch):
        a = mark(tower(params["actor"][:2], batch["x"]))
        a = mark(tower(params["actor"][2:], a))
        v = mark(tower(params["critic"][:2], batch["x"]))
        v = tower(params["critic"][2:], v) @ params["value"]
        advantage = jax.lax.stop_gradient(jnp.mean(batch["y"], axis=1) - v)
        policy = -jnp.mean(advantage * jax.nn.log_softmax(a)[:, 0])
        return policy + squared_error(v, jnp.mean(batch["y"], axis=1))

    params = {"actor": layers(4), "critic": layers(4), "value": array(D)}
    return training(loss, params, equal_batch(), schedule=schedule)


@program
def critic_on_a_shared_encoder(schedule):
    """Stages: encoder, actor, two of the critic. It reads the encoder's output, which no mark hands on to it."""

    def loss(params, batch):
        h = mark(tower(params["encoder"], batch["x"]))
        a = mark(tower(params["actor"], h))
        v = mark(tower(params["critic"][:2], h))
        v = tower(params["critic"][2:], v) @ params["value"]
        return squared_error(a, batch["y"]) + jnp.mean(v**2)

    params = {"encoder": layers(2), "actor": layers(2), "critic": layers(4), "value": array(D)}
    return training(loss, params, equal_batch(), schedule=schedule)


def modulated(p, x, c):
    shift, scale = jnp.split(jax.nn.silu(c) @ p["ada"], 2, -1)
    return x + jnp.tanh((x * (1 + scale) + shift) @ p["up"])


def _conditioning(schedule, block=modulated, first=0):
    params = {"time": array(6, D), "blocks": [{"ada": array(D, 2 * D), "up": array(D, D)} for _ in range(4)]}
    batch = equal_batch() | {"t": array(M, R, 6)}

    def loss(params, batch):
        c, x = jnp.maximum(batch["t"] @ params["time"], 0), batch["x"]
        for i, p in enumerate(params["blocks"]):
            x = x if i == 0 else mark(x)
            x = block(p, x, c) if i >= first else dense(p["up"], x)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def conditioning(schedule):
    """A vector that each block projects by weights of its own (DiT, FiLM)."""
    return _conditioning(schedule)


@program
def conditioning_of_later_blocks(schedule):
    """No block of the stage that makes the vector reads it."""
    return _conditioning(schedule, first=1)


@program
def conditioning_of_checkpointed_blocks(schedule):
    return _conditioning(schedule, jax.checkpoint(modulated))


@program
def conditioning_of_jitted_blocks(schedule):
    return _conditioning(schedule, jax.jit(modulated))


@program
def conditioning_of_blocks_with_a_derivative(schedule):
    """Blocks with a backward pass written by hand, which computes the block again."""
    block = jax.custom_vjp(modulated)
    block.defvjp(lambda *args: (modulated(*args), args), lambda args, g: jax.vjp(modulated, *args)[1](g))
    return _conditioning(schedule, block)


@program
def projections_made_at_the_top(schedule):
    """All blocks' projections of the vector, written before the first block."""
    params = {"time": array(6, D), "ada": [array(D, 2 * D) for _ in range(4)], "up": layers(4)}
    batch = equal_batch() | {"t": array(M, R, 6)}

    def loss(params, batch):
        c, x = jnp.tanh(batch["t"] @ params["time"]), batch["x"]
        projected = [jnp.split(jax.nn.silu(c) @ w, 2, -1) for w in params["ada"]]
        for i, (w, (shift, scale)) in enumerate(zip(params["up"], projected, strict=True)):
            x = x if i == 0 else mark(x)
            x = x + jnp.tanh((x * (1 + scale) + shift) @ w)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def an_embedding_for_each_layer(schedule):
    """Each block looks up the class in a table of its own; one table for all blocks is looked up at the top."""
    params = {"shared": array(V, D), "tables": [array(V, D) for _ in range(4)], "w": layers(4)}
    batch = equal_batch() | {"label": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        shared, x = params["shared"][batch["label"]], batch["x"]
        for i, (w, table) in enumerate(zip(params["w"], params["tables"], strict=True)):
            x = x if i == 0 else mark(x)
            x = dense(w, x + table[batch["label"]] + shared)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


def attention(p, x, states, mask=None):
    q, k, v = x @ p["q"], states @ p["k"], states @ p["v"]
    logits = q @ k.T if mask is None else jnp.where(mask, q @ k.T, -1e9)
    return x + jax.nn.softmax(logits) @ v


def attention_weights():
    return {name: array(D, D) for name in "qkv"}


@program
def encoder_and_decoder(schedule):
    """The encoder in stages 0 and 1; the decoder, which starts from tokens of its own, in stages 2 and 3."""
    params = {
        "source": array(V, D), "target": array(V, D), "encoder": layers(2),
        "cross": [attention_weights() for _ in range(2)], "decoder": layers(2),
    }  # fmt: skip
    batch = {name: array(M, n, dtype=jnp.int32) for name, n in (("source", 5), ("target", R), ("padding", 5))}

    def loss(params, batch):
        states = mark(dense(params["encoder"][0], params["source"][batch["source"]]))
        states = mark(dense(params["encoder"][1], states))
        mask = batch["padding"][None] > 0
        y = params["target"][batch["target"]]
        for i, (cross, w) in enumerate(zip(params["cross"], params["decoder"], strict=True)):
            y = dense(w, attention(cross, y if i == 0 else mark(y), states, mask))
        return squared_error(y, 1.0)

    return training(loss, params, batch, schedule=schedule)


@program
def rotary_tables_and_masks(schedule):
    """Made once at the top, from the documents' positions and segments, and read in every stage."""
    params = [attention_weights() for _ in range(4)]
    batch = equal_batch() | {"position": array(M, R, dtype=jnp.int32), "segment": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        angles = batch["position"][:, None] * 1e4 ** (-jnp.arange(D // 2) / (D // 2))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        mask = (batch["segment"][:, None] == batch["segment"][None]) & jnp.tri(R, dtype=bool)
        x = batch["x"]
        for i, p in enumerate(params):
            x = x if i == 0 else mark(x)
            a, b = jnp.split(x, 2, -1)
            x = attention(p, jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1), x, mask)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def skips_with_a_time_embedding(schedule):
    """A U-Net: two stages down, two up, each up block reads the output of its down block."""
    params = {"time": array(6, D), "projections": layers(4), "w": layers(4)}
    batch = equal_batch() | {"t": array(M, R, 6)}

    def loss(params, batch):
        c = jax.nn.silu(batch["t"] @ params["time"])
        x, skips = batch["x"], []
        for i, (w, projection) in enumerate(zip(params["w"], params["projections"], strict=True)):
            x = x if i == 0 else mark(x)
            x = dense(w, (x if i < 2 else x + skips.pop()) + c @ projection)
            skips += [x] if i < 2 else []
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def losses_of_routers(schedule):
    """In each stage a router, whose loss is part of the sum, and how often it chose each expert, which is a metric."""
    params = {"w": layers(4), "router": [array(D, 5) for _ in range(4)]}

    def loss(params, batch):
        x, balance, chosen = batch["x"], 0.0, []
        for i, (w, router) in enumerate(zip(params["w"], params["router"], strict=True)):
            x = x if i == 0 else mark(x)
            gates = jax.nn.softmax(x @ router)
            chosen.append(jnp.sum(gates > 0.2, axis=0))
            balance += jnp.sum(jnp.mean(gates, axis=0) * jax.lax.stop_gradient(chosen[-1]))
            x = dense(w, x) * gates.max(axis=-1, keepdims=True)
        return squared_error(x, batch["y"]) + 0.01 * balance, jnp.stack(chosen)

    return training(loss, params, equal_batch(), schedule=schedule, has_aux=True)


@program
def exits_written_at_the_end(schedule):
    """A head for the output of each stage, all written after the last mark."""
    params = {"w": layers(4), "exits": [array(D, V) for _ in range(4)]}
    batch = {"x": array(M, R, D), "y": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        x, hidden = batch["x"], []
        for i, w in enumerate(params["w"]):
            x = dense(w, x if i == 0 else mark(x))
            hidden.append(x)
        logits = [jax.nn.log_softmax(h @ w) for h, w in zip(hidden, params["exits"], strict=True)]
        return -sum(jnp.mean(jnp.take_along_axis(p, batch["y"][:, None], 1)) for p in logits)

    return training(loss, params, batch, schedule=schedule)


@program
def two_gradients_in_one_body(schedule):
    """Two losses, each differentiated by itself: the critic's in stages 0 and 1, the actor's in stages 2 and 3."""
    params = {"critic": layers(2), "actor": layers(2)}

    def step(params, batch):
        def critic_loss(ws, mb):
            return squared_error(mark(dense(ws[1], mark(dense(ws[0], mb["x"])))), mb["y"])

        def actor_loss(ws, mb):
            return squared_error(dense(ws[1], mark(dense(ws[0], mb["x"]))), mb["y"])

        def one(mb):
            critic = jax.value_and_grad(critic_loss)(params["critic"], mb)
            actor = jax.value_and_grad(actor_loss)(params["actor"], mb)
            return critic[0] + actor[0], {"critic": critic[1], "actor": actor[1]}

        value, grads = mpmd.treduce(one, batch, schedule=schedule)
        return partition.sgd(params, grads), value

    return step, (params, equal_batch())


NAMES = list(PROGRAMS)
