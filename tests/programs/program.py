"""A program: one complete, small training step that can be run in many ways.

A program is written once against `Tools` (what marks a stage, what reduces over microbatches). Given the
tools of `plain_loop` it contains nothing of this library: marks are the identity and the reduction is a scan
over the microbatches, so `jax.jit` of it is an independent reference. Given the tools of `pipelined` the
same code runs as a pipeline.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpmd

NUM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a program may use of the runtime that it is tried on.

    Attributes:
        mark: `mpmd.mark_stage_end` or the identity.
        reduce: `reduce(fun, xs, *, axis=0, operation=mpmd.Add)`.
        reduce_i: `reduce_i(fun, n, *, operation=mpmd.Add)`.
        mesh: the mesh that the user has, or None for one device.
    """

    mark: Callable[[Any], Any]
    reduce: Callable[..., Any]
    reduce_i: Callable[..., Any]
    mesh: Mesh | None = None

    def constrain(self, x: jax.Array, *spec: str | None) -> jax.Array:
        """`x` with this sharding on the user's mesh, said in the way that its axis types want."""
        if self.mesh is None:
            return x
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A training step and what it is fed.

    Attributes:
        name: as it appears in the test's id.
        make_state: the first state, from a key.
        make_batch: the batch of one step, from a key.
        build: the step, from tools: `step(state, batch) -> (state, metrics)`.
        num_stages: how many stages its schedule must have.
        mesh_axes: axes beside the pipeline's that the program names; it is tried on meshes with these only.
        rtol: relative to the largest element of each array.
        jit_options: further options for `jax.jit` and `mpmd.jit`.
        call: how the step is called, for programs with further arguments.
        specs: PartitionSpecs (a prefix of `(state, batch)`) that the arguments come in, or None.
        num_microbatches: in one step.
        needs: a package that may not be installed.
    """

    name: str
    make_state: Callable[[jax.Array], Any]
    make_batch: Callable[[jax.Array], Any]
    build: Callable[[Tools], Callable[..., Any]]
    num_stages: int = 4
    mesh_axes: tuple[str, ...] = ()
    rtol: float = 2e-5
    jit_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call: Callable[[Callable[..., Any], Any, Any], Any] = lambda step, state, batch: step(state, batch)
    specs: Any = None
    num_microbatches: int = 4
    needs: str | None = None

    def __str__(self) -> str:
        return self.name

    def state(self) -> Any:
        """The state before the first step: the same values, in new arrays, at every call."""
        return self.make_state(jax.random.key(0))

    def batches(self, num_steps: int = NUM_STEPS) -> Iterator[Any]:
        """New values for every step."""
        for step in range(num_steps):
            yield self.make_batch(jax.random.fold_in(jax.random.key(1), step))

    def run(self, step: Callable[..., Any], num_steps: int = NUM_STEPS) -> list[Any]:
        """Calls `step` some times in a row; gives `(state, metrics)` of each as host values."""
        state, history = self.state(), []
        for batch in self.batches(num_steps):
            state, metrics = self.call(step, state, batch)
            history.append(host((state, metrics)))
        return history

    @functools.cached_property
    def expected(self) -> list[Any]:
        """What `jax.jit` of the plain loop gives on one device."""
        return self.run(jax.jit(self.build(plain_loop()), **self.jit_options))


def plain_loop() -> Tools:
    """The reference: no marks, and a `jax.lax.scan` over the microbatches."""

    def reduce_i(fun, n, *, operation=mpmd.Add):
        found = []  # the tree of the outputs, and those of float0, which scan does not stack

        def body(_, i):
            leaves, tree = jax.tree.flatten(fun(i))
            found[:] = tree, [np.zeros((n, *x.shape), x.dtype) if _has_no_values(x) else None for x in leaves]
            return None, [x for x in leaves if not _has_no_values(x)]

        stacked = iter(jax.lax.scan(body, None, jnp.arange(n))[1])
        tree, leaves = found
        outputs = tree.unflatten([next(stacked) if x is None else x for x in leaves])

        def combine(one_operation, *subtrees):
            return jax.tree.map(functools.partial(_combine, one_operation), *subtrees)

        return jax.tree.map(combine, operation, outputs)

    def reduce(fun, xs, *, axis=0, operation=mpmd.Add):
        n = jax.tree.leaves(xs)[0].shape[axis]
        return reduce_i(
            lambda i: fun(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis, False), xs)),
            n,
            operation=operation,
        )

    return Tools(mark=lambda x: x, reduce=reduce, reduce_i=reduce_i)


def _has_no_values(x) -> bool:
    return jnp.result_type(x) == jax.dtypes.float0


def _combine(operation, stacked):
    if _has_no_values(stacked):
        return stacked[0]
    if operation is mpmd.Concat:
        return stacked
    values = list(stacked)
    if operation is mpmd.Add:
        return functools.reduce(operator.add, values)
    if operation is mpmd.Mean:
        return functools.reduce(operator.add, values) / len(values)
    if operation is mpmd.Max:
        return functools.reduce(jnp.maximum, values)
    assert operation is mpmd.Min, operation
    return functools.reduce(jnp.minimum, values)


def pipelined(schedule: Any, mesh: Mesh | None = None) -> Tools:
    """The library: `schedule` may be None for an ordinary loop."""
    return Tools(
        mark=mpmd.mark_stage_end,
        reduce=functools.partial(mpmd.treduce, schedule=schedule),
        reduce_i=functools.partial(mpmd.treduce_i, schedule=schedule),
        mesh=mesh,
    )


def host(tree: Any) -> Any:
    """`tree` with every leaf as a numpy array; of a typed key, its data."""

    def one(leaf):
        local = getattr(leaf, "first_mpmd_replica", leaf)
        if hasattr(local, "dtype") and jax.dtypes.issubdtype(local.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(local))
        return np.asarray(leaf)

    return jax.tree.map(one, tree)


def assert_same(actual: Any, expected: Any, rtol: float) -> None:
    """Compares host trees: structure, shapes and dtypes exactly, floats within `rtol` of each array's scale.

    With `rtol=0` every bit must be equal.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    problems = []
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        if (a.shape, a.dtype) != (e.shape, e.dtype):
            problems.append(f"{where}: {a.dtype}{a.shape} is not {e.dtype}{e.shape}")
        elif e.dtype == jax.dtypes.float0:
            continue
        elif rtol == 0 or not jnp.issubdtype(e.dtype, jnp.floating):
            if a.tobytes() != e.tobytes():
                problems.append(f"{where}: {a} is not {e}")
        else:
            a, e = a.astype(np.float64), e.astype(np.float64)
            scale = np.max(np.abs(e), initial=0.0, where=np.isfinite(e))
            if not np.allclose(a, e, rtol=rtol, atol=rtol * scale, equal_nan=True):
                with np.errstate(invalid="ignore"):
                    problems.append(f"{where}: off by {np.nanmax(np.abs(a - e))} at scale {scale}\n{a}\n{e}")
    assert not problems, "\n".join(problems)


def assert_same_history(actual: list[Any], expected: list[Any], rtol: float) -> None:
    """Compares every step's state and metrics."""
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_same(a, e, rtol)
        except AssertionError as error:
            raise AssertionError(f"at step {number}: {error}") from None
