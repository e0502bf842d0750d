"""Meshes and schedules to run programs on: eight CPU devices, at most two per group."""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpmd
import scheduler
from programs.program import Program, pipelined

# All of these accumulate in microbatch order. Those of one tuple run the same tasks: equal to the last bit.
WHOLE_BACKWARD = ("GPipe", "OneFOneB", "EagerOneFOneB", "InterleavedOneFOneB", "InterleavedGPipe")
SPLIT_BACKWARD = ("ZeroBubbleH1", "ZeroBubbleH2", "InterleavedZeroBubble", "KimiK2", "ZeroBubbleV", "VHalf", "VMin")
SOME_SPLIT = ("DualPipeV",)
AVAILABLE = tuple(name for name in (*WHOLE_BACKWARD, *SPLIT_BACKWARD, *SOME_SPLIT) if hasattr(scheduler, name))

_TWO_STAGES_A_GROUP = ("InterleavedOneFOneB", "InterleavedGPipe", "KimiK2", "InterleavedZeroBubble")
_FOLDED_LIKE_A_V = ("ZeroBubbleV", "VHalf", "VMin", "DualPipeV")


def in_turns(*axes: Iterable[Any], slow: Iterable[str] = (), others=pytest.mark.exhaustive) -> list:
    """All combinations as parameters of a test.

    Those that take the values of each axis by turns are quick, or slow where a value has one of the names in `slow`.
    All others have the mark `others`.
    """
    values = [[v if isinstance(v, tuple) else (v,) for v in axis] for axis in axes]
    turns = range(max(map(len, values)))
    by_turns = {tuple(turn % len(axis) for axis in values) for turn in turns}
    combinations = []
    for positions in itertools.product(*(range(len(axis)) for axis in values)):
        parameters = [x for axis, i in zip(values, positions, strict=True) for x in axis[i]]
        names = [_name(parameter) for parameter in parameters]
        marks = others if positions not in by_turns else () if set(slow).isdisjoint(names) else pytest.mark.slow
        combinations.append(pytest.param(*parameters, id="-".join(names), marks=marks))
    return combinations


def _name(value) -> str:
    return getattr(value, "__name__", None) or str(value)


def make_schedule(name: str, num_stages: int):
    """The schedule of that name with two stages a group where it wants several."""
    schedule = getattr(scheduler, name)
    if name in _TWO_STAGES_A_GROUP:
        return schedule(num_stages, num_stages // 2)
    if name in _FOLDED_LIKE_A_V:
        return schedule(num_stages // 2)
    return schedule(num_stages)


def make_mesh(num_groups: int, axis_type: AxisType, axes: tuple[str, ...] = ()) -> Mesh:
    """The user's mesh: a "stage" axis, and two devices along each of `axes`."""
    shape = (num_groups, *(2,) * len(axes))
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("stage", *axes), (axis_type,) * len(shape), devices=devices)


def shared_device(num_groups: int) -> mpmd.MpmdMesh:
    """All groups on one device."""
    return mpmd.MpmdMesh.from_groups([Mesh(np.array(jax.devices()[:1]), ("data",))] * num_groups)


def pipeline(program: Program, schedule_name: str, where: str, **options):
    """The program's step as a pipeline.

    Args:
        program: what to run.
        schedule_name: of the `scheduler` package.
        where: "auto" or "explicit" (a mesh with such axes) or "shared" (all groups on one device).
        **options: of `mpmd.jit`.
    """
    schedule = make_schedule(schedule_name, program.num_stages)
    if where == "shared":
        mesh, mpmd_mesh = None, shared_device(schedule.num_groups)
    else:
        axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[where]
        mesh = make_mesh(schedule.num_groups, axis_type, program.mesh_axes)
        mpmd_mesh = mpmd.MpmdMesh(mesh, "stage")
    if program.specs is not None:
        options["in_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), program.specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    step = program.build(pipelined(schedule, mesh))
    return mpmd.jit(step, mpmd_mesh=mpmd_mesh, **{**program.jit_options, **options})
