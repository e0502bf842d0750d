"""The origin of a report: date, host, command, versions and devices."""

import datetime
import importlib.metadata
import platform
import shlex
import socket
import sys
from collections import Counter

import jax

from mpmd.arrays.mesh import MpmdMesh


def provenance(mesh: MpmdMesh) -> dict[str, str]:
    """Returns the entries in the order in which they are shown."""
    devices = Counter((d.platform, d.device_kind) for group in mesh.groups for d in group.devices.flat)
    kinds = (f"{n} × {kind if kind == where else f'{kind} ({where})'}" for (where, kind), n in devices.items())
    count = jax.process_count()
    versions = {"jax-mpmd": _version("jax-mpmd"), "jax": jax.__version__, "jaxlib": _version("jaxlib")}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "host": socket.gethostname() + (f", process {jax.process_index()} of {count}" if count > 1 else ""),
        "devices": ", ".join(kinds) + (", described only" if mesh.is_described else ""),
        "versions": ", ".join(f"{name} {v}" for name, v in versions.items()) + f", Python {platform.python_version()}",
        "command": shlex.join(sys.orig_argv),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
