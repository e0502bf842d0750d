"""The names of the files that each process of a job leaves in a folder."""

import re
from collections.abc import Mapping
from pathlib import Path


def attempt_of(environment: Mapping[str, str]) -> int:
    """How often the launcher has started the job over."""
    return int(environment.get("MPMD_ATTEMPT", "0"))


def path_of(where: Path, number: int, attempt: int, ending: str) -> Path:
    """The file of a process."""
    return where / f"rank-{number}{f'.restart-{attempt}' if attempt else ''}.{ending}"


def pattern(ending: str) -> re.Pattern[str]:
    """Such names; its groups are the process, and the attempt unless that is the first."""
    return re.compile(rf"rank-(\d+)(?:\.restart-(\d+))?\.{re.escape(ending)}")
