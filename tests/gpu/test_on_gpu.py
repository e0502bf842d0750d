"""What only a GPU can show: numbers, donation, memory and two processes there. The same programs run on CPU devices.

    python -m pytest -m gpu

The programs are the cases of `benchmarks/gpu.py`, each in processes of its own: this one has CPU devices only.
"""

import importlib.util
import os
import subprocess
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
def programs():
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


def figures(programs, case, size="tiny"):
    found = programs.run_case(case, size, LIMIT_S)
    assert found is not None, "the case failed; see above"
    return found


@pytest.mark.gpu
def test_numbers_are_those_of_plain_jit_and_the_old_state_is_gone(gpu, programs):
    found = figures(programs, "numbers")
    assert programs.compare({"numbers": found}), found


@pytest.mark.gpu
def test_memory_is_what_the_analysis_says(gpu, programs):
    """Peaks of groups need not coincide, and the allocator rounds up."""
    found = figures(programs, "pipeline", "small")
    assert 0.6 * found["analysis_nbytes"] < found["peak_nbytes"] < 1.05 * found["analysis_nbytes"] + 64 * MB


@pytest.mark.gpu
def test_two_processes_share_a_gpu(gpu, programs):
    assert figures(programs, "shared")["losses"] == pytest.approx(figures(programs, "plain")["losses"], rel=2e-2)


@pytest.mark.gpu
def test_runs_without_kernels_in_any_order_have_the_same_bits(gpu, programs):
    first, second = (figures(programs, "same_bits", "small")["losses"] for _ in range(2))
    assert first == second


@pytest.mark.gpu
def test_processes_that_audit_each_other_on_a_gpu_raise_no_alarm(gpu):
    """Each process chooses its kernels, and gradients of an embedding are added up in any order, unless told not to."""
    train = [sys.executable, ROOT / "examples/train_gpt.py", "--steps", "10", "--audit-every", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    run = subprocess.run(
        [ROOT / "scripts/launch_multihost.sh", "-n", "4", "--", *train],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "step 10/10" in said


@pytest.mark.slow
def test_the_same_programs_run_on_cpu_devices(programs, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    found = {case: figures(programs, case) for case in ("plain", "shared", "numbers")}
    assert 0 < found["plain"]["busy"] <= 1
    assert found["shared"]["analysis_nbytes"] > 0
    losses = found["plain"]["losses"]
    assert losses[-1] < losses[0]
    assert programs.compare(found)
    found["shared"]["losses"][-1] *= 1.1
    assert not programs.compare(found)
    assert not programs.compare({"numbers": found["numbers"] | {"donated_float32": False}})
    assert not programs.compare({"numbers": found["numbers"] | {"bfloat16": 0.1}})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tiny", "kernels"])
def test_what_holds_a_plan_against_a_gpu_runs_on_cpu_devices(case):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, ROOT / "benchmarks/gpu_plan.py", case]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert len(run.stdout.splitlines()) >= 4
