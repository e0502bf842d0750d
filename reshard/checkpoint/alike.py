"""Compares the saves and restores of all processes, which must make the same ones.

Otherwise ranks that restore different checkpoints would continue silently, and ranks that save to different paths
would wait for each other.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

import jax

from mpmd.arrays.sharding import MpmdSharding
from mpmd.job import joining
from mpmd.job.notes import placed_text
from mpmd.pytrees import PyTree
from reshard.checkpoint.matching import tree_path
from reshard.checkpoint.requests import Request
from reshard.storage.identity import identity
from reshard.storage.stored import Checkpoint, absolute

# The types of more arrays are not compared: each process would have to read them from every other process.
_MAX_COMPARED = 1000


def about_save(path: str | os.PathLike[str], tree: PyTree) -> dict[str, str]:
    """Returns the properties of a save that must be equal in all processes, in words by name."""
    if jax.process_count() == 1:
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"the path": f"as {absolute(path)}"} | about_arrays(("/".join(tree_path(keys)), x) for keys, x in leaves)


def about_arrays(arrays: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Returns names and types of arrays, as processes compare them; an empty dict if there are very many arrays."""
    types = sorted(f"{name}: {placed_text(x)}" for name, x in arrays)
    return {"the tree": f"as {', '.join(types)}"} if len(types) <= _MAX_COMPARED else {}


@contextlib.contextmanager
def compared_restore(path: str | os.PathLike[str], requests: Sequence[Request]) -> Iterator[list[Checkpoint]]:
    """Wraps a block that finds a checkpoint and puts it into the yielded list. Afterwards all have found the same one.

    Compares only where arrays go to devices of several processes, not what a process restores for itself alone.

    Raises:
        ScheduleError: others restore a different checkpoint, or into a different tree, or fail where this one does not.
    """
    ranks, found = _ranks_of(requests), []
    if len(ranks) < 2 or jax.process_index() not in ranks:
        yield found
        return
    types, number, text = {r.name: _placed(r) for r in requests}, 0, ""
    try:
        yield found
        number = identity(found[0], {request.source for request in requests})
        text = f"checkpoint {number:08x}"
    except Exception as error:
        text = f"{type(error).__name__}"
        raise
    finally:
        joining.compare("called reshard.restore", types, {"path": f"as {absolute(path)} ({text})"}, number, ranks)
    joining.settle()


def _ranks_of(requests: Sequence[Request]) -> set[int]:
    """Returns the processes of all meshes that arrays go to."""
    ranks: set[int] = set()
    for sharding in {request.sharding for request in requests}:
        if isinstance(sharding, MpmdSharding):
            ranks.update(rank for of_group in sharding.mpmd_mesh.processes for rank in of_group)
        elif isinstance(sharding, jax.sharding.Sharding):  # anything else is reported later
            ranks.update(d.process_index for d in sharding.device_set)
    return ranks


def _placed(request: Request) -> str:
    where = f" in {request.sharding}" if isinstance(request.sharding, MpmdSharding) else ""
    return f"{request.expected}{where}"
