"""Writes paths of leaves as text, and matches them with patterns.

A path is written with slashes, `params/layers/3/w`. A pattern is matched against the whole path: `*` and `?` stay
within one part of it, `**` stands for any number of parts, and `{layer}` for one part that is a number.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """One part of a path: the name of a dict's entry (or an attribute), or the index of a list's or tuple's."""

    name: str
    sequence: bool = False


Path = tuple[Key, ...]


def show(path: Iterable[Key]) -> str:
    """Returns the path as text; within a name, a slash is written %2F and a percent sign %25. The root is a dot.

    Examples:
        >>> show((Key("params"), Key("enc/w"), Key("0", sequence=True)))
        'params/enc%2Fw/0'
    """
    return "/".join(escaped(key.name) for key in path) or "."


def escaped(name: str) -> str:
    """Returns a name as a part of a path's text."""
    return name.replace("%", "%25").replace("/", "%2F")


def dotted(path: Iterable[Key]) -> str:
    """Returns Orbax's name of an array, and Hugging Face's name of a tensor: the names with dots between."""
    return ".".join(key.name for key in path)


def parts_of(text: str) -> list[str]:
    """Returns the names of a path that is written as text."""
    return [] if text == "." else [part.replace("%2F", "/").replace("%25", "%") for part in text.split("/")]


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """Returns a pattern's regular expression. Raises a ValueError if it or a part is empty, or has `{layer}` twice."""
    parts = pattern.split("/")
    if not all(parts):
        raise ValueError(f"pattern {pattern!r} has an empty part; write it like 'params/layers/**'.")
    if pattern.count("{layer}") > 1:
        raise ValueError(f"pattern {pattern!r} has {{layer}} more than once; write * for any other number.")
    parts = [part for part, before in zip(parts, ["", *parts], strict=False) if not part == before == "**"]
    text, separator = "", ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part != "**":
            text, separator = text + separator + _part(part), "/"
        elif last:
            text += r".*" if not index else r"(?:/.*)?" if separator else ""
        else:
            text, separator = text + separator + r"(?:[^/]+/)*", ""
    return re.compile(text)


def _part(part: str) -> str:
    regex = {"*": "[^/]*", "?": "[^/]", "{layer}": r"(?P<layer>\d+)"}
    pieces = re.split(r"(\*|\?|\{layer\})", re.sub(r"\*+", "*", part))  # many stars would be tried for ever
    return "".join(regex.get(piece, re.escape(piece)) for piece in pieces)


def matches(pattern: str, path: Iterable[Key]) -> re.Match[str] | None:
    """Matches a pattern against a path, with its `{layer}` as group "layer".

    Examples:
        >>> path = (Key("opt"), Key("mu"), Key("layers"), Key("3"), Key("w"))
        >>> [bool(matches(p, path)) for p in ("opt/**", "**/w", "opt/*", "**/layers/{layer}/*")]
        [True, True, False, True]
    """
    return compiled(pattern).fullmatch(show(path))


def within(pattern: str, path: Path) -> bool:
    """Returns whether the pattern matches this path or a node above it.

    Examples:
        >>> within("opt/*", (Key("opt"), Key("mu"), Key("w")))
        True
    """
    return any(matches(pattern, path[:depth]) for depth in range(len(path), -1, -1))
