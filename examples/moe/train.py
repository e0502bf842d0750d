"""Trains a mixture of experts as a pipeline whose groups divide experts, rows and parameters.

    python examples/moe/train.py                              # 4 groups of 2 devices; every layer's experts on both
    python examples/moe/train.py --schedule dualpipe-v --exchange gather --remat names
    python examples/moe/train.py --groups 2 --expert 4 --checkpoint-dir run --save-every 50
    python examples/moe/train.py --groups 4 --expert 2 --checkpoint-dir run --resume    # goes on in another layout
    scripts/launch_multihost.sh -n 4 --cpu-devices 2 -- python examples/moe/train.py

`router.py` says which experts a token goes to, `experts.py` brings it there and back, `model.py` puts them into a
decoder, `parallel.py` says how its arrays lie in a group. This file has the optimizer, the step and the run. Text,
checkpoints and the line of progress are those of `examples/train_gpt.py`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).parents[1]))

from experts import EXCHANGES, ROWS, is_explicit
from model import REMAT, Config, init, loss
from parallel import make_mesh, typed
from router import statistics
from train_gpt import Checkpoints, Progress, batch_at, read_text, say

import mpmd
import reshard
from scheduler.schedules import catalogue

Space = jax.memory.Space


def muon_axes(params: Any) -> Any:
    """Which axes of a stacked parameter are the rows and columns of Muon's matrices; what has none gets AdamW."""

    def axes(path, p):
        names, last = [key.key for key in path], p.ndim - 1
        if names[0] != "layers" or names[-1].endswith(("norm", "router")):
            return None
        heads = {"query": ((1,), (2, 3)), "key": ((1,), (2, 3)), "value": ((1,), (2, 3)), "output": ((1, 2), (3,))}
        return optax.contrib.MuonDimensionNumbers(*heads.get(names[-1], ((last - 1,), (last,))))

    return jax.tree_util.tree_map_with_path(axes, params)


def make_optimizer(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """Muon for each matrix of each layer and expert, AdamW for the rest; clipped by the global norm, with warmup."""
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, num_steps // 10), max(2, num_steps))
    muon = optax.contrib.muon(rate, muon_weight_dimension_numbers=muon_axes, consistent_rms=0.2)
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def make_init(config: Config, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], dict[str, Any]]:
    """A function from a key to the state before the first step."""

    def first(key: jax.Array) -> dict[str, Any]:
        params = init(config, key)
        return {"params": params, "optimizer": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    return first


def make_step(config: Config, optimizer: optax.GradientTransformation, schedule: Any, offload: bool) -> Callable:
    """A step from a state and rows (microbatches, rows, length + 1) to the next state and what it reports.

    The optimizer's state is in the memory of the host between steps where `offload` says so. It is brought to the
    devices for the update, each part in the group of its parameter.
    """

    def move(optimizer_state, space):
        return jax.tree.map(lambda x: jax.device_put(x, space) if offload and x.ndim else x, optimizer_state)

    def update(grads, optimizer_state, params):
        """What comes out lies as what goes in. Between, XLA chooses: Optax says no shardings of its products."""
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (params, optimizer_state))
        auto: Any = jax.sharding.auto_axes(optimizer.update, out_sharding=specs) if is_explicit() else optimizer.update
        return auto(grads, optimizer_state, params)

    def step(state: dict[str, Any], rows: jax.Array) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def one(rows):
            return jax.value_and_grad(lambda params: loss(config, params, rows), has_aux=True)(state["params"])

        how = (mpmd.Mean, (mpmd.Mean, mpmd.Add)), mpmd.Mean  # losses and gradients are averaged, counts added
        ((_, (losses, counts)), grads) = mpmd.treduce(one, rows, schedule, operation=how)
        updates, opt = update(grads, move(state["optimizer"], Space.Device), state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "optimizer": move(opt, Space.Host), "step": state["step"] + 1}
        losses = {name: x.mean() for name, x in losses.items()} | {"grad_norm": optax.tree.norm(grads)}
        return new, losses | statistics(counts["used"], counts["dropped"])

    return step


def export(config: Config, params: Any, path: str) -> None:
    """Writes the parameters as a Hugging Face folder of a Mixtral. Every process calls it."""
    how = reshard.checkpoint.TensorFormat("mixtral", dtype=jnp.dtype(config.dtype).name)
    reshard.save(path, params, tensors=how)
    sizes = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "dtype": jnp.dtype(config.dtype).name,
        "vocab_size": config.vocabulary, "hidden_size": config.width, "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "head_dim": config.head_size,
        "num_key_value_heads": config.kv_heads, "num_local_experts": config.experts, "rope_theta": 10_000.0,
        "num_experts_per_tok": config.k, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    if jax.process_index() == 0:
        (Path(path) / "config.json").write_text(json.dumps(sizes, indent=2))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    say_default = "(default: %(default)s)"

    def number(name: str, default: float, text: str) -> None:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} {say_default}")

    def choice(name: str, among: Sequence[str], default: str, text: str) -> None:
        parser.add_argument(f"--{name}", choices=among, default=default, help=f"{text} {say_default}", metavar="NAME")

    number("groups", 4, "groups of the pipeline")
    number("data", 1, "devices of a group along the axis of rows and parts of parameters")
    number("expert", 2, "devices of a group along the axis of experts")
    choice("schedule", list(catalogue.SCHEDULES), "1f1b", "order of the tasks")
    number("microbatches", 8, "microbatches of a step")
    number("batch", 32, "rows of a step")
    number("length", 64, "bytes of a row")
    number("layers", 8, "layers")
    number("width", 64, "width of the model")
    number("hidden", 128, "hidden units of an expert")
    number("experts", 8, "experts of a layer")
    number("k", 2, "experts that a token goes to")
    number("shared", 0, "hidden units of an expert that all tokens take")
    choice("exchange", list(EXCHANGES), "capacity", f"how rows get to experts: {', '.join(EXCHANGES)}")
    number("capacity", 1.25, "room of an expert, over an even share")
    number("balance", 0.01, "weight of the loss that balances the experts")
    number("z", 0.001, "weight of the loss that keeps the router's logits small")
    choice("remat", list(REMAT), "full", f"what the backward pass computes again: {', '.join(REMAT)}")
    parser.add_argument("--float32", action="store_true", help="compute in float32; without it, in bfloat16")
    parser.add_argument("--on-device", action="store_true", help="keep the optimizer's state on the devices")
    number("steps", 200, "training steps")
    number("lr", 3e-3, "learning rate after warmup")
    number("seed", 0, "of parameters and batches")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="text to train on")
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="save the state in this folder")
    number("save-every", 100, "steps between saves")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state in --checkpoint-dir")
    parser.add_argument("--export", metavar="DIR", help="write the trained parameters as a Hugging Face folder")
    parser.add_argument("--explain", action="store_true", help="say what runs where and what is sent, and end")
    options = parser.parse_args(argv)
    sizes = ("groups", "data", "expert", "microbatches", "batch", "length", "layers", "hidden", "experts", "k", "steps")
    for name in (*sizes, "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give a number of at least 1")
    if options.width < 16 or options.width % 16:
        parser.error(f"--width {options.width} is not a multiple of 16")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed {options.seed}: give a number of at least 0")
    if options.resume and not options.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir, the folder to go on from")
    devices = options.data * options.expert
    if options.batch % options.microbatches or options.batch // options.microbatches % devices:
        parser.error(f"--batch {options.batch} is not made of {options.microbatches} microbatches × {devices} devices")
    if options.k > options.experts:
        parser.error(f"--k {options.k} is more than --experts {options.experts}")
    if options.export and options.shared:
        parser.error("--export writes a Mixtral, which has no --shared expert")
    return options


def config_of(options: argparse.Namespace) -> Config:
    return Config(
        width=options.width, hidden=options.hidden, layers=options.layers, heads=options.width // 16,
        kv_heads=max(1, options.width // 32), experts=options.experts, k=options.k, shared=options.shared,
        exchange=options.exchange, capacity=options.capacity, balance=options.balance, z=options.z,
        remat=options.remat, dtype=jnp.float32 if options.float32 else jnp.bfloat16,
    )  # fmt: skip


def report(metrics: dict[str, Any]) -> str:
    """What the routers did in a step, over all layers."""
    mean = {name: float(np.mean(mpmd.device_get(metrics[name]))) for name in ("balance", "z", "entropy", "dropped")}
    busiest = float(np.max(mpmd.device_get(metrics["busiest"])))
    return "routers: " + "  ".join(f"{name} {x:.3g}" for name, x in mean.items()) + f"  busiest expert {busiest:.2f}"


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The whole run; returns the losses of its steps."""
    options = parse(argv)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # devices for the groups, on a machine without GPUs
        jax.config.update("jax_num_cpu_devices", options.groups * options.data * options.expert)
    mpmd.initialize()
    mesh = make_mesh(options.groups, options.data, options.expert)
    config, optimizer = config_of(options), make_optimizer(options.lr, options.steps)
    first, text = make_init(config, optimizer), read_text(options.text, options.length + 1)
    key, group = jax.random.key(options.seed), mesh.tracing_mesh()
    like = typed(group, jax.eval_shape(first, key), host="" if options.on_device else "optimizer")
    shape = options.microbatches, options.batch // options.microbatches, options.length + 1
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(group, P(None, *ROWS)))

    say(f"{sum(x.size for x in jax.tree.leaves(like['params'])):,} parameters; {options.schedule}; compiling ...")
    step = make_step(config, optimizer, options.schedule, not options.on_device)
    compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower(like, rows).compile()
    if options.explain:
        say(compiled.explain())
        return []
    layout = compiled.input_shardings[0][0]
    folder = options.checkpoint_dir
    checkpoints = Checkpoints(folder, options.save_every, keep=2) if folder else None
    start = (checkpoints.start(options.resume, options.steps) or 0) if checkpoints else 0
    if checkpoints and start:
        state: Any = checkpoints.restore(like, layout)
        say(f"goes on after step {start}")
    else:
        state = mpmd.jit(first, mpmd_mesh=mesh, out_shardings=layout)(key)

    losses, progress = [], Progress(options.steps, options.batch * options.length)
    for number in range(start, options.steps):
        rows = batch_at(text, options.seed, number, options.batch, options.length + 1).reshape(shape).astype(np.int32)
        state, metrics = compiled(state, rows)
        losses.append(float(metrics["loss"]))
        progress.show(number + 1, losses[-1])
        if (number + 1) % max(1, options.steps // 10) == 0:
            say(report(metrics))
        if checkpoints:
            checkpoints.save(number + 1, state, last=number + 1 == options.steps)
    if checkpoints:
        checkpoints.manager.close()
    if options.export:
        export(config, state["params"], options.export)
    return losses


if __name__ == "__main__":
    try:
        main()
    except (OSError, mpmd.ReshardError) as error:  # errors that a user can repair
        sys.exit(f"train.py: {error}")
