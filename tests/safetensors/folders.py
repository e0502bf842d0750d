"""Small Hugging Face folders, written here byte by byte and not with the code under test."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "float8_e4m3fn": "F8_E4M3"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


def random(shape, dtype="float32", seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a file as the package `safetensors` does; no dtype here is as wide as another one of another name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name in order:
        x = tensors[name]
        end = len(data) + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype.name], "shape": list(x.shape), "data_offsets": [len(data), end]}
        data += x.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder: Path, tensors: dict[str, np.ndarray], num_files: int = 1, config=CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if num_files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    where = {n: f"model-{i % num_files + 1:05d}-of-{num_files:05d}.safetensors" for i, n in enumerate(tensors)}
    for file in set(where.values()):
        write_file(folder / file, {name: x for name, x in tensors.items() if where[name] == file})
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def llama(num_layers: int = 4, dtype: str = "bfloat16", model: int = 16, hidden: int = 24, vocab: int = 40):
    """The tensors of a Llama with 4 heads, 2 of keys and values."""
    shapes = {"model.embed_tokens.weight": (vocab, model), "model.norm.weight": (model,)}
    shapes["lm_head.weight"] = (vocab, model)
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (model, model),
            layer + "self_attn.k_proj.weight": (model // 2, model),
            layer + "self_attn.v_proj.weight": (model // 2, model),
            layer + "self_attn.o_proj.weight": (model, model),
            layer + "mlp.gate_proj.weight": (hidden, model),
            layer + "mlp.up_proj.weight": (hidden, model),
            layer + "mlp.down_proj.weight": (model, hidden),
            layer + "input_layernorm.weight": (model,),
            layer + "post_attention_layernorm.weight": (model,),
        }
    return {name: random(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def expected(tensors: dict[str, np.ndarray], heads: int = 4) -> dict:
    """The tree that the mapping makes of them, by numpy."""
    num_layers = sum(name.endswith("q_proj.weight") for name in tensors)
    dim = tensors["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads

    def stacked(name, change=lambda x: x):
        return np.stack([change(tensors[f"model.layers.{i}.{name}.weight"]) for i in range(num_layers)])

    def by_head(x):
        return x.T.reshape(x.shape[1], -1, dim)

    layers = {
        "attention": {
            "query": stacked("self_attn.q_proj", by_head),
            "key": stacked("self_attn.k_proj", by_head),
            "value": stacked("self_attn.v_proj", by_head),
            "output": stacked("self_attn.o_proj", lambda x: x.T.reshape(-1, dim, x.shape[0])),
        },
        "mlp": {name: stacked(f"mlp.{name}_proj", np.transpose) for name in ("gate", "up", "down")},
        "attention_norm": stacked("input_layernorm"),
        "mlp_norm": stacked("post_attention_layernorm"),
    }
    head = tensors["lm_head.weight"].T
    return {"embed": tensors["model.embed_tokens.weight"], "layers": layers, "norm": tensors["model.norm.weight"]} | {
        "head": head
    }


def abstract(tree, dtype=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), tree)


def same(found, wanted) -> bool:
    """Bit by bit."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return (
        found.shape == wanted.shape
        and found.dtype == wanted.dtype
        and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted).tobytes()
    )


def check_equal(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert all(jax.tree.leaves(jax.tree.map(same, found, wanted)))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
