"""The commands of docs/checkpoints.md on inspecting and converting run as printed, and print what is printed."""

import os
import re
import subprocess
import sys

import pytest
from stored_states import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
BLOCK = re.compile(
    r"<!-- checkpoint: (program|run|prints|file (\S+)) -->\n+```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def section():
    text = PAGE.read_text().partition("\n## Inspecting and converting\n")[2]
    return re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]


def steadied(text):
    """Without the bytes on disk, which depend on what Orbax writes beside the data."""
    return re.sub(r"[\d.]+ [KMG]?i?B on disk", "… on disk", text)


@pytest.fixture
def here(tmp_path):
    """A folder to work in, and its files instead of those in /tmp."""

    def run(command, text):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin",
        }
        done = subprocess.run(
            [*command, text.replace("/tmp/", f"{tmp_path}/")],
            cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.replace(f"{tmp_path}/", "/tmp/")

    return run


def outputs(run, tmp_path):
    """What each group of commands prints, and what the page says."""
    printed = ""
    for kind, file, text in BLOCK.findall(section()):
        if kind == "program":
            run([sys.executable, "-c"], text)
        elif kind == "run":
            printed = run(["bash", "-euc"], text)
        elif kind == "prints":
            yield printed, text
        else:
            (tmp_path / file).write_text(text)


@pytest.mark.slow
def test_the_commands_print_what_the_page_says(here, tmp_path):
    found = list(outputs(here, tmp_path))
    assert len(found) == 4
    for printed, said in found:
        assert steadied(printed) == steadied(said)


def test_every_command_of_the_section_is_run():
    blocks = re.findall(r"```sh\n", section())
    assert len(blocks) == sum(kind == "run" for kind, _, _ in BLOCK.findall(section()))
