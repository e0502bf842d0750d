"""An MpmdArray is the same array in every process, whichever of its groups the process has."""

import jobs
import pytest

pytestmark = pytest.mark.slow


def test_shardings_and_replica_numbers_are_alike_in_every_process():
    first, second = jobs.results("arrays.py", processes=2, devices=4, hang_timeout_s=60)
    assert first == second and len(first) == 11
