"""Finds the user's line, for warnings."""

import contextlib
import functools
import os
import sys

import jax

# Files of the frames between a user's call and our warning: functools has cached properties, and contextlib has
# decorators that enter a context.
_NOT_THE_USERS = (os.path.dirname(__file__), jax.__path__[0], functools.__file__, contextlib.__file__)


def users_frame() -> int:
    """Returns how many frames the user's code is above the caller: the `stacklevel` of a warning there."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level
