"""Files that somebody has damaged on purpose end in one clear line, soon and without much memory."""

import json
import os
import shutil
import signal

import numpy as np
import orbax.checkpoint as ocp
import pytest

from reshard.__main__ import main

LIMIT_S = 60  # "never", not "late"
DEEP = 100_000
LAUGHS = "a: &a [x, x, x, x]\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} [{', '.join([f'*{chr(i)}'] * 4)}]\n" for i in range(ord("a"), ord("l"))
)


@pytest.fixture(autouse=True)
def _time_limit():
    def stop(*_):
        raise AssertionError(f"not within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint with one folder an array, whose headers can be edited."""
    folder = tmp_path_factory.mktemp("hostile") / "state"
    tree = {"layers": [{"w": np.ones((8, 8), np.float32)} for _ in range(2)], "name": "text"}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(folder, tree)
    return folder


def said(capsys, *words) -> str:
    """The one line on stderr."""
    assert main([str(word) for word in words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")
    return err.removeprefix("error: ")


LAYOUTS = {
    "deep.json": ("[" * DEEP, "is neither YAML nor JSON: it is nested too deeply."),
    "deep.yaml": ("[" * 10_000, "is neither YAML nor JSON: it is nested too deeply."),
    "laughs.yaml": (LAUGHS + "mesh: *l\n", "is not a layout: written out it has more than 100000 entries."),
    "cycle.yaml": ("mesh: &m {axes: [*m]}", "is not a layout: written out it has more than 100000 entries."),
    "large.yaml": ("#" * (1 << 20) + "\n", "cannot be read: it holds more than 1 MiB."),
    "pipe.yaml": (None, "cannot be read: it is a pipe or a device, not a file."),
}
MESHES = {
    "devices": "{stage: 1099511627776, data: 2}",
    "axes": "{" + ", ".join(f"a{i}: 1" for i in range(100)) + "}",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hostile_layout_is_one_clear_line(tmp_path, capsys, name):
    text, message = LAYOUTS[name]
    file = tmp_path / name
    os.mkfifo(file) if text is None else file.write_text(text)
    assert said(capsys, "plan", tmp_path, "--to", file) == f"{file} {message}\n"


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_that_nobody_has_is_refused(tmp_path, capsys, name):
    file = tmp_path / "layout.yaml"
    file.write_text(f"mesh: {{axes: {MESHES[name]}}}")
    message = "its mesh has more than 32 axes or 131072 devices, and cannot be planned for."
    assert said(capsys, "plan", tmp_path, "--to", file) == f"{file}: {message}\n"


def test_faults_of_a_layout_are_listed_shortly(tmp_path, capsys):
    file = tmp_path / "layout.yaml"
    rules = [{"path": "**", "spec": [None] * 1000}] + [{"path": "x" * 5000, "groups": "by_layer"}] * 30
    file.write_text(json.dumps({"mesh": {"axes": {"s": 2}, "device_memory": "9" * 400}, "rules": rules}))
    lines = said(capsys, "plan", tmp_path, "--to", file).splitlines()
    assert lines[1] == f"  mesh.device_memory: '{'9' * 400}' is more than any memory has."
    assert lines[2] == "  rules[0].spec has 1000 entries, more than an array has axes."
    assert lines[-1] == "  and 12 faults more." and len(lines) == 22 and max(map(len, lines)) < 510


def copied(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "copy")


def test_hostile_metadata_is_one_clear_line(plain, tmp_path, capsys):
    folder = copied(plain, tmp_path)
    file = folder / "_METADATA"
    metadata = json.loads(file.read_text())
    entry = next(iter(metadata["tree_metadata"].values()))
    begin = f"{file} is not the metadata of an Orbax checkpoint: ValueError: "
    for name, shown in (("a\nb\x1b[31m", r"'a\nb\x1b[31m'"), ("\ud800", r"'\ud800'"), ("k" * 5000, repr("k" * 80))):
        entry["key_metadata"] = [{"key": name, "key_type": 2}]
        file.write_text(json.dumps({"tree_metadata": {"x": entry}}))
        assert said(capsys, "inspect", folder) == (
            f"{begin}{shown} is no name of a leaf: it is too long, or has characters for no one to see.\n"
        )
    file.write_text('{"a":' * DEEP)
    assert said(capsys, "inspect", folder) == f"{begin}it is nested too deeply.\n"


def test_a_pipe_in_a_checkpoint_is_not_waited_for(plain, tmp_path, capsys):
    folder = copied(plain, tmp_path)
    data = folder / "layers.0.w" / "0.0"
    data.unlink()
    os.mkfifo(data)
    assert said(capsys, "inspect", folder) == f"{data} is a pipe or a device, not a file of a checkpoint.\n"


def test_sizes_that_no_machine_has_are_refused_before_memory_is_asked_for(plain, tmp_path, capsys):
    folder = copied(plain, tmp_path)
    header = folder / "layers.0.w" / ".zarray"
    before = json.loads(header.read_text())
    header.write_text(json.dumps(before | {"shape": [2**40, 8], "chunks": [2**40, 8]}))
    assert said(capsys, "convert", folder, tmp_path / "target").startswith(
        "layers/0/w [1099511627776, 8] has chunks of 32.0 TiB, and this machine has "
    )
    header.write_text(json.dumps(before | {"shape": [2**40, 8]}))
    assert said(capsys, "convert", folder, tmp_path / "target") == (
        "layers/0/w [1099511627776, 8] has 137438953472 chunks of [8, 8]; more than 4194304 in all cannot be copied at"
        " once. Pick some of the arrays with --only.\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
