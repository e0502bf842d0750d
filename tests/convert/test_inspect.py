"""What `python -m reshard inspect` says of a checkpoint, and of what is none."""

import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from stored_states import ROOT, command, fingerprint, save, stacked_params, state_of

from reshard.__main__ import main

GOLDEN = ROOT / "tests" / "golden" / "inspect"


def inspected(capsys, *arguments):
    status = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def assert_golden(text, name, folder):
    """Compares with a file; the bytes on disk depend on what Orbax writes beside the data."""
    text = re.sub(r"[\d.]+ [KMG]?i?B on disk", "… on disk", text).replace(str(folder), "FOLDER")
    assert text == (GOLDEN / f"{name}.txt").read_text()


def test_a_training_state_is_printed_as_a_table(tmp_path, capsys):
    mesh = jax.make_mesh((2,), ("x",))
    params = stacked_params()
    params["layers"]["w"] = jax.device_put(params["layers"]["w"], NamedSharding(mesh, PartitionSpec("x")))
    source = save(tmp_path / "state", state_of(params) | {"name": "a model"})
    before = fingerprint(source)
    status, out, _ = inspected(capsys, source)
    assert status == 0
    assert_golden(out, "state", tmp_path)
    assert fingerprint(source) == before


@pytest.mark.parametrize(
    ("name", "options"),
    [("zarr3", {"use_zarr3": True}), ("folders", {"use_ocdbt": False})],
)
def test_each_format_is_named(tmp_path, capsys, name, options):
    source = save(tmp_path / name, {"w": np.zeros((2, 3)), "n": 3}, **options)
    status, out, _ = inspected(capsys, source)
    assert status == 0
    assert_golden(out, name, tmp_path)


def managed(folder, steps=(3, 12)):
    with ocp.CheckpointManager(folder) as manager:
        for step in steps:
            tree = ocp.args.StandardSave({"w": np.full(step, 1.0)})
            manager.save(step, args=ocp.args.Composite(state=tree, data=ocp.args.JsonSave({"position": step})))


def test_the_latest_step_of_a_manager_is_shown_or_the_one_asked_for(tmp_path, capsys):
    managed(tmp_path / "run")
    assert_golden(inspected(capsys, tmp_path / "run")[1], "step", tmp_path)
    for arguments in (["--step", "3"], ["--step", "3", "--item", "state"]):
        assert inspected(capsys, tmp_path / "run", *arguments)[1].splitlines()[2].split() == [
            "w", "float64", "[3]", "24", "B", "1",
        ]  # fmt: skip
    assert "float64  [12]" in inspected(capsys, tmp_path / "run" / "12")[1]


def test_a_step_that_a_manager_saved_without_items_is_shown(tmp_path, capsys):
    with ocp.CheckpointManager(tmp_path / "run", options=ocp.CheckpointManagerOptions(step_prefix="at")) as manager:
        manager.save(5, args=ocp.args.StandardSave({"w": np.zeros(4)}))
    status, out, _ = inspected(capsys, tmp_path / "run")
    assert status == 0
    assert out.splitlines()[0] == f"{tmp_path / 'run' / 'at_5' / 'default'}, step 5, item default: zarr in OCDBT"


def test_the_document_says_the_same(tmp_path, capsys):
    source = save(tmp_path / "source", {"a": [np.zeros((4, 2), np.float32)], "e": {}, "n": 3})
    status, out, _ = inspected(capsys, source, "--json")
    document = json.loads(out)
    stored = document.pop("stored_bytes")
    assert stored == sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    array = {"shape": [4, 2], "bytes": 32, "chunk": [4, 2], "chunk_bytes": 32, "chunks": 1, "dtype": "float32"}
    number = {"shape": [], "bytes": 8, "chunk": [], "chunk_bytes": 8, "chunks": 1, "dtype": "int64"}
    assert status == 0
    assert document == {
        "folder": str(source),
        "step": None,
        "item": None,
        "other_items": [],
        "driver": "zarr",
        "ocdbt": True,
        "arrays": 2,
        "bytes": 40,
        "leaves": [
            {"path": "a/0", "keys": ["a", 0], "type": "np.ndarray"} | array,
            {"path": "e", "keys": ["e"], "type": "Dict"},
            {"path": "n", "keys": ["n"], "type": "scalar"} | number,
        ],
    }


def error_of(capsys, *arguments):
    status, out, err = inspected(capsys, *arguments)
    assert (status, out) == (1, "")
    return err


def test_what_is_no_checkpoint_is_named(tmp_path, capsys):
    assert error_of(capsys, tmp_path / "no") == f"error: there is no checkpoint at {tmp_path / 'no'}.\n"
    (tmp_path / "file").write_text("hello")
    assert error_of(capsys, tmp_path / "file") == f"error: {tmp_path / 'file'} is a file; a checkpoint is a folder.\n"
    assert error_of(capsys, tmp_path) == (
        f"error: {tmp_path} is not a checkpoint: it has no _METADATA, no items that have one, and no steps.\n"
        "  It holds file.\n"
    )


def test_several_checkpoints_in_a_folder_are_not_taken_for_one(tmp_path, capsys):
    for name in ("a", "b"):
        save(tmp_path / name, {"w": np.zeros(2)})
    assert error_of(capsys, tmp_path) == (
        f"error: {tmp_path} is not a checkpoint: it has checkpoints in it, a, b; give the path of one of them.\n"
    )


def test_an_unfinished_checkpoint_is_never_taken_for_one(tmp_path, capsys):
    managed(tmp_path / "run")
    unfinished = tmp_path / "run" / "20.orbax-checkpoint-tmp"
    (tmp_path / "run" / "12").rename(unfinished)
    assert inspected(capsys, tmp_path / "run", "--json")[1].startswith('{"folder": ' + f'"{tmp_path / "run" / "3"}')
    assert error_of(capsys, unfinished) == (
        f"error: {unfinished} is what an unfinished save has left; it is not a checkpoint.\n"
    )
    source = save(tmp_path / "source", {"w": np.zeros(2)})
    (source / "manifest.ocdbt").unlink()
    assert error_of(capsys, source) == (
        f"error: {source} has metadata but no data: manifest.ocdbt is missing, so it is unfinished.\n"
    )


def test_a_step_or_item_that_is_not_there_is_answered_with_those_that_are(tmp_path, capsys):
    managed(tmp_path / "run")
    assert error_of(capsys, tmp_path / "run", "--step", "5") == (
        f"error: {tmp_path / 'run'} has no step 5; it has 3, 12.\n"
    )
    assert error_of(capsys, tmp_path / "run" / "3", "--item", "opt") == (
        f"error: {tmp_path / 'run' / '3'} has no item 'opt'; it has state.\n"
    )
    assert error_of(capsys, tmp_path / "run" / "3", "--step", "3") == (
        f"error: {tmp_path / 'run' / '3'} is one checkpoint, not a manager's folder: it has no step 3.\n"
    )
    source = save(tmp_path / "source", {"w": np.zeros(2)})
    assert error_of(capsys, source, "--item", "opt") == (
        f"error: {source} is one tree: it has no items, so not 'opt' either.\n"
    )


def test_two_trees_in_a_step_need_a_choice(tmp_path, capsys):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        args = {name: ocp.args.StandardSave({"w": np.zeros(2)}) for name in ("params", "opt")}
        manager.save(1, args=ocp.args.Composite(**args))
    assert error_of(capsys, tmp_path / "run") == (
        f"error: {tmp_path / 'run' / '1'} has 2 trees; say which with --item: opt, params.\n"
    )
    assert inspected(capsys, tmp_path / "run", "--item", "opt")[0] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "KeyError: 'tree_metadata'"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        (
            '{"tree_metadata": {"x": {"key_metadata": [], "value_metadata": {"value_type": "secret"}}}}',
            "ValueError: . is of type 'secret', which is no array, number, text or empty container",
        ),
    ],
)
def test_metadata_that_cannot_be_read_is_named(tmp_path, capsys, text, why):
    source = save(tmp_path / "source", {"w": np.zeros(2)})
    (source / "_METADATA").write_text(text)
    file = source / "_METADATA"
    assert error_of(capsys, source) == f"error: {file} is not the metadata of an Orbax checkpoint: {why}.\n"


def test_an_array_that_is_missing_is_named(tmp_path, capsys):
    source = save(tmp_path / "source", {"v": np.zeros(2), "w": np.zeros(2)}, use_ocdbt=False)
    (source / "w" / ".zarray").unlink()
    error = error_of(capsys, source)
    assert error.startswith(f"error: {source}: the array w cannot be opened: ")


@pytest.mark.slow
def test_the_command_needs_no_devices_and_answers_help(tmp_path):
    source = save(tmp_path / "source", {"w": np.zeros(2)})
    run = command("inspect", source)
    assert (run.returncode, run.stderr) == (0, "")
    assert command("--help").stdout.count("python -m reshard") >= 6
    for name in ("inspect", "plan", "convert"):
        assert f"examples:\n  python -m reshard {name} " in command(name, "--help").stdout
    assert command("inspect").returncode == 2
