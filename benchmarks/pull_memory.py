"""Measures the memory that JAX's transfer engine keeps of each pull: plain JAX, two processes, without this library.

    python benchmarks/pull_memory.py [--pulls 60000]

Prints the growth of each process's memory, in bytes for each pull.
"""

import argparse
import gc
import os
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

WARM_UP = 2000


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=60_000, help="default: %(default)s")
    parser.add_argument("--from-address", help=argparse.SUPPRESS)  # of the process that pulls
    options = parser.parse_args()
    device, local = jax.devices()[0], "127.0.0.1:0"
    server = transfer.start_transfer_server(device.client, local, [local, local])
    pulls, kept, before = options.from_address is not None, jnp.ones((4, 16)), 0
    told, said, other = sys.stdin, sys.stdout, None
    if pulls:
        connection = server.connect(options.from_address)
    else:
        command = [sys.executable, __file__, "--pulls", str(options.pulls), "--from-address", server.address()]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdin is not None and other.stdout is not None
        told, said = other.stdout, other.stdin
    wanted = [jax.ShapeDtypeStruct(kept.shape, kept.dtype, sharding=SingleDeviceSharding(device))]
    for number in range(WARM_UP + options.pulls):
        if number == WARM_UP:
            gc.collect()
            before = resident_nbytes()
        if pulls:
            told.readline()
            jax.block_until_ready(connection.pull(number, wanted))
        else:
            server.await_pull(number, [kept])
        print(number, file=said, flush=True)
        if not pulls:
            told.readline()
    gc.collect()
    more = (resident_nbytes() - before) / options.pulls
    print(f"{more:.1f}", file=said, flush=True)
    if other is not None:
        print(f"bytes of a pull: {told.readline().strip()} in the process that pulls, {more:.1f} in the other one")
        other.wait()


if __name__ == "__main__":
    main()
