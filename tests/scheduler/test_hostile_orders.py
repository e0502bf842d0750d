"""Files that somebody has damaged on purpose end in one clear line, soon and without much memory."""

import os

import pytest

import scheduler
from scheduler.__main__ import main

DEEP = 100_000
COSTS = {
    "deep": ('{"forward":' + "[" * DEEP, "--costs {file}: Costs: this is not JSON: it is nested too deeply."),
    "stage": (
        '{"traceEvents": [{"ph": "X", "name": "99999999999F0", "dur": 1}]}',
        "--costs {file}: Costs: the Chrome trace names stage 99999999999, and holds 1 tasks.",
    ),
    "long": (
        '{"traceEvents": [{"ph": "X", "name": "0F0", "dur": ' + "9" * 400 + "}]}",
        "--costs {file}: Costs: the Chrome trace has no complete event (ph X, with dur) named like a task, 2F0.",
    ),
    "pipe": (None, "{file}: it is a pipe or a device, not a file."),
    "device": ("/dev/zero", "{file}: it is a pipe or a device, not a file."),
}


@pytest.mark.parametrize("name", COSTS)
def test_hostile_costs_are_one_clear_line(tmp_path, capsys, name):
    text, message = COSTS[name]
    file = tmp_path / "costs.json"
    if text is None:
        os.mkfifo(file)
    elif text.startswith("/"):
        file.symlink_to(text)
    else:
        file.write_text(text)
    assert main(["show", "1f1b", "--stages", "1", "--microbatches", "1", "--costs", str(file)]) == 2
    assert capsys.readouterr() == ("", f"error: {message.format(file=file)}\n")


def test_an_orders_file_that_is_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "orders.csv")
    for command in ("check", "show"):
        assert main([command, str(tmp_path / "orders.csv")]) == 2
        assert capsys.readouterr().err == f"error: {tmp_path}/orders.csv: it is a pipe or a device, not a file.\n"


def test_a_stage_in_very_many_rows_is_a_short_message(tmp_path, capsys):
    file = tmp_path / "orders.csv"
    file.write_text("0F0\n" * 10_000)
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().err.splitlines()[1] == (
        "  stage 0 has tasks in rows 1, 2, 3, 4, 5, 6, 7, 8 and 9992 more; expected one row."
    )


@pytest.mark.parametrize("command", [["show", "1f1b"], ["compare"], ["search"]])
def test_numbers_that_nobody_can_wait_for_are_refused(capsys, command):
    assert main([*command, "--stages", "99999", "--microbatches", "99999"]) == 2
    stages = 199998 if command == ["compare"] else 99999
    assert capsys.readouterr().err == (
        f"error: {stages} stages and 99999 microbatches are more than 250000 tasks of a kind.\n"
    )


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ((("0F0", "0B0"),), "returned '0F0'; expected a sequence of scheduler.Task for each of 1 group."),
        ([[(0, "F", 0)]], r"returned \(0, 'F', 0\); expected"),
        (((scheduler.Task(0, "F", 0),), ()), "returned orders for 2 groups; expected"),
        ((), "returned orders for 0 groups"),
        (None, "returned None; expected"),
    ],
)
def test_orders_of_another_form_from_a_class_of_the_users_are_refused(orders, message):
    with pytest.raises(scheduler.ScheduleError, match=message):
        scheduler.simulate(_Own(orders), 1)
    with pytest.raises(scheduler.ScheduleError, match=message):
        scheduler.lower(scheduler.TaskGraph.chain(1), _Own(orders), 1)


def test_orders_as_lists_or_generators_are_as_good_as_tuples():
    whole = tuple(tuple(order) for order in scheduler.OneFOneB(1).orders(1))
    for orders in ([list(whole[0])], (iter(order) for order in whole)):
        assert scheduler.simulate(_Own(orders), 1).makespan == 3.0


class _Own(scheduler.Schedule):
    num_stages, num_groups, placement = 1, 1, (0,)

    def __init__(self, own):
        self.own = own

    def orders(self, num_microbatches):
        return self.own
