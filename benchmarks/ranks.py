"""Starts a benchmark again as the processes of a job on this machine."""

import os
import socket
import subprocess
import sys


def start_ranks(num_ranks: int) -> int:
    """Runs this program again in processes of one CPU device each. Returns the largest exit status."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {
        "MPMD_COORDINATOR": f"127.0.0.1:{port}", "MPMD_NUM_PROCESSES": str(num_ranks), "MPMD_LOCAL_ONLY": "1",
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
    }  # fmt: skip
    command = [sys.executable, *sys.argv]
    processes = [subprocess.Popen(command, env=environment | {"MPMD_PROCESS_ID": str(i)}) for i in range(num_ranks)]
    return max(p.wait() for p in processes)
