"""The loop itself: what it reduces, how it is fed, how many there are."""

import functools

import jax
import jax.numpy as jnp

import mpmd
from programs.parts import (
    NUM_MICROBATCHES,
    ROWS,
    WIDTH,
    chain,
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
    train,
)
from programs.program import Program


def _metrics(tools):
    """A metric of each reduction, from several stages, from the batch alone and from nothing at all."""

    def loss(params, microbatch):
        x, sizes = microbatch["x"], {}
        for stage, p in enumerate(params):
            x = residual(p, x if stage == 0 else tools.mark(x))
            sizes[f"stage {stage}"] = jnp.mean(jnp.abs(x))
        value = squared_error(x, microbatch["y"])
        kept = microbatch["y"] > 0
        metrics = {
            "rows": jnp.sum(kept),
            "largest": jnp.max(x),
            "smallest": {"last": jnp.min(x), "input": jnp.min(microbatch["x"])},
            "sizes": sizes,
            "outputs": x[0],
            "correct": jnp.sum((x > 0) == kept),
            "any": jnp.any(x > 3.0),
            "constant": jnp.float32(2.0),
        }
        return value, metrics

    operations = {
        "rows": mpmd.Add,
        "largest": mpmd.Max,
        "smallest": mpmd.Min,
        "sizes": {"stage 0": mpmd.Mean, "stage 1": mpmd.Concat, "stage 2": mpmd.Max, "stage 3": mpmd.Add},
        "outputs": mpmd.Concat,
        "correct": mpmd.Add,
        "any": mpmd.Concat,
        "constant": mpmd.Add,
    }

    def step(state, batch):
        (loss_value, metrics), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch),
            batch,
            operation=((mpmd.Mean, operations), mpmd.Mean),
        )
        return momentum_update(state, grads), {"loss": loss_value, **metrics}

    return step


def _running_statistics(tools):
    """Each stage normalises by statistics in the state, which the loop's own averages update (`has_aux`)."""

    def loss(params, statistics, microbatch):
        x, seen = microbatch["x"], []
        for stage, (p, s) in enumerate(zip(params, statistics, strict=True)):
            x = dense(p, x if stage == 0 else tools.mark(x))
            seen.append({"mean": jnp.mean(x, axis=0), "variance": jnp.var(x, axis=0)})
            x = jnp.tanh((x - s["mean"]) / jnp.sqrt(s["variance"] + 1e-3))
        return squared_error(x, microbatch["y"]), seen

    def step(state, batch):
        (loss_value, seen), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], state["statistics"], microbatch),
            batch,
            operation=mpmd.Mean,
        )
        statistics = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["statistics"], seen)
        return {**momentum_update(state, grads), "statistics": statistics}, {"loss": loss_value}

    return step


def _statistics_state(key):
    statistics = [{"mean": jnp.zeros(WIDTH), "variance": jnp.ones(WIDTH)} for _ in range(4)]
    return {**momentum_state(stages_params(key)), "statistics": statistics}


def _forward_only(tools):
    """An evaluation loop: no gradient anywhere; the state comes back as it was, but for a counter."""

    def one(params, microbatch):
        y = chain(tools, params, microbatch["x"])
        return {"loss": squared_error(y, microbatch["y"]), "outputs": y}

    def step(state, batch):
        metrics = tools.reduce(
            functools.partial(one, state["params"]), batch, operation={"loss": mpmd.Mean, "outputs": mpmd.Concat}
        )
        return {**state, "step": state["step"] + 1}, metrics

    return step


def _axis_one(tools):
    """Microbatches are slices along axis 1, and so of every leaf of a nested batch."""

    def loss(params, microbatch):
        x, (y, weight) = microbatch
        return jnp.mean(weight[:, None] * (chain(tools, params, x) - y) ** 2)

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch),
            batch,
            axis=1,
            operation=mpmd.Mean,
        )
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _axis_one_batch(key):
    x, y, weight = jax.random.split(key, 3)
    shape = (ROWS, NUM_MICROBATCHES)
    return normal(x, *shape, WIDTH), (normal(y, *shape, WIDTH), jax.random.uniform(weight, shape))


def _train_then_evaluate(tools):
    """Two loops in one step: the second evaluates the new parameters on other data."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        train_batch, test_batch = batch
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), train_batch, operation=mpmd.Mean
        )
        state = momentum_update(state, grads)
        test = tools.reduce(lambda microbatch: loss(state["params"], microbatch), test_batch, operation=mpmd.Mean)
        return state, {"loss": loss_value, "test": test}

    return step


def _two_batches(key):
    first, second = jax.random.split(key)
    return regression_batch(first), regression_batch(second)


def _two_updates(tools):
    """Two training loops in one step, the second from the parameters that the first made (as in GANs)."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        losses = []
        for part in batch:

            def one(microbatch, params=state["params"]):
                return jax.value_and_grad(loss)(params, microbatch)

            loss_value, grads = tools.reduce(one, part, operation=mpmd.Mean)
            state = momentum_update(state, grads)
            losses.append(loss_value)
        return state, {"losses": losses}

    return step


def _sharpness_aware(tools):
    """Two loops over the same data, the second at parameters moved along the whole gradient of the first."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        def gradients(params):
            return tools.reduce(
                lambda microbatch: jax.value_and_grad(loss)(params, microbatch), batch, operation=mpmd.Mean
            )

        loss_value, grads = gradients(state["params"])
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        there = jax.tree.map(lambda p, g: p + 0.05 * g / norm, state["params"], grads)
        sharp, grads = gradients(there)
        return momentum_update(state, grads), {"loss": loss_value, "sharp": sharp}

    return step


def _carried_state(tools):
    """Each stage has a memory for each row of each microbatch: sliced going in, stacked coming out."""

    def loss(params, memory, microbatch):
        x, new = microbatch["x"], []
        for stage, (p, m) in enumerate(zip(params, memory, strict=True)):
            x = residual(p, (x if stage == 0 else tools.mark(x)) + 0.5 * m)
            new.append(jnp.tanh(x))
        return squared_error(x, microbatch["y"]), new

    def step(state, batch):
        (loss_value, memory), grads = tools.reduce(
            lambda xs: jax.value_and_grad(loss, has_aux=True)(state["params"], *xs),
            (state["memory"], batch),
            operation=((mpmd.Mean, mpmd.Concat), mpmd.Mean),
        )
        return {**momentum_update(state, grads), "memory": memory}, {"loss": loss_value}

    return step


def _memory_state(key):
    memory = [jnp.zeros((NUM_MICROBATCHES, ROWS, WIDTH)) for _ in range(4)]
    return {**momentum_state(stages_params(key)), "memory": memory}


def _unused_gradients(tools):
    """The loop returns gradients that the step throws away, and arrays without elements."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params["body"], microbatch["x"]), microbatch["y"])

    def step(state, batch):
        loss_value, _ = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        _, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Add
        )
        return state, {"loss": loss_value, "empty": grads["empty"], "last": grads["body"][3]["b"]}

    return step


def _empty_state(key):
    return {"params": {"body": stages_params(key), "empty": jnp.zeros((0, WIDTH))}}


def _no_loop(tools):
    """No `treduce`: the same model, marks included, on a whole batch."""

    def step(state, batch):
        def loss(params):
            return squared_error(chain(tools, params, batch["x"][0]), batch["y"][0])

        return {**state, "step": state["step"] + 1}, {"loss": loss(state["params"])}

    return step


def _input_gradients(tools):
    """The gradient of each microbatch with respect to its own input, stacked, beside the parameters'."""

    def loss(params, x, y):
        return squared_error(chain(tools, params, x), y)

    def step(state, batch):
        loss_value, (grads, inputs) = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, argnums=(0, 1))(
                state["params"], microbatch["x"], microbatch["y"]
            ),
            batch,
            operation=(mpmd.Mean, (mpmd.Mean, mpmd.Concat)),
        )
        return momentum_update(state, grads), {"loss": loss_value, "saliency": inputs}

    return step


def _gradient_norms(tools):
    """The norm of each microbatch's whole gradient is a metric of the loop."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        def one(microbatch):
            value, grads = jax.value_and_grad(loss)(state["params"], microbatch)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            return value, grads, {"largest": norm, "each": norm}

        loss_value, grads, norms = tools.reduce(
            one, batch, operation=(mpmd.Mean, mpmd.Mean, {"largest": mpmd.Max, "each": mpmd.Concat})
        )
        return momentum_update(state, grads), {"loss": loss_value, **norms}

    return step


def _gradient_statistics(tools):
    """Metrics over the gradients of several stages that also read the loss, the index and the state, or that compare
    whole gradients; and gradients that are clipped by their norm before they are summed.
    """

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        temperature = jnp.exp(-0.1 * state["step"].astype(jnp.float32))

        def one(i):
            value, grads = jax.value_and_grad(loss)(state["params"], jax.tree.map(lambda x: x[i], batch))
            sizes = jnp.stack([jnp.sum(g**2) for g in jax.tree.leaves(grads)])
            first, *_, last = (jnp.ravel(jax.tree.leaves(g)[-1]) for g in grads)
            statistics = {
                "relative": jnp.sqrt(jnp.sum(sizes)) * temperature / (value + i),
                "share": sizes / jnp.sum(sizes),
                "smallest": jnp.min(sizes),
                "alike": jnp.vdot(first, last),
            }
            scale = jnp.minimum(1.0, 0.5 / jnp.sqrt(jnp.sum(sizes)))
            return value, statistics, jax.tree.map(lambda g: g * scale, grads)

        operations = {"relative": mpmd.Mean, "share": mpmd.Concat, "smallest": mpmd.Min, "alike": mpmd.Max}
        loss_value, statistics, grads = tools.reduce_i(
            one, NUM_MICROBATCHES, operation=(mpmd.Mean, operations, mpmd.Mean)
        )
        return momentum_update(state, grads), {"loss": loss_value, **statistics}

    return step


def _weighted_by_tokens(tools):
    """Sums of losses and of weights go out; loss and gradients are divided by the total after the loop."""

    def loss(params, microbatch):
        weight = (microbatch["y"] > -0.5).astype(jnp.float32)
        return jnp.sum(weight * (chain(tools, params, microbatch["x"]) - microbatch["y"]) ** 2), jnp.sum(weight)

    def step(state, batch):
        (total, weight), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch), batch
        )
        return momentum_update(state, jax.tree.map(lambda g: g / weight, grads)), {"loss": total / weight}

    return step


def _annealed(tools):
    """Scalars made from the step counter, before the loop, are used in every stage and in the loss."""

    def step(state, batch):
        noise = 1.0 / (1.0 + state["step"])
        temperature = jnp.exp(-0.1 * state["step"].astype(jnp.float32))

        def loss(params, microbatch):
            x = microbatch["x"]
            for stage, p in enumerate(params):
                x = residual(p, x if stage == 0 else tools.mark(x)) * (1.0 + 0.1 * noise)
            return temperature * squared_error(x, microbatch["y"])

        return train(tools, loss)(state, batch)

    return step


def _further_arguments(tools):
    """A static argument and keyword arguments, one of them an array."""

    def step(state, batch, depth, *, scale, shift=0.5):
        def loss(params, microbatch):
            x = microbatch["x"] * scale + shift
            for stage, p in enumerate(params):
                x = x if stage == 0 else tools.mark(x)
                for _ in range(depth):
                    x = residual(p, x)
            return squared_error(x, microbatch["y"])

        return train(tools, loss)(state, batch)

    return step


def _call_with_further_arguments(step, state, batch):
    return step(state, batch, 2, scale=jnp.float32(0.7))


def _nothing_from_some_stages(tools):
    """The loss is the early exit's alone: later stages train on nothing, and only a metric reads them."""

    def loss(params, microbatch):
        x = residual(params[1], tools.mark(residual(params[0], microbatch["x"])))
        value = squared_error(x, microbatch["y"])
        x = residual(params[3], tools.mark(residual(params[2], tools.mark(x))))
        return value, jnp.max(jnp.abs(x))

    def step(state, batch):
        (loss_value, largest), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch),
            batch,
            operation=((mpmd.Mean, mpmd.Max), mpmd.Mean),
        )
        return momentum_update(state, grads), {"loss": loss_value, "largest": largest}

    return step


def _summed_outside(tools):
    """`Add` everywhere by default, over a model whose head has its own width, with integer sums."""

    def loss(params, microbatch):
        logits = dense(params["head"], chain(tools, params["body"], microbatch["x"]))
        labels = jnp.argmax(microbatch["y"][:, :3], axis=-1)
        right = jnp.sum(jnp.argmax(logits, axis=-1) == labels)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)), right

    def step(state, batch):
        (total, right), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch), batch
        )
        count = NUM_MICROBATCHES * ROWS
        grads = jax.tree.map(lambda g: g / count, grads)
        return momentum_update(state, grads), {"loss": total / count, "right": right}

    return step


def _classifier_state(key):
    body, head = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "head": dense_params(head, WIDTH, 3)})


PROGRAMS = (
    Program("metrics", stages_state, regression_batch, _metrics),
    Program("running_statistics", _statistics_state, regression_batch, _running_statistics),
    Program("forward_only", stages_state, regression_batch, _forward_only),
    Program("axis_one", stages_state, _axis_one_batch, _axis_one),
    Program("train_then_evaluate", stages_state, _two_batches, _train_then_evaluate),
    Program("two_updates", stages_state, _two_batches, _two_updates),
    Program("sharpness_aware", stages_state, regression_batch, _sharpness_aware),
    Program("carried_state", _memory_state, regression_batch, _carried_state),
    Program("unused_gradients", _empty_state, regression_batch, _unused_gradients),
    Program("no_loop", stages_state, regression_batch, _no_loop),
    Program("input_gradients", stages_state, regression_batch, _input_gradients),
    Program("gradient_norms", stages_state, regression_batch, _gradient_norms),
    Program("gradient_statistics", stages_state, regression_batch, _gradient_statistics),
    Program("weighted_by_tokens", stages_state, regression_batch, _weighted_by_tokens),
    Program("annealed", stages_state, regression_batch, _annealed),
    Program(
        "further_arguments",
        stages_state,
        regression_batch,
        _further_arguments,
        jit_options={"static_argnums": (2,)},
        call=_call_with_further_arguments,
    ),
    Program("nothing_from_some_stages", stages_state, regression_batch, _nothing_from_some_stages),
    Program("summed_outside", _classifier_state, regression_batch, _summed_outside),
)
