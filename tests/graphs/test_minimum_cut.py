"""Minimum cuts and cheapest labels against all choices that there are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.graphs.minimum_cut import Cost, Labelling, cheapest_labels, cost_of, minimum_cut


def capacity(side, edges):
    """What an edge from the source's side to the other can carry, summed."""
    return sum(c for a, b, c in edges if a in side and b not in side)


@st.composite
def networks(draw):
    size = draw(st.integers(2, 7))
    nodes = st.integers(0, size - 1)
    return size, draw(st.lists(st.tuples(nodes, nodes, st.integers(0, 9)), max_size=16))


@given(networks())
def test_a_minimum_cut_parts_source_and_sink_as_cheaply_as_any(network):
    size, edges = network
    found = minimum_cut(size, edges, 0, 1)
    assert 0 in found and 1 not in found
    rest = range(2, size)
    sides = [{0, *some} for n in range(size - 1) for some in itertools.combinations(rest, n)]
    least = min(capacity(side, edges) for side in sides)
    assert capacity(found, edges) == least
    assert all(side <= found for side in sides if capacity(side, edges) == least)


@st.composite
def labellings(draw, num_labels):
    """Nodes in the order of a text, costs between them, and labels that rise with the text to begin with."""
    size = draw(st.integers(1, 5 if num_labels > 2 else 7))
    nodes = range(size)
    start = sorted(draw(st.lists(st.integers(0, num_labels - 1), min_size=size, max_size=size)))
    pairs = [(a, b) for a in nodes for b in nodes if a < b and draw(st.booleans())]
    low = [draw(st.integers(0, s)) for s in start]
    high = [draw(st.integers(s, num_labels - 1)) for s in start]
    for a, b in pairs:
        low[b] = max(low[a], low[b])
    for a, b in reversed(pairs):
        high[a] = min(high[a], high[b])
    costs = []
    for _ in range(draw(st.integers(0, 5))):
        readers = tuple(draw(st.sets(st.sampled_from(nodes), min_size=1)))
        earlier = [None, *(n for n in nodes if all((n, r) in pairs for r in readers))]
        costs.append(Cost(draw(st.integers(1, 9)), draw(st.sampled_from(earlier)), readers))
    return Labelling(low, high, start, pairs, costs)


def choices(problem):
    """All feasible labels."""
    ranges = [range(a, b + 1) for a, b in zip(problem.low, problem.high, strict=True)]
    return [c for c in itertools.product(*ranges) if all(c[a] <= c[b] for a, b in problem.pairs)]


def moved(problem, labels):
    return sum(a != b for a, b in zip(labels, problem.start, strict=True))


@given(labellings(num_labels=2))
def test_of_two_labels_the_cheapest_are_found_and_as_many_first_ones_are_kept_as_can_be(problem):
    labels = cheapest_labels(problem)
    best = min((cost_of(c, problem.costs), moved(problem, c)) for c in choices(problem))
    assert (cost_of(labels, problem.costs), moved(problem, labels)) == best


@given(labellings(num_labels=4))
def test_no_move_to_one_label_is_cheaper_than_what_is_found(problem):
    labels = cheapest_labels(problem)
    assert tuple(labels) in choices(problem)
    found = cost_of(labels, problem.costs), moved(problem, labels)
    for choice in choices(problem):
        if len({new for old, new in zip(labels, choice, strict=True) if old != new}) == 1:
            assert found <= (cost_of(choice, problem.costs), moved(problem, choice))


def test_a_value_crosses_once_to_each_label_and_a_common_operand_costs_nothing_in_one_place():
    value, operand = Cost(5, 0, (1, 2, 3)), Cost(7, None, (1, 2))
    assert cost_of([0, 1, 1, 2], [value]) == 10
    assert cost_of([0, 1, 1, 2], [operand]) == 0
    assert cost_of([0, 1, 2, 2], [operand]) == 7


@pytest.mark.parametrize(("weight", "label"), [(4, 2), (6, 0)])
def test_a_node_goes_to_its_reader_where_what_it_reads_is_smaller_than_what_it_makes(weight, label):
    problem = Labelling([0, 0, 2], [0, 2, 2], [0, 0, 2], [(0, 1), (1, 2)], [Cost(weight, 0, (1,)), Cost(5, 1, (2,))])
    assert cheapest_labels(problem) == [0, label, 2]
