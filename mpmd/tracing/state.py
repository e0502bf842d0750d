"""Finds which arguments of a step are state: arguments that a result replaces."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.ops import lists
from mpmd.pytrees import TreeDef
from mpmd.tracing.trace import Trace


def match_state(trace: Trace) -> tuple[int | None, ...]:
    """Returns the flat argument that each flat result replaces, found by equal subtrees, or None.

    The largest subtrees are matched first: a whole state, then the rest of it. Among subtrees of one size, those in the
    same memory come first.
    """
    ins, outs = ([v.aval for v in vs] for vs in (trace.arguments, trace.jaxpr.outvars))
    in_types, out_types = ([(aval.shape, aval.dtype) for aval in avals] for avals in (ins, outs))
    in_kinds, out_kinds = ([compat.memory_kind(aval) for aval in avals] for avals in (ins, outs))
    taken: set[int] = set()
    donors: list[int | None] = [None] * len(out_types)
    sources: dict[Hashable, list[range]] = defaultdict(list)
    # A microbatch is no state, although a result may look like those of one shape.
    microbatches = lists.leaves_of(trace.in_tree)
    for argument in _arguments(trace.in_tree):
        for sub in argument.subtrees(2):
            if microbatches.isdisjoint(sub.leaves) and (
                not sub.is_leaf or sub is argument or not argument.is_container
            ):
                sources[sub.key(in_types)].append(sub.leaves)
    subtrees = sorted(_Subtree(trace.out_tree, 0).subtrees(4), key=lambda t: -len(t.leaves))
    by_size = (list(subs) for _, subs in itertools.groupby(subtrees, key=lambda t: len(t.leaves)))
    for sub, alike in ((sub, alike) for subs in by_size for alike in (True, False) for sub in subs):
        if not sub.leaves or any(donors[j] is not None for j in sub.leaves):
            continue
        if sub.is_leaf and not out_types[sub.start][0] and len(out_types) > 1:
            continue  # a scalar loss is not a scalar argument
        for candidate in sources.get(sub.key(out_types), ()):
            same = [in_kinds[i] for i in candidate] == [out_kinds[j] for j in sub.leaves]
            if taken.isdisjoint(candidate) and (same or not alike):
                taken.update(candidate)
                donors[sub.start : sub.leaves.stop] = candidate
                break
    return tuple(donors)


class _Subtree(NamedTuple):
    """A part of a tree: its structure, and the number of its first leaf."""

    tree: TreeDef
    start: int

    @property
    def leaves(self) -> range:
        return range(self.start, self.start + self.tree.num_leaves)

    @property
    def is_leaf(self) -> bool:
        return self.tree.num_nodes == self.tree.num_leaves == 1

    @property
    def is_container(self) -> bool:
        """Whether its root is a container of Python, not a class for a state."""
        root = self.tree.node_data()
        return root is not None and issubclass(root[0], (dict, list, tuple))

    def key(self, types: Sequence[Hashable]) -> Hashable:
        """Returns a key that is equal for subtrees that may replace each other."""
        return self.tree, tuple(types[self.start : self.leaves.stop])

    def children(self) -> "Iterator[_Subtree]":
        start = self.start
        for child in self.tree.children():
            yield _Subtree(child, start)
            start += child.num_leaves

    def subtrees(self, depth: int) -> "Iterator[_Subtree]":
        """Yields this subtree and all subtrees up to `depth` levels below it."""
        yield self
        if depth:
            for child in self.children():
                yield from child.subtrees(depth - 1)


def _arguments(in_tree: TreeDef) -> list[_Subtree]:
    """Returns the arguments of a call, by position and by name."""
    return [argument for some in _Subtree(in_tree, 0).children() for argument in some.children()]
