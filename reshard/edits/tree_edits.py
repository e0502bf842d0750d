"""Plans a new tree of stored arrays: what each new array takes from which old ones.

Every change is a function from entries to entries: selecting, renaming, cutting stacks into layers and back, other
dtypes. An entry says which parts of stored arrays it consists of, so changes compose and no data is read.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.edits.entries import Entry, described
from reshard.storage.paths import Key, Path, matches, parts_of, show, within
from reshard.storage.stored import fault_of_name
from scheduler.base.texts import first_of

Entries = Sequence[Entry]
Change = Callable[[Entries], list[Entry]]


def select(only: Sequence[str] = (), drop: Sequence[str] = ()) -> Change:
    """Keeps the leaves that one of the patterns `only` matches (all if there are none) and none of `drop` matches.

    A pattern that names a node matches everything below it.
    """

    def change(entries: Entries) -> list[Entry]:
        for option, patterns in (("--only", only), ("--drop", drop)):
            for pattern in patterns:
                _some(option, pattern, entries, lambda e, p=pattern: within(p, e.path))
        return [
            e
            for e in entries
            if (not only or any(within(p, e.path) for p in only)) and not any(within(p, e.path) for p in drop)
        ]

    return change


def rename(pattern: str, replacement: str) -> Change:
    r"""Replaces the first match of a regular expression that spans whole paths; `\1` is its first group."""
    try:
        regex = re.compile(pattern)
        regex.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise ReshardError(f"--rename {pattern}={replacement}: {error}.") from None

    def renamed(entry: Entry) -> Entry:
        match = regex.fullmatch(show(entry.path))
        if match is None:
            return entry
        names = parts_of(match.expand(replacement))
        if not all(names):
            raise ReshardError(
                f"--rename {pattern}={replacement}: {show(entry.path)} would have a name without letters."
            )
        sequences = {key.name for key in entry.path if key.sequence}
        return dataclasses.replace(entry, path=tuple([Key(name, name in sequences) for name in names]))

    def change(entries: Entries) -> list[Entry]:
        _some("--rename", pattern, entries, lambda e: regex.fullmatch(show(e.path)))
        return [renamed(e) for e in entries]

    return change


def unstack(pattern: str, *, as_list: bool = True, option: str = "") -> Change:
    """Cuts all arrays below the nodes that the pattern names along axis 0: `layers/w[L, …]` becomes `layers/3/w`.

    Args:
        pattern: the path of nodes, `**/layers`; each is cut on its own, so that optimizer states may mirror it.
        as_list: whether the layers become items of a list; otherwise entries of a dict, named by numbers.
        option: the name of this change in messages.
    """
    option = option or f"--unstack {pattern}"

    def layers_of(node: str, entries: Entries) -> int:
        arrays = [e for e in entries if e.is_array]
        whole = [e for e in entries if not e.is_array and e.value_type == "string"] + [e for e in arrays if not e.shape]
        if whole:
            raise ReshardError(f"{option}: {node} cannot be cut into layers: it has no axis.\n{_list(whole)}")
        sizes = {e.shape[0] for e in arrays}
        if len(sizes) != 1:
            raise ReshardError(
                f"{option}: the arrays of {node} must have one number of layers on axis 0, "
                f"but have {sorted(sizes) or 'none'}.\n{_list(arrays)}"
            )
        return sizes.pop()

    def layer(entry: Entry, depth: int, index: int) -> Entry:
        path = (*entry.path[:depth], Key(str(index), as_list), *entry.path[depth:])
        if not entry.is_array:
            return dataclasses.replace(entry, path=path)
        origins = [part.of_layer() for part in entry.parts(Box.whole(entry.shape).with_range(0, index, index + 1))]
        return dataclasses.replace(
            entry, path=path, shape=entry.shape[1:], chunk=entry.chunk[1:], origins=tuple(origins)
        )

    def cut(node: Path, inside: Entries) -> list[Entry]:
        return [layer(e, len(node), index) for index in range(layers_of(show(node), inside)) for e in inside]

    return _at_nodes(option, pattern, cut)


def stack(pattern: str, option: str = "") -> Change:
    """Stacks the numbered layers below the nodes that the pattern names: `layers/3/w` becomes `layers/w[L, …]`.

    Lists, and dicts with entries named by numbers, are stacked alike. All layers must have the same tree, shapes
    and dtypes, and no number may be missing. Messages call the change `option`.
    """
    option = option or f"--stack {pattern}"

    def joined(node: Path, inside: Entries) -> list[Entry]:
        by_rest = _layers_by_rest(node, inside, option)
        indices = range(_num_layers(node, by_rest, option))
        return [_stacked(node + rest, [layers[i] for i in indices], option) for rest, layers in by_rest.items()]

    return _at_nodes(option, pattern, joined)


def _layers_by_rest(node: Path, inside: Entries, option: str) -> dict[Path, dict[int, Entry]]:
    """Groups the arrays below a node by their path within a layer, and by the layer's number."""
    by_rest: dict[Path, dict[int, Entry]] = {}
    for e in inside:
        name = e.path[len(node)].name if len(e.path) > len(node) else ""
        if not re.fullmatch(r"0|[1-9]\d*", name):
            raise ReshardError(
                f"{option}: below {show(node)} all entries must be layer numbers 0, 1, 2 …, "
                f"but there is {show(e.path)}."
            )
        by_rest.setdefault(e.path[len(node) + 1 :], {})[int(name)] = e
    return by_rest


def _num_layers(node: Path, by_rest: dict[Path, dict[int, Entry]], option: str) -> int:
    """Returns the number of layers of a node; each array must have all of them."""
    found = {index for layers in by_rest.values() for index in layers}
    expected = range(max(found) + 1)
    if len(found) < len(expected):  # may be many more: entries named by dates, say
        gaps = [str(i) for i in itertools.islice((i for i in expected if i not in found), 9)]
        missing = ", ".join(gaps[:8]) + (" …" if len(gaps) > 8 else "")
        raise ReshardError(
            f"{option}: the layers of {show(node)} have gaps.\n"
            f"  expected: 0 to {max(found)}\n  found: {', '.join(map(str, sorted(found)))}; missing: {missing}"
        )
    for rest, layers in by_rest.items():
        if len(layers) != len(expected):
            missing = next(i for i in expected if i not in layers)
            raise ReshardError(
                f"{option}: the layers of {show(node)} differ: "
                f"{show(layers[min(layers)].path)} exists, but not {show((*node, Key(str(missing)), *rest))}."
            )
    return len(expected)


def _stacked(path: Path, layers: Sequence[Entry], option: str) -> Entry:
    """Stacks the layers of one array."""
    first = layers[0]
    odd = [e for e in layers if (e.shape, e.dtype, e.extra) != (first.shape, first.dtype, first.extra)]
    odd += [e for e in layers if not e.is_array and e.value_type != first.value_type]
    if odd:
        raise ReshardError(
            f"{option}: layers differ in shape or dtype.\n"
            f"  expected, from {show(first.path)}: {described(first)}\n"
            + "\n".join(f"  found, at {show(e.path)}: {described(e)}" for e in odd[:5])
        )
    if first.value_type == "string":
        raise ReshardError(f"{option}: {show(first.path)} is text, which cannot be stacked.")
    if not first.is_array:
        return dataclasses.replace(first, path=path)
    origins = [origin.as_layer(index) for index, e in enumerate(layers) for origin in e.origins]
    value_type = "np.ndarray" if first.value_type == "scalar" else first.value_type
    shape, chunk = (len(layers), *first.shape), (1, *first.chunk)
    return dataclasses.replace(
        first, path=path, value_type=value_type, shape=shape, chunk=chunk, origins=tuple(origins)
    )


def _at_nodes(option: str, pattern: str, made: Callable[[Path, Entries], list[Entry]]) -> Change:
    """Replaces the entries below each outermost node that the pattern names by the entries that `made` returns."""

    def change(entries: Entries) -> list[Entry]:
        nodes: dict[tuple[str, ...], list[Entry]] = {}
        outside = []
        for e in entries:
            depth = next((depth for depth in range(len(e.path) + 1) if matches(pattern, e.path[:depth])), None)
            own = outside if depth is None else nodes.setdefault(tuple([k.name for k in e.path[:depth]]), [])
            own.append(e)
        if not nodes:
            raise ReshardError(_nothing(option, entries))
        return outside + [e for node, inside in nodes.items() for e in made(inside[0].path[: len(node)], inside)]

    return change


def cast(pattern: str | None, dtype: np.dtype) -> Change:
    """Casts floating-point arrays that the pattern matches to a dtype; numbers, counters and keys stay."""

    def wanted(entry: Entry) -> bool:
        floating = entry.dtype is not None and _is_float(entry.dtype) and entry.value_type != "scalar"
        return floating and (pattern is None or within(pattern, entry.path))

    def change(entries: Entries) -> list[Entry]:
        if pattern is not None:
            _some("--dtype", pattern, entries, wanted, "floating-point array")
        return [dataclasses.replace(e, dtype=dtype) if wanted(e) else e for e in entries]

    return change


def _is_float(dtype: np.dtype) -> bool:
    """Returns whether a dtype is of real floating-point numbers, numpy's own or one that `ml_dtypes` adds."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def rechunk(pattern: str, chunk: Sequence[int]) -> Change:
    """Sets the chunks of arrays that the pattern matches: one size an axis, -1 for the whole axis."""

    def wanted(entry: Entry) -> bool:
        return entry.is_array and bool(entry.shape) and matches(pattern, entry.path) is not None

    def rechunked(entry: Entry) -> Entry:
        if len(chunk) != len(entry.shape):
            raise ReshardError(
                f"--chunk {pattern}={','.join(map(str, chunk))}: "
                f"{len(chunk)} sizes for {len(entry.shape)} axes of {entry}."
            )
        sizes = tuple([n if c == -1 else min(c, n) for c, n in zip(chunk, entry.shape, strict=True)])
        return dataclasses.replace(entry, chunk=sizes)

    def change(entries: Entries) -> list[Entry]:
        _some("--chunk", pattern, entries, wanted, "array with axes")
        return [rechunked(e) if wanted(e) else e for e in entries]

    return change


def checked_paths(entries: Entries) -> tuple[list[Entry], list[str]]:
    """Checks that the paths make a tree. Lists that have lost items become dicts, with a note for each. Raises a
    ReshardError if two leaves have the same path, a leaf lies where others need a node, or a name is none.
    """
    if not entries:
        raise ReshardError("nothing is left: the changes drop the whole tree.")
    by_path: dict[tuple[str, ...], Entry] = {}
    children: dict[tuple[str, ...], dict[str, bool]] = {}
    for e in entries:
        if fault := fault_of_name(e.path):
            raise ReshardError(f"{fault}.")
        names = tuple([key.name for key in e.path])
        if names in by_path:
            raise ReshardError(f"two leaves would be {show(e.path)}:\n{_list([by_path[names], e], origins=True)}")
        by_path[names] = e
        for depth, key in enumerate(e.path):
            of_node = children.setdefault(names[:depth], {})
            of_node[key.name] = of_node.get(key.name, True) and key.sequence
    for names in children:
        if names in by_path:
            leaf = by_path[names]
            raise ReshardError(f"{show(leaf.path)} would be both a leaf and a node:\n{_list([leaf], origins=True)}")
    notes, lists = [], set()
    for names, of_node in children.items():
        if not any(of_node.values()):
            continue
        if all(of_node.values()) and set(of_node) == {str(i) for i in range(len(of_node))}:
            lists.add(names)
        else:
            node = show([Key(name) for name in names])
            notes.append(f"{node} was a list and becomes a dict with the entries {', '.join(sorted(of_node))}")

    def checked(entry: Entry) -> Entry:
        names = tuple([key.name for key in entry.path])
        path = tuple([Key(name, names[:depth] in lists) for depth, name in enumerate(names)])
        return dataclasses.replace(entry, path=path)

    return [checked(e) for e in entries], notes


def nested(entries: Entries, value: Callable[[Entry], object]) -> object:
    """Returns the tree of dicts and lists that Orbax is to save, with `value` of each entry as its leaves."""
    if len(entries) == 1 and not entries[0].path:
        return value(entries[0])
    root: dict[Key, Any] = {}
    for e in entries:
        node = root
        for key in e.path[:-1]:
            node = node.setdefault(key, {})
        node[e.path[-1]] = e
    return _built(root, value)


def _built(node: Any, value: Callable[[Entry], object]) -> object:
    if isinstance(node, Entry):
        return value(node)
    if next(iter(node)).sequence:
        return [_built(node[Key(str(index), True)], value) for index in range(len(node))]
    return {key.name: _built(child, value) for key, child in node.items()}


def _some(option: str, pattern: str, entries: Entries, wanted: Callable[[Entry], object], what: str = "leaf") -> None:
    if not any(wanted(e) for e in entries):
        raise ReshardError(_nothing(f"{option} {pattern}", entries, what))


def _nothing(option: str, entries: Entries, what: str = "") -> str:
    of = f"no {what}" if what else "nothing"
    return f"{option} matches {of}.\n  The checkpoint has\n{_list(entries)}"


def _list(entries: Entries, *, origins: bool = False) -> str:
    return first_of([f"{e}" + (f"  from {show(e.origins[0].leaf.path)}" if origins else "") for e in entries], "    ")
