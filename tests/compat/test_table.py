"""Each row of docs/compatibility.md names tests that exist, under the schedules and with the error that it says."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_TESTS = r"(?P<tests>`\S+`(, `\S+`)*) \|$"
ROW = re.compile(rf"^\| (?P<feature>.+) \| (?P<works>yes|yes \(1F1B\)|error: `.+`) \| {_TESTS}")
PROCESSES_ROW = re.compile(rf"^\| (?P<feature>.+) \| (?P<layouts>\d+×\d+(, \d+×\d+)*) \| {_TESTS}")

# Scripts and tools that are run under one schedule alone; all others compare a step with plain JAX under two.
UNDER_1F1B_ALONE = {
    "Flax NNX example",
    "Equinox example",
    "one trace for all devices of one shape",
    "JAX's persistent compilation cache",
    "operations of `jax.numpy` and `jax.lax`, on arguments and computed values, on Auto and Explicit axes",
    "`jax.disable_jit` (plain Python on one device)",
}


def _lines():
    """The lines of all tables: those of features, and those of processes."""
    before, title, after = (ROOT / "docs" / "compatibility.md").read_text().partition("## Over several processes")
    assert title
    section, _, _ = after.partition("\n## ")
    whole = before + after.removeprefix(section)
    heads = re.compile(r"\| feature \||\|---")
    return [[s for s in t.splitlines() if s.startswith("|") and not heads.match(s)] for t in (whole, section)]


def _matched(pattern, lines):
    matched = [(line, pattern.match(line)) for line in lines]
    assert all(match for _, match in matched), [line for line, match in matched if not match]
    return [match for _, match in matched if match]


def _rows():
    return _matched(ROW, _lines()[0])


def _tests(row) -> list[str]:
    return re.findall(r"`(\S+)`", row["tests"])


def _found(test: str):
    """The function of a test that a row names, after a look whether the case in brackets is one of its cases."""
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    folder = str((ROOT / path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    function = getattr(importlib.import_module(Path(path).stem), name)
    assert name.startswith("test_")
    names = {str(x) for value in _parameters(function) for x in (value if isinstance(value, tuple) else (value,))}
    assert not case or case.removesuffix("]") in names, f"{path} has no case {case}"
    return function


def _parameters(function) -> list:
    """The values that a test is parametrized with, those of slow tests too."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    values = []
    for value in (value for mark in marks for value in mark.args[1]):
        values += value.values if hasattr(value, "marks") else [value]
    return values


def _runs_both(functions) -> bool:
    values = " ".join(str(value) for function in functions for value in _parameters(function))
    return all(re.search(rf"\b({schedule})\b", values) for schedule in ("OneFOneB|1f1b", "ZeroBubbleH1|zb-h1"))


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row["feature"].replace("`", "")[:60])
def test_a_row_of_the_table_has_its_tests(row):
    functions = [_found(test) for test in _tests(row)]
    if row["works"].startswith("yes"):
        alone = row["feature"] in UNDER_1F1B_ALONE
        assert row["works"] == ("yes (1F1B)" if alone else "yes")
        assert _runs_both(functions) != alone, f"whether its tests run under both 1F1B and ZB-H1: {not alone} expected"
        return
    (function,) = functions
    promised = re.findall(r"`(.+)`", row["works"])[0]
    text = Path(inspect.getfile(function)).read_text()
    joined = re.sub(r'"\s*f?"', "", text)  # strings that are written in several pieces
    assert promised in joined or promised in _all_errors(), f"{promised!r} is in no message that {function} compares"
    source = inspect.getsource(function)
    assert "raises" in source or "_refus" in source, f"{function} expects no error"


def _all_errors() -> str:
    """The sources of the package, for tests that compare parts of a message."""
    return "\n".join(re.sub(r'"\s*f?"', "", p.read_text()) for p in sorted((ROOT / "mpmd").rglob("*.py")))


@pytest.mark.parametrize("row", _matched(PROCESSES_ROW, _lines()[1]), ids=lambda row: row["feature"].replace("`", ""))
def test_a_row_over_several_processes_is_a_row_and_names_layouts_that_run(row):
    assert row["feature"] in {other["feature"] for other in _rows()}
    layouts = re.findall(r"\d+x\d+", row["tests"])
    assert set(layouts) == set(row["layouts"].replace("×", "x").split(", "))
    for test in _tests(row):
        name, _, case = test.partition("[")
        (mark,) = [mark for mark in _found(name).pytestmark if mark.name == "parametrize"]
        cases = [getattr(case, "values", case) for case in mark.args[1]]
        ids = ["-".join(map(mark.kwargs["ids"], values)) for values in cases]
        assert case.removesuffix("]") in ids


def test_every_test_of_this_folder_of_a_feature_that_works_is_in_the_table():
    named = {test.partition("::")[2].partition("[")[0] for row in _rows() for test in _tests(row)}
    modules = ["test_libraries", "test_parallel", "test_foreign", "test_reductions", "test_tracing"]
    for module in modules:
        path = Path(__file__).parent / f"{module}.py"
        tests = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert named.intersection(tests), f"the table names no test of {module}"
