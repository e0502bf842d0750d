"""Hugging Face folders in and out: each value in its place, each byte read once, and the same bytes back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from folders import CONFIG, abstract, check_equal, contents, expected, llama, random, same, write_folder
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from mpmd import MpmdMesh, MpmdSharding
from reshard.__main__ import main
from reshard.checkpoint import Part, Reads, ReshardError, TensorFormat
from reshard.edits.mapping import built_in, read_mapping


@pytest.fixture(scope="module")
def tensors():
    return llama()


@pytest.fixture(scope="module", params=[1, 3])
def folder(request, tensors, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama") / "model", tensors, request.param)


def converted(capsys, *words) -> str:
    assert main(["convert", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_what_was_imported_is_exported_byte_for_byte(folder, tensors, tmp_path, capsys):
    converted(capsys, folder, tmp_path / "ours", "--mapping", "llama", "--verify")
    wanted = expected(tensors)
    check_equal(reshard.restore(tmp_path / "ours", abstract(wanted)), wanted)
    back = ["--mapping", "llama", "--format", "safetensors", "--files-of", folder, "--verify"]
    said = converted(capsys, tmp_path / "ours", tmp_path / "back", *back)
    assert said == f"{tmp_path / 'back'}: 39 arrays, 17.8 KiB, verified\n"
    found, given = contents(tmp_path / "back"), contents(folder)
    index = "model.safetensors.index.json"
    assert found.keys() == given.keys()
    assert {name for name in given if found[name] != given[name]} <= {index}
    if index in given:
        assert json.loads(found[index])["weight_map"] == json.loads(given[index])["weight_map"]


def test_a_conversion_in_little_memory_gives_the_same(folder, tensors, tmp_path, capsys):
    converted(capsys, folder, tmp_path / "ours", "--mapping", "auto", "--threshold", "4KiB")
    check_equal(reshard.restore(tmp_path / "ours", abstract(expected(tensors))), expected(tensors))
    back = ["--mapping", "llama", "--format", "safetensors", "--file-size", "4KiB", "--threshold", "8KiB"]
    converted(capsys, tmp_path / "ours", tmp_path / "back", *back)
    files = sorted(file.name for file in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) == 5 and files[-1] == "model-00005-of-00005.safetensors"
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors.items()}
    check_equal(reshard.restore(tmp_path / "back", like), tensors)


def test_tensors_go_straight_into_stages_and_each_byte_is_read_once(folder, tensors, tmp_path):
    mesh = MpmdMesh(jax.make_mesh((2, 2), ("stage", "data")), "stage")
    wanted = jax.tree.map(lambda x: x.astype(np.float32), expected(tensors))
    shardings = {name: MpmdSharding(mesh, 1, P("data")) for name in ("embed", "norm", "head")}
    # the layers of a stage in its group, cut along their last axis within it
    split = {1: P("stage", "data"), 2: P("stage", None, "data"), 3: P("stage", None, None, "data")}
    shardings["layers"] = jax.tree.map(lambda x: MpmdSharding(mesh, {0, 1}, split[x.ndim - 1]), wanted["layers"])
    reads = Reads()
    state = reshard.restore(folder, abstract(wanted), shardings, mapping="llama", reads=reads)
    check_equal(jax.tree.map(np.asarray, state), wanted)
    assert reads.nbytes == sum(x.nbytes for x in tensors.values())
    assert set(reads.by_name) == {file.name for file in folder.glob("*.safetensors")}
    how = TensorFormat("auto", files_of=folder, dtype="bfloat16")
    reshard.save(tmp_path / "tuned", state, tensors=how)
    found, given = contents(tmp_path / "tuned"), contents(folder)
    assert [name for name in given if found[name] != given[name]] == [name for name in given if "index" in name]


def test_only_what_is_wanted_is_read(folder, tensors):
    reads, wanted = Reads(), expected(tensors)
    part = Part("layers/attention/query", (2, slice(4, 8)), jax.ShapeDtypeStruct((4, 4, 4), jnp.bfloat16))
    layers = [None, None, None, {"attention": {"value": jax.ShapeDtypeStruct((16, 2, 4), jnp.bfloat16)}}]
    (found,) = reshard.restore(folder, [part], partial=True, mapping="llama", reads=reads)
    assert same(found, wanted["layers"]["attention"]["query"][2, 4:8]) and reads.nbytes == 4 * 4 * 4 * 2
    reads = Reads()
    found = reshard.restore(folder, {"layers": layers}, partial=True, mapping="llama", reads=reads)
    assert same(found["layers"][3]["attention"]["value"], wanted["layers"]["attention"]["value"][3])
    assert reads.nbytes == 16 * 8 * 2
    name = "model.layers.1.mlp.down_proj.weight"
    found = reshard.restore(folder, {name: jax.ShapeDtypeStruct((16, 24), jnp.bfloat16)}, partial=True)
    assert same(found[name], tensors[name])
    rows = NamedSharding(jax.make_mesh((1,), ("x",)), P("x"))
    like = {"model": {"norm": {"weight": jax.ShapeDtypeStruct((16,), jnp.bfloat16, sharding=rows)}}}
    assert same(reshard.restore(folder, like, partial=True)["model"]["norm"]["weight"], tensors["model.norm.weight"])


FUSED = """\
stack: [layers]
sizes: {heads: num_attention_heads, kv_heads: num_key_value_heads}
rules:
  - tensor:
      - model.layers.{layer}.self_attn.q_proj.weight
      - model.layers.{layer}.self_attn.k_proj.weight
      - model.layers.{layer}.self_attn.v_proj.weight
    array: layers/{layer}/qkv
    axes: (heads dim) model -> model heads dim
    along: heads
    parts: [heads, kv_heads, kv_heads]
  - tensor: ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]
    array: layers/{layer}/gate_and_up
    axes: hidden model -> model (hidden which)
    along: which
  - {tensor: "model.layers.{layer}.mlp.down_proj.weight", array: "layers/{layer}/down"}
  - {tensor: "model.layers.{layer}.self_attn.o_proj.weight", array: "layers/{layer}/out"}
  - {tensor: "model.layers.{layer}.input_layernorm.weight", array: "layers/{layer}/norm"}
  - {tensor: "model.layers.{layer}.post_attention_layernorm.weight", array: "layers/{layer}/norm2"}
  - {tensor: model.embed_tokens.weight, array: embed}
  - {tensor: [model.norm.weight], array: norm}
  - {tensor: lm_head.weight, array: head}
"""


def test_a_mapping_file_joins_tensors_into_one_array_and_cuts_it_again(folder, tensors, tmp_path, capsys):
    mapping = tmp_path / "fused.yaml"
    mapping.write_text(FUSED)
    converted(capsys, folder, tmp_path / "ours", "--mapping", mapping)
    plain = expected(tensors)["layers"]
    qkv = np.concatenate([plain["attention"][name] for name in ("query", "key", "value")], axis=2)
    both = np.stack([plain["mlp"]["gate"], plain["mlp"]["up"]], axis=-1).reshape(4, 16, 48)
    like = {"layers": {"qkv": abstract(qkv), "gate_and_up": abstract(both)}}
    found = reshard.restore(tmp_path / "ours", like, partial=True)["layers"]
    assert same(found["qkv"], qkv) and same(found["gate_and_up"], both)
    back = ["--mapping", mapping, "--format", "safetensors", "--files-of", folder]
    converted(capsys, tmp_path / "ours", tmp_path / "back", *back)
    names = {file.name for file in folder.glob("*.safetensors")}
    assert all(contents(tmp_path / "back")[name] == contents(folder)[name] for name in names)


def test_a_tensor_that_holds_several_arrays_is_cut_and_joined_again(tmp_path, capsys):
    fused = {f"blocks.{i}.qkv": random((32, 16), seed=i) for i in range(3)}
    folder = write_folder(tmp_path / "model", fused)
    rules = {"tensor": "blocks.{n}.qkv", "array": [f"blocks/{{n}}/{x}" for x in "qkv"], "along": "heads"}
    rules |= {"axes": "(heads dim) model -> model heads dim", "parts": ["heads", "kv_heads", "kv_heads"]}
    sizes = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(yaml.safe_dump({"sizes": sizes, "rules": [rules]}))
    converted(capsys, folder, tmp_path / "ours", "--mapping", mapping)
    like = {"blocks": {"1": {"v": jax.ShapeDtypeStruct((16, 2, 4), np.float32)}}}
    found = reshard.restore(tmp_path / "ours", like, partial=True)["blocks"]["1"]["v"]
    assert same(found, fused["blocks.1.qkv"][24:].T.reshape(16, 2, 4))
    converted(capsys, tmp_path / "ours", tmp_path / "back", "--mapping", mapping, "--format", "safetensors")
    assert contents(tmp_path / "back")["model.safetensors"] == contents(folder)["model.safetensors"]


def test_experts_become_one_array_and_are_written_one_by_one(tmp_path):
    moe = "model.layers.{}.block_sparse_moe."
    tensors = {name: x for name, x in llama(2, "float32").items() if ".mlp." not in name}
    for i in range(2):
        tensors[moe.format(i) + "gate.weight"] = random((3, 16), seed=i)
        for e in range(3):
            for w, shape in {"w1": (24, 16), "w2": (16, 24), "w3": (24, 16)}.items():
                tensors[f"{moe.format(i)}experts.{e}.{w}.weight"] = random(shape, seed=100 * i + 10 * e + len(tensors))
    folder = write_folder(tmp_path / "model", tensors, 2, CONFIG | {"architectures": ["MixtralForCausalLM"]})
    up = np.stack([[tensors[f"{moe.format(i)}experts.{e}.w3.weight"].T for e in range(3)] for i in range(2)])
    apart = {"layers": {"experts": [{"up": abstract(up[:, 0])}] * 3}}
    found = reshard.restore(folder, apart, partial=True, mapping="auto")
    assert same(found["layers"]["experts"][2]["up"], up[:, 2])
    like = {"layers": {"experts": {"up": abstract(up)}}}
    assert same(reshard.restore(folder, like, partial=True, mapping="mixtral")["layers"]["experts"]["up"], up)


def test_every_mapping_that_comes_along_names_each_tensor_and_array_once():
    for name in built_in():
        mapping = read_mapping(name, None)
        tensors = [one for rule in mapping.rules for one in rule.tensors]
        arrays = [one for rule in mapping.rules for one in rule.arrays]
        assert mapping.architectures and len(set(tensors)) == len(tensors) and len(set(arrays)) == len(arrays)


def test_a_plan_for_a_layout_says_what_each_process_reads(folder, tmp_path, capsys):
    layout = {
        "mesh": {"axes": {"stage": 4, "model": 2}, "mpmd_axis": "stage", "devices_per_process": 2},
        "rules": [{"path": "layers/**", "stacked_axis": 0}, {"path": "**", "groups": [0]}],
    }
    (tmp_path / "layout.yaml").write_text(yaml.safe_dump(layout, sort_keys=False))
    assert main(["plan", str(folder), "--to", str(tmp_path / "layout.yaml"), "--mapping", "llama", "--json"]) == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    layer = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 3 + 16 * 2)
    assert [p["read_bytes"] for p in processes] == [layer + 2 * (2 * 40 * 16 + 16), layer, layer, layer]
    assert [p["needed_bytes"] for p in processes] == [p["read_bytes"] for p in processes]
    assert main(["inspect", str(folder), "--mapping", "llama"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layers/attention/query "))
    assert row.split()[1:8] == ["bfloat16", "[4,", "16,", "4,", "4]", "2.0", "KiB"] and "model" in row


def test_what_does_not_fit_a_mapping_is_listed(tmp_path):
    tensors = llama(2)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["extra.weight"] = random((2,))
    folder = write_folder(tmp_path / "model", tensors)
    like = {"norm": jax.ShapeDtypeStruct((16,), np.float32)}
    with pytest.raises(ReshardError) as caught:
        reshard.restore(folder, like, partial=True, mapping="llama")
    assert str(caught.value) == "mapping llama does not fit:\n  no rule has the tensor extra.weight float32[2]"
    del tensors["extra.weight"]
    folder = write_folder(tmp_path / "gap", tensors)
    with pytest.raises(ReshardError, match="mapping llama: stack layers: the layers of layers differ: layers/0/mlp/up"):
        reshard.restore(folder, like, partial=True, mapping="llama")
    with pytest.raises(ReshardError, match="there is no mapping 'lama': give a file, auto, or one of gemma, gemma2"):
        reshard.restore(folder, like, partial=True, mapping="lama")
    (folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ReshardError, match=r"no mapping is known for MambaForCausalLM \(.*config.json\)"):
        reshard.restore(folder, like, partial=True, mapping="auto")
    bad = {"rules": [{"tensor": "a", "array": ["b", "c"]}, {"tensor": "x.{n}", "array": "y", "axe": "a -> b"}]}
    long = "h" * 60 + "-x"  # a pattern that goes back would not end
    bad["rules"] += [
        {"tensor": "a.{i}.{i}", "array": "{i}", "axes": f"{long} -> {long}"},
        {"tensor": "{0}", "array": "{0}"},
    ]
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad))
    with pytest.raises(ReshardError) as caught:
        read_mapping(tmp_path / "bad.yaml", None)
    assert str(caught.value).splitlines()[1:] == [
        "  rules[0] joins 2, so it needs axes and along.",
        "  rules[1] has axe; known are along, array, axes, optional, parts, tensor.",
        "  rules[1]: tensor and array do not name the same numbers in braces.",
        f"  rules[2].axes: '{long} -> {long}' is not written like '(heads dim) model -> model heads dim'.",
        "  rules[2]: what stands in braces must be a name, once in each tensor and array.",
        "  rules[3]: what stands in braces must be a name, once in each tensor and array.",
    ]


def test_layers_that_are_optional_need_not_be_there(tmp_path):
    layers = [
        {"tensor": f"{name}.{{i}}.w", "array": f"{name}/{{i}}/w", "optional": name == "mtp"} for name in ("a", "mtp")
    ]
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"rules": layers, "stack": ["a", "mtp"]}))
    folder = write_folder(tmp_path / "model", {f"a.{i}.w": np.full(2, i, np.float32) for i in range(3)})
    like = {"a": {"w": jax.ShapeDtypeStruct((3, 2), np.float32)}}
    restored = reshard.restore(folder, like, mapping=tmp_path / "m.yaml")
    assert np.array_equal(restored["a"]["w"], np.repeat(np.arange(3.0)[:, None], 2, 1))


def test_what_is_no_tensor_is_refused_before_anything_is_written(tmp_path):
    tree = {"name": "text", "key": jax.random.key(0), "w": np.ones(2, np.float32)}
    with pytest.raises(ReshardError, match="leave the others out:\n  key has typed keys\n  name is text"):
        reshard.save(tmp_path / "out", tree, tensors=TensorFormat())
    assert list(tmp_path.iterdir()) == []
