"""The compilation cache folder of a job, in which each process compiles programs of its own."""

import jobs
import pytest


@pytest.mark.slow
def test_each_process_stores_what_it_compiles(tmp_path):
    first, second = (jobs.results("stored.py", tmp_path, processes=2, external=False) for _ in range(2))
    assert all(rank["compiled"] > 2 for rank in first)
    assert [rank["compiled"] for rank in second] == [0, 0] and all(rank["stored"] > 2 for rank in second)
    assert [rank["w"] for rank in second] == [rank["w"] for rank in first]


@pytest.mark.slow
def test_no_process_stores_a_program_that_calls_a_function_of_its_own(tmp_path):
    """JAX would find it for another process, in which there is no such function: that one crashed."""
    first, second = (jobs.results("stored.py", tmp_path, "callback", processes=2, external=False) for _ in range(2))
    assert all(rank["compiled"] > 0 for rank in second)
    assert [rank["w"] for rank in second] == [rank["w"] for rank in first]
