"""Checks the arguments of a call, and moves them to the groups that read them."""

import copy
import functools
from collections.abc import Iterator, Sequence, Set

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.layouts import mpmd_sharding
from mpmd.arrays.sharding import Key, MpmdSharding
from mpmd.compile.step import StepPrograms
from mpmd.cutting.pieces import Rows, pieces_of
from mpmd.cutting.split_rows import SplitStep
from mpmd.run import device_put
from mpmd.tracing.arguments import Args, Kwargs, check_leaves, leaf_type, short_type


class Inputs:
    """The inputs of a compiled step."""

    def __init__(self, programs: StepPrograms, split: SplitStep):
        mesh, trace = programs.mesh, programs.outline.trace
        shardings = [
            mpmd_sharding(mesh, groups, programs.layouts[v])
            for v, groups in zip(trace.jaxpr.invars, programs.outline.inputs, strict=True)
        ]
        here = () if mesh.is_described else mesh.local_groups
        self.constants = [  # the arrays that the step's function has captured, `{group: array}` each
            {g: device_put.put_copy(c, s.group_sharding(g)) for g in s.groups if g in here}
            for c, s in zip(trace.consts, shardings, strict=False)
        ]
        self.avals: list[compat.Aval] = [v.aval for v in split.whole.arguments]  # per flat argument
        of_arguments = zip(trace.arguments, shardings[len(trace.consts) :], strict=True)
        self.pieces = [(v.aval, s) for v, s in of_arguments]  # per argument, or piece of one, that the programs take
        self._whole = split.whole
        self._names: Sequence[str] = split.whole.in_names
        self._rows = split.ins
        self._of_pieces = [[self.pieces[k][1] for k in ks] for ks in split.in_positions]
        self.shardings = [  # per flat argument
            of_pieces[0] if rows is None else split_sharding(of_pieces[0], rows, tuple(s.groups[0] for s in of_pieces))
            for rows, of_pieces in zip(self._rows, self._of_pieces, strict=True)
        ]
        self._num_here = [len(s.local_groups) for s in self.shardings]

    @functools.cached_property
    def _nowhere(self) -> MpmdSharding:
        return MpmdSharding(self.shardings[0].mpmd_mesh, (), PartitionSpec())

    def dealt(self, absent: Set[int], more: Sequence[tuple[str, compat.Aval, MpmdSharding]]) -> "Inputs":
        """Returns the inputs of a call with a list of microbatches. The arrays of the microbatches come last.

        Args:
          absent: positions of the arguments that these arrays replace; a call may have anything there.
        """
        found, nowhere = copy.copy(self), self._nowhere
        shardings = [nowhere if i in absent else s for i, s in enumerate(self.shardings)]
        found.shardings = [*shardings, *(s for _, _, s in more)]
        num_here = {s: len(s.local_groups) for s in set(found.shardings)}
        found._num_here = [num_here[s] for s in found.shardings]
        found.avals = [*self.avals, *(aval for _, aval, _ in more)]
        found._names = [*self._names, *(name for name, _, _ in more)]
        found._rows = (*self._rows, *[None] * len(more))
        of_pieces = [[nowhere] if i in absent else of for i, of in enumerate(self._of_pieces)]
        found._of_pieces = [*of_pieces, *([s] for _, _, s in more)]
        return found

    def checked(self, args: Args, kwargs: Kwargs) -> list[ArrayLike]:
        """Returns the flat arguments; raises a TypeError if the step was compiled for other types or another tree."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._whole.in_tree:
            raise TypeError(
                "mpmd: the compiled step was called with another structure of arguments.\n"
                f"  got      {tree}\n  expected {self._whole.in_tree}"
            )
        check_leaves(leaves, self._whole.in_names)
        faults = [
            f"  {name}: got {short_type(x)}, expected {aval.str_short()}"
            for name, x, aval in zip(self._whole.in_names, leaves, self.avals, strict=True)
            if leaf_type(x, frozenset())[:2] != (aval.shape, aval.dtype)
        ]
        if faults:
            raise TypeError(
                "mpmd: the compiled step was called with other shapes or dtypes;"
                " call the jitted step to compile again.\n" + "\n".join(faults)
            )
        return leaves

    def zeros(self) -> list[dict[int, jax.Array]]:
        """Returns arguments of zeros, on the devices of this process."""
        return [
            {
                g: jax.jit(functools.partial(keys.zeros, aval.shape, aval.dtype), out_shardings=s.group_sharding(g))()
                for g in s.groups
                if g in s.mpmd_mesh.local_groups
            }
            for aval, s in self.pieces
        ]

    def fit(self, leaves: Sequence[ArrayLike], wishes: Sequence[object]) -> bool:
        """Returns whether every MpmdArray is where the step reads it, or may be moved there. A tracer never fits.

        Args:
          wishes: the user's sharding of each argument, to which it is moved from anywhere, or None.
        """
        for x, sharding, wish in zip(leaves, self.shardings, wishes, strict=True):
            if isinstance(x, compat.Tracer):
                return False
            if (
                type(x) is MpmdArray
                and x._mpmd_sharding is not sharding
                and x._committed
                and wish is None
                and sharding.split_axis is None
                and not x._mpmd_sharding.is_equivalent_to(sharding, x.ndim)
            ):
                return False
        return True

    def misplaced(self, leaves: Sequence[ArrayLike]) -> list[int]:
        """Returns the positions of MpmdArrays that are elsewhere and may be moved."""
        return [
            i
            for i, (x, sharding) in enumerate(zip(leaves, self.shardings, strict=True))
            if type(x) is MpmdArray
            and not (x._committed and sharding.split_axis is None)
            and not x._mpmd_sharding.is_equivalent_to(sharding, x.ndim)
        ]

    def place(
        self, leaves: Sequence[ArrayLike], given: list[tuple[int, jax.Array | np.ndarray]] | None = None
    ) -> list[dict[int, jax.Array]]:
        """Returns, per array that the programs take, the array in each group that reads it.

        Arrays that are not on their groups yet are moved in one batch.

        Args:
          given: receives the moved arrays except MpmdArrays, with the argument's position; host arrays as copies.
        """
        arguments: list[dict[int, jax.Array]] = []
        pending: list[tuple[dict[int, jax.Array], int]] = []
        values, targets = [], []
        for i, x in enumerate(leaves):
            sharding, rows, aval = self.shardings[i], self._rows[i], self.avals[i]
            if type(x) is MpmdArray:
                x._check_not_gone(self._names[i])
                is_there = x._mpmd_sharding is sharding or x._mpmd_sharding.is_equivalent_to(sharding, x.ndim)
                if is_there and x.dtype == aval.dtype:
                    if len(x._arrays) < self._num_here[i]:
                        name = self._names[i]
                        raise ValueError(f"{name}: {x!r} was made without the arrays of all groups of this process.")
                    arguments += [x._arrays] if rows is None else _pieces_in_place(x, rows, self._of_pieces[i])
                    continue
            elif isinstance(x, jax.Array) and not isinstance(x, compat.Tracer) and x.is_deleted():
                name, of_type = self._names[i], aval.str_short(short_dtypes=True)
                raise RuntimeError(f"{name}: this {of_type} was deleted, or donated to a step: use the step's output.")
            elif isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(f"mpmd: {self._names[i]} is {x}, which says what an array is like: pass an array.")
            for piece, where in zip(_pieces(x, rows), self._of_pieces[i], strict=True):
                if isinstance(piece, jax.Array):
                    if piece.dtype != aval.dtype:  # of 64 bits, from a part of the program with `jax_enable_x64`
                        piece = piece.astype(aval.dtype)
                    _check_movable(piece, where)
                    piece = compat.row_major(piece)
                else:
                    # A copy, since an array on CPU devices may share numpy's memory. `x` may stand for an absent key.
                    piece = np.array(piece, keys.data_dtype(aval.dtype))
                if given is not None and not isinstance(x, MpmdArray):
                    given.append((i, piece))
                placed: dict[int, jax.Array] = {}
                arguments.append(placed)
                for group in where.groups:
                    if group in where.mpmd_mesh.local_groups:
                        pending.append((placed, group))
                        values.append(piece)
                        targets.append(where.group_sharding(group))
        if pending:
            for (placed, group), array in zip(pending, device_put.place_all(values, targets), strict=True):
                placed[group] = array
        return arguments


@functools.lru_cache(maxsize=4096)
def split_sharding(like: MpmdSharding, rows: Rows, groups: tuple[int, ...]) -> MpmdSharding:
    """Returns the sharding of an array with pieces in `groups`, each laid out like `like`. Equal shardings are one
    object, so that a comparison by identity recognises state that comes back.
    """
    split: dict[int, list[tuple[int, int]]] = {}
    for group, ends in zip(groups, rows.ranges, strict=True):
        split.setdefault(group, []).append(ends)
    return MpmdSharding(like.mpmd_mesh, split, like.spec, like.memory_kind, split=split, split_axis=rows.axis)


def _pieces_in_place(x: MpmdArray, rows: Rows, shardings: Sequence[MpmdSharding]) -> Iterator[dict[int, jax.Array]]:
    """Yields the pieces of an array that already has this split."""
    arrays: dict[Key, jax.Array] = x._arrays
    for ends, sharding in zip(rows.ranges, shardings, strict=True):
        yield {sharding.groups[0]: arrays[ends]} if ends in arrays else {}


def _pieces(x: ArrayLike, rows: Rows | None) -> Sequence[ArrayLike]:
    """Returns the pieces of any array that this process can read."""
    if isinstance(x, MpmdArray):
        x = x._readable()
    if rows is None:
        return [x]
    return pieces_of(x if isinstance(x, jax.Array) else np.asarray(x), rows)


def _check_movable(x: jax.Array, sharding: MpmdSharding) -> None:
    """Raises an error for a tracer, and for an array that spans other processes in another layout than the step's."""
    if isinstance(x, compat.Tracer):
        check_leaves([x], ["an argument"])
    if not all(device_put.is_placeable(x, sharding.group_sharding(g)) for g in sharding.groups):
        raise ValueError(
            f"mpmd: {x.aval.str_short()} spans other processes in the layout {x.sharding}.\n"
            "  Bring it into the step's layout first:"
            " reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, compiled.input_shardings[0])."
        )
