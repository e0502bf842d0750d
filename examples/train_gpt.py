"""Trains a byte-level GPT as a pipeline, on text that every machine has: the source files of Python's library.

    python examples/train_gpt.py                        # 4 stages, 1F1B, 8 microbatches; under 3 minutes on 2 cores
    python examples/train_gpt.py --text book.txt --steps 1000
    python examples/train_gpt.py --schedule interleaved-1f1b --stages 8 --layers 8 --data-parallel 2
    python examples/train_gpt.py --steps 20 --check-against-jit
    python examples/train_gpt.py --checkpoint-dir run --save-every 50 --resume     # resumes where it stopped
    scripts/launch_multihost.sh -n 4 --cpu-devices 1 --restarts 3 -- python examples/train_gpt.py     # kill a process

A group of devices runs one stage, or several (`interleaved-1f1b`). On a machine without GPUs, this script makes the CPU
devices for the groups itself. If there are fewer devices than groups, groups share devices.

Only four places show that this is a pipeline: `mark_stage_end` in `GPT.logits`, `treduce` in the step, the mesh of
groups with `mpmd.jit`, and `init`, which makes the state directly in the layout of the step. The rest is as for one
device. Checkpoints do not depend on the pipeline: a run can resume with other stages, groups and schedules, or evaluate
on one device.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, PartitionSpec

import mpmd
import reshard.checkpoint  # makes Orbax take the arrays of a pipeline
from scheduler.schedules import catalogue

# The model: pure functions of a dict of parameters.

EMBED_SCALE = 0.02  # small, so that the first logits are near zero; the first stage divides by it again


@dataclasses.dataclass(frozen=True)
class GPT:
    """A decoder-only transformer over bytes: rotary positions, RMSNorm, and an embedding that is also the head.

    The first and the last stage both read the embedding, so each of them computes a part of its gradient.
    """

    num_layers: int = 4
    d_model: int = 128
    head_size: int = 32
    num_stages: int = 4
    dropout: float = 0.0

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Makes parameters: one dict per layer, so that each stage owns only its layers."""
        d = self.d_model
        embed_key, *layer_keys = jax.random.split(key, 1 + self.num_layers)

        def normal(key, shape, scale):
            return scale * jax.random.normal(key, shape)

        def layer(key):
            qkv, out, up, down = jax.random.split(key, 4)
            # Every layer adds two branches to the residual stream. This scale keeps their total variance at one.
            into_stream = (2 * self.num_layers) ** -0.5
            return {
                "attention_norm": jnp.ones(d),
                "qkv": normal(qkv, (d, 3 * d), d**-0.5),
                "out": normal(out, (d, d), d**-0.5 * into_stream),
                "mlp_norm": jnp.ones(d),
                "up": normal(up, (d, 4 * d), d**-0.5),
                "down": normal(down, (4 * d, d), (4 * d) ** -0.5 * into_stream),
            }

        return {
            "embed": normal(embed_key, (256, d), EMBED_SCALE),
            "layers": [layer(key) for key in layer_keys],
            "norm": jnp.ones(d),
        }

    def logits(self, params: dict[str, Any], tokens: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns logits of the next byte, (rows, length, 256), for tokens (rows, length)."""
        x = params["embed"][tokens] / EMBED_SCALE
        for index, layer in enumerate(params["layers"]):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
            x = self._layer(layer, x, key)
            if self.ends_stage(index):
                x = mpmd.mark_stage_end(x)
        return rms_norm(x, params["norm"]) @ params["embed"].T

    def ends_stage(self, index: int) -> bool:
        """Returns whether a pipeline stage ends after this layer. The last stage ends with the loss."""
        return index + 1 in [self.num_layers * stage // self.num_stages for stage in range(1, self.num_stages)]

    def loss(self, params: dict[str, Any], tokens: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns the mean cross-entropy, in nats per byte, of each byte given the previous ones."""
        logits = self.logits(params, tokens[:, :-1], dropout_key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _layer(self, layer: dict[str, Any], x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        attended = jax.nn.dot_product_attention(*self.heads(layer, x), is_causal=True)
        x = x + dropout(attended.reshape(x.shape) @ layer["out"], self.dropout, keys[0])
        return x + dropout(self.mlp(layer, x), self.dropout, keys[1])

    def heads(self, layer: dict[str, Any], x: jax.Array, start: Any = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes queries, keys and values, (rows, length, heads, features), for positions from `start` on.

        `start` is a number for all rows, or (rows, 1).
        """
        qkv = (rms_norm(x, layer["attention_norm"]) @ layer["qkv"]).reshape(*x.shape[:-1], 3, -1, self.head_size)
        return rotary(qkv[..., 0, :, :], start), rotary(qkv[..., 1, :, :], start), qkv[..., 2, :, :]

    def mlp(self, layer: dict[str, Any], x: jax.Array) -> jax.Array:
        """Computes the MLP branch of a layer, to be added to x."""
        return jax.nn.gelu(rms_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides x by its root mean square over the last axis, and multiplies by a learned scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotary(x: jax.Array, start: Any = 0) -> jax.Array:
    """Rotates pairs of features of (rows, length, heads, features) by angles that grow with the position, from `start`.

    Source: arXiv:2104.09864.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    angles = (start + jnp.arange(length))[..., None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets a share `rate` of x's entries to zero and scales up the rest; without a key, returns x itself."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


# The step.


class TrainState(NamedTuple):
    """Everything that a training run carries from one step to the next."""

    params: Any
    opt_state: Any
    step: jax.Array


def make_optimizer(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """Makes AdamW with clipping by the global norm; warmup over the first tenth of the steps, then cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        learning_rate,
        warmup_steps=max(1, num_steps // 10),
        decay_steps=max(2, num_steps),
        end_value=learning_rate / 10,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))


def make_init(model: GPT, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], TrainState]:
    """Returns a function from a PRNG key to the state before the first step."""

    def init(key: jax.Array) -> TrainState:
        params = model.init(key)
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    return init


def make_step(
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: Any,
    num_microbatches: int,
    data_axis: str | None = None,
    seed: int = 0,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the training step. It runs as a pipeline under `mpmd.jit`, and unchanged under `jax.jit`.

    Args:
      model: the model to train.
      optimizer: applied once per step, to the mean gradient over the microbatches.
      schedule: the order of the microbatches' forward and backward tasks, from `scheduler`.
      num_microbatches: must divide the number of rows of a batch.
      data_axis: the mesh axis over which the rows of a microbatch are sharded, if any.
      seed: determines the dropout keys, together with the step and the microbatch.
    """

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        microbatches = {"tokens": tokens.reshape(num_microbatches, -1, tokens.shape[-1])}
        if model.dropout:
            step_key = jax.random.fold_in(jax.random.key(seed), state.step)
            microbatches["dropout_key"] = jax.random.split(step_key, num_microbatches)

        def loss_and_grads(microbatch):
            tokens = microbatch["tokens"].astype(jnp.int32)
            if data_axis is not None:
                tokens = jax.lax.with_sharding_constraint(tokens, PartitionSpec(data_axis))
            return jax.value_and_grad(model.loss)(state.params, tokens, microbatch.get("dropout_key"))

        loss, grads = mpmd.treduce(loss_and_grads, microbatches, schedule=schedule, operation=mpmd.Mean)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(params, opt_state, state.step + 1), metrics

    return train_step


# Text in, text out.


def read_text(files: Sequence[str], length: int = 1) -> np.ndarray:
    """Reads the given files or, without any, the modules of Python's standard library.

    Ends the program if they have fewer bytes than `length`.
    """
    paths = [Path(file) for file in files] or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8)
    if len(text) < length:
        sys.exit(f"the text has {len(text)} bytes, fewer than the {length} of a row and the byte after it")
    return text


def batch_at(text: np.ndarray, seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Returns a step's batch, (rows, length). It depends only on seed and step, so a run can resume at any step."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - length + 1, size=rows)
    return text[starts[:, None] + np.arange(length)]


def sample(
    model: GPT, params: Any, prompt: bytes, length: int, window: int, seed: int, temperature: float = 0.7
) -> str:
    """Continues the prompt. One device makes the text byte by byte, each from at most `window` previous bytes."""

    @jax.jit
    def continue_prompt(params, buffer, filled, keys):
        def next_byte(carry, key):
            buffer, filled = carry
            logits = model.logits(params, buffer[None])[0, filled - 1]
            byte = jax.random.categorical(key, logits / temperature)
            buffer = jnp.where(filled == window, jnp.roll(buffer, -1), buffer)
            filled = jnp.minimum(filled + 1, window)
            return (buffer.at[filled - 1].set(byte), filled), byte

        return jax.lax.scan(next_byte, (buffer, filled), keys)[1]

    start = np.frombuffer(prompt, np.uint8)[-window:].astype(np.int32)
    buffer = np.zeros(window, np.int32)
    buffer[: len(start)] = start
    keys = jax.random.split(jax.random.key(seed), length)
    generated = np.asarray(continue_prompt(params, buffer, len(start), keys))
    text = (prompt + generated.astype(np.uint8).tobytes()).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_plot(path: str, losses: Mapping[int, float]) -> None:
    """Draws the loss after each number of steps, in the format that the file's name asks for (.svg, .png)."""
    from matplotlib.figure import Figure  # needed only for a picture

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a byte)")
    axes.plot(list(losses), list(losses.values()))
    axes.grid(alpha=0.3)
    figure.savefig(path)


class Progress:
    """A line that shows the progress of the run. In a log there are about 20 lines in total."""

    def __init__(self, num_steps: int, tokens_per_step: int):
        self.num_steps, self.tokens_per_step = num_steps, tokens_per_step
        self.first_step: int | None = None  # the step before the first one that was reported
        self.live = sys.stderr.isatty()
        self.silent = jax.process_index() != 0
        self.started = 0.0

    def show(self, step: int, loss: float) -> None:
        """Reports that `step` is done. Speed is measured from the first call on, so it does not include compilation."""
        self.started = self.started or time.perf_counter()
        if self.first_step is None:
            self.first_step = step - 1
        if self.silent:
            return
        done = step - self.first_step
        if not self.live and step % max(1, self.num_steps // 20) and done != 1 and step != self.num_steps:
            return
        elapsed = time.perf_counter() - self.started
        speed = f"{(done - 1) * self.tokens_per_step / elapsed:,.0f} tokens/s" if done > 1 else "first step done"
        filled = 24 * step // self.num_steps
        line = f"{'━' * filled}{'─' * (24 - filled)} step {step}/{self.num_steps}  loss {loss:.3f}  {speed}"
        end = "" if self.live and step < self.num_steps else "\n"
        print(f"\r{line}\x1b[K" if self.live else line, end=end, file=sys.stderr, flush=True)


class Checkpoints:
    """The last few states of a run, in one folder. Orbax's own manager keeps them.

    Orbax saves while the training continues. Seed and step determine the batches and the dropout keys, so only the
    state has to be saved.
    """

    def __init__(self, folder: str, every: int, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, save_interval_steps=every)
        self.folder = Path(folder).absolute()
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: TrainState, *, last: bool = False) -> None:
        """Saves the state after `step` steps, if this step is due or the last one."""
        is_due = self.manager.should_save(step) or last
        if is_due and self.manager.latest_step() != step:  # a step that comes again after a loss may be saved already
            # Orbax runs a collective on all devices, so that processes wait for each other. It must not run while the
            # step's own work is in flight.
            jax.block_until_ready(state)
            self.manager.save(step, args=ocp.args.StandardSave(state), force=last)

    def start(self, resume: bool, steps: int) -> int | None:
        """Returns the last saved step, if there is one; ends the program if a run to `steps` cannot go on from it."""
        last_step = self.manager.latest_step()
        if last_step is not None and not resume:
            sys.exit(f"{self.folder} has checkpoints up to step {last_step}: add --resume, or give another folder")
        if last_step is not None and last_step > steps:
            sys.exit(f"{self.folder} has a checkpoint after step {last_step}: give more --steps than {steps}")
        return last_step

    def restore(self, abstract_state: TrainState, shardings: Any) -> Any:
        """Restores the last saved state into `shardings`. It may have been saved in any layout."""
        target, step = reshard.checkpoint.abstract(abstract_state, shardings), self.manager.latest_step()
        try:
            return self.manager.restore(step, args=ocp.args.StandardRestore(target))
        except mpmd.ReshardError as error:
            raise mpmd.ReshardError(
                f"{error}\n  If it is damaged, delete {self.folder / str(step)}; if it is of another model, give"
                " another folder."
            ) from error


# The run.


def say(text: str) -> None:
    """Prints the text once: among several processes, only process 0 prints."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def make_mesh(num_groups: int, data_parallel: int) -> mpmd.MpmdMesh:
    """Makes one group of `data_parallel` devices for each group of the schedule. If devices are few, groups share."""
    wanted = num_groups * data_parallel
    per_process = max(1, wanted // jax.process_count())
    chosen = [jax.devices()[:wanted]] if jax.process_count() == 1 else [
        [d for d in jax.devices() if d.process_index == p][:per_process] for p in range(jax.process_count())
    ]  # fmt: skip
    devices = np.array([d for ds in chosen for d in ds])
    if len(devices) >= wanted:
        grid = devices[:wanted].reshape(num_groups, data_parallel)
        return mpmd.MpmdMesh(Mesh(grid, ("stage", "data")), "stage")
    num_meshes = len(devices) // data_parallel
    if num_meshes == 0:
        sys.exit(f"--data-parallel {data_parallel} needs as many devices, and there are {len(devices)}")
    meshes = [Mesh(devices[i * data_parallel : (i + 1) * data_parallel], ("data",)) for i in range(num_meshes)]
    return mpmd.MpmdMesh.from_groups([meshes[group * num_meshes // num_groups] for group in range(num_groups)])


class Reference:
    """The same step under plain `jax.jit`. It starts from the same state as the pipeline.

    Every process runs it, on as many devices as a group has. Pipeline and reference continue from their own results.
    The only difference is rounding, which training magnifies from step to step.
    """

    def __init__(self, train_step: Callable, state: TrainState, data_parallel: int):
        self.train_step, self.state = jax.jit(train_step), host_copy(state)
        self.group = Mesh(np.array(jax.local_devices()[:data_parallel]), ("data",))
        self.loss_difference = 0.0

    def step(self, tokens: np.ndarray, loss: Any) -> None:
        """Takes one step and compares its loss with the pipeline's."""
        with jax.set_mesh(self.group):
            self.state, metrics = self.train_step(self.state, tokens)
        expected = float(metrics["loss"])
        self.loss_difference = max(self.loss_difference, abs(float(loss) - expected) / abs(expected))

    def agrees(self, state: TrainState, tolerance: float = 2e-5) -> bool:
        """Prints the largest differences. Returns whether those of the losses are within `tolerance`, relatively."""
        worst, difference = max(relative_differences(host_copy(state), self.state).items(), key=lambda item: item[1])
        agrees = self.loss_difference <= tolerance
        say(
            f"against plain jax.jit: losses differ by at most {self.loss_difference:.1e} of their value "
            f"({'within' if agrees else 'MORE THAN'} {tolerance:.0e}); the state after the last step by at most "
            f"{difference:.1e} of a leaf's largest entry ({worst})"
        )
        return agrees


def host_copy(tree: Any) -> Any:
    """Copies a tree of arrays to numpy arrays."""
    return mpmd.device_get(tree)


def relative_differences(tree: Any, reference: Any) -> dict[str, float]:
    """Returns, for each leaf, the largest difference divided by the largest entry of the reference."""

    def difference(leaf, reference):
        leaf, reference = np.asarray(leaf, np.float64), np.asarray(reference, np.float64)
        scale = np.max(np.abs(reference), initial=0)
        return float(np.max(np.abs(leaf - reference), initial=0) / (scale if scale else 1))

    differences = jax.tree.map(difference, tree, reference)
    return {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(differences)}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options and checks that they fit together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="train on these files")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (default 4)")
    parser.add_argument(
        "--groups", type=int, help="groups of devices, for schedules with several stages per group (default stages/2)"
    )
    parser.add_argument(
        "--schedule", choices=catalogue.SCHEDULES, default="1f1b", help="order of the pipeline's tasks (default 1f1b)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step (default 8)")
    parser.add_argument("--data-parallel", type=int, default=1, metavar="N", help="devices in a group (default 1)")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default 500)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step (default 16)")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes in a sequence (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default 4)")
    parser.add_argument("--d-model", type=int, default=128, help="width, a multiple of 32 (default 128)")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of each layer's outputs to drop (default 0)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after warmup (default 3e-3)")
    parser.add_argument(
        "--seed", type=int, default=0, help="for parameters, batches, dropout and the sample (default 0)"
    )
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="save the training state in this folder")
    parser.add_argument("--save-every", type=int, default=100, metavar="N", help="steps between saves (default 100)")
    parser.add_argument("--keep", type=int, default=3, metavar="N", help="checkpoints to keep (default 3)")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in --checkpoint-dir, if there is one"
    )
    parser.add_argument(
        "--audit-every",
        type=int,
        default=0,
        metavar="N",
        help="audit each N-th step for devices that compute wrong (default 0: none)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the loss curve (.svg or .png; needs matplotlib)")
    parser.add_argument("--check-against-jit", action="store_true", help="run plain jax.jit beside it and compare")
    args = parser.parse_args(argv)

    for fault in _check_args(args):
        parser.error(fault)
    return args


def _check_args(args: argparse.Namespace) -> Iterator[str]:
    sizes = ("stages", "microbatches", "data_parallel", "steps", "batch", "seq_len", "layers", "save_every", "keep")
    least = dict.fromkeys((*sizes, *["groups"] * (args.groups is not None)), 1) | {"audit_every": 0}
    for name, number in least.items():
        if getattr(args, name) < number:
            yield f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {number}"
    if not 0 < args.lr < float("inf"):
        yield f"--lr is {args.lr}; it must be positive"
    if not 0 <= args.seed < 2**63:
        yield f"--seed is {args.seed}; it must be at least 0 and below 2**63"
    try:
        catalogue.make(args.schedule, args.stages, args.groups).orders(args.microbatches)
    except ValueError as error:
        yield f"--schedule {error}"
    if args.layers < args.stages:
        yield f"--layers {args.layers} is fewer than --stages {args.stages}; each stage needs a layer"
    if args.d_model < 32 or args.d_model % 32:
        yield f"--d-model {args.d_model} is not a multiple of 32"
    if args.batch % args.microbatches:
        yield f"--batch {args.batch} does not split into --microbatches {args.microbatches}"
    rows = args.batch // args.microbatches
    if rows % args.data_parallel:
        yield f"a microbatch has {rows} rows, which --data-parallel {args.data_parallel} does not divide"
    for file in args.text:
        if not Path(file).is_file():
            yield f"--text {file} is not a file"
    if not 0 <= args.dropout < 1:
        yield f"--dropout {args.dropout} is not in [0, 1)"
    if args.plot and Path(args.plot).suffix not in (".svg", ".png"):
        yield f"--plot {args.plot} ends in neither .svg nor .png"
    if args.plot and not Path(args.plot).absolute().parent.is_dir():
        yield f"--plot {args.plot}: there is no folder {Path(args.plot).absolute().parent}"
    if args.resume and not args.checkpoint_dir:
        yield "--resume needs --checkpoint-dir, the folder to go on from"
    may_start_over = "MPMD_KEEPER" in os.environ  # the launcher's --restarts
    if args.checkpoint_dir and may_start_over and not args.resume:
        yield "--checkpoint-dir under --restarts needs --resume, to go on from the checkpoints of the job itself"
    if args.check_against_jit and may_start_over:
        yield "--check-against-jit cannot follow a process that is lost; leave out --restarts"
    if args.checkpoint_dir and Path(args.checkpoint_dir).exists() and not Path(args.checkpoint_dir).is_dir():
        yield f"--checkpoint-dir {args.checkpoint_dir} is not a folder"
    if args.plot and not importlib.util.find_spec("matplotlib"):
        yield "--plot needs matplotlib: pip install matplotlib"


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, reports and samples. Returns the exit status: 1 if `--check-against-jit` found a difference."""
    args = parse_args(argv)
    schedule = catalogue.make(args.schedule, args.stages, args.groups)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        # The number of CPU devices. It takes effect because nothing has used JAX yet, and does not affect GPUs.
        jax.config.update("jax_num_cpu_devices", schedule.num_groups * args.data_parallel)
    mpmd.initialize()  # finds the other processes, if there are any
    is_first = jax.process_index() == 0
    mesh = make_mesh(schedule.num_groups, args.data_parallel)

    length = args.seq_len + 1
    text = read_text(args.text, length)
    model = GPT(args.layers, args.d_model, num_stages=args.stages, dropout=args.dropout)
    optimizer = make_optimizer(args.lr, args.steps)
    init = make_init(model, optimizer)
    data_axis = "data" if args.data_parallel > 1 else None
    train_step = make_step(model, optimizer, schedule, args.microbatches, data_axis, args.seed)

    key = jax.random.key(args.seed)
    abstract_state = jax.eval_shape(init, key)
    abstract_tokens = jax.ShapeDtypeStruct((args.batch, length), text.dtype)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract_state.params))
    say(
        f"{num_params:,} parameters in {args.stages} stages on {schedule.num_groups} groups of {args.data_parallel} "
        f"{mesh.groups[0].devices.flat[0].platform} device(s); {args.schedule}, {args.microbatches} microbatches; "
        f"{len(text):,} bytes of text"
    )
    checkpoints = Checkpoints(args.checkpoint_dir, args.save_every, args.keep) if args.checkpoint_dir else None
    last_step = None if checkpoints is None else checkpoints.start(args.resume, args.steps)

    say("compiling ...")
    started = time.perf_counter()
    step = mpmd.jit(train_step, mpmd_mesh=mesh, donate_argnums=0, audit_every=args.audit_every)
    step = step.lower(abstract_state, abstract_tokens).compile()
    say(f"compiled in {time.perf_counter() - started:.1f} s")
    first_step, layout = last_step or 0, step.input_shardings[0][0]
    if checkpoints is not None and last_step is not None:
        state = checkpoints.restore(abstract_state, layout)
        say(f"going on after step {last_step} of {args.checkpoint_dir}")
    else:
        state = mpmd.jit(init, mpmd_mesh=mesh, out_shardings=layout)(key)

    reference: Reference | None = None
    progress = Progress(args.steps, args.batch * args.seq_len)
    unread: dict[int, jax.Array] = {}  # the loss of the last step
    curve: dict[int, float] = {}  # losses, for --plot

    def report(index: int, loss: jax.Array) -> None:
        progress.show(index + 1, value := float(loss))
        if args.plot:
            curve[index + 1] = value

    def take_step(index: int, state: TrainState) -> TrainState:
        nonlocal reference, unread
        if args.check_against_jit and reference is None:
            reference = Reference(train_step, state, args.data_parallel)
        tokens = batch_at(text, args.seed, index, args.batch, length)
        state, metrics = step(state, tokens)
        if reference is not None:
            reference.step(tokens, metrics["loss"])
        before, unread = unread, {index: metrics["loss"]}
        if checkpoints is not None:
            checkpoints.save(index + 1, state, last=index + 1 == args.steps)
        # A loss is read while the next step runs, so that the devices never wait for this loop. When a spare replaces a
        # process and a step is repeated, losses that were not read yet are lost.
        if index - 1 in before:
            report(index - 1, before[index - 1])
        return state

    # If the launcher starts the job over, this continues after the last step whose state is in memory.
    state = mpmd.resilient(take_step, state, args.steps, start=first_step)
    for index, loss in unread.items():
        report(index, loss)
    if checkpoints is not None:
        checkpoints.manager.close()  # waits until the last save is finished

    if args.plot and is_first:
        write_plot(args.plot, curve)
    params = host_copy(state.params)
    if is_first:
        print(sample(model, params, b"def ", 300, args.seq_len, args.seed))
    return 0 if reference is None or reference.agrees(state) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, mpmd.ReshardError) as error:  # errors that a user can repair
        sys.exit(f"train_gpt.py: {error}")
