"""Ends a command: with its status, and silently if the reader of its output has gone."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with the status that it returns: 1 if the pipe that it writes to was closed."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
