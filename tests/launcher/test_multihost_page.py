"""What docs/multihost.md prints is true: its program runs as printed, the same in one process and in many."""

import re
import subprocess
import sys

import pytest
from launching import PATIENCE_S, ROOT, clean_environment, run

PAGE = (ROOT / "docs" / "multihost.md").read_text()


def program() -> str:
    (found,) = re.findall(r"<!-- program -->\n+```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.slow
def test_the_program_prints_the_same_in_one_process_and_in_many(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(program())
    alone = subprocess.run(
        [sys.executable, str(file)],
        env=clean_environment(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4"),
        text=True, capture_output=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    lines = alone.stdout.splitlines()
    assert len(lines) == 11
    commands = re.findall(r"^scripts/launch_multihost.sh (.*) -- python program.py$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for options in commands:
        status, job = run(*options.split(), "--", sys.executable, file)
        assert status == 0, job.err
        assert job.matches(r"^\[0\] (\d .*|mean .*)$") == lines
        assert job.matches(r"^\[[1-9]\] (\d .*|mean .*)$") == []
