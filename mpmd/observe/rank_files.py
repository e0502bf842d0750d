"""The names of the files that each process of a job leaves in a folder."""

import re
from collections.abc import Mapping
from pathlib import Path


def attempt_of(environment: Mapping[str, str]) -> int:
    """Returns how often the launcher has restarted the job."""
    return int(environment.get("MPMD_ATTEMPT", "0"))


def path_of(where: Path, number: int, attempt: int, ending: str) -> Path:
    """Returns the file of a process."""
    return where / f"rank-{number}{f'.restart-{attempt}' if attempt else ''}.{ending}"


def found_in(where: Path, ending: str) -> list[tuple[int, int, Path]]:
    """Returns these files of a folder, each with its process and attempt, in this order. Raises a FileNotFoundError if
    there is no folder.
    """
    if not where.is_dir():
        raise FileNotFoundError(f"{where} is no folder.")
    name = re.compile(rf"rank-(\d+)(?:\.restart-(\d+))?\.{re.escape(ending)}")
    matches = ((name.fullmatch(path.name), path) for path in where.iterdir())
    return sorted((int(match[1]), int(match[2] or 0), path) for match, path in matches if match is not None)
