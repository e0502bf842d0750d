"""Packing, buckets by length and one length for all in examples/llama: trained tokens a second, and seconds of steps.

    python benchmarks/buckets.py

The documents are the functions of Python's standard library, and a token is a byte. The three ways of making batches
take turns in one process, and the fastest turn of each counts, so that other work on the machine disturbs them alike.
The processor time of all threads is disturbed less.
"""

import argparse
import ast
import importlib
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

sys.path[0] = str(Path(__file__).parents[1] / "examples" / "llama")  # this folder's reshard.py would hide reshard
train: Any = importlib.import_module("train")


def write_functions(folder: Path, most: int) -> None:
    """Writes the first functions and methods of the standard library as a file each."""
    found = (
        "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for text in [file.read_text(errors="replace")]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    )
    for number, function in zip(range(most), found, strict=False):
        (folder / f"{number:05}.py").write_text(function)


class Run:
    """A model that is trained on batches of one kind."""

    def __init__(self, options: list[str]):
        self.options = train.parse(options)
        tokenizer = train.tokenizer_of(None)
        config = train.config_of(self.options, tokenizer)
        self.batches = train.batches_of(self.options, config, tokenizer)
        self.program = train.Program(config, self.options, train.make_mesh(self.options.groups, 1, 1))
        lowered = self.program.step.lower(*self.program.abstract())
        self.program.cuts = lowered.cuts
        compiled = lowered.compile()
        self.layout = train.batch_layout(compiled)
        self.state: Any = train.first_state(self.program, compiled.input_shardings[0][0])
        self.step = self.program.step if self.options.buckets else compiled
        self.done, self.best_s, self.processor_s = 0, float("inf"), float("inf")
        self.turn(1)  # programs are compiled and loaded
        self.best_s = self.processor_s = float("inf")

    def turn(self, steps: int) -> None:
        """Trains for some steps, and notes the seconds of one."""
        began, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, _ = self.step(self.state, self.batches.placed(self.done, self.layout))
            self.done += 1
        jax.block_until_ready(self.state)
        self.best_s = min(self.best_s, (time.perf_counter() - began) / steps)
        self.processor_s = min(self.processor_s, (time.process_time() - processor) / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--buckets", default="128,256,512,1024", help="lengths (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (default: %(default)s)")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    longest = options.buckets.rpartition(",")[2]
    with tempfile.TemporaryDirectory() as folder:
        write_functions(Path(folder), options.documents)
        model = f"--text {folder} --groups 2 --layers 2 --microbatches 8 --batch 8".split()
        ways = {
            "packing": ["--length", longest],
            "buckets": ["--buckets", options.buckets],
            "one length for all": ["--buckets", longest],
        }
        runs = {name: Run([*model, *way]) for name, way in ways.items()}
    for _ in range(options.turns):
        for run in runs.values():
            run.turn(options.steps)
    print(runs["buckets"].batches)
    print(f"{'':20}{'s a step':>10}{'processor s':>13}{'tokens a step':>15}{'tokens per processor s':>24}")
    for name, run in runs.items():
        tokens = run.batches.per_step(float)
        rate = tokens / run.processor_s
        print(f"{name:20}{run.best_s:10.2f}{run.processor_s:13.2f}{tokens:15,.0f}{rate:24,.0f}")


if __name__ == "__main__":
    main()
