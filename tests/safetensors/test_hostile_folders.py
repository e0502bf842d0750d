"""Hugging Face folders that are damaged or made to harm end in one clear line; half an export looks like none."""

import json
import os
import resource
import shutil
import time

import numpy as np
import pytest
from folders import CONFIG, abstract, expected, llama, random, write_folder

import reshard
from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.__main__ import main
from reshard.checkpoint import TensorFormat
from reshard.storage import tensor_files

FIRST, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"
DEEP = 100_000


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", llama(1), 2)


def said(capsys, *words) -> str:
    """The one line on stderr, and soon."""
    start = time.monotonic()
    assert main([str(word) for word in words]) == 1
    assert time.monotonic() - start < 10
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").strip()


def with_header(folder, change) -> None:
    """Writes the first file again with another header."""
    file = folder / FIRST
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def set_entry(**fields):
    def change(header):
        header["lm_head.weight"] |= fields

    return change


HEADERS = {
    "overlap": (lambda h: h["model.embed_tokens.weight"].update(h["lm_head.weight"]), "overlap with others"),
    "hole": (lambda h: h.pop("lm_head.weight") and None, "do not follow others"),
    "dtype": (set_entry(dtype="F7"), "has the dtype 'F7'; known are BOOL"),
    "negative": (set_entry(shape=[-40, -16]), "shape and offsets of 'lm_head.weight' are [-40, -16] and"),
    "huge shape": (set_entry(shape=[10**30]), "shape and offsets of 'lm_head.weight' are [1000"),
    "wrong size": (set_entry(shape=[41, 16]), "is BF16[41, 16], which does not take the bytes"),
    "no list": (set_entry(shape=7), "is damaged, or no safetensors file"),
    "name": (lambda h: h.update({"a\nb": h.pop("lm_head.weight")}), r"'a\nb' is no name of a tensor"),
    "no object": (lambda h: b"[]", "its header is not an object of JSON"),
    "no text": (lambda h: b"\xff\xff", "is damaged, or no safetensors file: 'utf-8'"),
    "deep": (lambda h: b'{"a":' * DEEP, "nested too deeply"),
    "digits": (lambda h: b'{"a":' + b"9" * 10_000 + b"}", "is damaged, or no safetensors file"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_one_clear_line(folder, capsys, name):
    change, message = HEADERS[name]
    with_header(folder, change)
    line = said(capsys, "inspect", folder)
    assert line.startswith(str(folder / FIRST)) and message in line and len(line) < 800


def test_a_header_that_would_fill_the_memory_is_not_read(folder, capsys):
    file = folder / FIRST
    with open(file, "r+b") as opened:
        opened.write((1 << 40).to_bytes(8, "little"))
    assert f"{file} is damaged, or no safetensors file: its header has 1099511627776 bytes, but the file has" in said(
        capsys, "inspect", folder
    )
    os.truncate(file, 1 << 41)  # a file with a hole: no space on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "its header has 1048576 MiB; at most 32 are read." in said(capsys, "inspect", folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    os.truncate(file, 5)
    assert "bytes, but the file has 5." in said(capsys, "inspect", folder)


def test_a_shard_that_is_missing_cut_off_or_a_pipe_is_one_clear_line(folder, capsys):
    file = folder / FIRST
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert said(capsys, "inspect", folder) == (
        f"{file} is damaged, or no safetensors file: it has {size - 1} bytes, but its header says {size}: "
        "it is cut off or too long."
    )
    file.unlink()
    assert said(capsys, "inspect", folder) == f"{folder} is incomplete: {FIRST}, which its index names, is missing."
    os.mkfifo(file)
    assert said(capsys, "inspect", folder) == f"{file} cannot be read: it is not a plain file."
    file.unlink()
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5648800\n")
    assert "it is only a pointer of Git LFS; `git lfs pull`" in said(capsys, "inspect", folder)
    (folder / FIRST).unlink()
    (folder / INDEX).unlink()
    second = "model-00002-of-00002.safetensors"
    assert said(capsys, "inspect", folder) == (f"{folder} is incomplete: {second} says that there are 2 files like it.")
    (folder / second).unlink()
    assert said(capsys, "inspect", folder) == (
        f"{folder} is half a Hugging Face folder: it has config.json, but no *.safetensors. Copy its weights too."
    )
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"PyTorch's format \(\*\.bin\)"):
        reshard.restore(folder, {})


INDICES = {
    "leaves": ("../secret.safetensors", "'../secret.safetensors' is no name of a safetensors file in the folder"),
    "absolute": ("/etc/passwd", "'/etc/passwd' is no name of a safetensors file in the folder"),
    "number": (7, "'7' is no name of a safetensors file in the folder"),
    "other": (FIRST, "has no tensor 'nowhere', which model.safetensors.index.json says it has"),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_hostile_index_is_one_clear_line(folder, capsys, name):
    value, message = INDICES[name]
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["nowhere"] = value
    (folder / INDEX).write_text(json.dumps(index))
    assert message in said(capsys, "inspect", folder)
    for text in ("[]", '{"weight_map": 3}', '{"a":' * DEEP, "{"):
        (folder / INDEX).write_text(text)
        assert f"{folder / INDEX} is not the index of a Hugging Face folder: " in said(capsys, "inspect", folder)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder, monkeypatch):
    wanted = expected(llama(1))
    read = reshard.checkpoint.read_parts

    def shrunk(*arguments):
        os.truncate(folder / FIRST, 600)
        return read(*arguments)

    monkeypatch.setattr(reshard.checkpoint, "read_parts", shrunk)
    with pytest.raises(ReshardError, match=r"cannot be read; .*it has become shorter while it was read"):
        reshard.restore(folder, abstract(wanted), mapping="llama")


def test_a_folder_that_cannot_be_begun_leaves_no_file_open_and_half_a_header_is_none(tmp_path, monkeypatch):
    plan = tensor_files.plan_files([(f"w{i}", np.dtype(np.float32), (64,)) for i in range(3)], file_nbytes=256)
    count = len(os.listdir("/proc/self/fd"))
    (tmp_path / "model-00003-of-00003.safetensors").mkdir()
    with pytest.raises(IsADirectoryError), tensor_files.writing(tmp_path, plan):
        pass
    assert len(os.listdir("/proc/self/fd")) == count
    write = os.pwritev  # the system may write less than it is given
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:5]], offset))
    (tmp_path / "whole").mkdir()
    with tensor_files.writing(tmp_path / "whole", plan) as writer:
        for i in range(3):
            writer.write(f"w{i}", Box.whole((64,)), random((64,), seed=i))
    for i in range(3):
        data = (tmp_path / "whole" / f"model-0000{i + 1}-of-00003.safetensors").read_bytes()
        assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[f"w{i}"]["shape"] == [64]
        np.testing.assert_array_equal(np.frombuffer(data[-256:], np.float32), random((64,), seed=i))


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path):
    with pytest.raises(ReshardError, match=r"__metadata__.* has a name that the format keeps for itself"):
        reshard.checkpoint.save(tmp_path / "x", {"__metadata__": np.zeros(3, np.float32)}, tensors=TensorFormat())


def test_half_an_export_looks_like_none(folder, tmp_path, monkeypatch, capsys):
    tree = expected(llama(1))
    order = []
    write_text, sync = tensor_files.TensorWriter.write, os.fsync

    def fail(self, name, box, data):
        order.append(name)
        if len(order) == 5:
            raise OSError(28, "No space left on device")
        write_text(self, name, box, data)

    monkeypatch.setattr(tensor_files.TensorWriter, "write", fail)
    with pytest.raises(OSError, match="the disk is full; nothing was saved"):
        reshard.save(tmp_path / "out", tree, tensors=TensorFormat("llama"))
    order.clear()
    line = said(capsys, "convert", folder, tmp_path / "out", "--format", "safetensors")
    assert line.startswith(f"{tmp_path} is full") and line.endswith("Nothing was kept.")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]
    monkeypatch.undo()
    # what a save that was killed has left is not taken for a model
    left = shutil.copytree(folder, tmp_path / "out.orbax-checkpoint-tmp-1")
    assert "an unfinished save" in said(capsys, "inspect", left)
    # the index comes last
    written = []
    monkeypatch.setattr(os, "fsync", lambda fd: (written.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
    reshard.save(tmp_path / "two", tree, tensors=TensorFormat("llama", files_of=folder))
    assert [name.endswith(INDEX) for name in written] == [False, False, True]


def test_a_mapping_is_for_one_side_and_a_configuration_may_be_hostile(folder, tmp_path, capsys):
    both = ["--format", "safetensors", "--mapping", "llama"]
    assert said(capsys, "convert", folder, tmp_path / "out", *both).startswith("--mapping is for one side:")
    assert said(capsys, "convert", folder, tmp_path / "out", "--files-of", folder).startswith("--files-of is for")
    assert said(capsys, "convert", folder, tmp_path / "out", "--file-size", "1GB").startswith("--file-size is for")
    (folder / "config.json").write_text('{"a":' * DEEP)
    assert "nested too deeply" in said(capsys, "inspect", folder, "--mapping", "auto")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 10**30}))
    err = main(["inspect", str(folder), "--mapping", "auto"]), capsys.readouterr().err
    assert err[0] == 1 and "its axis of 16 is not made of" in err[1]
