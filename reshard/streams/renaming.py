"""The origins of each received tensor: the sent tensor of its name, or those that a mapping names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from mpmd.resilience.layout import SHARED, KeptLeaf

Names = str | Path | Mapping  # a mapping file, or its content
# Maps a box of a sent tensor to the received one: each part, its box there, and how the axes change.
Moves = Callable[[Box], Iterator[tuple[Box, Box, Any]]]
# Maps a box of a received tensor to the sent tensors and their boxes that it is made of.
Origins = Callable[[Box], Iterator[tuple[int, Box, Moves]]]


def identity(leaves: Sequence[KeptLeaf]) -> dict[str, tuple[KeptLeaf, Origins]]:
    """Returns each tensor as it is."""

    def origins(leaf: int) -> Origins:
        return lambda box: iter([(leaf, box, lambda part: iter([(part, part, None)]))])

    return {about.name: (about, origins(i)) for i, about in enumerate(leaves)}


def renamed(leaves: Sequence[KeptLeaf], names: Names) -> dict[str, tuple[KeptLeaf, Origins]]:
    """Returns the tensors that a mapping makes from the sent ones, in the direction that fits. `names` is a mapping
    file as for checkpoints, by name or path, or its content. Raises a ReshardError if it is not a mapping, or fits in
    neither direction.
    """
    from reshard.edits.entries import Entry, Origin
    from reshard.edits.mapped import exported, imported
    from reshard.edits.mapping import parse_mapping, read_mapping
    from reshard.storage.paths import Key, parts_of, show
    from reshard.storage.stored import ARRAY_TYPES, Leaf

    mapping = parse_mapping(names, "names") if isinstance(names, Mapping) else read_mapping(names, None)
    paths = [tuple([Key(part) for part in parts_of(about.name)]) for about in leaves]
    index = {path: i for i, path in enumerate(paths)}
    stored = [
        Entry.of(Leaf(path, min(ARRAY_TYPES), about.shape, jnp.dtype(about.dtype), about.shape))
        for path, about in zip(paths, leaves, strict=True)
    ]
    try:
        entries = imported(mapping, {})(stored)
    except ReshardError as error:
        try:
            entries = exported(mapping, {})(stored)
        except ReshardError as other:
            raise ReshardError(f"{error}\nThe other way round: {other}") from None

    def origins(entry: Entry) -> Origins:
        def moves(origin: Origin) -> Moves:
            return lambda part: ((one.source, one.target, one) for one in origin.taking(part))

        return lambda box: ((index[o.leaf.path], o.source, moves(o)) for o in entry.parts(box))

    def about(entry: Entry) -> KeptLeaf:
        first = leaves[index[entry.origins[0].leaf.path]]
        return KeptLeaf(show(entry.path), SHARED, tuple(entry.shape), first.dtype, first.key)

    return {show(entry.path): (about(entry), origins(entry)) for entry in entries}
