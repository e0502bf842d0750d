"""Writes the data of the flight recorder into a folder, one file for each rank, and reads them again."""

import json
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpmd.observe import rank_files
from mpmd.observe.flight import Sample
from scheduler import Program
from scheduler.programs.stored import of_data, to_data

# The environment variable for the folder; the launcher sets it to the folder of --log-dir.
VARIABLE = "MPMD_FLIGHT_DIR"
_ENDING = "flight.json"


def folder(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder for the records; None if none is named."""
    return Path(environment[VARIABLE]) if environment.get(VARIABLE) else None


def path_of(where: Path, rank: int, environment: Mapping[str, str]) -> Path:
    """Returns the file of a rank."""
    return rank_files.path_of(where, rank, rank_files.attempt_of(environment), _ENDING)


def write(
    path: Path,
    rank: int,
    why: str,
    programs: Iterable[dict[str, Any]],
    samples: Iterable[Sample] = (),
    **about: object,
) -> None:
    """Writes the file of a rank, and the file of each program in it, unless that exists already.

    Args:
      why: the reason for the end of the job, in a line.
      programs: the records of the rank's programs as plain data, except the program itself, under "plan".
      about: more to write, as plain data.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for record in programs:
        text = json.dumps(to_data(record["plan"]))
        plan = f"program-{zlib.crc32(text.encode()):08x}.json"
        if not (path.parent / plan).exists():
            _replace(path.parent / plan, text)
        kept.append({**record, "plan": plan})
    data = {
        "rank": rank, "why": why, "wall": time.time(), "now": time.perf_counter(), "programs": kept,
        "samples": [list(s) for s in samples], **about,
    }  # fmt: skip
    _replace(path, json.dumps(data))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # process numbers of hosts may be equal
    temporary.write_text(text)
    temporary.replace(path)


def read(where: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Program]]:
    """Returns the last attempt's records in a folder by rank, and the programs that they name. Raises a
    FileNotFoundError if there is no folder or no record in it, and a ValueError if a file is no record.
    """
    found = rank_files.found_in(where, _ENDING)
    if not found:
        raise FileNotFoundError(
            f"{where} holds no rank-N.flight.json. A job writes them when it ends badly, into the folder of the"
            f" launcher's --log-dir or of {VARIABLE}."
        )
    last = max(attempt for _, attempt, _ in found)
    records, plans = {}, {}
    for rank, attempt, path in found:
        if attempt < last:
            continue
        try:
            record = records[rank] = json.loads(path.read_text())
            names = [p["plan"] for p in record["programs"]]
            if not isinstance(record["num_ranks"], int):
                raise TypeError("num_ranks is no number")
            for name in names:
                if name not in plans and (path.parent / name).exists():
                    plans[name] = of_data(json.loads((path.parent / name).read_text()))
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{path} is no record of this library: {type(e).__name__}: {e}") from None
    return records, plans
