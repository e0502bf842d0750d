"""Finds the user's line, for warnings."""

import contextlib
import functools
import os
import sys

import jax

# What stands between a user's call and a warning of ours: cached properties are functions of functools, and decorators
# that enter a context are contextlib's.
_NOT_THE_USERS = (os.path.dirname(__file__), jax.__path__[0], functools.__file__, contextlib.__file__)


def users_frame() -> int:
    """How many frames above its caller the user's code is: the `stacklevel` of a warning there."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level
