"""Runs a step with microbatches of several shapes: each instruction comes from the bucket of its microbatch.

A *bucket* is the step for microbatches of one shape. All buckets run the same tasks and transfers in the same places of
their programs; executables, sizes, and the values that stay in a group between two tasks may differ. Each instruction
of a microbatch runs in its place in the program of the bucket, which has been proved free of deadlock. So the proof
holds for every order of the shapes, and a new order picks one bound instruction for each place. Shorter lists run the
same plan without the later microbatches (`scheduler/programs/fewer.py` says why that is right).
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.sharding import MpmdSharding
from mpmd.compile.program import loop_graph
from mpmd.compile.step import StepPrograms
from mpmd.job import wires
from mpmd.job.notes import Note, Values
from mpmd.run.agreement import Announcement
from mpmd.run.bindings import Bindings, BoundBuckets
from mpmd.run.bound_instruction import BoundInstruction, Instruction
from mpmd.run.executor import Executor
from mpmd.run.turns import EARLY, FOLLOWED, KINDS, Change, Sums, reading
from mpmd.tracing.trace import Trace
from scheduler import Program, Value
from scheduler.base.bounded import BoundedDict
from scheduler.programs.fewer import with_fewer

# For each list of a step, the bucket of each of its microbatches, in the order in which they run.
Order = tuple[tuple[int, ...], ...]
# For each list, the number of the microbatch that runs first, second, and so on; None for the order of the list.
Permutations = tuple[tuple[int, ...] | None, ...]
# The limit of orders and numbers of microbatches that are kept.
NUM_ORDERS = 64


class MicrobatchArray(NamedTuple):
    """One array of one microbatch."""

    argument: str  # the name of the argument that stands for it in the program
    microbatch: int
    name: str  # the name of the array itself
    aval: compat.Aval
    sharding: MpmdSharding


class _Picked(Sequence[BoundInstruction]):
    """The instructions of a call. Each is looked up on demand, since most calls need none.

    Args:
      table, walked: instructions of all buckets, and their walked form, indexed by the picks and then by place.
      picks: per leading axis of the table, the index for each place.
    """

    def __init__(self, table: np.ndarray, walked: np.ndarray, picks: Sequence[np.ndarray], places: np.ndarray):
        self._table, self._picks, self.places = table, picks, places  # `places`: all that the call has
        self._changed: dict[int, BoundInstruction] = {}  # by place
        self._more: dict[int, list[int]] = {}  # by place, further slots to read, for the last time
        at, self.is_whole = picks[0], len(places) == table.shape[-1]
        for count, pick in zip(table.shape[1:-1], picks[1:], strict=True):
            at = at * count + pick
        found = walked.ravel().take((at * table.shape[-1])[places] + places).tolist()
        self.walked: list[Instruction] = found if self.is_whole else [(*w[:5], n) for n, w in enumerate(found)]

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, number: int) -> BoundInstruction: ...
    @overload
    def __getitem__(self, number: slice) -> list[BoundInstruction]: ...
    def __getitem__(self, number: int | slice) -> BoundInstruction | list[BoundInstruction]:
        if isinstance(number, slice):
            return [self.at(place) for place in self.places[number]]
        return self.at(self.places[number])

    def at(self, place: int) -> BoundInstruction:
        """Returns the instruction in some place."""
        found = self._changed.get(place) or self._table[(*(pick[place] for pick in self._picks), place)]
        return reading(found, more) if (more := self._more.get(place)) else found

    def _number(self, place: int) -> int:
        return place if self.is_whole else int(np.searchsorted(self.places, place))

    def put(self, place: int, b: BoundInstruction) -> None:
        """Puts another instruction in some place that the call has."""
        number = self._number(place)
        self._changed[place], self.walked[number] = b, b.walked(number)
        self._more.pop(place, None)

    def read_more(self, place: int, more: list[int]) -> None:
        """Makes the instruction in some place read further slots, for the last time."""
        number = self._number(place)
        code, act, reads, writes, frees, _ = self.walked[number]
        self.walked[number] = code, act, (*reads, *more), writes, (*frees, *more), number
        self._more[place] = more


class _Prepared(NamedTuple):
    """The instructions of calls with microbatches in one order."""

    bindings: Bindings
    instructions: list[Instruction]
    arguments: tuple[list[str], list[compat.Aval]]  # their names and types
    number: int  # the number of the order, the same in all processes
    kept: np.ndarray  # positions of the instructions among all instructions of the plan


class BucketExecutor(Executor):
    """Runs this process's part of a program for any order of microbatches.

    Args:
      whole: the first trace of the step.
      dealt: names of the arguments that differ between microbatches.
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
        self._number = 0  # the number of the order
        self._order: Order = ()
        self._permutations: Permutations = ()
        self._where: dict[tuple[str, int, tuple[int, ...]], list[tuple[int, int]]] = {}  # the slots of microbatches
        self._kept: BoundedDict[tuple[Order, Permutations], _Prepared] = BoundedDict(NUM_ORDERS)
        self._twofold: dict[int, tuple[tuple[int, int], tuple[int, int]]]  # by position, the microbatches of two tasks
        super().__init__(*buckets[0], whole)
        self._of_step = self._arguments
        self.finish()

    def _bind(self, programs: StepPrograms, program: Program) -> Bindings:
        self._bound_buckets = BoundBuckets(self._buckets, self.job, self._dealt)
        first, *others = self._bound_buckets.of
        for other, (_, its_program) in zip(others, self._buckets[1:], strict=True):
            if its_program is not program:
                assert list(map(_what, other.instructions)) == list(map(_what, first.instructions))
            assert len(other.instructions) == len(first.instructions) and other.num_pieces == first.num_pieces
        loops = {edge.name: n for n, p in enumerate(programs.loops) for edge in loop_graph(p.loop).edges}
        self._number_of = np.zeros(len(first.instructions), np.intp)  # per instruction, that of its microbatch
        self._twofold = {}
        numbers: dict[tuple[int, int] | None, int] = {None: 0}
        for k, b in enumerate(first.instructions):
            places = self._microbatches(b, loops)
            self._number_of[k] = numbers.setdefault(places[0] if places else None, len(numbers))
            if len(places) == 2:
                self._twofold[k] = places[0], places[1]
        self._numbered, self._groups = list(numbers), [b.group for b in first.instructions]
        self._sums = Sums(self._bound_buckets, self._list_of)
        of_microbatches = self._bound_buckets.slots.of_microbatches
        frees = [tuple(slot for slot in b.frees if slot not in of_microbatches) for b in first.instructions]
        self._late = {k: slots for k, slots in enumerate(frees) if slots}
        return dataclasses.replace(first, template=self._bound_buckets.template)

    def _microbatches(self, b: BoundInstruction, loops: Mapping[str, int]) -> list[tuple[int, int]]:
        """Returns the microbatches of an instruction, each as the number of its list and its own number there."""
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
            instructions = [bindings.instructions for bindings in self._bound_buckets.of]
            walked = [[b.walked(k) for k, b in enumerate(own)] for own in instructions]
            self._tables = _table(instructions), _table(walked)
            self._is_finished = True

    def take(self, order: Order, permutations: Permutations, arrays: Sequence[MicrobatchArray]) -> None:
        """Prepares the next calls for microbatches in this order. Their arrays come after all other arguments."""
        key = order, permutations
        if key not in self._kept:
            self._kept[key] = self._call_of(order, permutations, arrays)
        self._order, self._permutations = key
        bindings, instructions, self._arguments, self._number, self._kept_of_plan = self._kept[key]
        self._take(bindings, instructions, self.flight)

    @property
    def _work(self) -> Hashable:
        return tuple(tuple(sorted(buckets)) for buckets in self._order)

    def _call_of(self, order: Order, permutations: Permutations, arrays: Sequence[MicrobatchArray]) -> _Prepared:
        first, local, slots = self._bound_buckets.of[0], self._programs.mesh.local_groups, self._bound_buckets.slots
        picked, template, text = self._picked(order, permutations), self._bound_buckets.template, repr(order)
        if any(permutations):
            template, text = self._numbered_anew(permutations), repr((order, permutations))
        inputs = [[] if i in self._absent else where for i, where in enumerate(first.inputs)]
        for a in arrays:
            key = a.argument, a.microbatch, a.sharding.groups
            if (where := self._where.get(key)) is None:
                value = Value(a.argument, a.microbatch)
                groups = [g for g in a.sharding.groups if g in local and slots.has(g, value)]
                where = self._where[key] = [(g, slots.of(g, value)) for g in groups]
            inputs.append(where)
        names, avals = self._of_step
        return _Prepared(
            dataclasses.replace(self.bindings, instructions=picked, inputs=inputs, template=template),
            picked.walked,
            ([*names, *(a.name for a in arrays)], [*avals, *(a.aval for a in arrays)]),
            zlib.crc32(text.encode()),
            picked.places,
        )

    def _picked(self, order: Order, permutations: Permutations) -> _Picked:
        """Picks the instructions of a call in this order from the bucket of each microbatch that the call has."""
        bucket_of: dict[tuple[int, int] | None, int]
        bucket_of = {(xs, m): bucket for xs, buckets in enumerate(order) for m, bucket in enumerate(buckets)}
        buckets = np.array([0 if of is None else bucket_of.get(of, -1) for of in self._numbered])[self._number_of]
        places, changes = np.flatnonzero(buckets >= 0), dict[int, Change]()
        if any(permutations):
            kinds, changes = self._sums.kinds(permutations)
            found = _Picked(*self._tables_by_kind, (kinds, buckets), places)
        else:
            found = _Picked(*self._tables, (buckets,), places)
        for k, two in self._twofold.items():
            one, other = (bucket_of.get(of) for of in two)
            if one is not None and other is not None and one != other:
                found.put(k, self._bound_buckets.pair(found.at(k), (one, other)))
        for k, change in changes.items():
            if change.early is not None:
                b = found.at(k)
                of_tasks = [bucket_of[self._list_of[b.loop], task.microbatch] for task in b.tasks]
                found.put(k, self._sums.out_of_turn(k, b, of_tasks, change.early, change.late))
            found.read_more(k, change.reads)
        for k in [] if found.is_whole else [k for k in self._late if buckets[k] < 0]:
            before = (p for p in reversed(places[: np.searchsorted(places, k)]) if self._groups[p] == self._groups[k])
            if (place := next(before, None)) is not None:  # the instruction before an absent one frees its slots
                b = found.at(place)
                found.put(place, dataclasses.replace(b, frees=b.frees + self._late[k]))
        return found

    @functools.cached_property
    def _tables_by_kind(self) -> tuple[np.ndarray, np.ndarray]:
        """The tables of instructions of each kind, for microbatches in another order. Otherwise like `_tables`."""
        instructions, walked = (np.stack([table] * len(KINDS)) for table in self._tables)
        for kind, (bucket, own) in itertools.product((EARLY, FOLLOWED), enumerate(self._bound_buckets.of)):
            for k, b in self._sums.of_kind(kind, own.instructions, bucket).items():
                instructions[kind, bucket, k], walked[kind, bucket, k] = b, b.walked(k)
        return instructions, walked

    def _numbered_anew(self, permutations: Permutations) -> list[object]:
        """Returns the slots before a step in which microbatches have other numbers in their lists."""
        slots, template = self._bound_buckets.slots, self._bound_buckets.template
        found = [*template, *[None] * (len(slots) - len(template))]
        for (_, loop), slot_of in slots.numbers.items():
            if loop in self._list_of and (permutation := permutations[self._list_of[loop]]) is not None:
                for microbatch, number in enumerate(permutation):
                    found[slot_of[microbatch]] = template[slot_of[number]]
        return found

    @property
    def _counts(self) -> dict[int, int]:
        return {loop: len(self._order[xs]) for loop, xs in self._list_of.items()}

    @property
    def _program_of_call(self) -> Program:
        return with_fewer(self.program, self._counts)

    def _plan(self) -> Announcement:
        sections = dict(super()._plan().sections)
        for number, (programs, _) in enumerate(self._buckets[1:], start=1):
            trace = programs.outline.trace
            lines = [f"{n}: {v.aval.str_short()}" for n, v in zip(trace.in_names, trace.arguments, strict=True)]
            sections[f"arguments of microbatches of shape {number}"] = "\n".join(lines)
        return Announcement(sections)

    def _note(self, number: int, values: Values = (), makers: Sequence[int] = ()) -> Note:
        """Returns the note of the next call. A call in another order counts as another program of the step."""
        note = super()._note(number, values, makers)
        return dataclasses.replace(note, program=number and zlib.crc32(f"{number} {self._number}".encode()))

    def _first_piece(self) -> int:
        """Gives pieces other numbers in each order, so that no receive in one order takes a piece of another."""
        assert self._next_piece is not None
        kept = self._number % (1 << (wires.NUMBER_BITS - wires.ORDER_BITS))
        return super()._first_piece() + (kept << wires.ORDER_BITS)


def _what(b: BoundInstruction) -> Hashable:
    """Returns the properties that the instructions of all buckets share in one place."""
    crossing = None if b.crossing is None else (b.crossing.source, b.crossing.target, b.crossing.value.microbatch)
    return b.group, b.code, b.tasks, crossing


def _table(rows: Iterable[Sequence[object]]) -> np.ndarray:
    return np.stack([np.fromiter(row, object) for row in rows])
