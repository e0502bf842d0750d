"""What each process of a layout would read: bytes needed, bytes of whole chunks, and memory."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from stored_states import command, save

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.__main__ import main
from reshard.conversion.layout_file import parse_layout, read_layout
from reshard.conversion.read_report import plan_reading
from reshard.storage import finder
from reshard.storage.paths import Key
from reshard.storage.stored import Checkpoint, Leaf

MESH = {"axes": {"stage": 4, "data": 2, "model": 2}, "mpmd_axis": "stage", "devices_per_process": 4}


def checkpoint_of(**leaves):
    """A checkpoint that exists on paper: name=(shape, chunk), in float32; __ is a slash."""

    def leaf(name, shape, chunk):
        path = tuple(Key(part) for part in name.split("__"))
        return Leaf(path, "jax.Array", shape, np.dtype("float32"), chunk)

    return Checkpoint(None, None, None, True, "zarr", False, tuple(leaf(n, *v) for n, v in leaves.items()))


def plan(document, **leaves):
    return plan_reading(checkpoint_of(**leaves), parse_layout(document))


def needs_and_reads(made):
    return [(p.needed_bytes, p.read_bytes) for p in made.processes]


def test_a_stacked_array_is_read_by_stages_in_its_chunks():
    document = {"mesh": MESH, "rules": [{"path": "w", "stacked_axis": 0, "spec": [None, None, "model"]}]}
    shape = (8, 16, 32)
    whole = 4 * 8 * 16 * 32
    one_layer_a_chunk = plan(document, w=(shape, (1, 16, 32)))
    assert needs_and_reads(one_layer_a_chunk) == [(whole // 4, whole // 4)] * 4
    one_chunk = plan(document, w=(shape, shape))
    assert needs_and_reads(one_chunk) == [(whole // 4, whole)] * 4
    columns = plan(document, w=(shape, (8, 16, 8)))
    assert needs_and_reads(columns) == [(whole // 4, whole)] * 4
    of_two = {"mesh": MESH, "rules": [{**document["rules"][0], "groups": [2, 1]}]}
    assert needs_and_reads(plan(of_two, w=(shape, (1, 16, 32)))) == [(0, 0), *[(whole // 2, whole // 2)] * 2, (0, 0)]
    assert [p.device_bytes for p in one_chunk.processes] == [
        dict.fromkeys(range(4 * i, 4 * i + 4), whole // 8) for i in range(4)
    ]


def test_processes_that_share_a_stage_read_just_their_parts():
    mesh = MESH | {"devices_per_process": 1}
    document = {"mesh": mesh, "rules": [{"path": "w", "groups": [1], "spec": ["model", "data"]}]}
    made = plan(document, w=((8, 8), (4, 4)))
    assert needs_and_reads(made) == [(0, 0)] * 4 + [(64, 64)] * 4 + [(0, 0)] * 8


def test_layers_that_are_entries_go_to_the_group_of_their_number():
    leaves = {f"layers__{i}__w": ((4, 4), (4, 4)) for i in range(6)}
    rule = {"path": "layers/{layer}/**", "groups": "by_layer", "layers_per_group": [3, 1, 0, 2]}
    assert needs_and_reads(plan({"mesh": MESH, "rules": [rule]}, **leaves)) == [
        (192, 192), (64, 64), (0, 0), (128, 128),
    ]  # fmt: skip


def test_the_chunks_that_are_proposed_fit_uneven_groups_too():
    rule = {"path": "w", "stacked_axis": 0, "layers_per_group": [4, 6, 2, 4]}
    made = plan({"mesh": MESH, "rules": [rule]}, w=((16, 4), (16, 4)))
    assert made.leaves[0].fitting_chunk == (2, 4)
    assert needs_and_reads(plan({"mesh": MESH, "rules": [rule]}, w=((16, 4), (2, 4)))) == [
        (n, n) for n in (64, 96, 32, 64)
    ]


def test_layers_may_be_split_in_any_order_and_by_the_name_of_the_axis():
    array, spec = {"w": ((16, 4), (2, 4))}, [None, "model"]
    for one, other in (
        ({"spec": ["stage", "model"]}, {"stacked_axis": 0, "spec": spec}),
        ({"split": {0: [[0, 4]], "1": [[4, 10]], 2: [[10, 12]], 3: [[12, 16]]}, "spec": spec},
         {"stacked_axis": 0, "layers_per_group": [4, 6, 2, 4], "spec": spec}),
    ):  # fmt: skip
        made = [plan({"mesh": MESH, "rules": [{"path": "w"} | rule]}, **array) for rule in (one, other)]
        assert needs_and_reads(made[0]) == needs_and_reads(made[1])
    folded = {"path": "w", "split": {g: [[2 * g, 2 * g + 2], [14 - 2 * g, 16 - 2 * g]] for g in range(4)}}
    assert needs_and_reads(plan({"mesh": MESH, "rules": [folded]}, **array)) == [(64, 64)] * 4
    with pytest.raises(ReshardError, match=r"w \[8, 4\]: rule 'w': axis 0 has 8 rows, but split covers 16."):
        plan({"mesh": MESH, "rules": [folded]}, w=((8, 4), (2, 4)))


def test_a_layout_without_groups_is_one_of_all_devices():
    document = {"mesh": {"axes": {"x": 8}, "devices_per_process": 2}, "rules": [{"path": "**", "spec": ["x"]}]}
    assert needs_and_reads(plan(document, w=((16, 3), (16, 3)))) == [(48, 192)] * 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_are_those_of_the_elements_and_chunks_counted_one_by_one(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([2, 4, 6, 12]), min_size=2, max_size=3)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    per_process = data.draw(st.sampled_from([1, 2, 4, 8]))
    spec = data.draw(st.permutations(["data", "model", None]))[: len(shape)]
    mesh = MESH | {"axes": {"stage": 2, "data": 2, "model": 2}, "devices_per_process": per_process}
    layout = parse_layout({"mesh": mesh, "rules": [{"path": "w", "spec": spec}]})
    (leaf,) = checkpoint_of(w=(shape, chunk)).leaves
    made = plan_reading(checkpoint_of(w=(shape, chunk)), layout)
    for process in made.processes:
        wanted, touched = np.zeros(shape, bool), np.zeros(shape, bool)
        for group in layout.groups:
            index_map = NamedSharding(group, PartitionSpec(*spec)).devices_indices_map(shape)
            for device, slices in index_map.items():
                if device.process_index == process.process:
                    wanted[slices] = True
        for index in np.argwhere(wanted):
            touched[tuple(slice(i // c * c, i // c * c + c) for i, c in zip(index, chunk))] = True  # noqa: B905
        assert process.needed_bytes == 4 * wanted.sum()
        assert process.read_bytes == 4 * touched.sum()
    fitting = plan_reading(checkpoint_of(w=(shape, made.leaves[0].fitting_chunk)), layout)
    assert all(reads == needs for needs, reads in needs_and_reads(fitting))
    assert leaf.num_chunks == np.prod([-(-n // c) for n, c in zip(shape, chunk, strict=True)])


def test_a_plan_for_a_thousand_devices_takes_no_devices():
    axes = {"stage": 16, "data": 8, "model": 8}
    mesh = {"axes": axes, "mpmd_axis": "stage", "devices_per_process": 8}
    document = {"mesh": mesh, "rules": [{"path": "**", "stacked_axis": 0, "spec": [None, "data", "model"]}]}
    made = plan(document, **{f"w{i}": ((64, 4096, 4096), (1, 4096, 4096)) for i in range(20)})
    needed = 20 * 4 * 64 * 4096 * 4096 // 128
    assert {n for n, _ in needs_and_reads(made)} == {needed}
    assert {r for _, r in needs_and_reads(made)} == {8 * needed}


def test_the_plan_says_why_more_is_read_and_what_helps(tmp_path, capsys):
    w = np.zeros((8, 16, 32), np.float32)
    source = save(tmp_path / "source", {"layers": {"w": w}, "head": np.zeros((32, 8), np.float32)})
    layout = tmp_path / "layout.yaml"
    layout.write_text("""
mesh:
  axes: {stage: 4, model: 2}
  mpmd_axis: stage
  devices_per_process: 2
rules:
  - path: "**/w"
    stacked_axis: 0
  - path: head
    groups: [3]
    spec: [null, model]
""")
    assert main(["plan", str(source), "--to", str(layout)]) == 0
    assert (
        capsys.readouterr().out
        == """\
mesh stage=4, model=2: 8 devices, 4 processes, 4 groups along stage
process  devices     needs     reads         device memory  largest device
      0      0-1   4.0 KiB  16.0 KiB  4.00x        8.0 KiB         4.0 KiB
      1      2-3   4.0 KiB  16.0 KiB  4.00x        8.0 KiB         4.0 KiB
      2      4-5   4.0 KiB  16.0 KiB  4.00x        8.0 KiB         4.0 KiB
      3      6-7   5.0 KiB  17.0 KiB  3.40x        9.0 KiB         4.5 KiB
    all        8  17.0 KiB  65.0 KiB  3.82x       33.0 KiB
Chunks are read whole:
  layers/w: 64.0 KiB for 16.0 KiB: its chunks are [8, 16, 32], its parts multiples of [2, 16, 32]; \
convert --chunk 'layers/w=2,16,32' avoids it
"""
    )
    assert main(["convert", str(source), str(tmp_path / "target"), "--chunk", "layers/w=2,16,32"]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "target"), "--to", str(layout), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(p["needed_bytes"], p["read_bytes"]) for p in document["processes"]] == [(4096, 4096)] * 3 + [(5120, 5120)]
    assert document["leaves"][1] == {
        "path": "layers/w", "needed_bytes": 16384, "read_bytes": 16384, "processes": 4, "chunk": [2, 16, 32],
        "fitting_chunk": [2, 16, 32],
    }  # fmt: skip


@pytest.mark.slow
def test_a_device_that_is_too_small_is_an_error(tmp_path):
    source = save(tmp_path / "source", {"w": np.zeros((8, 8), np.float32)})
    layout = tmp_path / "layout.json"
    mesh = {"axes": {"x": 2}, "device_memory": "200B"}
    layout.write_text(json.dumps({"mesh": mesh, "rules": [{"path": "w"}]}))
    run = command("plan", source, "--to", layout)
    assert run.returncode == 1
    assert run.stdout.startswith("mesh x=2: 2 devices, 1 process\n")
    assert run.stderr == "error: 2 of 2 devices cannot hold their part: up to 256 B of 200 B.\n"


def test_what_is_read_is_what_jax_would_want_of_a_real_mesh(tmp_path):
    """The same arithmetic as for devices that exist."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    w = jax.device_put(np.zeros((8, 8), np.float32), sharding)
    checkpoint = finder.find(save(tmp_path / "source", {"w": w}))
    assert checkpoint.leaves[0].chunk == (2, 4)
    layout = parse_layout(
        {"mesh": {"axes": {"x": 4, "y": 2}, "devices_per_process": 1}, "rules": [{"path": "w", "spec": ["x", "y"]}]}
    )
    assert needs_and_reads(plan_reading(checkpoint, layout)) == [(32, 32)] * 8
    assert checkpoint.leaves[0].cells(Box((1, 1), (3, 2))) == Box((0, 0), (4, 4))


def test_leaves_that_no_rule_fits_are_listed():
    document = {
        "mesh": MESH,
        "rules": [
            {"path": "a", "spec": [None, None, "model"]},
            {"path": "b", "spec": ["model"]},
            {"path": "c", "stacked_axis": 0},
            {"path": "d", "stacked_axis": 2},
            {"path": "e/{layer}", "groups": "by_layer", "layers_per_group": [1, 0, 0, 0]},
        ],
    }
    leaves = dict.fromkeys(("a", "c", "d", "e__0", "e__1", "x"), ((6, 5), (6, 5))) | {"b": ((3,), (3,))}
    with pytest.raises(ReshardError) as raised:
        plan(document, **leaves)
    said = str(raised.value).splitlines()
    assert said[0] == "the layout does not fit the checkpoint:"
    assert said[1] == "  a [6, 5]: rule 'a': spec P(None, None, 'model') has 3 entries, but the array has 2 axes."
    assert said[2:7] == [
        "  c [6, 5]: 6 layers do not divide evenly by 4 groups; give layers_per_group.",
        "  d [6, 5]: its rule 'd' has stacked_axis 2, which the array does not have.",
        "  e/0 [6, 5]: layers_per_group [1, 0, 0, 0] are 1 layers, but there are 2.",
        "  e/1 [6, 5]: layers_per_group [1, 0, 0, 0] are 1 layers, but there are 2.",
        "  x [6, 5]: no rule's path matches it.",
    ]
    assert said[7].startswith("  b [3]: rule 'b': ")


def test_every_fault_of_a_layout_file_is_told(tmp_path):
    file = tmp_path / "layout.yaml"
    file.write_text("""
mesh: {axes: {stage: 2, model: 2}, mpmd_axis: stages, devices_per_process: 0, device_memory: lots, color: red}
rules:
  - {path: w, spec: [data]}
  - {path: w, spec: [model, [model, stage]]}
  - {path: w, groups: by_layer, stacked_axis: -1}
  - {path: "", groups: [5]}
  - {path: w, layers_per_group: [1, 2, 3]}
  - {path: w, spec: model}
  - {path: w, spec: [[[model]]]}
  - {path: w, spec: [{model: 1}, [null, model]]}
  - {path: "{layer}/{layer}"}
  - w
""")
    with pytest.raises(ReshardError) as raised:
        read_layout(file)
    assert (
        str(raised.value)
        == f"""\
{file} is not a layout:
  mesh has color; known are axes, device_memory, devices_per_process, mpmd_axis.
  mesh.mpmd_axis is 'stages', which is not one of the axes stage, model.
  mesh.devices_per_process is 0, not a positive number.
  mesh.device_memory: 'lots' is no number of bytes; write it like 64MiB.
  rules[0].spec names data; the mesh has stage, model.
  rules[1].spec names model twice.
  rules[2].groups is by_layer, but its path 'w' has no {{layer}}.
  rules[2].stacked_axis is -1, not an array axis.
  rules[2] has both stacked_axis and by_layer; layers are either stacked or entries of their own.
  rules[3].path is '', but must be a pattern like '**/layers/{{layer}}/**'.
  rules[3].groups is [5], but must be all, by_layer, or a list of 0 to 0.
  rules[4].layers_per_group is [1, 2, 3], but must be 1 numbers, one a group.
  rules[5].spec is 'model', but must be a list with a mesh axis, a list of them, or null per array axis.
  rules[6].spec is [[['model']]], but must be a list with a mesh axis, a list of them, or null per array axis.
  rules[7].spec is [{{'model': 1}}, [None, 'model']], but must be a list with a mesh axis, a list of them, or null \
per array axis.
  rules[8].path is '{{layer}}/{{layer}}', but must be a pattern like '**/layers/{{layer}}/**'.
  rules[9] is 'w', but must have the entries groups, layers_per_group, path, spec, split, \
stacked_axis.
  rules[9].path is None, but must be a pattern like '**/layers/{{layer}}/**'."""
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[1", "is neither YAML nor JSON: "),
        (b"\xff\xfe", "is neither YAML nor JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"mesh: {axes: {4: 2}, mpmd_axis: [x]}", "is not a layout:\n  mesh.axes is {4: 2}, but must name the mesh"),
        (b"mesh: {axes: {x: 2}, mpmd_axis: [x]}", "is not a layout:\n  mesh.mpmd_axis is ['x'], which is not one of"),
        (b"", "is not a layout:\n  the layout is None, but must have the entries mesh, rules.\n"),
        (b"mesh: {axes: {x: 2}, mpmd_axis: x}\nrules: [{path: w, spec: [x], stacked_axis: 1}]",
         "is not a layout:\n  rules[0].stacked_axis is 1, but its spec names x at axis 0"),
        (b"mesh: {axes: {x: 2}, mpmd_axis: x}\nrules: [{path: w, split: {0: [[0, 2]], 1: [[3, 4]]}}]",
         "is not a layout:\n  rules[0].split: no group has the rows 2:3"),
        (b"mesh: {axes: {x: 2}, mpmd_axis: x}\nrules: [{path: w, split: {0: [[0, 2]], 2: [2, 4]}}]",
         "is not a layout:\n  rules[0].split: group 2: [2, 4] is not a sequence of pairs of integers"),
        (b"mesh: {axes: {x: 2}, mpmd_axis: x}\nrules: [{path: w, split: [2, 4]}]",
         "is not a layout:\n  rules[0].split is [2, 4], but must be {group: [[start, stop], ...]}"),
        (b"mesh: {axes: {x: 2}, mpmd_axis: x}\nrules: [{path: '{layer}', split: {0: [[0, 2]]}, groups: by_layer}]",
         "is not a layout:\n  rules[0] has split, which says itself which layers each group has, beside others that"),
    ],
)  # fmt: skip
def test_a_layout_file_that_is_none_is_told(tmp_path, capsys, text, said):
    file = tmp_path / "layout.yaml"
    file.write_bytes(text)
    assert main(["plan", str(tmp_path), "--to", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file} {said}")


def test_a_layout_file_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["plan", str(tmp_path), "--to", str(tmp_path / "no.yaml")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'no.yaml'} cannot be read: No such file or directory.\n"
