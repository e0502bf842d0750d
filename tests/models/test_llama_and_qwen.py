"""Llama 3 and Qwen 3 (dense, and with experts) from google-tunix's model files, trained with `nnx.Optimizer`."""

import importlib.util
import re
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from plain_and_pipelined import stage_mesh, train_both

import mpmd

BATCH, LENGTH, NUM_MICROBATCHES, VOCABULARY = 2, 8, 4, 64
EMBEDDING = 4 * VOCABULARY * 32  # bytes
SIZES = {
    "num_layers": 4, "vocab_size": VOCABULARY, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8,
    "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-5,
}  # fmt: skip


def _model_file(family):
    """`tunix.models.FAMILY.model`, without the packages around it, whose `__init__` import half of PyPI."""
    if "tunix" not in sys.modules:
        if (found := importlib.util.find_spec("tunix")) is None:
            pytest.skip("google-tunix is not installed (pip install --no-deps google-tunix)")
        sys.modules["tunix"] = types.ModuleType("tunix")
        sys.modules["tunix"].__path__ = list(found.submodule_search_locations)
    package = f"tunix.models.{family}"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [f"{root}/models/{family}" for root in sys.modules["tunix"].__path__]
    return importlib.import_module(f"tunix.models.{family}.model")


def _build(family, num_stages, **config):
    """The library's own model; a layer that ends a stage is a subclass of its layer."""
    file = _model_file(family)

    class LastOfStage(file.DecoderLayer):
        def __call__(self, *args, **kwargs):
            cache, x = super().__call__(*args, **kwargs)
            return cache, mpmd.mark_stage_end(x)

    config = file.ModelConfig(**SIZES, **config)
    rngs = nnx.Rngs(0)
    model = getattr(file, family.capitalize())(config, rngs=rngs)
    per_stage = config.num_layers // num_stages
    for i in range(per_stage - 1, config.num_layers - 1, per_stage):
        model.layers[i] = LastOfStage(config=config, rngs=rngs)
    for layer in model.layers:  # Llama's start as zeros, which leaves little to compare
        for name in ("gate_proj", "up_proj", "down_proj"):
            kernel = getattr(layer.mlp, name)
            kernel = getattr(kernel, "kernel", kernel)
            kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), kernel.shape)
    return model


def _training(family, num_stages, **config):
    @nnx.jit
    def build():
        model = _build(family, num_stages, **config)
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20), eps=1e-4)
        )
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    graph, state = nnx.split(build())

    def step(state, batch, schedule):
        model, optimizer = nnx.merge(graph, state)
        model_graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, tokens):
            length = tokens.shape[-1] - 1
            positions = jnp.broadcast_to(jnp.arange(length), (BATCH, length))
            causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (BATCH, length, length))
            logits, _ = nnx.merge(model_graph, params, rest)(tokens[:, :-1], positions, None, causal)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            mask = tokens[:, 1:] != 0
            return (losses * mask).sum() / mask.sum(), (logits.argmax(-1) == tokens[:, 1:]).mean()

        (value, accuracy), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        optimizer.update(model, grads)
        metrics = {"loss": value, "accuracy": accuracy, "norm": optax.tree.norm(grads)}
        return nnx.state((model, optimizer)), metrics

    keys = jax.random.split(jax.random.key(1), 3)
    shape = (NUM_MICROBATCHES, BATCH, LENGTH + 1)
    return step, state, [jax.random.randint(k, shape, 0, VOCABULARY) for k in keys]


def _home(num_stages, tied):
    def home(path):
        if found := re.search(r"layers'\]\[(\d)", path):
            return int(found[1]) * num_stages // SIZES["num_layers"]
        if "input_embedding" in path:
            return ({0, num_stages - 1} if "opt_state" not in path else None) if tied else 0
        return num_stages - 1 if "final_norm" in path or "lm_head" in path else None

    return home


CASES = {
    "llama": ("llama3", {}, 4),
    "llama_remat": ("llama3", {"remat_config": 3, "weight_tying": True}, 2),
    "qwen": ("qwen3", {"use_tied_embedding": True}, 4),
    "qwen_experts": ("qwen3", {"num_experts": 4, "num_experts_per_tok": 2}, 2),
}


_IN_TURNS = [pytest.param(name, marks=() if name == "qwen_experts" else pytest.mark.exhaustive) for name in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("name", _IN_TURNS)
def test_a_model_of_tunix_is_trained_as_under_plain_jax(name):
    family, config, num_stages = CASES[name]
    step, state, batches = _training(family, num_stages, **config)
    tied = bool(config.get("use_tied_embedding") or config.get("weight_tying"))
    shared = EMBEDDING if tied else 0
    train_both(step, state, batches, stage_mesh(num_stages), home=_home(num_stages, tied), rtol=1e-3, shared=shared)


@pytest.mark.slow
def test_a_model_of_tunix_takes_its_own_shardings():
    """FSDP and tensor parallelism inside of each stage, by the specs that the model files give."""
    mesh = stage_mesh(2, AxisType.Auto, fsdp=2, tp=2)
    step, state, batches = _training("llama3", 2)
    specs = nnx.get_partition_spec(state)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    train_both(step, state, batches, mesh, home=_home(2, False), rtol=1e-4, in_shardings=(shardings, None))
