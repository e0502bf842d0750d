"""What crosses the boundaries between stages: one array or many, to the next stage or past it."""

import jax
import jax.numpy as jnp

import mpmd
from programs.parts import (
    LENGTH,
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


def _residual_mlp(tools):
    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    return train(tools, loss)


def _a_mark_after_every_stage(tools):
    """S marks: the loss after the last one belongs to the last stage."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for p in params:
            x = tools.mark(residual(p, x))
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _head_after_the_last_mark(tools):
    """S marks, and a trained head behind them."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for p in params["body"]:
            x = tools.mark(residual(p, x))
        return squared_error(dense(params["head"], x), microbatch["y"])

    return train(tools, loss)


def _head_state(key):
    body, head = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "head": dense_params(head)})


def _skip_connection(tools):
    """Stage 0's value is used in stage 3 (taken before its mark), stage 1's in stages 2 and 3 (taken after)."""

    def loss(params, microbatch):
        first = residual(params[0], microbatch["x"])
        second = tools.mark(residual(params[1], tools.mark(first)))
        third = tools.mark(residual(params[2], second) * second)
        last = residual(params[3], third + first) + 0.5 * second
        return squared_error(last, microbatch["y"])

    return train(tools, loss)


def _product_of_skips(tools):
    """Stages 0's and 1's values, taken before their marks, are multiplied for the last stage; stage 2 reads one too.

    The gradients of the product need no mark, and are added to others that do.
    """

    def loss(params, microbatch):
        first = residual(params[0], microbatch["x"])
        second = residual(params[1], tools.mark(first))
        third = residual(params[2], tools.mark(second)) + first
        return squared_error(residual(params[3], tools.mark(third)) + first * second, microbatch["y"])

    return train(tools, loss)


def _input_skips_to_the_end(tools):
    """The microbatch itself is used in the last stage, with the label, besides in the first."""

    def loss(params, microbatch):
        y = chain(tools, params, microbatch["x"])
        return squared_error(y + jnp.sin(microbatch["x"]), microbatch["y"])

    return train(tools, loss)


def _several_arrays(tools):
    """A dict with a tuple crosses each boundary; some of it is used only later."""

    def loss(params, microbatch):
        x = microbatch["x"]
        carried = {"main": residual(params[0], x), "pair": (jnp.cos(x), x.sum(axis=-1))}
        carried = tools.mark(carried)
        wave, total = carried["pair"]
        carried = {"main": residual(params[1], carried["main"]) + total[:, None], "pair": (wave, carried["main"])}
        carried = tools.mark(carried)
        wave, earlier = carried["pair"]
        carried = tools.mark((residual(params[2], carried["main"]), wave * 2.0, [earlier]))
        main, wave, [earlier] = carried
        return squared_error(residual(params[3], main + wave) + earlier, microbatch["y"])

    return train(tools, loss)


def _masked_batch(key):
    data, mask, segment = jax.random.split(key, 3)
    shape = (NUM_MICROBATCHES, ROWS)
    return {
        **regression_batch(data),
        "mask": jax.random.bernoulli(mask, 0.7, (*shape, WIDTH)).astype(jnp.int32),
        "segment": jax.random.randint(segment, shape, 0, 3),
    }


def _untouched_values(tools):
    """Integer and boolean masks and the input ride through every mark beside the activation."""

    def loss(params, microbatch):
        carried = (microbatch["x"], microbatch["mask"], microbatch["segment"] > 0, microbatch["x"])
        for stage, p in enumerate(params):
            x, mask, kept, original = carried if stage == 0 else tools.mark(carried)
            if stage == 2:
                x = x * mask
            carried = (residual(p, x), mask, kept, original)
        x, mask, kept, original = carried
        return jnp.sum(kept[:, None] * mask * (x + original - microbatch["y"]) ** 2) / (1 + jnp.sum(mask))

    return train(tools, loss)


def _shared_inputs(tools):
    """Mask, positions and segment ids of the batch are read by every stage, and pass through no mark."""

    def loss(params, microbatch):
        positions = jnp.arange(WIDTH) / WIDTH
        weights = jnp.where(microbatch["mask"] > 0, 1.0, 0.1)
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            x = residual(p, x * weights) + jnp.sin(positions * (stage + 1)) + microbatch["segment"][:, None]
        return jnp.sum(weights * (x - microbatch["y"]) ** 2) / jnp.sum(weights)

    return train(tools, loss)


def _uneven_stages(tools):
    """Stages of one, three, one and two layers, and of different widths."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, layers in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            for p in layers:
                x = jnp.tanh(dense(p, x))
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _uneven_state(key):
    widths = [[WIDTH, 6], [6, 10, 10, 4], [4, 4], [4, 12, WIDTH]]
    params = []
    for stage, sizes in enumerate(widths):
        keys = jax.random.split(jax.random.fold_in(key, stage), len(sizes))
        params.append([dense_params(k, a, b) for k, a, b in zip(keys[1:], sizes[:-1], sizes[1:], strict=True)])
    return momentum_state(params)


def _early_exit(tools):
    """A head and a loss of its own in the second stage, added to the last stage's."""

    def loss(params, microbatch):
        x = tools.mark(residual(params["body"][0], microbatch["x"]))
        x = residual(params["body"][1], x)
        early = squared_error(dense(params["exit"], x), microbatch["y"])
        x = residual(params["body"][2], tools.mark(x))
        x = residual(params["body"][3], tools.mark(x))
        return squared_error(x, microbatch["y"]) + 0.3 * early

    return train(tools, loss)


def _early_exit_state(key):
    body, head = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "exit": dense_params(head)})


def _auxiliary_losses(tools):
    """A router in every stage, each with a balancing loss of its own; all are summed in the loss."""

    def loss(params, microbatch):
        x, auxiliary = microbatch["x"], []
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            probabilities = jax.nn.softmax(dense(p["router"], x))
            best, chosen = jax.lax.top_k(probabilities, 1)
            expert = jnp.take(p["experts"], chosen[:, 0], axis=0)
            x = x + best * jnp.tanh(jnp.einsum("bi,bij->bj", x, expert))
            share = jnp.mean(jax.nn.one_hot(chosen[:, 0], 2), axis=0)
            auxiliary.append(2 * jnp.sum(share * jnp.mean(probabilities, axis=0)))
        main = squared_error(x, microbatch["y"])
        return main + 0.01 * sum(auxiliary), {"main": main, "balance": jnp.stack(auxiliary)}

    def step(state, batch):
        (total, parts), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch),
            batch,
            operation=mpmd.Mean,
        )
        return momentum_update(state, grads), {"loss": total, **parts}

    return step


def _experts_state(key):
    def one(key):
        router, experts = jax.random.split(key)
        return {"router": dense_params(router, WIDTH, 2), "experts": normal(experts, 2, WIDTH, WIDTH, scale=0.3)}

    return momentum_state([one(k) for k in jax.random.split(key, 4)])


def _two_towers(tools):
    """Two chains side by side that meet in the last stage (a contrastive loss)."""

    def loss(params, microbatch):
        towers = microbatch["x"], microbatch["y"]
        for stage, (left, right) in enumerate(zip(params["left"], params["right"], strict=True)):
            towers = towers if stage == 0 else tools.mark(towers)
            towers = residual(left, towers[0]), residual(right, towers[1])
        a, b = (t / jnp.linalg.norm(t, axis=-1, keepdims=True) for t in towers)
        logits = params["temperature"] * a @ b.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))

    return train(tools, loss)


def _towers_state(key):
    left, right = jax.random.split(key)
    return momentum_state({"left": stages_params(left), "right": stages_params(right), "temperature": jnp.float32(2.0)})


def _encoder_decoder(tools):
    """The encoder's output is read in both stages of the decoder."""

    def attend(p, x, memory):
        scores = jnp.einsum("bqd,de,bke->bqk", x, p["w"], memory) / WIDTH**0.5
        return x + jax.nn.softmax(scores) @ memory

    def loss(params, microbatch):
        memory = tools.mark(residual(params[0], microbatch["source"]))
        memory = tools.mark(residual(params[1], memory))
        x = tools.mark(attend(params[2], microbatch["target"], memory))
        x = attend(params[3], x, memory)
        return squared_error(x, microbatch["target"] * 0.5)

    return train(tools, loss)


def _sequences(key):
    source, target = jax.random.split(key)
    return {
        "source": normal(source, NUM_MICROBATCHES, ROWS, LENGTH, WIDTH),
        "target": normal(target, NUM_MICROBATCHES, ROWS, LENGTH, WIDTH),
    }


def _conditioning(tools):
    """A trained embedding of the time, made in the first stage, conditions every stage (as in diffusion)."""

    def loss(params, microbatch):
        time = jnp.tanh(dense(params["time"], jnp.sin(microbatch["segment"][:, None] * jnp.arange(1.0, WIDTH + 1))))
        x = microbatch["x"]
        for stage, p in enumerate(params["body"]):
            x = residual(p, x if stage == 0 else tools.mark(x)) * (1 + 0.1 * time)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _time_state(key):
    body, time = jax.random.split(key)
    return momentum_state({"body": stages_params(body), "time": dense_params(time)})


def _integers_cross_first(tools):
    """The first stage only prepares integers; nothing that crosses its boundary has a gradient."""

    def loss(params, microbatch):
        buckets = tools.mark(jnp.clip((microbatch["x"] * 2).astype(jnp.int32), -2, 2))
        x = tools.mark(params["table"][buckets + 2] * microbatch["x"])
        for p in params["body"]:
            x = tools.mark(residual(p, x))
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _buckets_state(key):
    body, table = jax.random.split(key)
    return momentum_state({"body": stages_params(body, 2), "table": 1 + normal(table, 5)})


def _hypernetwork(tools):
    """The first two stages read no microbatch: they make the weights of the others from parameters alone."""

    def loss(params, microbatch):
        code = tools.mark(residual(params[0], jnp.eye(WIDTH)))
        weight = tools.mark(jnp.tanh(dense(params[1], code)))
        x = tools.mark(residual(params[2], microbatch["x"] @ weight))
        return squared_error(residual(params[3], x) @ weight, microbatch["y"])

    return train(tools, loss)


def _distillation(tools):
    """A teacher, forward only, runs in the same stages as its student; it is the student's moving average."""

    def loss(params, teacher, microbatch):
        x = t = microbatch["x"]
        for stage, (p, q) in enumerate(zip(params, teacher, strict=True)):
            x, t = (x, t) if stage == 0 else tools.mark((x, t))
            x, t = residual(p, x), residual(q, t)
        return squared_error(x, jax.lax.stop_gradient(t)) + squared_error(x, microbatch["y"])

    def step(state, batch):
        student, teacher = state["student"], state["teacher"]
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(student["params"], teacher, microbatch),
            batch,
            operation=mpmd.Mean,
        )
        student = momentum_update(student, grads)
        teacher = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, student["params"])
        return {"student": student, "teacher": teacher}, {"loss": loss_value}

    return step


def _teacher_state(key):
    student, teacher = jax.random.split(key)
    return {"student": momentum_state(stages_params(student)), "teacher": stages_params(teacher)}


def _one_microbatch(key):
    return jax.tree.map(lambda a: a[:1], regression_batch(key))


def _two_stages_many_microbatches(tools):
    return _residual_mlp(tools)


def _two_stages_state(key):
    return stages_state(key, 2)


def _eight_microbatches(key):
    first, second = jax.random.split(key)
    pair = regression_batch(first), regression_batch(second)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b])[:7], *pair)


def _one_stage(tools):
    """No mark at all: a pipeline of one stage is still a loop over microbatches."""
    return _residual_mlp(tools)


def _one_stage_state(key):
    return stages_state(key, 1)


PROGRAMS = (
    Program("residual_mlp", stages_state, regression_batch, _residual_mlp),
    Program("a_mark_after_every_stage", stages_state, regression_batch, _a_mark_after_every_stage),
    Program("head_after_the_last_mark", _head_state, regression_batch, _head_after_the_last_mark),
    Program("skip_connection", stages_state, regression_batch, _skip_connection),
    Program("product_of_skips", stages_state, regression_batch, _product_of_skips),
    Program("input_skips_to_the_end", stages_state, regression_batch, _input_skips_to_the_end),
    Program("several_arrays", stages_state, regression_batch, _several_arrays),
    Program("untouched_values", stages_state, _masked_batch, _untouched_values),
    Program("shared_inputs", stages_state, _masked_batch, _shared_inputs),
    Program("uneven_stages", _uneven_state, regression_batch, _uneven_stages),
    Program("early_exit", _early_exit_state, regression_batch, _early_exit),
    Program("auxiliary_losses", _experts_state, regression_batch, _auxiliary_losses),
    Program("two_towers", _towers_state, regression_batch, _two_towers),
    Program("encoder_decoder", stages_state, _sequences, _encoder_decoder),
    Program(
        "two_stages_seven_microbatches",
        _two_stages_state,
        _eight_microbatches,
        _two_stages_many_microbatches,
        num_stages=2,
        num_microbatches=7,
    ),
    Program("conditioning", _time_state, _masked_batch, _conditioning),
    Program("integers_cross_first", _buckets_state, regression_batch, _integers_cross_first),
    Program("hypernetwork", stages_state, regression_batch, _hypernetwork),
    Program("distillation", _teacher_state, regression_batch, _distillation),
    Program("one_microbatch", stages_state, _one_microbatch, _residual_mlp, num_microbatches=1),
    Program("one_stage", _one_stage_state, regression_batch, _one_stage, num_stages=1),
)
