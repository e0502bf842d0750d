"""Reads YAML and JSON that others wrote: a document that is too large or too deeply nested is an error, not a hang."""

from collections.abc import Mapping
from pathlib import Path as File

import yaml

from mpmd.errors import ReshardError
from scheduler.base.files import parse_json, read_text

_MOST_NBYTES = 1 << 20
_MOST_ENTRIES = 100_000


def read_document(file: str | File, what: str) -> object:
    """Returns the content of a file: as JSON if its name says so, otherwise as YAML.

    Args:
        what: the expected content, for messages: "a layout".

    Raises:
        ReshardError: the file cannot be read, is neither YAML nor JSON, or is too large.
    """
    file = File(file)
    try:
        text = read_text(file, _MOST_NBYTES)
        document = parse_json(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ReshardError(f"{file} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise ReshardError(f"{file} is neither YAML nor JSON: it is nested too deeply.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ReshardError(f"{file} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if _is_large(document):
        raise ReshardError(f"{file} is not {what}: written out it has more than {_MOST_ENTRIES} entries.")
    return document


def _is_large(document: object) -> bool:
    """Returns whether a document has too many entries with its aliases expanded; a few lines of YAML can be endless."""
    left, num_entries = [document], 0
    while left and num_entries <= _MOST_ENTRIES:
        value = left.pop()
        entries = [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        num_entries += 1
        left += entries
    return bool(left)
