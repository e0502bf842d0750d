"""docs/mistakes.md: each mistake is made as printed, and gives the message that is printed, whole.

`MPMD_UPDATE_GOLDEN=1 python -m pytest tests/pages/test_mistakes_page.py` writes the messages into the page.
"""

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mistakes.md"
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("mpmd", "reshard", "scheduler"))

ENTRY = re.compile(
    r"^### (?P<title>[^\n]+)\n\n```python\n(?P<program>.*?)^```\n\n```text\n(?P<message>.*?)^```$", re.M | re.S
)
PREAMBLE, OF_JOBS = re.findall(r"<!-- preamble[a-z ]* -->\n+```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
ENTRIES = {entry["title"]: entry for entry in ENTRY.finditer(PAGE.read_text())}
(JOBS,) = (
    [title for title in ENTRIES if f"\n### {title}\n" in section]
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M) if OF_JOBS in section
)  # fmt: skip


@pytest.fixture(scope="module")
def prepared() -> dict:
    names: dict = {}
    exec(compile(PREAMBLE, "preamble.py", "exec"), names)
    return names


def message_of(program: str, names: dict, folder: Path) -> str:
    """`Type: message` of the error that the program raises, free of what differs between machines."""
    with pytest.raises(Exception) as raised:
        exec(compile(program, "train.py", "exec"), dict(names))
    frames = traceback.extract_tb(raised.value.__traceback__)
    library = [f for f in frames if f.filename.startswith(PACKAGES)]
    assert len(library) <= 5, "\n".join(f"{f.filename}:{f.lineno} {f.name}" for f in library)
    text = f"{type(raised.value).__name__}: {raised.value}".replace(str(folder), "run")
    return re.sub(r"(\.py:\d+):\d+(-\d+)?", r"\1", text).rstrip() + "\n"


def message_of_job(program: str, folder: Path) -> str:
    """The same of a job of two processes: the error, as one of them prints it."""
    (folder / "program.py").write_text(f"{OF_JOBS}\n\n{program}")
    launched = [str(ROOT / "scripts/launch_multihost.sh"), "-n", "2", "--cpu-devices", "1", "--", sys.executable]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    run = subprocess.run(
        [*launched, str(folder / "program.py")],
        env=clean | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    errors = re.findall(r"^\[(\d)\] (?:\w+\.)*(\w+Error: .*\n(?:\[\1\]   .*\n)*)", run.stderr, re.M)
    assert errors, run.stderr
    return re.sub(r"^\[\d\] ", "", errors[0][1], flags=re.M)


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.slow] * (title in JOBS)) for title in ENTRIES]
)
def test_a_mistake_gets_the_message_that_the_page_prints(title, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, is_job = ENTRIES[title]["program"], title in JOBS
    message = message_of_job(program, tmp_path) if is_job else message_of(program, prepared, tmp_path)
    if os.environ.get("MPMD_UPDATE_GOLDEN"):
        page = PAGE.read_text()
        old = f"```python\n{program}```\n\n```text\n{ENTRIES[title]['message']}```"
        assert page.count(old) == 1, title
        PAGE.write_text(page.replace(old, f"```python\n{program}```\n\n```text\n{message}```"))
    else:
        assert message == ENTRIES[title]["message"]


def test_the_page_has_no_mistake_that_is_not_made():
    assert len(ENTRIES) >= 60
    assert len(ENTRIES) == PAGE.read_text().count("\n### ")
