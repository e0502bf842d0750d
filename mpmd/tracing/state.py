"""Finds which arguments of a step are state: a result takes the place of each of them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mpmd.tracing.trace import Trace


def match_state(trace: Trace) -> tuple[int | None, ...]:
    """For each flat result, the flat argument whose position it takes, found by equal subtrees.

    The largest parts are matched first: a whole state, then what is left of it.
    """
    (args, kwargs) = jax.tree.unflatten(trace.in_tree, range(trace.in_tree.num_leaves))
    out = jax.tree.unflatten(trace.out_tree, range(trace.out_tree.num_leaves))
    in_avals, out_avals = ([v.aval for v in vs] for vs in (trace.arguments, trace.jaxpr.outvars))

    def key(tree: Any, avals: Sequence[Any]) -> tuple:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, tuple((avals[i].shape, str(avals[i].dtype)) for i in leaves)

    taken: set[int] = set()
    donors: list[int | None] = [None] * len(out_avals)
    sources: dict = defaultdict(list)
    for tree in [*args, *kwargs.values()]:
        for sub in _subtrees(tree, 2):
            if not _is_leaf(sub) or sub is tree or not isinstance(tree, (dict, list, tuple)):
                sources[key(sub, in_avals)].append(jax.tree.leaves(sub))
    for sub in sorted(_subtrees(out, 4), key=lambda t: -len(jax.tree.leaves(t))):
        leaves = jax.tree.leaves(sub)
        if not leaves or any(donors[j] is not None for j in leaves):
            continue
        if _is_leaf(sub) and not out_avals[leaves[0]].shape and len(out_avals) > 1:
            continue  # a scalar loss is not a scalar argument
        for candidate in sources.get(key(sub, out_avals), ()):
            if not taken.intersection(candidate):
                taken.update(candidate)
                for j, i in zip(leaves, candidate, strict=True):
                    donors[j] = i
                break
    return tuple(donors)


def _is_leaf(tree: Any) -> bool:
    return jax.tree_util.all_leaves([tree])


def _subtrees(tree: Any, depth: int) -> Iterator[Any]:
    yield tree
    if depth and not _is_leaf(tree):
        for child in jax.tree.leaves(tree, is_leaf=lambda t, root=tree: t is not root):
            yield from _subtrees(child, depth - 1)
