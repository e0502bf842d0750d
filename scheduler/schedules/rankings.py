"""Rankings for list scheduling, written as a few numbers that a search can vary."""

import random
from collections.abc import Sequence

from scheduler.schedules.list_scheduling import Problem, Ranking
from scheduler.task import KINDS, Kind

Genes = dict[str, float]
_SWITCHES = frozenset({"weights_last", "interval", "burst", "patience"})


def random_genes(rng: random.Random) -> Genes:
    """Returns a random ranking of the kind that has proved useful."""
    return {
        "pace": rng.choice([0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.3, 1.7]),
        "turn_up": rng.choice([0.0, 0.0, rng.uniform(-0.5, 0.5)]),
        "turn_back": rng.choice([0.0, 0.0, rng.uniform(-0.5, 0.5)]),
        "turn_down": rng.choice([0.0, 0.0, rng.uniform(-0.5, 0.5)]),
        "weights": rng.uniform(-0.2, 1.5),
        "weights_early": rng.uniform(-0.2, 1.5),
        "by_group": rng.choice([0.0, 0.0, -1.0, 1.0, 0.5]),
        "weights_last": rng.choice([0.0, 1.0, 1.0]),
        "interval": rng.choice([0.0, 0.0, 0.0, 0.7, 0.85, 1.0, 1.1]),
        "burst": rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]),
        "patience": rng.choice([0.0, 0.0, 0.2, 0.5, 0.9]),
        "noise": rng.choice([0.0, 0.0, rng.random()]),
        "noise_seed": rng.random(),
    }


def ranking_from(problem: Problem, genes: Genes) -> Ranking:
    """Returns a ranking from genes. Tasks are due as on one microbatch's way on its own, stretched here and there."""
    n, m, costs = problem.num_stages, problem.num_microbatches, problem.costs.of_mean(problem.num_stages)
    forward, input_grad, weight_grad = costs.seconds(n).values()
    over = costs.transfers(n)
    period = max(
        sum(forward[s] + input_grad[s] + weight_grad[s] for s in problem.stages_of(group))
        for group in range(problem.num_groups)
    )
    due_f, clock = [], 0.0
    for stage in range(n):
        due_f.append(clock)
        clock += forward[stage] + over[stage]
    down = clock
    due_i = [0.0] * n
    for stage in reversed(range(n)):
        due_i[stage] = clock
        clock += input_grad[stage] + over[stage - 1]
    half = n // 2 if n > problem.num_groups else n
    for stage in range(n):
        late = stage >= half
        due_f[stage] += genes["turn_up"] * down if late else 0.0
        due_i[stage] += (genes["turn_back"] if late else genes["turn_down"]) * down
    due_w = [
        due_i[stage]
        + input_grad[stage]
        + clock * (genes["weights"] if stage >= half else genes["weights_early"])
        + genes["by_group"] * problem.placement[stage] * forward[stage]
        for stage in range(n)
    ]
    noise: dict[Kind, Sequence[float]] = {}
    if genes["noise"]:
        rng = random.Random(genes["noise_seed"])
        reach = genes["noise"] * period / 3
        for kind in KINDS:
            noise[kind] = [rng.uniform(-reach, reach) for _ in range(n * m)]
    return Ranking(
        {"F": due_f, "I": due_i, "W": due_w},
        pace=genes["pace"] * period,
        weights_last=genes["weights_last"] > 0.5,
        patience=genes["patience"] * period / 3,
        interval=genes["interval"] * period,
        burst=int(genes["burst"] * problem.num_groups),
        noise=noise,
    )


def neighbour(rng: random.Random, genes: Genes, fresh: Genes) -> Genes:
    """Returns genes near the given ones, with some taken from fresh ones."""
    changed = {}
    for name, value in genes.items():
        roll = rng.random()
        if roll < 0.15:
            changed[name] = fresh[name]
        else:
            changed[name] = value + rng.gauss(0, 0.2) if roll < 0.5 and name not in _SWITCHES else value
    return changed
