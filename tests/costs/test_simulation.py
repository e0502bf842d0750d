"""A program on a clock, against times that a person adds up."""

import pytest

import scheduler
from mpmd.costs.simulation import simulate_program
from scheduler import Call, Program, Recv, Run, Send, Task, Value

X, Y, Z = Value("x"), Value("y"), Value("z")


def two_groups(*first, second):
    return Program(
        (tuple(first), tuple(second)), (0, 1), (), (frozenset(), frozenset()), (frozenset(), frozenset()), {}
    )


def test_a_reader_waits_for_the_writer_and_for_the_transfer():
    program = two_groups(
        Call("write", (), (X,)), Send(X, 1), Call("more", (), (Y,)), second=[Recv(X, 0), Call("read", (X,), (Z,))]
    )
    step = simulate_program(program, lambda group, i: {"write": 2.0, "more": 1.0, "read": 4.0}[i.name], lambda *_: 0.5)
    assert step.seconds == 6.5
    assert step.busy == (3.0, 4.0)
    assert step.exposed == (0.0, 0.5)
    assert step.idle_fraction == pytest.approx(1 - 7 / 13)


def test_values_between_two_groups_queue():
    program = two_groups(
        Call("write", (), (X, Y)), Send(X, 1), Send(Y, 1), second=[Recv(X, 0), Recv(Y, 0), Call("read", (X, Y), (Z,))]
    )
    step = simulate_program(program, lambda group, i: 1.0, lambda *_: 3.0)
    assert step.seconds == 1 + 3 + 3 + 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_loop_takes_as_long_as_the_schedule_says(name):
    schedule = scheduler.make(name, 4)
    edges = [scheduler.Edge(f"a{s}", (s, "F"), ((s + 1, "F"),)) for s in range(3)]
    edges += [scheduler.Edge(f"g{s}", (s, "I"), ((s - 1, "I"),)) for s in range(1, 4)]
    edges += [scheduler.Edge(f"k{s}", (s, "F"), ((s, "I"),)) for s in range(4)]
    edges += [scheduler.Edge(f"w{s}", (s, "I"), ((s, "W"),)) for s in range(4)]
    program = scheduler.lower(scheduler.TaskGraph(4, tuple(edges)), schedule, 8)
    seconds = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}

    def duration(group, instruction: Run):
        return sum(seconds[Task.parse(str(t)).kind] for t in instruction.tasks)

    found = simulate_program(program, duration, lambda *_: 0.0)
    assert found.seconds == scheduler.simulate(schedule, 8, scheduler.Costs(1.0, 1.0, 1.0)).makespan
