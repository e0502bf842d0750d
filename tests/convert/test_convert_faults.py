"""Conversions that cannot be, fail or are killed: an error that says what and where, and never half a target."""

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from stored_states import ROOT, assert_same, command, fingerprint, restore, save

from mpmd.errors import ReshardError
from reshard.__main__ import main
from reshard.conversion.convert import convert, plan_conversion
from reshard.edits.tree_edits import unstack
from scheduler.base.waiting import CLEAR, waiting


def error_of(capsys, *arguments):
    assert main(["convert", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Large enough that a conversion with a small threshold takes seconds."""
    w = np.random.default_rng(0).random((64, 512, 512), np.float32)
    return save(tmp_path_factory.mktemp("large") / "source", {"layers": list(w)})


def start(source, target, *options):
    line = [sys.executable, "-m", "reshard", "convert", str(source), str(target), "--threshold", "32MiB", *options]
    return subprocess.Popen(line, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_data(target, process):
    """Until the first data files of the target are written."""
    for _ in range(600):
        if list(target.parent.glob(f"{target.name}.converting-*/ocdbt.process_0/d/*")):
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("nothing was written within 30 s")


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_target_and_what_it_leaves_says_what_it_is(tmp_path, large, capsys):
    target = tmp_path / "target"
    before = fingerprint(large)
    process = start(large, target, "--chunk", "layers/*=128,-1")
    wait_for_data(target, process)
    process.kill()
    process.communicate(timeout=30)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"target.converting-{process.pid}")
    assert ".orbax-checkpoint-tmp" in left.name
    assert main(["inspect", str(left)]) == 1
    assert capsys.readouterr().err == (f"error: {left} is what an unfinished save has left; it is not a checkpoint.\n")
    assert main(["convert", str(large), str(target)]) == 0
    assert capsys.readouterr().err == f"note: {left} is what a conversion that was killed has left; delete it\n"
    assert_same(restore(target), restore(large))
    assert fingerprint(large) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_stopped_conversion_leaves_nothing(tmp_path, large, number):
    process = start(large, tmp_path / "target", "--chunk", "layers/*=128,-1")
    wait_for_data(tmp_path / "target", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "", "error: stopped; nothing was kept.\n")
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_bar_and_a_file_whole_lines(tmp_path, monkeypatch, capsys):
    source = save(tmp_path / "source", {"w": np.zeros((4, 2))})
    seen = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("reshard.__main__.waiting", functools.partial(waiting, patience_s=0))
        target = tmp_path / f"target{len(seen)}"
        assert main(["convert", str(source), str(target), "--verify"]) == 0
        assert capsys.readouterr().out == f"{target}: 1 array, 64 B, verified\n"
        seen.append(stream.getvalue())
    assert seen[0].startswith(CLEAR) and seen[0].endswith(CLEAR)
    assert {step.split()[0] for step in seen[0].split(CLEAR) if step} <= {"copying", "reading"}
    assert {line.split()[0] for line in seen[1].splitlines()} <= {"copying", "reading"} and "\r" not in seen[1]


@contextmanager
def mounted(folder, options):
    """A small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(tmp_path, large):
    with mounted(tmp_path / "small", "size=16m") as small:
        run = command("convert", large, small / "target")
        assert (run.returncode, run.stdout) == (1, "")
        assert (
            run.stderr == f"error: {small} is full: up to 64.0 MiB are needed, 16.0 MiB were free. Nothing was kept.\n"
        )
        assert list(small.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.zeros(3)})
    with mounted(tmp_path / "small", "size=1m,ro") as small:
        assert error_of(capsys, source, small / "target") == (
            f"error: {small}, where target is to be made, cannot be written to.\n"
        )


def test_a_source_that_cannot_be_written_to_is_read(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as small:
        source = save(small / "source", {"layers": [np.zeros(3)] * 2})
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert main(["convert", str(source), str(tmp_path / "target"), "--stack", "layers"]) == 0
    assert_same(restore(tmp_path / "target"), {"layers": np.zeros((2, 3))})


@pytest.mark.parametrize("name", ["source", "source/inner", "link/inner"])
def test_a_target_within_the_source_is_refused(tmp_path, capsys, name):
    source = save(tmp_path / "source", {"w": np.zeros(3)})
    (tmp_path / "link").symlink_to(source)
    before = fingerprint(source)
    target = tmp_path / name
    expected = (
        f"error: {target} exists already; name a folder that does not.\n"
        if name == "source"
        else f"error: {target} is within the source, {source}, which is not touched; name another place.\n"
    )
    assert error_of(capsys, source, target) == expected
    assert fingerprint(source) == before


def test_a_target_whose_folder_does_not_exist_is_refused(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.zeros(3)})
    assert error_of(capsys, source, tmp_path / "no" / "target") == (
        f"error: {tmp_path / 'no'}, where target is to be made, is not a folder.\n"
    )


def test_a_damaged_chunk_is_named(tmp_path, capsys):
    source = save(tmp_path / "source", {"a": np.zeros(3), "w": np.ones((2, 4))}, use_ocdbt=False)
    (source / "w" / "0.0").write_bytes(b"\0" * 40)
    error = error_of(capsys, source, tmp_path / "target")
    assert error.startswith(f"error: {source}: w[0, 0] to [2, 4] cannot be read; the data is damaged or missing: ")
    (source / "w" / "0.0").unlink()
    error = error_of(capsys, source, tmp_path / "target")
    assert error.startswith(f"error: {source}: w[0, 0] to [2, 4] cannot be read; the data is damaged or missing: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_damaged_data_in_ocdbt_is_an_error(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.random.default_rng(0).random((64, 64))})
    for file in (source / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    assert main(["convert", str(source), str(tmp_path / "target")]) == 1
    assert str(source) in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_verifying_finds_what_the_storage_has_changed(tmp_path):
    source = save(tmp_path / "source", {"w": np.random.default_rng(0).random((64, 64)), "n": np.arange(3)})
    target = tmp_path / "target"

    def tamper(progress):
        if progress.doing == "reading" and progress.bytes_done == 0:
            (working,) = tmp_path.glob("target.converting-*")
            shutil.rmtree(working / "ocdbt.process_0")
            other = save(tmp_path / "other", {"w": np.zeros((64, 64)), "n": np.arange(3)})
            shutil.copytree(other / "ocdbt.process_0", working / "ocdbt.process_0")
            for file in (working / "d", working / "manifest.ocdbt"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
            shutil.copytree(other / "d", working / "d")
            shutil.copy(other / "manifest.ocdbt", working)

    with pytest.raises(ReshardError) as raised:
        convert(plan_conversion(source, target), verify=True, progress=tamper)
    (working,) = {word for word in str(raised.value).split(": ") if word.startswith(str(target))}
    assert str(raised.value) == (
        f"{working}: w[0, 0] to [64, 64] is not what was written; the storage cannot be trusted."
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "source"]


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path, capsys):
    source = save(tmp_path / "source", {"w": np.zeros(3)})
    conversion = plan_conversion(source, tmp_path / "target")
    (tmp_path / "target").mkdir()
    with pytest.raises(ReshardError) as raised:
        convert(conversion)
    assert str(raised.value) == f"{tmp_path / 'target'} exists already; name a folder that does not."
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source", "target"]


TREE = {
    "layers": [{"w": np.zeros((2, 3), np.float32)}, {"w": np.zeros((2, 3), np.float32)}],
    "stack": {"w": np.zeros((4, 2)), "b": np.zeros((5,))},
    "odd": [{"w": np.zeros(3)}, {"w": np.zeros(3, np.float32)}, {"w": np.zeros(4)}],
    "gaps": {"0": {"w": np.zeros(3)}, "3": {"w": np.zeros(3)}},
    "dates": {"0": np.zeros(3), "20251121": np.zeros(3)},
    "uneven": [{"w": np.zeros(3), "b": np.zeros(3)}, {"w": np.zeros(3)}],
    "n": 3,
    "texts": ["a", "b"],
}
ALL = """
    dates/0  float64[3]
    dates/20251121  float64[3]
    gaps/0/w  float64[3]
    gaps/3/w  float64[3]
    layers/0/w  float32[2,3]
    layers/1/w  float32[2,3]
    n  int64[]
    odd/0/w  float64[3]
    and 9 more
"""
ERRORS = {
    "--unstack block": f"--unstack block matches nothing.\n  The checkpoint has{ALL}",
    "--stack */block": f"--stack */block matches nothing.\n  The checkpoint has{ALL}",
    "--only param": f"--only param matches no leaf.\n  The checkpoint has{ALL}",
    "--drop x/**": f"--drop x/** matches no leaf.\n  The checkpoint has{ALL}",
    "--rename x=y": f"--rename x matches no leaf.\n  The checkpoint has{ALL}",
    "--dtype n=bfloat16": f"--dtype n matches no floating-point array.\n  The checkpoint has{ALL}",
    "--chunk n=1": f"--chunk n matches no array with axes.\n  The checkpoint has{ALL}",
    "--drop **": "nothing is left: the changes drop the whole tree.\n",
    "--unstack stack": """\
--unstack stack: the arrays of stack must have one number of layers on axis 0, but have [4, 5].
    stack/b  float64[5]
    stack/w  float64[4,2]
""",
    "--unstack n": """--unstack n: n cannot be cut into layers: it has no axis.
    n  int64[]
""",
    "--stack odd": """--stack odd: layers differ in shape or dtype.
  expected, from odd/0/w: float64[3]
  found, at odd/1/w: float32[3]
  found, at odd/2/w: float64[4]
""",
    "--stack gaps": """--stack gaps: the layers of gaps have gaps.
  expected: 0 to 3
  found: 0, 3; missing: 1, 2
""",
    "--stack dates": """--stack dates: the layers of dates have gaps.
  expected: 0 to 20251121
  found: 0, 20251121; missing: 1, 2, 3, 4, 5, 6, 7, 8 …
""",
    "--stack uneven": "--stack uneven: the layers of uneven differ: uneven/0/b exists, but not uneven/1/b.\n",
    "--stack stack": "--stack stack: below stack all entries must be layer numbers 0, 1, 2 …, but there is stack/b.\n",
    "--stack texts": "--stack texts: texts/0 is text, which cannot be stacked.\n",
    "--chunk layers/*/w=1": "--chunk layers/*/w=1: 1 sizes for 2 axes of layers/0/w  float32[2,3].\n",
    "--rename layers/(.*)/w=same": """two leaves would be same:
    same  float32[2,3]  from layers/0/w
    same  float32[2,3]  from layers/1/w
""",
    "--rename n=layers": """layers would be both a leaf and a node:
    layers  int64[]  from n
""",
    "--rename n=a//b": "--rename n=a//b: n would have a name without letters.\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tree") / "source", TREE)


@pytest.mark.parametrize("option", ERRORS)
def test_a_change_that_does_not_fit_the_tree_is_refused(tmp_path, capsys, tree, option):
    assert error_of(capsys, tree, tmp_path / "target", *option.split(" ", 1)) == f"error: {ERRORS[option]}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--dtype=float99", "argument --dtype: 'float99' is no dtype; write it like bfloat16 or 'opt/**=float32'"),
        ("--chunk=w=0", "argument --chunk: 'w=0' is not written like 'params/layers/w=1,-1,-1' (-1: the whole axis)"),
        ("--rename=abc", "argument --rename: 'abc' is not written like 'params/(.*)=model/\\1'"),
        ("--rename=(a=b", "argument --rename: --rename (a=b: missing ), unterminated subpattern at position 0."),
        ("--rename=a=\\2", "argument --rename: --rename a=\\2: invalid group reference 2 at position 1."),
        ("--only=a//b", "argument --only: pattern 'a//b' has an empty part; write it like 'params/layers/**'."),
        ("--only={layer}/{layer}",
         "argument --only: pattern '{layer}/{layer}' has {layer} more than once; write * for any other number."),
        ("--threshold=lots", "argument --threshold: 'lots' is no number of bytes; write it like 64MiB."),
        ("--unstack=w=tuple",
         "argument --unstack: 'w=tuple' is not written like '**/layers', '**/layers=list' or '**/layers=dict'"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_from_wrong_checkpoints(capsys, option, said):
    with pytest.raises(SystemExit) as ended:
        main(["convert", "source", "target", option])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m reshard convert: error: {said}"


def test_text_that_is_missing_is_an_error(tmp_path, capsys, tree):
    source = tmp_path / "source"
    shutil.copytree(tree, source)
    strings = source / "_strings.json"
    document = json.loads(strings.read_text())
    del document["texts.1"]
    strings.write_text(json.dumps(document))
    assert error_of(capsys, source, tmp_path / "target") == (
        f"error: {strings}: the text of texts/1 cannot be read: 'texts.1'\n"
    )


def test_layers_are_cut_in_memory_alone_until_a_conversion_is_carried_out(tmp_path):
    source = save(tmp_path / "source", {"w": np.zeros((4, 2))})
    conversion = plan_conversion(source, Path(tmp_path / "target"), [unstack("w")])
    assert [entry.shape for entry in conversion.tree.leaves] == [(2,)] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
