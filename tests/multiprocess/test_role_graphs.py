"""Roles of one step in groups of several processes."""

from pathlib import Path

import pytest
from jobs import results

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("seed", [3, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(4, 24))])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_graph_of_roles_over_processes_computes_what_jit_computes(processes, seed):
    found = results("role_graphs.py", TESTS, seed, processes=processes, devices=4 // processes)
    assert found == ["same"] * processes
