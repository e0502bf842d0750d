"""All undocumented parts of Orbax that the library uses, imported in one place."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import orbax.checkpoint

try:
    from orbax.checkpoint._src import asyncio_utils
    from orbax.checkpoint._src.futures import future
    from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeSaveArgs
    from orbax.checkpoint._src.metadata.array_metadata import RANDOM_KEY_IMPL, ArrayMetadata
    from orbax.checkpoint._src.metadata.array_metadata_store import Store
    from orbax.checkpoint._src.multihost import multihost
    from orbax.checkpoint._src.serialization import replica_slices
    from orbax.checkpoint._src.serialization.jax_array_handlers import _async_serialize_replica_slices as write_slices
    from orbax.checkpoint._src.serialization.type_handler_registry import GLOBAL_TYPE_HANDLER_REGISTRY
    from orbax.checkpoint._src.serialization.type_handlers import ArrayHandler
except ImportError as error:
    raise ImportError(
        f"reshard.checkpoint: orbax-checkpoint {orbax.checkpoint.__version__} has no {error.name}, on which saving and"
        " restoring MpmdArrays stands. Install the release that jax-mpmd was tested with: orbax-checkpoint==0.12.8."
    ) from error


def optional(name: str, module: str) -> Any:
    """Returns an object of one of Orbax's modules; None if the release lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def in_v1(module: str) -> Any:
    """Returns a module of Orbax's v1, which is experimental in some releases; None in a release without it."""
    for room in ("orbax.checkpoint.v1", "orbax.checkpoint.experimental.v1"):
        try:
            return importlib.import_module(f"{room}.{module}")
        except ImportError:
            continue
    return None


def around(owner: object, name: str) -> Callable[[Callable], None]:
    """Wraps a function of Orbax: the wrapper gets the original, then the arguments. Does nothing if a release lacks it,
    or lacks `owner`, the class or module that has it (None).
    """
    plain = getattr(owner, name, None)

    def put(function: Callable) -> None:
        if plain is None:
            return

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(plain, *args, **kwargs)

        setattr(owner, name, call)

    return put


__all__ = [
    "GLOBAL_TYPE_HANDLER_REGISTRY",
    "RANDOM_KEY_IMPL",
    "ArrayHandler",
    "ArrayMetadata",
    "BasePyTreeSaveArgs",
    "Store",
    "around",
    "asyncio_utils",
    "future",
    "in_v1",
    "multihost",
    "optional",
    "replica_slices",
    "write_slices",
]
