"""Builds the results of a step from the arrays that its programs return."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.layouts import mpmd_sharding
from mpmd.arrays.sharding import MpmdSharding
from mpmd.compile.step import StepPrograms
from mpmd.cutting.split_rows import SplitStep
from mpmd.run.inputs import split_sharding


class Results:
    """The results of a compiled step."""

    def __init__(self, programs: StepPrograms, split: SplitStep):
        outline, mesh = programs.outline, programs.mesh
        self.shardings: list[MpmdSharding] = []  # per flat result
        self._about: list[tuple[MpmdSharding, tuple[int, ...], np.dtype, bool, bool]] = []
        self._pieces: list[list[tuple[int, int, tuple[int, int]]] | None] = []  # position, group and range of each
        for v, ks, rows in zip(split.whole.jaxpr.outvars, split.out_positions, split.outs, strict=True):
            made, groups = outline.outputs[ks[0]]
            sharding = mpmd_sharding(mesh, groups, programs.layout(made))
            if rows is None:
                self._pieces.append(None)
            else:
                homes = tuple(min(outline.outputs[k][1]) for k in ks)
                sharding = split_sharding(sharding, rows, homes)
                self._pieces.append(list(zip(ks, homes, rows.ranges, strict=True)))
            self.shardings.append(sharding)
            committed = all(outline.committed[k] for k in ks)
            weak = getattr(v.aval, "weak_type", False)
            self._about.append((sharding, v.aval.shape, v.aval.dtype, weak, committed))
        self._first = [ks[0] for ks in split.out_positions]
        self._on_no_device = [(n, about) for n, about in enumerate(self._about) if about[2] == jax.dtypes.float0]

    def arrays(self, results: Sequence[Mapping[int, jax.Array]], made_by: int) -> list[MpmdArray | np.ndarray]:
        """Returns the results of one call. Gradients of integers (float0) are on no device, as under `jax.jit`.

        Args:
          results: per result of the programs, its array in each group of this process.
          made_by: the number of the call, which is also the number of its first result; 0 if it has none.
        """
        found: list[MpmdArray | np.ndarray] = []
        for n, (k, pieces, about) in enumerate(zip(self._first, self._pieces, self._about, strict=True)):
            arrays: Any = results[k]
            if pieces is not None:
                arrays = {ends: results[i][group] for i, group, ends in pieces if group in results[i]}
            found.append(MpmdArray._unchecked(arrays, *about, made_by=made_by and made_by + n))
        for n, (_, shape, dtype, *_) in self._on_no_device:
            found[n] = np.zeros(shape, dtype)
        return found
