"""Devices that work in order: the proof agrees with an exhaustive search, and finds orders that deadlock."""

import contextlib
import dataclasses
import itertools
import random
from collections import defaultdict

import pytest

import scheduler
from scheduler import Edge, Free, Recv, ScheduleError, Send, TaskGraph
from scheduler.programs.streams import stream_faults
from scheduler.schedules.catalogue import SCHEDULES


def program(name, num_groups, num_microbatches):
    schedule = scheduler.make(name, num_groups=num_groups)
    n = schedule.num_stages
    edges = [Edge(f"a{s}", (s, "F"), ((s + 1, "F"),)) for s in range(n - 1)]
    edges += [Edge(f"g{s}", (s, "I"), ((s - 1, "I"),)) for s in range(1, n)]
    edges += [Edge(f"k{s}", (s, "F"), ((s, "I"), (s, "W"))) for s in range(n)]
    return scheduler.lower(TaskGraph(n, tuple(edges)), schedule, num_microbatches)


def can_deadlock(orders):
    """By trying every interleaving of what the streams may do, from the instructions alone."""
    orders = [[step for step in order if not isinstance(step[1], Free)] for order in orders]
    homes = defaultdict(set)
    for stream, order in enumerate(orders):
        for group, _ in order:
            homes[group].add(stream)

    def meeting(stream, group, instruction):
        """What other streams have to come to, for this one to go on; a stream of both sides needs nobody."""
        here = dict.fromkeys(homes[group], (group, instruction))
        if isinstance(instruction, Send):
            other, theirs = instruction.to_group, Recv(instruction.value, group)
        elif isinstance(instruction, Recv):
            other, theirs = instruction.from_group, Send(instruction.value, group)
        else:
            return here
        there = dict.fromkeys(homes[other], (other, theirs))
        if stream in here and stream in there:
            return {stream: (group, instruction)}
        both = here.keys() & there.keys()
        return {s: step for s, step in (here | there).items() if s not in both}

    end = tuple(map(len, orders))
    seen, waiting = set(), [(0,) * len(orders)]
    while waiting:
        state = waiting.pop()
        if state in seen or state == end:
            continue
        seen.add(state)
        heads = {s: orders[s][at] for s, at in enumerate(state) if at < end[s]}
        met = [meeting(s, *head) for s, head in heads.items()]
        following = {tuple(at + (s in m) for s, at in enumerate(state)) for m in met if m.items() <= heads.items()}
        if not following:
            return True
        waiting += following
    return False


def layouts(num_groups):
    """Ways to give groups to streams: each alone, all together, two together, one over two streams."""
    yield [[g] for g in range(num_groups)]
    yield [range(num_groups)]
    yield [[0, num_groups - 1], *([g] for g in range(1, num_groups - 1))]
    yield [[0], [0], *([g] for g in range(1, num_groups))]
    yield [[0, 1], [0], *([g] for g in range(2, num_groups))]


def _small():
    """All built-in schedules with up to 3 groups and 3 microbatches, where they take them."""
    for name in SCHEDULES:
        for num_groups, num_microbatches in itertools.product((2, 3), (1, 2, 3)):
            with contextlib.suppress(ScheduleError, ValueError):
                program(name, num_groups, num_microbatches)
                yield name, num_groups, num_microbatches


SMALL = list(_small())


@pytest.mark.parametrize(("name", "num_groups", "num_microbatches"), SMALL)
def test_no_interleaving_of_a_lowered_program_deadlocks_and_the_proof_says_so(name, num_groups, num_microbatches):
    p = program(name, num_groups, num_microbatches)
    for streams in layouts(num_groups):
        scheduler.check(p, streams=streams)
        assert not can_deadlock([scheduler.merge(p, groups) for groups in streams])


def test_the_proof_agrees_with_the_search_for_any_order_of_the_groups_on_a_stream():
    draw = random.Random(0)
    found = []
    for name, num_groups, num_microbatches in SMALL:
        p = program(name, num_groups, num_microbatches)
        for streams, _ in itertools.product(layouts(num_groups), range(3)):
            orders = [_interleaved(p, groups, draw) for groups in streams]
            faults = stream_faults(p, orders)
            if not faults or faults[0].startswith("deadlock"):
                found.append(bool(faults))
                assert bool(faults) == can_deadlock(orders), (name, num_groups, num_microbatches, faults)
    assert found.count(True) > 50
    assert found.count(False) > 50


def _interleaved(p, groups, draw):
    """The instructions of some groups, each group's in order, one group or another going on for a while."""
    left = {g: list(p.groups[g]) for g in groups}
    order = []
    while any(left.values()):
        group = draw.choice([g for g in left if left[g]])
        count = draw.randint(1, 4)
        order += [(group, i) for i in left[group][:count]]
        del left[group][:count]
    return order


def test_a_program_with_two_instructions_swapped_is_proved_or_refused_as_the_search_finds():
    draw = random.Random(1)
    deadlocks = 0
    for name, num_groups, num_microbatches in SMALL:
        p = program(name, num_groups, num_microbatches)
        for _ in range(4):
            groups = [list(instructions) for instructions in p.groups]
            changed = draw.choice(groups)
            a, b = (draw.randrange(len(changed)) for _ in range(2))
            changed[a], changed[b] = changed[b], changed[a]
            broken = dataclasses.replace(p, groups=tuple(map(tuple, groups)))
            orders = [[(g, i) for i in instructions] for g, instructions in enumerate(broken.groups)]
            try:
                scheduler.check(broken, streams=orders)
            except ScheduleError:
                deadlocks += can_deadlock(orders)
            else:
                assert not can_deadlock(orders), (name, num_groups, num_microbatches, a, b)
    assert deadlocks > 50


def test_two_groups_on_one_device_in_an_order_of_their_own_deadlock():
    p = program("1f1b", 3, 2)
    one_after_the_other = [(g, i) for g in (0, 2) for i in p.groups[g]]
    with pytest.raises(ScheduleError) as caught:
        scheduler.check(p, streams=[one_after_the_other, [1]])
    assert str(caught.value) == (
        "check: the program: 1 fault.\n"
        "  deadlock: stream 0 at transfer 1 from group 1 to group 0 waits for stream 1;"
        " stream 1 at transfer 1 from group 1 to group 2 waits for stream 0."
    )


def test_what_streams_leave_out_or_change_is_told():
    p = program("gpipe", 2, 1)
    assert stream_faults(p, [[0]]) == ["no stream runs group 1"]
    backwards = [(0, i) for i in reversed(p.groups[0])]
    assert stream_faults(p, [backwards, [1]]) == ["stream 0 does not run the instructions of group 0 in their order"]
    assert any(isinstance(i, Send) for i in p.groups[0])
    assert any(isinstance(i, Recv) for i in p.groups[0])
    together = [(1, i) for i in p.groups[1]] + [(0, i) for i in p.groups[0]]
    assert stream_faults(p, [together])[0].startswith("stream 0: group 1 at 'recv a0[0] from group 0' comes before")
