"""From orders to instructions, and from instructions to one order for a process with several groups."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import (
    Call,
    Edge,
    Free,
    GPipe,
    InterleavedOneFOneB,
    OneFOneB,
    Program,
    Recv,
    Run,
    Schedule,
    ScheduleError,
    Send,
    Task,
    TaskGraph,
    Value,
    check,
    lower,
    merge,
)


@dataclasses.dataclass(frozen=True)
class Given(Schedule):
    """Orders written out in text, for tests."""

    rows: tuple[str, ...]
    placement: tuple[int, ...]
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def num_stages(self):
        return len(self.placement)

    @property
    def num_groups(self):
        return len(self.rows)

    def orders(self, num_microbatches):
        return tuple(tuple(map(Task.parse, row.split())) for row in self.rows)

    def fused(self, num_microbatches):
        return frozenset((Task.parse(one), Task.parse(other)) for one, other in self.pairs)


def lines(program, group):
    return [str(instruction) for instruction in program.groups[group]]


def test_a_chain_lowers_to_sends_after_their_run_and_frees_after_the_last_use():
    program = lower(TaskGraph.chain(2), OneFOneB(2), 2)
    assert lines(program, 1) == [
        "recv a0[0] from group 0",
        "run 1F0(a0[0]) -> r1[0]",
        "free a0[0]",
        "recv a0[1] from group 0",
        "run 1B0(r1[0]) -> g1[0]",
        "free r1[0]",
        "send g1[0] to group 0",
        "free g1[0]",
        "run 1F1(a0[1]) -> r1[1]",
        "free a0[1]",
        "run 1B1(r1[1]) -> g1[1]",
        "free r1[1]",
        "send g1[1] to group 0",
        "free g1[1]",
    ]


def test_a_value_that_two_tasks_of_a_group_read_crosses_once():
    graph = TaskGraph(2, (Edge("x", (0, "F"), ((1, "F"), (1, "I"), (1, "W"), (0, "W")), 8),))
    program = lower(graph, OneFOneB(2), 1)
    assert lines(program, 0) == ["run 0F0() -> x[0]", "send x[0] to group 1", "run 0B0(x[0])", "free x[0]"]
    assert lines(program, 1) == ["recv x[0] from group 0", "run 1F0(x[0])", "run 1B0(x[0])", "free x[0]"]
    assert check(program).peak_bytes == (8, 8)


def test_a_skip_connection_goes_to_each_group_that_reads_it():
    graph = TaskGraph(3, (Edge("s", (0, "F"), ((1, "F"), (2, "F"))),), forward_only=True)
    program = lower(graph, GPipe(3), 1)
    assert lines(program, 0) == ["run 0F0() -> s[0]", "send s[0] to group 1", "send s[0] to group 2", "free s[0]"]


def test_what_nobody_reads_is_not_written():
    graph = TaskGraph(1, (Edge("r", (0, "F"), ((0, "I"),)),), empty=frozenset({(0, "I")}))
    assert lines(lower(graph, GPipe(1), 1), 0) == ["run 0F0()", "run 0B0()"]


def test_an_edge_between_the_halves_of_a_whole_backward_stays_inside():
    graph = TaskGraph(1, (Edge("w", (0, "I"), ((0, "W"),)),))
    assert lines(lower(graph, GPipe(1), 1), 0) == ["run 0F0()", "run 0B0()"]
    split = Given(("0F0 0I0 0W0",), (0,))
    assert lines(lower(graph, split, 1), 0) == ["run 0F0()", "run 0I0() -> w[0]", "run 0W0(w[0])", "free w[0]"]


def test_a_fused_pair_is_one_run_between_its_receives_and_its_sends():
    schedule = Given(("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), (0, 1), (("1F1", "1B0"),))
    program = lower(TaskGraph.chain(2), schedule, 2)
    check(program)
    run = next(step for step in program.groups[1] if isinstance(step, Run) and step.also)
    assert str(run) == "run 1F1+1B0(a0[1], r1[0]) -> r1[1], g1[0]"
    index = program.groups[1].index(run)
    assert Recv(Value("a0", 1), 0) in program.groups[1][:index]
    assert Send(Value("g1", 0), 0) in program.groups[1][index:]


def test_a_value_inside_a_fused_pair_is_not_listed():
    schedule = Given(("0F0 0B0",), (0,), (("0F0", "0B0"),))
    assert lines(lower(TaskGraph.chain(1), schedule, 1), 0) == ["run 0F0+0B0()"]


def test_a_forward_only_loop_drops_the_backward_tasks():
    program = lower(TaskGraph.chain(3, forward_only=True), OneFOneB(3), 4)
    assert all(step.task.kind == "F" for steps in program.groups for step in steps if isinstance(step, Run))
    check(program)


def test_the_turn_of_a_v_needs_no_transfer():
    schedule = Given(("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"), (0, 1, 1, 0))
    program = lower(TaskGraph.chain(4), schedule, 1)
    check(program)
    assert [str(step) for step in program.groups[1] if isinstance(step, Send)] == [
        "send a2[0] to group 0",
        "send g1[0] to group 0",
    ]


def test_orders_that_deadlock_are_refused_with_the_cycle():
    schedule = Given(("0F0 0B1 0F1 0B0", "1F0 1F1 1B0 1B1"), (0, 1))
    with pytest.raises(ScheduleError) as error:
        lower(TaskGraph.chain(2), schedule, 2)
    assert str(error.value) == (
        "lower: the schedule's orders deadlock: 0B1 (group 0) waits for 0F1 (group 0), which comes after 0B1."
    )


def test_a_pair_that_is_not_adjacent_is_refused():
    schedule = Given(("0F0 0F1 0B0 0B1",), (0,), (("0F0", "0B0"),))
    with pytest.raises(ScheduleError) as error:
        lower(TaskGraph.chain(1), schedule, 2)
    assert str(error.value) == ("lower: pairs to be fused: 1 fault.\n  0F0 and 0B0 are not neighbours in an order.")


def test_missing_double_and_misplaced_tasks_are_all_named():
    schedule = Given(("0F0 0F0 0B0 1F1 0I0", "1F0 1B0 1B1"), (0, 1))
    with pytest.raises(ScheduleError) as error:
        lower(TaskGraph.chain(2), schedule, 2)
    assert str(error.value) == (
        "lower: the schedule's orders: 5 faults.\n"
        "  task 1F1 runs in group 0; stage 1 lives in group 1.\n"
        "  task 0F0 runs 2 times; expected once.\n"
        "  task 0B0 does what 0I0 does again; expected B alone, or I and W.\n"
        "  task 0F1 never runs.\n"
        "  task 0B1 never runs, nor do its I and W."
    )


def test_a_graph_with_unknown_ends_is_refused():
    with pytest.raises(ValueError) as error:
        TaskGraph(1, (Edge("x", (0, "B"), ((1, "F"),)), Edge("x", (0, "F"), ((0, "F"),))))
    assert str(error.value) == (
        "TaskGraph: edge 'x' names the task (0, 'B'); edge 'x' names the task (1, 'F'); two edges are named 'x'; edge "
        "'x' is read by the task that writes it. Expected distinct edges between tasks of stages 0 to 0 and "
        "kinds F, R, I, W."
    )


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_merged_order_keeps_each_groups_order_and_puts_each_send_before_its_receive(p, v, rounds):
    program = lower(TaskGraph.chain(p * v), InterleavedOneFOneB(p * v, p), rounds * p)
    check(program)
    merged = merge(program)
    for group in range(p):
        assert tuple(step for owner, step in merged if owner == group) == program.groups[group]
    sent = set()
    for group, step in merged:
        if isinstance(step, Send):
            sent.add((group, step.to_group, step.value))
        elif isinstance(step, Recv):
            assert (step.from_group, group, step.value) in sent
    some = range(0, p, 2)
    assert merge(program, some) == tuple(step for step in merged if step[0] in some)


def test_the_consumer_of_a_receive_comes_after_work_that_can_start_at_once():
    program = lower(TaskGraph.chain(2, forward_only=True), GPipe(2), 3)
    runs = [str(step.task) for _, step in merge(program) if isinstance(step, Run)]
    assert runs == ["0F0", "0F1", "1F0", "0F2", "1F1", "1F2"]


def test_a_program_with_calls_and_two_loops_is_checked_and_merged():
    x = Value("x")
    before = (Call("init", (), (x,)), Send(x, 1)), (Recv(x, 0), Call("use", (x,), (), (x,)))
    loop = lower(TaskGraph.chain(2), OneFOneB(2), 2)
    groups = []
    for first, again, last in zip(before, loop.groups, ((Free(x),), ()), strict=True):
        second = [dataclasses.replace(step, loop=1) if isinstance(step, Run) else step for step in again]
        groups.append((*first, *again, *second, *last))
    program = Program(tuple(groups), (0, 1), loop.tasks * 2, nbytes={"x": 4, **loop.nbytes})
    assert check(program).peak_bytes == (7, 4)
    assert len(merge(program)) == sum(map(len, program.groups))
    assert str(program.groups[1][1]) == "call use(x!)"


def test_an_accumulator_is_updated_in_place():
    total = Value("total")
    loop = lower(TaskGraph.chain(1, forward_only=True), GPipe(1), 3)
    steps = tuple(
        dataclasses.replace(step, reads=(total,), writes=(total,), donates=(total,)) for step in loop.groups[0]
    )
    program = dataclasses.replace(
        loop, groups=(steps,), inputs=(frozenset({total}),), outputs=(frozenset({total}),), nbytes={"total": 16}
    )
    assert check(program).peak_bytes == (16,)
    assert str(program).splitlines()[1:4] == ["group 0", "    starts with total", "     0  run 0F0(total!) -> total"]
