"""Values go from any layout to any other between processes, and to every process's host."""

import jobs
import pytest
from samples import slow_first


@pytest.mark.parametrize("seed", slow_first(0, 1))
def test_any_value_goes_from_any_sharding_to_any_other(seed):
    found = jobs.results("moving.py", seed, processes=4, devices=2, hang_timeout_s=60, external=bool(seed))
    assert found == [64] * 4
