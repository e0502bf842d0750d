"""Even work: how many rows a microbatch of each length has, and which documents go where.

Pure functions of numbers: every process that calls them gets the same.
"""

from collections.abc import Callable, Iterable, Sequence

# The cost of a row by its number of tokens, for instance tokens · linear + tokens² · attention.
Cost = Callable[[int], float]


def rows_of(lengths: Iterable[int], cost: Cost, rows: int, data: int = 1) -> dict[int, int]:
    """Returns the rows of a microbatch for each length, so that microbatches of all lengths cost about the same.

    Args:
      lengths: the lengths of rows, ascending.
      cost: the cost of a row.
      rows: the rows of a microbatch of the greatest length.
      data: devices that share the rows; all get equally many.
    """
    *_, longest = lengths = tuple(lengths)
    wanted = rows * cost(longest)
    return {length: data * max(1, round(wanted / cost(length) / data)) for length in lengths}


def deal_documents(lengths: Sequence[int], cost: Cost, microbatches: int, data: int = 1) -> list[list[list[int]]]:
    """Deals documents to microbatches, and within each to the devices that share its rows, so that the work is even.

    Returns:
      For each microbatch and device, the positions of its documents in `lengths`.
    """
    parts = deal([cost(length) for length in lengths], microbatches * data)
    return [parts[m * data : (m + 1) * data] for m in range(microbatches)]


def deal(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Deals things to parts, about equally many to each, so that the greatest load is close to the mean.

    The most expensive thing comes first, and goes where the load is least. Then the most and the least loaded part
    exchange things while that helps: in the end their loads differ by at most the cost of one thing. Each exchange
    lowers the sum of the squares of all loads, so the exchanges end.
    """
    room = -(-len(costs) // parts)
    padded = [*costs, *[0.0] * (room * parts - len(costs))]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for i in sorted(range(len(padded)), key=lambda i: -padded[i]):
        part = min((p for p in range(parts) if len(dealt[p]) < room), key=loads.__getitem__)
        dealt[part].append(i)
        loads[part] += padded[i]
    while _swap(padded, dealt, loads):
        pass
    return [[i for i in part if i < len(costs)] for part in dealt]


def _swap(costs: Sequence[float], dealt: list[list[int]], loads: list[float]) -> bool:
    """Exchanges two things between the most and the least loaded part, if that brings their loads closer."""
    most, least = loads.index(max(loads)), loads.index(min(loads))
    half = (loads[most] - loads[least]) / 2
    pairs = ((x, y) for x in range(len(dealt[most])) for y in range(len(dealt[least])))

    def gain(pair: tuple[int, int]) -> float:
        return costs[dealt[most][pair[0]]] - costs[dealt[least][pair[1]]]

    x, y = best = min(pairs, key=lambda pair: abs(half - gain(pair)), default=(0, 0))
    if half <= 1e-9 * loads[most] or abs(half - gain(best)) >= half * (1 - 1e-9):
        return False
    moved = gain(best)
    dealt[most][x], dealt[least][y] = dealt[least][y], dealt[most][x]
    loads[most] -= moved
    loads[least] += moved
    return True
