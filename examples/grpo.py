"""Teaches the byte-level GPT of train_gpt.py to answer, by rewards alone: GRPO with a trainer and a sampler as roles.

    python examples/grpo.py                                                        # about a minute on 2 cores
    python examples/grpo.py --steps 20 --check-against-jit
    scripts/launch_multihost.sh -n 6 --cpu-devices 1 -- python examples/grpo.py    # the same numbers, in six processes

A prompt is three digits and `>`. The right answer is the largest digit and the smallest one. Nobody shows the model an
answer: it draws several for each prompt, and a Python function says how much of each is right.

The mesh has six groups. Four are the trainer: they hold the policy in four stages, and with it the reference, which
bounds how far the policy may drift. Two are the sampler: they hold the policy in two stages, and draw answers. In each
step a stream brings the weights to the sampler, and the sampler draws the answers of the next step while the trainer
learns from the answers of this one. So all answers are one version old; the objective weighs them by the ratio of their
probability now to their probability then, which is printed. Every process runs this whole program, and makes the calls
of all roles; a process without a part in a role does nothing in its calls.

Source of the objective: arXiv:2402.03300.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from generate import Request, Sampler, Started, on_host, say
from train_gpt import GPT, TrainState, make_init

import mpmd
import reshard
from scheduler import GPipe, OneFOneB

PROMPTS, ANSWERS = 16, 8  # of a step, and of each prompt
MICROBATCHES = 4  # of the trainer
DIGITS = range(ord("0"), ord("9") + 1)
LENGTH = 2  # of an answer
CLIP, CLOSENESS = 0.2, 0.02
STAGES, SAMPLER_STAGES = 4, 2

# The task.


def prompts_at(step: int) -> np.ndarray:
    """Returns the prompts of a step, (PROMPTS, 4): three digits and `>`. They depend on the step alone."""
    digits = np.random.default_rng((1, step)).integers(DIGITS.start, DIGITS.stop, size=(PROMPTS, 3))
    return np.append(digits, np.full((PROMPTS, 1), ord(">")), axis=1).astype(np.int32)


def reward(prompt: str, answer: str) -> float:
    """Returns the fraction of an answer that is right."""
    right = max(prompt[:3]) + min(prompt[:3])
    return sum(a == b for a, b in zip(answer, right, strict=True)) / LENGTH


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns an answer's lead over others to its prompt, in standard deviations: (PROMPTS, ANSWERS)."""
    spread = rewards - rewards.mean(axis=1, keepdims=True)
    return (spread / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)


# The computation of the roles.


class Batch(NamedTuple):
    """The answers of a step, in microbatches.

    Attributes:
      tokens: (MICROBATCHES, rows, bytes), prompts and answers.
      drawn: (MICROBATCHES, rows, LENGTH), the log-probability with which each byte was drawn.
      advantages: (MICROBATCHES, rows).
    """

    tokens: np.ndarray
    drawn: np.ndarray
    advantages: np.ndarray


def log_probabilities(model: GPT, params: Any, tokens: Any) -> jax.Array:
    """Returns the log-probability of each byte of the answers, (rows, LENGTH), given the bytes before it."""
    logits = model.logits(params, tokens[:, :-1])[:, -LENGTH:, DIGITS.start : DIGITS.stop]
    chosen = tokens[:, -LENGTH:, None] - DIGITS.start
    return jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[..., 0]


def make_score(model: GPT) -> Callable[..., jax.Array]:
    """Returns a function for the log-probabilities of a batch's answers under the reference."""

    def score(params: Any, tokens: jax.Array) -> jax.Array:
        one = lambda rows: log_probabilities(model, params, rows)  # noqa: E731
        return mpmd.treduce(one, tokens, schedule=GPipe(model.num_stages), operation=mpmd.Concat)

    return score


def make_learn(model: GPT, optimizer: optax.GradientTransformation) -> Callable[..., tuple[TrainState, dict]]:
    """Returns the step of the trainer."""

    def objective(params: Any, batch: Batch, reference: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        now = log_probabilities(model, params, batch.tokens)
        ratio, advantage = jnp.exp(now - batch.drawn), batch.advantages[:, None]
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        distance = jnp.exp(reference - now) - (reference - now) - 1
        return (CLOSENESS * distance - gain).mean(), {"ratio": ratio.mean(), "distance": distance.mean()}

    def learn(state: TrainState, batch: Batch, reference: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        def one(microbatch):
            return jax.value_and_grad(objective, has_aux=True)(state.params, *microbatch)

        schedule = OneFOneB(model.num_stages)
        (loss, metrics), grads = mpmd.treduce(one, (batch, reference), schedule=schedule, operation=mpmd.Mean)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), {"loss": loss, **metrics}

    return learn


def requests_at(step: int) -> list[Request]:
    """Returns the requests of a step: each prompt ANSWERS times, each time with another key."""
    prompts = [bytes(prompt.astype(np.uint8)) for prompt in prompts_at(step) for _ in range(ANSWERS)]
    return [Request(prompt, LENGTH, (step, i)) for i, prompt in enumerate(prompts)]


# The roles, on groups of devices and on one device.


class Roles(NamedTuple):
    """The functions and values of the loop.

    Attributes:
      first: the state before the first step.
      reference: the parameters of the reference.
      learn, score: the results of `make_learn` and `make_score`.
      draw: starts the texts of some requests with some parameters; returns at once.
      deliver: brings the trainer's parameters to the sampler, with the number of their version.
    """

    first: TrainState
    reference: Any
    learn: Callable[..., Any]
    score: Callable[..., Any]
    draw: Callable[[Any, Sequence[Request]], Started]
    deliver: Callable[[Any, int], tuple[Any, int]]


def make_sampler(model: GPT, jit: Callable[..., Any]) -> Sampler:
    """Returns a sampler that has all answers of a step in flight."""
    rows = PROMPTS * ANSWERS // SAMPLER_STAGES
    return Sampler(model, jit, lanes=SAMPLER_STAGES, rows=rows, window=8, page_size=4, choices=DIGITS)


def roles_on_groups(optimizer: optax.GradientTransformation) -> Roles:
    """Returns the roles with the trainer on the first groups of a mesh, the sampler on the others."""
    count, devices = STAGES + SAMPLER_STAGES, jax.devices()
    groups = [jax.sharding.Mesh(devices[i % len(devices) : i % len(devices) + 1], ("data",)) for i in range(count)]
    mesh = mpmd.MpmdMesh.from_groups(groups)
    trainer, sampler = mesh.mpmd_submesh(range(STAGES)), mesh.mpmd_submesh(range(STAGES, count))
    model, key = GPT(4, 64, num_stages=STAGES), jax.random.key(0)

    learn = mpmd.jit(make_learn(model, optimizer), mpmd_mesh=trainer, donate_argnums=0)
    types = jax.eval_shape(make_init(model, optimizer), key)
    shape = (MICROBATCHES, PROMPTS * ANSWERS // MICROBATCHES)
    drawn = np.zeros((*shape, LENGTH), np.float32)
    like = Batch(np.zeros((*shape, 4 + LENGTH), np.int32), drawn, np.zeros(shape, np.float32))
    layout = learn.lower(types, like, drawn).compile().input_shardings[0][0]
    init = mpmd.jit(make_init(model, optimizer), mpmd_mesh=trainer, out_shardings=layout)

    sampling = GPT(4, 64, num_stages=SAMPLER_STAGES)
    answering = make_sampler(sampling, functools.partial(mpmd.jit, mpmd_mesh=sampler))
    where = answering.layout(types.params)
    targets = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), types.params, where)
    stream = reshard.stream(layout.params, targets)
    elsewhere = jax.tree.map(lambda x: mpmd.MpmdArray([], x.sharding, x.shape, x.dtype), targets)

    def deliver(params, version):
        if stream.sends:
            stream.send(params, version=version)  # returns at once
        return stream.receive() if stream.receives else (elsewhere, version)

    score = mpmd.jit(make_score(model), mpmd_mesh=trainer)
    return Roles(init(key), init(key).params, learn, score, answering.start, deliver)


def roles_on_one_device(optimizer: optax.GradientTransformation) -> Roles:
    """Returns the same functions under `jax.jit`."""
    model = GPT(4, 64, num_stages=STAGES)
    first = jax.jit(make_init(model, optimizer))(jax.random.key(0))
    learn, score = jax.jit(make_learn(model, optimizer)), jax.jit(make_score(model))
    return Roles(first, first.params, learn, score, make_sampler(model, jax.jit).start, lambda *sent: sent)


# The loop.


def run(roles: Roles, num_steps: int, tell: Callable[[str], None] = say) -> list[tuple[float, float]]:
    """Runs the loop. Returns mean reward and loss of each step."""
    state, found = roles.first, []
    weights, version = roles.deliver(state.params, 0)
    drawn = roles.draw(weights, requests_at(0))
    for step in range(num_steps):
        answers, made_by = jax.tree.map(lambda *rows: np.stack(rows), *on_host(drawn)), version
        if step > 0:
            weights, version = roles.deliver(state.params, step)
        if step + 1 < num_steps:
            drawn = roles.draw(weights, requests_at(step + 1))  # while the trainer learns

        tokens = np.append(np.repeat(prompts_at(step), ANSWERS, axis=0), answers.tokens, axis=1).astype(np.int32)
        texts = [bytes(row.astype(np.uint8)).decode() for row in tokens]
        rewards = np.array([reward(text[:4], text[4:]) for text in texts]).reshape(PROMPTS, ANSWERS)
        parts = tokens, answers.log_probabilities, advantages(rewards).reshape(-1)
        batch = Batch(*(x.reshape(MICROBATCHES, -1, *x.shape[1:]) for x in parts))
        state, metrics = roles.learn(state, batch, roles.score(roles.reference, batch.tokens))

        values = {name: float(value) for name, value in mpmd.device_get(metrics).items()}
        found.append((float(rewards.mean()), values["loss"]))
        if step % max(1, num_steps // 20) == 0 or step + 1 == num_steps:
            tell(
                f"step {step + 1}/{num_steps}  reward {rewards.mean():.3f}  answers of version {made_by}, ratio"
                f" {values['ratio']:.3f}  distance {values['distance']:.3f}  such as {texts[0]}"
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Trains. Returns the exit status: 1 if the numbers differ from those of `jax.jit`, if that is checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps (default: %(default)s)")
    parser.add_argument("--check-against-jit", action="store_true", help="compare with the same on one device")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; at least 1 is needed")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", STAGES + SAMPLER_STAGES)  # does nothing to GPUs
    mpmd.initialize()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95))
    found = run(roles_on_groups(optimizer), args.steps)
    if not args.check_against_jit:
        return 0
    expected = run(roles_on_one_device(optimizer), args.steps, tell=lambda text: None)
    is_same = np.allclose(found, expected, rtol=1e-3, atol=1e-5)
    say(f"rewards and losses are {'those' if is_same else 'NOT those'} of jax.jit")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
