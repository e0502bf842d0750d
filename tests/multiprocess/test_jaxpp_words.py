"""Programs in JaxPP's words run in several processes as in one."""

import jobs
import pytest

pytestmark = pytest.mark.slow


def test_two_processes_compute_what_plain_jax_does():
    found = jobs.results("jaxpp_words.py", processes=2, devices=2, hang_timeout_s=60)
    assert found == ["equal"] * 2
