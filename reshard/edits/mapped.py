"""Applies a mapping to the entries of a tree: from a Hugging Face folder to ours, and back."""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path as File

from mpmd.errors import ReshardError
from reshard.edits import axes, tree_edits
from reshard.edits.axes import Named
from reshard.edits.entries import Entry, Origin, described
from reshard.edits.mapping import Mapping, MappingRule, config_of, read_mapping
from reshard.edits.tree_edits import Change, Entries
from reshard.storage.huggingface import path_of
from reshard.storage.paths import Key, Path, dotted, matches, parts_of, show
from scheduler.base.texts import first_of


def imported(
    mapping: Mapping, config: dict[str, object], keep_apart: Callable[[str], bool] = lambda node: False
) -> Change:
    """Returns the change that makes the tensors of a folder the tree of a model.

    Args:
        config: the content of config.json, for the sizes that shapes do not determine.
        keep_apart: for each pattern of `mapping.stack`, whether its entries stay apart.
    """

    def change(entries: Entries) -> list[Entry]:
        kept = [e for e in entries if not any(fnmatch.fnmatchcase(dotted(e.path), p) for p in mapping.ignore)]
        made = _Application(mapping, config, {dotted(e.path): e for e in kept}, "tensor").made()
        for pattern in mapping.stack:
            if not keep_apart(pattern) and any(True for e in made for _ in _nodes(pattern, e.path)):
                made = tree_edits.stack(pattern, f"mapping {mapping.name}: stack {pattern}")(made)
        return made

    return change


def imported_from(
    path: File, mapping: str | File | Mapping, keep_apart: Callable[[str], bool] = lambda node: False
) -> Change:
    """Returns the same change for the name or file of a mapping, and for a Hugging Face folder or one of its files."""
    folder = path if path.is_dir() else path.parent
    return imported(read_mapping(mapping, folder), config_of(folder), keep_apart)


def exported(mapping: Mapping, config: dict[str, object]) -> Change:
    """Returns the change that makes the tree of a model the tensors of a folder."""

    def change(entries: Entries) -> list[Entry]:
        apart = list(entries)
        for pattern in mapping.stack[::-1]:
            for node in sorted({node for e in apart for node in _nodes(pattern, e.path) if _is_stacked(node, apart)}):
                text = show([Key(name) for name in node])
                option = f"mapping {mapping.name}: stack {pattern}"
                apart = tree_edits.unstack(text, as_list=False, option=option)(apart)
        return _Application(mapping, config, {show(e.path): e for e in apart}, "array").made()

    return change


def _nodes(pattern: str, path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the nodes above a leaf that a pattern names."""
    for depth in range(1, len(path)):
        if matches(pattern, path[:depth]):
            yield tuple([key.name for key in path[:depth]])


def _is_stacked(node: tuple[str, ...], entries: Entries) -> bool:
    below = [e.path[len(node)].name for e in entries if tuple([k.name for k in e.path[: len(node)]]) == node]
    return not all(name.isdecimal() for name in below)


@dataclasses.dataclass
class _Application:
    """One application of a mapping; `given` says whether the entries are the folder's tensors or our arrays."""

    mapping: Mapping
    config: dict[str, object]
    entries: dict[str, Entry]
    given: str
    taken: set[str] = dataclasses.field(default_factory=set)
    faults: list[str] = dataclasses.field(default_factory=list)

    def made(self) -> list[Entry]:
        """Returns the new entries. A ReshardError lists what does not fit."""
        made = [entry for rule in self.mapping.rules for entry in self._of_rule(rule)]
        left = [e for name, e in self.entries.items() if name not in self.taken]
        self.faults += [f"no rule has the {self.given} {self._shown(e)}" for e in left]
        if self.faults:
            raise ReshardError(f"mapping {self.mapping.name} does not fit:\n{first_of(self.faults)}")
        return made

    def _shown(self, entry: Entry) -> str:
        name = dotted(entry.path) if self.given == "tensor" else show(entry.path)
        return f"{name} {described(entry)}"

    def _of_rule(self, rule: MappingRule) -> Iterator[Entry]:
        sources, targets = rule.tensors, rule.arrays
        if self.given == "array":
            sources, targets = targets, sources
        first = _regex(sources[0])
        found = [match for name in list(self.entries) if name not in self.taken and (match := first.fullmatch(name))]
        if not found and not rule.optional:
            self.faults.append(f"there is no {self.given} {sources[0]}")
        for match in found:
            numbers = match.groupdict()
            names = [_filled(source, numbers) for source in sources]
            if missing := [name for name in names if name not in self.entries]:
                self.faults.append(f"there is {names[0]}, but no {', '.join(missing)}")
                continue
            self.taken |= set(names)
            given = [self.entries[name] for name in names]
            paths = [self._path(_filled(target, numbers)) for target in targets]
            if not all(e.is_array for e in given):
                self.faults.append(f"{names[0]} is no array")
                continue
            try:
                yield from self._moved(rule, given, paths)
            except ValueError as error:
                self.faults.append(f"{self._shown(given[0])}: {error}")

    def _path(self, name: str) -> Path:
        return path_of(name) if self.given == "array" else tuple([Key(part) for part in parts_of(name)])

    def _moved(self, rule: MappingRule, given: Sequence[Entry], paths: Sequence[Path]) -> Iterator[Entry]:
        if rule.axes is None:
            yield dataclasses.replace(given[0], path=paths[0])
            return
        source, target = rule.axes.left, rule.axes.right
        if self.given == "array":
            source, target = target, source
        if len(given) == len(paths) == 1:
            sizes = axes.sizes_of(source, given[0].shape, self._known(source))
            moved = axes.moves(given[0], source, target, sizes)
            yield _entry(given, paths[0], axes.shape_of(target, sizes), moved)
        elif len(paths) == 1:
            yield self._joined(rule, given, paths[0], source, target)
        else:
            yield from self._divided(rule, given[0], paths, source, target)

    def _joined(self, rule: MappingRule, given: Sequence[Entry], path: Path, source: Named, target: Named) -> Entry:
        along = rule.along
        assert along is not None
        known = self._known(source)
        parts = None if (along,) in source else self._parts(rule)
        is_index = along not in {name for axis in source for name in axis}
        all_sizes = []
        for k, entry in enumerate(given):
            of_part = known if parts is None or is_index else {**known, along: parts[k]}
            all_sizes.append(axes.sizes_of(source, entry.shape, of_part) | ({along: 1} if is_index else {}))
        rests = [{**sizes, along: 0} for sizes in all_sizes]
        if any(rest != rests[0] for rest in rests) or len({e.dtype for e in given}) > 1:
            raise ValueError(f"it cannot be joined with {', '.join(self._shown(e) for e in given[1:])} along {along}")
        found = [sizes[along] for sizes in all_sizes]
        seconds = [
            axes.moves(e, source, target, sizes, along=along, total=sum(found), first=first)
            for e, sizes, first in zip(given, all_sizes, axes.offsets(found), strict=True)
        ]
        shape = axes.shape_of(target, {**all_sizes[0], along: sum(found)})
        return _entry(given, path, shape, *seconds)

    def _divided(
        self, rule: MappingRule, given: Entry, paths: Sequence[Path], source: Named, target: Named
    ) -> Iterator[Entry]:
        along = rule.along
        assert along is not None
        parts = self._parts(rule)
        is_index = along not in {name for axis in target for name in axis}
        known = self._known(source)
        if parts is not None or is_index:
            known = {**known, along: len(paths) if parts is None else sum(parts)}
        sizes = axes.sizes_of(source, given.shape, known)
        total = sizes[along]
        if parts is None:
            if total % len(paths):
                raise ValueError(f"{along} is {total}, which is not {len(paths)} equal parts; give `parts`")
            parts = [total // len(paths)] * len(paths)
        if sum(parts) != total:
            raise ValueError(f"{along} is {total}, but its parts are {parts}")
        for path, part, first in zip(paths, parts, axes.offsets(parts), strict=True):
            own = {**sizes, along: part}
            moved = axes.moves(given, target, source, own, along=along, total=total, first=first)
            yield _entry([given], path, axes.shape_of(target, own), [one.inverse for one in moved])

    def _known(self, side: Named) -> dict[str, int]:
        """Returns the sizes that shapes may not determine."""
        merged = {name for axis in side if len(axis) > 1 for name in axis}
        found = {name: self._size(name) for name in merged}
        return {name: size for name, size in found.items() if size is not None}

    def _size(self, name: str) -> int | None:
        for entry in self.mapping.sizes.get(name, ()):
            size = self.config.get(entry)
            if type(size) is int and size > 0:
                return size
        return None

    def _parts(self, rule: MappingRule) -> list[int] | None:
        if rule.parts is None:
            return None
        sizes = [part if isinstance(part, int) else self._size(part) for part in rule.parts]
        if unknown := [str(part) for part, size in zip(rule.parts, sizes, strict=True) if size is None]:
            entries = [entry for name in unknown for entry in self.mapping.sizes.get(name, ())]
            raise ValueError(
                f"the size of {', '.join(unknown)} is not known: config.json has no {' or '.join(entries)}"
            )
        return [size for size in sizes if size is not None]


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", pattern)
    return re.compile("".join(rf"(?P<{p}>0|[1-9]\d*)" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


def _filled(pattern: str, numbers: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: numbers[match[1]], pattern)


def _entry(given: Sequence[Entry], path: Path, shape: tuple[int, ...], *seconds: Iterable[Origin]) -> Entry:
    """Returns the new entry that takes from the given ones, by the origins of each of them."""
    origins = [one for entry, moved in zip(given, seconds, strict=True) for one in entry.through(moved)]
    if not origins:  # no elements
        origins = list(given[0].origins[:1])
    return dataclasses.replace(given[0], path=path, shape=shape, chunk=shape, origins=tuple(origins))
