"""Foreign programs: StableHLO modules as JAX's exported functions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.export import _export as export_internals
from jax._src.lib import xla_client
from jax.core import ShapedArray
from jax.extend.mlir import deserialize_portable_artifact, ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters.mlir import dtype_to_ir_type, make_ir_context
from jax.sharding import AbstractMesh, NamedSharding


def exported_stablehlo(program: str | bytes) -> jax.export.Exported:
    """Returns a StableHLO module (text, MLIR bytecode or a portable artifact) as an `Exported` without derivatives.

    Shardings of its arguments and results are kept: Shardy ones as `NamedSharding`s on the module's own mesh, and
    `mhlo.sharding` unchanged, which JAX reads until 0.10.

    Raises:
      ValueError: it is not one StableHLO module with one entry function on arrays of fixed shapes.
    """
    with make_ir_context(), ir.Location.unknown():
        module = _parsed(program)
        functions: list[Any] = [op for op in module.body.operations if op.operation.name == "func.func"]
        main = [f for f in functions if f.sym_name.value == "main"] or [f for f in functions if not _is_private(f)]
        if len(main) != 1:
            raise ValueError(f"it has {len(main)} public functions and none that is called main; one entry is needed")
        name = main[0].sym_name.value
        symbols = ir.SymbolTable(module.operation)
        if name != "main":
            symbols.set_symbol_name(main[0], "main")
            for op in functions:
                symbols.replace_all_symbol_uses(name, "main", op)
        in_avals = tuple(_array_type(t, f"argument {i}") for i, t in enumerate(main[0].type.inputs))
        out_avals = tuple(_array_type(t, f"result {i}") for i, t in enumerate(main[0].type.results))
        meshes: list[Any] = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
        read = [_shardings(main[0], which, avals, symbols) for which, avals in (("arg", in_avals), ("res", out_avals))]
        (in_named, in_hlo), (out_named, out_hlo) = read
        count = module.operation.attributes.get("mhlo.num_partitions")
        devices = ir.IntegerAttr(count).value if count is not None else 1
        sizes = [int(np.prod([a.size for a in _axes(m.mesh)])) for m in meshes]
        fields = {f.name for f in dataclasses.fields(jax.export.Exported)}
        until_0_10: dict[str, Any] = {"_has_named_shardings": bool(meshes)} if "_has_named_shardings" in fields else {}
        return jax.export.Exported(
            fun_name=name, in_tree=jax.tree.structure(((0,) * len(in_avals), {})), in_avals=in_avals,
            out_tree=jax.tree.structure((0,) * len(out_avals)), out_avals=out_avals,
            _in_named_shardings=in_named, _out_named_shardings=out_named,
            in_shardings_hlo=in_hlo, out_shardings_hlo=out_hlo, nr_devices=max([devices, *sizes]),
            platforms=(jax.default_backend(),), ordered_effects=(), unordered_effects=(),
            disabled_safety_checks=(jax.export.DisabledSafetyCheck.platform(),),
            mlir_module_serialized=export_internals._module_to_bytecode(module),
            calling_convention_version=jax.export.maximum_supported_calling_convention_version,
            module_kept_var_idx=tuple(range(len(in_avals))), uses_global_constants=False, _get_vjp=None, **until_0_10,
        )  # fmt: skip


def _parsed(program: str | bytes) -> ir.Module:
    try:
        if isinstance(program, bytes):
            try:
                return deserialize_portable_artifact(program)
            except Exception:  # not a versioned artifact: plain bytecode, or text
                pass
        return ir.Module.parse(program)
    except Exception as e:  # the bindings' own error type
        raise ValueError(f"it cannot be parsed: {str(e).strip().splitlines()[-1]}") from None


def _is_private(function: ir.OpView) -> bool:
    visibility = function.operation.attributes.get("sym_visibility")
    return visibility is not None and ir.StringAttr(visibility).value == "private"


def _array_type(t: ir.Type, what: str) -> ShapedArray:
    if not isinstance(t, ir.RankedTensorType):
        raise ValueError(f"{what} is {t}, not an array")
    t = ir.RankedTensorType(t)
    if not t.has_static_shape:
        raise ValueError(f"{what} is {t}, whose shape is not fixed")
    dtypes_by_type = {str(dtype_to_ir_type(np.dtype(d))): np.dtype(d) for d in _DTYPES}
    if str(t.element_type) not in dtypes_by_type:
        raise ValueError(f"{what} has elements of type {t.element_type}, which JAX has not")
    return ShapedArray(tuple(t.shape), dtypes_by_type[str(t.element_type)])


_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", jax.numpy.bfloat16, jax.numpy.float8_e4m3fn, jax.numpy.float8_e5m2, jax.numpy.int4,
    jax.numpy.uint4,
)  # fmt: skip


def _shardings(
    main: ir.OpView, which: str, avals: Sequence[ShapedArray], symbols: ir.SymbolTable
) -> tuple[tuple, tuple]:
    """Returns the shardings in the annotations of a function's arguments or results: (Shardy ones, HLO ones)."""
    attributes = main.operation.attributes.get("arg_attrs" if which == "arg" else "res_attrs")
    named: list = [None] * len(avals)
    hlo: list = [None] * len(avals)
    for i, entry in enumerate(ir.ArrayAttr(attributes) if attributes is not None else ()):
        found = ir.DictAttr(entry)
        if "sdy.sharding" in found:
            named[i] = _named_sharding(sdy.TensorShardingAttr(found["sdy.sharding"]), symbols)
        elif "mhlo.sharding" in found:
            hlo[i] = xla_client.HloSharding.from_string(ir.StringAttr(found["mhlo.sharding"]).value)
    return tuple(named), tuple(hlo)


def _axes(mesh: ir.Attribute) -> list:
    return [sdy.MeshAxisAttr(a) for a in sdy.MeshAttr(mesh).axes]


def _named_sharding(attribute: "sdy.TensorShardingAttr", symbols: Any) -> NamedSharding:
    reference = attribute.mesh_or_ref
    if isinstance(reference, ir.FlatSymbolRefAttr):
        reference = symbols[reference.value].mesh
    axes = _axes(reference)
    mesh = AbstractMesh(tuple(a.size for a in axes), tuple(a.name for a in axes))
    entries = []
    for dimension in attribute.dimension_shardings:
        refs = [sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(dimension).axes]
        entries.append(tuple(a.name for a in refs) or None)
    return NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))


def exported_specs(exported: jax.export.Exported) -> tuple[jax.sharding.PartitionSpec | None, ...]:
    """Returns the specs of the results of an exported program, where it has any."""
    return tuple(s if s is None else s.spec for s in exported._out_named_shardings)
