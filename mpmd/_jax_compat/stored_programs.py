"""Compiled programs in JAX's cache folder, found by fingerprint, without lowering or compiling them.

JAX finds a program by its lowered form. Next to each of JAX's entries is a small file, named by the program's
fingerprint, that names the entry and its checksum. Whatever does not fit is ignored, and the program is compiled.
"""

import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, distributed
from jax._src.interpreters import pxla

from mpmd._jax_compat.tracing_hooks import setting

_SUFFIX = "-mpmd"


class Folder:
    """JAX's cache folder (`cache` is JAX's own object), for the programs of one client."""

    def __init__(self, cache: Any):
        self._cache = cache

    @classmethod
    def of(cls, client: Any) -> "Folder | None":
        """Returns the folder that JAX uses now, if it uses one."""
        return cls.read_by_jax(client) if compilation_cache.is_persistent_cache_enabled() else None

    @classmethod
    def read_by_jax(cls, client: Any) -> "Folder | None":
        """Returns the folder that JAX reads, even if it has been switched off since the first program."""
        if not compilation_cache.is_cache_used(client):
            return None
        cache = compilation_cache._get_cache(client)
        return None if cache is None else cls(cache)

    def find(self, fingerprint: str) -> bytes | None:
        """Returns the serialized executable of a program, if it is there and undamaged."""
        try:
            name = self._file(fingerprint)
            if not name.exists():
                return None
            known = json.loads(name.read_bytes())
            entry = self._cache.get(known["entry"])
            if entry is None:  # removed by JAX, or to be verified
                return None
            if hashlib.sha256(entry).hexdigest() != known["sha256"]:
                raise ValueError("the entry has another checksum")
            found = _extracted(entry)
        except Exception as e:
            _warn_once(
                f"A program in the compilation cache folder is ignored and compiled again: {type(e).__name__}: {e}"
            )
            return None
        jax.monitoring.record_event("/jax/compilation_cache/compile_requests_use_cache")
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return found

    def executable(self, key: str) -> bytes | None:
        """Returns the serialized executable in one of JAX's entries."""
        entry = self._cache.get(key)
        return None if entry is None else _extracted(entry)

    def keep(self, fingerprint: str | None, key: str, compiled: jax.stages.Compiled, seconds: float) -> bytes | None:
        """Lets `find` find a compiled program, if JAX stores it, under `key`, after `seconds` of compilation.

        Returns the serialized program, or None. JAX stores the programs of the first process. If other processes
        compile other programs, each stores its own.
        """
        try:
            entry = self._cache.get(key)
            if entry is None and distributed.global_state.process_id != 0:
                entry = self._put(key, compiled, seconds)
            if entry is None:
                return None
            found = _extracted(entry)  # raises if another process has not written all of it
            if fingerprint is not None:
                about = {"entry": key, "sha256": hashlib.sha256(entry).hexdigest()}
                self._write(self._file(fingerprint), json.dumps(about).encode())
                self._tidy()
            return found
        except Exception as e:
            _warn_once(f"A program was not kept in the compilation cache folder: {type(e).__name__}: {e}")
            return None

    def _tidy(self) -> None:
        """Removes files without an entry (JAX has removed it), to stay within the size that the user has set."""
        if setting("jax_compilation_cache_max_size") == -1:
            return
        files, entries = (list(self._cache._path.glob(f"*{suffix}")) for suffix in (_SUFFIX, "-cache"))
        if len(files) > 2 * len(entries):
            for file in files:
                if not (self._cache._path / f"{json.loads(file.read_bytes())['entry']}-cache").exists():
                    file.unlink(missing_ok=True)

    def _put(self, key: str, compiled: Any, seconds: float) -> bytes | None:
        if seconds < setting("jax_persistent_cache_min_compile_time_secs"):
            return None
        executable = compiled._executable.xla_executable
        entry = compilation_cache.compress_executable(
            compilation_cache.combine_executable_and_time(executable.serialize(), int(seconds))
        )
        if len(entry) < setting("jax_persistent_cache_min_entry_size_bytes"):
            return None
        if setting("jax_compilation_cache_max_size") != -1:
            self._cache.put(key, entry)  # it counts bytes, under a lock
        else:
            self._write(self._cache._path / f"{key}-cache", entry)
        return entry

    def _file(self, fingerprint: str) -> Path:
        return self._cache._path / f"{fingerprint}{_SUFFIX}"

    def _write(self, name: Path, content: bytes) -> None:
        """Writes a file atomically, even if several processes write the same file."""
        temporary = name.parent / f"{name.name}.{os.getpid()}.{threading.get_ident()}.{time.time_ns()}"
        temporary.write_bytes(content)
        temporary.replace(name)


def _extracted(entry: bytes) -> bytes:
    return compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(entry))[0]


def entry_key(lowering: Any, more_options: Mapping[str, object]) -> str:
    """Returns the name under which JAX stores a program; `more_options` of XLA come on top of those of the lowering."""
    of, devices = lowering.compile_args, np.array(list(lowering._device_list))
    inferred = pxla.get_prop_to_input_output(of["in_shardings"], of["out_shardings"], len(of["ordered_effects"]))
    options = pxla.create_compile_options(
        lowering._hlo,
        of["tuple_args"],
        *inferred,
        of["backend"],
        devices,
        dict(lowering._compiler_options_kvs) | dict(more_options),
    )
    return compilation_cache.get_cache_key(lowering._hlo, devices, options, of["backend"])


_warned = threading.Event()


def _warn_once(message: str) -> None:
    if not _warned.is_set():
        _warned.set()
        # JAX would repeat this warning for each program that it reads or writes in that folder.
        warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
        warnings.warn(f"mpmd: {message} (Other such programs are not named.)", stacklevel=2)
