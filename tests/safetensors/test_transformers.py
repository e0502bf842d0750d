"""Logits of examples/llama equal those of `transformers`, which loads what is exported, for each family at random."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="the extra `huggingface` is not installed")
transformers: Any = pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")

from flax import nnx  # noqa: E402
from folders import contents  # noqa: E402

import reshard  # noqa: E402
from reshard.__main__ import main  # noqa: E402
from reshard.checkpoint import TensorFormat  # noqa: E402

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 500_000.0, "original_max_position_embeddings": 32}
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 48}
MODELS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", GEMMA),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# Families that have a mapping, and no model in the examples.
UNKNOWN = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}
TOKENS = np.random.default_rng(0).integers(0, 160, (2, 24))


@pytest.fixture(scope="module")
def decoder():
    """The model of the example, whose folder is no package."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))
    try:
        yield importlib.import_module("model")
    finally:
        sys.path.pop(0)
        for name in ("model", "attention"):
            sys.modules.pop(name, None)


def model_of(name):
    kind, fields = (MODELS | UNKNOWN)[name]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SIZES, **fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too, which are zeros and ones at first
            p.copy_(torch.randn_like(p) * 0.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return model


def logits_of(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_which_loads_what_is_exported(name, decoder, tmp_path):
    model = model_of(name)
    wanted = logits_of(model)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    config = decoder.Config.of_folder(tmp_path / "theirs", dtype=np.float32)
    kind, state = nnx.split(nnx.eval_shape(lambda: decoder.Decoder(config, nnx.Rngs(0))))

    @jax.jit
    def logits(params):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(kind, state)(TOKENS)

    params = reshard.restore(tmp_path / "theirs", nnx.to_pure_dict(state), mapping="auto")
    assert wanted.std() > 0.1
    np.testing.assert_allclose(logits(params), wanted, atol=2e-5)
    reshard.save(tmp_path / "same", params, tensors=TensorFormat("auto", files_of=tmp_path / "theirs"))
    assert contents(tmp_path / "same") == contents(tmp_path / "theirs")
    # something else than what was loaded
    params["norm"] = params["norm"] * 1.5 + 0.5
    reshard.save(tmp_path / "tuned", params, tensors=TensorFormat("auto", files_of=tmp_path / "theirs"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    np.testing.assert_allclose(logits_of(loaded), logits(params), atol=5e-5)
    assert np.abs(logits_of(loaded) - wanted).max() > 0.1


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_family_without_a_model_here_is_imported_and_exported(name, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--mapping", "auto"]
    assert main(words) == 0
    back = ["--format", "safetensors", "--files-of", str(tmp_path / "theirs"), "--mapping", "auto"]
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), *back]) == 0
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")


def test_files_of_the_package_are_read_and_its_reader_reads_ours(tmp_path):
    safetensors: Any = pytest.importorskip("safetensors.torch")
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8, torch.float16]
    tensors = {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors["scalar"] = torch.tensor(3.0)
    (tmp_path / "theirs").mkdir()
    safetensors.save_file(tensors, tmp_path / "theirs/model.safetensors", metadata={"format": "pt"})
    leaves = reshard.storage.finder.find(tmp_path / "theirs").leaves
    like = {leaf.path[0].name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves}
    found = reshard.restore(tmp_path / "theirs", like)
    reshard.save(tmp_path / "ours", found, tensors=TensorFormat())
    ours = tmp_path / "ours/model.safetensors"
    assert ours.read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()
    loaded = safetensors.load_file(ours)
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in tensors.items())
    assert json.loads(ours.read_bytes()[8:].split(b"}}")[0] + b"}}")["t1"]["dtype"] == "BF16"


@pytest.mark.slow
def test_the_folder_that_the_page_makes_is_fine_tuned_and_loads(tmp_path):
    pytest.importorskip("grain")
    root = Path(__file__).parents[2]
    shutil.copytree(root / "docs", tmp_path / "docs")
    page = (root / "docs" / "finetuning.md").read_text()
    (program,) = re.findall(r"<!-- folder -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    train = "--model DIR --text docs --lora 2 --steps 3 --lr 1e-2 --groups 2 --microbatches 2 --batch 4 --eval-every 0"
    train = [str(root / "examples/llama/train.py"), *train.split(), "--export", "tuned"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    for words in (["-c", program], train):
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, check=True, timeout=300)
    base, tuned = (
        dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).named_parameters())
        for folder in ("DIR", "tuned")
    )
    changed = {name for name in base if not torch.equal(base[name], tuned[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(6)}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned").eos_token == "<end>"
