"""Runs a step whose microbatches have several shapes: each instruction as the bucket of its microbatch does it.

A *bucket* is the step for microbatches of one shape. All buckets run the same tasks and make the same transfers in the
same places of their programs; executables, sizes, and what stays in a group between two tasks may differ. What belongs
to one microbatch happens where the program of its bucket has it, and that has been proved free of deadlock. So the
proof holds for every order of the shapes, and a new order picks one bound instruction in each place.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd import _jax_compat as compat
from mpmd.arrays.sharding import MpmdSharding
from mpmd.compile.program import loop_graph
from mpmd.compile.step import StepPrograms
from mpmd.job import wires
from mpmd.job.notes import Note
from mpmd.run.agreement import Announcement
from mpmd.run.bindings import Bindings, BoundBuckets, BoundInstruction
from mpmd.run.executor import Executor, Instruction
from mpmd.tracing.trace import Trace
from scheduler import Program, Value
from scheduler.base.bounded import BoundedDict

# For each list of a step, the bucket of each of its microbatches.
Order = tuple[tuple[int, ...], ...]
# So many orders and numbers of microbatches are kept.
NUM_ORDERS = 64


@dataclasses.dataclass(frozen=True)
class MicrobatchArray:
    """One array of one microbatch.

    Attributes:
      argument: the name of the argument that stands for it in the program.
      name: its own.
    """

    argument: str
    microbatch: int
    name: str
    aval: compat.Aval
    sharding: MpmdSharding


class BucketExecutor(Executor):
    """Runs this process's part of a program for any order of microbatches.

    Args:
      buckets: the step for each shape, and its program.
      whole: the step as it was traced first.
      dealt: names of the arguments of which each microbatch has its own.
      absent: positions of these arguments, constants included.
      list_of: per loop that takes one, the number of its list.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[StepPrograms, Program]],
        whole: Trace,
        dealt: frozenset[str],
        absent: frozenset[int],
        list_of: Mapping[int, int],
    ):
        self._buckets, self._dealt, self._absent, self._list_of = buckets, dealt, absent, list_of
        self._number = 0  # of the order
        self._kept: BoundedDict[Order, tuple[list[BoundInstruction], list[Instruction], int]] = BoundedDict(NUM_ORDERS)
        super().__init__(*buckets[0], whole)
        self._of_step = self._arguments
        self.finish()

    def _bind(self, programs: StepPrograms, program: Program) -> Bindings:
        self._bound_buckets = BoundBuckets(self._buckets, self._job, self._dealt)
        first, *others = self._bound_buckets.of
        for other in others:
            assert list(map(_what, other.instructions)) == list(map(_what, first.instructions))
            assert other.num_pieces == first.num_pieces
        loops = {edge.name: n for n, p in enumerate(programs.loops) for edge in loop_graph(p.loop).edges}
        self._places = [self._microbatches(b, loops) for b in first.instructions]
        return dataclasses.replace(first, template=self._bound_buckets.template)

    def _microbatches(self, b: BoundInstruction, loops: Mapping[str, int]) -> list[tuple[int, int]]:
        """The microbatches that an instruction concerns, each as a list and its number in that."""
        if b.tasks:
            return [(self._list_of[b.loop], t.microbatch) for t in b.tasks] if b.loop in self._list_of else []
        if b.crossing is None or (microbatch := b.crossing.value.microbatch) is None:
            return []
        loop = loops[b.crossing.value.name]
        return [(self._list_of[loop], microbatch)] if loop in self._list_of else []

    def finish(self) -> None:
        """Waits for all programs, once."""
        if not self._is_finished:
            for bindings, (programs, _) in zip(self._bound_buckets.of, self._buckets, strict=True):
                bindings.finish()
                programs.compiler.release()
            self._tuples = [_tuples(bindings.instructions) for bindings in self._bound_buckets.of]
            self._is_finished = True

    def take(self, order: Order, arrays: Sequence[MicrobatchArray]) -> None:
        """The next calls are for microbatches in this order, whose arrays come after all other arguments."""
        if order not in self._kept:
            self._kept[order] = *self._picked(order), zlib.crc32(repr(order).encode())
        bound, self._instructions, self._number = self._kept[order]
        first, local, slots = self._bound_buckets.of[0], self._programs.mesh.local_groups, self._bound_buckets.slots
        inputs = [[] if i in self._absent else where for i, where in enumerate(first.inputs)]
        for a in arrays:
            value = Value(a.argument, a.microbatch)
            groups = [g for g in a.sharding.groups if g in local and slots.has(g, value)]
            inputs.append([(g, slots.of(g, value)) for g in groups])
        self.bindings = dataclasses.replace(self.bindings, instructions=tuple(bound), inputs=inputs)
        names, avals = self._of_step
        self._arguments = [*names, *(a.name for a in arrays)], [*avals, *(a.aval for a in arrays)]
        for name in ("_recorder", "_annotated"):
            vars(self).pop(name, None)

    def _picked(self, order: Order) -> tuple[list[BoundInstruction], list[Instruction]]:
        bound, tuples = list(self._bound_buckets.of[0].instructions), list(self._tuples[0])
        of, all_tuples = [b.instructions for b in self._bound_buckets.of], self._tuples
        for k, places in enumerate(self._places):
            if not places:
                continue
            xs, microbatch = places[0]
            bucket = order[xs][microbatch]
            if len(places) == 2 and (other := order[places[1][0]][places[1][1]]) != bucket:
                bound[k] = self._bound_buckets.pair(bound[k], (bucket, other))
                tuples[k] = _tuple(bound[k], k)
            elif bucket:
                bound[k], tuples[k] = of[bucket][k], all_tuples[bucket][k]
        return bound, tuples

    def _plan(self) -> Announcement:
        sections = dict(super()._plan().sections)
        for number, (programs, _) in enumerate(self._buckets[1:], start=1):
            trace = programs.outline.trace
            lines = [f"{n}: {v.aval.str_short()}" for n, v in zip(trace.in_names, trace.arguments, strict=True)]
            sections[f"arguments of microbatches of shape {number}"] = "\n".join(lines)
        return Announcement(sections)

    def _note(self, number: int, values: Sequence[tuple[int, Any]] = ()) -> Note:
        """A call in another order is another program of the step."""
        note = super()._note(number, values)
        return dataclasses.replace(note, program=number and zlib.crc32(f"{number} {self._number}".encode()))

    def _first_piece(self) -> int:
        """Pieces in other orders have other numbers: what is sent in one order is not taken in another."""
        assert self._next_piece is not None
        kept = self._number % (1 << (wires.NUMBER_BITS - wires.ORDER_BITS))
        return super()._first_piece() + (kept << wires.ORDER_BITS)


def _what(b: BoundInstruction) -> Any:
    """What all buckets do in one place."""
    crossing = None if b.crossing is None else (b.crossing.source, b.crossing.target, b.crossing.value.microbatch)
    return b.group, b.code, b.tasks, crossing


def _tuples(bound: Sequence[BoundInstruction]) -> list[Instruction]:
    return [_tuple(b, number) for number, b in enumerate(bound)]


def _tuple(b: BoundInstruction, number: int) -> Instruction:
    return b.code, b.act, b.reads, b.writes, b.frees, number
