"""Measures how several processes import a Hugging Face folder: bytes read, memory, time; and how they export it again.

    python benchmarks/import_safetensors.py [--mib 1024] [--processes 4] [--threshold 64MiB] [--folder DIR]

The folder is a random Llama in bfloat16, in several files. In the layout "stages" each process is a group that holds
its layers of each stacked array; in "tensor" all processes are one group, and each holds its heads and its part of the
hidden axis of every layer, which are rows of some tensors and columns of others. `read` is the library's count of bytes
by file, `by the system` the kernel's count (`/proc/self/io`). `memory` is the peak of the process beyond its memory
before, `shards` its memory afterwards. The export is compared byte by byte with the folder.
"""

import argparse
import filecmp
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEADS, DIM, HIDDEN, VOCAB, NUM_LAYERS, NUM_FILES = 16, 128, 8192, 8192, 8, 4


def make_folder(folder: Path, mib: int) -> None:
    """Writes a Llama of about `mib` MiB, which determine its width."""
    import numpy as np

    from reshard.storage.safetensors import DTYPES
    from reshard.storage.tensor_files import plan_files, writing

    per_width = 2 * VOCAB + NUM_LAYERS * (2 * HEADS * DIM + 2 * HEADS * DIM // 4 + 3 * HIDDEN)
    width = max(128, (mib << 19) // per_width // 128 * 128)
    queries, kv = (HEADS * DIM, width), (HEADS * DIM // 4, width)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, width))
    shapes["model.norm.weight"] = (width,)
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": s for n, s in (("q", queries), ("k", kv), ("v", kv))}
        shapes |= {f"{layer}self_attn.o_proj.weight": queries[::-1], f"{layer}mlp.down_proj.weight": (width, HIDDEN)}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (HIDDEN, width) for name in ("gate", "up")}
        shapes |= {f"{layer}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 4}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    files = plan_files([(n, DTYPES["BF16"], s) for n, s in shapes.items()], total // (NUM_FILES - 1))
    rng = np.random.default_rng(0)
    with writing(folder, files) as writer:
        for _, tensors in files.files.values():
            for tensor in tensors:
                data = rng.integers(0, 1 << 14, tensor.shape, np.uint16).view(tensor.dtype)  # finite numbers
                os.pwrite(writer.places[tensor.name][0], data.tobytes(), tensor.start)
    files.finish(folder)


def import_and_export(arguments: dict[str, Any]) -> dict[str, Any]:
    """Does the work of one process. Returns its measurements."""
    import jax

    jax.distributed.initialize(arguments["address"], arguments["processes"], arguments["process"])
    from jax.sharding import PartitionSpec as P

    from mpmd import MpmdMesh, MpmdSharding
    from reshard.checkpoint import Part, Reads, TensorFormat, restore, save
    from reshard.edits.edited import edited
    from reshard.edits.mapped import imported
    from reshard.edits.mapping import config_of, read_mapping
    from reshard.storage.finder import find

    folder, stages = Path(arguments["folder"]), arguments["layout"] == "stages"
    checkpoint = edited(find(folder), imported(read_mapping("llama", None), config_of(folder)))
    sizes = (jax.device_count(), 1) if stages else (1, jax.device_count())
    mesh = MpmdMesh(jax.make_mesh(sizes, ("stage", "tensor")), "stage")
    axes = {"query": 2, "key": 2, "value": 2, "output": 1, "gate": 2, "up": 2, "down": 1, "embed": 0, "head": 1}
    like, shardings = {}, {}
    for leaf in checkpoint.leaves:
        spec: list[str | None] = [None] * len(leaf.shape)
        groups: Any = mesh.num_groups - 1 if leaf.names[-1] in ("head", "norm") else 0
        if leaf.names[0] == "layers":
            spec[0], groups = "stage", range(mesh.num_groups)
        if leaf.names[-1] in axes:
            spec[axes[leaf.names[-1]]] = "tensor"
        name = "/".join(leaf.names)
        like[name] = Part(name, (), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        shardings[name] = MpmdSharding(mesh, groups, P(*spec))
    reads, counted = Reads(), system_reads()
    before, start = forget_peak(), time.monotonic()
    tree = restore(folder, like, shardings, mapping="llama", reads=reads, threshold=arguments["threshold"])
    jax.block_until_ready([x.to_mpmd_local_array for x in tree.values()])
    seconds, memory, counted = time.monotonic() - start, peak() - before, system_reads() - counted
    held = {(name, str(s.index)): s.data.nbytes for name, x in tree.items() for s in x.addressable_shards}
    tree = nested(tree)
    before, start = forget_peak(), time.monotonic()
    save(arguments["target"], tree, tensors=TensorFormat("llama", files_of=folder))
    found = {"read": reads.nbytes, "by the system": counted, "shards": sum(held.values()), "memory": memory}
    found |= {"seconds": seconds, "save_memory": peak() - before, "save_seconds": time.monotonic() - start}
    return found


def nested(tree: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, x in tree.items():
        node, *parts = root, *name.split("/")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = x
    return root


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) << 10


def forget_peak() -> int:
    """Resets the measured peak. Returns the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def system_reads() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def run(layout: str, folder: Path, target: Path, processes: int, threshold: str) -> list[dict[str, Any]]:
    """Runs the processes of one layout. Returns the measurements of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"address": address, "processes": processes, "layout": layout, "threshold": threshold}
    common |= {"folder": str(folder), "target": str(target)}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--process", json.dumps(common | {"process": i})],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        outputs = [one.communicate(timeout=900)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    if any(one.returncode for one in started):
        raise SystemExit("a process failed; its error is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def same(first: Path, second: Path) -> bool:
    names = sorted(file.name for file in first.iterdir())
    match, _, _ = filecmp.cmpfiles(first, second, names, shallow=False)
    return match == names == sorted(file.name for file in second.iterdir())


def measured(mib: int, processes: int, threshold: str, work: Path, layouts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Makes the folder, and imports and exports it in each layout."""
    found = []
    make_folder(work / "model", mib)
    for layout in layouts:
        each = run(layout, work / "model", work / layout, processes, threshold)
        found += [{"layout": layout, "process": i, **one} for i, one in enumerate(each)]
        found[-1]["same"] = same(work / "model", work / layout)
        shutil.rmtree(work / layout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="MiB of the checkpoint (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--threshold", default="64MiB", help="memory for array data (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        print(json.dumps(import_and_export(json.loads(options.process))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        rows = measured(options.mib, options.processes, options.threshold, Path(work), ("stages", "tensor"))
    print(f"{options.mib} MiB into {options.processes} processes, threshold {options.threshold}")
    print("  layout  process    shards      read  by the system    memory  seconds  save memory  seconds")
    for row in rows:
        sizes = [f"{row[name] / 2**20:6.0f} MiB" for name in ("shards", "read", "by the system", "memory")]
        print(
            f"  {row['layout']:7} {row['process']:7}{sizes[0]}{sizes[1]}{sizes[2]:>15}{sizes[3]}{row['seconds']:9.1f}"
            f"{row['save_memory'] / 2**20:9.0f} MiB{row['save_seconds']:9.1f}"
            + (f"  exported: {'the same bytes' if row['same'] else 'OTHER BYTES'}" if "same" in row else "")
        )


if __name__ == "__main__":
    if sys.path[0] == str(ROOT / "benchmarks"):
        sys.path[0] = str(ROOT)  # instead of this folder, whose reshard.py would hide the package
    main()
