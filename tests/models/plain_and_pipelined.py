"""How a real model's training step is tried: as a pipeline and under plain `jax.jit`, and what the pipeline sends."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AxisType
from programs.program import assert_same, host

import mpmd
import scheduler
from scheduler import Send

ONCE_A_STEP = 1024  # bytes from one group to another for each step: scalars; a kernel of these models is larger


def stage_mesh(num_stages: int, axis_type: AxisType = AxisType.Explicit, **axes: int) -> jax.sharding.Mesh:
    """A mesh with an axis "stage", and others; Explicit is what `jax.make_mesh` gives by itself."""
    shape = (num_stages, *axes.values())
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, ("stage", *axes), (axis_type,) * len(shape), devices=devices)


def train_both(
    step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
    mesh: jax.sharding.Mesh,
    *,
    home: Callable[[str], int | set[int] | None],
    rtol: float = 2e-5,
    boundary: int | None = None,
    shared: int = 0,
    plain: tuple[Any, Any] = (None, None),
    **options,
) -> mpmd.Compiled:
    """Trains three steps as a 1F1B pipeline and under plain `jax.jit`; the first and the third are equal.

    Args:
        step: `step(state, batch, schedule) -> (state, metrics)`, a user's own.
        state: the first state.
        batches: three of them.
        mesh: with an axis "stage".
        home: the group (or groups) where a leaf of the state belongs, by its path; None: anywhere.
        rtol: relative to the largest element of each array.
        boundary: the most bytes that may go from one group to another for each microbatch; None: any.
        shared: bytes of the parameters that several stages read, whose gradients meet and which are sent back.
        plain: shardings of the state and of a batch under plain `jax.jit`.
        **options: of `mpmd.jit`.

    Returns:
        The compiled pipeline.
    """
    batches = list(batches)
    schedule = scheduler.OneFOneB(mesh.shape["stage"])
    reference = jax.jit(functools.partial(step, schedule=None))
    pipelined = mpmd.jit(functools.partial(step, schedule=schedule), mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"), **options)
    compiled = pipelined.lower(state, batches[0]).compile()
    expected, actual = jax.device_put(state, plain[0]), state
    for number, batch in enumerate(batches):
        expected, expected_metrics = reference(expected, jax.device_put(batch, plain[1]))
        actual, metrics = compiled(actual, batch)
        if number in (0, 2):
            assert_same(host((actual, metrics)), host((expected, expected_metrics)), rtol)
    assert_nothing_large_crosses(compiled, boundary, shared)
    assert_at_home(compiled, state, home)
    return compiled


def assert_nothing_large_crosses(compiled: mpmd.Compiled, boundary: int | None, shared: int) -> None:
    """No parameter, gradient or optimizer state is sent: all that goes once a step are scalars, and what is shared."""
    once, each = defaultdict(dict), defaultdict(dict)
    for group, instructions in enumerate(compiled.program.groups):
        for i in instructions:
            if isinstance(i, Send):
                found = once if i.value.microbatch is None else each
                found[group, i.to_group][i.value.name] = compiled.program.nbytes[i.value.name]
    problems = [
        f"group {source} sends group {target} {sum(values.values())} bytes {when}: {values}"
        for found, limit, when in ((once, ONCE_A_STEP + shared, "once a step"), (each, boundary, "for each microbatch"))
        for (source, target), values in found.items()
        if limit is not None and sum(values.values()) > limit
    ]
    assert not problems, "\n".join(problems)


def assert_at_home(compiled: mpmd.Compiled, state: Any, home: Callable[[str], int | set[int] | None]) -> None:
    """Each array of the state goes in and comes out where it belongs; one number or none may be anywhere."""
    (ins, *_), _ = compiled.input_shardings
    outs, *_ = compiled.output_shardings
    problems = []
    for when, tree in (("goes in to", ins), ("comes out of", outs)):
        for (path, leaf), sharding in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(tree), strict=True):
            where = home(name := jax.tree_util.keystr(path))
            if where is None or leaf.size <= 1:
                continue
            wanted = {where} if isinstance(where, int) else where
            if set(sharding.mesh_ids) != wanted:
                problems.append(f"{name} {when} groups {sorted(sharding.mesh_ids)}, not {sorted(wanted)}")
    assert not problems, "\n".join(problems)
