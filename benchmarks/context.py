"""Measures a device's memory for a long row in examples/llama, by the number of devices that divide it (--context).

    python benchmarks/context.py

Compiles the step for CPU devices, and prints the memory that a device of the last group needs, as XLA reports it.
Nothing runs.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import jax

sys.path[0] = str(Path(__file__).parents[1] / "examples" / "llama")  # this folder's reshard.py would hide reshard
train: Any = importlib.import_module("train")


def memory(length: int, context: int) -> dict[str, int]:
    """Returns the bytes of a device of the last group, by purpose."""
    model = "--groups 2 --layers 4 --microbatches 2 --batch 2".split()
    options = train.parse([*model, "--length", str(length), "--context", str(context)])
    config = train.config_of(options, train.tokenizer_of(None))
    program = train.Program(config, options, train.make_mesh(2, 1, 1, context))
    return program.step.lower(*program.abstract()).compile().memory_analysis()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=16384, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[1, 2, 4], help="devices (default: 1 2 4)")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2 * max(options.context))
    print(f"{'--context':10}{'temporaries':>16}{'activations':>16}")
    for context in options.context:
        found = memory(options.length, context)
        print(f"{context:<10}{found['temporaries'] / 1e6:13.1f} MB{found['activations'] / 1e6:13.1f} MB")


if __name__ == "__main__":
    main()
