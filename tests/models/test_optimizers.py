"""Every optimizer of optax, on four small stages: equal to plain `jax.jit`, its state where its parameters are."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from plain_and_pipelined import stage_mesh, train_both
from programs.parts import normal

import mpmd

WIDTH, ROWS, NUM_MICROBATCHES, NUM_STAGES = 32, 4, 4, 4
RATE = 1e-2

# Those whose defaults do for any model.
ALIASES = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam
    nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3
    yogi
""".split()
CONTRIBUTED = """
    acprop ademamix adopt dadapt_adamw madgrad muon prodigy simplified_ademamix schedule_free_sgd
    schedule_free_adamw
""".split()

OPTIMIZERS = {
    **{name: functools.partial(getattr(optax, name), RATE) for name in ALIASES},
    **{name: functools.partial(getattr(contrib, name), RATE) for name in CONTRIBUTED},
    "optimistic_adam": lambda: optax.optimistic_adam(RATE, optimism=0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=RATE),
    "lbfgs": lambda: optax.lbfgs(RATE, memory_size=3, linesearch=None),
    "cocob": lambda: contrib.cocob(),
    "dog": lambda: contrib.dog(),
    "dowg": lambda: contrib.dowg(),
    "momo": lambda: contrib.momo(RATE),
    "momo_adam": lambda: contrib.momo_adam(RATE),
    "mechanize": lambda: contrib.mechanize(optax.adam(1.0)),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(RATE, b1=0.0), RATE),
    "galore": lambda: contrib.galore(RATE, rank=4),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "multi_steps_skipping": lambda: optax.MultiSteps(
        optax.adam(RATE), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(RATE), 3),
    "apply_every": lambda: optax.chain(optax.adam(RATE), optax.apply_every(2)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(_warmup())),
    "clips": lambda: optax.chain(
        optax.zero_nans(), optax.clip(1.0), optax.clip_by_block_rms(1.0), optax.adaptive_grad_clip(0.1), optax.sgd(RATE)
    ),
    "masked": lambda: optax.masked(optax.adamw(RATE), lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    "multi_transform": lambda: optax.multi_transform({"w": optax.adam(RATE), "b": optax.sgd(RATE)}, _labels),
    "frozen": lambda: optax.multi_transform({"w": optax.adam(RATE), "b": optax.set_to_zero()}, _labels),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.centralize(), optax.add_noise(0.1, 0.5, 0), optax.sgd(RATE)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=_warmup(), weight_decay=1e-3),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(RATE), contrib.reduce_on_plateau(patience=1)),
    "skip_large_updates": lambda: optax.MultiSteps(
        optax.sgd(RATE), 1, should_skip_update_fn=lambda u, s, p: optax.skip_large_updates(u, s, p, 1e6)
    ).gradient_transformation(),
    "conditionally_transform": lambda: optax.chain(
        optax.conditionally_transform(optax.adam(1.0), lambda count: count % 2 == 0), optax.scale(-RATE)
    ),
    "normalize_by_update_norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(RATE)),
    "keep_params_nonnegative": lambda: optax.chain(optax.sgd(RATE), optax.keep_params_nonnegative()),
}


def _warmup():
    return optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)


def _labels(tree):
    return jax.tree.map(lambda p: "w" if p.ndim > 1 else "b", tree)


def _params():
    keys = jax.random.split(jax.random.key(0), NUM_STAGES)
    return {
        f"layer{i}": {"w": normal(k, WIDTH, WIDTH) / WIDTH**0.5, "b": jnp.full(WIDTH, 0.1)} for i, k in enumerate(keys)
    }


def _loss(params, microbatch):
    x, y = microbatch
    for i in range(NUM_STAGES):
        x = x if i == 0 else mpmd.mark_stage_end(x)
        x = x + jnp.tanh(x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"])
    return ((x - y) ** 2).mean()


def _home(path):
    found = re.search(r"layer(\d)", path)
    return int(found[1]) if found else None


_IN_TURNS = [
    pytest.param(name, marks=pytest.mark.slow if n % 12 == 0 else pytest.mark.exhaustive)
    for n, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize("name", _IN_TURNS)
def test_an_optimizer_updates_each_stage_where_it_lives(name):
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    params = jax.jit(_params)()

    def step(state, batch, schedule):
        params, opt = state
        loss, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(_loss)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, opt, params, value=loss, grad=grads)
        return (optax.apply_updates(params, updates), opt), {"loss": loss, "norm": optax.tree.norm(grads)}

    batches = [tuple(normal(k, 2, NUM_MICROBATCHES, ROWS, WIDTH)) for k in jax.random.split(jax.random.key(1), 3)]
    train_both(step, (params, jax.jit(optimizer.init)(params)), batches, stage_mesh(NUM_STAGES), home=_home)
