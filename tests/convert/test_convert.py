"""Stock Orbax checkpoints made into others: bit by bit what they should be, and readable by stock Orbax."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from stored_states import assert_same, bits, command, fingerprint, layered, restore, save, stacked_params, state_of

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard import checkpoint
from reshard.__main__ import main
from reshard.conversion.convert import convert, plan_conversion
from reshard.edits.tree_edits import stack, unstack
from reshard.storage import finder, tensor_files
from reshard.storage.paths import show


def converted(tmp_path, source, *options):
    number = len(list(tmp_path.iterdir()))
    target = tmp_path / f"converted{number}"
    assert main(["convert", str(source), str(target), "--verify", *options]) == 0
    return target


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--format", "zarr3"), (), ("--threshold", "4KiB")])
def test_a_training_state_goes_from_stacked_to_layers_and_back_bit_by_bit(tmp_path, options):
    state = state_of(stacked_params())
    source = save(tmp_path / "stacked", state)
    layers = converted(tmp_path, source, "--unstack", "**/layers", *options)
    back = converted(tmp_path, layers, "--stack", "**/layers", *options)
    assert_same(restore(back), restore(source))
    expected = state_of(layered(stacked_params()))
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(layers, jax.tree.map(ocp.utils.to_shape_dtype_struct, expected))
    assert_same(found, jax.tree.map(jnp.asarray, expected) | {"step": 7, "rate": 0.25, "host": found["host"]})
    assert bits(np.asarray(found["host"])) == bits(expected["host"])
    assert [found[name].dtype for name in ("key", "keys")] == [expected[name].dtype for name in ("key", "keys")]


@pytest.mark.slow
def test_layers_that_stock_orbax_saved_are_what_unstacking_makes(tmp_path):
    layers = converted(tmp_path, save(tmp_path / "stacked", stacked_params()), "--unstack", "layers")
    assert_same(restore(layers), restore(save(tmp_path / "layers", layered(stacked_params()))))


@pytest.mark.slow
def test_layers_in_a_dict_are_stacked_like_those_in_a_list(tmp_path):
    source = save(tmp_path / "stacked", stacked_params(12))
    layers = converted(tmp_path, source, "--unstack", "layers=dict")
    assert sorted(restore(layers)["layers"], key=int) == [str(i) for i in range(12)]
    assert_same(restore(converted(tmp_path, layers, "--stack", "layers")), restore(source))


def test_an_array_that_is_itself_the_stack_becomes_a_list_of_arrays(tmp_path):
    source = save(tmp_path / "stacked", {"w": np.arange(12.0).reshape(3, 4)})
    layers = converted(tmp_path, source, "--unstack", "w")
    assert_same(restore(layers), {"w": [np.arange(4.0) + 4 * i for i in range(3)]})
    assert_same(restore(converted(tmp_path, layers, "--stack", "w")), restore(source))


def test_numbers_become_an_array_when_they_are_stacked(tmp_path):
    source = save(tmp_path / "layers", {"layers": [{"scale": 0.5}, {"scale": 0.25}]})
    assert_same(restore(converted(tmp_path, source, "--stack", "layers")), {"layers": {"scale": np.array([0.5, 0.25])}})


def test_names_with_numbers_are_stacked_after_a_renaming(tmp_path):
    tree = {"params": {f"block_{i}": {"w": np.full(3, i, np.float32)} for i in range(11)}, "n": np.arange(2)}
    target = converted(
        tmp_path, save(tmp_path / "flax", tree), "--rename", r"params/block_(\d+)/(.*)=params/blocks/\1/\2",
        "--stack", "params/blocks", "--rename", "(params)/(.*)=model/\\2",
    )  # fmt: skip
    expected = {"model": {"blocks": {"w": np.repeat(np.arange(11, dtype=np.float32)[:, None], 3, 1)}}, "n": tree["n"]}
    assert_same(restore(target), expected)


def test_one_stack_is_cut_and_stacked_into_another_order_of_nodes(tmp_path):
    tree = {"layers": {"w": np.arange(24).reshape(2, 3, 4)}}
    source = save(tmp_path / "source", tree)
    cut = converted(tmp_path, source, "--unstack", "layers", "--unstack", "layers/*")
    assert_same(restore(cut), {"layers": [[{"w": tree["layers"]["w"][i, j]} for j in range(3)] for i in range(2)]})
    inner = converted(tmp_path, source, "--unstack", "layers", "--unstack", "layers/*", "--stack", "layers")
    assert_same(restore(inner), {"layers": [{"w": tree["layers"]["w"][:, j]} for j in range(3)]})


@pytest.mark.slow
def test_floating_point_arrays_are_cast_and_numbers_counters_and_keys_are_not(tmp_path):
    state = state_of(stacked_params())
    source = save(tmp_path / "source", state)
    target = converted(tmp_path, source, "--dtype", "bfloat16", "--dtype", "opt/**/nu=float32")
    before, after = restore(source), restore(target)

    def cast(path, leaf):
        if isinstance(leaf, (int, float)) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return bits(leaf)
        dtype = jnp.float32 if any(getattr(key, "key", None) == "nu" for key in path) else jnp.bfloat16
        return bits(np.asarray(leaf).astype(dtype))

    assert jax.tree.map(bits, after) == jax.tree_util.tree_map_with_path(cast, before)


def test_a_value_too_large_for_the_new_dtype_is_an_error(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.array([1.0, 1e6, np.inf, np.nan], np.float32)})
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--dtype", "float16"]) == 1
    assert capsys.readouterr().err == "error: w: 1 values of float32 are too large for float16.\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_checkpoint_that_nobody_could_read_is_not_written(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.ones(4, np.float32)})
    assert main(["convert", str(source), str(tmp_path / "run[1]")]) == 1
    assert "run[1] has [ in it, which Orbax takes for a pattern" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "target"), "--rename", "w=a\nb"]) == 1
    assert "is no name of a leaf" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_dtype_without_infinity_is_not_filled_with_its_largest_value(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.array([0, -6, 6.9, np.nan], np.float32), "x": np.array([7, -1e30, 1])})
    assert main(["convert", str(source), str(tmp_path / "target"), "--dtype", "float4_e2m1fn"]) == 1
    assert capsys.readouterr().err == "error: x: 2 values of float64 are too large for float4_e2m1fn.\n"
    assert main(["convert", str(source), str(tmp_path / "target"), "--dtype", "float4_e2m1fn", "--drop", "x"]) == 0


def test_what_a_checkpoint_cannot_hold_is_told_before_anything_is_written(tmp_path, capsys):
    plan = tensor_files.plan_files([("none", np.dtype(np.float32), (0, 4)), ("w", np.dtype(np.float32), (4,))])
    (source := tmp_path / "source").mkdir()
    with tensor_files.writing(source, plan) as writer:
        writer.write("w", Box.whole((4,)), np.arange(4, dtype=np.float32))
    assert main(["convert", str(source), str(tmp_path / "target")]) == 1
    text = "none: float32[0,4] has no elements, and Orbax stores no empty arrays"
    assert capsys.readouterr().err.splitlines()[1].strip() == text
    assert main(["convert", str(source), str(tmp_path / "target"), "--drop", "none", "--dtype", "float6_e2m3fn"]) == 1
    assert "w: float6_e2m3fn[4] is of a dtype that Orbax does not store" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
    mesh = jax.make_mesh((2,), ("x",))
    placed = NamedSharding(mesh, PartitionSpec())
    like = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=placed)
        for name, shape in (("none", (0, 4)), ("w", (4,)))
    }
    found = checkpoint.restore(source, like, threshold=0)
    assert (found["none"].shape, found["none"].sharding, found["w"].tolist()) == ((0, 4), placed, [0, 1, 2, 3])
    narrow = {**like, "w": jax.ShapeDtypeStruct((4,), "float4_e2m1fn", sharding=placed)}
    assert checkpoint.restore(source, narrow)["w"].dtype == "float4_e2m1fn"


@pytest.mark.slow
def test_parts_are_kept_and_dropped(tmp_path):
    state = state_of(stacked_params())
    source = save(tmp_path / "source", state)
    only = converted(tmp_path, source, "--only", "params", "--only", "step", "--drop", "**/mlp/1")
    found = restore(only)
    assert found.keys() == {"params", "step"}
    assert_same(found["params"]["layers"]["w"], restore(source)["params"]["layers"]["w"])
    assert len(found["params"]["layers"]["mlp"]) == 1


def test_a_list_that_has_lost_items_becomes_a_dict_and_says_so(tmp_path, capsys):
    source = save(tmp_path / "source", {"layers": [np.ones(2), np.zeros(2), np.ones(3)]})
    target = converted(tmp_path, source, "--drop", "layers/1")
    assert capsys.readouterr().err == "note: layers was a list and becomes a dict with the entries 0, 2\n"
    assert_same(restore(target), {"layers": {"0": np.ones(2), "2": np.ones(3)}})


@pytest.mark.parametrize("zarr3", [False, True])
def test_chunks_are_those_asked_for(tmp_path, zarr3):
    source = save(tmp_path / "source", {"w": np.arange(70.0).reshape(7, 10), "b": np.ones(4)})
    target = converted(tmp_path, source, "--chunk", "w=2,-1", *(["--format", "zarr3"] if zarr3 else []))
    checkpoint = finder.find(target)
    assert checkpoint.format == ("zarr3" if zarr3 else "zarr")
    assert {show(leaf.path): leaf.chunk for leaf in checkpoint.leaves} == {"w": (2, 10), "b": (4,)}
    assert_same(restore(target), restore(source))


@pytest.mark.parametrize(
    "options", [{"use_ocdbt": False}, {"use_zarr3": True}, {"use_ocdbt": False, "use_zarr3": True}]
)
def test_every_format_that_orbax_writes_is_read(tmp_path, options):
    tree = stacked_params() | {"name": "a model", "none": None, "n": 3}
    source = save(tmp_path / "source", tree, **options)
    plain = save(tmp_path / "plain", tree)
    assert_same(restore(converted(tmp_path, source)), restore(plain))


def test_steps_of_a_manager_are_converted_and_its_other_items_named(tmp_path, capsys):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (2, 10):
            tree = ocp.args.StandardSave({"w": np.full(3, step)})
            manager.save(step, args=ocp.args.Composite(state=tree, data=ocp.args.JsonSave({"position": step})))
    assert_same(restore(converted(tmp_path, tmp_path / "run")), {"w": np.full(3, 10)})
    assert capsys.readouterr().err == "note: only the tree is converted, not data\n"
    assert_same(restore(converted(tmp_path, tmp_path / "run", "--step", "2")), {"w": np.full(3, 2)})
    assert_same(restore(converted(tmp_path, tmp_path / "run" / "2", "--item", "state")), {"w": np.full(3, 2)})


@pytest.mark.slow
def test_stock_orbax_restores_the_result_on_a_mesh_in_a_process_without_this_library(tmp_path):
    source = save(tmp_path / "source", stacked_params())
    target = converted(tmp_path, source, "--unstack", "layers")
    program = f"""
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",))
like = {{"embed": jax.ShapeDtypeStruct((11, 4), np.float32, sharding=NamedSharding(mesh, P(None, "x"))),
        "layers": [{{"w": jax.ShapeDtypeStruct((4, 8), jax.numpy.bfloat16, sharding=NamedSharding(mesh, P("x"))),
                    "mlp": [jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P())),
                            jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, P()))]}}] * 6}}
tree = ocp.StandardCheckpointer().restore({str(target)!r}, like)
assert tree["layers"][5]["w"].sharding.spec == P("x")
assert not {{"reshard", "mpmd", "scheduler"}} & set(sys.modules)
print(float(tree["layers"][5]["w"].sum()), float(tree["layers"][3]["mlp"][1]))
"""
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    w = stacked_params()["layers"]["w"]
    assert run.stdout.split() == [str(float(w[5].sum())), "3.0"]


def test_the_source_is_not_touched_and_each_of_its_bytes_read_once(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    w = jax.device_put(
        np.random.default_rng(0).random((16, 64, 8), np.float32), NamedSharding(mesh, PartitionSpec("x"))
    )
    source = save(tmp_path / "source", {"layers": {"w": w}})
    before = fingerprint(source)
    copied = convert(plan_conversion(source, tmp_path / "target", [unstack("layers")]), verify=True)
    assert fingerprint(source) == before
    assert copied.bytes_read == copied.bytes_written == w.nbytes


def read_from_disk():
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_by_default_each_source_chunk_is_read_from_disk_once(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    w = jax.device_put(np.random.default_rng(0).random((16, 64, 512), np.float32), sharding)
    source = save(tmp_path / "source", {"layers": {"w": w}})
    assert finder.find(source).leaves[0].chunk == (16, 64, 64)
    whole_layers = [("layers/*/w", (-1, -1))]  # each takes a part of all eight chunks
    conversion = plan_conversion(source, tmp_path / "target", [unstack("layers")], chunks=whole_layers)
    before = read_from_disk()
    convert(conversion)
    assert read_from_disk() - before < 1.3 * finder.find(source).stored_nbytes()
    assert_same(restore(tmp_path / "target"), {"layers": [{"w": layer} for layer in np.asarray(w)]})


def test_a_dry_run_prints_the_plan_and_does_nothing(tmp_path, capsys):
    source = save(tmp_path / "source", {"layers": {"w": np.zeros((2, 3), np.float32)}, "n": 3, "old": np.zeros(2)})
    target = tmp_path / "target"
    arguments = ["--drop", "old", "--unstack", "layers", "--dtype", "bfloat16", "--threshold", "1MiB", "--dry-run"]
    assert main(["convert", str(source), str(target), *arguments]) == 0
    assert capsys.readouterr().out == (
        "layers/0/w  bfloat16[3]  from layers/w[0], cast from float32, chunks [3]\n"
        "layers/1/w  bfloat16[3]  from layers/w[1], cast from float32, chunks [3]\n"
        "n           int64[]\n"
        "left out: old\n"
        f"{source} (48 B) -> {target} (20 B), zarr in OCDBT, in 1.0 MiB of memory\n"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_the_progress_of_both_passes_adds_up(tmp_path):
    source = save(tmp_path / "source", {"w": np.zeros((64, 256), np.float32)})
    seen = []
    conversion = plan_conversion(source, tmp_path / "target", chunks=[("w", (1, -1))], threshold=1 << 19)
    convert(conversion, verify=True, progress=seen.append)
    for doing in ("copying", "reading"):
        steps = [progress for progress in seen if progress.doing == doing]
        assert len(steps) > 2
        assert [steps[0].bytes_done, steps[-1].bytes_done] == [0, 1 << 16]


def held_bytes(*arguments):
    """By how much a conversion in a process of its own makes it grow, after everything is imported."""
    program = """
import json, sys
from reshard import __main__ as command
import orbax.checkpoint, jax
command._own_process()
jax.process_index()
def held(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
before = held("VmRSS")
status = command.main(sys.argv[1:])
print(json.dumps({"status": status, "grown": held("VmHWM") - before}))
"""
    line = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(line, text=True, capture_output=True, timeout=120, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_stays_within_the_threshold_whatever_the_array_size(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    spec = NamedSharding(mesh, PartitionSpec(None, "x"))
    w = jax.device_put(np.random.default_rng(0).random((16, 1024, 2048), np.float32), spec)
    source = save(tmp_path / "source", {"layers": {"w": w}})
    assert w.nbytes == 128 << 20
    threshold = 80 << 20
    grown = held_bytes("convert", source, tmp_path / "target", "--unstack", "layers", "--threshold", threshold)
    assert grown["status"] == 0
    assert grown["grown"] < threshold
    conversion = plan_conversion(source, tmp_path / "again", [unstack("layers")], threshold=threshold)
    assert convert(conversion).peak_nbytes <= threshold


def test_a_threshold_that_no_chunk_fits_in_is_refused_with_the_least_that_does(tmp_path, capsys):
    source = save(tmp_path / "source", {"layers": {"w": np.zeros((8, 1024), np.float32)}})
    arguments = ["convert", str(source), str(tmp_path / "target"), "--unstack", "layers", "--threshold"]
    assert main([*arguments, "100KiB"]) == 1
    assert capsys.readouterr().err == (
        "error: --threshold 100.0 KiB is too little: chunks are read and written whole.\n"
        "  layers/w is stored in chunks of 32.0 KiB [8, 1024], "
        "layers/0/w is to be written in chunks of 4.0 KiB [1024].\n"
        "  Give at least --threshold 147456 (144.0 KiB).\n"
    )
    assert main([*arguments, "144KiB"]) == 0


DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "float8_e4m3fn", "float16"]
NAMES = st.sampled_from(["w", "b", "a.b", "enc/w", "0", "läyer", "x y"])


@st.composite
def arrays(draw, lead=()):
    shape = (*lead, *draw(st.lists(st.integers(1, 4), max_size=3)))
    dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(data).view(dtype).reshape(shape)


def trees(leaves):
    containers = lambda inner: st.one_of(  # noqa: E731
        st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3), st.just(None)
    )
    return st.recursive(leaves, containers, max_leaves=5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 12), zarr3=st.booleans(), threshold=st.sampled_from([None, 1 << 16]))
def test_any_tree_of_stacks_comes_back_from_layers_as_it_was(tmp_path_factory, data, num_layers, zarr3, threshold):
    tmp_path = tmp_path_factory.mktemp("property")
    inner = data.draw(st.dictionaries(NAMES, trees(arrays(lead=(num_layers,))), min_size=1, max_size=3))
    tree = {"stacked": inner | {"always": np.arange(num_layers)}, "rest": data.draw(trees(arrays()))}
    names = [".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)
             for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]  # fmt: skip
    if len(set(names)) < len(names):  # stock Orbax itself takes {"a": {"b": …}} and {"a.b": …} for one
        return
    source = save(tmp_path / "source", tree)
    as_list = data.draw(st.booleans())
    layers = plan_conversion(
        source, tmp_path / "layers", [unstack("stacked", as_list=as_list)], zarr3=zarr3, threshold=threshold
    )
    convert(layers, verify=True)
    back = plan_conversion(tmp_path / "layers", tmp_path / "back", [stack("stacked")], threshold=threshold)
    convert(back, verify=True)
    assert_same(restore(tmp_path / "back"), restore(source))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data(), zarr3=st.booleans())
def test_any_chunks_become_any_others_in_the_least_memory_that_will_do(tmp_path_factory, data, zarr3):
    tmp_path = tmp_path_factory.mktemp("chunks")
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    before, after = [tuple(data.draw(st.integers(1, n)) for n in shape) for _ in range(2)]
    w = np.random.default_rng(0).random((3, *shape), np.float32)
    source = save(tmp_path / "source", {"w": w})
    first = plan_conversion(source, tmp_path / "first", chunks=[("w", (2, *before))], zarr3=zarr3)
    convert(first)
    changes = [unstack("w")]
    with pytest.raises(ReshardError) as refused:
        plan_conversion(tmp_path / "first", tmp_path / "second", changes, chunks=[("w/*", after)], threshold=1)
    least = int(re.search(r"at least --threshold (\d+)", str(refused.value))[1])
    second = plan_conversion(tmp_path / "first", tmp_path / "second", changes, chunks=[("w/*", after)], threshold=least)
    assert convert(second, verify=True).peak_nbytes <= least
    assert {leaf.chunk for leaf in finder.find(tmp_path / "second").leaves} == {after}
    assert_same(restore(tmp_path / "second"), {"w": list(w)})


@pytest.mark.slow
def test_the_command_ends_with_0_1_or_2(tmp_path):
    source = save(tmp_path / "source", {"w": np.zeros(3)})
    good = command("convert", source, tmp_path / "target")
    assert (good.returncode, good.stdout, good.stderr) == (0, f"{tmp_path / 'target'}: 1 array, 24 B\n", "")
    wrong = command("convert", source, tmp_path / "target")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == f"error: {tmp_path / 'target'} exists already; name a folder that does not.\n"
    usage = command("convert", source, tmp_path / "other", "--dtype", "int32")
    assert usage.returncode == 2
    assert usage.stderr.splitlines()[-1] == (
        "python -m reshard convert: error: argument --dtype: "
        "int32 is no floating-point dtype; other arrays are not cast"
    )
