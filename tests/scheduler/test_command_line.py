"""``python -m scheduler``: what each command prints and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.__main__ import main
from scheduler.documents import write_documents

DOCS = Path(__file__).parents[2] / "docs"


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_module_runs_without_jax():
    code = "import sys, scheduler.__main__; print('jax' in sys.modules or 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_show_draws_and_writes_pictures_and_orders(capsys, tmp_path):
    svg, trace, orders = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.csv"
    status, out, _ = run(
        capsys, "show", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", str(svg), "--trace", str(trace),
        "--csv", str(orders),
    )  # fmt: skip
    assert status == 0
    assert out == (
        "OneFOneB: 2 groups, 2 stages, 8 tasks, makespan 9, bubble 33.3%\n"
        "   0 |F0 F1       B0       B1    | 2 held, idle 3\n"
        "   1 |   F0 B0    F1 B1          | 1 held, idle 0\n"
        "critical path: 0F0 1F0 1B0 1F1 1B1 0B1\n"
    )
    assert svg.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]
    assert orders.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    status, out, _ = run(capsys, "show", str(orders), "--json")
    assert json.loads(out)["makespan"] == 9


@pytest.mark.parametrize("name", ["zb-v", "DualPipeV", "interleaved-1f1b", "kimi_k2"])
def test_show_knows_schedules_by_both_names(capsys, name):
    status, out, _ = run(capsys, "show", name, "--stages", "4", "--microbatches", "4", "--json")
    assert status == 0
    assert json.loads(out)["groups"] == 2


def test_compare_lists_all_schedules_for_the_same_work(capsys):
    status, out, _ = run(capsys, "compare", "--stages", "4", "--microbatches", "8", "--json")
    table = json.loads(out)
    rows = {row["schedule"]: row for row in table["rows"]}
    assert status == 0
    assert len(rows) == 13
    assert rows["1f1b"]["makespan"] == 33
    assert rows["zb-v"]["makespan"] == 24 + 1.5
    assert rows["zb-v"]["above_bound"] == 0
    status, out, _ = run(capsys, "compare", "--stages", "4", "--microbatches", "6", "--memory", "3")
    assert "left out: interleaved-1f1b: InterleavedOneFOneB: num_microbatches is 6" in out
    assert "left out: gpipe: holds 6" in out


def test_compare_reads_costs(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 2], "transfer_s": 0.5}')
    status, out, _ = run(capsys, "compare", "--stages", "2", "--microbatches", "4", "--costs", str(path))
    assert status == 0
    assert "zb-v" in out


def test_search_prints_its_distance_from_the_bound(capsys, tmp_path):
    path = tmp_path / "found.csv"
    arguments = ["search", "--stages", "4", "--microbatches", "4", "--placement", "v", "--seconds", "0.2"]
    status, out, err = run(capsys, *arguments, "--csv", str(path))
    assert status == 0
    assert out.startswith("makespan 25, at the bound 25")
    assert err.startswith("best built-in: zb-v with 25")
    status, out, _ = run(capsys, "check", str(path))
    assert out == f"{path}: right; 2 groups, 4 stages, 4 microbatches, 16 transfers\n"
    status, out, _ = run(capsys, *arguments, "--memory", "4,4", "--json")
    assert json.loads(out)["at_bound"] is True


def test_check_lists_every_fault_of_a_file(capsys, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0B0,0B0\n1B0,1F0\n")
    status, _, err = run(capsys, "check", str(path))
    assert status == 1
    assert err == "error: CustomSchedule: 1 fault.\n  task 0B0 runs 2 times; expected once.\n"
    status, out, _ = run(capsys, "check", str(path), "--json")
    assert status == 1
    assert json.loads(out) == {
        "right": False,
        "error": "CustomSchedule: 1 fault.\n  task 0B0 runs 2 times; expected once.",
        "faults": ["task 0B0 runs 2 times; expected once"],
    }


def test_wrong_arguments_end_with_status_1_and_advice(capsys):
    status, _, err = run(capsys, "show", "best", "--stages", "2", "--microbatches", "2")
    assert status == 1
    assert err.startswith("error: unknown schedule 'best'; expected one of gpipe, 1f1b,")
    status, _, err = run(capsys, "show", "zb-v", "--stages", "3", "--microbatches", "2")
    assert err == "error: zb-v has two stages a group; num_stages is 3. Use an even number.\n"


@pytest.mark.parametrize("command", [[], ["show"], ["compare"], ["search"], ["check"], ["documents"]])
def test_every_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert ("Example: python -m scheduler" in capsys.readouterr().out) == bool(command)


def test_the_documents_are_up_to_date(tmp_path):
    for path in write_documents(tmp_path):
        committed = path.relative_to(tmp_path)
        assert path.read_text() == (DOCS / committed).read_text(), "run: python -m scheduler documents docs"
