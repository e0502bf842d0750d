"""Small values that all processes gather with `jax.experimental.multihost_utils`, through the key-value store.

JAX gathers them by a collective among all devices. On CPU devices that fails where a process comes half a minute after
the others. It also hangs once a process was replaced, because the others keep their connections to the lost one. The
store waits as long as the watchdog allows, and keeps all results before the loop for a replacement of a lost process.
"""

import base64
import json
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from mpmd.job.job import Job

# The limit for all ranks together. The store takes 4 MiB in one message, and is not made for more.
_MAX_NBYTES = 1 << 20
# The store keeps this many results for replacements. After more gathers before the loop, no process can be replaced.
_MAX_KEPT = 256


class Gathers:
    """The gathers of one process; all make them in one order. `needs_all` is called before a collective among all."""

    def __init__(self, job: Job, needs_all: Callable[[], None]):
        self._job, self._needs_all = job, needs_all
        self._num_kept = 0

    def allgather(self, x: object, tiled: bool) -> np.ndarray | None:
        """Gathers one array like JAX's `process_allgather`; returns None where a collective has to do it."""
        if (said := self._said_by_all([x])) is None:
            return None
        rows = [arrays[0] for arrays in said]
        return np.concatenate(rows) if tiled and rows[0].ndim else np.stack(rows)

    def broadcast(self, leaves: Sequence[object], is_source: bool) -> list[np.ndarray] | None:
        """Sends some arrays like JAX's `broadcast_one_to_all`; returns None where a collective has to do it."""
        said = self._said_by_all([is_source, *leaves])
        if said is None:
            return None
        sources = [arrays[1:] for arrays in said if arrays[0]]
        if len(sources) != 1:  # JAX adds them
            self._needs_all()
            return None
        return sources[0]

    def _said_by_all(self, values: Sequence[object]) -> list[list[np.ndarray]] | None:
        """Returns the values of each rank; None if they are not small values of the host."""
        arrays = [x for x in map(_array, values) if x is not None]
        is_small = len(arrays) == len(values) and sum(x.nbytes for x in arrays) * self._job.num_ranks <= _MAX_NBYTES
        is_in_order = threading.current_thread() is threading.main_thread()
        is_kept = self._job.replaces and not self._job.activity.goes_on
        if not (is_small and is_in_order) or (is_kept and self._num_kept == _MAX_KEPT):
            self._needs_all()
            return None
        key = f"mpmd/gathered/{self._num_kept}"
        self._num_kept += is_kept
        if self._job.is_apart:
            kept = self._kept(key)
            own = [(x.dtype, x.shape) for x in arrays]
            if kept is None or own != [(x.dtype, x.shape) for x in kept[self._job.rank]]:  # it gathers something else
                self._needs_all()
            return kept
        text = json.dumps([(x.dtype.name, x.shape, base64.b64encode(x.tobytes()).decode()) for x in arrays])
        said = [*self._job.exchange("a gather of values of the host", text, range(self._job.num_ranks)).values()]
        if is_kept and self._job.rank == 0:
            self._job.store.key_value_set(key, json.dumps(said), allow_overwrite=True)
        return [*map(_arrays, said)]

    def _kept(self, key: str) -> list[list[np.ndarray]] | None:
        """Returns the values that all gathered under a key before this process took its place."""
        try:
            return [*map(_arrays, json.loads(self._job.store.key_value_try_get(key)))]
        except jax.errors.JaxRuntimeError:
            return None


def _array(value: object) -> np.ndarray | None:
    """Returns a value with the dtype of a device; None if it lies in several processes, or is not numeric."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    if jax.dtypes.issubdtype(getattr(value, "dtype", bool), jax.dtypes.extended):  # keys
        return None
    array = np.asarray(value)
    is_number = jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == bool
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if is_number else None


def _arrays(text: str) -> list[np.ndarray]:
    """Returns the arrays in a rank's message."""
    return [
        np.frombuffer(base64.b64decode(data), jax.numpy.dtype(dtype)).reshape(shape).copy()
        for dtype, shape, data in json.loads(text)
    ]
