"""Plans for fewer microbatches, made from those for more: right, and in the schedule's order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scheduler
from scheduler import OneFOneB, Run, TaskGraph
from scheduler.programs.fewer import begins_with, with_fewer

NAMES = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb", "kimi-k2", "dualpipe-v"]


def runs(program):
    return [[task for i in own if isinstance(i, Run) for task in i.tasks] for own in program.groups]


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 16), st.integers(1, 16))
def test_programs_without_later_microbatches_are_right(name, stages, some, others):
    fewer, number = sorted((some, others))
    try:
        schedule = scheduler.make(name, 2 * stages if name == "dualpipe-v" else stages)
        orders = schedule.orders(number)
        begins = begins_with(schedule, orders, number, fewer)
    except ValueError:
        return  # it is not for so many, or not for so few
    graph = TaskGraph.chain(schedule.num_stages)
    short = with_fewer(scheduler.lower(graph, schedule, number), {0: fewer})
    report = scheduler.check(short)
    if begins:
        whole = scheduler.lower(graph, schedule, fewer)
        assert runs(short) == runs(whole)
        assert report.num_transfers == scheduler.check(whole).num_transfers


@pytest.mark.parametrize("fewer", range(1, 8))
def test_the_orders_of_1f1b_begin_with_those_for_fewer(fewer):
    schedule = OneFOneB(4)
    assert begins_with(schedule, schedule.orders(8), 8, fewer)


def test_other_loops_stay():
    program = scheduler.lower(TaskGraph.chain(3), OneFOneB(3), 6)
    assert with_fewer(program, {1: 2}) == program
