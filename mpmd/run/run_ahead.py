"""Bounds how far a group runs ahead of another one that it sends to.

In training nothing else is needed: forward passes wait for parameters, and these for gradients. In a loop that only
goes forward, and in a step without a loop, nothing holds a fast stage up: it would start all its tasks, of later steps
too, and each value that it sends is kept until it is taken. So the receiver says after every few values that it has
come this far, and the sender goes no further ahead than that. The receiver in turn waits for its own tasks.
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

# From one word of the receiver to the next; a sender is at most three times as far ahead.
_FEWEST, _MOST = 4, 256  # values
_BYTES = 16 << 20  # of small values


class Tasks:
    """A receiving group's tasks: `wait` returns when all but the latest few are done."""

    def __init__(self):
        self.every = _MOST
        self._count = 0
        self._done: deque[jax.Array] = deque()

    def counted(self, fun: Callable) -> Callable:
        """`fun`, an executable of the group."""

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
    """A value that is there as soon as `x` is; `x` may be donated meanwhile."""
    return False


class Flow:
    """The values that one group sends to another, as one process of either sees them.

    Args:
      senders, receivers: the processes of both groups.
      tasks: of the receiving group.
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
        """`carry`, which sends the next value of a step."""
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
        """`carry`, which receives the next value of a step."""
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
        """Whether a value is the first one of its turn; a list of few microbatches may leave turns out."""
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
        """How often as many values as are in a turn came before, over all steps."""
        count = (base & ((1 << self.number_bits) - 1)) // self.pieces_per_step * self.per_step + index
        return count // self.every

    def _key(self, turn: int, base: int, sender: int, receiver: int) -> str:
        return f"mpmd/ahead/{base >> NUMBER_BITS}/{self._name}/{turn}/{sender}/{receiver}"


class Limits:
    """Which transfers of a program are held up, and by what."""

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
        """Of a program that runs now and then between others, which are limited."""
        found = cls(job, programs, program)
        found._is_one_way, found._in_one_way = False, set()
        return found

    def flow(self, source: int, target: int, value: Value) -> Flow | None:
        """What holds up a transfer; None where the schedule does."""
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
        """The transfers of a program come, the first one first; those of equal programs are held up alike."""
        for flow in self._flows.values():
            flow.per_step = 0

    def counted(self, group: int, fun: Callable) -> Callable:
        """An executable of a group, counted if the group is waited for."""
        return self._tasks[group].counted(fun) if group in self._tasks else fun

    def close(self, num_pieces: int) -> None:
        """All transfers have been seen."""
        for flow in self._flows.values():
            flow.pieces_per_step = num_pieces


def _only_goes_forward(loop: LoopProgram) -> bool:
    return all(place.kind == "F" or task.executable is None for place, task in loop.tasks.items())


def give_up(acts: Iterable[Any], base: int) -> None:
    """A step ends on the way: nobody need wait until this process receives the rest of it.

    Args:
      acts: what the instructions that are left would call.
    """
    for act in acts:
        if hasattr(act, "give_up"):
            act.give_up(base)
