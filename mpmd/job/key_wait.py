"""Waits for a text in the key-value store of `jax.distributed`, without leaving requests in its service."""

import time

import jax

from mpmd import _jax_compat as compat

_FIRST_PAUSE_S = 0.02


class KeyWait:
    """A wait for the value of one or more keys.

    Only its first request blocks in the coordination service. For each blocking request that ends without an answer,
    the service keeps about 15 KiB until the key is set (JAX 0.10.2): hundreds of ranks that wait for minutes would fill
    its memory. Later requests return at once, with pauses between them that grow to a tenth of the time waited.

    Args:
      slice_s: the time limit of the first request, and of each pause.
    """

    def __init__(self, store: compat.KeyValueStore, slice_s: float):
        self._store, self._slice_s = store, slice_s
        self._begun, self._is_late = time.monotonic(), False

    def value(self, key: str) -> str | None:
        """Returns the value of a key; None if it has not come after about a slice. Raises a JaxRuntimeError if the
        service does not answer.
        """
        try:
            if self._is_late:
                return self._store.key_value_try_get(key)
            return self._store.blocking_key_value_get(key, max(1, round(1000 * self._slice_s)))
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE" not in str(e) and "NOT_FOUND" not in str(e):
                raise
        if self._is_late:
            time.sleep(min(self._slice_s, max(_FIRST_PAUSE_S, (time.monotonic() - self._begun) / 10)))
        self._is_late = True
        return None
