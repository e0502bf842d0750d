"""What the README prints is true: its program runs as printed, its picture is what the scheduler draws."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scheduler

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def fenced(language: str, after: str) -> str:
    """The first fenced block of that language behind a marker comment."""
    match = re.search(rf"<!-- {re.escape(after)} -->\n+```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert match, f"README.md has no {language} block behind <!-- {after} -->"
    return match[1]


def test_the_program_runs_as_printed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(fenced("python", "program"))
    assert sum(bool(line.strip()) for line in program.read_text().splitlines()) == 15
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, str(program)], env=environment, text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_the_picture_is_what_the_scheduler_draws():
    drawn = str(scheduler.simulate(scheduler.OneFOneB(4), 8))
    printed = fenced("text", "picture")
    assert [line.rstrip() for line in printed.splitlines()] == [line.rstrip() for line in drawn.splitlines()]


@pytest.mark.parametrize("name", ["train", "tests"])
def test_a_command_is_one_line_that_makes_its_own_environment(name):
    (command,) = fenced("sh", f"command: {name}").splitlines()
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    for word in re.findall(r"\S+\.py\b", command):
        assert (ROOT / word).exists()
