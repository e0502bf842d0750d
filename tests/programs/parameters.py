"""Which stages a parameter lives in, and whether it is trained at all."""

import jax
import jax.numpy as jnp

import mpmd
from programs.parts import (
    NUM_MICROBATCHES,
    ROWS,
    VOCABULARY,
    WIDTH,
    chain,
    cross_entropy,
    dense,
    dense_params,
    momentum_state,
    momentum_update,
    normal,
    regression_batch,
    residual,
    squared_error,
    stages_params,
    stages_state,
    token_batch,
    train,
)
from programs.program import Program


def _tied_embedding(tools):
    """The embedding's table is also the head's weight."""

    def loss(params, microbatch):
        x = chain(tools, params["body"], params["embedding"][microbatch["tokens"]])
        return cross_entropy(x @ params["embedding"].T, microbatch["targets"])

    return train(tools, loss)


def _embedding_state(key):
    body, table = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "embedding": normal(table, VOCABULARY, WIDTH)})


def _tied_and_scaled(tools):
    """Tied weights, with a scale, a reshape and a transposition between the parameter and its uses."""

    def loss(params, microbatch):
        table = 0.7 * params["embedding"].reshape(WIDTH, VOCABULARY).T
        x = chain(tools, params["body"], table[microbatch["tokens"]] * WIDTH**0.5)
        return cross_entropy(x @ table.T / WIDTH**0.5, microbatch["targets"])

    return train(tools, loss)


def _tied_in_bfloat16(tools):
    """Tied weights that both uses read in bfloat16."""

    def loss(params, microbatch):
        table = params["embedding"].astype(jnp.bfloat16)
        x = chain(tools, params["body"], table[microbatch["tokens"]].astype(jnp.float32))
        return cross_entropy(x.astype(jnp.bfloat16) @ table.T, microbatch["targets"]).astype(jnp.float32)

    return train(tools, loss)


def _one_weight_in_every_stage(tools):
    """The same trained layer is applied in all stages, twice in one of them, besides a layer of each stage."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params["body"]):
            x = x if stage == 0 else tools.mark(x)
            x = residual(params["shared"], residual(p, x))
            if stage == 2:
                x = residual(params["shared"], x)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _shared_state(key):
    body, shared = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "shared": dense_params(shared)})


def _only_shared_weights(tools):
    """A recurrent model: no stage has a parameter of its own; gradients are summed, not averaged."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage in range(4):
            x = residual(params, x if stage == 0 else tools.mark(x))
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch
        )
        grads = jax.tree.map(lambda g: g / NUM_MICROBATCHES, grads)
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _one_layer_state(key):
    return momentum_state(dense_params(key))


def _stacked(tools):
    """One array (stage, in, out); each stage takes its slice."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage in range(4):
            p = jax.tree.map(lambda leaf, stage=stage: leaf[stage], params)
            x = residual(p, x if stage == 0 else tools.mark(x))
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _stacked_state(key):
    return momentum_state(jax.tree.map(lambda *p: jnp.stack(p), *stages_params(key)))


def _stacked_scan(tools):
    """Eight stacked layers; each stage scans over its two."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage in range(4):
            x = x if stage == 0 else tools.mark(x)
            layers = jax.tree.map(lambda leaf, stage=stage: leaf[2 * stage : 2 * stage + 2], params)
            x, _ = jax.lax.scan(lambda x, p: (residual(p, x), None), x, layers)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _eight_layers_state(key):
    return momentum_state(jax.tree.map(lambda *p: jnp.stack(p), *stages_params(key, 8)))


def _frozen_and_unused(tools):
    """`stop_gradient` on one layer and on a scale that all stages use, and a leaf that nothing reads."""

    def loss(params, microbatch):
        frozen = jax.lax.stop_gradient(params["scale"])
        body = [*params["body"][:2], jax.lax.stop_gradient(params["body"][2]), params["body"][3]]
        x = microbatch["x"]
        for stage, p in enumerate(body):
            x = residual(p, x if stage == 0 else tools.mark(x)) * frozen
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _frozen_state(key):
    return momentum_state({"body": stages_params(key), "scale": jnp.float32(0.9), "unused": jnp.ones((2, WIDTH))})


def _train_in_part(tools, loss, rest):
    """A step of `loss(params, state[rest], microbatch)` that trains the parameters and leaves the rest as it is."""

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], state[rest], microbatch),
            batch,
            operation=mpmd.Mean,
        )
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _frozen_first_stages(tools):
    """Only the last two stages are differentiated: the first two have no backward at all."""

    def loss(trained, frozen, microbatch):
        return squared_error(chain(tools, [*frozen, *trained], microbatch["x"]), microbatch["y"])

    return _train_in_part(tools, loss, "frozen")


def _frozen_first_state(key):
    frozen, trained = jax.random.split(key)
    return {**momentum_state(stages_params(trained, 2)), "frozen": stages_params(frozen, 2)}


def _frozen_last_stages(tools):
    """Only the first stage is differentiated: the gradient flows back through frozen ones."""

    def loss(trained, frozen, microbatch):
        return squared_error(chain(tools, [trained, *frozen], microbatch["x"]), microbatch["y"])

    return _train_in_part(tools, loss, "frozen")


def _frozen_last_state(key):
    frozen, trained = jax.random.split(key)
    return {**momentum_state(dense_params(trained)), "frozen": stages_params(frozen, 3)}


def _low_rank_adapters(tools):
    """Frozen layers under trained low-rank updates, in every stage."""

    def loss(adapters, base, microbatch):
        x = microbatch["x"]
        for stage, (a, p) in enumerate(zip(adapters, base, strict=True)):
            x = x if stage == 0 else tools.mark(x)
            x = x + jnp.tanh(dense(p, x) + x @ a["down"] @ a["up"])
        return squared_error(x, microbatch["y"])

    return _train_in_part(tools, loss, "base")


def _adapters_state(key):
    base, down = jax.random.split(key)
    adapters = [{"down": normal(k, WIDTH, 2), "up": jnp.zeros((2, WIDTH))} for k in jax.random.split(down, 4)]
    return {**momentum_state(adapters), "base": stages_params(base)}


def _integer_leaves(tools):
    """A permutation in each stage is a leaf of the differentiated tree (`allow_int`); its gradient is dropped."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = residual(p["layer"], x if stage == 0 else tools.mark(x))[:, p["order"]]
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        def one(microbatch):
            value, grads = jax.value_and_grad(loss, allow_int=True)(state["params"], microbatch)
            return value, [g["layer"] for g in grads]

        loss_value, grads = tools.reduce(one, batch, operation=mpmd.Mean)
        params = [
            {"layer": jax.tree.map(lambda w, dw: w - 0.1 * dw, p["layer"], g), "order": p["order"]}
            for p, g in zip(state["params"], grads, strict=True)
        ]
        return {"params": params}, {"loss": loss_value}

    return step


def _float0_gradients(tools):
    """As `integer_leaves`, with the whole gradient, float0 leaves included, going out of the loop."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = residual(p["layer"], x if stage == 0 else tools.mark(x))[:, p["order"]]
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, allow_int=True)(state["params"], microbatch), batch
        )
        params = jax.tree.map(
            lambda w, dw: w if dw.dtype == jax.dtypes.float0 else w - 0.02 * dw, state["params"], grads
        )
        return {"params": params}, {"loss": loss_value}

    return step


def _permuted_state(key):
    def one(key):
        layer, order = jax.random.split(key)
        return {"layer": dense_params(layer), "order": jax.random.permutation(order, WIDTH)}

    return {"params": [one(k) for k in jax.random.split(key, 4)]}


def _none_leaves(tools):
    """Some stages have no bias (None), a field of the batch is None, and so is a metric."""

    def apply(p, x):
        y = x @ p["w"]
        return x + jnp.tanh(y if p["b"] is None else y + p["b"])

    def loss(params, microbatch):
        assert microbatch["weights"] is None
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = apply(p, x if stage == 0 else tools.mark((x, None))[0])
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch),
            batch,
            operation=(mpmd.Mean, mpmd.Mean),
        )
        return momentum_update(state, grads), {"loss": loss_value, "accuracy": None}

    return step


def _none_state(key):
    params = stages_params(key)
    params[1]["b"] = params[3]["b"] = None
    return momentum_state(params)


def _none_batch(key):
    return {**regression_batch(key), "weights": None}


def _weight_decay_in_the_loss(tools):
    """The squares of all parameters are part of every microbatch's loss."""

    def loss(params, microbatch):
        fit = squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])
        return fit + 0.05 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    return train(tools, loss)


def _label_embedding(tools):
    """The label's embedding, looked up at the start of the loss, is a parameter of the last stage."""

    def loss(params, microbatch):
        target = params["labels"][microbatch["label"]]
        x = chain(tools, params["body"], microbatch["x"])
        scores = x @ params["labels"].T
        return squared_error(x, target) + 0.1 * jnp.mean(jax.nn.logsumexp(scores, axis=-1))

    return train(tools, loss)


def _labels_state(key):
    body, labels = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "labels": normal(labels, 5, WIDTH)})


def _labels_batch(key):
    data, label = jax.random.split(key)
    shape = (NUM_MICROBATCHES, ROWS)
    return {"x": normal(data, *shape, WIDTH), "label": jax.random.randint(label, shape, 0, 5)}


def _scalar_parameters(tools):
    """A scale and a shift in each stage, and nothing else."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            x = jnp.tanh(x * p["scale"] + p["shift"])
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _scalars_state(key):
    scales = jax.random.uniform(key, (4,), minval=0.5, maxval=1.5)
    return momentum_state([{"scale": scales[i], "shift": jnp.float32(0.1)} for i in range(4)])


def _stages_without_parameters(tools):
    """Only the first and the last stage have something to train; those between just compute."""

    def loss(params, microbatch):
        x = tools.mark(residual(params["first"], microbatch["x"]))
        x = tools.mark(jnp.sin(x) * 2.0)
        x = tools.mark(x - jnp.mean(x, axis=-1, keepdims=True))
        return squared_error(dense(params["last"], x), microbatch["y"])

    return train(tools, loss)


def _ends_state(key):
    first, last = jax.random.split(key)
    return momentum_state({"first": dense_params(first), "last": dense_params(last)})


PROGRAMS = (
    Program("tied_embedding", _embedding_state, token_batch, _tied_embedding),
    Program("tied_and_scaled", _embedding_state, token_batch, _tied_and_scaled),
    Program("tied_in_bfloat16", _embedding_state, token_batch, _tied_in_bfloat16, rtol=1e-2),
    Program("one_weight_in_every_stage", _shared_state, regression_batch, _one_weight_in_every_stage),
    Program("only_shared_weights", _one_layer_state, regression_batch, _only_shared_weights),
    Program("stacked", _stacked_state, regression_batch, _stacked),
    Program("stacked_scan", _eight_layers_state, regression_batch, _stacked_scan),
    Program("frozen_and_unused", _frozen_state, regression_batch, _frozen_and_unused),
    Program("frozen_first_stages", _frozen_first_state, regression_batch, _frozen_first_stages),
    Program("frozen_last_stages", _frozen_last_state, regression_batch, _frozen_last_stages),
    Program("low_rank_adapters", _adapters_state, regression_batch, _low_rank_adapters),
    Program("integer_leaves", _permuted_state, regression_batch, _integer_leaves),
    Program("float0_gradients", _permuted_state, regression_batch, _float0_gradients),
    Program("none_leaves", _none_state, _none_batch, _none_leaves),
    Program("weight_decay_in_the_loss", stages_state, regression_batch, _weight_decay_in_the_loss),
    Program("label_embedding", _labels_state, _labels_batch, _label_embedding),
    Program("scalar_parameters", _scalars_state, regression_batch, _scalar_parameters),
    Program("stages_without_parameters", _ends_state, regression_batch, _stages_without_parameters),
)
