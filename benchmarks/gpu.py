"""Measures a pipeline on GPUs against plain `jax.jit`: step time, memory, first call, and gaps between kernels.

    python benchmarks/gpu.py            # one GPU or several; under 8 minutes, installs nothing
    python benchmarks/gpu.py --tiny     # the same code on CPU devices, to try it

A GPT of 1 billion parameters in bfloat16, with Adam and 8 microbatches a step. Each case runs in its own process:

- `plain`: the step under `jax.jit`, where `treduce` is a loop that accumulates gradients.
- `pipeline`: the same step under `mpmd.jit`; four groups share the first GPU (`MpmdMesh.from_groups`).
- `same_bits`: `pipeline` with `--xla_gpu_deterministic_ops=true`, so that each run has the same bits.
- `shared`: two processes share the first GPU, half of its memory each, with two groups each.
- `spread`: with several GPUs, the groups are on different GPUs of one process.
- `processes`: with several GPUs, two or four processes with a GPU each.
- `numbers`: all leaves of the state after two steps of a tiny model, and what is donated, against `jax.jit`.

Prints a table. `peak` is the memory that the device reports (`memory_stats`), `analysis` the memory that the compiled
step predicts: XLA for the whole program, ours for all groups of the device together, which may peak at other times.
`busy` is the part of two profiled steps in which a kernel runs, `gaps` the median and the longest time without one.
The exit status is 1 if a case fails or if losses differ.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "RESULT "
CASES = ("plain", "pipeline", "same_bits", "shared", "spread", "processes", "numbers")
LIMIT_S = 450  # of all cases together
LOSSES_APART = 2e-2
LEAVES_APART = {"bfloat16": 5e-2, "float32": 1e-4}  # norm of the difference / norm, of the worst leaf


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT in four stages, and a step of it."""

    width: int = 2048
    heads: int = 16
    layers: int = 5  # of a stage
    vocabulary: int = 32768
    length: int = 1024
    rows: int = 4
    microbatches: int = 8
    stages: int = 4
    dtype: str = "bfloat16"
    steps: int = 10


TINY = Config(width=64, heads=4, layers=1, vocabulary=256, length=32, rows=2, microbatches=4, steps=3)
SIZES = {
    "full": Config(),
    "small": Config(
        width=1024, layers=1, vocabulary=8192, length=256, microbatches=4, steps=3
    ),  # 67 million parameters
    "tiny": TINY,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the smallest model, on CPU unless JAX_PLATFORMS is set")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the models (default: %(default)s)")
    parser.add_argument("--case", choices=("devices", *CASES), help="run this one here, and print its figures as JSON")
    args = parser.parse_args()
    size = "tiny" if args.tiny else args.size
    if args.case:
        found = RUN[args.case](SIZES[size])
        if found is not None:
            print(MARK + json.dumps(found), flush=True)
        return 0
    return report(size)


# --- the parent -----------------------------------------------------------------------------------


def report(size: str) -> int:
    """Runs all cases that the machine allows, and prints a table."""
    if size == "tiny":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    begin = time.monotonic()
    devices = run_case("devices", size, 120)
    if devices is None:
        return 1
    print(f"{devices['count']} × {devices['kind']}, JAX {devices['jax']}", flush=True)
    if devices["platform"] == "cpu" and size != "tiny":
        print("There is no GPU here. Try the code with --tiny.", file=sys.stderr)
        return 1
    found: dict[str, Any] = {}
    failed = False
    for case in CASES:
        if case in ("spread", "processes") and devices["count"] < 2:
            continue
        left = LIMIT_S - (time.monotonic() - begin)
        found[case] = run_case(case, size, left, devices["count"]) if left > 20 else None
        failed |= found[case] is None
        print(f"{case:10} {describe(found[case])}", flush=True)
    return int(failed or not compare(found))


def run_case(case: str, size: str, limit_s: float, num_devices: int = 1) -> dict[str, Any] | None:
    """Runs a case in its own processes. Returns its figures; None if it failed, after printing why."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", case, "--size", size]
    environment = dict(os.environ)
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    if case not in ("devices", "spread", "processes"):
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if case in ("shared", "processes"):
        num_processes = 2 if case == "shared" or num_devices < 4 else 4
        devices = ["--cpu-devices", "1"] if on_cpu else ["--gpus-per-process", "1"] if case == "processes" else []
        command = [str(ROOT / "scripts/launch_multihost.sh"), "-n", str(num_processes), *devices, "--", *command]
    if case == "same_bits":
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    if case == "shared":
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.45"
    try:
        run = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"{case}: not done after {limit_s:.0f} s", file=sys.stderr)
        return None
    lines = [line.partition(MARK)[2] for line in run.stdout.splitlines() if MARK in line]
    if run.returncode or not lines:
        print(f"{case}: exit status {run.returncode}\n{(run.stdout + run.stderr)[-3000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def describe(figures: dict[str, Any] | None) -> str:
    """Formats the figures of a case as a line."""
    if figures is None:
        return "failed"
    parts = []
    for name, value in figures.items():
        if name.endswith("_s"):
            parts.append(f"{name[:-2].replace('_', ' ')} {value * 1e3:,.1f} ms")
        elif name.endswith("_nbytes"):
            parts.append(f"{name[:-7].replace('_', ' ')} {'unknown' if value is None else f'{value / 1e9:.3f} GB'}")
        elif isinstance(value, float):
            parts.append(f"{name.replace('_', ' ')} {value:.3g}")
        elif not isinstance(value, list):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def compare(found: dict[str, Any]) -> bool:
    """Prints ratios to plain `jax.jit`. Returns whether all computed the same."""
    plain, right = found.get("plain"), True
    for case in ("pipeline", "same_bits", "shared", "spread", "processes"):
        mine = found.get(case)
        if plain is None or mine is None:
            continue
        worst = max(abs(a - b) / abs(b) for a, b in zip(mine["losses"], plain["losses"], strict=True))
        right &= worst < LOSSES_APART
        ratio = mine["step_s"] / plain["step_s"]
        print(f"{case} / plain: step time {ratio:.3f}, first call {mine['first_call_s'] / plain['first_call_s']:.2f},"
              f" losses at most {worst:.1e} apart")  # fmt: skip
    for name, worst in (found.get("numbers") or {}).items():
        right &= worst < LEAVES_APART[name] if name in LEAVES_APART else bool(worst)
    return right


# --- the model ------------------------------------------------------------------------------------


def build(c: Config, pipelined: bool):
    """Returns functions `init(key)` and `step(state, tokens)`."""
    import jax
    import jax.numpy as jnp

    import mpmd

    dtype = jnp.dtype(c.dtype)

    def norm(scale, x):
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    @jax.checkpoint
    def layer(x, p):
        h = norm(p["norm"][0], x)
        qkv = (h @ p["qkv"]).reshape(*x.shape[:2], 3, c.heads, c.width // c.heads)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(p["norm"][1], x) @ p["up"]) @ p["down"], None

    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        for i, p in enumerate(params["stages"]):
            x = jax.lax.scan(layer, x, p)[0]
            x = mpmd.mark_stage_end(x) if i < c.stages - 1 else x
        logits = (norm(params["norm"], x) @ params["head"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def init(key):
        def array(i, *sizes, scale=0.02):
            return (scale * jax.random.normal(jax.random.fold_in(key, i), sizes)).astype(dtype)

        d, n = c.width, c.layers
        stages = [
            {
                "norm": jnp.ones((n, 2, d), dtype),
                "qkv": array(10 * i, n, d, 3 * d), "out": array(10 * i + 1, n, d, d),
                "up": array(10 * i + 2, n, d, 4 * d), "down": array(10 * i + 3, n, 4 * d, d),
            }
            for i in range(1, c.stages + 1)
        ]  # fmt: skip
        params = {
            "embedding": array(1, c.vocabulary, d), "stages": stages, "norm": jnp.ones(d, dtype),
            "head": array(2, d, c.vocabulary),
        }  # fmt: skip
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return params, zeros, zeros

    def step(state, tokens):
        params, first, second = state
        schedule = "1f1b" if pipelined else None
        value, grads = mpmd.treduce(
            lambda t: jax.value_and_grad(loss)(params, t), tokens, schedule=schedule, operation=mpmd.Mean
        )
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(m.dtype), first, grads)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g.astype(v.dtype) ** 2, second, grads)
        params = jax.tree.map(
            lambda p, m, v: (p - 1e-3 * m / (jnp.sqrt(v) + 1e-6)).astype(p.dtype), params, first, second
        )
        return (params, first, second), value

    return init, step


def tokens_of(c: Config):
    import numpy as np

    return np.random.default_rng(0).integers(0, c.vocabulary, (c.microbatches, c.rows, c.length + 1), np.int32)


def mesh_of(c: Config, devices):
    """Makes groups of one device each, in order; they share devices if there are too few."""
    import numpy as np
    from jax.sharding import Mesh

    import mpmd

    groups = [devices[i * len(devices) // c.stages] for i in range(c.stages)]
    return mpmd.MpmdMesh.from_groups([Mesh(np.array([d]), ("data",)) for d in groups])


# --- the cases, each in its own process -----------------------------------------------------------


def devices_case(c: Config) -> dict[str, Any]:
    import jax

    found = jax.devices()
    kind, platform = found[0].device_kind, found[0].platform
    return {"count": len(found), "kind": kind, "platform": platform, "jax": jax.__version__}


def plain_case(c: Config) -> dict[str, Any]:
    import jax

    init, step = build(c, pipelined=False)
    state, tokens = jax.jit(init)(jax.random.key(0)), tokens_of(c)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
    state, value = compiled(state, tokens)
    first_call_s = float_after(value, state, begin)
    m: Any = compiled.memory_analysis()
    alive = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return {"first_call_s": first_call_s, **measured(c, compiled, state, tokens), "analysis_nbytes": alive}


def pipeline_case(c: Config) -> dict[str, Any]:
    import jax

    return pipelined_case(c, jax.devices()[:1])


def spread_case(c: Config) -> dict[str, Any]:
    import jax

    return pipelined_case(c, jax.devices()[: c.stages])


def job_case(c: Config) -> dict[str, Any] | None:
    """Runs a case in a process of a job, with the groups in order on the devices of all processes."""
    import jax

    import mpmd

    mpmd.initialize()
    found = pipelined_case(c, jax.devices()[: c.stages])
    return found if jax.process_index() == 0 else None


def pipelined_case(c: Config, devices) -> dict[str, Any]:
    import jax

    import mpmd

    init, step = build(c, pipelined=True)
    mesh, tokens = mesh_of(c, devices), tokens_of(c)
    abstract = jax.eval_shape(init, jax.random.key(0))
    begin = time.perf_counter()
    compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower(abstract, tokens).compile()
    compiling_s = time.perf_counter() - begin
    layouts = compiled.input_shardings[0][0]
    state = mpmd.jit(init, mpmd_mesh=mesh, out_shardings=layouts)(jax.random.key(0))
    local(state)
    begin = time.perf_counter()
    state, value = compiled(state, tokens)
    first_call_s = compiling_s + float_after(value, state, begin)
    here = jax.local_devices()[0]
    groups = [g for g in mesh.local_groups if here in mesh.groups[g].devices.flat]
    analysis = compiled.memory_analysis()
    nbytes = sum(analysis[g]["peak"] for g in groups)
    return {"first_call_s": first_call_s, **measured(c, compiled, state, tokens), "analysis_nbytes": nbytes}


def local(tree) -> None:
    """Waits for this process's part of arrays of either kind."""
    import jax

    jax.block_until_ready(jax.tree.map(lambda x: getattr(x, "to_mpmd_local_array", x), tree))


def float_after(value, state, begin: float) -> float:
    local((value, state))
    return time.perf_counter() - begin


def measured(c: Config, compiled, state, tokens) -> dict[str, Any]:
    """Returns step time, losses, memory, and the figures of a profile of two steps."""
    import jax

    import mpmd

    times, losses = [], []
    for _ in range(c.steps):
        begin = time.perf_counter()
        state, value = compiled(state, tokens)
        times.append(float_after(value, state, begin))
        losses.append(float(mpmd.device_get(value)))
    stats = jax.local_devices()[0].memory_stats() or {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(2):
                state, value = compiled(state, tokens)
            local((value, state))
        gaps = kernel_gaps(Path(folder))
    return {"step_s": statistics.median(times), "losses": losses, "peak_nbytes": stats.get("peak_bytes_in_use"), **gaps}


def kernel_gaps(folder: Path) -> dict[str, float]:
    """Reads a profile: the part of the time in which a kernel runs, and the time between kernels."""
    import jax

    spans: list[tuple[float, float]] = []
    for path in folder.rglob("*.xplane.pb"):
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        on_devices = [p for p in planes if p.name.startswith("/device:GPU")]
        for plane in on_devices[:1] or [p for p in planes if p.name == "/host:CPU"]:
            for line in plane.lines:
                if line.name.startswith("Stream") or (not on_devices and "XLA" in line.name):
                    spans += [(e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    if not spans:
        return {}
    spans.sort()
    busy, end, gaps = 0.0, spans[0][0], []
    for start, stop in spans:
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    gaps = gaps or [0.0]
    return {
        "busy": busy / (end - spans[0][0]), "kernels": len(spans), "median_gap_s": statistics.median(gaps) / 1e9,
        "longest_gap_s": max(gaps) / 1e9,
    }  # fmt: skip


def numbers_case(c: Config) -> dict[str, Any]:
    """Returns how far the leaves of the state are apart after two steps, and whether the old state is gone."""
    import jax
    import numpy as np

    import mpmd

    found: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        small = dataclasses.replace(TINY, dtype=dtype)
        tokens, states, deleted = tokens_of(small), [], True
        with jax.default_matmul_precision("highest"):
            for pipelined in (False, True):
                init, step = build(small, pipelined)
                state = jax.jit(init)(jax.random.key(0))
                mesh = mesh_of(small, jax.devices()[:1])
                step = (
                    mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0) if pipelined else jax.jit(step, donate_argnums=0)
                )
                for _ in range(2):
                    old, (state, _) = state, step(state, tokens)
                deleted &= all(x.is_deleted() for x in jax.tree.leaves(old))
                states.append(mpmd.device_get(state))
        pairs = zip(*map(jax.tree.leaves, states), strict=True)
        norm = np.linalg.norm
        apart = [norm(a - b) / max(norm(a), 1e-9) for a, b in ((np.float32(a), np.float32(b)) for a, b in pairs)]
        found[dtype] = float(max(apart))
        found[f"donated_{dtype}"] = deleted
    return found


RUN = {
    "devices": devices_case, "plain": plain_case, "pipeline": pipeline_case, "same_bits": pipeline_case,
    "shared": job_case, "spread": spread_case, "processes": job_case, "numbers": numbers_case,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
