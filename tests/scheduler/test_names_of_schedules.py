"""Schedules by name, where a name says enough, and an error where it does not."""

import pytest

import scheduler
from scheduler import TaskGraph
from scheduler.schedules import catalogue


def test_a_schedule_is_lowered_by_its_name():
    named, made = (scheduler.lower(TaskGraph.chain(4), s, 8) for s in ("1f1b", scheduler.OneFOneB(4)))
    assert named == made
    with pytest.raises(ValueError) as error:
        scheduler.lower(TaskGraph.chain(4), "2f2b", 8)
    assert str(error.value).startswith("unknown schedule '2f2b'; expected one of gpipe, 1f1b,")
    with pytest.raises(TypeError, match=r"GraphSchedule: reads is 3 and placement 4; expected, for each stage, the st"):
        scheduler.GraphSchedule(3, 4)


@pytest.mark.parametrize("name", catalogue.SCHEDULES)
def test_every_name_makes_a_schedule_for_so_many_groups(name):
    schedule = scheduler.make(name, num_groups=4)
    assert schedule.num_groups == 4 and isinstance(schedule, catalogue.find(name))
    assert catalogue.for_marks(name, schedule.num_stages - 1, 4) == schedule


@pytest.mark.parametrize("schedule", ["1f1b", scheduler.OneFOneB, None], ids=str)
def test_where_a_name_does_not_say_how_many_stages_the_error_says_how_to(schedule):
    for name, call in (
        ("simulate", lambda: scheduler.simulate(schedule, 8)),
        ("CustomSchedule.from_schedule", lambda: scheduler.CustomSchedule.from_schedule(schedule, 8)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == (
            f"{name}: schedule is {schedule!r}; expected a schedule such as scheduler.OneFOneB(4). "
            "From a name: scheduler.make('1f1b', num_stages=4)."
        )
