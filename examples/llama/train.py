"""Trains or fine-tunes a decoder of the Llama family as a pipeline.

    python examples/llama/train.py                                       # a small model, text that every machine has
    python examples/llama/train.py --model DIR --text notes/ --export OUT   # a Hugging Face folder in, one out
    python examples/llama/train.py --model DIR --text notes/ --lora 8    # the base is frozen
    scripts/launch_multihost.sh -n 4 --cpu-devices 1 -- python examples/llama/train.py --checkpoint-dir run
    python -m mpmd plan examples/llama/train.py:plan --target h100 --groups 8        # before you book the cluster

A group of devices runs one stage or several; inside a group, RULES say which axis of the mesh divides which axis of the
parameters. Where stages end is chosen by cost (`mark_layer_end` in model.py), or given by --cuts.
"""

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from data import Batches, Tokenizer, tokenizer_of
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from logs import writers
from model import Config, Decoder, LoRA

import mpmd
import reshard.checkpoint  # makes Orbax take the arrays of a pipeline

# How parameters lie in a group: the names of their axes, and which axis of the mesh divides each name.

AXES = {
    "embed": ("vocabulary", "width"),
    "head": ("width", "vocabulary"),
    "query": ("width", "heads", None),
    "key": ("width", "heads", None),
    "value": ("width", "heads", None),
    "output": ("heads", None, "width"),
    "gate": ("width", "hidden"),
    "up": ("width", "hidden"),
    "down": ("hidden", "width"),
}
RULES: dict[str, str | None] = dict.fromkeys(("vocabulary", "heads", "hidden", "experts"), "tensor")
RULES["width"] = "data"
"""Width over the data axis is FSDP; heads and hidden over the tensor axis are tensor parallel."""


def spec_of(path: tuple, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec of a parameter in a group, by the last name of its path. What does not divide is not divided."""
    names = [key.key for key in path if hasattr(key, "key")]
    axes = AXES.get(names[-1], ()) if names else ()
    if "experts" in names and axes:
        axes = ("experts", *(axis if axis == "width" else None for axis in axes))
    axes = (*(None,) * (len(shape) - len(axes)), *axes)  # stacked layers stand in front
    wanted = [RULES.get(axis or "") for axis in axes]
    return P(
        *(name if name and size % mesh.shape[name] == 0 else None for name, size in zip(wanted, shape, strict=True))
    )


class Model:
    """The module as functions of trees of arrays: what is trained, and what is frozen."""

    def __init__(self, config: Config):
        self.config = config
        kinds = (LoRA, ...) if config.lora_rank else (...,)
        self.graph, *self.states = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), *kinds)
        self.kinds = kinds

    def init(self, key: jax.Array) -> list[Any]:
        """Parameters: the trained ones, and the frozen ones if there are any."""
        _, *states = nnx.split(Decoder(self.config, nnx.Rngs(key)), *self.kinds)
        return [nnx.to_pure_dict(state) for state in states]

    def bind(self, params: list[Any]) -> Decoder:
        """The module with these parameters."""
        states = [jax.tree.map(lambda x: x, state) for state in self.states]
        for state, values in zip(states, params, strict=True):
            nnx.replace_by_pure_dict(state, values)
        return nnx.merge(self.graph, *states)


def muon_axes(params: Any) -> Any:
    """Which axes of a stacked parameter Muon takes for rows and columns; the others get AdamW."""

    def axes(path, p):
        name, last = path[-1].key, p.ndim - 1
        if "layers" not in [key.key for key in path[:-1]] or name not in AXES:
            return None
        two = {"query": ((1,), (2, 3)), "key": ((1,), (2, 3)), "value": ((1,), (2, 3)), "output": ((1, 2), (3,))}
        return optax.contrib.MuonDimensionNumbers(*two.get(name, ((last - 1,), (last,))))

    return jax.tree_util.tree_map_with_path(axes, params)


def optimizer_of(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW or Muon on gradients clipped by their global norm; warmup over a tenth of the steps, then cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.lr, max(1, options.steps // 10), max(2, options.steps), options.lr / 10
    )
    if options.muon:
        rule = optax.contrib.muon(rate, muon_weight_dimension_numbers=muon_axes)
    else:
        rule = optax.adamw(rate, b2=0.95, weight_decay=0.0 if options.lora else 0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


class Program:
    """The functions of a run, and the layout of its state."""

    def __init__(self, config: Config, options: argparse.Namespace, mesh: mpmd.MpmdMesh):
        self.model, self.mesh, self.options, self.cuts = Model(config), mesh, options, options.cuts
        self.optimizer = optimizer_of(options)
        self.step = mpmd.jit(self._step, mpmd_mesh=mesh, donate_argnums=0)
        self.evaluate = mpmd.jit(self._evaluate, mpmd_mesh=mesh)

    def init(self, key: jax.Array) -> dict[str, Any]:
        params = self.model.init(key)
        return {"params": params, "optimizer": self.optimizer.init(params[0]), "step": jnp.zeros((), jnp.int32)}

    def _loop(self, function, batch) -> Any:
        return mpmd.treduce(function, batch, self.options.schedule, operation=mpmd.Mean, cuts=self.cuts)

    def _step(self, state, batch):
        trained, *frozen = state["params"]

        def one(batch):
            return jax.value_and_grad(lambda trained: self.model.bind([trained, *frozen]).loss(batch))(trained)

        loss, grads = self._loop(one, batch)
        updates, optimizer = self.optimizer.update(grads, state["optimizer"], trained)
        trained = optax.apply_updates(trained, updates)
        state = {"params": [trained, *frozen], "optimizer": optimizer, "step": state["step"] + 1}
        return state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    def _evaluate(self, params, batch):
        return self._loop(lambda batch: self.model.bind(params).loss(batch), batch)

    def abstract(self) -> tuple[Any, Any]:
        """Types and layouts inside of a group of the state and of a batch."""
        group = self.mesh.tracing_mesh()

        def typed(path, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(group, spec_of(path, x.shape, group)))

        state = jax.tree_util.tree_map_with_path(typed, jax.eval_shape(self.init, jax.random.key(0)))
        o = self.options
        rows = NamedSharding(group, P(None, "data"))
        shape = (o.microbatches, o.batch // o.microbatches, o.length)

        def array(dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

        names = ("tokens", "targets", "segments", "positions")
        return state, {name: array(jnp.int32) for name in names} | {"weights": array(jnp.float32)}


class Stop:
    """Whether some process was asked to stop (SIGTERM: a preemption); all agree on it."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def agreed(self) -> bool:
        """The same in every process. Call it where no step is in flight."""
        if jax.process_count() == 1:
            return self.asked
        return bool(np.any(multihost_utils.process_allgather(np.array(self.asked))))


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def peak_flops() -> float | None:
    """FLOP/s of all devices in bfloat16 where the data sheet is known."""
    kind = jax.devices()[0].device_kind.lower()
    for name in ("h100", "h200", "b200", "a100"):
        if name in kind:
            return mpmd.Target.named(name).flops * jax.device_count()
    return None


def generate(model: Model, params: Any, tokenizer: Tokenizer, prompt: str, count: int, window: int) -> str:
    """The likeliest continuation of a prompt. One device computes it, from at most `window` tokens."""

    @jax.jit
    def continued(params, buffer, filled):
        decoder = model.bind(params)

        def one(carry, _):
            buffer, filled = carry
            token = decoder(buffer[None])[0, filled - 1].argmax().astype(jnp.int32)
            buffer = jnp.where(filled == window, jnp.roll(buffer, -1), buffer)
            filled = jnp.minimum(filled + 1, window)
            return (buffer.at[filled - 1].set(token), filled), token

        return jax.lax.scan(one, (buffer, filled), length=count)[1]

    start = tokenizer.encode(prompt.encode())[-window:]
    buffer = np.zeros(window, np.int32)
    buffer[: len(start)] = start
    return prompt + tokenizer.decode(np.asarray(continued(mpmd.device_get(params), buffer, len(start))).tolist())


def first_state(program: Program, options: argparse.Namespace, shardings: Any) -> Any:
    """A state at random, or the weights of a Hugging Face folder with a new optimizer state."""
    make = mpmd.jit(program.init, mpmd_mesh=program.mesh, out_shardings=shardings)
    state = make(jax.random.key(options.seed))
    if options.model:
        last = jax.eval_shape(program.init, jax.random.key(0))["params"][-1]  # the base, where LoRA is trained
        state["params"][-1] = reshard.checkpoint.restore(options.model, last, shardings["params"][-1], mapping="auto")
    return state


def export(program: Program, params: list[Any], options: argparse.Namespace) -> None:
    """Writes the weights as a Hugging Face folder like that of --model; LoRA's factors are multiplied out."""
    if options.lora:

        def merged(factors, base):
            change = jnp.einsum(
                "ldr,lrhk->ldhk", *(factors["layers"]["attention"][n] for n in ("query_in", "query_out"))
            )
            attention = base["layers"]["attention"] | {"query": base["layers"]["attention"]["query"] + change}
            return base | {"layers": base["layers"] | {"attention": attention}}

        layout = jax.tree.map(lambda x: x.mpmd_sharding, params[-1])
        params = [mpmd.jit(merged, mpmd_mesh=program.mesh, out_shardings=layout)(*params)]
    how = reshard.checkpoint.TensorFormat("auto", files_of=options.model, dtype="bfloat16")
    reshard.checkpoint.save(options.export, params[-1], tensors=how)


def run(options: argparse.Namespace) -> int:
    """The whole run; returns the exit status."""
    mpmd.initialize()
    tokenizer = tokenizer_of(options.model)
    config = config_of(options, tokenizer)
    program = Program(config, options, make_mesh(options))
    batches = Batches(options.text, tokenizer, options.batch, options.length, options.microbatches, options.seed)
    abstract, batch = program.abstract()
    lowered = program.step.lower(abstract, batch)
    program.cuts = lowered.cuts  # an evaluation alone would be cut in another way, and its parameters moved
    compiled = lowered.compile()
    say(
        f"{sum(x.size for x in jax.tree.leaves(abstract['params'])):,} parameters, layers of each stage: {lowered.cuts}"
    )
    shardings = compiled.input_shardings[0][0]
    manager, first = None, 0
    if options.checkpoint_dir:
        kept = ocp.CheckpointManagerOptions(max_to_keep=options.keep)
        manager = ocp.CheckpointManager(Path(options.checkpoint_dir).absolute(), options=kept)
        first = manager.latest_step() or 0
    if manager and first:
        plain = jax.eval_shape(program.init, jax.random.key(0))
        target = reshard.checkpoint.abstract(plain, shardings)
        state = manager.restore(first, args=ocp.args.StandardRestore(target))
        say(f"goes on after step {first}")
    else:
        state = first_state(program, options, shardings)
    status, state = train(program, compiled, state, batches, manager, first)
    if manager:
        manager.wait_until_finished()
    if status == 0 and options.export:
        export(program, state["params"], options)
    if status == 0 and options.generate:
        text = generate(program.model, state["params"], tokenizer, options.generate, 64, options.length)
        if jax.process_index() == 0:
            print(text)
    return status


def train(program: Program, compiled: Any, state: Any, batches: Batches, manager: Any, first: int) -> tuple[int, Any]:
    """Steps from `first` on. The status is 75 where a signal stopped them: the launcher's --restarts goes on."""
    options = program.options
    stop = Stop()
    report = writers(options.steps, options.log) if jax.process_index() == 0 else []
    flops, peak = compiled.cost_analysis().get("flops"), peak_flops()
    trace_from, trace_to = options.profile or (-1, -1)
    began, reported = time.perf_counter(), first

    def save(step: int) -> None:
        if manager and manager.latest_step() != step:
            jax.block_until_ready(state)  # Orbax waits for the other processes; no step may be in flight
            manager.save(step, args=ocp.args.StandardSave(state))

    for step in range(first + 1, options.steps + 1):
        if step == trace_from:
            jax.profiler.start_trace(options.log or "profile")
        state, metrics = compiled(state, batches.at(step - 1))
        if step == trace_to:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
        is_last = step == options.steps
        if manager and step % options.save_every == 0:
            save(step)
        if step % options.report_every and not is_last and step != first + 1:
            continue
        loss = float(metrics["loss"])
        seconds, began = time.perf_counter() - began, time.perf_counter()
        count, reported = step - reported, step
        numbers = {"loss": loss, "grad_norm": float(metrics["grad_norm"])}
        if step > first + 1:  # the first call also loads programs
            numbers["tokens_per_s"] = count * options.batch * options.length / seconds
            numbers["step_s"] = seconds / count
            numbers["eta_s"] = (options.steps - step) * seconds / count
            if flops and peak:
                numbers["mfu"] = flops * count / seconds / peak
        if options.eval_every and (step % options.eval_every == 0 or is_last):
            losses = [
                program.evaluate(state["params"], batches.at(i, held_out=True)) for i in range(options.eval_batches)
            ]
            numbers["held_out_loss"] = sum(map(float, losses)) / len(losses)
            began = time.perf_counter()
        for write in report:
            write(step, numbers)
        if not math.isfinite(loss):
            say(
                f"the loss of step {step} is {loss}; the last checkpoint is of step {manager and manager.latest_step()}"
            )
            return 1, state
        jax.block_until_ready(state)
        if stop.agreed():
            save(step)
            say(f"stopped by a signal after step {step}" + ("; saved" if manager else ""))
            return 75, state
    save(options.steps)
    return 0, state


def config_of(options: argparse.Namespace, tokenizer: Tokenizer) -> Config:
    """The model of --model, or a small one."""
    if options.model:
        return Config.of_folder(options.model, lora_rank=options.lora)
    return Config(vocabulary=tokenizer.vocabulary, layers=options.layers, width=options.width, hidden=3 * options.width,
                  experts=options.experts, lora_rank=options.lora)  # fmt: skip


def make_mesh(options: argparse.Namespace) -> mpmd.MpmdMesh:
    """Groups of data × tensor devices. With too few devices, groups share them."""
    inside = options.data * options.tensor
    wanted = options.groups * inside
    if jax.devices()[0].platform != "cpu" and len(jax.devices()) < inside:
        sys.exit(f"a group of --data {options.data} × --tensor {options.tensor} needs {inside} devices")
    devices = np.array(jax.devices())
    types = (AxisType.Auto,) * 2
    if len(devices) >= wanted:
        grid = devices[:wanted].reshape(options.groups, options.data, options.tensor)
        return mpmd.MpmdMesh(Mesh(grid, ("stage", "data", "tensor"), axis_types=(AxisType.Auto, *types)), "stage")
    meshes = [
        Mesh(devices[i : i + inside].reshape(options.data, options.tensor), ("data", "tensor"), axis_types=types)
        for i in range(0, len(devices) - inside + 1, inside)
    ]
    return mpmd.MpmdMesh.from_groups([meshes[g * len(meshes) // options.groups] for g in range(options.groups)])


def plan(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 32):
    """A step of Llama 3 with 8 billion parameters, for `python -m mpmd plan`."""
    axes = [name for name in mesh.lowering_mesh().axis_names if name != mesh.mpmd_axis_name]
    RULES.update(width=axes[0], vocabulary=None, heads=None, hidden=None, experts=None)
    options = parse(["--microbatches", str(num_microbatches), "--schedule", schedule, "--length", "8192"])
    options.batch = num_microbatches * mesh.lowering_mesh().size
    config = Config(128256, 4096, 14336, 32, 32, 8, 128)
    program = Program(config, options, mesh)
    return program.step, program.abstract()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", metavar="DIR", help="a Hugging Face folder: config.json, safetensors, tokenizer.json")
    add("--text", nargs="+", default=[], metavar="PATH[=WEIGHT]", help="files or folders of text to train on")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=128)
    add("--experts", type=int, default=0, help="experts of each layer (default 0: none)")
    add("--groups", type=int, default=4, help="pipeline groups (default 4)")
    add("--data", type=int, default=1, help="devices of a group that share the rows and divide the parameters")
    add("--tensor", type=int, default=1, help="devices of a group that divide heads and hidden units")
    add("--schedule", default="1f1b", help="any of `python -m scheduler compare` (default 1f1b)")
    add("--cuts", type=lambda text: tuple(map(int, text.split(","))), help="layers of each stage; default: by cost")
    add("--microbatches", type=int, default=8)
    add("--batch", type=int, default=16, help="rows of a step (default 16)")
    add("--length", type=int, default=128, help="tokens of a row (default 128)")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=3e-3)
    add("--muon", action="store_true", help="Muon for the matrices of the layers, AdamW for the rest")
    add("--lora", type=int, default=0, metavar="RANK", help="train only small factors of this rank")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=50, metavar="N", help="steps between evaluations on held-out text; 0: none")
    add("--eval-batches", type=int, default=4)
    add("--report-every", type=int, default=10, metavar="N", help="steps between reports, and reactions to SIGTERM")
    add("--log", metavar="DIR", help="metrics.csv, and events for TensorBoard")
    add("--profile", type=lambda text: tuple(map(int, text.split(":"))), metavar="A:B", help="trace steps A to B")
    add("--checkpoint-dir", metavar="DIR", help="save here, and go on from what is here")
    add("--save-every", type=int, default=100, metavar="N")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints to keep (default 3)")
    add("--export", metavar="DIR", help="write the trained weights as a Hugging Face folder")
    add("--generate", metavar="PROMPT", help="continue this text at the end")
    options = parser.parse_args(argv)
    if options.export and not options.model:
        parser.error("--export writes a folder like that of --model, which is missing")
    if options.batch % options.microbatches or options.batch // options.microbatches % options.data:
        parser.error(
            f"--batch {options.batch} is not made of {options.microbatches} microbatches × --data {options.data}"
        )
    return options


if __name__ == "__main__":
    options = parse()
    if "MPMD_COORDINATOR" not in os.environ:  # devices for the groups, on a machine without GPUs
        jax.config.update("jax_num_cpu_devices", options.groups * options.data * options.tensor)
    sys.exit(run(options))
