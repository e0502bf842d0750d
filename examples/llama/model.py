"""Decoders of the Llama family in Flax NNX: Llama 3, Qwen 2 and 3, Gemma 1 and 2, Mixtral, by configuration.

The layers are stacked: each parameter of a layer is one array with an axis of layers, and one `scan` runs them all.
`mpmd.mark_layer_end` in its body says that a pipeline stage may end after each layer. Nothing else in this file is for
the pipeline. Parameters are float32, and computation is in bfloat16.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from attention import attend
from context import AXIS as CONTEXT
from context import attend_in_ring, num_parts, zigzag
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpmd

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
CHUNK = 512  # positions for which logits exist at a time
ROWS = "data"  # the axis of the mesh that divides rows, where it has one


def config_json(folder: str | Path) -> dict[str, Any]:
    """Reads config.json of a Hugging Face folder.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged.
    """
    file = Path(folder) / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{folder}: this is no Hugging Face folder; it has no config.json.")
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged, or no configuration: {error}. Copy it again.") from error


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model, and how its family differs from Llama."""

    vocabulary: int = 256
    width: int = 128
    hidden: int = 384
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 500_000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    """Llama 3's stretching of low frequencies: factor, low and high frequency factor, original length."""
    norm_epsilon: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False  # Qwen 2
    qk_norm: bool = False  # Qwen 3
    norm_plus_one: bool = False  # Gemma: norms multiply by 1 + their weight
    post_norms: bool = False  # Gemma 2: a norm after each branch as well
    scale_embedding: bool = False  # Gemma: by the root of the width
    activation: str = "silu"
    query_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    windows: tuple[int, ...] | None = None
    """For each layer, how many positions it sees; 0 for all."""
    experts: int = 0  # Mixtral
    experts_per_token: int = 2
    dtype: Any = jnp.bfloat16
    lora_rank: int = 0
    kernel: bool = False  # attention by cuDNN, where it can
    packed: str = ""  # as in `attend`: how attention over packed documents is done

    @classmethod
    def of_folder(cls, folder: str | Path, **changes: Any) -> "Config":
        """Returns the configuration of a Hugging Face folder, from its config.json."""
        return cls.of_json(config_json(folder), **changes)

    @classmethod
    def of_json(cls, c: dict[str, Any], **changes: Any) -> "Config":
        """Returns the configuration that Hugging Face writes as `c`.

        Raises:
          ValueError: it is of another family, lacks an entry, or asks for a feature that this model lacks.
        """
        family = c.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(
                f"config.json: model_type is {family!r}, which this example does not have. It has {known}."
            )
        if missing := [name for name in SIZES if name not in c]:
            raise ValueError(f"config.json does not say {' nor '.join(missing)}, which every model of its family has.")
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        gemma = family.startswith("gemma")
        cls._check(c, rope.get("rope_type", rope.get("type", "default")), gemma)
        sliding = c.get("sliding_window") if c.get("use_sliding_window", family in ("mistral", "gemma2")) else None
        windows = None
        if sliding:
            every = 2 if family == "gemma2" else 1  # Gemma 2: every second layer sees all
            windows = tuple(sliding if every == 1 or i % 2 == 0 else 0 for i in range(c["num_hidden_layers"]))
        found: dict[str, Any] = {
            "vocabulary": c["vocab_size"],
            "width": c["hidden_size"],
            "hidden": c["intermediate_size"],
            "layers": c["num_hidden_layers"],
            "heads": c["num_attention_heads"],
            "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
            "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            "rope_theta": rope.get("rope_theta") or c.get("rope_theta") or 10_000.0,
            "norm_epsilon": c["rms_norm_eps"],
            "tied": c.get("tie_word_embeddings", gemma),
            "qkv_bias": family == "qwen2",
            "qk_norm": family == "qwen3",
            "norm_plus_one": gemma,
            "post_norms": family == "gemma2",
            "scale_embedding": gemma,
            "activation": "gelu" if gemma else "silu",
            "attention_cap": c.get("attn_logit_softcapping"),
            "logit_cap": c.get("final_logit_softcapping"),
            "windows": windows,
            "experts": c.get("num_local_experts", 0),
            "experts_per_token": c.get("num_experts_per_tok", 2),
        }
        if c.get("query_pre_attn_scalar"):
            found["query_scale"] = c["query_pre_attn_scalar"] ** -0.5
        if rope.get("rope_type", rope.get("type")) == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            found["rope_scaling"] = tuple(float(rope[name]) for name in names)
        return cls(**found | changes)

    @staticmethod
    def _check(c: dict[str, Any], rope: str, gemma: bool) -> None:
        """Refuses options that this model would compute differently from the folder's model."""
        activation = c.get("hidden_activation") or c.get("hidden_act") or "silu"
        faults = [
            f"rope_type {rope!r} (known: default, llama3)" * (rope not in ("default", "llama3")),
            f"hidden_act {activation!r}" * (not activation.startswith("gelu" if gemma else "silu")),
            "biases of the MLP" * bool(c.get("mlp_bias")),
            "attention biases" * bool(c.get("attention_bias") and c["model_type"] != "qwen2"),
        ]
        if any(faults):
            raise ValueError(f"config.json: this example has no {', '.join(filter(None, faults))}.")

    @property
    def all_windows(self) -> tuple[int, ...]:
        """The window of each layer, as in `windows`, also where no layer has one."""
        return self.windows or (0,) * self.layers

    def flops_per_token(self, length: int) -> float:
        """Counts a forward pass: two for each weight that multiplies a token, and attention to half of `length`."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        mlp = 3 * self.width * self.hidden * (self.experts_per_token if self.experts else 1) + self.width * self.experts
        scores = self.heads * self.head_dim * length
        return 2.0 * (self.layers * (attention + mlp + scores) + self.width * self.vocabulary)

    def flops_per_row(self, length: int) -> float:
        """Counts a forward pass over a row: tokens · linear + tokens² · attention."""
        return length * self.flops_per_token(length)


def normal(rngs: nnx.Rngs, *shape: int, fan_in: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)


class LoRA(nnx.Variable):
    """The trained parameters when the rest is frozen: the factors of a small change of a matrix."""


def norm(config: Config, scale: nnx.Param, x: jax.Array) -> jax.Array:
    """Divides x by its root mean square along the last axis, in float32, and multiplies by a learned scale."""
    x32 = x.astype(jnp.float32)
    unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_epsilon)
    return (unit * (scale[...] + config.norm_plus_one)).astype(x.dtype)


def new_norm(config: Config, size: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(size) if config.norm_plus_one else jnp.ones(size))


def rotate(config: Config, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies rotary positions to (rows, length, heads, size), in float32. Source: arXiv:2104.09864."""
    half = x.shape[-1] // 2
    frequencies = config.rope_theta ** (-jnp.arange(half) / half)
    if config.rope_scaling:
        factor, low, high, length = config.rope_scaling
        turns = length * frequencies / (2 * jnp.pi)  # within the length that the model was trained with
        share = jnp.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (share + (1 - share) / factor)
    angles = positions[..., None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def laid_out(x: jax.Array, *spec: Any) -> jax.Array:
    """Constrains the layout of x, on a mesh that divides rows, where the mesh divides x evenly.

    XLA alone might divide the width, like the width of the parameters, and sum activations over the devices.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    spec = tuple(None if name == CONTEXT and name not in sizes else name for name in spec)  # a mesh may lack this axis
    if ROWS not in sizes or any(n % sizes.get(name, 1) for n, name in zip(x.shape, spec, strict=False)):
        return x
    return jax.lax.with_sharding_constraint(x, P(*spec))


class Attention(nnx.Module):
    """Causal attention in which several heads of queries share one head of keys and values."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        d, size = config.width, config.head_dim
        self.query = normal(rngs, d, config.heads, size, fan_in=d)
        self.key = normal(rngs, d, config.kv_heads, size, fan_in=d)
        self.value = normal(rngs, d, config.kv_heads, size, fan_in=d)
        self.output = normal(rngs, config.heads, size, d, fan_in=config.heads * size)
        if config.qkv_bias:
            self.query_bias = nnx.Param(jnp.zeros((config.heads, size)))
            self.key_bias = nnx.Param(jnp.zeros((config.kv_heads, size)))
            self.value_bias = nnx.Param(jnp.zeros((config.kv_heads, size)))
        if config.qk_norm:
            self.query_norm = new_norm(config, size)
            self.key_norm = new_norm(config, size)
        if config.lora_rank:
            self.query_in = LoRA(jax.random.normal(rngs.params(), (d, config.lora_rank)) * d**-0.5)
            self.query_out = LoRA(jnp.zeros((config.lora_rank, config.heads, size)))

    def __call__(
        self, x: jax.Array, positions: jax.Array, segments: jax.Array | None, window: jax.Array | int
    ) -> jax.Array:
        """Returns the branch to add to x (rows, length, width). The rest is as in `Decoder.features` and `Config`."""
        c, cast = self.config, lambda p: p[...].astype(x.dtype)
        q = jnp.einsum("btd,dhk->bthk", x, cast(self.query))
        k = jnp.einsum("btd,dhk->bthk", x, cast(self.key))
        v = jnp.einsum("btd,dhk->bthk", x, cast(self.value))
        if c.lora_rank:
            q = q + jnp.einsum("btr,rhk->bthk", x @ cast(self.query_in), cast(self.query_out))
        if c.qkv_bias:
            q, k, v = q + cast(self.query_bias), k + cast(self.key_bias), v + cast(self.value_bias)
        if c.qk_norm:
            q, k = norm(c, self.query_norm, q), norm(c, self.key_norm, k)
        q, k = rotate(c, q, positions), rotate(c, k, positions)
        windows = tuple(sorted({*c.all_windows}))
        on_device = functools.partial(attend, windows=windows, kernel=c.kernel, packed=c.packed)
        attended = (attend_in_ring if num_parts() > 1 else on_device)(
            q, k, v, scale=c.query_scale or c.head_dim**-0.5, window=window, segments=segments, cap=c.attention_cap
        )
        return jnp.einsum("bthk,hkd->btd", attended, cast(self.output))


def activate(config: Config, x: jax.Array) -> jax.Array:
    return jax.nn.silu(x) if config.activation == "silu" else jax.nn.gelu(x, approximate=True)


class MLP(nnx.Module):
    """The gated branch of a layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.gate = normal(rngs, config.width, config.hidden, fan_in=config.width)
        self.up = normal(rngs, config.width, config.hidden, fan_in=config.width)
        self.down = normal(rngs, config.hidden, config.width, fan_in=config.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        def cast(p):
            return p[...].astype(x.dtype)

        return (activate(self.config, x @ cast(self.gate)) * (x @ cast(self.up))) @ cast(self.down)


class Experts(nnx.Module):
    """Gated branches of which each token takes a few; no token is dropped."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, f, n = config.width, config.hidden, config.experts
        self.gate = normal(rngs, n, d, f, fan_in=d)
        self.up = normal(rngs, n, d, f, fan_in=d)
        self.down = normal(rngs, n, f, d, fan_in=f)

    def __call__(self, config: Config, router: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the branch for x (rows, length, width); `router` has the scores, (rows, length, experts)."""
        k, cast = config.experts_per_token, lambda p: p[...].astype(x.dtype)
        weights, chosen = jax.lax.top_k(router.reshape(-1, config.experts), k)
        weights = jax.nn.softmax(weights)
        order = jnp.argsort(chosen.reshape(-1))  # all tokens of the first expert, then of the second, ...
        sizes = jnp.bincount(chosen.reshape(-1), length=config.experts).astype(jnp.int32)
        token = order // k
        rows = x.reshape(-1, x.shape[-1])[token]
        h = activate(config, jax.lax.ragged_dot(rows, cast(self.gate), sizes))
        y = jax.lax.ragged_dot(h * jax.lax.ragged_dot(rows, cast(self.up), sizes), cast(self.down), sizes)
        y = y * weights.reshape(-1)[order, None].astype(x.dtype)
        return jnp.zeros_like(x.reshape(-1, x.shape[-1])).at[token].add(y).reshape(x.shape)


class Layer(nnx.Module):
    """One layer of the decoder."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = new_norm(config, config.width)
        self.attention = Attention(config, rngs)
        self.mlp_norm = new_norm(config, config.width)
        if config.post_norms:
            self.attention_post_norm = new_norm(config, config.width)
            self.mlp_post_norm = new_norm(config, config.width)
        if config.experts:
            self.router = normal(rngs, config.width, config.experts, fan_in=config.width)
            self.experts = Experts(config, rngs)
        else:
            self.mlp = MLP(config, rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array, segments: jax.Array | None, window: jax.Array | int
    ) -> jax.Array:
        c = self.config
        branch = self.attention(norm(c, self.attention_norm, x), positions, segments, window)
        x = x + (norm(c, self.attention_post_norm, branch) if c.post_norms else branch)
        h = norm(c, self.mlp_norm, x)
        if c.experts:
            branch = self.experts(c, h.astype(jnp.float32) @ self.router[...], h)
        else:
            branch = self.mlp(h)
        return x + (norm(c, self.mlp_post_norm, branch) if c.post_norms else branch)


class Decoder(nnx.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocabulary, config.width)) * 0.02)
        keys = jax.random.split(rngs.params(), config.layers)
        self.layers = nnx.vmap(lambda key: Layer(config, nnx.Rngs(key)))(keys)
        self.norm = new_norm(config, config.width)
        if not config.tied:
            self.head = normal(rngs, config.width, config.vocabulary, fan_in=config.width)

    def features(
        self, tokens: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Returns the input of the head, (rows, length, width).

        Where the mesh divides rows of tokens, the tokens are in the order of `context.zigzag`.

        Args:
          tokens: (rows, length).
          segments: the document of each token, (rows, length); documents do not see each other.
          positions: the position of each token in its document, (rows, length).
        """
        c = self.config
        if positions is None:
            positions = laid_out(jnp.broadcast_to(zigzag(tokens.shape[1], num_parts()), tokens.shape), ROWS, CONTEXT)
        x = self.embed[...][tokens].astype(c.dtype)
        if num_parts() > 1:  # with a single constraint, XLA would gather divided rows
            x = laid_out(x, None, CONTEXT, ROWS)
        x = laid_out(x, ROWS, CONTEXT)
        if c.scale_embedding:
            x = x * jnp.asarray(c.width**0.5, c.dtype)
        layer, stacked = nnx.split(self.layers)

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def one(x, layer_and_window):
            state, window = layer_and_window
            x = laid_out(nnx.merge(layer, state)(x, positions, segments, window), ROWS, CONTEXT)
            return mpmd.mark_layer_end(x), None

        x, _ = jax.lax.scan(one, x, (stacked, jnp.array(c.all_windows)))
        return norm(c, self.norm, x)

    def output(self) -> jax.Array:
        """Returns the head's matrix, (width, vocabulary), with the whole width on each device."""
        head = (self.embed[...].T if self.config.tied else self.head[...]).astype(self.config.dtype)
        return laid_out(head, None, P.UNCONSTRAINED)

    def logits(self, features: jax.Array, head: jax.Array | None = None) -> jax.Array:
        """Returns logits in float32, (..., vocabulary)."""
        head = self.output() if head is None else head
        logits = (features @ head.astype(features.dtype)).astype(jnp.float32)
        cap = self.config.logit_cap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def __call__(self, tokens: jax.Array, **about: jax.Array) -> jax.Array:
        return self.logits(self.features(tokens, **about))

    def loss(self, batch: dict[str, jax.Array], chunk: int = CHUNK) -> jax.Array:
        """Returns the mean cross-entropy, in nats, of the tokens that `weights` counts.

        Logits exist for `chunk` positions at a time, on each of the devices that divide a row.

        Args:
          batch: tokens and targets (rows, length), weights (1 where a target counts); where documents are packed,
            segments and positions.
          chunk: positions of a row.
        """
        features = self.features(batch["tokens"], batch.get("segments"), batch.get("positions"))
        parts = num_parts()
        length = features.shape[1] // parts  # on each device
        chunk = min(chunk, length)
        if length % chunk:
            raise ValueError(f"a length of {length} is not made of chunks of {chunk} positions")

        def by_device(x):
            return laid_out(x.reshape(len(x), parts, length, *x.shape[2:]), ROWS, CONTEXT)

        features, targets, weights = map(by_device, (features, batch["targets"], batch["weights"]))
        head = self.output().astype(jnp.float32)  # its gradient is added up in this dtype

        @jax.checkpoint
        def of_chunk(total, start):
            def part(x):
                return jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=2)

            logits = self.logits(part(features), head)
            picked = jnp.take_along_axis(logits, part(targets)[..., None], axis=-1)[..., 0]
            return total + ((jax.nn.logsumexp(logits, axis=-1) - picked) * part(weights)).sum(), None

        total, _ = jax.lax.scan(of_chunk, jnp.zeros(()), jnp.arange(0, length, chunk))
        return total / jnp.maximum(batch["weights"].sum(), 1)
