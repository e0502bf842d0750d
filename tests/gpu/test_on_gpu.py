"""What only a GPU can show: numbers, donation, memory and two processes there. The same programs run on CPU devices.

    python -m pytest -m gpu

The programs are the cases of `benchmarks/gpu.py`, each in processes of its own: this one has CPU devices only.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_JAX_FOR_GPUS = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
)
LIMIT_S = 240
MB = 1 << 20


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks/gpu.py")
    module = sys.modules["gpu_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    """JAX finds the GPU in the processes that are started from here."""
    if not Path("/dev/nvidia0").exists():
        pytest.skip("needs an NVIDIA GPU")
    if not HAS_JAX_FOR_GPUS:
        pytest.skip("needs JAX for NVIDIA GPUs: pip install -e '.[cuda]'")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)


def figures(benchmark, case, size="tiny"):
    found = benchmark.run_case(case, size, LIMIT_S)
    assert found is not None, "the case failed; see above"
    return found


@pytest.mark.gpu
def test_numbers_are_those_of_plain_jit_and_the_old_state_is_gone(gpu, benchmark):
    found = figures(benchmark, "numbers")
    assert benchmark.compare({"numbers": found}), found


@pytest.mark.gpu
def test_memory_is_what_the_analysis_says(gpu, benchmark):
    """Peaks of groups need not coincide, and the allocator rounds up."""
    found = figures(benchmark, "pipeline", "small")
    assert 0.6 * found["analysis_nbytes"] < found["peak_nbytes"] < 1.05 * found["analysis_nbytes"] + 64 * MB


@pytest.mark.gpu
def test_two_processes_share_a_gpu(gpu, benchmark):
    assert figures(benchmark, "shared")["losses"] == pytest.approx(figures(benchmark, "plain")["losses"], rel=2e-2)


@pytest.mark.slow
def test_the_same_programs_run_on_cpu_devices(benchmark, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    found = {case: figures(benchmark, case) for case in ("plain", "shared", "numbers")}
    assert 0 < found["plain"]["busy"] <= 1
    assert found["shared"]["analysis_nbytes"] > 0
    losses = found["plain"]["losses"]
    assert losses[-1] < losses[0]
    assert benchmark.compare(found)
    found["shared"]["losses"][-1] *= 1.1
    assert not benchmark.compare(found)
    assert not benchmark.compare({"numbers": found["numbers"] | {"donated_float32": False}})
    assert not benchmark.compare({"numbers": found["numbers"] | {"bfloat16": 0.1}})
