"""Which cases of a test are tried when: slow ones stand for those like them, which are exhaustive."""

from typing import Any

import pytest


def slow_first(*cases: Any, num_slow: int = 1) -> list:
    """Parameters of a test: the first ones are slow, and the others, which are like these, exhaustive.

    A tuple is the values of several parameters.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.slow if n < num_slow else pytest.mark.exhaustive,
        )
        for n, case in enumerate(cases)
    ]
