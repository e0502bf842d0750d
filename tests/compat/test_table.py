"""Each row of docs/compatibility.md names a test that exists, and each error that it promises is in that test."""

import ast
import re
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parent.parent.parent
ROW = re.compile(r"^\| (?P<feature>.+) \| (?P<works>yes|error: `.+`) \| `(?P<test>\S+)` \|$")


def _rows():
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|") and not re.match(r"\| feature \||\|---", line)]
    matched = [(line, ROW.match(line)) for line in table]
    assert all(match for _, match in matched), [line for line, match in matched if not match]
    return [match for _, match in matched if match]


def _function(path: str, name: str):
    text = (ROOT / path).read_text()
    found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(found) == 1, f"{path} has {len(found)} functions {name}"
    return text, ast.get_source_segment(text, found[0]) or ""


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row["feature"].replace("`", "")[:60])
def test_a_row_of_the_table_has_its_test(row):
    path, _, name = row["test"].partition("::")
    name, _, case = name.partition("[")
    text, function = _function(path, name)
    assert name.startswith("test_")
    if case:
        case = case.removesuffix("]")
        assert f'"{case}"' in text or case in programs.BY_NAME, f"{path} has no case {case}"
    if row["works"] != "yes":
        promised = re.findall(r"`(.+)`", row["works"])[0]
        joined = re.sub(r'"\s*f?"', "", text)  # strings that are written in several pieces
        assert promised in joined or promised in _all_errors(), f"{promised!r} is in no message that {name} compares"
        assert "raises" in function or "_refus" in function, f"{name} expects no error"


def _all_errors() -> str:
    """The sources of the package, for tests that compare parts of a message."""
    return "\n".join(re.sub(r'"\s*f?"', "", p.read_text()) for p in sorted((ROOT / "mpmd").glob("*.py")))


def test_every_test_of_this_folder_of_a_feature_that_works_is_in_the_table():
    named = {row["test"].partition("::")[2].partition("[")[0] for row in _rows()}
    modules = ["test_libraries", "test_parallel", "test_foreign", "test_reductions", "test_tracing"]
    for module in modules:
        path = Path(__file__).parent / f"{module}.py"
        tests = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert named.intersection(tests), f"the table names no test of {module}"
