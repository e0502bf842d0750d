"""Compares `plan` with one GPU: layers of Llama 3 8B in four groups that share it, and single kernels.

    python benchmarks/gpu_plan.py llama_8k      # on a GPU; also llama_8k_chunks, llama_32k, llama_8k_one, llama_32k_one
    python benchmarks/gpu_plan.py kernels       # on a GPU: what products, attention and memory reach
    python -m mpmd plan benchmarks/gpu_plan.py:llama_8k --target h200 --groups 4 --devices-per-group 1    # anywhere
    python benchmarks/gpu_plan.py tiny          # the same code on CPU devices, to try it

The step of `examples/plan_llama.py`, with 8 microbatches of a row. Groups that share a GPU run one after the other, so
a step takes the sum of the groups' busy times in `plan`. The cases with one group (`_one`, with `--groups 1`) have the
peak memory of `plan`.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import mpmd

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose reshard.py would hide the package
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import plan_llama

MICROBATCHES = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it runs. `python -m mpmd plan` can call it like a function of steps."""

    shape: plan_llama.Shape
    groups: int = 4

    def __call__(self, mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = MICROBATCHES):
        return plan_llama.build(self.shape, mesh, schedule, num_microbatches)


_8K = dataclasses.replace(plan_llama.LLAMA3_8B, layers=8)
_32K = dataclasses.replace(plan_llama.LLAMA3_8B, layers=4, length=32768)
llama_8k, llama_8k_one = Case(_8K), Case(_8K, groups=1)
llama_8k_chunks = Case(dataclasses.replace(_8K, kernel=False))
llama_32k, llama_32k_one = Case(_32K), Case(_32K, groups=1)
tiny = Case(plan_llama.Shape(4, 64, 4, 2, 128, vocabulary=256, length=32))
CASES = {name: case for name, case in globals().items() if isinstance(case, Case)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", choices=(*CASES, "kernels"))
    name = parser.parse_args().case
    device = jax.devices()[0]
    if device.platform != "gpu" and name not in ("tiny", "kernels"):
        print("There is no GPU here. Try the code with: tiny", file=sys.stderr)
        return 1
    print(f"{device.device_kind}, JAX {jax.__version__}")
    if name == "kernels":
        kernels(device.platform == "gpu")
    else:
        measure(CASES[name], device)
    return 0


def measure(case: Case, device: Any) -> None:
    """Prints the time of a step and of its tasks, and the most memory in use."""
    mesh = mpmd.MpmdMesh.from_groups([Mesh([device], ("data",))] * case.groups)
    step, (types, tokens) = case(mesh)
    compiled = step.lower(types, tokens).compile()
    init = mpmd.jit(lambda key: _init(key, types), mpmd_mesh=mesh, out_shardings=compiled.input_shardings[0][0])
    state = init(jax.random.key(0))
    batch = np.random.default_rng(0).integers(0, 256, tokens.shape, np.int32)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        state, loss = compiled(state, batch)
        here = jax.tree.map(lambda x: getattr(x, "to_mpmd_local_array", x), (state, loss))
        jax.block_until_ready(here)
        seconds.append(time.perf_counter() - begin)
    print(f"step {min(seconds[1:]):.3f} to {max(seconds[1:]):.3f} s, loss {float(mpmd.device_get(loss)):.4f}")
    stats, said = device.memory_stats() or {}, compiled.memory_analysis()
    peak, planned = stats.get("peak_bytes_in_use", 0) / 1e9, [said[g]["peak"] / 1e9 for g in said]
    print(f"peak {peak:.2f} GB; analysis of the groups: {' + '.join(f'{x:.2f}' for x in planned)} GB")
    times: dict[str, list[float]] = defaultdict(list)
    for run in compiled.profile((state, batch), steps=1).steps[-1].runs:
        times[run.name].append(run.end - run.start)
    print("; ".join(f"{name} {statistics.median(found) * 1e3:.1f} ms" for name, found in times.items()))


def _init(key: jax.Array, types: Any) -> Any:
    params, first, second = types
    leaves, tree = jax.tree.flatten(params)
    drawn = [
        0.02 * jax.random.normal(k, x.shape) if x.ndim > 1 else jnp.ones(x.shape)
        for k, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    params = tree.unflatten([d.astype(x.dtype) for d, x in zip(drawn, leaves, strict=True)])
    return params, *(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), moments) for moments in (first, second))


def kernels(full: bool) -> None:
    """Prints the speed of single kernels: TFLOP/s of products and of attention, TB/s of memory."""
    for m, n, k in [(8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 4096), (8192, 1024, 4096)]:
        m, n, k = (m, n, k) if full else (m // 64, n // 64, k // 64)
        x, y = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate([(m, k), (k, n)]))
        print(f"product ({m}, {k}) × ({k}, {n}): {2 * m * n * k / _seconds(jax.jit(jnp.dot), x, y) / 1e12:.0f} TFLOP/s")
    for length in (2048, 8192, 32768) if full else (128,):
        q, k, v = (
            jax.random.normal(jax.random.key(i), (1, length, h, 128), jnp.bfloat16) for i, h in enumerate((32, 8, 8))
        )

        def forward(q, k, v):
            return plan_llama.attend(q, k, v, scale=128**-0.5, kernel=full)

        both = jax.jit(lambda q, k, v: jax.vjp(forward, q, k, v)[1](q))
        flops = 4 * q.size * length / 2  # causal; the backward pass has five products, the forward pass two
        alone = flops / _seconds(jax.jit(forward), q, k, v) / 1e12
        print(f"attention of {length} tokens: {alone:.0f} TFLOP/s forward,"
              f" {3.5 * flops / _seconds(both, q, k, v) / 1e12:.0f} with its backward pass")  # fmt: skip
    x = jnp.ones((1 << 15, 1 << 15) if full else (64, 64))
    once = {"multiply-add": lambda x: 2 * x + 1, "softmax": jax.nn.softmax, "transpose": lambda x: x.T + 1}
    for name, fun in once.items():
        speed = 2 * x.nbytes / _seconds(jax.jit(fun), x) / 1e12
        print(f"{name} of float32: {speed:.2f} TB/s of one read and one write")


def _seconds(fun: Any, *args: Any, calls: int = 20) -> float:
    jax.block_until_ready((fun(*args), fun(*args)))
    begin = time.perf_counter()
    results = [fun(*args) for _ in range(calls)][-1]
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    sys.exit(main())
