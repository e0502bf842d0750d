"""The architecture page is true: rooms as the layering test holds them, files and tests that exist, every file listed.

    MPMD_UPDATE_GOLDEN=1 python -m pytest tests/pages/test_architecture_page.py

writes the list of files anew, from the first line of each file's docstring.
"""

import ast
import os
import re
from pathlib import Path

from test_layering import BELOW_ALL_ROOMS, PACKAGES, ROOMS, ROOT

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files: from their docstrings -->\n", "<!-- end of files -->\n"


def _listed() -> str:
    lines = []
    for package in PACKAGES[::-1]:
        folders = sorted(p.parent for p in (ROOT / package).rglob("__init__.py"))
        order = [package, *ROOMS]
        for folder in sorted(folders, key=lambda f: _rank(f.relative_to(ROOT).as_posix(), order)):
            lines += ["", f"**`{folder.relative_to(ROOT).as_posix()}/`**", ""]
            for file in sorted(folder.glob("*.py")):
                if file.name != "__init__.py" or folder.name == "checkpoint":
                    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
                    lines.append(f"- `{file.name}`: {docstring.split(chr(10) * 2)[0].replace(chr(10), ' ')}")
    return "\n".join(lines) + "\n\n"


def _rank(folder: str, order: list[str]) -> int:
    return order.index(folder) if folder in order else len(order)


def test_every_file_is_listed_with_what_it_says_of_itself():
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    if os.environ.get("MPMD_UPDATE_GOLDEN"):
        PAGE.write_text(before + BEGIN + _listed() + END + after)
        return
    assert found == _listed()


def test_the_table_of_rooms_is_the_one_that_is_held():
    rows = re.findall(r"^\| `(\w+/\w+)` \|[^|]*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    table = {room: () if imports == "–" else tuple(imports.split(", ")) for room, imports in rows}
    assert table == ROOMS


def test_what_the_page_names_exists():
    page = PAGE.read_text().partition(BEGIN)[0]
    paths = re.findall(r"`((?:mpmd|reshard|scheduler|tests|benchmarks|scripts)/[\w/.]*)`", page)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    below = [f"{package}/{name}" for package, names in BELOW_ALL_ROOMS.items() for name in names]
    assert [b for b in below if not (ROOT / b).exists() and not Path(ROOT / f"{b}.py").exists()] == []
