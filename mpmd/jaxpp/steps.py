"""JaxPP's loops and jitted steps: `treduce` and `mpmd.jit` with its argument orders and its default operation."""

import contextlib
import contextvars
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypedDict, Unpack

import jax

import mpmd.ops.treduce as loops
import scheduler
from mpmd import _jax_compat as compat
from mpmd.api import Jitted, jit
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.arrays.specs import as_spec
from mpmd.compile.compiler import CompilerOptions
from mpmd.compiled import Compiled
from mpmd.jaxpp.schedules import JaxppTask, TaskType
from mpmd.observe.records import Ran
from mpmd.ops import stage_end
from mpmd.ops.reductions import Add, Concat, Operation
from mpmd.pytrees import PyTree
from mpmd.users_frame import users_frame
from scheduler import Task

default_op = (Concat(), Add)


class JaxppOperation(Operation):
    """An `Operation` from a reduction of JaxPP, which is an object with `state` and `update`."""

    def __init__(self, op: Any):
        self.op = op

    def init(self, aval: Any, num_microbatches: int) -> jax.Array:
        return self.op.state(num_microbatches, jax.ShapeDtypeStruct(aval.shape, aval.dtype))

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return self.op.update(acc, x, index)


def _operations(operation: PyTree) -> PyTree:
    def is_theirs(op: object) -> bool:
        return callable(getattr(op, "state", None)) and callable(getattr(op, "update", None))

    return jax.tree.map(lambda op: JaxppOperation(op) if is_theirs(op) else op, operation, is_leaf=is_theirs)


@compat.api_boundary
def treduce(
    fun: Callable[[PyTree], PyTree], xs: PyTree, schedule: scheduler.Schedule | str | None, axis: int = 0,
    operation: PyTree = default_op,
) -> PyTree:  # fmt: skip
    """Calls `mpmd.treduce`; by default stacks the first output of `fun` (the losses) and sums the second (gradients).

    Args:
      fun, xs, axis: the arguments of `mpmd.treduce`.
      schedule: a schedule of `mpmd.jaxpp` or `scheduler`, its name, or None.
      operation: a pytree prefix of the outputs of `fun`, with leaves `Add`, `Max`, `Concat(axis)`, operations of
        `mpmd`, or objects with JaxPP's methods `state(n, a)` and `update(state, update, index)`.
    """
    # For `mpmd.treduce` a list is a list of microbatches; for JaxPP it is an ordinary pytree.
    return loops.treduce(lambda x: fun(x[0]), (xs,), schedule, axis=axis, operation=_operations(operation))


@compat.api_boundary
def treduce_i(
    fun: Callable[[jax.Array], PyTree], length: int, schedule: scheduler.Schedule | str | None,
    operation: PyTree = default_op,
) -> PyTree:  # fmt: skip
    """Calls `mpmd.treduce_i`, with the default operation of `treduce`."""
    return loops.treduce_i(fun, length, schedule, operation=_operations(operation))


def pipeline_enter_stage(anchor: PyTree, name: str | None = None) -> PyTree:
    """Calls `mpmd.mark_stage_end`. This is its old name in JaxPP."""
    message = "pipeline_enter_stage is JaxPP's old name: write mark_stage_end."
    warnings.warn(message, DeprecationWarning, stacklevel=users_frame())
    return stage_end.mark_stage_end(anchor, name)


# --- steps --------------------------------------------------------------------------------------------


class JitOptions(TypedDict, total=False):
    """The options of `mpmd.jit` in JaxPP's form: None is the same as no option."""

    in_shardings: PyTree
    out_shardings: PyTree
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    compiler_options: CompilerOptions | None


@compat.api_boundary
def mpmd_jit_with_loop(
    fun: Callable,
    mpmd_mesh: MpmdMesh,
    *,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    **options: Unpack[JitOptions],
) -> "JaxppStep":
    """Calls `mpmd.jit`. An option None is the same as no option.

    Args:
      fun, mpmd_mesh: the arguments of `mpmd.jit`.
      in_specs, out_specs: other names for `in_shardings` and `out_shardings`.
      options: `in_shardings`, `out_shardings`, `static_argnums`, `static_argnames`, `donate_argnums`,
        `donate_argnames`, `compiler_options`, as for `mpmd.jit`; the mpmd axis in a spec is ignored.

    Returns:
      A callable with `.compile(*args)`. The result of that has `.in_shardings`: `(args, kwargs)` of `MpmdSharding`.

    Raises:
      ValueError: an argument is given under both names.
    """
    for name, specs in (("in", in_specs), ("out", out_specs)):
        if specs is not None and options.get(f"{name}_shardings") is not None:
            raise ValueError(f"mpmd_jit_with_loop: {name}_shardings and {name}_specs are one argument. Pass one.")
    if in_specs is not None:
        options["in_shardings"] = in_specs
    if out_specs is not None:
        options["out_shardings"] = out_specs
    return JaxppStep(fun, mpmd_mesh, **options)


@compat.api_boundary
def mpmd_jit_by_yield(
    fun: Callable, mpmd_mesh: MpmdMesh, *, target_num_stages: int | None = None, **options: Unpack[JitOptions]
) -> "JaxppStep":
    """Calls `mpmd.jit` for a function without a loop, with stages between its marks.

    Args:
      target_num_stages: the number of stages; it is ignored, because the marks determine it.
      fun, mpmd_mesh, options: the arguments of `mpmd_jit_with_loop`.
    """
    del target_num_stages
    return JaxppStep(fun, mpmd_mesh, **options)


@compat.api_boundary
def mpmd_jit_rev(fun: Callable, mpmd_mesh: MpmdMesh, *, out_refs: PyTree, **options: Unpack[JitOptions]) -> "JaxppStep":
    """Calls `mpmd.jit` for a function without a loop and with given groups for each result, such as an initial state.

    Args:
      out_refs: the tree of the results, with a set of groups for each.
      fun, mpmd_mesh, options: the arguments of `mpmd_jit_with_loop`. `out_shardings` is the same tree of specs, or None
        for whole copies in each group.
    """

    def sharding(groups: Iterable[int], wish: Any = None) -> MpmdSharding:
        return MpmdSharding(mpmd_mesh, groups, as_spec(getattr(wish, "spec", wish)), getattr(wish, "memory_kind", None))

    wishes = options.get("out_shardings")
    options["out_shardings"] = jax.tree.map(sharding, *((out_refs,) if wishes is None else (out_refs, wishes)))
    return JaxppStep(fun, mpmd_mesh, **options)


class JaxppStep:
    """A step with JaxPP's interface and the attributes of `mpmd.jit`'s result (`.trace`, `.lower`, …)."""

    def __init__(self, fun: Callable, mpmd_mesh: MpmdMesh, **options: Unpack[JitOptions]):
        functools.update_wrapper(self, fun)
        self.mpmd_mesh = mpmd_mesh
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        for name in {"static_argnames", "donate_argnames"} & given.keys():
            given[name] = given[name] if isinstance(given[name], str) else tuple(given[name])
        self._jitted: Jitted = jit(fun, mpmd_mesh=mpmd_mesh, **given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_jitted" not in vars(self):
            raise AttributeError(name)
        return getattr(self._jitted, name)

    @compat.api_boundary
    def compile(self, *args: PyTree, **kwargs: PyTree) -> "JaxppCompiled":
        """Compiles the step for arguments of these shapes (`jax.ShapeDtypeStruct` is enough)."""
        traced = self._jitted.trace(*args, **kwargs)
        return JaxppCompiled(traced.lower().compile(), traced.jaxpr, self.mpmd_mesh)

    trace_and_place = compile

    @compat.api_boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if _task_times.get() is None:
            return self._jitted(*args, **kwargs)
        call = self._jitted._read(args, kwargs)
        given, named = jax.tree.unflatten(call.tree, call.leaves)  # without static arguments
        return self.compile(*args, **kwargs)(*given, **named)


class JaxppCompiled:
    """A compiled step with JaxPP's interface and the attributes of `mpmd.Compiled` (`.explain()`, `.program`, …)."""

    def __init__(self, compiled: Compiled, closed_jaxpr: compat.ClosedJaxpr, mpmd_mesh: MpmdMesh):
        self._compiled = compiled
        self.closed_jaxpr = closed_jaxpr  # the traced step
        self.mpmd_mesh = mpmd_mesh

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_compiled" not in vars(self):
            raise AttributeError(name)
        return getattr(self._compiled, name)

    @property
    def in_shardings(self) -> PyTree:
        """`(args, kwargs)` of `MpmdSharding`."""
        return self._compiled.input_shardings

    @property
    def out_shardings(self) -> PyTree:
        """The result's tree of `MpmdSharding`."""
        return self._compiled.output_shardings

    @compat.api_boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        times = _task_times.get()
        if times is None:
            return self._compiled(*args, **kwargs)
        profile = self._compiled.profile(args, kwargs, steps=1)
        for ran in (ran for step in profile.steps for ran in step.runs):
            times[_title(ran)].append(1000 * (ran.end - ran.start))
        return profile.result


# --- times of tasks -------------------------------------------------------------------------------------

_task_times: contextvars.ContextVar[dict[str, list[float]] | None] = contextvars.ContextVar("times", default=None)


@contextlib.contextmanager
def collect_task_times_ms(enabled: bool = True) -> Iterator[dict[str, list[float]] | None]:
    """Measures the tasks of this module's steps while the context lasts: `{"fwd_0": [milliseconds, …], …}`.

    A call runs the step twice, the first time unmeasured; `Compiled.profile` reports more. In a job, all processes get
    the times of all groups.

    Args:
      enabled: if False, nothing is measured, and the value is None.
    """
    if not enabled:
        yield None
        return
    token = _task_times.set(defaultdict(list))
    try:
        yield _task_times.get()
    finally:
        _task_times.reset(token)


def _title(ran: Ran) -> str:
    """Returns a title such as `fwd_0`, without the microbatch; for other programs, their name."""
    return "+".join(map(_title_of_task, ran.tasks)) or ran.name


def _title_of_task(task: Task) -> str:
    if task.kind == "R":  # JaxPP has no such task
        return f"recompute_{task.stage}"
    return str(JaxppTask.make(task.stage, task.microbatch, TaskType(task.kind))).partition("__")[0]


# --- names of JaxPP that have no counterpart ------------------------------------------------------------


def _gone(name: str, advice: str) -> Callable[..., NoReturn]:
    def gone(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"mpmd.jaxpp.{name} is not here: {advice}")

    gone.__name__ = gone.__qualname__ = name
    gone.__doc__ = f"Raises a NotImplementedError: {advice}"
    return gone


_LOOP = "write treduce(fun, xs, schedule=..., operation=...), with the microbatches along axis 0."
RemoteMpmdMesh = _gone(
    "RemoteMpmdMesh", "write MpmdMesh(jax_mesh, axis_name) in a script that calls mpmd.initialize(), and start it by"
    " scripts/launch_multihost.sh."
)  # fmt: skip
ArrayRef = _gone("ArrayRef", "a step gives MpmdArrays; numpy.asarray(x) reads one, mpmd.device_get(tree) many.")
pipelined = _gone("pipelined", "write mpmd_jit_with_loop(fun, mpmd_mesh).")
accumulate_grads = _gone("accumulate_grads", _LOOP)
LoopOutput = _gone("LoopOutput", _LOOP)
run_replicated_dced = _gone("run_replicated_dced", "what every group needs is computed in each of them without a word.")
