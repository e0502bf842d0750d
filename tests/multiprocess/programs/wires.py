"""Wires for tests: what programs use instead of the one that their devices have.

- "put": `wires.PutWire`, JAX's cross-host `device_put`, as on GPUs. On CPU devices JAX has it when it is given an
  address to listen on; every process must then make each call, so such jobs have two processes.
- "meeting": every send waits for its receive and every receive for its send, as strictly as no real wire does.
  Transfers that the processes come to in different orders end in a deadlock.
"""

import os

import jax
import numpy as np

from mpmd.job import wires

_RECEIPT = 1 << 61


class MeetingWire(wires.PullWire):
    """Pulls at which the two ends wait for each other."""

    is_ordered = True

    def __init__(self, job):
        super().__init__(job)
        self._last = {}

    def _check_order(self, number, source, target):
        where = source, target, number >> 63  # what is done with when its call returns has numbers of its own
        assert number > self._last.get(where, -1), "transfers of two devices are numbered in their order"
        self._last[where] = number

    def send(self, number, array, target):
        source = next(iter(array.devices()))
        self._check_order(number, source, target)
        super().send(number, array, target)
        super().receive(_RECEIPT | number, (1,), np.uint8, target, source).block_until_ready()

    def receive(self, number, shape, dtype, source, target):
        self._check_order(number, source, target)
        value = super().receive(number, shape, dtype, source, target)
        value.block_until_ready()
        super().send(_RECEIPT | number, jax.device_put(np.zeros(1, np.uint8), target), source)
        return value


def choose() -> None:
    """Takes the wire that the job was given; before `mpmd.initialize`."""
    chosen = os.environ.get("TEST_WIRE")
    if chosen == "put":
        jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{os.environ['TEST_WIRE_PORT']}")
        jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0,127.0.0.1:0")
        wires.wire_class = lambda job: wires.PutWire
    elif chosen == "meeting":
        wires.wire_class = lambda job: MeetingWire
