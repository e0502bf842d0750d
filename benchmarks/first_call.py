"""Measures the first call of a step: tracing, partitioning, compiling and running it once.

    python benchmarks/first_call.py [--repeats 5] [--only gpt]

- 256 microbatches against 4. The compiled programs do not depend on the number of microbatches.
- 8 equal stages against 3, and 64 against 8. Equal stages are compiled once and loaded on each group's devices.
- The GPT of `examples/train_gpt.py` with 8 layers, as a pipeline of 8 or 4 stages, against plain `jax.jit`. There the
  same step is one program with a `lax.scan` over the microbatches.
- A multilayer perceptron with Adam, in 4 stages, against plain `jax.jit`. It compiles little, so all else counts.
- A vision transformer in Flax NNX with 8 blocks, whose dropouts take keys from one `nnx.Rngs`, as a pipeline of 8 or 4
  stages, against plain `jax.jit`. The stages differ in the numbers that go into the keys. (`pip install flax`)
- The state of this transformer (its parameters and Adam's moments), made in the groups of 8 or 4 stages, against plain
  `jax.jit`.
- An encoder and a decoder in Flax Linen with 4 blocks each, dropout and relative positions, in the same way. There are
  two kinds of stages.
- Two models in Flax NNX with 4 blocks in each part, in the same way: a vision and a text encoder that match pairs of
  images and texts (like SigLIP), and two convolutions, an encoder of sounds and a decoder of texts (like Whisper).
- The mixture of experts of `examples/moe` with 8 layers, on 4 groups of 2 devices with Explicit axes, under 1F1B,
  a zero-bubble schedule and DualPipeV, against plain `jax.jit` on one of these groups. The plain step scans over all
  layers. For this model also the time of a later step, the median of ten.
- The same GPT with JAX's compilation cache in a folder. The first start is compared with plain `jax.jit`. The second
  start, which finds the programs of the first one, is compared with the first.

Every first call is timed in its own process, with JAX's default settings. The time does not include the import of JAX,
the creation of the devices, or the initial state. The repeats of all cases take turns. Prints medians (by the clock
and of the processor), the number of programs that were compiled or loaded from the folder, and the ratios beside their
targets.
"""

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_DEVICES = 8
RATIOS = (
    ("microbatches-256", "microbatches-4", 1.25),
    ("stages-8", "stages-3", 1.8),
    ("stages-64", "stages-8", 1.5),
    ("mlp-adam", "mlp-adam-jit", 1.5),
    ("gpt-8-stages", "gpt-jit", 1.5),
    ("gpt-4-stages", "gpt-jit", 1.5),
    ("vit-8-stages", "vit-jit", 1.4),
    ("vit-4-stages", "vit-jit", 1.4),
    ("init-8-stages", "init-jit", 1.4),
    ("init-4-stages", "init-jit", 1.4),
    ("t5-8-stages", "t5-jit", 1.4),
    ("t5-4-stages", "t5-jit", 1.4),
    ("siglip-8-stages", "siglip-jit", 1.4),
    ("siglip-4-stages", "siglip-jit", 1.4),
    ("whisper-8-stages", "whisper-jit", 1.4),
    ("whisper-4-stages", "whisper-jit", 1.4),
    ("moe-1f1b", "moe-jit", 1.5),
    ("moe-zb-h1", "moe-jit", 2.5),
    ("moe-dualpipe-v", "moe-jit", 2.5),
    ("moe-1f1b-step", "moe-jit-step", 1.3),
    ("moe-zb-h1-step", "moe-jit-step", 1.3),
    ("moe-dualpipe-v-step", "moe-jit-step", 1.3),
    ("gpt-8-stages with a folder", "gpt-jit with a folder", 1.6),
    ("gpt-8-stages, second start", "gpt-8-stages with a folder", 0.3),
)


def main() -> int:
    """Measures and prints. Returns 1 if a ratio is above its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only the cases whose names begin with this (default: all)")
    parser.add_argument("--case", choices=CASES, help="run one first call in this process and print its seconds")
    args = parser.parse_args()
    if args.case:
        print(*CASES[args.case]())
        return 0

    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    programs: dict[str, str] = {}
    for _ in range(args.repeats):
        for case in CASES:
            if case.startswith(args.only):
                _measure(case, seconds, programs)
    medians = {
        case: [statistics.median(times) for times in zip(*pairs, strict=True)] for case, pairs in seconds.items()
    }
    for case, (wall, cpu) in medians.items():
        walls = [wall for wall, _ in seconds[case]]
        spread = f"{min(walls):.2f} to {max(walls):.2f}; processor {cpu:.2f} s"
        print(f"{case:28} {wall:6.2f} s   ({spread})   {programs[case]}")
    failed = 0
    for case, against, target in RATIOS:
        if case in medians and against in medians:
            wall, cpu = (ours / theirs for ours, theirs in zip(medians[case], medians[against], strict=True))
            failed |= cpu > target
            print(f"{case} / {against}: {wall:.2f}, in processor time {cpu:.2f} (target {target})")
    return int(failed)


def _measure(case: str, seconds: dict[str, list[tuple[float, float]]], programs: dict[str, str]) -> None:
    """Measures one first call; for a GPT also one that stores its programs in a folder, and one that finds them."""
    starts = [("", {})]
    with tempfile.TemporaryDirectory() as folder:
        if case.startswith("gpt"):
            starts += [(start, {"JAX_COMPILATION_CACHE_DIR": folder}) for start in (" with a folder", ", second start")]
        for start, environment in starts:
            wall, cpu, *words = _in_a_new_process(case, **environment).split()
            seconds[case + start].append((float(wall), float(cpu)))
            programs[case + start] = " ".join(words)


def _in_a_new_process(case: str, **environment: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | environment
    num_devices = 64 if case.startswith("stages") else NUM_DEVICES
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    command = [sys.executable, __file__, "--case", case]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def _measured(step: Callable, *arguments) -> tuple[float, float, str]:
    """Returns the seconds of a first call, by the clock and of the processor, and the programs of a pipeline."""
    import jax

    start, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(step(*arguments))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    compilers = [c._programs.compiler for found in getattr(step, "_cache", {}).values() for c in found]
    return seconds, used, ", ".join(f"{c.num_compiled} programs compiled, {c.num_stored} stored" for c in compilers)


def _mesh(num_groups: int):
    import jax
    import numpy as np

    import mpmd

    return mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:num_groups]), ("stage",)), "stage")


def _equal_stages(num_stages: int, num_microbatches: int) -> tuple[float, float, str]:
    """Measures a multilayer perceptron with two layers of width 32 a stage, four rows a microbatch, and SGD."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd
    import scheduler

    def loss(params, x):
        for index, (up, down) in enumerate(params):
            x = x + jnp.tanh(x @ up) @ down
            if index < num_stages - 1:
                x = mpmd.mark_stage_end(x)
        return jnp.mean(x * x)

    @mpmd.jit(mpmd_mesh=_mesh(num_stages), donate_argnums=0)
    def step(params, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(params, x),
            xs,
            schedule=scheduler.OneFOneB(num_stages),
            operation=mpmd.Mean,
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.1, size=(num_stages, 2, 32, 32)).astype(np.float32)
    params = [(jnp.asarray(up), jnp.asarray(down)) for up, down in weights]
    return _measured(step, params, rng.normal(size=(num_microbatches, 4, 32)).astype(np.float32))


def _mlp_with_adam(pipelined: bool) -> tuple[float, float, str]:
    """Measures a multilayer perceptron with biases, 8 layers in 4 stages, and Adam; as a pipeline or one program."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import mpmd
    import scheduler

    def loss(params, batch):
        x = batch["x"]
        for index, layer in enumerate(params):
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
            if index in (1, 3, 5):
                x = mpmd.mark_stage_end(x)
        return jnp.mean((x - batch["y"]) ** 2)

    optimizer = optax.adam(1e-3)

    def step(params, state, batch):
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=scheduler.OneFOneB(4), operation=mpmd.Mean
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.1, size=(8, 64, 64)).astype(np.float32)
    params = [{"w": jnp.asarray(w), "b": jnp.zeros(64)} for w in weights]
    rows = rng.normal(size=(2, 8, 16, 64)).astype(np.float32)
    arguments = params, optimizer.init(params), {"x": rows[0], "y": rows[1]}
    return _measured(mpmd.jit(step, mpmd_mesh=_mesh(4)) if pipelined else jax.jit(step), *arguments)


def _gpt(num_stages: int) -> tuple[float, float, str]:
    """Measures the example's model and optimizer, so narrow that one run costs little. 0 stages: plain `jax.jit`."""
    sys.path[0] = str(ROOT / "examples")  # instead of this folder, whose reshard.py would hide the package
    import jax
    import numpy as np
    import train_gpt

    import mpmd
    import scheduler

    model = train_gpt.GPT(num_layers=8, d_model=64, num_stages=num_stages or 8)
    optimizer = train_gpt.make_optimizer(3e-3, 100)
    train_step = train_gpt.make_step(model, optimizer, scheduler.OneFOneB(model.num_stages), num_microbatches=8)
    state = jax.jit(train_gpt.make_init(model, optimizer))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, size=(16, 65), dtype=np.uint8)
    if num_stages:
        step = mpmd.jit(train_step, mpmd_mesh=_mesh(model.num_stages), donate_argnums=0)
    else:
        step = jax.jit(train_step, donate_argnums=0)
    return _measured(step, state, tokens)


def _vit_model(num_stages: int, rngs: Any) -> Any:
    """Makes a narrow vision transformer with dropout; 0 stages: without marks."""
    import jax
    from flax import nnx

    import mpmd

    width, depth, rate = 64, 8, 0.1
    per_stage = depth // (num_stages or 1)

    class Block(nnx.Module):
        def __init__(self):
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(4, width, dropout_rate=rate, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)
            self.drop = nnx.Dropout(rate)

        def __call__(self, x, rngs):
            x = x + self.attention(self.norms[0](x), deterministic=False, rngs=rngs)
            h = self.drop(nnx.gelu(self.up(self.norms[1](x))), rngs=rngs)
            return x + self.drop(self.down(h), rngs=rngs)

    class ViT(nnx.Module):
        def __init__(self):
            self.patches = nnx.Conv(3, width, (8, 8), (8, 8), rngs=rngs)
            self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, width)))
            self.blocks = nnx.List([Block() for _ in range(depth)])
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.head = nnx.Linear(width, 10, rngs=rngs)
            self.drop = nnx.Dropout(rate)

        def __call__(self, images, rngs):
            x = self.patches(images).reshape(images.shape[0], -1, width)
            x = self.drop(x + self.positions[...], rngs=rngs)
            for index, block in enumerate(self.blocks, 1):
                x = block(x, rngs)
                if index % per_stage == 0 and index < depth:
                    x = mpmd.mark_stage_end(x)
            return self.head(self.norm(x).mean(axis=1))

    return ViT()


def _vit(num_stages: int) -> tuple[float, float, str]:
    """Measures the vision transformer's training step. 0 stages: plain `jax.jit`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import mpmd
    import scheduler

    graph, params, rest = nnx.split(_vit_model(num_stages, nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adamw(1e-3)

    def loss(params, images, labels, key):
        logits = nnx.merge(graph, params, rest)(images, nnx.Rngs(dropout=key))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, state, batch, key):
        value, grads = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(loss)(params, *microbatch),
            (*batch, jax.random.split(key, 8)),
            schedule=scheduler.OneFOneB(num_stages or 8),
            operation=mpmd.Mean,
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.normal(size=(8, 4, 32, 32, 3)), jnp.float32), jnp.asarray(rng.integers(0, 10, (8, 4)))
    arguments = params, optimizer.init(params), batch, jax.random.key(0)
    return _measured(mpmd.jit(step, mpmd_mesh=_mesh(num_stages)) if num_stages else jax.jit(step), *arguments)


def _init(num_stages: int) -> tuple[float, float, str]:
    """Measures how the vision transformer's parameters and Adam's state are made in groups. 0: plain `jax.jit`."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import PartitionSpec

    import mpmd

    def init(key):
        params = nnx.state(_vit_model(0, nnx.Rngs(key)), nnx.Param)
        return params, optax.adamw(1e-3).init(params)

    if not num_stages:
        return _measured(jax.jit(init), jax.random.key(0))
    mesh = _mesh(num_stages)

    def layout(path, _):
        names: list = [getattr(k, "key", getattr(k, "name", None)) for k in path]
        if "blocks" in names:
            group = names[names.index("blocks") + 1] * num_stages // 8
        else:
            group = num_stages - 1 if {"norm", "head"}.intersection(names) else 0
        return mpmd.MpmdSharding(mesh, group, PartitionSpec())

    layouts = jax.tree_util.tree_map_with_path(layout, jax.eval_shape(init, jax.random.key(0)))
    return _measured(mpmd.jit(init, mpmd_mesh=mesh, out_shardings=layouts), jax.random.key(0))


def _t5(num_stages: int) -> tuple[float, float, str]:
    """Measures a narrow encoder and decoder of 4 blocks with relative positions and dropout. 0: plain `jax.jit`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn

    import mpmd

    width, heads, depth, vocabulary = 64, 4, 4, 256
    mark = mpmd.mark_layer_end if num_stages else lambda x: x

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, bias, encoded=None):
            x = x + self.attention(nn.RMSNorm()(x), None, bias)
            if encoded is not None:
                x = x + self.attention(nn.RMSNorm()(x), encoded, 0.0)
            h = nn.gelu(nn.Dense(4 * width)(nn.RMSNorm()(x)))
            return x + self.drop(nn.Dense(width)(self.drop(h)))

        def drop(self, x):
            return nn.Dropout(0.1, deterministic=False)(x)

        def attention(self, x, other, bias):
            q, k, v = (nn.DenseGeneral((heads, width // heads))(y) for y in (x, *[x if other is None else other] * 2))
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
            return self.drop(
                nn.DenseGeneral(width, axis=(-2, -1))(jnp.einsum("bhqk,bkhd->bqhd", self.drop(weights), v))
            )

    class T5(nn.Module):
        @nn.compact
        def __call__(self, tokens, targets):
            length = targets.shape[-1]
            distance = jnp.clip(jnp.arange(length) - jnp.arange(length)[:, None], -8, 8) + 8
            causal = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)
            x, bias = nn.Embed(vocabulary, width)(tokens), nn.Embed(17, heads)(distance).transpose(2, 0, 1)
            for _ in range(depth):
                x = mark(Block()(x, bias))
            y, bias = nn.Embed(vocabulary, width)(targets), nn.Embed(17, heads)(distance).transpose(2, 0, 1) + causal
            for index in range(depth):
                y = Block()(y, bias, x)
                y = mark(y) if index < depth - 1 else y
            return nn.Dense(vocabulary)(nn.RMSNorm()(y))

    model, optimizer = T5(), optax.adam(1e-3)
    apply: Any = model.apply

    def loss(params, tokens, targets, key):
        logits = apply(params, tokens, targets, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(params, state, batch):
        def gradients(microbatch):
            return jax.value_and_grad(loss)(params, *microbatch)

        value, grads = mpmd.treduce(gradients, batch, schedule="1f1b", operation=mpmd.Mean)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens, targets = np.random.default_rng(0).integers(0, vocabulary, (2, 8, 2, 32))
    shapes = jax.eval_shape(
        model.init, {"params": jax.random.key(0), "dropout": jax.random.key(0)}, tokens[0], targets[0]
    )
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(scale=0.1, size=s.shape), s.dtype), shapes)
    arguments = params, optimizer.init(params), (tokens, targets, jax.random.split(jax.random.key(1), 8))
    return _measured(mpmd.jit(step, mpmd_mesh=_mesh(num_stages)) if num_stages else jax.jit(step), *arguments)


def _encoders(kind: str, num_stages: int) -> tuple[float, float, str]:
    """Measures two narrow towers of 4 blocks: in SigLIP, their means match; in Whisper, the second reads the first."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import mpmd

    width, heads, depth, vocabulary, rows = 64, 4, 4, 256, 4
    mark = mpmd.mark_layer_end if num_stages else lambda x: x

    class Block(nnx.Module):
        def __init__(self, crosses, rngs):
            self.attentions = nnx.List(
                [nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs) for _ in range(1 + crosses)]
            )
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2 + crosses)])
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x, other=None, mask=None):
            x = x + self.attentions[0](self.norms[0](x), mask=mask)
            if other is not None:
                x = x + self.attentions[1](self.norms[1](x), other)
            return x + self.down(nnx.gelu(self.up(self.norms[-1](x))))

    class Tower(nnx.Module):
        def __init__(self, length, crosses, rngs):
            self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
            self.blocks = nnx.List([Block(crosses, rngs) for _ in range(depth)])
            self.norm = nnx.LayerNorm(width, rngs=rngs)

        def __call__(self, x, ends, other=None, mask=None):
            x = x + self.positions[...]
            for index, block in enumerate(self.blocks):
                x = block(x, other, mask)
                x = mark(x) if ends or index < depth - 1 else x
            return self.norm(x)

    class SigLIP(nnx.Module):
        def __init__(self, rngs):
            self.patches = nnx.Conv(3, width, (8, 8), (8, 8), rngs=rngs)
            self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
            self.images, self.texts = Tower(16, 0, rngs), Tower(16, 0, rngs)
            self.scale, self.bias = nnx.Param(jnp.float32(2.3)), nnx.Param(jnp.float32(-10.0))

        def __call__(self, images, texts):
            def unit(x):
                x = x.mean(axis=1)
                return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

            x = unit(self.images(self.patches(images).reshape(len(images), -1, width), True))
            y = unit(self.texts(self.embed(texts), False))
            logits = x @ y.T * jnp.exp(self.scale[...]) + self.bias[...]
            return -jax.nn.log_sigmoid(logits * (2 * jnp.eye(len(images)) - 1)).sum() / len(images)

    class Whisper(nnx.Module):
        def __init__(self, rngs):
            self.convolutions = nnx.List(
                [nnx.Conv(80, width, (3,), rngs=rngs), nnx.Conv(width, width, (3,), strides=2, rngs=rngs)]
            )
            self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
            self.encoder, self.decoder = Tower(32, 0, rngs), Tower(16, 1, rngs)

        def __call__(self, sounds, texts):
            for convolution in self.convolutions:
                sounds = nnx.gelu(convolution(sounds))
            encoded = self.encoder(sounds, True)
            mask = nnx.make_causal_mask(texts)
            logits = self.embed.attend(self.decoder(self.embed(texts), False, encoded, mask))
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], texts[:, 1:]).mean()

    graph, params = nnx.split({"siglip": SigLIP, "whisper": Whisper}[kind](nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adamw(1e-3)

    def step(params, state, batch):
        def gradients(microbatch):
            return jax.value_and_grad(lambda params: nnx.merge(graph, params)(*microbatch))(params)

        value, grads = mpmd.treduce(gradients, batch, schedule="1f1b", operation=mpmd.Mean)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    shape = {"siglip": (32, 32, 3), "whisper": (64, 80)}[kind]
    batch = (
        jnp.asarray(rng.normal(size=(8, rows, *shape)), jnp.float32),
        jnp.asarray(rng.integers(0, 256, (8, rows, 16))),
    )
    arguments = params, optimizer.init(params), batch
    return _measured(mpmd.jit(step, mpmd_mesh=_mesh(num_stages)) if num_stages else jax.jit(step), *arguments)


def _later(step: Callable, state: Any, rows: Any) -> tuple[float, float, str]:
    """Returns the median seconds of ten later steps, each on the state that the previous one returned."""
    import jax

    times = []
    for _ in range(12):
        start, used = time.perf_counter(), time.process_time()
        state, *rest = step(state, rows)
        jax.block_until_ready((state, rest))
        times.append((time.perf_counter() - start, time.process_time() - used))
    wall, cpu = (statistics.median(each) for each in zip(*times[2:], strict=True))
    return wall, cpu, ""


def _moe(schedule: str, is_first: bool = True) -> tuple[float, float, str]:
    """Measures the step of `examples/moe`, with the optimizer's state on devices; without a schedule: `jax.jit`."""
    sys.path[0] = str(ROOT / "examples" / "moe")
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import mpmd

    parallel, train, experts = map(importlib.import_module, ("parallel", "train", "experts"))
    config, optimizer = train.config_of(train.parse([])), train.make_optimizer(3e-3, 100)
    step = train.make_step(config, optimizer, schedule or None, offload=False)
    first, key = train.make_init(config, optimizer), jax.random.key(0)
    rows = np.random.default_rng(0).integers(0, 256, (8, 4, 65)).astype(np.int32)
    if schedule:
        mesh = parallel.make_mesh(4, 1, 2)
        group, jitted, compiled = mesh.tracing_mesh(), mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0), []
        like = parallel.typed(group, jax.eval_shape(first, key))
        sharding = NamedSharding(group, PartitionSpec(None, *experts.ROWS))
        types = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding)
        wall, cpu, _ = _measured(lambda: compiled.append(jitted.lower(like, types).compile()))
        initialise: Any = mpmd.jit(first, mpmd_mesh=mesh, out_shardings=compiled[0].input_shardings[0][0])
        state = initialise(key)
        if not is_first:
            return _later(compiled[0], state, rows)
        more_wall, more_cpu, _ = _measured(lambda: compiled[0](state, rows))
        return wall + more_wall, cpu + more_cpu, f"{compiled[0]._programs.compiler.num_compiled} programs compiled"
    mesh = jax.make_mesh((1, 2), ("data", "expert"), (AxisType.Explicit,) * 2, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        layout = jax.tree.map(lambda x: x.sharding, parallel.typed(mesh, jax.eval_shape(first, key)))
        state = jax.device_put(jax.jit(first)(key), layout)
        rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(None, *experts.ROWS)))
        jitted = jax.jit(step, donate_argnums=0)
        return _measured(jitted, state, rows) if is_first else _later(jitted, state, rows)


CASES: dict[str, Callable[[], tuple[float, float, str]]] = {
    "microbatches-4": lambda: _equal_stages(4, 4),
    "microbatches-256": lambda: _equal_stages(4, 256),
    "stages-3": lambda: _equal_stages(3, 8),
    "stages-8": lambda: _equal_stages(8, 8),
    "stages-64": lambda: _equal_stages(64, 8),
    "mlp-adam-jit": lambda: _mlp_with_adam(pipelined=False),
    "mlp-adam": lambda: _mlp_with_adam(pipelined=True),
    "gpt-jit": lambda: _gpt(0),
    "gpt-8-stages": lambda: _gpt(8),
    "gpt-4-stages": lambda: _gpt(4),
    "vit-jit": lambda: _vit(0),
    "vit-8-stages": lambda: _vit(8),
    "vit-4-stages": lambda: _vit(4),
    "init-jit": lambda: _init(0),
    "init-8-stages": lambda: _init(8),
    "init-4-stages": lambda: _init(4),
    "t5-jit": lambda: _t5(0),
    "t5-8-stages": lambda: _t5(8),
    "t5-4-stages": lambda: _t5(4),
    "siglip-jit": lambda: _encoders("siglip", 0),
    "siglip-8-stages": lambda: _encoders("siglip", 8),
    "siglip-4-stages": lambda: _encoders("siglip", 4),
    "whisper-jit": lambda: _encoders("whisper", 0),
    "whisper-8-stages": lambda: _encoders("whisper", 8),
    "whisper-4-stages": lambda: _encoders("whisper", 4),
    "moe-jit": lambda: _moe(""),
    "moe-1f1b": lambda: _moe("1f1b"),
    "moe-zb-h1": lambda: _moe("zb-h1"),
    "moe-dualpipe-v": lambda: _moe("dualpipe-v"),
    "moe-jit-step": lambda: _moe("", is_first=False),
    "moe-1f1b-step": lambda: _moe("1f1b", is_first=False),
    "moe-zb-h1-step": lambda: _moe("zb-h1", is_first=False),
    "moe-dualpipe-v-step": lambda: _moe("dualpipe-v", is_first=False),
}


if __name__ == "__main__":
    sys.exit(main())
