"""Finds the donated arguments that are used up (by JAX's rule, with its warning) and deletes them after the call."""

import warnings
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import jax
from jax.typing import ArrayLike

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.compile.donation import buffer_type
from mpmd.compile.step import StepPrograms
from mpmd.graphs import equations
from mpmd.users_frame import users_frame


def usable(programs: StepPrograms, donated: frozenset[int]) -> frozenset[int]:
    """Returns the donated arguments with memory that a program takes over or that fits the type of a result.

    This is JAX's rule, with JAX's warning about the other arguments, which are not deleted. An argument that the step
    does not read is not deleted either, and causes no warning.
    """
    outline = programs.outline
    trace = outline.trace
    args = trace.arguments
    taken = frozenset().union(*programs.donated.values())
    room = Counter(buffer_type(v) for v, _ in outline.outputs)
    found, others = set(), []
    for i in sorted(donated, key=lambda i: args[i] not in taken):
        if args[i] in taken or room[buffer_type(args[i])] > 0:
            room[buffer_type(args[i])] -= 1
            found.add(i)
        else:
            others.append(i)
    read = set(equations.variables([*trace.jaxpr.outvars, *(v for e in trace.jaxpr.eqns for v in e.invars)]))
    if unused := [f"{args[i].aval.str_short()} ({trace.in_names[i]})" for i in sorted(others) if args[i] in read]:
        warnings.warn(
            f"Some donated buffers were not usable: {', '.join(unused)}.\n"
            "No result has their type. See an explanation at https://docs.jax.dev/en/latest/faq.html#buffer-donation.",
            stacklevel=users_frame(),
        )
    return frozenset(i for i in found if args[i] in read)


def apart(leaves: Sequence[ArrayLike], donated: Container[int]) -> Sequence[ArrayLike]:
    """Returns the arguments of a call, with each donated one in memory of its own.

    An array that is passed twice (`ema = params` at the start) is copied, where `jax.jit` would refuse the call.
    """
    found, first = leaves, dict[int, int]()
    for i, x in enumerate(leaves):
        for array in x._arrays.values() if type(x) is MpmdArray else (x,):
            other = first.setdefault(id(array), i)
            if other != i and (i in donated or other in donated) and isinstance(x, jax.Array) and not x.is_deleted():
                found = [*found[:i], x.copy(), *found[i + 1 :]]
                break
    return found


def consume(
    leaf: ArrayLike, placed: Sequence[Mapping[int, jax.Array]], kept: Mapping[int, jax.Array], shared: bool
) -> None:
    """Deletes a donated argument, as `jax.jit` does, except for buffers that the step returned unchanged.

    Args:
      placed: its array in each group that reads it; if the argument is cut into pieces, the arrays of each piece.
      kept: the step's results, by `id`.
    """
    if isinstance(leaf, MpmdArray):
        leaf._consume()
        return
    if (
        not isinstance(leaf, jax.Array)
        or leaf.is_deleted()
        or any(id(a) in kept for piece in placed for a in piece.values())
    ):
        return
    if shared and not _buffers([leaf]).isdisjoint(_buffers(kept.values())):
        return  # where groups share devices, a transfer may have made it part of a result
    leaf.delete()


def _buffers(arrays: Iterable[jax.Array]) -> set[int]:
    """Returns the addresses of the shards that arrays have in this process."""
    live = (a for a in arrays if not a.is_deleted() and not keys.is_key(a.dtype))
    return {s.data.unsafe_buffer_pointer() for a in live for s in a.addressable_shards}
