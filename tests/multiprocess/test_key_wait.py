"""Waits for values in the store of the coordination service, which keeps requests that ended without an answer."""

from unittest.mock import Mock

import jax
import pytest

from mpmd.job import key_wait


def test_only_the_first_request_for_a_value_that_is_late_waits_in_the_service(monkeypatch):
    late, missing = (jax.errors.JaxRuntimeError(text) for text in ("DEADLINE_EXCEEDED: a", "NOT_FOUND: a"))
    store = Mock(
        blocking_key_value_get=Mock(side_effect=late), key_value_try_get=Mock(side_effect=[missing] * 9 + ["x"])
    )
    pauses = []
    monkeypatch.setattr(key_wait.time, "sleep", pauses.append)
    wait = key_wait.KeyWait(store, 0.5)
    assert [wait.value("a") for _ in range(11)] == [None] * 10 + ["x"]
    store.blocking_key_value_get.assert_called_once_with("a", 500)
    assert len(pauses) == 9 and max(pauses) <= 0.5
    store.key_value_try_get.side_effect = jax.errors.JaxRuntimeError("UNAVAILABLE: gone")
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        wait.value("a")
