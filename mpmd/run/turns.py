"""Sums microbatches in the order of their list where their tasks run in another one.

A task that runs before its turn adds to an accumulator of its own, which begins anew. When the turn has come, the
task that runs then adds that to the sum, after its own part. So each sum is made of the same terms in the same order.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.errors import StageError
from mpmd.ops.reductions import Concat, Operation
from mpmd.run.bindings import BoundInstruction, BoundTask, Slots


class _EarlySum(NamedTuple):
    """What is added to a sum when its turn has come: where the sum is written, and the slot of what is added."""

    position: int
    slot: int
    operation: Operation


class Turns:
    """The sums of one call, instruction by instruction in the order in which they run."""

    def __init__(self, slots: Slots):
        self._slots = slots
        self._next: dict[int, int] = defaultdict(int)  # by the slot of a sum, whose turn it is
        self._early: dict[tuple[int, int], int] = {}  # by that and by turn, where it is that was summed before its turn

    def bound(self, b: BoundInstruction, tasks: Sequence[BoundTask], turns: Sequence[int]) -> BoundInstruction:
        """The instruction as it sums in turn.

        Args:
          tasks: of the instruction.
          turns: of each, the number of its microbatch in the list.

        Raises:
          StageError: an operation has no sum of parts.
        """
        reads, writes, donates = list(b.reads), list(b.writes), set(b.donates)
        begun: dict[int, Operation] = {}  # by position among what it reads
        late: list[_EarlySum] = []
        for task, turn in zip(tasks, turns, strict=True):
            if task.number is not None:
                reads[task.number] = self._slots.of_constant(b.group, np.int32(turn))
            for s in task.sums:
                if type(s.operation) is Concat:  # rows have places of their own
                    continue
                if turn == self._next[slot := writes[s.write]]:
                    late += [_EarlySum(s.write, early, s.operation) for early in self._in_turn(slot)]
                    continue
                _check_has_parts(s.operation)
                self._early[slot, turn] = early = self._slots.of(b.group, ("summed early", slot, turn))
                begun[s.read] = s.operation
                donates.discard(slot)
                writes[s.write] = early
        if not begun and not late and reads == list(b.reads):
            return b
        more = tuple(one.slot for one in late)
        return dataclasses.replace(
            b,
            act=_summing(b.act, len(reads), begun, late),
            reads=(*reads, *more),
            writes=tuple(writes),
            frees=(*b.frees, *more),
            donates=tuple(donates),
        )

    def _in_turn(self, slot: int) -> Iterator[int]:
        """A microbatch is summed in turn: where those are that come next and were summed before."""
        self._next[slot] += 1
        while (early := self._early.pop((slot, self._next[slot]), None)) is not None:
            yield early
            self._next[slot] += 1


def _summing(
    act: Callable[..., Any], num_reads: int, begun: dict[int, Operation], late: Sequence[_EarlySum]
) -> Callable[..., list[jax.Array]]:
    def summing(*arrays: jax.Array) -> list[jax.Array]:
        given = list(arrays[:num_reads])
        for k, operation in begun.items():
            given[k] = _begun(operation, given[k].sharding)(given[k])
        found = list(act(*given))
        for one, early in zip(late, arrays[num_reads:], strict=True):
            found[one.position] = _added(one.operation, early.sharding)(found[one.position], early)
        return found

    return summing


def _check_has_parts(operation: Operation) -> None:
    if not operation.has_parts:
        raise StageError(
            f"Reordered: the outputs of microbatches that run before their turn cannot be kept for {operation!r}. Give"
            " the list itself, or one that you have put in order yourself."
        )


@functools.lru_cache(maxsize=1024)
def _begun(operation: Operation, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """From an accumulator to one like it before the first microbatch."""
    return jax.jit(lambda acc: operation.init(jax.typeof(acc), 1), out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _added(operation: Operation, sharding: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """An accumulator, after what another one has summed."""
    return jax.jit(
        lambda acc, early: operation.update(acc, early, jnp.int32(0)), out_shardings=sharding, donate_argnums=0
    )
