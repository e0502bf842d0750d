"""``python -m scheduler``: what each command prints and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.__main__ import main
from scripts.schedules_guide import write_documents

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
    status, _, err = run(capsys, "show", str(orders), "--microbatches", "50")
    assert status != 0 and f"{orders}: the number of microbatches is 2; expected 50. Is it cut off?" in err


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
    assert err == ""  # how far it is is said on a terminal alone
    status, out, _ = run(capsys, "check", str(path))
    assert out == f"{path}: right; groups: 2, stages: 4, microbatches: 4, transfers: 16\n"
    status, out, _ = run(capsys, *arguments, "--memory", "4,4", "--json")
    assert json.loads(out)["at_bound"] is True


def test_check_lists_every_fault_of_a_file(capsys, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0B0,0B0\n1B0,1F0\n")
    status, _, err = run(capsys, "check", str(path))
    assert status == 1
    assert err == f"error: CustomSchedule.from_csv: {path}: 1 fault.\n  task 0B0 runs 2 times; expected once.\n"
    status, out, _ = run(capsys, "check", str(path), "--json")
    assert status == 1
    assert json.loads(out) == {
        "right": False,
        "error": f"CustomSchedule.from_csv: {path}: 1 fault.\n  task 0B0 runs 2 times; expected once.",
        "faults": ["task 0B0 runs 2 times; expected once"],
    }


KNOWN = (
    "gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2, interleaved-gpipe, interleaved-1f1b, kimi-k2, interleaved-zb, zb-v, v-half"
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND. See python -m scheduler --help."),
        ("check", "the following arguments are required: file. See python -m scheduler check --help."),
        (
            "show best --stages 2 --microbatches 2",
            f"unknown schedule 'best'; expected one of {KNOWN}, v-min, dualpipe-v.",
        ),
        (
            "show zb-v --stages 3 --microbatches 2",
            "zb-v has two stages a group; num_stages is 3. Use an even number.",
        ),
        ("show 1f1b --stages 2", "show: --microbatches is missing; give it, or a CSV file of orders."),
        ("show 1f1b --microbatches 2", "the number of stages or of groups is needed."),
        (
            "show 1f1b --stages 0 --microbatches 2",
            "argument --stages: '0' is no whole number of at least 1. See python -m scheduler show --help.",
        ),
        ("compare --stages 4", "compare: give --stages (or --groups) and --microbatches."),
        (
            "compare --stages 8 --groups 4 --microbatches 8",
            (
                "compare: --stages is 8 and --groups 4, but schedules with one stage a group and with several are "
                "compared on the same groups. Give --groups alone, and --stages-per-group for the latter."
            ),
        ),
        (
            "compare --stages 4 --microbatches many",
            "argument --microbatches: 'many' is no whole number of at least 1. See python -m scheduler compare --help.",
        ),
        (
            "search --stages 4 --microbatches 4 --memory abc",
            "argument --memory: 'abc' is no number of at least 0. See python -m scheduler search --help.",
        ),
        (
            "search --stages 4 --microbatches 4 --memory 4,nan,4,4",
            "argument --memory: 'nan' is no number of at least 0. See python -m scheduler search --help.",
        ),
        (
            "search --stages 4 --microbatches 4 --memory 4,4",
            "search: memory_limit has 2 entries; expected one for each of 4 groups.",
        ),
        (
            "search --stages 4 --microbatches 4 --seconds -1",
            "argument --seconds: '-1' is no number of at least 0. See python -m scheduler search --help.",
        ),
        (
            "search --stages 4 --microbatches 4 --placement 0,a",
            (
                "argument --placement: '0,a' is neither loop nor v nor a group for each stage, as in 0,1,1,0. "
                "See python -m scheduler search --help."
            ),
        ),
        ("check nowhere.csv", "nowhere.csv: No such file or directory."),
        ("show 1f1b --stages 2 --microbatches 2 --svg no/a.svg", "no/a.svg: No such file or directory."),
    ],
)
def test_wrong_arguments_end_with_status_2_and_one_line(capsys, tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *line.split()) == (2, "", f"error: {message}\n")
    status, out, err = run(capsys, *line.split(), "--json")
    assert (status, json.loads(out), err) == (2, {"right": False, "error": message, "faults": []}, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"{forward",
            "Costs: this is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1).",
        ),
        (b"\xff\xfe\x00", "this is not text; expected JSON."),
        (b"3", "Costs: the JSON is neither an object with costs nor a Chrome trace."),
        (
            b'{"traceEvents": [{"ph": "X", "name": "0F0"}, 3]}',
            "Costs: the Chrome trace has no complete event (ph X, with dur) named like a task, 2F0.",
        ),
        (
            b'{"forward": "fast", "bytes_per_s": 0}',
            (
                "Costs: forward holds 'fast'; bytes_per_s is 0."
                " Expected numbers of at least 0 (bytes_per_s: above 0), or one for each stage."
            ),
        ),
        (
            b'{"forwards": 1}',
            (
                "Costs: unknown names ['forwards']; expected some of ['activation_bytes', 'bytes_per_s', 'forward', "
                "'input_grad', 'microbatches', 'recompute', 'released_at_input_grad', 'transfer_bytes', 'transfer_s', "
                "'weight_grad'], or a Chrome trace."
            ),
        ),
    ],
)
def test_costs_that_cannot_be_read_are_refused_with_their_file(capsys, tmp_path, content, message):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    given = ["show", "1f1b", "--stages", "2", "--microbatches", "2", "--costs", str(path)]
    assert run(capsys, *given) == (2, "", f"error: --costs {path}: {message}\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", " is no orders file: it is not text. Expected one row a rank, with cells such as 2F0, 1B0."),
        (b"", " is no orders file: it holds no task. Expected one row a rank, with cells such as 2F0, 1B0."),
        (
            b"# A heading, and words that go on and on, longer than any task\nmore\n",
            (
                " is no orders file: it holds no task; row 1, column 1 holds '# A heading', which is no task such as "
                "2F0. Expected one row a rank, with cells such as 2F0, 1B0."
            ),
        ),
        (
            b"0F0,and then a whole sentence that nobody wants to read,0B0\n",
            (
                ": 1 fault.\n  row 1, column 2 holds 'and then a whole sentence that nobody w…', "
                "which is no task such as 2F0."
            ),
        ),
        (
            b"0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
            ": 1 fault.\n  task 0B1 never runs, nor do its I and W.",
        ),
        (
            b"0F0,0B0,0F123456789\n",
            (
                " names stage 0 and microbatch 123456789, and holds 3 tasks; so many stages and microbatches need at "
                "least 246913580."
            ),
        ),
    ],
)
def test_files_that_are_no_right_orders_are_refused_with_their_name(capsys, tmp_path, content, message):
    path = tmp_path / "orders.csv"
    path.write_bytes(content)
    for command in ("check", "show"):
        assert run(capsys, command, str(path)) == (1, "", f"error: CustomSchedule.from_csv: {path}{message}\n")


def test_a_long_list_of_faults_is_cut_short_and_counted_and_whole_in_json(capsys, tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text(",".join(f"0F{j}" for j in range(30)) + ",0B0\n")
    status, _, err = run(capsys, "check", str(path))
    missing = [f"task 0B{j} never runs, nor do its I and W" for j in range(1, 30)]
    shown = "".join(f"  {one}.\n" for one in missing[:20])
    assert status == 1
    assert err == f"error: CustomSchedule.from_csv: {path}: 29 faults.\n{shown}  … and 9 more.\n"
    _, out, _ = run(capsys, "check", str(path), "--json")
    assert json.loads(out)["faults"] == missing


def test_orders_whose_backward_or_rows_are_cut_off_are_found(capsys, tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text("0F0\n1F0\n")
    assert run(capsys, "check", str(path)) == (
        1,
        "",
        (
            f"error: {path} (--forward-only would do without backward): 2 faults.\n"
            "  task 0B0 never runs, nor do its I and W.\n  task 1B0 never runs, nor do its I and W.\n"
        ),
    )
    assert run(capsys, "check", str(path), "--forward-only") == (
        0,
        f"{path}: right; groups: 2, stages: 2, microbatches: 1, transfers: 1\n",
        "",
    )
    path.write_text("0F0,0B0\n")
    for option, found in (("stages", 1), ("groups", 1), ("microbatches", 1)):
        assert run(capsys, "check", str(path), f"--{option}", "2") == (
            1,
            "",
            f"error: {path}: the number of {option} is {found}; expected 2. Is it cut off?\n",
        )


@pytest.mark.parametrize("command", [[], ["show"], ["compare"], ["search"], ["check"]])
def test_every_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert ("Example: python -m scheduler" in capsys.readouterr().out) == bool(command)


def test_a_search_has_the_groups_that_its_placement_names(capsys):
    line = "search --stages 4 --microbatches 2 --placement 0,1,1,0 --seconds 0 --json"
    status, out, _ = run(capsys, *line.split())
    assert (status, json.loads(out)["groups"]) == (0, 2)


def test_a_reader_that_has_seen_enough_gets_no_error():
    command = [sys.executable, "-m", "scheduler", "show", "gpipe", "--stages", "60", "--microbatches", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_the_documents_are_up_to_date(tmp_path):
    for path in write_documents(tmp_path):
        committed = path.relative_to(tmp_path)
        assert path.read_text() == (DOCS / committed).read_text(), "run: python scripts/schedules_guide.py docs"
