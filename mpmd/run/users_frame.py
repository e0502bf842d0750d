"""Finds the user's line, for warnings."""

import os
import sys

import jax


def users_frame() -> int:
    """How many frames above its caller the user's code is: the `stacklevel` of a warning there."""
    package = os.path.dirname(os.path.dirname(__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((package, jax.__path__[0])):
        frame, level = frame.f_back, level + 1
    return level
