"""A list of microbatches, an argument of a call, in the order in which they run."""

import dataclasses
from collections.abc import Set

import jax
import numpy as np

from mpmd.ops import lists
from mpmd.ops.lists import CountsList, HoldsConstants, Microbatches, ReadsList, Reordered
from mpmd.pytrees import TreeDef
from mpmd.tracing.arguments import leaf_type
from scheduler.base.texts import counted


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchList:
    """A list of microbatches, an argument of a call."""

    path: lists.Path
    given: list  # the list itself
    permutation: tuple[int, ...] | None  # their numbers in the order in which they run; None: the list's order
    items: list  # the microbatches, in the order in which they run
    leaves: list[list]  # of each microbatch
    tree: TreeDef  # the structure of each microbatch
    types: list[tuple]  # of the leaves of each microbatch

    @classmethod
    def of(cls, path: lists.Path, given: list, explicit: Set[str]) -> "MicrobatchList":
        """Reads a list; `explicit` are the Explicit axes of the groups' meshes."""
        permutation = given.order if isinstance(given, Reordered) else None
        if permutation is not None and len(permutation) != len(given):
            raise ValueError(
                f"Reordered: the list has {counted(len(given), 'microbatch')}, but its order is {permutation}: it was"
                " changed after it was made. Make a new one."
            )
        items = given if permutation is None else [given[i] for i in permutation]
        found = list(lists.elements(items))
        leaves = [xs for xs, _ in found]
        types = [tuple(leaf_type(x, explicit) for x in xs) for xs in leaves]
        return cls(path, given, permutation, items, leaves, found[0][1], types)

    @property
    def largest(self) -> object:
        """A microbatch of the shape with the most elements."""
        return max(self.given, key=lambda x: sum(np.size(leaf) for leaf in jax.tree.leaves(x)))

    def standing_for(self, one: object, ways: Set[type]) -> Microbatches:
        """Returns the object that the step gets for the list."""
        items = self.given if ReadsList in ways else None
        known = CountsList in ways, HoldsConstants in ways
        return Microbatches(self.path, one, np.int32(len(self.given)), len(self.given), *known, items)
