"""docs/huggingface.md: its programs, commands and mapping work as printed, on a small folder."""

import re
import shlex
from pathlib import Path

import jax
import numpy as np
import yaml
from folders import abstract, check_equal, expected, llama, write_folder

import reshard
from reshard.__main__ import main
from reshard.edits.mapping import parse_mapping

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tensors = llama(2)
    write_folder(tmp_path / "Llama-3-8B", tensors, 2)
    wanted = jax.tree.map(lambda x: x.astype(np.float32), expected(tensors))
    variables = {"abstract_params": abstract(wanted), "shardings": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    for program in blocks("python"):
        exec(program, variables)
    check_equal(jax.tree.map(np.asarray, variables["params"]), wanted)
    assert (tmp_path / "tuned/tokenizer.json").exists()
    (tmp_path / "tuned").rename(tmp_path / "saved")
    (tmp_path / "layout.yaml").write_text("mesh: {axes: {stage: 2}, mpmd_axis: stage}\n")
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        python, dash_m, module, *words = shlex.split(command)
        assert [python, dash_m, module] == ["python", "-m", "reshard"] and main(words) == 0
    assert capsys.readouterr().err == ""
    for file in (tmp_path / "saved").iterdir():
        assert (tmp_path / "tuned" / file.name).read_bytes() == file.read_bytes()


def test_the_mapping_of_the_page_is_one(tmp_path):
    (text,) = blocks("yaml")
    mapping = parse_mapping(yaml.safe_load(text), "the page's")
    assert len(mapping.rules) == 3 and mapping.rules[2].parts == ("heads", "kv_heads", "kv_heads")
    names = ("embed_tokens", "self_attn")
    folder = write_folder(tmp_path / "m", {n: x for n, x in llama(2).items() if any(name in n for name in names)})
    like = {"layers": {"attention": {"qkv": jax.ShapeDtypeStruct((2, 16, 8, 4), np.float32)}}}
    found = reshard.restore(folder, like, partial=True, mapping=mapping)["layers"]["attention"]["qkv"]
    key = llama(2)["model.layers.1.self_attn.k_proj.weight"]
    assert (found[1, :, 4:6] == key.T.reshape(16, 2, 4).astype(np.float32)).all()
