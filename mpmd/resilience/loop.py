"""`mpmd.resilient`: a loop over steps that continues after the loss of processes, with the same bits."""

import collections
import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.errors import HangError
from mpmd.job import audits, exits, joining
from mpmd.job.job import Job
from mpmd.observe import ledger
from mpmd.pytrees import PyTree, TreeDef
from mpmd.resilience import keepers, layout
from mpmd.resilience.copies import Copies, say
from mpmd.resilience.meeting import NUMBERS, Meeting
from mpmd.resilience.notice import Notice
from mpmd.resilience.ranks import JobRanks, OnlyRank, Ranks

# After more losses than this of one rank, without a newer state between them, the job starts over.
_MOST_LOSSES = 3
_calls = 0
_is_running = False


@compat.api_boundary
def resilient(
    body: Callable[[int, PyTree], PyTree],
    state: PyTree,
    num_steps: int,
    *,
    copies: int = 1,
    every: int = 1,
    start: int = 0,
) -> PyTree:
    """Calls `body` for each step, and continues after the loss of processes with the bits of a run without losses.

    Under `scripts/launch_multihost.sh --restarts R` each process keeps its part of the state after each step in the
    memory of its host and of `copies` other hosts. When a process is killed, the launcher starts another one in its
    place. The new process calls `resilient` with a state of the same tree, and the others wait for it. If that is not
    possible, or after an error, the launcher restarts the whole job. Then the newest whole state is restored into the
    layout of the given one, also on fewer hosts or in other groups, and the loop continues with the next step. If no
    whole state is left, the loop begins at `start` with the given state, and prints one line about the loss.

    A process that gets SIGTERM finishes its step, waits until its state is kept, and ends; nothing is computed
    twice. Without that launcher option this is the plain loop. docs/resilience.md lists the failures that it survives.

    It costs host memory for two states, and the time in which copies hold up a step; a copy is sent while the next
    step runs.

    Args:
      body: `body(i, state)` returns the next state, or `(state, metrics)`; metrics are ignored. It calls steps of
        `mpmd.jit`, and its results depend only on `i` and `state`. All processes make the same calls in it.
      state: a pytree of arrays, numbers and strings. Each later state has the same tree, shapes and dtypes.
        When a state is restored, its `MpmdArray`s replace the given ones and use up their memory.
      num_steps: where the loop ends.
      copies: how many other hosts keep each part too.
      every: keeps the state after every so many steps, and after the last one.
      start: the first step, for a state that was restored from a checkpoint. A process that replaces a lost one may
        pass another `start`, because it may find a newer checkpoint.

    Returns:
      The state after the last step.

    Raises:
      ValueError: an argument is wrong or differs between processes, or `body` returned another tree, shape or dtype.
      CorruptionError: an audited step (`audit_every` of `mpmd.jit`) has found a device with wrong results, and no
        spare can take its place.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> mpmd.resilient(lambda i, x: x * 2 + i, jnp.float32(1), 3)
      Array(12., dtype=float32)
    """
    global _calls
    names = layout.names_of(state)
    num_steps, copies, every, start = _checked(body, names, state, num_steps, copies, every, start)
    with _one_at_a_time():
        call, _calls = _calls, _calls + 1
        return _Loop(call, (num_steps, copies, every, start), body, state, names).run()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Surrounds a loop. Raises a ValueError if this process is already in one."""
    global _is_running
    if _is_running:
        raise ValueError(
            "mpmd.resilient: it is called in the body of another one, whose copies it would replace. Make one loop of"
            " both, or a plain loop of the inner one."
        )
    _is_running = True
    try:
        yield
    finally:
        _is_running = False


class _Loop:
    """A call of `resilient`.

    Attributes:
      call: its number in the program.
      numbers: the arguments that are the same in all processes.
      is_used_up: the loop has begun with the given state, or this process was a spare and cannot read the state.
      is_new: this process was a spare. It may have found a later checkpoint, and pass another `start`.
    """

    def __init__(
        self,
        call: int,
        numbers: tuple[int, ...],
        body: Callable[[int, PyTree], PyTree],
        state: PyTree,
        names: Sequence[str],
    ):
        self.call, self.numbers = call, numbers
        self.given = _Given(names, state)
        self.is_used_up = self.is_new = False
        self._body, self._state, self._names = body, state, names
        self._notice, self._losses = Notice(os.environ), _Losses()

    def run(self) -> PyTree:
        """Returns the state after the last step."""
        job = joining.current()
        if job is None:
            if keepers.own(os.environ, OnlyRank.address) is None:
                return self._steps(self.numbers, self._state, None, None)
            return self._attempt(OnlyRank())
        self.is_used_up = self.is_new = job.is_apart
        if self.call:
            job.bind()  # a replacement would come to the first loop
        with job.going_on():
            while True:
                try:
                    return self._attempt(JobRanks(job))
                except Exception as error:
                    if not job.has_lost(error):
                        raise
                    if not isinstance(error, HangError | jax.errors.JaxRuntimeError | OSError):
                        raised = exits.error_text(error)
                        say(f"rank {job.rank}: as a rank was lost, the step raised {raised}; it comes again")
                _say_lost(job)
                self._losses.note([taken.rank for taken in job.lost])
                if joining.give_up() and _speaks(job):
                    say("a save that was not finished is given up")
                job.go_on()
                self.is_used_up = True

    def _attempt(self, ranks: Ranks) -> PyTree:
        """Runs the loop from the newest whole state on, until its end or the loss of a rank."""
        own = keepers.own(os.environ, ranks.address)
        meeting = Meeting(ranks, own, self.call, self.numbers, self.is_used_up, self.is_new, self.given.alike)
        if self.is_used_up:
            joining.begin_again()
        num_steps, copies, _, start = meeting.numbers
        with ledger.during(ledger.OTHER):
            version = meeting.newest_readable(self._names, self._state, start, num_steps)
        if version is None:
            # `body` may change the tree, and the given one is needed later.
            state, last = jax.tree.map(lambda leaf: leaf, self._state), None
        else:
            state, last = version
            self._losses.goes_on_after(last)
        return self._steps(meeting.numbers, state, last, meeting.copies(copies, last))

    def _steps(self, numbers: tuple[int, ...], state: PyTree, last: int | None, keeping: Copies | None) -> PyTree:
        """Runs the steps after the step `last`, if the state is its result."""
        num_steps, _, every, first = numbers
        begins = f"begins with step {first}"
        if last is not None:
            first, begins = last + 1, f"goes on after step {last}, from memory"
        with contextlib.ExitStack() as around:
            begin_step = around.enter_context(_accounted(begins))
            if keeping is not None:
                around.enter_context(self._notice.heeded())
                around.enter_context(contextlib.closing(keeping))
            for i in range(first, num_steps):
                begin_step(i)
                state = self.given.next(self._body(i, state), i)
                if keeping is None or ((i + 1) % every and i + 1 < num_steps):
                    continue
                with ledger.during(ledger.CHECKPOINT):
                    keeping.keep(i, state, self.given.signature)
                if self._notice.came:
                    break
            if keeping is not None:
                keeping.finish()
                if self._notice.came:
                    rank, kept_step = jax.process_index(), keeping.whole
                    say(f"rank {rank} was told to end (SIGTERM); the state after step {kept_step} is kept")
                    sys.exit(exits.TOLD_TO_END)
            audits.settle()
        return state


class _Losses:
    """The number of losses of each rank since the loop last made progress."""

    def __init__(self):
        self._newest, self._counts = -1, collections.Counter[int]()

    def goes_on_after(self, step: int) -> None:
        """Notes that the loop continues with the state after this step."""
        if step > self._newest:
            self._newest = step
            self._counts.clear()

    def note(self, ranks: Sequence[int]) -> None:
        """Counts the loss of some ranks. Raises a HangError if one was lost too often: the next loss is likely."""
        self._counts.update(ranks)
        (rank, count), *_ = self._counts.most_common(1)
        if count > _MOST_LOSSES:
            after = f" after step {self._newest}" if self._newest >= 0 else ""
            raise HangError(f"mpmd.resilient: rank {rank} was lost {count} times{after}; the job starts over.")


@contextlib.contextmanager
def _accounted(begins: str) -> Iterator[Callable[[int], None]]:
    """Surrounds the loop: writes into the ledger how it begins; yields a function that notes the begin of a step."""
    job, account = joining.current(), ledger.of_process(jax.process_index)
    if account is not None:
        account.event(ledger.LOOP + begins)

    def begin_step(step: int) -> None:
        if job is not None:
            job.activity.loop_step = step
        if account is not None:
            account.step = step

    yield begin_step
    if job is not None:
        job.activity.loop_step = None
    if account is not None:
        account.leave_loop()


def _speaks(job: Job) -> bool:
    """Returns whether this process is the first of the ranks that were not lost."""
    return job.rank == min(set(range(job.num_ranks)).difference(taken.rank for taken in job.lost), default=-1)


def _say_lost(job: Job) -> None:
    if (account := ledger.of_process()) is not None:
        texts = (f"rank {taken.rank} (spare {taken.spare} in its place)" for taken in job.lost)
        account.event(f"lost: {', '.join(texts)}", is_recovering=True)
    lost = sorted({taken.rank for taken in job.lost})  # one may be lost again before its spare has come
    if _speaks(job):
        if len(lost) == 1:
            say(f"rank {lost[0]} was lost; all others wait for the spare that takes the place")
        else:
            ranks = ", ".join(map(str, lost))
            say(f"the ranks {ranks} were lost; all others wait for the spares that take the places")


def _checked(body: object, names: Sequence[str], state: object, *numbers: int) -> list[int]:
    """Returns the numbers as Python integers. Raises a ValueError if an argument is wrong."""
    faults: list[str] = []
    if not callable(body):
        faults.append(f"body is a {type(body).__name__}, not a function")
    for (name, least), value in zip(NUMBERS.items(), numbers, strict=True):
        try:
            if isinstance(value, bool):
                faults.append(f"{name} is {value}, not a whole number")
            elif operator.index(value) < least:
                faults.append(f"{name} is {value}; it must be at least {least}")
        except TypeError:
            faults.append(f"{name} is {value!r:.60}, not a whole number")
    if faults:
        raise ValueError("mpmd.resilient: " + "; ".join(faults) + ".")
    for name, leaf in zip(names, jax.tree.leaves(state), strict=True):
        layout.describe(name, leaf)
    return list(map(operator.index, numbers))


class _Given:
    """The given state of a loop. Each later state must have the same tree, shapes and dtypes."""

    def __init__(self, names: Sequence[str], state: PyTree):
        self._names = names
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = [layout.describe(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        kinds = [f"{leaf.text} of all" if leaf.kind == layout.SHARED else "its own" for leaf in self._leaves]
        self.alike = [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True)]  # in all processes
        self.signature: tuple | None = None  # of the newest state

    def next(self, result: PyTree, step: int) -> PyTree:
        """Returns the state in the result of `body`. Raises a ValueError if there is no such state."""
        is_pair = isinstance(result, tuple) and len(result) == 2
        state = result[0] if is_pair and _structure(result[0]) == self._structure else result
        if state is result and (isinstance(found := _structure(result), str) or found != self._structure):
            raise ValueError(
                f"mpmd.resilient: body({step}, state) returned another tree than it was given.\n"
                f"  given:    {self._structure}\n  returned: {found}\n  Return the next state, or (state, metrics)."
            )
        if (signature := layout.signature(leaves := jax.tree.leaves(state))) != self.signature:
            returned = [layout.describe(name, leaf) for name, leaf in zip(self._names, leaves, strict=True)]
            for mine, theirs in zip(self._leaves, returned, strict=True):
                if layout.misfit([theirs], [mine]):
                    raise ValueError(
                        f"mpmd.resilient: body({step}, state) returned {theirs.name} as {theirs.text}, and it was given"
                        f" {mine.text}: after a loss, the loop could not go on. Return each leaf in the shape and dtype"
                        " of the given one, or begin with a state as body returns it."
                    )
            self.signature = signature
        if not all(leaf.flags.carray for leaf in leaves if type(leaf) is np.ndarray):
            state = jax.tree.map(_as_put_back, state)
        return state


def _as_put_back(leaf: object) -> object:
    """Gives a numpy array the memory layout of a restored one: numpy adds in the order of memory."""
    return np.require(leaf, requirements=["C", "A"]) if type(leaf) is np.ndarray else leaf


def _structure(tree: PyTree) -> TreeDef | str:
    """Returns the structure of a tree. For a value that is no tree (a dict with numbers and texts as keys): why."""
    try:
        return jax.tree.structure(tree)
    except ValueError as error:
        return f"no tree ({error})"
