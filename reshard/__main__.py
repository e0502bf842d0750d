"""Inspects checkpoints, reports what a layout would read, and converts: ``python -m reshard``."""

import argparse
import contextlib
import ctypes
import json
import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as File
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.errors import ReshardError
from reshard.conversion import inspection
from reshard.conversion.convert import convert, plan_conversion
from reshard.conversion.copying import CopyProgress, Stopped
from reshard.conversion.layout_file import read_layout
from reshard.conversion.read_report import plan_reading
from reshard.edits import tree_edits
from reshard.edits.edited import edited
from reshard.edits.mapped import exported, imported_from
from reshard.edits.mapping import built_in, config_of, read_mapping
from reshard.moving.progress import how_far
from reshard.sizes import nbytes_of
from reshard.storage.finder import find
from reshard.storage.huggingface import is_folder, missing_weights
from reshard.storage.paths import compiled
from reshard.storage.stored import Checkpoint, absolute
from reshard.storage.tensor_files import FILE_NBYTES, TensorTarget
from scheduler.base.exits import run_and_exit
from scheduler.base.texts import counted, human
from scheduler.base.waiting import waiting

T = TypeVar("T")
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_FOLDERS = """\
DIR is what was given to Orbax's `save`, a CheckpointManager's folder (its latest step, or --step), or one of its steps;
or a Hugging Face folder of safetensors, or one such file.
"""
_PATTERNS = """\
Paths are written params/layers/3/w. In a pattern, * stays within one part of a path, ** stands for any number of parts,
{layer} for one that is a number. Quote patterns, so that the shell leaves them alone.
"""
_EXAMPLES = {
    "inspect": "python -m reshard inspect run/checkpoints --step 1000",
    "plan": "python -m reshard plan run/checkpoints --to layout.yaml",
    "convert": """\
python -m reshard convert run/checkpoints/1000 layers --unstack '**/layers' --verify
  python -m reshard convert layers stacked --stack '**/layers' --chunk 'params/layers/w=1,-1,-1'
  python -m reshard convert run/checkpoints weights --only params --dtype bfloat16
  python -m reshard convert Llama-3-8B ours --mapping llama --dtype float32
  python -m reshard convert ours tuned --mapping llama --format safetensors --files-of Llama-3-8B --dtype bfloat16
  python -m reshard convert theirs ours --rename 'params/(.*)_(\\d+)/(.*)=params/\\1/\\2/\\3' --stack params/layers""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 if something is wrong, 2 (by `argparse`) for wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except ReshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Stopped, KeyboardInterrupt):
        print("error: stopped; nothing was kept.", file=sys.stderr)
        return 1


def _opened(options: argparse.Namespace) -> Checkpoint:
    """Opens the checkpoint for `inspect` and `plan`: as it is stored, or with a mapping applied."""
    checkpoint = find(options.folder, options.step, options.item)
    if options.mapping is None:
        return checkpoint
    return edited(checkpoint, imported_from(checkpoint.folder, options.mapping))


def _mapped(options: argparse.Namespace) -> list[tree_edits.Change]:
    """Returns all changes of `convert` in order: a mapping comes first, or last if a Hugging Face folder is written."""
    if options.files_of is not None and options.format != "safetensors":
        raise ReshardError("--files-of is for --format safetensors, which it adds files to.")
    if options.file_size and options.format != "safetensors":
        raise ReshardError("--file-size is for --format safetensors, whose files it limits.")
    changes = [tree_edits.select(options.only, options.drop), *options.changes]
    if options.mapping is None:
        return changes
    source = absolute(options.source)
    from_tensors, to_tensors = is_folder(source), options.format == "safetensors"
    if from_tensors == to_tensors:
        if not from_tensors and (missing := missing_weights(source)) is not None:
            raise ReshardError(missing)
        raise ReshardError(
            "--mapping is for one side: from a Hugging Face folder to an Orbax checkpoint, or back with"
            " --format safetensors."
        )
    if to_tensors:
        mapping = read_mapping(options.mapping, options.files_of)
        return [*changes, exported(mapping, config_of(options.files_of))]
    return [changes[0], imported_from(source, options.mapping), *changes[1:]]


def _inspect(options: argparse.Namespace) -> int:
    checkpoint = _opened(options)
    print(json.dumps(inspection.to_json(checkpoint)) if options.json else inspection.to_text(checkpoint))
    return 0


def _plan(options: argparse.Namespace) -> int:
    layout = read_layout(options.to)
    plan = plan_reading(_opened(options), layout)
    print(json.dumps(plan.to_json()) if options.json else plan)
    if not plan.too_large:
        return 0
    needed = max(p.largest_device_bytes for p in plan.processes)
    assert layout.device_memory is not None
    print(
        f"error: {len(plan.too_large)} of {layout.mesh.size} devices cannot hold their part: "
        f"up to {human(needed)} of {human(layout.device_memory)}.",
        file=sys.stderr,
    )
    return 1


def _convert(options: argparse.Namespace) -> int:
    conversion = plan_conversion(
        options.source,
        options.target,
        _mapped(options),
        step=options.step,
        item=options.item,
        dtypes=options.dtype,
        chunks=options.chunk,
        threshold=options.threshold,
        zarr3=options.format == "zarr3",
        tensors=TensorTarget(options.files_of, options.file_size or FILE_NBYTES)
        if options.format == "safetensors"
        else None,
    )
    if options.dry_run:
        print(conversion)
        return 0
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    with _stoppable() as stopped, _bar() as bar:
        convert(conversion, verify=options.verify, progress=bar, should_stop=stopped)
    arrays = counted(sum(entry.is_array for entry in conversion.tree.leaves), "array")
    verified = ", verified" if options.verify else ""
    print(f"{conversion.target}: {arrays}, {human(conversion.tree.nbytes)}{verified}")
    return 0


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[CopyProgress], None]]:
    """Shows a progress bar if somebody is there to see it."""
    latest: deque[CopyProgress] = deque(maxlen=1)
    with waiting(lambda: how_far(latest, "reading")):
        yield latest.append


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C and SIGTERM stop the work between two batches; a second one stops it at once."""
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be handled
        yield lambda: False
        return
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps a parser for `argparse`, which shows the message of an `ArgumentTypeError` and of no other error."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _dtype(text: str) -> tuple[str | None, np.dtype]:
    pattern, _, name = text.rpartition("=")
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{name!r} is no dtype; write it like bfloat16 or 'opt/**=float32'") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} is no floating-point dtype; other arrays are not cast")
    return (_pattern(pattern) if pattern else None), dtype


def _chunk(text: str) -> tuple[str, tuple[int, ...]]:
    pattern, _, sizes = text.rpartition("=")
    try:
        chunk = tuple([int(size) for size in sizes.split(",")])
    except ValueError:
        chunk = (0,)
    if not pattern or not all(size > 0 or size == -1 for size in chunk):
        raise ValueError(f"{text!r} is not written like 'params/layers/w=1,-1,-1' (-1: the whole axis)")
    return _pattern(pattern), chunk


def _pattern(text: str) -> str:
    compiled(text)
    return text


def _rename(text: str) -> tree_edits.Change:
    pattern, equals, replacement = text.partition("=")
    if not equals or not pattern or not replacement:
        raise ValueError(f"{text!r} is not written like 'params/(.*)=model/\\1'")
    return tree_edits.rename(pattern, replacement)


def _unstack(text: str) -> tree_edits.Change:
    pattern, equals, kind = text.partition("=")
    if equals and kind not in ("list", "dict"):
        raise ValueError(f"{text!r} is not written like '**/layers', '**/layers=list' or '**/layers=dict'")
    return tree_edits.unstack(_pattern(pattern), as_list=kind != "dict")


def _folder(text: str) -> File:
    folder = File(text).expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"{text} is not a folder")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reshard",
        description=(__doc__ or "").partition(":")[0] + ".",
        epilog="examples:\n  " + "\n  ".join(_EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="inspect|plan|convert")
    _add_readers(commands)
    _add_convert(commands)
    return parser


def _add_readers(commands: argparse._SubParsersAction) -> None:
    text = "print the tree, shapes, dtypes, bytes and chunks of a checkpoint"
    inspect = _command(commands, "inspect", _inspect, text, _FOLDERS)
    text = "print what each process of a layout would read of a checkpoint"
    plan = _command(commands, "plan", _plan, text, _FOLDERS)
    plan.add_argument("--to", metavar="LAYOUT", required=True, help="a layout file, YAML or JSON")
    for command in (inspect, plan):
        command.add_argument("folder", metavar="DIR")
        command.add_argument("--json", action="store_true", help="print a JSON document")
        _add_mapping(command)
        _add_step(command)


def _add_convert(commands: argparse._SubParsersAction) -> None:
    text = "make a checkpoint of another one, which is not touched"
    order = "--rename, --stack and --unstack are done in the order given, after --only and --drop, before the rest.\n"
    command = _command(commands, "convert", _convert, text, _FOLDERS.replace("DIR", "SRC") + _PATTERNS + order)
    command.add_argument("source", metavar="SRC")
    command.add_argument("target", metavar="DST", help="the folder to make; it must not exist")
    _add_mapping(command)
    _add_step(command)
    _add_changes(command)
    _add_storage(command)
    text = "check SRC against its checksums, read both again and compare them bit by bit, then put DST in place"
    command.add_argument("--verify", action="store_true", help=text)
    command.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


def _command(
    commands: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], int], text: str, more: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"{more}\nexamples:\n  {_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_step(command: argparse.ArgumentParser) -> None:
    """Adds the options that choose one tree where a folder has several."""
    command.add_argument("--step", type=int, metavar="N", help="which step of a CheckpointManager; default: the latest")
    command.add_argument("--item", metavar="NAME", help="which item of a step that has several trees")


def _add_mapping(command: argparse.ArgumentParser) -> None:
    """Adds the option for how a Hugging Face folder is read as a model."""
    text = f"of a Hugging Face folder: {', '.join(built_in())}, auto (what config.json says), or a file"
    command.add_argument("--mapping", metavar="NAME", help=text)


def _add_several(
    command: argparse.ArgumentParser,
    option: str,
    parse: Callable[[str], object],
    metavar: str,
    text: str,
    dest: str | None = None,
) -> None:
    """Adds an option that may be given several times."""
    command.add_argument(
        option, dest=dest, type=_argument(parse), action="append", default=[], metavar=metavar, help=text
    )


def _add_changes(command: argparse.ArgumentParser) -> None:
    """Adds the options that change the tree."""
    text = "cut the arrays below these nodes along axis 0: layers/w[L, …] becomes layers/3/w"
    _add_several(command, "--unstack", _unstack, "NODE[=list|dict]", text, "changes")
    text = "stack the numbered entries of these nodes: layers/3/w becomes layers/w[L, …]"
    _add_several(command, "--stack", lambda text: tree_edits.stack(_pattern(text)), "NODE", text, "changes")
    text = r"give paths that match all of a regular expression another one; \1 is its first group"
    _add_several(command, "--rename", _rename, "REGEX=PATH", text, "changes")
    _add_several(command, "--only", _pattern, "PATTERN", "keep these leaves or nodes")
    _add_several(command, "--drop", _pattern, "PATTERN", "leave these leaves or nodes out")


def _add_storage(command: argparse.ArgumentParser) -> None:
    """Adds the options for how the arrays are stored, and in how much memory they are copied."""
    text = "cast floating-point arrays; numbers, counters and keys stay as they are; the last that matches counts"
    _add_several(command, "--dtype", _dtype, "[PATTERN=]DTYPE", text)
    text = "chunk sizes, one an axis, -1 for all of it; default: as before, a layer of a stack, at most 64 MiB"
    _add_several(command, "--chunk", _chunk, "PATTERN=SIZES", text)
    command.add_argument(
        "--format",
        choices=("zarr", "zarr3", "safetensors"),
        default="zarr",
        help="default: zarr (version 2), Orbax's own default; safetensors makes a Hugging Face folder",
    )
    text = (
        "with --format safetensors: copy config.json, tokenizer and other files from this folder, and divide the"
        " tensors among files as it does"
    )
    command.add_argument("--files-of", type=_argument(_folder), metavar="DIR", help=text)
    command.add_argument(
        "--file-size",
        type=_argument(nbytes_of),
        metavar="BYTES",
        help="with --format safetensors: how large a file may be; default: 5 GB",
    )
    text = "memory for array data, as in 64MiB; default: 256 MiB more than it takes to read each chunk once"
    command.add_argument("--threshold", type=_argument(nbytes_of), metavar="BYTES", help=text)


def _own_process() -> None:
    """Prepares a process that does nothing but run a command: no accelerator, no warnings for users of Orbax's API, and
    freed memory returns to the system. Otherwise glibc keeps it, in an arena for each reading or writing thread, and
    `--threshold` would bound the memory in use but not the memory held.
    """
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 18)


if __name__ == "__main__":
    _own_process()
    run_and_exit(main)
