"""Several steps on submeshes of one mesh, which run at the same time where they share no group."""

import itertools
import os
import subprocess
import sys

import pytest
from jobs import ROOT, results
from samples import slow_first


@pytest.mark.parametrize(("processes", "seed"), slow_first((4, 0), (2, 1), *itertools.product((2, 4), range(2, 20))))
def test_roles_that_may_share_groups_compute_what_jit_computes(processes, seed):
    """Each process makes all calls; of a role that it has no part in, it says nothing."""
    assert results("roles.py", seed, 24, processes=processes, devices=4 // processes) == ["same"] * processes


@pytest.mark.exhaustive
def test_a_trainer_and_a_sampler_in_six_processes_have_the_numbers_of_jit():
    pytest.importorskip("optax")
    launch = [ROOT / "scripts/launch_multihost.sh", "-n", "6", "--cpu-devices", "1", "--", sys.executable]
    command = [*launch, "examples/grpo.py", "--steps", "20", "--check-against-jit"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] rewards and losses are those of jax.jit" in done.stdout.splitlines()
    assert "Warning" not in done.stderr, done.stderr
