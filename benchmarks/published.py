"""Published training runs, predicted blind: the measurements of their authors and the predictions of `mpmd plan`.

    python benchmarks/published.py [--only NAME]

Each run is built as a step of its shape, compiled for GPUs that this machine need not have (extra `topology`), and
planned with the default constants of `mpmd plan`. No constant is fitted to a run. Prints a table in Markdown; figures
that miss their bound (time 20 %, memory 10 %, ratios 5 %) are bold. A run takes one to five minutes of one core.

The step of a run is a decoder. Float32 parameters and moments are divided over all devices with the same part of the
model; products are in bfloat16, causal attention is cuDNN's. Tensor parallelism is Megatron's, with activations divided
by position between layers. Gradients are summed once a step. Context parallelism divides positions; in attention, it
divides heads of queries and gathers all keys.
"""

# ruff: noqa: E402 (the path and the flags have to be set first)

import argparse
import dataclasses
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# These let collectives overlap with products; the published runs that use XLA have them too.
XLA_ENABLES = (
    "latency_hiding_scheduler",
    "pipelined_all_gather",
    "pipelined_reduce_scatter",
    "while_loop_double_buffering",
)
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, whose reshard.py would hide the package
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(f"--xla_gpu_enable_{name}=true" for name in XLA_ENABLES)

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import scheduler
from mpmd.arrays.targets import Target
from mpmd.costs.machine import Machine
from mpmd.planning.costs import StepCosts
from mpmd.planning.plan import Plan, plan_step

BLOCK = 1024  # queries for which scores exist at a time, without a kernel
TIME, MEMORY, RATIO = 0.20, 0.10, 0.05  # how far a prediction may be from the measurement
AXES = ("data", "context", "model")
H100 = Target.named("h100")
PRODUCTS = "q k v attended middle gate up"  # if these are kept, only norms, activations and scores are recomputed


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
      hidden: width of its MLP, or of each expert.
      gated: whether an MLP has three matrices instead of two.
      experts, chosen: the number of experts, and how many of them a token takes.
      shared: width of an MLP that all tokens take in addition.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int
    gated: bool = True
    experts: int = 0
    chosen: int = 0
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as published.

    Attributes:
      source, url: the source of its figures.
      groups, virtual: stages of the pipeline on different devices, and on each of these.
      data, context, model: devices of a group, by what is divided over them; `fsdp` divides parameters over `data`.
      rows, microbatches: rows of a microbatch, and microbatches of a step, of a replica.
      kept: the values that a layer keeps for its backward pass besides its input, by their names in `Step.layer`;
        with `attended` also the results of the attention kernel. All else is recomputed.
      float8: whether products with parameters of layers are in float8.
      attention: the share of the data sheet's speed that its attention reaches, where that is not cuDNN's.
      seconds, rate: the measured seconds of a step, or tokens a second of a device.
      memory: measured bytes of a device; None if not published.
      note: a difference of its step here, or of the model.
    """

    source: str
    url: str
    step: Model
    target: Target = H100
    groups: int = 1
    virtual: int = 1
    data: int = 1
    context: int = 1
    model: int = 1
    fsdp: bool = False
    rows: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    kept: str = PRODUCTS
    float8: bool = False
    attention: float | None = None
    seconds: float | None = None
    rate: float | None = None
    memory: float | None = None
    note: str = ""

    @property
    def num_devices(self) -> int:
        return self.groups * self.data * self.context * self.model

    @property
    def has_kernel(self) -> bool:
        """Whether attention is cuDNN's: JAX compiles it for heads of at most 128."""
        return self.step.width // self.step.heads <= 128

    @property
    def measured_s(self) -> float:
        """Seconds of a step."""
        return self.seconds or self.tokens / (self.rate or 1.0) / self.num_devices

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.rows * self.data * self.step.length

    @property
    def layout(self) -> str:
        names = {"PP": self.groups, "VP": self.virtual, "TP": self.model, "CP": self.context}
        data = {"EP" if self.step.experts else "FSDP" if self.fsdp else "DP": self.data}
        return " ".join(f"{name}{size}" for name, size in (names | data).items() if size > 1)


GPT3 = Model(96, 12288, 96, 96, 49152, 51200, 2048, gated=False)
LLAMA2_70B = Model(80, 8192, 64, 8, 28672, 32000, 4096)
LLAMA3_8B = Model(32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA3_70B = Model(80, 8192, 64, 8, 28672, 128256, 8192)
LLAMA3_405B = Model(126, 16384, 128, 8, 53248, 128256, 8192)
NEMOTRON_15B = Model(32, 6144, 48, 8, 24576, 256000, 4096, gated=False)
NEMOTRON_340B = Model(96, 18432, 96, 8, 73728, 256000, 4096, gated=False)
MARIN = Model(26, 2560, 20, 5, 1280, 128256, 8192, experts=256, chosen=4, shared=2560)
OF_META = dataclasses.replace(  # "96GB HBM2e with 2.4 TB/sec", a limit of 500 W
    H100, memory_nbytes=96 * 10**9, memory_bandwidth=2.4e12
)
LIMITED = "time: the limit of 500 W"
# torchtitan has PyTorch take FlashAttention-2 (github.com/pytorch/torchtitan/pull/1196), which reaches 35 % of an H100
# (arXiv 2407.08608, abstract).
FLASH_ATTENTION_2 = 0.35
RECIPES = "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd91f9be958fed4773ae95d941a3356a82"
EARLIER_RECIPES = "https://github.com/NVIDIA/dgxc-benchmarking/blob/0b71cfda5163540778e2a3d2db59858bf62f96f7"
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3"
    "/benchmarks/llama3_h100_202412_torchtitan.md"
)
MARIN_ISSUE = "https://github.com/marin-community/marin/issues/7024"  # the shape of the model: issue 6044
RUNS = {
    "gpt3-175b": Run(
        "NVIDIA, NeMo, 2025", f"{EARLIER_RECIPES}/nemo_megatron/README_175b.md", GPT3,
        groups=8, virtual=12, data=4, model=4, microbatches=64, schedule="interleaved-1f1b", seconds=8.309,
    ),
    "llama3.1-70b": Run(
        "NVIDIA, NeMo, 2025", f"{RECIPES}/llama3.1/README_70b.md", LLAMA3_70B,
        groups=4, virtual=5, data=2, context=2, model=4, microbatches=64, schedule="interleaved-1f1b", seconds=14.72,
    ),
    "llama2-70b-fsdp": Run(
        "NVIDIA, MaxText, 2025", f"{RECIPES}/maxtext/README_70b.md", LLAMA2_70B,
        data=64, fsdp=True, rows=2, kept="q k v", seconds=6.999,
    ),
    "llama3.1-8b": Run(
        "NVIDIA, NeMo, 2025", f"{RECIPES}/llama3.1/README_8b.md", LLAMA3_8B,
        data=4, context=2, microbatches=32, seconds=12.91,
    ),
    "nemotron4-15b": Run(
        "NVIDIA, NeMo, 2025", f"{EARLIER_RECIPES}/nemotron/README_15b.md", NEMOTRON_15B,
        data=4, model=4, rows=4, microbatches=4, seconds=2.812,
    ),
    "nemotron4-340b": Run(
        "NVIDIA, NeMo, 2025", f"{RECIPES}/nemotron/README_340b.md", NEMOTRON_340B,
        groups=8, virtual=12, data=2, model=8, microbatches=16, schedule="interleaved-1f1b", seconds=4.61,
    ),
    "llama3.1-405b-7layers": Run(
        "NVIDIA, NeMo, 2025", f"{RECIPES}/llama3.1/README_405b.md", dataclasses.replace(LLAMA3_405B, layers=7),
        data=2, context=2, model=8, microbatches=63, seconds=8.85,
    ),
    "llama3.1-405b": Run(
        "NVIDIA, NeMo, 2025", f"{RECIPES}/llama3.1/README_405b.md", LLAMA3_405B,
        groups=9, virtual=7, data=4, context=2, model=8, microbatches=63, schedule="interleaved-1f1b", seconds=17.20,
        note="time: collectives that NeMo hides behind the products that need them",
    ),
    "torchtitan-8b": Run(
        "torchtitan, table 1, 2024", TORCHTITAN, LLAMA3_8B, OF_META,
        data=8, fsdp=True, rows=2, kept="q v attended gate down", rate=6667, memory=77.0 * 2**30,
        attention=FLASH_ATTENTION_2, note=LIMITED,
    ),
    "torchtitan-8b-fp8": Run(
        "torchtitan, table 1, 2024", TORCHTITAN, LLAMA3_8B, OF_META,
        data=8, fsdp=True, rows=2, kept="q v attended gate down", float8=True, rate=8532, memory=76.8 * 2**30,
        attention=FLASH_ATTENTION_2, note=LIMITED,
    ),
    "torchtitan-8b-32k-fp8": Run(
        "torchtitan, table 2, 2024", TORCHTITAN, dataclasses.replace(LLAMA3_8B, length=32768), OF_META,
        data=8, fsdp=True, kept="attended", float8=True, rate=3890, memory=83.9 * 2**30,
        attention=FLASH_ATTENTION_2, note=LIMITED,
    ),
    "torchtitan-8b-128": Run(
        "torchtitan, table 3, 2024", TORCHTITAN, LLAMA3_8B, OF_META,
        data=128, fsdp=True, rows=2, kept="q v attended gate down", rate=6514, memory=62.0 * 2**30,
        attention=FLASH_ATTENTION_2, note=f"{LIMITED}; memory: measured is what PyTorch's allocator reserved",
    ),
    "marin-67b-a2b": Run(
        "Marin, 2026", MARIN_ISSUE, MARIN,
        groups=8, virtual=2, data=8, fsdp=True, microbatches=32, schedule="dualpipe-v", kept="",
        rate=603326.77 / 64, memory=59_153_094_656,
        note="memory: the source does not say what holds the rest",
    ),
    "marin-67b-a2b-16": Run(
        "Marin, 2026", MARIN_ISSUE, MARIN,
        groups=8, virtual=2, data=8, fsdp=True, microbatches=16, schedule="dualpipe-v", kept="",
        rate=543490.02 / 64, memory=59_153_094_656,
        note="memory: the source does not say what holds the rest",
    ),
}  # fmt: skip
RATIOS = {  # of tokens a second of a device
    "marin-67b-a2b: 32 against 16 microbatches": ("marin-67b-a2b", "marin-67b-a2b-16"),
    "torchtitan-8b: float8 against bfloat16": ("torchtitan-8b-fp8", "torchtitan-8b"),
    "torchtitan-8b: 128 against 8 devices": ("torchtitan-8b-128", "torchtitan-8b"),
}


# --- the step of a run --------------------------------------------------------------------------


def norm(scale, x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x, start):
    """Applies rotary positions from `start` to [rows, length, heads, size]."""
    half = x.shape[-1] // 2
    angles = (start + jnp.arange(x.shape[1]))[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    return jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


@jax.custom_vjp
def float8_product(x, w):
    """Returns `x @ w` in float8, with the gradients' products in float8 too."""
    product = jnp.matmul(x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.bfloat16)
    return product


def _float8_forward(x, w):
    return float8_product(x, w), (x, w)


def _float8_backward(kept, g):
    x, w = (a.astype(jnp.float8_e4m3fn) for a in kept)
    g = g.astype(jnp.float8_e5m2)
    of_x = jnp.einsum("...o,io->...i", g, w, preferred_element_type=jnp.bfloat16)
    return of_x, jnp.einsum("...i,...o->io", x, g, preferred_element_type=jnp.bfloat16)


float8_product.defvjp(_float8_forward, _float8_backward)


def attention(q, k, v, has_kernel):
    """Computes causal attention: q [rows, length, heads, size]; k, v [rows, length, kv_heads, size].

    Uses cuDNN, or takes a block of queries at a time, with the keys that it sees.
    """
    if has_kernel:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    @functools.partial(jax.checkpoint, static_argnums=3)
    def of_block(q, k, v, start):
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / q.shape[-1] ** 0.5
        seen = start + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9), -1).astype(q.dtype)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)

    whole, block = q.shape, min(BLOCK, q.shape[1])
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    starts = range(0, q.shape[1], block)
    done = [of_block(q[:, s : s + block], k[:, : s + block], v[:, : s + block], s) for s in starts]
    return jnp.concatenate(done, 1).reshape(whole)


def is_attention(primitive, *_, **__) -> bool:
    """Keeps, as a policy of `jax.checkpoint`, the results of cuDNN's forward kernel, so that it does not run again."""
    return primitive.name.startswith("dot_product_attention_fwd")


class Step:
    """The step of a run on a mesh, and its abstract arguments.

    `data` divides rows and parameters where the run is FSDP. Otherwise each device of `data` and `context` has its own
    place on leading axes of parameters and rows, which `jax.vmap` hides: so gradients are summed once a step.
    """

    def __init__(self, run: Run, mesh: mpmd.MpmdMesh):
        self.run, self.mesh, self.shape = run, mesh, run.step
        self.rows_axis = "data" if run.fsdp else None
        layers, stages = run.step.layers, run.groups * run.virtual
        self.layers_of_stage = [layers // stages + (i < layers % stages) for i in range(stages)]
        policies = jax.checkpoint_policies
        names = run.kept.split()
        if "attended" in names and run.has_kernel:
            names.remove("attended")
            policy = policies.save_from_both_policies(policies.save_only_these_names(*names), is_attention)
        else:
            policy = policies.save_only_these_names(*names)
        self.kept = jax.jit(jax.checkpoint(self.layer, policy=policy))  # traced once for all layers

    def on(self, x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh.tracing_mesh(), P(*spec)))

    def between(self, x):
        """Puts activations [rows, length, width] in their layout between layers."""
        return self.on(x, self.rows_axis, "model", None)

    def whole(self, x):
        """Puts activations in their layout before a projection: all positions that the devices of `model` share."""
        return self.on(x, self.rows_axis, None, None)

    def product(self, x, w):
        return float8_product(x, w) if self.run.float8 else x @ w

    def by_key(self, q):
        """Reshapes queries [rows, length, heads, size]: an axis of key heads comes before the axis of query heads."""
        q = q.reshape(*q.shape[:2], self.shape.kv_heads, -1, q.shape[-1])
        return self.on(q, self.rows_axis, None, "model")

    def layer(self, p, x):
        s = self.shape
        size = s.width // s.heads
        h = self.whole(norm(p["attention_norm"], x))
        q, k, v = (
            checkpoint_name(self.product(h, p[name]), name).reshape(*x.shape[:2], count, size)
            for name, count in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
        )
        start = jax.lax.axis_index("context") * x.shape[1] if self.run.context > 1 else 0
        q, k, v = (self.on(y, self.rows_axis, None, "model", None) for y in (rotated(q, start), rotated(k, start), v))
        attend = functools.partial(attention, has_kernel=self.run.has_kernel)
        if self.run.context > 1:  # each device has all positions, and a part of the query heads of each key
            q = jax.lax.all_to_all(self.by_key(q), "context", 3, 1, tiled=True)
            q = q.reshape(*q.shape[:2], -1, size)
            k, v = (jax.lax.all_gather(y, "context", axis=1, tiled=True) for y in (k, v))
            own = jax.lax.axis_index("context") * 0  # JAX's rule for cuDNN wants q and k batched alike
            k, v = (y + own.astype(y.dtype) for y in (k, v))
            # JAX does not partition cuDNN's kernel over heads and over what `jax.vmap` hides at once.
            heads = P(None, None, "model")
            attend = jax.shard_map(
                attend, mesh=self.mesh.tracing_mesh(), in_specs=(heads,) * 3, out_specs=heads, check_vma=False
            )
        out = attend(q, k, v)
        if self.run.context > 1:
            out = jax.lax.all_to_all(self.by_key(out), "context", 1, 3, tiled=True)
        out = out.reshape(x.shape)
        out = checkpoint_name(self.on(out, self.rows_axis, None, "model"), "attended")
        x = checkpoint_name(self.between(x + self.between(self.product(out, p["o"]))), "middle")
        h = self.whole(norm(p["mlp_norm"], x))
        if s.experts:
            x = self.between(x + self.chosen(p, h))
        up = checkpoint_name(self.product(h, p["up"]), "up")
        if s.gated:
            h = jax.nn.silu(checkpoint_name(self.product(h, p["gate"]), "gate")) * up
        else:
            h = jnp.square(jax.nn.relu(up))
        return self.between(x + checkpoint_name(self.between(self.product(h, p["down"])), "down"))

    def chosen(self, p, x):
        """Applies the experts to x [rows, length, width]; each device of `data` has some of them.

        All experts take equally many tokens: places in a list sorted by expert, whatever the tokens have chosen.
        """
        s, devices = self.shape, self.run.data

        def local(router, gate, up, down, x):
            tokens = x.reshape(-1, s.width)
            weights, experts = jax.lax.top_k(jax.nn.sigmoid((tokens @ router).astype(jnp.float32)), s.chosen)
            order = jnp.argsort(experts.reshape(-1))
            own = (devices, s.experts // devices, -1, s.width)  # source, expert of this device, token, width
            sent = tokens[order // s.chosen].reshape(s.experts, -1, s.width)
            got = jax.lax.all_to_all(sent, "data", 0, 0, tiled=True).reshape(own)
            h = jax.nn.silu(jnp.einsum("setw,ewh->seth", got, gate)) * jnp.einsum("setw,ewh->seth", got, up)
            made = jnp.einsum("seth,ehw->setw", h, down).reshape(sent.shape)
            back = jax.lax.all_to_all(made, "data", 0, 0, tiled=True).reshape(-1, s.width)
            back *= weights.reshape(-1)[order, None].astype(x.dtype)
            return jnp.zeros_like(tokens).at[order // s.chosen].add(back).reshape(x.shape)

        specs = (P(), P("data"), P("data"), P("data"), P("data"))
        mapped = jax.shard_map(
            local, mesh=self.mesh.tracing_mesh(), in_specs=specs, out_specs=P("data"), check_vma=False
        )
        return mapped(p["router"], p["expert_gate"], p["expert_up"], p["expert_down"], x)

    def stage(self, p, x):
        """Runs the layers of a stage; `p` has them on a leading axis."""
        if len(p["q"]) == 1:
            return self.kept(jax.tree.map(lambda a: a[0], p), x)
        stored = {name: a.sharding.spec[1:] for name, a in self.state()[0]["stages"][0].items()}

        def one(x, p):
            if self.run.fsdp:  # the constraint holds for the gradient too: it is summed and divided layer by layer
                p = {name: self.on(a, *stored[name]) for name, a in p.items()}
            return self.kept(p, x), None

        return jax.lax.scan(one, x, p)[0]

    def loss(self, params, tokens):
        x = self.on(params["embedding"].at[tokens[:, :-1]].get(), self.rows_axis, None, "model")
        x = self.between(x)
        for p in params["stages"][:-1]:
            x = mpmd.mark_stage_end(self.stage(p, x))
        x = self.whole(norm(params["norm"], self.stage(params["stages"][-1], x)))
        logits = self.on((x @ params["head"]).astype(jnp.float32), self.rows_axis, None, "model")
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def specs(self) -> dict:
        """Returns, for each parameter, its shape and the spec with which products read it."""
        s = self.shape
        kv = s.width // s.heads * s.kv_heads
        hidden = s.shared if s.experts else s.hidden
        wide = {"q": s.width, "k": kv, "v": kv, "up": hidden} | ({"gate": hidden} if s.gated else {})
        one: dict[str, Any] = {name: ((s.width, out), (None, "model")) for name, out in wide.items()}
        one |= {name: ((width, s.width), ("model", None)) for name, width in (("o", s.width), ("down", hidden))}
        one |= dict.fromkeys(("attention_norm", "mlp_norm"), ((s.width,), (None,)))
        if s.experts:
            own = {"gate": (s.width, s.hidden), "up": (s.width, s.hidden), "down": (s.hidden, s.width)}
            one |= {f"expert_{name}": ((s.experts, *shape), ("data", None, None)) for name, shape in own.items()}
            one["router"] = (s.width, s.experts), (None, None)
        stages = [{k: ((n, *shape), (None, *spec)) for k, (shape, spec) in one.items()} for n in self.layers_of_stage]
        return {
            "embedding": ((s.vocabulary, s.width), (None, "model")),
            "stages": stages,
            "norm": ((s.width,), (None,)),
            "head": ((s.width, s.vocabulary), (None, "model")),
        }

    def step(self, state, tokens):
        run = self.run
        specs = jax.tree.map(lambda entry: entry[1], self.specs(), is_leaf=_is_entry)
        stored = jax.tree.map(lambda p: p.sharding.spec, self.state()[0])
        master, first, second = state

        def used(p, spec, kept):
            if run.fsdp:  # gathered by each product
                return self.on(p.astype(jnp.bfloat16), *kept)
            own = jnp.broadcast_to(self.on(p.astype(jnp.bfloat16), *spec), (run.data, run.context, *p.shape))
            return self.on(own, "data", "context", *spec)

        params = jax.tree.map(used, master, specs, stored, is_leaf=lambda x: isinstance(x, P))
        per_context = jax.vmap(self.loss, axis_name="context", spmd_axis_name="context")
        per_replica = self.loss if run.fsdp else jax.vmap(per_context, spmd_axis_name="data")

        def gradients(batch):
            value, grads = jax.value_and_grad(lambda p: jnp.mean(per_replica(p, batch)))(params)
            return value, jax.tree.map(lambda g, kept: self.on(g, *kept) if run.fsdp else g, grads, stored)

        value, grads = mpmd.treduce(gradients, tokens, schedule=run.schedule, operation=mpmd.Mean)
        if not run.fsdp:
            grads = jax.tree.map(lambda g, kept: self.on(g.sum((0, 1)), *kept), grads, stored)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, second, grads)
        master = jax.tree.map(lambda p, m, v: p - 3e-4 * m / (jnp.sqrt(v) + 1e-8), master, first, second)
        return (master, first, second), value

    def state(self) -> tuple:
        """Returns parameters and two moments, float32, divided over all devices with the same part of the model."""

        def stored(first, shape, spec):
            free = ("data", "context") if self.run.context > 1 else ("data",)
            count = self.run.data * self.run.context
            axes = [] if "data" in spec else range(first, len(shape))
            axis = next((i for i in axes if not spec[i] and shape[i] % count == 0), None)
            spec = [free if i == axis else name for i, name in enumerate(spec)]
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(self.mesh.tracing_mesh(), P(*spec)))

        specs = self.specs()  # the layers of a stage are never divided: a scan takes one after the other
        stages = [{k: stored(1, *entry) for k, entry in stage.items()} for stage in specs.pop("stages")]
        one = {k: stored(0, *entry) for k, entry in specs.items()} | {"stages": stages}
        return one, one, one

    def arguments(self) -> tuple:
        run = self.run
        shape = (run.data * run.rows,) if run.fsdp else (run.data, run.context, run.rows)
        spec = NamedSharding(self.mesh.tracing_mesh(), P(None, "data") if run.fsdp else P(None, "data", "context"))
        shape = (run.microbatches, *shape, run.step.length // run.context + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec)
        return self.state(), tokens


def _is_entry(x) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for a run.

    Attributes:
      parts: of the step, in which the busiest group does products, waits for memory, waits for collectives, and idles.
    """

    plan: Plan
    parts: tuple[float, ...]

    @property
    def memory(self) -> int:
        """Bytes of the device that holds most."""
        return max(g.memory["peak"] for g in self.plan.groups)


def predict(run: Run) -> Prediction:
    """Plans a run's step on the machine that its data sheet describes."""
    sizes = (run.groups, run.data, run.context, run.model)
    mesh = mpmd.topology_mesh(run.target, sizes, ("stage", *AXES), "stage", axis_types=[AxisType.Auto] * 4)
    step = Step(run, mesh)
    compiled = mpmd.jit(step.step, mpmd_mesh=mesh, donate_argnums=0).lower(*step.arguments()).compile()
    programs, program = compiled._programs, compiled.program
    machine = Machine(run.target, attention_efficiency=run.attention)
    planned, costs = plan_step(programs, program, machine, run.tokens), StepCosts(programs, machine)
    busiest = max(planned.groups, key=lambda g: g.busy_s)
    products = collectives = 0.0
    for instruction in program.groups[busiest.group]:
        if isinstance(instruction, (scheduler.Run, scheduler.Call)):
            for executable in programs.executables_of(instruction):
                cost = costs.cost(executable)
                alone = dataclasses.replace(cost.work, nbytes=0.0)
                products += machine.work_s([alone], busiest.num_devices)
                collectives += cost.collective_s
    seconds = planned.step.seconds
    memory = busiest.busy_s - products - collectives
    parts = tuple(part / seconds for part in (products, memory, collectives, seconds - busiest.busy_s))
    return Prediction(planned, parts)


# --- the table ------------------------------------------------------------------------------------


def row(name: str, run: Run, found: Prediction) -> list[str]:
    """Formats a row of the table."""
    seconds, memory = found.plan.step.seconds, found.memory
    times = [f"{run.measured_s:.3g}", f"{seconds:.3g}", _error(seconds / run.measured_s, TIME)]
    sizes = [f"{memory / 1e9:.1f}", ""]
    if run.memory:
        sizes = [f"{run.memory / 1e9:.1f} / {sizes[0]}", _error(memory / run.memory, MEMORY)]
    parts = " ".join(f"{part:.0%}" for part in found.parts)
    return [
        name,
        f"[{run.source}]({run.url})",
        f"{run.num_devices} {run.target.name}",
        run.layout,
        *times,
        *sizes,
        parts,
        run.note,
    ]


def ratio(name: str, predictions: dict[str, Prediction]) -> list[str]:
    """Formats a row of the table of ratios of tokens a second of a device."""
    measured, predicted = (
        rates[0] / rates[1]
        for rates in (
            [RUNS[run].tokens / RUNS[run].num_devices / seconds(run) for run in RATIOS[name]]
            for seconds in (lambda run: RUNS[run].measured_s, lambda run: predictions[run].plan.step.seconds)
        )
    )
    return [name, f"{measured:.3f}", f"{predicted:.3f}", _error(predicted / measured, RATIO)]


def _error(ratio: float, bound: float) -> str:
    text = f"{ratio - 1:+.0%}"
    return text if abs(ratio - 1) <= bound else f"**{text}**"


HEADER = [
    "run", "source", "devices", "layout", "measured, s", "predicted, s", "error", "memory, GB", "error",
    "products, memory, collectives, idle", "why",
]  # fmt: skip


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=RUNS, nargs="+", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--verbose", action="store_true", help="print each plan, to stderr")
    args = parser.parse_args()
    predictions: dict[str, Prediction] = {}
    try:
        mpmd.topology_mesh("h100", (1, 8), ("stage", "data"), "stage")
    except ModuleNotFoundError as error:
        parser.error(str(error))
    print(line(HEADER), line(["---"] * len(HEADER)), sep="\n", flush=True)
    for name in args.only or RUNS:
        begun = time.perf_counter()
        predictions[name] = predict(RUNS[name])
        print(line(row(name, RUNS[name], predictions[name])), flush=True)
        if args.verbose:
            print(predictions[name].plan, f"\n{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    if names := [name for name, runs in RATIOS.items() if predictions.keys() >= set(runs)]:
        header = ["ratio", "measured", "predicted", "error"]
        print("", line(header), line(["---"] * len(header)), sep="\n")
        print(*(line(ratio(name, predictions)) for name in names), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
