"""docs/mistakes.md: each mistake is made as printed, and gives the message that is printed, whole.

`MPMD_UPDATE_GOLDEN=1 python -m pytest tests/test_mistakes_page.py` writes the messages into the page.
"""

import os
import re
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "mistakes.md"
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("mpmd", "reshard", "scheduler"))

ENTRY = re.compile(
    r"^### (?P<title>[^\n]+)\n\n```python\n(?P<program>.*?)^```\n\n```text\n(?P<message>.*?)^```$", re.M | re.S
)
(PREAMBLE,) = re.findall(r"<!-- preamble -->\n+```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
ENTRIES = {entry["title"]: entry for entry in ENTRY.finditer(PAGE.read_text())}


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


@pytest.mark.parametrize("title", ENTRIES)
def test_a_mistake_gets_the_message_that_the_page_prints(title, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = ENTRIES[title]
    message = message_of(entry["program"], prepared, tmp_path)
    if os.environ.get("MPMD_UPDATE_GOLDEN"):
        page = PAGE.read_text()
        old = f"```python\n{entry['program']}```\n\n```text\n{entry['message']}```"
        assert page.count(old) == 1, title
        PAGE.write_text(page.replace(old, f"```python\n{entry['program']}```\n\n```text\n{message}```"))
    else:
        assert message == entry["message"]


def test_the_page_has_no_mistake_that_is_not_made():
    assert len(ENTRIES) >= 60
    assert len(ENTRIES) == PAGE.read_text().count("\n### ")
