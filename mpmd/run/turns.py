"""Sums microbatches in the order of their list where their tasks run in another order.

A task that runs before its turn adds to a fresh accumulator of its own. When its turn comes, the task that runs then
adds this accumulator to the sum, after its own term. So each sum has the same terms in the same order.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from mpmd.errors import StageError
from mpmd.ops.reductions import Concat, Operation
from mpmd.run.bindings import BoundBuckets, SummedOutput
from mpmd.run.bound_instruction import BoundInstruction

# A task runs in its turn; before its turn; or in its turn, where microbatches of the next turns have run already.
KINDS = IN_TURN, EARLY, FOLLOWED = range(3)


class SumLine(NamedTuple):
    """The tasks that add to some sums, one after the other."""

    xs: int  # the number of their list
    microbatches: tuple[int, ...]  # their microbatches, in the order in which the tasks run

    def kinds(self, turn_of: Sequence[int]) -> tuple[list[int], dict[int, list[int]]]:
        """Returns the kind of each task and, by position, the microbatches with the next turns that have run already.

        Args:
          turn_of: by microbatch, its number in the list; the call has no later microbatches.
        """
        kinds, followed = [IN_TURN] * len(self.microbatches), defaultdict[int, list[int]](list)
        early: dict[int, int] = {}  # by turn, the microbatch that ran before it
        following = 0
        for position, microbatch in enumerate(self.microbatches):
            if microbatch >= len(turn_of):
                continue
            if (turn := turn_of[microbatch]) != following:
                early[turn], kinds[position] = microbatch, EARLY
                continue
            following += 1
            while (before := early.pop(following, None)) is not None:
                followed[position].append(before)
                kinds[position] = FOLLOWED
                following += 1
        return kinds, followed


class _Adding(NamedTuple):
    """The sums that a task of an instruction adds to: their line, the task's position in the line, and their slots."""

    task: int
    line: int
    position: int
    slots: tuple[int, ...]


class _Together(NamedTuple):
    """The instructions of one task each in one place of a line. One table has their slots: most calls read all."""

    kept: np.ndarray  # (microbatches, columns), the slots of sums that microbatches have added before their turn
    columns: list[tuple[int, tuple[int, int]]]  # per instruction, its first column and the column after its last


class Change(NamedTuple):
    """The changes that a call makes to an instruction, besides its kind."""

    early: list[int] | None  # the numbers of its tasks that add before their turn; None if its kind says that
    late: list[int]  # the numbers of its tasks that add earlier sums too, once for each microbatch with such sums
    reads: list[int]  # the slots of these earlier sums


class Sums:
    """The sums over lists, and the terms that the instructions of a step add to them.

    Args:
      list_of: per loop that takes one, the number of its list.
    """

    def __init__(self, buckets: BoundBuckets, list_of: Mapping[int, int]):
        self._buckets, self._instructions = buckets, buckets.of[0].instructions
        operations: dict[int, Operation] = {}  # by slot
        tasks_of = defaultdict[int, list[tuple[int, int]]](list)  # by slot, the instructions, and which of their tasks
        for k, b in enumerate(self._instructions):
            if b.loop in list_of:
                for task, sums in enumerate(buckets.sums(b, [0] * len(b.tasks))):
                    for s in sums:
                        if type(s.operation) is not Concat:  # each row has its own place, whatever the order
                            tasks_of[b.writes[s.write]].append((k, task))
                            operations[b.writes[s.write]] = s.operation
        lines: dict[SumLine, int] = {}
        slots_of = defaultdict[int, dict[tuple[int, int, int], list[int]]](lambda: defaultdict(list))
        for slot, tasks in tasks_of.items():
            xs = list_of[self._instructions[tasks[0][0]].loop]
            line = SumLine(xs, tuple(self._instructions[k].tasks[task].microbatch for k, task in tasks))
            for position, (k, task) in enumerate(tasks):
                slots_of[k][task, lines.setdefault(line, len(lines)), position].append(slot)
        self._lines = list(lines)
        self._of = {k: [_Adding(*key, tuple(slots)) for key, slots in own.items()] for k, own in slots_of.items()}
        self._places = defaultdict[tuple[int, int], list[int]](list)  # by line and position, instructions of one task
        self._twofold: dict[int, list[_Adding]] = {}
        for k, own in self._of.items():
            if len(own) == len(self._instructions[k].tasks) == 1:
                self._places[own[0].line, own[0].position].append(k)
            else:
                self._twofold[k] = own
        starts = list(itertools.accumulate([len(line.microbatches) for line in self._lines], initial=0))
        at = [(k, starts[line] + position) for (line, position), ks in self._places.items() for k in ks]
        self._simple, self._at = np.array(at, np.intp).reshape(-1, 2).T
        self._early: dict[tuple[int, ...], np.ndarray] = {}  # by slots of sums, (microbatches, slots) of early sums
        added = [(a.line, operations[slot]) for own in self._of.values() for a in own for slot in a.slots]
        self._without_parts = {line: operation for line, operation in added if not operation.has_parts}

    def kinds(self, order_of: Sequence[Sequence[int] | None]) -> tuple[np.ndarray, dict[int, Change]]:
        """Returns the kind of each instruction in a call and, by position, its further changes.

        Args:
          order_of: per list, the number of the microbatch that runs first, second, and so on; None for the order of
            the list.

        Raises:
          StageError: an operation cannot add sums of parts.
        """
        found, changes = np.full(len(self._instructions), IN_TURN), dict[int, Change]()
        orders = [order_of[line.xs] for line in self._lines]
        of_lines = [
            ([IN_TURN] * len(line.microbatches), {}) if order is None else line.kinds(order)
            for line, order in zip(self._lines, orders, strict=True)
        ]
        for number, (kinds, followed) in enumerate(of_lines):
            if EARLY in kinds and (operation := self._without_parts.get(number)) is not None:
                raise StageError(
                    "Reordered: the outputs of microbatches that run before their turn cannot be kept for"
                    f" {operation!r}. Give the list itself, or one that you have put in order yourself."
                )
            for position, microbatches in followed.items():
                if (together := self._together.get((number, position))) is not None:
                    columns = together.kept[microbatches].T.tolist()
                    for k, (start, stop) in together.columns:
                        changes[k] = Change(
                            None, [], [slot for row in zip(*columns[start:stop], strict=True) for slot in row]
                        )
        found[self._simple] = np.array([kind for kinds, _ in of_lines for kind in kinds], int)[self._at]
        for k, own in self._twofold.items():
            early = [n for n, a in enumerate(own) if of_lines[a.line][0][a.position] == EARLY]
            late = {n: of_lines[a.line][1].get(a.position, ()) for n, a in enumerate(own)}
            if early or any(late.values()):
                reads = [slot for n, ms in late.items() for m in ms for slot in self._kept(k, n)[m].tolist()]
                changes[k] = Change(early, [n for n, microbatches in late.items() for _ in microbatches], reads)
        return found, changes

    def of_kind(self, kind: int, instructions: Sequence[BoundInstruction], bucket: int) -> dict[int, BoundInstruction]:
        """Returns, by position, the instructions of a bucket changed to a kind, still without their further reads."""
        early, late = [0] * (kind == EARLY), [0] * (kind == FOLLOWED)
        return {k: self.out_of_turn(k, instructions[k], [bucket], early, late) for k in self._simple.tolist()}

    @functools.cached_property
    def _together(self) -> dict[tuple[int, int], _Together]:
        """The instructions of one task each, by line and position."""
        tables: dict[tuple[tuple[int, ...], ...], np.ndarray] = {}
        found = {}
        for place, ks in self._places.items():
            of_all = tuple(self._of[k][0].slots for k in ks)
            if of_all not in tables:
                tables[of_all] = np.concatenate([self._kept(k, 0) for k in ks], axis=1)
            stops = itertools.accumulate(map(len, of_all), initial=0)
            found[place] = _Together(tables[of_all], list(zip(ks, itertools.pairwise(stops), strict=True)))
        return found

    def _kept(self, k: int, number: int) -> np.ndarray:
        """Finds the slots of early sums for the sums that an instruction adds to: an array (microbatches, slots)."""
        adding = self._of[k][number]
        if adding.slots not in self._early:
            slots, group, own = self._buckets.slots, self._instructions[k].group, self._lines[adding.line].microbatches
            kept = self._early[adding.slots] = np.zeros((max(own) + 1, len(adding.slots)), int)
            for m in own:
                kept[m] = [slots.of(group, ("summed early", slot, m)) for slot in adding.slots]
        return self._early[adding.slots]

    def out_of_turn(
        self, k: int, b: BoundInstruction, buckets: Sequence[int], early: Collection[int], late: Collection[int]
    ) -> BoundInstruction:
        """Returns the instruction in some place for tasks that run before their turn, or that add early sums.

        Args:
          buckets: the buckets of the microbatches of its tasks.
          early, late: as in `Change`. The early sums are its last inputs.
        """
        places = {b.writes[s.write]: s for sums in self._buckets.sums(b, buckets) for s in sums}
        parts = [_Part.of([places[slot] for slot in a.slots]) for a in self._of[k]]
        writes, donates = list(b.writes), set(b.donates)
        for n in early:
            donates.difference_update(self._of[k][n].slots)
            kept = self._kept(k, n)[b.tasks[self._of[k][n].task].microbatch].tolist()
            for write, slot in zip(parts[n].writes, kept, strict=True):
                writes[write] = slot
        act = _summing(b.act, len(b.reads), [parts[n] for n in early], [parts[n] for n in late])
        return dataclasses.replace(b, act=act, writes=tuple(writes), donates=tuple(donates))


def reading(b: BoundInstruction, more: Sequence[int]) -> BoundInstruction:
    """Returns an instruction with further inputs, which it reads for the last time."""
    found = object.__new__(BoundInstruction)  # there are hundreds, and `dataclasses.replace` takes ten times as long
    vars(found).update(vars(b), reads=(*b.reads, *more), frees=(*b.frees, *more))
    return found


class _Part(NamedTuple):
    """Some sums of a task: their positions among the reads and the writes of its instruction."""

    operations: tuple[Operation, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @classmethod
    def of(cls, sums: Sequence[SummedOutput]) -> "_Part":
        reads, writes, operations = zip(*sums, strict=True)
        return cls(operations, reads, writes)


def _summing(
    act: Callable[..., Sequence[jax.Array]], num_reads: int, early: Sequence[_Part], late: Sequence[_Part]
) -> Callable[..., list[jax.Array]]:
    """Wraps `act` so that some sums begin anew, and early sums are added to others afterwards.

    Args:
      num_reads: the number of inputs of `act`; the inputs after these are early sums.
      early, late: the sums that begin anew, and the sums that get early sums, in turn, until none is left.
    """

    def summing(*arrays: jax.Array) -> list[jax.Array]:
        given = list(arrays[:num_reads])
        for part in early:
            sums = [given[k] for k in part.reads]
            for k, x in zip(part.reads, _begun(part.operations, _shardings(sums))(sums), strict=True):
                given[k] = x
        found, more = list(act(*given)), iter(arrays[num_reads:])
        for part in itertools.cycle(late):
            if not (others := list(itertools.islice(more, len(part.writes)))):
                break
            sums = [found[k] for k in part.writes]
            for k, x in zip(part.writes, _added(part.operations, _shardings(sums))(sums, others), strict=True):
                found[k] = x
        return found

    return summing


def _shardings(arrays: Iterable[jax.Array]) -> tuple[Sharding, ...]:
    return tuple(x.sharding for x in arrays)


@functools.lru_cache(maxsize=1024)
def _begun(
    operations: Sequence[Operation], shardings: Sequence[Sharding]
) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """Maps accumulators to accumulators of the same types as before the first microbatch."""

    def begin(sums: Sequence[jax.Array]) -> Sequence[jax.Array]:
        found = tuple(of.init(jax.typeof(x), 1) for of, x in zip(operations, sums, strict=True))
        for of, x, new in zip(operations, sums, found, strict=True):
            if new.shape != x.shape or new.dtype != x.dtype:
                raise StageError(
                    f"Reordered: {of!r}.init gives {jax.typeof(new).str_short()} for an accumulator of type"
                    f" {jax.typeof(x).str_short()}. With has_parts = True it must give the same type."
                )
        return found

    return jax.jit(begin, out_shardings=shardings)


@functools.lru_cache(maxsize=1024)
def _added(
    operations: Sequence[Operation], shardings: Sequence[Sharding]
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]:
    """Adds early sums to accumulators."""

    def add(sums: Sequence[jax.Array], others: Sequence[jax.Array]) -> Sequence[jax.Array]:
        of_all = zip(operations, sums, others, strict=True)
        return tuple(operation.update(x, other, jnp.int32(0)) for operation, x, other in of_all)

    return jax.jit(add, out_shardings=shardings, donate_argnums=0)
