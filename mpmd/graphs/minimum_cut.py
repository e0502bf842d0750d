"""Finds the stages of equations for which the fewest bytes cross, by minimum cuts. Independent of JAX.

Nodes are numbers, labels are stages, costs are integers.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """`weight` for each label that one of `readers` has and `producer` does not have.

    Without a producer, the first of these labels is free: a value that is read in one place only costs nothing.
    """

    weight: int
    producer: int | None
    readers: tuple[int, ...]


class Labelling(NamedTuple):
    """Nodes that need a label each, from `low` to `high` of the node, and the costs of a choice."""

    low: Sequence[int]
    high: Sequence[int]
    start: Sequence[int]  # a first, feasible choice. Among equally cheap choices, the one that keeps most of it wins.
    pairs: Sequence[tuple[int, int]]  # of nodes: the label of the first is at most the label of the second
    costs: Sequence[Cost]


def cost_of(labels: Sequence[int | None], costs: Sequence[Cost]) -> int:
    """Returns the cost of a choice of labels; nodes without a label are left out."""
    total = 0
    for weight, producer, readers in costs:
        places = {labels[r] for r in readers} - {None}
        home = None if producer is None else labels[producer]
        total += weight * (max(0, len(places) - 1) if home is None else len(places - {home}))
    return total


def cheapest_labels(problem: Labelling) -> list[int]:
    """Returns labels that no move to one label makes cheaper (alpha-expansion); with two labels they are optimal.

    A move takes any set of nodes to one label; the best move is a minimum cut. Each move lowers the cost, so the search
    ends.

    Source: Boykov, Veksler, Zabih, "Fast approximate energy minimization via graph cuts", PAMI 2001.
    """
    labels = list(problem.start)
    # The part of the cost that nodes with one possible label cause, whatever the others choose.
    certain = [a if a == b else None for a, b in zip(problem.low, problem.high, strict=True)]
    for nodes, part in _independent_parts(problem):

        def measure(candidate: Sequence[int], nodes: Sequence[int] = nodes, part: Labelling = part) -> int:
            return cost_of(candidate, part.costs) + sum(candidate[v] != part.start[v] for v in nodes)

        best, least = measure(labels), cost_of(certain, part.costs)
        stages = range(min(problem.low[v] for v in nodes), max(problem.high[v] for v in nodes) + 1)
        tried = 0
        while best > least and tried < len(stages):
            for label in stages:
                moved = _expanded(part, nodes, labels, label)
                found = measure(moved)
                assert found <= best, (found, best)
                tried = tried + 1 if found == best else 0
                if found < best:
                    labels, best = moved, found
                if best == least or tried == len(stages):
                    break
    return labels


def _independent_parts(problem: Labelling) -> Iterator[tuple[list[int], Labelling]]:
    """Yields independent sets of the nodes that have a choice, each with its pairs and costs.

    Costs are scaled, so that keeping a first label decides between choices of equal cost.
    """
    parent = list(range(len(problem.start)))

    def find(v):
        while parent[v] != v:
            parent[v] = v = parent[parent[v]]
        return v

    free = {v for v, (a, b) in enumerate(zip(problem.low, problem.high, strict=True)) if a < b}
    pairs = [(u, v) for u, v in problem.pairs if u in free and v in free]
    costs = [
        (c, free.intersection((*c.readers, *(() if c.producer is None else (c.producer,))))) for c in problem.costs
    ]
    for first, *others in (*pairs, *(nodes for _, nodes in costs if nodes)):
        for v in others:
            parent[find(v)] = find(first)
    parts: dict[int, tuple[list, list, list]] = {}
    for v in sorted(free):
        parts.setdefault(find(v), ([], [], []))[0].append(v)
    for pair in pairs:
        parts[find(pair[0])][1].append(pair)
    for cost, nodes in costs:
        if nodes:
            parts[find(min(nodes))][2].append(cost)
    for members, own_pairs, own_costs in parts.values():
        scaled = [c._replace(weight=c.weight * (len(members) + 1)) for c in own_costs]
        yield members, problem._replace(pairs=own_pairs, costs=scaled)


def _expanded(problem: Labelling, nodes: Sequence[int], labels: Sequence[int], label: int) -> list[int]:
    """Returns the best of the choices in which each node keeps its label or takes `label`."""
    movable = [v for v in nodes if labels[v] != label and problem.low[v] <= label <= problem.high[v]]
    number = {v: i for i, v in enumerate(movable)}
    cut = _Move(number, labels, label)
    for v in movable:
        if labels[v] != problem.start[v]:
            cut.charge(1, labels[v], [v], None)
        if label != problem.start[v]:
            cut.charge(1, label, [v], None)
    for u, v in problem.pairs:
        cut.keep_order(u, v)
    for weight, producer, readers in problem.costs:
        for stage in {labels[r] for r in readers} | {label}:
            cut.charge(weight, stage, readers, producer)
    moves = cut.solve()
    return [label if number.get(v) in moves else old for v, old in enumerate(labels)]


class _Move:
    """A move to one label as a cut: nodes on the side of the source stay, those on the side of the sink move."""

    def __init__(self, number: dict[int, int], labels: Sequence[int], label: int):
        self.number, self.labels, self.label = number, labels, label
        self.edges: list[tuple[int, int, int | None]] = []
        self.source, self.sink, self.size = len(number), len(number) + 1, len(number) + 2

    def keep_order(self, u: int, v: int) -> None:
        """Forbids that `u` gets a larger label than `v`."""
        if u in self.number and self.label > self.labels[v]:
            self.edges.append((self.number.get(v, self.source), self.number[u], None))
        if v in self.number and self.labels[u] > self.label:
            self.edges.append((self.number.get(u, self.source), self.number[v], None))

    def charge(self, weight: int, stage: int, readers: Sequence[int], producer: int | None) -> None:
        """Adds `weight` if a reader is at `stage` and the producer is not."""
        here = [r for r in readers if self._may_be_at(r, stage)]
        if not here or (producer is not None and producer not in self.number and self.labels[producer] == stage):
            return
        moving = stage == self.label
        one, other = (self.sink, self.source) if moving else (self.source, self.sink)
        end = self.number[producer] if producer in self.number and self._may_be_at(producer, stage) else other
        if any(r not in self.number for r in here):
            start = one
        elif len(here) == 1:
            start = self.number[here[0]]
        else:
            start, self.size = self.size, self.size + 1
            for r in here:
                self._add(self.number[r], start, None, moving)
        if {start, end} != {self.source, self.sink}:
            self._add(start, end, weight, moving)

    def _may_be_at(self, node: int, stage: int) -> bool:
        return self.labels[node] == stage or (node in self.number and stage == self.label)

    def _add(self, a: int, b: int, weight: int | None, reverse: bool) -> None:
        self.edges.append((b, a, weight) if reverse else (a, b, weight))

    def solve(self) -> set[int]:
        infinite = sum(w for *_, w in self.edges if w is not None) + 1
        edges = [(a, b, infinite if w is None else w) for a, b, w in self.edges]
        return set(self.number.values()) - minimum_cut(self.size, edges, self.source, self.sink)


def minimum_cut(num_nodes: int, edges: Iterable[tuple[int, int, int]], source: int, sink: int) -> set[int]:
    """Returns the nodes on the source side of a minimum cut, the largest such set (Dinic's algorithm).

    Each round ends with a longer shortest path from the source to the sink, so there are fewer rounds than nodes.

    Args:
      edges: triples of tail, head and capacity.
    """
    heads: list[int] = []
    room: list[int] = []
    out: list[list[int]] = [[] for _ in range(num_nodes)]
    for a, b, capacity in edges:
        out[a].append(len(heads))
        out[b].append(len(heads) + 1)
        heads += b, a
        room += capacity, 0
    while True:
        distance = _distances(num_nodes, heads, room, out, source, sink)
        if distance[source] < 0:  # nodes that cannot reach the sink stay with the source
            return {v for v in range(num_nodes) if distance[v] < 0}
        _saturate(heads, room, out, distance, source, sink)


def _distances(
    num_nodes: int, heads: Sequence[int], room: Sequence[int], out: Sequence[Sequence[int]], source: int, sink: int
) -> list[int]:
    """Returns the number of edges with room from each node to the sink, at least, for nodes no farther from it than the
    source; -1 for the others.
    """
    distance = [-1] * num_nodes
    distance[sink] = 0
    waiting = deque([sink])
    while waiting and distance[source] < 0:
        v = waiting.popleft()
        for e in out[v]:
            if distance[heads[e]] < 0 and room[e ^ 1]:
                distance[heads[e]] = distance[v] + 1
                waiting.append(heads[e])
    return distance


def _saturate(
    heads: Sequence[int], room: list[int], out: Sequence[Sequence[int]], distance: Sequence[int], source: int, sink: int
) -> None:
    """Sends flow along shortest paths until each of them has an edge without room."""
    rest: dict[int, list[int]] = {source: list(out[source])}  # edges not yet found useless
    path: list[int] = []
    v = source
    while True:
        if v == sink:
            amount = min(room[e] for e in path)
            for e in path:
                room[e] -= amount
                room[e ^ 1] += amount
            # Continue from the first edge without room; the edges before it are still of use.
            del path[next(i for i, e in enumerate(path) if not room[e]) :]
            v = heads[path[-1]] if path else source
        edges = rest.get(v)
        if edges is None:
            edges = rest[v] = list(out[v])
        while edges and not (room[edges[-1]] and distance[heads[edges[-1]]] == distance[v] - 1):
            edges.pop()
        if edges:
            path.append(edges[-1])
            v = heads[edges[-1]]
        elif v == source:
            return
        else:
            e = path.pop()
            v = heads[e ^ 1]
            rest[v].pop()
