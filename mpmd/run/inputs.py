"""Brings the arguments of a call to the groups that read them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.layouts import mpmd_sharding
from mpmd.arrays.sharding import MpmdSharding
from mpmd.compile.step import StepPrograms
from mpmd.run import device_put
from mpmd.tracing.arguments import check_leaves


class Inputs:
    """What a compiled step takes.

    Attributes:
      shardings, avals: per flat argument.
      constants: the arrays that the step's function has captured, `{group: array}` each.
    """

    def __init__(self, programs: StepPrograms):
        mesh, trace = programs.mesh, programs.outline.trace
        invars, num_constants = trace.jaxpr.invars, len(trace.consts)
        shardings = [
            mpmd_sharding(mesh, groups, programs.layouts[v])
            for v, groups in zip(invars, programs.outline.inputs, strict=True)
        ]
        here = () if mesh.is_described else mesh.local_groups
        self.constants = [
            {g: device_put.put(c, s.group_sharding(g)) for g in s.groups if g in here}
            for c, s in zip(trace.consts, shardings, strict=False)
        ]
        self.shardings = shardings[num_constants:]
        self.avals: list[Any] = [v.aval for v in invars[num_constants:]]

    def fit(self, leaves: Sequence[Any]) -> bool:
        """Whether every MpmdArray is where the step reads it, or may be put there."""
        for x, sharding in zip(leaves, self.shardings, strict=True):
            if (
                type(x) is MpmdArray
                and x._mpmd_sharding is not sharding
                and x._committed
                and not x._mpmd_sharding.is_equivalent_to(sharding, x.ndim)
            ):
                return False
        return True

    def misplaced(self, leaves: Sequence[Any]) -> list[int]:
        """The positions of MpmdArrays that are elsewhere and may be moved."""
        return [
            i
            for i, (x, sharding) in enumerate(zip(leaves, self.shardings, strict=True))
            if type(x) is MpmdArray and not x._committed and not x._mpmd_sharding.is_equivalent_to(sharding, x.ndim)
        ]

    def place(self, leaves: Sequence[Any]) -> list[dict[int, jax.Array]]:
        """Per leaf, its array in each group that reads it. Those that are not there are put there in one batch."""
        arguments: list[dict[int, jax.Array]] = []
        pending: list[tuple[dict[int, jax.Array], int]] = []
        values, shardings = [], []
        for x, sharding, aval in zip(leaves, self.shardings, self.avals, strict=True):
            if type(x) is MpmdArray:
                x._check_not_gone()
                if x._mpmd_sharding is sharding or x._mpmd_sharding.is_equivalent_to(sharding, x.ndim):
                    arguments.append(x._arrays)
                    continue
                x = x._readable()
            if isinstance(x, jax.Array):
                _check_movable(x, sharding)
            else:
                x = np.array(x, aval.dtype)  # a copy: on CPU devices the array may stay where numpy has it
            placed: dict[int, jax.Array] = {}
            arguments.append(placed)
            for group in sharding.groups:
                if group in sharding.mpmd_mesh.local_groups:
                    pending.append((placed, group))
                    values.append(x)
                    shardings.append(sharding.group_sharding(group))
        if pending:
            for (placed, group), array in zip(pending, device_put.place_all(values, shardings), strict=True):
                placed[group] = array
        return arguments


def _check_movable(x: jax.Array, sharding: MpmdSharding) -> None:
    """An array that is neither traced, nor spread over other processes in another way than it is wanted."""
    if isinstance(x, compat.Tracer):
        check_leaves([x], ["an argument"])
    if not all(device_put.is_placeable(x, sharding.group_sharding(g)) for g in sharding.groups):
        raise ValueError(
            f"mpmd: {x.aval.str_short()} spans other processes in the layout {x.sharding}.\n"
            "  Bring it into the step's layout first:"
            " reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, compiled.input_shardings[0])."
        )
