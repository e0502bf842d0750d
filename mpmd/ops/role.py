"""Roles: parts of a step that run in groups of their own, by a table of names that the user writes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mpmd import _jax_compat as compat
from mpmd.ops.stage_end import RoleEnd, end_of_role

F = TypeVar("F", bound=Callable[..., object])
RoleTable = Mapping[str, tuple[int, ...]]


@compat.api_boundary
def role(name: str) -> Callable[[F], F]:
    """Names a function: `mpmd.jit(step, ..., roles={name: groups})` says where it and its gradient run.

    So one step holds a policy, a reference, a critic and a reward, each in groups of its own, or two towers that are
    joined. In a `treduce` loop each call is a stage of that name, or several stages if the role has several groups:
    then `mark_layer_end` or `mark_stage_end` inside the function says where it may or does divide. The stages need not
    form a chain: each waits only for its inputs. Code between two calls belongs to the second call, code after the last
    call to the last call.

    Outside of loops the function runs in its groups, and its results are there. Outside of `mpmd.jit`, and without
    `roles`, a role is only a name: the end of a stage.

    Args:
      name: of the role. Several functions may share one, and a function may be called several times.

    Returns:
      A decorator for functions of arrays, such as `model.apply`. Their results must hold arrays.

    Raises:
      TypeError: `name` is not a string, or the decorated object is not a function; at the call: it returns no array.
      StageError: while the step is traced, if `roles` has no such name.

    Examples:
      >>> import jax, jax.numpy as jnp, mpmd
      >>> mesh = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 3)
      >>> image, text = (mpmd.role(name)(lambda w, x: jnp.tanh(x @ w)) for name in ("image", "text"))
      >>> def loss(w, batch):                              # two towers, and what joins them
      ...     both = image(w[0], batch), text(w[1], batch)
      ...     return mpmd.role("join")(lambda a, b: jnp.mean((a - b) ** 2))(*both)
      >>> @mpmd.jit(mpmd_mesh=mesh, roles={"image": 0, "text": 1, "join": 2})
      ... def step(w, batches):
      ...     return mpmd.treduce(lambda batch: jax.grad(loss)(w, batch), batches, schedule="1f1b")
      >>> [gradient.mpmd_idxs for gradient in step([jnp.eye(3)] * 2, jnp.ones((4, 2, 3)))]
      [(0,), (1,)]
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"role: name is {name!r:.80}. Pass a name: @mpmd.role('critic').")

    def decorator(fun: F) -> F:
        if not callable(fun):
            raise TypeError(f"role {name!r}: fun is a {type(fun).__name__}. Pass a function of arrays.")

        @functools.wraps(fun)
        def named(*args: Any, **kwargs: Any) -> Any:
            return end_of_role(fun(*args, **kwargs), name)

        return named  # type: ignore[return-value]

    return decorator


def checked_table(roles: Mapping[str, int | Sequence[int]] | None, num_groups: int) -> RoleTable:
    """Returns the user's table, with a tuple of groups for each name.

    Raises:
      ValueError: it is not a table of names and groups of the mesh.
    """
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise ValueError(f"mpmd.jit: roles is {roles!r:.80}. Pass the groups of each role: {{'policy': (0, 1)}}.")
    found = {}
    for name, given in roles.items():
        groups = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        if not isinstance(name, str) or not groups or not all(_is_group(g, num_groups) for g in groups):
            raise ValueError(
                f"mpmd.jit: roles has {name!r}: {given!r:.80}. Pass a group or a tuple of groups for each name;"
                f" the mesh has groups 0..{num_groups - 1}."
            )
        if len(set(groups)) < len(groups):
            raise ValueError(f"mpmd.jit: roles has {name!r}: {given!r:.80}, which names a group twice.")
        found[name] = tuple(map(int, groups))
    return found


def _is_group(group: object, num_groups: int) -> bool:
    return isinstance(group, (int, np.integer)) and not isinstance(group, bool) and int(group) in range(num_groups)


def groups_of_stages(ends: Sequence[RoleEnd | None]) -> list[int | None]:
    """Returns the group of each stage, or None if no role determines it.

    Args:
      ends: the role that each stage's last mark ends, or None. The stages before it, back to the end of another role,
        belong to the role too; they are divided evenly over its groups, in order, the last stage to the last group.
    """
    found: list[int | None] = []
    for end in ends:
        found.append(None)
        if end is None or end.groups is None:
            continue
        first = next((k + 1 for k in reversed(range(len(found) - 1)) if ends[k] is not None), 0)
        own = len(found) - first
        found[first:] = [end.groups[((i + 1) * len(end.groups) - 1) // own] for i in range(own)]
    return found
