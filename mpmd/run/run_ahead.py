"""Bounds how far a group runs ahead of another one that it sends to.

Training needs no bound: forward passes wait for parameters, and parameters wait for gradients. In a forward-only loop,
and in a step without a loop, nothing holds a fast stage back: it would start all its tasks, even of later steps, and
each value that it sends is kept until it is received. So the receiver reports its progress after every few values, and
the sender stays within a limit of the last report. The receiver in turn waits for its own tasks.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax

from mpmd.compile.program import edge_name
from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.job.job import Job
from mpmd.job.wires import NUMBER_BITS
from scheduler import Program, Value

# From one report of the receiver to the next; a sender is at most three times as far ahead.
_FEWEST, _MOST = 4, 256  # values
_BYTES = 16 << 20  # as many small values as fit into so many bytes


class Tasks:
    """A receiving group's tasks: `wait` returns when all but the latest few are done."""

    def __init__(self):
        self.every = _MOST
        self._count = 0
        self._done: deque[jax.Array] = deque()

    def counted(self, fun: Callable) -> Callable:
        """Wraps `fun`, an executable of the group, to count its calls."""

        def run(*args):
            results = fun(*args)
            self._count += 1
            if self._count % self.every == 0 and len(results):
                self._done.append(after(results[-1].addressable_shards[0].data))
            return results

        return run

    def wait(self) -> None:
        while len(self._done) > 1:
            self._done.popleft().block_until_ready()


@functools.partial(jax.jit, keep_unused=True)
def after(x: jax.Array) -> Any:
    """Returns a value that is ready as soon as `x` is; `x` may be donated meanwhile."""
    return False


class Flow:
    """The values that one group sends to another, as one process of either sees them.

    Args:
      senders, receivers: the processes of both groups.
      tasks: the tasks of the receiving group.
    """

    def __init__(self, job: Job, name: str, senders: Iterable[int], receivers: Iterable[int], tasks: Tasks):
        self._job, self._name, self.tasks = job, name, tasks
        self._senders, self._receivers = tuple(senders), tuple(receivers)
        self.every = _MOST
        self.per_step = 0  # values
        self.pieces_per_step = 1
        self.number_bits = NUMBER_BITS
        self._begun: deque[int] = deque(maxlen=3)  # the latest turns
        self._epoch = job.epoch

    def sending(self, carry: Callable) -> Callable:
        """Wraps `carry`, which sends the next value of a step, to wait for the receiver's reports."""
        index = self._next()

        def send(x: jax.Array, base: int):
            turn = self._turn(index, base)
            if self._begins(turn) and len(self._begun) > 2:
                for rank in self._receivers:
                    key = self._key(self._begun[0], base, self._job.rank, rank)
                    self._job.find(key, f"waiting to send more to {self._name}, which is the turn", rank)
                    self._job.store.key_value_delete(key)
            return carry(x, base)

        return send

    def receiving(self, carry: Callable) -> Callable:
        """Wraps `carry`, which receives the next value of a step, to report progress to the senders."""
        index = self._next()

        def receive(x: jax.Array | None, base: int):
            self._say(index, base, self.tasks.wait)
            return carry(x, base)

        receive.give_up = functools.partial(self._say, index)  # pyright: ignore[reportFunctionMemberAccess]
        return receive

    def _say(self, index: int, base: int, wait: Callable[[], None] | None = None) -> None:
        turn = self._turn(index, base)
        if self._begins(turn):
            if wait is not None:
                wait()
            for rank in self._senders:
                self._job.store.key_value_set(self._key(turn, base, rank, self._job.rank), "", allow_overwrite=True)

    def _begins(self, turn: int) -> bool:
        """Returns whether a value is the first of its turn; a list of few microbatches may skip turns."""
        if self._epoch != self._job.epoch:
            self._epoch = self._job.epoch
            self._begun.clear()
        if self._begun and self._begun[-1] == turn:
            return False
        self._begun.append(turn)
        return True

    def _next(self) -> int:
        self.per_step += 1
        return self.per_step - 1

    def _turn(self, index: int, base: int) -> int:
        """Returns the turn of a value: the number of full turns before it, counted over all steps."""
        count = (base & ((1 << self.number_bits) - 1)) // self.pieces_per_step * self.per_step + index
        return count // self.every

    def _key(self, turn: int, base: int, sender: int, receiver: int) -> str:
        return f"mpmd/ahead/{base >> NUMBER_BITS}/{self._name}/{turn}/{sender}/{receiver}"


class Limits:
    """The limits on the transfers of a program: which of them wait, and for which reports."""

    def __init__(
        self, job: Job, programs: StepPrograms, program: Program, number_bits: int = NUMBER_BITS,
        others: Iterable[StepPrograms] = (),
    ):  # fmt: skip
        self._number_bits = number_bits
        self._job, self._mesh, self._nbytes = job, programs.mesh, program.nbytes
        one_way = [loop.loop for p in (programs, *others) for loop in p.loops if _only_goes_forward(loop)]
        self._in_one_way = {edge_name(loop, v) for loop in one_way for v in loop.partition.names}
        self._is_one_way = all(map(_only_goes_forward, programs.loops))
        self._flows: dict[tuple[int, int], Flow] = {}
        self._tasks: dict[int, Tasks] = {}

    @classmethod
    def none(cls, job: Job, programs: StepPrograms, program: Program) -> "Limits":
        """Returns no limits, for a program that runs now and then between limited ones."""
        found = cls(job, programs, program)
        found._is_one_way, found._in_one_way = False, set()
        return found

    def flow(self, source: int, target: int, value: Value) -> Flow | None:
        """Returns the flow that limits a transfer; None where the schedule bounds it already."""
        senders, receivers = self._mesh.processes[source], self._mesh.processes[target]
        if not set(senders).isdisjoint(receivers):
            return None
        if not (self._is_one_way or value.name in self._in_one_way):
            return None
        if (source, target) not in self._flows:
            tasks, name = self._tasks.setdefault(target, Tasks()), f"group {target} from group {source}"
            self._flows[source, target] = Flow(self._job, name, senders, receivers, tasks)
            self._flows[source, target].number_bits = self._number_bits
        flow = self._flows[source, target]
        flow.every = min(flow.every, max(_FEWEST, _BYTES // max(1, self._nbytes.get(value.name, 0))))
        flow.tasks.every = min(flow.tasks.every, flow.every)
        return flow

    def begin(self) -> None:
        """Begins the transfers of a program, from the first one; equal programs get equal limits."""
        for flow in self._flows.values():
            flow.per_step = 0

    def counted(self, group: int, fun: Callable) -> Callable:
        """Wraps an executable of a group to count its calls, if a sender waits for the group."""
        return self._tasks[group].counted(fun) if group in self._tasks else fun

    def close(self, num_pieces: int) -> None:
        """Ends the transfers of a program, which have so many pieces."""
        for flow in self._flows.values():
            flow.pieces_per_step = max(1, num_pieces)  # empty values have no pieces


def _only_goes_forward(loop: LoopProgram) -> bool:
    return all(place.kind == "F" or task.executable is None for place, task in loop.tasks.items())


def give_up(acts: Iterable[Any], base: int) -> None:
    """Ends a step early: releases senders that would wait for this process to receive the rest (`acts`) of the step."""
    for act in acts:
        if hasattr(act, "give_up"):
            act.give_up(base)
