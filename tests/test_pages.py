"""What docs/tutorial.md, docs/inference.md and docs/stages.md print is true: their examples run as printed, in turn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_examples", "printed"),
    [
        ("inference", 6, ["step on MpmdMesh('stage': 4; 4 groups along 'stage')"]),
        (
            "stages",
            4,
            [
                "layers of each stage: (4, 3, 3, 2)",
                "; no cut is faster",
                "axis 0 split {0: 0:4, 1: 4:8, 2: 8:11, 3: 11:12}",
            ],
        ),
        ("tutorial", 6, ["step on MpmdMesh('stage': 4; 4 groups along 'stage')", "\n(2,)\n", "loss on unseen data: "]),
    ],
)
def test_the_examples_run_as_printed(name, num_examples, printed):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(rf"<!-- {name}: python -->\n+```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```python") == num_examples
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], env=environment, text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for text in printed:
        assert text in run.stdout
