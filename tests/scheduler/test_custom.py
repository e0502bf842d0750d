"""Orders from text and files, in the format of torch.distributed.pipelining."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import CustomSchedule, DualPipeV, OneFOneB, ScheduleError, Task, simulate
from scheduler.schedules.catalogue import on_groups


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 8))
def test_every_schedule_survives_a_round_trip_through_a_file(tmp_path_factory, p, m):
    path = tmp_path_factory.mktemp("orders") / "orders.csv"
    for schedule in on_groups(p).values():
        try:
            finished = CustomSchedule.from_schedule(schedule, m)
        except ValueError:
            continue
        finished.to_csv(path)
        assert CustomSchedule.from_csv(path) == finished


def test_a_file_with_empty_steps_and_communication_is_read(tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0SEND_F0,0F1,,,0RECV_B0,0B0,0B1\n,1RECV_F0,1F0,1B0,1F1,1B1,,\n")
    schedule = CustomSchedule.from_csv(path)
    assert schedule.placement == (0, 1)
    assert " ".join(map(str, schedule.orders(2)[1])) == "1F0 1B0 1F1 1B1"
    assert simulate(schedule, 2).makespan == 9


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "spreadsheet.csv"
    path.write_text("0F0,0B0\r\n", encoding="utf-8-sig")
    assert CustomSchedule.from_csv(path) == CustomSchedule((("0F0", "0B0"),), (0,))


def test_fused_pairs_are_written_as_torch_writes_them(tmp_path):
    path = tmp_path / "orders.csv"
    CustomSchedule.from_schedule(DualPipeV(1), 2).to_csv(path)
    assert path.read_text() == "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n"


def test_a_group_without_tasks_survives_a_round_trip_through_a_file(tmp_path):
    path = tmp_path / "orders.csv"
    schedule = CustomSchedule((("0F0", "0B0"), (), ("1F0", "1B0")), (0, 2))
    schedule.to_csv(path)
    assert path.read_text() == '0F0,0B0\n""\n1F0,1B0\n'
    assert CustomSchedule.from_csv(path) == schedule


def test_cells_that_are_no_tasks_and_stages_in_two_rows_are_all_named(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0X0,0B0\n1F0,1B0,0F0,what\n")
    with pytest.raises(ScheduleError) as error:
        CustomSchedule.from_csv(path)
    assert str(error.value) == (
        f"CustomSchedule.from_csv: {path}: 3 faults.\n"
        "  row 1, column 2 holds '0X0', which is no task such as 2F0.\n"
        "  row 2, column 4 holds 'what', which is no task such as 2F0.\n"
        "  stage 0 has tasks in rows 1, 2; expected one row."
    )


def test_an_order_table_whose_last_rank_repeats_and_drops_work_is_refused():
    with pytest.raises(ScheduleError) as error:
        CustomSchedule((("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B0")), (0, 1))
    assert str(error.value) == (
        "CustomSchedule: 2 faults.\n  task 1B0 runs 2 times; expected once.\n  task 1B1 never runs, nor do its I and W."
    )


def test_orders_that_deadlock_and_pairs_that_are_apart_are_refused():
    with pytest.raises(ScheduleError) as error:
        CustomSchedule((("0F0", "0B1", "0F1", "0B0"),), (0,), [(Task(0, "F", 0), Task(0, "F", 1))])
    assert str(error.value) == (
        "CustomSchedule: 2 faults.\n"
        "  the orders deadlock: 0B1 (group 0) waits for 0F1 (group 0), which comes after 0B1.\n"
        "  0F0 and 0F1 are not neighbours in an order."
    )


def test_a_task_in_two_pairs_is_refused():
    first, second, third = Task(0, "F", 0), Task(0, "F", 1), Task(0, "B", 0)
    with pytest.raises(ScheduleError) as error:
        CustomSchedule((("0F0", "0F1", "0B0", "0B1"),), (0,), [(first, second), (second, third)])
    assert str(error.value) == "CustomSchedule: 1 fault.\n  0F1 is in 2 pairs; expected one."


def test_another_number_of_microbatches_is_refused():
    schedule = CustomSchedule.from_schedule(OneFOneB(2), 3)
    with pytest.raises(ValueError) as error:
        schedule.orders(4)
    assert str(error.value) == (
        "CustomSchedule: num_microbatches is 4; these orders are for 3. Use that number, or make other orders."
    )


def test_orders_and_placement_are_keywords_too():
    schedule = CustomSchedule(orders=(("0F0", "0B0"),), placement=(0,))
    assert schedule.num_microbatches == 1
    assert hash(schedule) == hash(CustomSchedule((("0F0", "0B0"),), (0,)))


def test_a_task_reads_what_it_prints_and_nothing_else():
    assert Task.parse(str(Task(12, "W", 3))) == Task(12, "W", 3)
    with pytest.raises(ValueError) as error:
        Task.parse("F0")
    assert str(error.value) == (
        "Task.parse: received 'F0'; expected a stage, one of F, B, I, W, R, and a microbatch, as in '2F0'."
    )
