"""Everything of Orbax that it does not document, imported in one place."""

from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.futures.synchronization import MultihostSynchronizedValue
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeSaveArgs
from orbax.checkpoint._src.metadata.array_metadata import RANDOM_KEY_IMPL, ArrayMetadata
from orbax.checkpoint._src.metadata.array_metadata_store import Store
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import jax_array_handlers, limits, replica_slices, tensorstore_utils
from orbax.checkpoint._src.serialization.type_handler_registry import GLOBAL_TYPE_HANDLER_REGISTRY
from orbax.checkpoint._src.serialization.type_handlers import ArrayHandler

__all__ = [
    "GLOBAL_TYPE_HANDLER_REGISTRY",
    "RANDOM_KEY_IMPL",
    "ArrayHandler",
    "ArrayMetadata",
    "BasePyTreeSaveArgs",
    "MultihostSynchronizedValue",
    "Store",
    "asyncio_utils",
    "future",
    "jax_array_handlers",
    "limits",
    "multihost",
    "replica_slices",
    "tensorstore_utils",
]
