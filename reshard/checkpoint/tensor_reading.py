"""Reads a Hugging Face folder as the tree that is wanted: mapped, stacked or not, in the dtypes that are wanted."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

import jax.numpy as jnp
import numpy as np

from reshard.checkpoint.requests import Request
from reshard.edits.edited import edited
from reshard.edits.entries import Entry
from reshard.edits.mapped import imported_from
from reshard.edits.mapping import Mapping
from reshard.edits.tree_edits import Entries
from reshard.storage.huggingface import TensorFolder
from reshard.storage.paths import Key, compiled, dotted, show
from reshard.storage.stored import Checkpoint


def as_wanted(checkpoint: Checkpoint, mapping: str | File | Mapping | None, requests: Sequence[Request]) -> Checkpoint:
    """The checkpoint through a mapping. Entries that `mapping` stacks stay apart where the wanted tree has them so.

    Of a Hugging Face folder floating-point arrays are cast to what is wanted; without a mapping its tensors are also
    found under their names in one piece.
    """
    if mapping is None and not isinstance(checkpoint, TensorFolder):
        return checkpoint
    wanted = {request.source: request for request in requests}

    def change(entries: Entries) -> list[Entry]:
        if mapping is not None:
            entries = imported_from(checkpoint.folder, mapping, lambda node: _is_apart(node, wanted))(entries)
        elif any("." in name for source in wanted for name in source):
            entries = [dataclasses.replace(e, path=(Key(dotted(e.path)),)) for e in entries]
        return [_cast(e, wanted.get(tuple([key.name for key in e.path]))) for e in entries]

    return edited(checkpoint, change)


def _is_apart(node: str, wanted: Any) -> bool:
    """Whether a wanted tree has numbered entries below a node; nodes above it may be stacked there."""
    patterns = [compiled(node), compiled(node.replace("/*", ""))]
    for source in wanted:
        for depth, name in enumerate(source):
            text = show([Key(one) for one in source[:depth]])
            if re.fullmatch("[0-9]+", name) and any(pattern.fullmatch(text) for pattern in patterns):
                return True
    return False


def _cast(entry: Entry, request: Request | None) -> Entry:
    if request is None or request.dtype is None or entry.dtype is None:
        return entry
    if jnp.issubdtype(entry.dtype, jnp.floating) and jnp.issubdtype(request.dtype, jnp.floating):
        return dataclasses.replace(entry, dtype=np.dtype(request.dtype))
    return entry
