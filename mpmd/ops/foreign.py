"""Turns exported programs and StableHLO functions into functions that a stage can call.

A foreign program is one equation of the stage, a call that cannot be cut. It is read when its task is lowered for a
group, so that it is lowered on the group's own mesh and not on the whole mesh on which the step is traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.pytrees import PyTree


@compat.api_boundary
def from_exported(exported: jax.export.Exported) -> Callable[..., PyTree]:
    """Returns a program exported by `jax.export` as a function to call inside a stage.

    The function takes and returns the same pytrees as the exported one. It can be differentiated as often as the export
    allows (`vjp_order`; without limit for an `Exported` made in this process). A program exported for one device runs
    on every device of a group; one exported for several devices needs a group of the same number, and its arguments and
    results have the shardings that it was exported with. On Explicit axes, its results have the specs that it names on
    axes of the step's mesh, and are otherwise whole on every device.

    Args:
      exported: from `jax.export.export(jax.jit(f))(*shapes)` or `jax.export.deserialize(data)`.

    Returns:
      The function.

    Raises:
      StageError: `exported` is something else; later, where the call does not fit it, where a derivative is needed but
        was not exported, or where a group has another number of devices.

    Examples:
      >>> import jax, jax.numpy as jnp, mpmd
      >>> exported = jax.export.export(jax.jit(jnp.tanh))(jax.ShapeDtypeStruct((3,), jnp.float32))
      >>> stage = mpmd.from_exported(exported)
      >>> jax.grad(lambda x: stage(x).sum())(jnp.zeros(3))
      Array([1., 1., 1.], dtype=float32)
    """
    if not isinstance(exported, jax.export.Exported):
        raise StageError(
            f"from_exported: got a {type(exported).__name__}, not a jax.export.Exported.\n"
            "  Serialized bytes become one by jax.export.deserialize; StableHLO goes to mpmd.from_stablehlo."
        )
    remedy = (
        f"\n  Serialize it with a higher order, exported.serialize(vjp_order=...), or put jax.lax.stop_gradient"
        f" around what {exported.fun_name} returns."
    )
    return _function(exported, f"from_exported({exported.fun_name})", remedy)


@compat.api_boundary
def from_stablehlo(program: str | bytes) -> Callable[..., PyTree]:
    """Returns a StableHLO program as a function to call inside a stage.

    This is for forward passes made by other compilers and frameworks, such as a frozen encoder: StableHLO has no
    derivative. The program is one module on arrays of fixed shapes. Its Shardy (`sdy.sharding`) or `mhlo.sharding`
    annotations are kept; a program with annotations must have as many devices as the group.

    Args:
      program: the module as text, MLIR bytecode, or a portable artifact.

    Returns:
      A function of the arguments of the module's entry (`main`), all arrays; it returns the result, or a tuple of
      several.

    Raises:
      StageError: it cannot be read; later, where the call does not fit it, or where the program is differentiated.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> double = mpmd.from_stablehlo('''
      ...     func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      ...       %y = stablehlo.add %x, %x : tensor<3xf32>
      ...       return %y : tensor<3xf32>
      ...     }''')
      >>> double(jnp.ones(3))
      Array([2., 2., 2.], dtype=float32)
    """
    if isinstance(program, (bytearray, memoryview)):
        program = bytes(program)
    if not isinstance(program, (str, bytes)):
        raise StageError(
            f"from_stablehlo: got a {type(program).__name__}. Pass the text of a StableHLO module, or its bytes."
        )
    try:
        exported = compat.exported_stablehlo(program)
    except ValueError as e:
        raise StageError(f"from_stablehlo: this is no StableHLO program that a stage can call: {e}.") from None
    remedy = (
        "\n  StableHLO holds no derivative. Put jax.lax.stop_gradient around what it returns, or export the program"
        " with jax.export and use mpmd.from_exported."
    )
    function = _function(exported, f"from_stablehlo({exported.fun_name})", remedy)
    num_args = len(exported.in_avals)

    def call(*args):
        if len(args) != num_args:
            raise StageError(
                f"from_stablehlo({exported.fun_name}): called with {len(args)} arrays, but it takes {num_args}."
            )
        results = function(*args)
        return results[0] if len(results) == 1 else results

    return call


# --- the call -------------------------------------------------------------------------------------

foreign_p = compat.Primitive("foreign")
foreign_p.multiple_results = True


def _function(exported: jax.export.Exported, name: str, remedy: str):
    """Returns a differentiable function on the pytrees of `exported`."""
    flat = _flat(exported, name, remedy)

    def call(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != exported.in_tree:
            raise StageError(
                f"{name}: called with other arguments than it was exported for.\n"
                f"  got      {tree}\n  expected {exported.in_tree}"
            )
        return jax.tree.unflatten(exported.out_tree, flat(*map(jax.numpy.asarray, leaves)))

    call.__name__ = call.__qualname__ = exported.fun_name
    return call


def _flat(exported: jax.export.Exported, name: str, remedy: str):
    """Returns the program on flat arrays; arrays of float0 (gradients of integers) do not take part in the call."""
    given = [i for i, a in enumerate(exported.in_avals) if a.dtype != jax.dtypes.float0]

    @jax.custom_vjp
    def call(*args):
        found = iter(foreign_p.bind(*(args[i] for i in given), exported=exported, name=name))
        return [np.zeros(a.shape, a.dtype) if a.dtype == jax.dtypes.float0 else next(found) for a in exported.out_avals]

    def forward(*args):
        return call(*args), args

    def backward(args, cotangents):
        with _no_mesh():
            try:
                derivative = exported.vjp()
            except ValueError:
                raise StageError(f"{name} is differentiated, but has no derivative.{remedy}") from None
        return tuple(_flat(derivative, name, remedy)(*args, *cotangents))

    call.defvjp(forward, backward)
    return call


def _run(*given: jax.Array, exported: jax.export.Exported):
    """Calls the program by JAX's own rules, on the current mesh."""
    rest = iter(given)
    leaves = [np.zeros(a.shape, a.dtype) if a.dtype == jax.dtypes.float0 else next(rest) for a in exported.in_avals]
    args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
    results = jax.tree.leaves(exported.call(*args, **kwargs))
    return [x for x in results if x.dtype != jax.dtypes.float0]


def _no_mesh():
    return compat.use_abstract_mesh(AbstractMesh((), ()))


def _abstract_eval(*avals: compat.Aval, exported: jax.export.Exported, name: str):
    effects = {*exported.ordered_effects, *exported.unordered_effects}
    with _no_mesh():
        try:
            shapes = jax.eval_shape(
                lambda *xs: _run(*xs, exported=exported), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
            )
        except ValueError as e:
            raise StageError(f"{name}: {e}") from None
    specs = [
        spec
        for spec, a in zip(compat.exported_specs(exported), exported.out_avals, strict=True)
        if a.dtype != jax.dtypes.float0
    ]
    return [_typed(x, spec) for x, spec in zip(shapes, specs, strict=True)], effects


def _typed(x: jax.ShapeDtypeStruct, spec: PartitionSpec | None):
    """Returns the type of a result, with the part of its spec that is on Explicit axes of the current mesh."""
    mesh = compat.current_mesh()
    if not mesh.explicit_axes:
        return compat.shaped_array(jax.ShapeDtypeStruct(x.shape, x.dtype))
    entries = []
    for size, entry in zip(x.shape, [*(spec or ()), *(None,) * x.ndim], strict=False):
        names = tuple(n for n in (entry if isinstance(entry, tuple) else (entry,)) if n in mesh.explicit_axes)
        entries.append(names if names and size % np.prod([mesh.shape[n] for n in names]) == 0 else None)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return compat.shaped_array(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))


def _lowering(ctx: object, *args: object, exported: jax.export.Exported, name: str):
    try:
        return compat.mlir.lower_fun(_run, multiple_results=True)(ctx, *args, exported=exported)
    except ValueError as e:
        raise StageError(
            f"{name}: {e}\n  A program for several devices runs in groups of as many; one for a single device, in any."
        ) from None


def _batch(args: Sequence[jax.Array], dims: Sequence[Any], *, exported: jax.export.Exported, name: str):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moving = [i for i, d in enumerate(dims) if d is not None]

    def one(rows):
        full = list(args)
        for i, row in zip(moving, rows, strict=True):
            full[i] = row
        return foreign_p.bind(*full, exported=exported, name=name)

    outs = jax.lax.map(one, [jax.numpy.moveaxis(args[i], dims[i], 0) for i in moving], batch_size=None)
    assert all(x.shape[0] == size for x in outs)
    return outs, [0] * len(outs)


@foreign_p.def_impl
def _impl(*args: jax.Array, exported: jax.export.Exported, name: str):
    return jax.jit(lambda *xs: foreign_p.bind(*xs, exported=exported, name=name))(*args)


foreign_p.def_effectful_abstract_eval(_abstract_eval)
compat.batching.primitive_batchers[foreign_p] = _batch
compat.mlir.register_lowering(foreign_p, _lowering)
