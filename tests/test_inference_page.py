"""What docs/inference.md prints is true: its examples run as printed, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "inference.md").read_text()


@pytest.mark.slow
def test_the_examples_run_as_printed():
    blocks = re.findall(r"<!-- inference: python -->\n+```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == PAGE.count("```python") == 6
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], env=environment, text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "step on MpmdMesh('stage': 4; 4 groups along 'stage')" in run.stdout
