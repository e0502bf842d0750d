"""The clock: costs, transfers, memory, critical path, measured costs, and its pictures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import (
    Costs,
    CustomSchedule,
    DualPipeV,
    GPipe,
    OneFOneB,
    ScheduleError,
    Task,
    ZeroBubbleH1,
    ZeroBubbleV,
    simulate,
)
from scheduler.optimize.bounds import lower_bound
from scheduler.schedules.catalogue import make, on_groups
from scheduler.schedules.list_scheduling import Problem
from scheduler.timing.simulate import simulate_orders, timeline_of
from scheduler.timing.timeline import critical_path_text, to_text

numbers = st.floats(0.1, 3.0).map(lambda value: round(value, 2))


@st.composite
def uneven_costs(draw, num_stages):
    def each():
        return tuple(draw(st.lists(numbers, min_size=num_stages, max_size=num_stages)))

    return Costs(each(), each(), each(), transfer_s=draw(st.sampled_from([0.0, 0.3])))


def test_costs_of_each_stage_and_transfers_are_counted():
    costs = Costs(forward=(1.0, 2.0), input_grad=(1.0, 3.0), weight_grad=0.5, transfer_s=0.25)
    timeline = simulate(OneFOneB(2), 1, costs)
    assert timeline.makespan == 1 + 0.25 + 2 + 3.5 + 0.25 + 1.5
    assert timeline.busy == (2.5, 5.5)
    assert timeline.bubble_fraction == pytest.approx(1 - 8 / (2 * 8.5))


def test_transfers_take_bytes_over_bandwidth_and_nothing_inside_a_group():
    costs = Costs(transfer_s=1.0, transfer_bytes=8.0, bytes_per_s=4.0)
    assert simulate(GPipe(2), 1, costs).makespan == 6 + 2 * 3
    assert simulate(ZeroBubbleV(1), 1, costs).makespan == 6


def test_bytes_are_let_go_in_part_at_the_input_gradient():
    costs = Costs(activation_bytes=10.0, released_at_input_grad=4.0)
    timeline = simulate(ZeroBubbleH1(2), 3, costs)
    assert timeline.peak_activations == (2, 2)
    assert timeline.peak_bytes == (20.0, 16.0)


def test_idle_is_counted_in_the_whole_and_within_each_groups_span():
    timeline = simulate(OneFOneB(2), 2)
    assert timeline.makespan == 9
    assert timeline.idle_within_span == (3, 0)


def test_rounding_is_no_idle_time_and_what_was_measured_counts_as_it_was():
    timeline = simulate(ZeroBubbleH1(3), 9, Costs(0.1, 0.1, 0.1))
    assert timeline.idle_within_span == pytest.approx((0.2, 0.1, 0.0), abs=1e-9) and timeline.idle_within_span[2] == 0
    assert set(simulate(OneFOneB(1), 7, Costs(0.1, 0.1, 0.1)).idle_within_span) == {0.0}
    seconds = [1.0, 1.0, 13.0]  # of which the median is no measure
    ends = list(itertools.accumulate(seconds))
    runs = [(0, [Task(0, "F", m)], end - s, end) for m, (s, end) in enumerate(zip(seconds, ends, strict=True))]
    measured = timeline_of(runs, (0,), "measured")
    assert measured.busy == (15.0,) and measured.bubble_fraction == 0


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 5), st.integers(1, 10))
def test_the_critical_path_is_a_chain_as_long_as_the_makespan(data, p, m):
    for schedule in on_groups(p).values():
        costs = data.draw(uneven_costs(schedule.num_stages))
        try:
            timeline = simulate(schedule, m, costs)
        except ValueError:
            continue
        path = timeline.critical_path
        over = sum(
            costs.transfer_s
            for one, other in itertools.pairwise(path)
            if timeline.placement[one.stage] != timeline.placement[other.stage]
        )
        length = sum(costs.duration(task.kind, task.stage) for task in path)
        assert length + over == pytest.approx(timeline.makespan)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 5), st.integers(1, 10))
def test_no_schedule_is_shorter_than_the_lower_bound(data, p, m):
    for schedule in on_groups(p).values():
        costs = data.draw(uneven_costs(schedule.num_stages))
        try:
            timeline = simulate(schedule, m, costs)
        except ValueError:
            continue
        free = Problem(schedule.placement, p, m, costs)
        tight = Problem(schedule.placement, p, m, costs, timeline.peak_bytes)
        for problem in (free, tight):
            assert lower_bound(problem).makespan <= timeline.makespan + 1e-9


@pytest.mark.slow
def test_a_large_simulation_is_linear_in_tasks():
    timeline = simulate(OneFOneB(128), 256)
    assert timeline.makespan == 3 * (256 + 127)
    assert str(timeline).count("\n") == 65


def test_orders_that_deadlock_are_refused_with_the_cycle():
    orders = ((Task(0, "F", 0), Task(0, "B", 0)), (Task(1, "B", 0), Task(1, "F", 0)))
    with pytest.raises(ScheduleError) as error:
        simulate_orders(orders, (0, 1), 1)
    assert str(error.value) == (
        "simulate: the orders deadlock: 1B0 (group 1) waits for 1F0 (group 1), which comes after 1B0."
    )


def test_a_task_that_waits_for_one_that_no_group_runs_is_refused_with_that_one():
    orders = ((Task(0, "F", 0), Task(0, "B", 0)), (Task(1, "F", 0),))
    with pytest.raises(ScheduleError) as error:
        simulate_orders(orders, (0, 1), 1)
    assert str(error.value) == ("simulate: the orders deadlock: 0B0 (group 0) waits for 1B0, which no group runs.")


def test_fused_pairs_that_deadlock_are_refused_with_the_cycle_of_the_pairs():
    pair = (Task(0, "F", 0), Task(0, "B", 0))
    schedule = CustomSchedule((("0F0", "0B0"), ("1F0", "1B0")), (0, 1), [pair])
    assert simulate(schedule, 1).makespan == 6
    with pytest.raises(ScheduleError) as error:
        simulate(schedule, 1, fuse=True)
    assert str(error.value) == (
        "simulate: the orders deadlock: 0F0+0B0 (group 0) waits for 1B0 (group 1), which comes after 1F0; "
        "1F0 (group 1) waits for 0F0+0B0 (group 0)."
    )


def test_a_pair_may_need_its_own_first_task():
    schedule = CustomSchedule((("0F0", "0F1", "0B1", "0B0"),), (0,), [(Task(0, "F", 1), Task(0, "B", 1))])
    assert simulate(schedule, 2, fuse=True).ends[0].tolist() == [1, 2, 4, 6]


def test_wrong_costs_are_refused():
    with pytest.raises(ValueError) as error:
        Costs(forward=-1.0, weight_grad=(1.0, float("nan")))
    assert str(error.value) == (
        "Costs: forward holds -1.0; weight_grad holds nan."
        " Expected numbers of at least 0 (bytes_per_s: above 0), or one for each stage."
    )
    with pytest.raises(ValueError) as error:
        simulate(GPipe(2), 1, Costs(forward=(1.0, 2.0, 3.0)))
    assert str(error.value) == (
        "Costs: forward has 3 entries and the schedule 2 stages; give one number or one for each stage."
    )


@pytest.mark.parametrize("released", [2.0, (1.0, 2.0)])
def test_more_cannot_be_let_go_than_is_held(released):
    with pytest.raises(ValueError) as error:
        Costs(activation_bytes=1.0, released_at_input_grad=released)
    assert str(error.value) == (
        "Costs: released_at_input_grad holds 2.0 where activation_bytes holds 1.0; what is let go after I is a part "
        "of what is held, so it cannot be more."
    )


def test_costs_come_from_a_measured_run():
    durations = [(Task(0, "F", 0), 9.0), (Task(0, "F", 1), 1.0), (Task(0, "F", 2), 1.0), (Task(0, "B", 0), 4.0)]
    assert Costs.measured(durations, transfer_s=0.5) == Costs((1.0,), (2.0,), (2.0,), transfer_s=0.5)


def test_costs_come_from_the_timeline_of_a_run():
    costs = Costs((1.0, 2.0), (1.5, 0.5), (0.25, 1.0))
    timeline = simulate(ZeroBubbleH1(2), 4, costs)
    again = Costs.measured(timeline)
    assert simulate(ZeroBubbleH1(2), 4, again).makespan == pytest.approx(timeline.makespan)
    assert sum(seconds for _, seconds in timeline.durations) == pytest.approx(sum(timeline.busy))


def test_costs_come_from_a_chrome_trace_and_give_the_same_timeline_again():
    costs = Costs((1.0, 2.0), (1.5, 0.5), (0.25, 1.0))
    timeline = simulate(ZeroBubbleH1(2), 4, costs)
    again = Costs.from_json(timeline.to_chrome_trace())
    assert simulate(ZeroBubbleH1(2), 4, again).makespan == pytest.approx(timeline.makespan)


def test_costs_in_json_have_the_names_of_the_arguments():
    assert Costs.from_json('{"forward": [1, 2], "transfer_s": 0.1}') == Costs(forward=(1, 2), transfer_s=0.1)
    with pytest.raises(ValueError, match=r"unknown names \['speed'\]"):
        Costs.from_json('{"speed": 1}')


def test_the_text_shows_names_where_there_is_room():
    assert str(simulate(OneFOneB(2), 2)) == (
        "OneFOneB: 2 groups, 2 stages, 8 tasks, makespan 9, bubble 33.3%\n"
        "   0 |F0 F1       B0       B1    | 2 held, idle 3\n"
        "   1 |   F0 B0    F1 B1          | 1 held, idle 0"
    )


def test_the_text_shows_letters_where_there_is_little_room_and_shares_where_there_is_less():
    timeline = simulate(OneFOneB(2), 4)
    assert to_text(timeline, width=20).splitlines()[1:] == [
        "   0 |FF..BBFBBFBB.BB| 2 held, idle 3",
        "   1 |.FBBFBBFBBFBB..| 1 held, idle 0",
    ]
    narrow = to_text(simulate(OneFOneB(2), 400), width=20).splitlines()
    assert len(narrow[1]) == len(narrow[2]) == len("   0 |" + "|") + 20 + len(" 2 held, idle 3")


def test_tasks_that_take_no_time_are_drawn_as_nothing():
    assert str(simulate(GPipe(2), 2, Costs(0, 0, 0))).splitlines()[1:] == [
        "   0 || 2 held, idle 0",
        "   1 || 2 held, idle 0",
    ]
    transfers = to_text(simulate(GPipe(2), 2, Costs(0, 0, 0, transfer_s=1.0)), width=10)
    assert transfers.splitlines()[1:] == ["   0 |..........| 2 held, idle 2", "   1 |..........| 2 held, idle 0"]


def test_tasks_that_take_next_to_no_time_are_drawn_in_slices():
    tiny = to_text(simulate(GPipe(2), 2, Costs(1e-12, 1e-12, 1e-12)), width=9)
    assert [line[6:15] for line in tiny.splitlines()[1:]] == ["FF...BBBB", ".FFBBBB.."]


def test_the_critical_path_goes_through_a_pair_whose_tasks_wait_for_each_other():
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    pairs = [(Task.parse("1F0"), Task.parse("1B0"))]
    timeline = simulate(CustomSchedule(rows, (0, 1), pairs), 2, fuse=True)
    assert critical_path_text(timeline) == "critical path: 0F0 1F0 1B0 1F1 1B1 0B1"


def test_a_task_that_takes_no_time_has_no_label():
    rows = str(simulate(ZeroBubbleH1(2), 3, Costs(weight_grad=0.0))).splitlines()[1:]
    assert [row.split("|")[1] for row in rows] == ["F0 F1    I0 F2 I1    I2 ", "   F0 I0 F1 I1 F2 I2    "]


def test_the_critical_path_prints_without_its_middle_where_it_is_long():
    text = critical_path_text(simulate(GPipe(2), 60), limit=6)
    assert text == "critical path: 0F0 1F0 1F1 … 116 tasks … 0B57 0B58 0B59"


def test_what_is_computed_again_does_not_wait_for_the_gradient():
    costs, again = Costs(), Costs(recompute=(0.0, 1.0, 1.0, 0.0))
    for fuse, longer in (False, 10), (True, 10):
        plain, timeline = (simulate(DualPipeV(2), 5, one, fuse=fuse) for one in (costs, again))
        order = [str(task) for task in timeline.orders[1]]
        assert [task for task in order if "R" not in task] == list(map(str, plain.orders[1]))
        assert timeline.makespan - plain.makespan <= longer == timeline.busy[1] - plain.busy[1]
        assert sum("R" in task for task in order) == 10 and timeline.orders[0] == plain.orders[0]
        assert timeline.peak_activations == plain.peak_activations
        assert set(timeline.critical_path) & set(timeline.orders[1]) and 'id="R"' in timeline.to_svg()


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_computing_again_costs_its_own_time_and_at_most_two_percent_more(name):
    schedule = make(name, None, 8)
    last, p = schedule.num_stages - 1, schedule.num_stages
    plain = Costs((1.0,) * p, (0.0,) + (1.1,) * last, (2.0,) + (0.9,) * last)  # the first stage has no I
    again = dataclasses.replace(plain, weight_grad=(2.7,) + (0.9,) * last, recompute=(0.0,) + (0.7,) * last)
    for m in 16, 32:
        bound = simulate(schedule, m, plain).makespan + 0.7 * m * p / 8
        assert simulate(schedule, m, again).makespan <= 1.02 * bound


def test_the_svg_is_well_formed_and_tells_kinds_apart_without_colour():
    timeline = simulate(DualPipeV(2), 5, fuse=True)
    root = ElementTree.fromstring(timeline.to_svg())
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert sum(text == "F0" for text in texts) == 4
    assert {element.get("id") for element in root.iter(f"{space}pattern")} == {"B", "I", "W"}
    assert "holds 5, idle" in " ".join(filter(None, texts))


def test_the_chrome_trace_has_one_event_a_task_and_one_thread_a_group():
    timeline = simulate(OneFOneB(2), 3, Costs(forward=0.5))
    events = json.loads(timeline.to_chrome_trace())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == 12
    assert {event["tid"] for event in tasks} == {0, 1}
    assert tasks[0] == {
        "ph": "X",
        "name": "0F0",
        "cat": "F",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 500000.0,
        "args": {"stage": 0, "kind": "F", "microbatch": 0},
    }


def test_a_fused_unit_hands_on_its_results_at_its_end():
    orders = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    pair = (Task(1, "F", 1), Task(1, "B", 0))
    schedule = CustomSchedule(orders, (0, 1), [pair])
    assert simulate(schedule, 2).makespan == 9
    assert simulate(schedule, 2, fuse=True).makespan == 9
    timeline = simulate(schedule, 2, fuse=True)
    assert timeline.ends[1][1:3].tolist() == [3.0, 5.0]
