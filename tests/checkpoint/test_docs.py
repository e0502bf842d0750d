"""What docs/checkpoints.md prints is true: its examples run as printed, one after the other."""

import re
import subprocess
import sys

import pytest
from processes import ROOT, environment

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"<!-- checkpoints: {kind} -->\n+```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run_program(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(8), text=True, capture_output=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_examples_run_as_printed_and_stock_orbax_reads_what_they_save(tmp_path):
    programs, stock = blocks("python"), blocks("stock python")
    assert len(programs) == 7
    assert len(stock) == 1
    run_program("\n".join(programs).replace("/tmp/run", str(tmp_path)))
    run_program("\n".join(stock).replace("/tmp/run", str(tmp_path)))
    assert "reshard" not in stock[0]


def test_every_command_of_the_page_names_files_and_options_that_exist():
    (command,) = re.findall(r"^python (examples/\S+\.py .*)$", PAGE, re.MULTILINE)
    script, *options = command.split()
    text = (ROOT / script).read_text()
    for option in options:
        if option.startswith("--"):
            assert f'"{option}"' in text
    for script in re.findall(r"python (benchmarks/\S+\.py)", PAGE):
        assert (ROOT / script).exists()
