"""Lists of microbatches as arguments of a step: how one is found, and what the step sees while it is traced.

A list belongs to the call: its length and its order are not part of the trace. So a step is traced for one microbatch
of each shape, and sees `Microbatches` instead of the list. If the step itself reads the list (its length, an item), the
list becomes part of the trace, like anything else that Python reads.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax

from mpmd.errors import StageError
from mpmd.pytrees import PyTree, TreeDef
from scheduler.base.texts import counted

Path = tuple[Any, ...]  # JAX's keys, from `(args, kwargs)` to the list

# The arguments of the step being traced, `(args, kwargs)`; None outside of `mpmd.jit`.
arguments: ContextVar[PyTree] = ContextVar("arguments", default=None)


class Reordered(list):
    """A list of microbatches that a pipelined loop runs in another order than it sums them.

    The step has the same results as for the plain list, to the bit (except where XLA fuses a product into the sum):
    `scheduler.order_microbatches` finds an order in which it is shorter. Results of a microbatch that runs before its
    turn are kept next to the sum, and are as large. Under `jax.jit`, or without a schedule, the order has no effect.

    Args:
      xs: the microbatches, in the order in which they are summed.
      order: the number of the microbatch that runs first, second, and so on.

    Raises:
      ValueError: `order` is not a permutation of the microbatches.

    Examples:
      >>> import mpmd
      >>> mpmd.Reordered(["a", "b", "c"], [2, 0, 1])
      Reordered(['a', 'b', 'c'], (2, 0, 1))
    """

    order: tuple[int, ...]

    def __init__(self, xs: Iterable[PyTree], order: Iterable[int]):
        super().__init__(xs)
        try:
            self.order = tuple(map(operator.index, order))
        except TypeError:
            self.order = ()
        if not self or sorted(self.order) != list(range(len(self))):
            raise ValueError(
                f"Reordered: order is {self.order or order!r}; it must have the number of each microbatch once, of"
                f" {counted(len(self), 'microbatch')}, from 0 on."
            )

    def __repr__(self):
        return f"Reordered({super().__repr__()}, {self.order})"


def _keys_of_list(xs: list) -> tuple[list, None]:
    return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(xs)], None


# When JAX takes it apart it is a plain list: the order belongs to a call.
jax.tree_util.register_pytree_with_keys(
    Reordered, _keys_of_list, lambda _, children: list(children), lambda xs: (xs, None)
)


class TakesList(BaseException):
    """A loop takes the argument at `path`, a list: the step is traced again, for one microbatch of each shape."""

    def __init__(self, path: Path):
        self.path = path


class ReadsList(TakesList):
    """The step reads the list itself, its length or an item: the step is traced again for this list."""


class CountsList(TakesList):
    """The shape of a result depends on the length of the list: the step is traced again for this length."""


class HoldsConstants(TakesList):
    """The loop reads other captured arrays for another shape: each trace holds its own, as part of the program."""


class Microbatches(list):
    """A list argument while a step is traced: one microbatch stands for all.

    Args:
      number: the number of microbatches, an array.
      num_microbatches: the number of microbatches in the call for which the step is traced.
      is_counted: whether the trace is for this number alone.
      holds_constants: whether captured arrays are part of the program (as NumPy's always are).
      plain: the items, if the step reads them itself.
    """

    def __init__(
        self,
        path: Path,
        one: PyTree,
        number: Any,
        num_microbatches: int,
        is_counted: bool,
        holds_constants: bool,
        plain: Iterable[PyTree] | None = None,
    ):
        super().__init__(plain or ())
        self.path, self.one, self.number = path, one, number
        self.num_microbatches, self.is_counted, self.holds_constants = num_microbatches, is_counted, holds_constants
        self.plain = None if plain is None else tuple(plain)
        self._leaves: list = []  # of the items
        self.is_guarded = False  # whether the step is being traced with it: then only its items can be read

    def guard(self) -> None:
        """Begins a trace of the step with it."""
        self._leaves, self.is_guarded = jax.tree.leaves(self.plain), True

    def check_is_plain(self) -> None:
        """Raises an error if the step reads a list of which only one microbatch is there."""
        if self.is_guarded and self.plain is None:
            raise ReadsList(self.path)

    def check_is_unchanged(self) -> None:
        """Raises a StageError if the step has changed the list or one of its items: the loop runs those of the call."""
        if self.plain is None:
            return
        now = jax.tree.leaves(list(self))
        if len(now) != len(self._leaves) or any(a is not b for a, b in zip(now, self._leaves, strict=True)):
            raise StageError(
                "treduce: the step has changed the list xs, or a microbatch in it, before the loop.\n"
                "  Change microbatches inside of fun, or before the step is called."
            )

    def __radd__(self, other: list) -> list:
        return [*other, *self]


def _reading(name: str) -> Callable:
    method = getattr(list, name)

    def read(self: Microbatches, *args: object, **named: object) -> object:
        self.check_is_plain()
        return method(self, *args, **named)

    return read


_READING = """
    __len__ __iter__ __getitem__ __contains__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __mul__ __rmul__
    __iadd__ __imul__ __setitem__ __delitem__ __reversed__ __repr__ append clear copy count extend index insert pop
    remove reverse sort
"""
for _name in _READING.split():
    setattr(Microbatches, _name, _reading(_name))


class _One:
    """A key in paths, shown as `xs[*]`: any microbatch."""

    def __str__(self):
        return "[*]"


@dataclasses.dataclass(frozen=True)
class _AboutList:
    """The static part of `Microbatches` as a pytree."""

    path: Path
    counted: int | None  # the number of microbatches, if the trace is for this number alone
    holds_constants: bool
    num_microbatches: int = dataclasses.field(compare=False)

    def __repr__(self):
        return "one for all of a list, which the jitted step takes"


def _flatten(xs: Microbatches) -> tuple[tuple, _AboutList | None]:
    xs.check_is_plain()
    if xs.is_guarded:
        return (xs.plain,), None
    counted = xs.num_microbatches if xs.is_counted else None
    about = _AboutList(xs.path, counted, xs.holds_constants, xs.num_microbatches)
    return (xs.one, xs.number, xs.plain), about


def _flatten_with_keys(xs: Microbatches) -> tuple[tuple, _AboutList | None]:
    children, kept = _flatten(xs)
    keys = [_One(), jax.tree_util.GetAttrKey("number"), jax.tree_util.GetAttrKey("items")][-len(children) :]
    return tuple(zip(keys, children, strict=True)), kept


def _unflatten(kept: _AboutList | None, children: Iterable[PyTree]) -> Any:
    children = tuple(children)
    if kept is None:
        return list(children[0])
    ways = kept.counted is not None, kept.holds_constants
    return Microbatches(kept.path, children[0], children[1], kept.num_microbatches, *ways, children[2])


jax.tree_util.register_pytree_with_keys(Microbatches, _flatten_with_keys, _unflatten, _flatten)


@contextlib.contextmanager
def of_arguments(tree: PyTree, paths: Iterable[Path]) -> Iterator[None]:
    """Traces a step with these arguments, `(args, kwargs)`, inside this context; lists are known at `paths`."""
    for path in paths:
        if isinstance(xs := at(tree, path), Microbatches):
            xs.guard()
    token = arguments.set(tree)
    try:
        yield
    finally:
        arguments.reset(token)


def numbers(tree: TreeDef) -> set[int]:
    """Returns the positions of the numbers of microbatches among the leaves of the arguments."""
    return {xs.number for xs in _of_positions(tree)}


def leaves_of_one(tree: TreeDef) -> set[int]:
    """Returns the positions of the leaves that stand for a microbatch of a list, among the leaves of the arguments."""
    return {i for xs in _of_positions(tree) for i in jax.tree.leaves(xs.one)}


def leaves_of(tree: TreeDef) -> set[int]:
    """Returns the positions of all leaves of lists of microbatches, among the leaves of the arguments."""
    return {i for xs in _of_positions(tree) for i in jax.tree.leaves((xs.one, xs.number, xs.plain))}


def _of_positions(tree: TreeDef) -> list[Microbatches]:
    """Returns the lists in a tree whose leaves are their positions."""
    found = jax.tree.unflatten(tree, range(tree.num_leaves))
    parts = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Microbatches))
    return [x for x in parts if isinstance(x, Microbatches)]


def path_of(xs: list, tree: PyTree) -> Path | None:
    """Returns the path of a list in a pytree, found by identity."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is xs)
    return next((path for path, x in found if x is xs), None)


def at(tree: PyTree, path: Path) -> PyTree:
    """Returns the part of a tree at a path, or None."""
    for key in path:
        try:
            if isinstance(key, jax.tree_util.FlattenedIndexKey):  # of a class that names no keys
                children, _ = jax.tree_util.default_registry.flatten_one_level(tree)
                tree = list(children)[key.key]
            elif hasattr(key, "name"):
                tree = getattr(tree, key.name)
            else:
                tree = tree[key.idx if hasattr(key, "idx") else key.key]
        except (IndexError, KeyError, TypeError, AttributeError):
            return None
    return tree


def flattened(tree: PyTree, known: Mapping[Path, list]) -> tuple[list, TreeDef, dict[int, Path]]:
    """Returns the leaves and the structure of a pytree with some lists as leaves, and the path of each such leaf."""
    paths = {id(xs): path for path, xs in known.items()}
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: id(x) in paths)
    places = {i: paths[id(x)] for i, x in enumerate(leaves) if id(x) in paths}
    if not len(paths) == len(places) == len(known):  # one list is in several places
        at_paths, structure = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda path, _: path in known, is_leaf_takes_path=True
        )
        leaves = [x for _, x in at_paths]
        places = {i: path for i, (path, _) in enumerate(at_paths) if path in known}
    return leaves, structure, places


def found(xs: list) -> TakesList:
    """Returns the exception for a plain list in a pipelined loop; raises a StageError if it is no argument."""
    given = arguments.get()
    path = path_of(xs, given)
    if path is None:
        raise StageError(
            "treduce: xs is a list that the step has made, or has in a jax.jit of its own.\n"
            "  Pass a list of microbatches on as the step gets it, as an argument, and do inside of fun what is to be"
            " done to each; or stack microbatches of one shape along a new axis."
        )
    return TakesList(path)


def elements(xs: list) -> Iterator[tuple[list, TreeDef]]:
    """Yields each microbatch's leaves and structure; raises a StageError if there is none, or structures differ."""
    if not xs:
        raise StageError("treduce: xs is an empty list. At least one microbatch is needed.")
    first = jax.tree.structure(xs[0])
    for i, x in enumerate(xs):
        leaves, structure = jax.tree.flatten(x)
        if structure != first:
            raise StageError(
                f"treduce: microbatch {i} of xs has another structure than microbatch 0.\n"
                f"  got      {structure}\n  expected {first}\n"
                "  In a list, each entry is a microbatch. Arrays with a microbatch axis go into a tuple or a dict."
            )
        if not leaves:
            raise StageError("treduce: the microbatches of xs hold no arrays.")
        yield leaves, structure
