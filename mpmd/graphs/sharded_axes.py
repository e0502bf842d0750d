"""Finds the mesh axes over which each axis of a value is sharded, as XLA will: from arguments, types and constraints.

Values without a finding count as not sharded. The findings change no result, only where sums over devices are done.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.axis_rules import factors
from mpmd.ops.reductions import explicit_sharding
from mpmd.tracing.inline import inline
from mpmd.tracing.new_equations import Atom

Axes = tuple[str, ...]  # of the mesh, major first
Dims = tuple[Axes, ...]  # per axis of an array


class ShardedAxes:
    """The mesh axes of each variable, filled equation by equation.

    Args:
      mesh: of a group; all groups have this shape.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, known: Mapping[compat.Var, PartitionSpec] | None = None):
        self.mesh = mesh
        self.sizes = {n: size for n, size in mesh.shape.items() if size > 1}
        self._found: dict[compat.Var, Dims] = {}
        for v, spec in (known or {}).items():
            self._record(v, dims_of(spec, len(v.aval.shape)))

    def of(self, v: Atom) -> Dims:
        """Returns the mesh axes of each axis of a value."""
        ndim = len(getattr(v.aval, "shape", ()))
        found = ((),) * ndim if isinstance(v, compat.Literal) else self._found.get(v, ((),) * ndim)
        if (sharding := explicit_sharding(v.aval)) is None:
            return found
        explicit = sharding.mesh.explicit_axes
        return tuple(
            (*(n for n in t if n in explicit and n in self.sizes), *(n for n in f if n not in explicit))
            for t, f in zip(dims_of(sharding.spec, ndim), found, strict=True)
        )

    def say_alike(self, v: compat.Var, other: Atom) -> None:
        """Records that a variable is sharded like another one of its shape."""
        if v.aval.shape == other.aval.shape:
            self._record(v, self.of(other))

    def items(self) -> Iterable[tuple[compat.Var, Dims]]:
        """Returns all variables with a record, and their mesh axes."""
        return ((v, self.of(v)) for v in self._found)

    def nbytes(self, v: Atom) -> int:
        """Returns the bytes of a value on each device."""
        return equations.nbytes(v.aval) // math.prod(self.sizes[n] for axes in self.of(v) for n in axes)

    def read(self, eqns: Iterable[compat.JaxprEqn]) -> "ShardedAxes":
        """Follows the equations, in order."""
        for eqn in eqns if self.sizes else ():
            ins = [self.of(v) for v in eqn.invars]
            if any(any(d) for d in ins) or eqn.primitive.name in _SAYS:
                for v, dims in zip(eqn.outvars, self.results(eqn, ins), strict=True):
                    self._record(v, dims)
        return self

    def read_both_ways(self, eqns: Sequence[compat.JaxprEqn], batches: Iterable[compat.Var]) -> None:
        """Follows the equations in order, then backwards. A slice of a batch without a known sharding is sharded like
        the values computed from it: XLA shards an argument without a sharding like its readers.
        """
        self.read(eqns)
        slices = set(batches)
        for eqn in eqns:
            if eqn.primitive.name in _SLICES and not slices.isdisjoint(equations.variables(eqn.invars[:1])):
                slices.update(eqn.outvars)
        for eqn in reversed(eqns if self.sizes else ()):
            dims = list(self.of(eqn.outvars[0])) if eqn.outvars else []
            for x in slices.intersection(equations.variables(eqn.invars)) if any(dims) else ():
                if eqn.primitive.name == "squeeze":
                    for axis in sorted(eqn.params["dimensions"]):
                        dims.insert(axis, ())
                elif eqn.primitive.name not in _SLICES and x.aval.shape != eqn.outvars[0].aval.shape:
                    continue
                if not any(self.of(x)):
                    self._record(x, tuple(dims))
        self.read(eqns)

    def inside(self, jaxpr: compat.Jaxpr, ins: Sequence[Dims]) -> "ShardedAxes":
        """Returns the shardings inside an inner jaxpr with operands sharded like `ins`."""
        inner = ShardedAxes(self.mesh)
        for v, dims in zip(jaxpr.invars, ins, strict=True):
            inner._record(v, dims)
        return inner.read(jaxpr.eqns)

    def inside_scan(self, eqn: compat.JaxprEqn, body: compat.Jaxpr) -> "ShardedAxes":
        """Returns the shardings inside the body of a `scan`; a carry is sharded as it ends up after all iterations."""
        first, last = compat.scan_sizes(eqn)[0], sum(compat.scan_sizes(eqn))
        ins = [self.of(v) for v in eqn.invars]
        ins[last:] = [d[1:] for d in ins[last:]]
        inner = self.inside(body, ins)
        for _ in range(sum(map(len, ins[first:last]))):  # each round but the last finds one more axis of a carry
            outs = [inner.of(v) for v in body.outvars[: last - first]]
            new = [
                tuple(a or b for a, b in zip(*pair, strict=True)) for pair in zip(ins[first:last], outs, strict=True)
            ]
            if new == ins[first:last]:
                break
            ins[first:last] = new
            inner = self.inside(body, ins)
        return inner

    def within(self, eqn: compat.JaxprEqn) -> Iterator[tuple[compat.Jaxpr, "ShardedAxes"]]:
        """Yields the jaxprs in an equation, each with the shardings of its values."""
        if eqn.primitive.name == "scan":
            body = inline(eqn.params["jaxpr"].jaxpr)
            yield body, self.inside_scan(eqn, body)
        elif (called := inner_jaxpr(eqn)) is not None:
            yield called, self.inside(called, [self.of(v) for v in eqn.invars])
        else:  # branches of `cond`, say; the body of `shard_map` runs on one device
            for jaxpr in compat.jaxprs_in(eqn.params):
                yield jaxpr, ShardedAxes(self.mesh).read(jaxpr.eqns)

    def _record(self, v: compat.Var, dims: Dims) -> None:
        """Records the mesh axes that divide the array, each once."""
        kept: list[Axes] = []
        seen: set[str] = set()
        for size, named in zip(v.aval.shape, dims, strict=True):
            axes = tuple(n for n in named if n in self.sizes)
            fits = not seen.intersection(axes) and size % math.prod(self.sizes[n] for n in axes) == 0
            kept.append(axes if fits else ())
            seen.update(kept[-1])
        self._found[v] = tuple(kept)

    def results(self, eqn: compat.JaxprEqn, ins: Sequence[Dims]) -> Sequence[Dims]:
        """Returns how the results of an equation are sharded if its operands are sharded like `ins`."""
        name = eqn.primitive.name
        if name == "scan":
            body = inline(eqn.params["jaxpr"].jaxpr)
            inner = self.inside_scan(eqn, body)
            outs = [inner.of(v) for v in body.outvars]
            carries = compat.scan_sizes(eqn)[1]
            return [*outs[:carries], *(((), *d) for d in outs[carries:])]
        if name == "shard_map":
            return [dims_of(s, len(v.aval.shape)) for s, v in zip(eqn.params["out_specs"], eqn.outvars, strict=True)]
        if (called := inner_jaxpr(eqn)) is not None:
            inner = self.inside(called, ins)
            return [inner.of(v) for v in called.outvars]
        if rule := _OWN_RULES.get(name):
            return [rule(eqn, ins)]
        return _by_factors(eqn, ins)


def inner_jaxpr(eqn: compat.JaxprEqn) -> compat.Jaxpr | None:
    """Returns the jaxpr, with calls inlined, that a call or a checkpoint runs on the same operands, or None."""
    if eqn.primitive.name == compat.CHECKPOINT:
        return inline(eqn.params["jaxpr"])
    called = compat.called_jaxpr(eqn)
    return None if called is None else inline(compat.constvars_to_invars(called.jaxpr)) if not called.consts else None


def dims_of(spec: PartitionSpec, ndim: int) -> Dims:
    """Returns the mesh axes of a spec for each array axis; axes that a constraint leaves open are not sharded."""
    entries = [*spec.partitions, *[None] * (ndim - len(spec.partitions))]
    return tuple(
        tuple(e) if isinstance(e, (tuple, list)) else (e,) if isinstance(e, str) else () for e in entries[:ndim]
    )


def _by_factors(eqn: compat.JaxprEqn, ins: Sequence[Dims]) -> list[Dims]:
    """Shards results by the factors of an equation; axes without a factor like an operand axis of the same size."""
    rules, num_operands = factors(eqn), len(eqn.invars)
    moves = any(a is not None and b not in (a, None) for f in rules for a in f.ins for b in f.outs)
    found = []
    for k, v in enumerate(eqn.outvars):
        each = not rules and len(eqn.outvars) == num_operands > 1  # each operand on its own, or all of one shape
        of = slice(k, k + 1) if each else slice(None)
        dims: list[Axes] = [()] * len(v.aval.shape) if moves else list(_kept(eqn.invars[of], ins[of], v))
        for factor in rules:
            if (axis := factor.outs[k]) is not None:
                dims[axis] = next((d[a] for a, d in zip(factor.ins, ins, strict=True) if a is not None and d[a]), ())
        found.append(tuple(dims))
    return found


def _kept(operands: Sequence[Atom], ins: Sequence[Dims], out: compat.Var) -> Dims:
    """Shards an axis like the same axis of an operand with the same rank and the same size of this axis."""
    shape = out.aval.shape
    dims: list[Axes] = [()] * len(shape)
    for v, d in zip(operands, ins, strict=True):
        if len(v.aval.shape) == len(shape):
            for i, axes in enumerate(d):
                if v.aval.shape[i] == shape[i] and not dims[i]:
                    dims[i] = axes
    return tuple(dims)


# --- not by factors: shardings that are asked for, axes that are merged ----------------------------


def _constraint(eqn: compat.JaxprEqn, ins: Sequence[Dims]) -> Dims:
    """Applies the constraint; axes that it leaves open, or that are Auto in its mesh, stay as they are."""
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    if not isinstance(sharding, NamedSharding):
        return ins[0]
    entries = [*sharding.spec.partitions, *[None] * (len(ins[0]) - len(sharding.spec.partitions))]
    pairs = zip(entries, ins[0], dims_of(sharding.spec, len(entries)), strict=True)
    if eqn.primitive.name == "reshard":
        explicit = sharding.mesh.explicit_axes
        return tuple((*new, *(n for n in old if n not in explicit)) for _, old, new in pairs)
    return tuple(old if entry is PartitionSpec.UNCONSTRAINED else new for entry, old, new in pairs)


def _reshape(eqn: compat.JaxprEqn, ins: Sequence[Dims]) -> Dims:
    """Keeps the sharding of an axis as the major part of the axis that it is merged into or cut into."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    starts: dict[int, int] = {}  # elements before an axis: the first such axis with more than one element
    count = 1
    for i, size in enumerate(new):
        if size > 1:
            starts.setdefault(count, i)
        count *= size
    dims: list[Axes] = [()] * len(new)
    count = 1
    for size, axes in zip(old, ins[0], strict=True):
        if axes and count in starts:
            dims[starts[count]] = axes
        count *= size
    return tuple(dims)


_OWN_RULES = {"sharding_constraint": _constraint, "reshard": _constraint, "reshape": _reshape}
_SLICES = ("squeeze", "dynamic_slice", "convert_element_type")
_SAYS = ("sharding_constraint", "reshard", "shard_map", "scan", "jit", compat.CHECKPOINT)
