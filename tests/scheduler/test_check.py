"""Right programs pass; a program broken in any one way is refused, and the break is named."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler import (
    Call,
    Free,
    InterleavedOneFOneB,
    OneFOneB,
    Program,
    Recv,
    Run,
    ScheduleError,
    Send,
    Task,
    TaskGraph,
    Value,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
    lower,
)
from scheduler.ordering import LoopTasks

SCHEDULES = (OneFOneB(3), ZeroBubbleH1(3), InterleavedOneFOneB(4, 2), ZeroBubbleV(2))


@st.composite
def programs(draw):
    schedule = draw(st.sampled_from(SCHEDULES))
    m = draw(st.sampled_from([2, 4]) if schedule.num_groups == 2 else st.integers(1, 5))
    return lower(TaskGraph.chain(schedule.num_stages, activation_bytes=4), schedule, m)


def places(program, kind):
    return [
        (group, index)
        for group, steps in enumerate(program.groups)
        for index, step in enumerate(steps)
        if isinstance(step, kind)
    ]


def pick(data, kind):
    """A program, and the place and the instruction of one of this kind in it."""
    program = data.draw(programs())
    found = places(program, kind)
    assume(found)
    group, index = data.draw(st.sampled_from(found))
    return program, group, index, program.groups[group][index]


def edit(program, group, change):
    steps = list(program.groups[group])
    change(steps)
    groups = (*program.groups[:group], tuple(steps), *program.groups[group + 1 :])
    return dataclasses.replace(program, groups=groups)


def faults(program):
    with pytest.raises(ScheduleError) as error:
        check(program)
    return str(error.value)


def test_a_right_program_passes_and_tells_its_peak():
    report = check(lower(TaskGraph.chain(2, activation_bytes=10), OneFOneB(2), 3))
    assert str(report) == (
        "right: 2 groups, 6 transfers\n"
        "  group 0: 21 instructions, at most 30 bytes alive\n"
        "  group 1: 21 instructions, at most 30 bytes alive"
    )


@given(st.data())
def test_a_task_that_is_left_out_is_named(data):
    program, group, index, run = pick(data, Run)
    task = run.task
    assert f"task {task} never runs" in faults(edit(program, group, lambda steps: steps.pop(index)))


@given(st.data())
def test_a_task_that_runs_twice_is_named(data):
    program, group, index, run = pick(data, Run)
    assert f"task {run.task} runs 2 times" in faults(edit(program, group, lambda steps: steps.insert(index, run)))


@given(st.data())
def test_a_task_in_the_wrong_group_is_named(data):
    program, group, index, run = pick(data, Run)
    other = (group + 1) % program.num_groups
    moved = edit(edit(program, group, lambda steps: steps.pop(index)), other, lambda steps: steps.append(run))
    expected = f"task {run.task} runs in group {other}; stage {run.task.stage} lives in group {group}"
    assert expected in faults(moved)


@given(st.data())
def test_a_whole_backward_beside_a_half_is_named(data):
    program, group, index, run = pick(data, Run)
    task = run.task
    assume(task.kind != "F")
    kind = "W" if task.kind == "B" else "B"
    extra = Run(task._replace(kind=kind))
    message = faults(edit(program, group, lambda steps: steps.insert(index, extra)))
    assert f"task {task._replace(kind='B')} does what" in message


@given(st.data())
def test_a_task_of_no_loop_is_named(data):
    program, group, index, _ = pick(data, Run)
    broken = edit(program, group, lambda steps: steps.insert(index, Run(Task(0, "F", 99))))
    assert "task 0F99 is no task of this loop" in faults(broken)
    lost = edit(program, group, lambda steps: steps.insert(index, Run(Task(0, "F", 0), loop=3)))
    assert "task 0F0 belongs to loop 3; the program has 1" in faults(lost)


@given(st.data())
def test_a_send_that_is_left_out_is_named(data):
    program, group, index, send = pick(data, Send)
    message = faults(edit(program, group, lambda steps: steps.pop(index)))
    assert f"{send.value} from group {group} to group {send.to_group}: a receive without a send" in message


@given(st.data())
def test_a_receive_that_is_left_out_is_named(data):
    program, group, index, recv = pick(data, Recv)
    message = faults(edit(program, group, lambda steps: steps.pop(index)))
    assert f"{recv.value} from group {recv.from_group} to group {group}: a send without a receive" in message
    assert f"reads {recv.value} which is in group {recv.from_group} and never arrives here" in message


@given(st.data())
def test_receives_in_another_order_than_the_sends_are_named(data):
    program, group, index, recv = pick(data, Recv)
    later = [
        at
        for at, step in enumerate(program.groups[group])
        if at > index and isinstance(step, Recv) and step.from_group == recv.from_group
    ]
    assume(later)
    other = data.draw(st.sampled_from(later))

    def swap(steps):
        steps[index], steps[other] = steps[other], steps[index]

    message = faults(edit(program, group, swap))
    assert f"transfers from group {recv.from_group} to group {group} come in different orders" in message


@given(st.data())
def test_a_use_before_arrival_is_named(data):
    program, group, index, recv = pick(data, Recv)
    reader = next(
        at for at, step in enumerate(program.groups[group]) if isinstance(step, Run) and recv.value in step.reads
    )

    def late(steps):
        steps.insert(reader, steps.pop(index))

    message = faults(edit(program, group, late))
    assert f"reads {recv.value} before it arrives at #{reader}" in message


@given(st.data())
def test_a_use_before_the_write_is_named(data):
    program, group, index, run = pick(data, Run)
    local = [value for value in run.reads if not isinstance(_maker(program, group, value), Recv)]
    assume(local)
    at = program.groups[group].index(_maker(program, group, local[0]))

    def early(steps):
        steps.insert(at, steps.pop(index))

    assert f"reads {local[0]} before it is written at #{at + 1}" in faults(edit(program, group, early))


def _maker(program, group, value):
    return next(
        step
        for step in program.groups[group]
        if (isinstance(step, Recv) and step.value == value) or (isinstance(step, Run) and value in step.writes)
    )


@given(st.data())
def test_a_value_that_is_never_freed_is_named(data):
    program, group, index, free = pick(data, Free)
    value = free.value
    message = faults(edit(program, group, lambda steps: steps.pop(index)))
    assert message == f"check: the program: 1 fault.\n  group {group}: {value} is never freed, and is no output."


@given(st.data())
def test_a_double_free_is_named(data):
    program, group, index, free = pick(data, Free)
    message = faults(edit(program, group, lambda steps: steps.insert(index, free)))
    assert message == (
        f"check: the program: 1 fault.\n  group {group}, #{index + 1} {free}: {free.value} was already freed."
    )


@given(st.data())
def test_a_use_after_free_is_named(data):
    program, group, index, free = pick(data, Free)
    uses = [
        at
        for at, step in enumerate(program.groups[group][:index])
        if (isinstance(step, Run) and free.value in step.reads) or (isinstance(step, Send) and step.value == free.value)
    ]
    assume(uses)

    def early(steps):
        steps.insert(uses[-1], steps.pop(index))

    message = faults(edit(program, group, early))
    assert f"{free.value} after it was freed" in message


@given(st.data())
def test_a_use_after_donation_is_named(data):
    program, group, index, run = pick(data, Run)
    assume(run.reads)
    value = run.reads[0]
    donating = dataclasses.replace(run, donates=(value,))

    def donate(steps):
        steps[index] = donating

    message = faults(edit(program, group, donate))
    assert f"{value} after it was donated" in message
    unread = dataclasses.replace(run, donates=(Value("other"),))
    message = faults(edit(program, group, lambda steps: steps.__setitem__(index, unread)))
    assert "donates other, which it does not read" in message


@given(st.data())
def test_a_value_written_twice_is_named(data):
    program, group, index, run = pick(data, Run)
    assume(run.writes)
    again = edit(program, group, lambda steps: steps.insert(index + 1, Call("again", (), run.writes)))
    assert (
        f"call again() -> {', '.join(map(str, run.writes))}: writes {run.writes[0]}, which is already there"
        in faults(again)
    )


@given(st.data())
def test_an_output_that_is_not_there_and_one_that_is_freed_are_named(data):
    program, group, _, free = pick(data, Free)
    value = free.value
    outputs = [frozenset()] * program.num_groups
    outputs[group] = frozenset({value, Value("nowhere")})
    message = faults(dataclasses.replace(program, outputs=tuple(outputs)))
    assert f"group {group}: output {value} is freed" in message
    assert f"group {group}: output nowhere is never made there" in message


@given(st.data())
def test_a_read_of_what_nobody_writes_is_named(data):
    program, group, index, _ = pick(data, Run)
    run = dataclasses.replace(program.groups[group][index], reads=(Value("ghost"),))
    message = faults(edit(program, group, lambda steps: steps.__setitem__(index, run)))
    assert "reads ghost which nobody writes" in message


def test_groups_that_wait_for_each_other_are_named_in_a_circle():
    x, y, inputs = Value("x"), Value("y"), (frozenset({Value("x")}), frozenset({Value("y")}))
    program = Program(
        (
            (Send(x, 1), Recv(y, 1), Free(x), Free(y)),
            (Send(y, 0), Recv(x, 0), Free(x), Free(y)),
        ),
        (0, 1),
        (),
        inputs,
    )
    assert faults(program) == (
        "check: the program: 1 fault.\n"
        "  deadlock: group 0 at 'send x to group 1' waits for group 1, "
        "group 1 at 'send y to group 0' waits for group 0."
    )


def test_each_loop_has_its_stages_in_its_own_groups():
    runs = (Run(Task(0, "F", 0), loop=1),), (Run(Task(0, "F", 0), loop=0),)
    program = Program(runs, (1,), (LoopTasks(1, 1, ("F",)),) * 2, placements=((1,), (0,)))
    assert check(program).num_instructions == (1, 1)
    assert faults(dataclasses.replace(program, placements=())) == (
        "check: the program: 1 fault.\n  task 0F0 of loop 1 runs in group 0; stage 0 lives in group 1."
    )
    assert "placements has 1 entry; expected one for each of 2 loops, or none" in faults(
        dataclasses.replace(program, placements=((0,),))
    )


@settings(max_examples=60)
@given(st.data())
def test_transfers_moved_past_each_other_deadlock_or_stay_right(data):
    """Moves each Send as late as the next use allows; whatever check() lets through can be merged."""
    from scheduler import merge

    program, group, index, _ = pick(data, Recv)
    to = data.draw(st.integers(0, index))
    moved = edit(program, group, lambda steps: steps.insert(to, steps.pop(index)))
    try:
        check(moved)
    except ScheduleError as error:
        assert "deadlock" in str(error) or "different orders" in str(error)
    else:
        merge(moved)


def test_all_faults_come_in_one_error():
    program = lower(TaskGraph.chain(2), OneFOneB(2), 1)
    steps = [step for step in program.groups[1] if not isinstance(step, Free | Send)]
    message = faults(dataclasses.replace(program, groups=(program.groups[0], (*steps, Run(Task(1, "W", 0))))))
    assert message == (
        "check: the program: 5 faults.\n"
        "  task 1B0 does what 1W0 does again; expected B alone, or I and W.\n"
        "  group 1: a0[0] is never freed, and is no output.\n"
        "  group 1: r1[0] is never freed, and is no output.\n"
        "  group 1: g1[0] is never freed, and is no output.\n"
        "  g1[0] from group 1 to group 0: a receive without a send."
    )


@pytest.mark.parametrize(
    "steps",
    [
        (Send(Value("x"), 7), Recv(Value("x"), -1), Send(Value("x"), 0), Recv(Value("x"), 0)),
        ("run", 3, None),
        (Run("0F0"), Run(Task(0, "X", 0)), Run(Task("a", "F", None)), Run(Task(0, "F", 0), reads=("x",))),
        (Run(Task(-1, "F", -1)), Run(Task(9, "B", 0)), Run(Task(0, "F", 0), loop=-1), Run(Task(0, "F", 0), loop="x")),
        (Free(Value("x")), Free(Value("x")), Call("c", (), (Value("x"),), (Value("x"),))),
        (Run(Task(0, "F", None)), Free([]), Run(Task(0, "F", 0), writes=([],))),
    ],
)
@pytest.mark.parametrize("tasks", [frozenset({Task(0, "F", 0), Task(7, "F", 0)}), LoopTasks(8, 1)], ids=["few", "all"])
def test_nonsense_is_refused_and_never_crashes_the_checker(steps, tasks):
    program = Program((steps, ()), (0, 5), (tasks,), (frozenset(),))
    assert "check: the program: " in faults(program)
    assert "check: the program: " in faults(dataclasses.replace(program, inputs=()))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_shuffled_program_crashes_the_checker(data):
    program = data.draw(programs())
    groups = tuple(tuple(data.draw(st.permutations(steps))) for steps in program.groups)
    shuffled = dataclasses.replace(program, groups=groups)
    as_it_is = dataclasses.replace(shuffled, tasks=tuple(map(frozenset, program.tasks)))  # every fault is looked for
    reports = []
    for each in (shuffled, as_it_is):
        try:
            reports.append(check(each))
        except ScheduleError as error:
            reports.append(str(error))
    assert reports[0] == reports[1]
