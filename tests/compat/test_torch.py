"""A stage written in PyTorch, through torchax, is trained between two that are written in JAX."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def _importable() -> str:
    """Why torchax cannot be imported here; empty if it can. In a process of its own: torch is large."""
    found = subprocess.run(
        [sys.executable, "-c", "import torchax"], text=True, capture_output=True, check=False, timeout=300
    )
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


@pytest.mark.parametrize("schedule", ["OneFOneB", "ZeroBubbleH1"])
def test_the_torch_example_trains_and_equals_plain_jax(schedule):
    if reason := _importable():
        pytest.skip(f"torchax cannot be imported: {reason}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "torch_stage.py"), "--steps", "60", "--check-against-jit",
         "--schedule", schedule], env=environment, text=True, capture_output=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert lines[-1] == "the same as jax.jit"
    assert losses[-1] < 0.5 * losses[0], lines
