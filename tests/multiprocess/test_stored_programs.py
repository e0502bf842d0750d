"""The compilation cache folder of a job, in which each process compiles programs of its own."""

import jobs
import pytest


@pytest.mark.slow
def test_each_process_stores_what_it_compiles(tmp_path):
    first, second = (jobs.results("stored.py", tmp_path, processes=2, external=False) for _ in range(2))
    assert all(rank["compiled"] > 2 for rank in first)
    assert [rank["compiled"] for rank in second] == [0, 0] and all(rank["stored"] > 2 for rank in second)
    assert [rank["w"] for rank in second] == [rank["w"] for rank in first]
