"""Data parallelism inside a group: sums over its devices are done once, after the loop, not for each microbatch.

Where the rows of a microbatch are sharded over devices, a gradient is a sum over these. Such an equation (a matrix
product over the rows, a sum of them, a scatter of their updates) runs in a `shard_map` that leaves out this sum: its
result has a leading axis, with one part for each device. Linear equations from there to the accumulator work on the
parts, the accumulator holds one part per device, and one sum after the loop makes the value. An accumulator of parts
takes as much memory on each device as a replicated one.

A value that a nonlinear equation reads (a norm per microbatch) is left as it was written.

With tensor parallelism, parts are over the axes that shard rows. Over an axis that shards the parameter, parts would be
larger than its gradient; there they are refused, from the accumulator back to the equations that it depends on. A sum
over an axis that shards other parameters (for a norm's scale, for the loss) gives way to a later sum over rows.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.specs import names_of
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node
from mpmd.graphs.linearity import is_linear_in, linear_in
from mpmd.graphs.sharded_axes import Axes, ShardedAxes, inner_jaxpr
from mpmd.ops.reductions import Add, Mean, dtype_of_sum, result_types
from mpmd.partition.accumulators import Accumulator
from mpmd.partition.local_sums import Local, local_sum
from mpmd.tracing.inline import inline
from mpmd.tracing.new_equations import Atom, Equations, trace_equations

# Values that may be in parts, each with the mesh axes over which it should have no parts.
Wanted = Mapping[Atom, frozenset[str]]


class Partial(NamedTuple):
    """A value as parts that add up to it, one for each device along mesh axes, stacked on a leading axis."""

    parts: compat.Var
    axes: Axes
    mesh: AbstractMesh  # the mesh that is set where the parts are made; inside of `auto_axes`, no type may have it


def sum_once(
    body: Body, accumulators: Sequence[Accumulator], sharded: ShardedAxes, num_microbatches: int
) -> tuple[Body, list[Accumulator], list[compat.JaxprEqn]]:
    """Accumulates parts per device where that is possible, in a body with places and without unused equations.

    Returns the body and its accumulators, and the equations that sum their results.
    """
    sharded = sharded.read(n.eqn for n in body.nodes)
    wanted = {v: _scattered_over(body, v, sharded) for v in _wanted(body, accumulators)}
    whole = {acc.value for acc in accumulators}.difference(wanted)
    nodes, partials = _in_parts(body, wanted, whole, sharded)
    after: list[compat.JaxprEqn] = []
    changed: list[Accumulator] = []
    for acc in accumulators:
        if acc.value not in wanted or (partial := partials.get(acc.value)) is None:
            changed.append(acc)
            continue
        start = functools.partial(acc.operation.init, partial.parts.aval, num_microbatches)
        result = compat.Var(result_types(start)[0])
        eqns, (total,) = trace_equations(_total, result)
        after += [e.replace(outvars=[acc.result if v is total else v for v in e.outvars]) for e in eqns]
        changed.append(dataclasses.replace(acc, value=partial.parts, result=result))
    return body.with_nodes(nodes), changed, after


def _wanted(body: Body, accumulators: Sequence[Accumulator]) -> set[Atom]:
    """Returns the values that are accumulated only by sums, in the task that makes them."""

    def is_sum(acc: Accumulator) -> bool:
        source = body.source_in_loop(acc.value)
        dtype = acc.value.aval.dtype
        if source is None or dtype == np.bool_ or (acc.operation == Mean() and dtype_of_sum(dtype) != dtype):
            return False  # parts of booleans are no sums, and parts of small integers wrap around
        return acc.operation in (Add(), Mean()) and acc.place == source.place

    return {a.value for a in accumulators} - {a.value for a in accumulators if not is_sum(a)}


def _scattered_over(body: Body, value: Atom, sharded: ShardedAxes) -> frozenset[str]:
    """Returns the axes that shard a parameter of this shape: parts of its gradient over them would be larger."""
    slices = [n for n in body.nodes if n.eqn.primitive.name == "dynamic_slice" and body.index in n.inputs]
    # A microbatch may have such a shape, and arrays of it that nothing reads.
    parameters = body.operands.difference(v for n in slices for v in n.inputs)
    parameters &= {v for n in body.nodes for v in n.inputs}
    same = [v for v in parameters if v.aval.shape == value.aval.shape]
    return frozenset(n for v in same for axes in sharded.of(v) for n in axes)


def _in_parts(
    body: Body, wanted: Wanted, whole: Set[Atom], sharded: ShardedAxes
) -> tuple[list[Node], Mapping[Atom, "Partial"]]:
    """Puts the `wanted` values in parts where possible; values in `whole` are reduced otherwise. Returns the nodes of
    the new body, and the parts.
    """
    place = {v: n.place for n in body.nodes if n.per_microbatch for v in n.eqn.outvars}
    summable = _summable(
        [n.eqn for n in body.nodes if n.per_microbatch],
        wanted,
        near=lambda v, eqn: place[v] is not None and place[v] == place[eqn.outvars[0]],
        whole=whole,
    )
    sums = _Sums(sharded, summable, frozenset().union(*wanted.values()))
    nodes: list[Node] = []
    for node in body.nodes:
        new = sums.replace(node.eqn)
        nodes += [node] if new is None else [dataclasses.replace(node, eqn=eqn) for eqn in new]
    return nodes, sums.partials


def _summable(
    eqns: Sequence[compat.JaxprEqn],
    wanted: Wanted,
    near: Callable[[compat.Var, compat.JaxprEqn], bool] = lambda v, eqn: True,
    whole: Collection[Atom] = (),
    inputs: Sequence[compat.Var] = (),
) -> Wanted:
    """Returns the values that may be in parts: only linear equations are between them and the `wanted` values.

    Args:
      near: returns whether an equation may read the parts of a value.
      inputs: further values to check.
    """
    readers: dict[Atom, list[compat.JaxprEqn]] = defaultdict(list)
    for eqn in eqns:
        for v in equations.variables(eqn.invars):
            readers[v].append(eqn)
    found: dict[Atom, frozenset[str]] = {}
    for v in (*(v for eqn in reversed(eqns) for v in eqn.outvars), *inputs):
        enough = v not in whole and (v in wanted or readers[v])
        if enough and all(is_linear_in(e, v) and found.keys() >= {*e.outvars} and near(v, e) for e in readers[v]):
            found[v] = wanted.get(v, frozenset()).union(*(found[out] for e in readers[v] for out in e.outvars))
    return found


# --- one equation after the other -----------------------------------------------------------------


class _Sums:
    """Replaces equations by equations that make parts of their results.

    Args:
      secondary: mesh axes to use for parts only where no other axes are possible.
    """

    def __init__(
        self,
        sharded: ShardedAxes,
        summable: Wanted,
        secondary: Collection[str],
        partials: Mapping[Atom, Partial] | None = None,
    ):
        self.partials: dict[Atom, Partial] = dict(partials or {})  # the values that are in parts so far
        self._sharded = sharded
        self._summable = summable
        self._secondary = secondary

    def replace(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn] | None:
        """Returns the equations that replace one, if its results can be in parts; None: it stays as it is."""
        with compat.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):
            try:
                return self._replaced(eqn)
            except (TypeError, ValueError, NotImplementedError):
                # JAX cannot type the parts on Explicit axes, or a primitive has no batching rule.
                return self._completed(eqn)

    def _replaced(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn] | None:
        if any(v in self.partials for v in equations.variables(eqn.invars)):
            return self._further(eqn) or self._linear(eqn)
        if not any(v in self._summable for v in eqn.outvars):
            return None
        if eqn.primitive.name == "scan":
            return self._scan(eqn)
        if eqn.primitive.name == compat.CHECKPOINT:
            return self._checkpoint(eqn)
        local = self._local(eqn)
        return None if local is None else self._rows(eqn, local)

    def _further(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn] | None:
        """Replaces an equation on parts over secondary axes that sums over axes of rows: parts over rows remain."""
        local = self._local(eqn) if eqn.outvars[0] in self._summable else None
        over = {n for v in equations.variables(eqn.invars) if v in self.partials for n in self.partials[v].axes}
        if local is None or not over.issubset(self._secondary) or set(self._secondary).intersection(local.axes):
            return None
        *before, whole = self._completed(eqn)
        return [*before, *self._rows(whole, local)]

    def _local(self, eqn: compat.JaxprEqn) -> Local | None:
        """Returns the plan of an equation on each device's rows; None if it should not run so."""
        return local_sum(eqn, self._sharded, self._summable.get(eqn.outvars[0], ()))

    def run(self, eqns: Iterable[compat.JaxprEqn]) -> list[compat.JaxprEqn]:
        """Replaces all equations that it can."""
        replaced = ((eqn, self.replace(eqn)) for eqn in eqns)
        return [e for eqn, new in replaced for e in ([eqn] if new is None else new)]

    def _rows(self, eqn: compat.JaxprEqn, local: Local) -> list[compat.JaxprEqn]:
        """Replaces an equation that sums over rows, so that each device sums its own rows."""

        def part(*operands):
            """Runs on one device: its leading axis has length 1, where `out_specs` joins the parts of all devices."""
            if eqn.primitive.name == "scatter-add":  # the operand that the rows are added to counts once
                operands = (_first_only(operands[0], lax.axis_index(local.axes)), *operands[1:])
            # A sharding of the whole result means nothing here, where axes are manual.
            params = {k: None if isinstance(x, NamedSharding) else x for k, x in eqn.params.items()}
            return eqn.primitive.bind(*operands, **params)[None]

        # Without `check_vma`, since JAX would add exactly the sum to leave out.
        parts = jax.shard_map(
            part, in_specs=local.in_specs, out_specs=local.out_spec, axis_names=local.manual, check_vma=False
        )

        def gathered(*operands):
            pairs = zip(operands, local.gathered, strict=True)
            return parts(*(x if spec is None else lax.with_sharding_constraint(x, spec) for x, spec in pairs))

        return self._traced(eqn, gathered, eqn.invars, local.axes)

    def _linear(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn]:
        """Runs an equation on the parts of its operands; operands without parts are added in the first part only."""
        first = next(i for i, v in enumerate(eqn.invars) if not isinstance(v, compat.Literal) and v in self.partials)
        added = linear_in(eqn, first)
        axes = next(self.partials[v].axes for v in equations.variables(eqn.invars) if v in self.partials)
        asked = [x.spec for x in eqn.params.values() if isinstance(x, NamedSharding)]
        if set(axes).intersection(n for spec in asked for n in names_of(spec)):
            return self._completed(eqn)
        before: list[compat.JaxprEqn] = []
        operands: list[Atom] = []
        mapped: list[int | None] = []
        once: list[bool] = []  # whether an operand is added in the first part only
        for i, v in enumerate(eqn.invars):
            partial = None if isinstance(v, compat.Literal) else self.partials.get(v)
            # Products of parts are not parts of the product, so all operands except one are summed before.
            if partial and (partial.axes != axes or (0 in mapped and i not in added)):
                eqns, (v,) = _whole(partial)
                before, partial = [*before, *eqns], None
            operands.append(v if partial is None else partial.parts)
            mapped.append(None if partial is None else 0)
            once.append(partial is None and i in added and not equations.is_zero(v))

        def part(number, *operands):
            pairs = zip(operands, once, strict=True)
            return eqn.primitive.bind(*(_first_only(x, number) if o else x for x, o in pairs), **eqn.params)

        def parts(*operands):
            if eqn.primitive.name in ("reshard", "sharding_constraint"):  # `vmap` would ask for replicated parts
                return _constrained_alike(eqn, operands[0], axes)
            return jax.vmap(part, in_axes=(0, *mapped))(self._numbers(axes), *operands)

        return [*before, *self._traced(eqn, parts, operands, axes)]

    def _completed(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn]:
        """Returns the equation unchanged, after sums of the operands that are in parts."""
        before: list[compat.JaxprEqn] = []
        operands: list[Atom] = []
        for v in eqn.invars:
            if not isinstance(v, compat.Literal) and v in self.partials:
                eqns, (v,) = _whole(self.partials[v])
                before += eqns
            operands.append(v)
        return [*before, eqn.replace(invars=operands)]

    def _checkpoint(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn] | None:
        """Replaces a checkpoint by one with some results in parts."""
        body = inner_jaxpr(eqn)
        assert body is not None
        inner = self._sharded.inside(body, [self._sharded.of(v) for v in eqn.invars])
        wanted, whole = self._inner_results(eqn, body)
        sums = _Sums(inner, _summable(body.eqns, wanted, whole=whole), self._secondary)
        eqns = sums.run(body.eqns)
        found = [sums.partials.get(v) if v in wanted else None for v in body.outvars]
        if not any(found):
            return None
        outs = [v if p is None else p.parts for v, p in zip(body.outvars, found, strict=True)]
        jaxpr = compat.new_jaxpr(body, eqns=eqns, outvars=outs)
        return self._call(eqn, {"jaxpr": jaxpr}, eqn.invars, found)

    def _scan(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn] | None:
        """Replaces a scan by one with some results in parts: stacked results, and sums that it carries.

        The body is replaced repeatedly, until no further carry is in parts: the result of one pass determines the axes
        of a carry's parts, and the values made from that carry are then in parts too.
        """
        closed, (first, num_carry) = eqn.params["jaxpr"], compat.scan_sizes(eqn)
        if closed.consts:
            return None
        body = inline(closed.jaxpr)
        inner = self._sharded.inside_scan(eqn, body)
        carries, last = body.invars[first : first + num_carry], body.outvars[:num_carry]
        wanted, whole = self._inner_results(eqn, body)
        summable = _summable(body.eqns, wanted, whole=whole, inputs=carries)
        while True:  # a carry is in parts from its first to its last round, and over the same axes, or not at all
            pairs = [(v, out) for v, out in zip(carries, last, strict=True) if out in wanted]
            whole = whole | {out for v, out in pairs if v not in summable}
            kept = {v: refused for v, refused in wanted.items() if v not in whole}
            for v, out in pairs:
                if out in kept:
                    kept[out] |= summable[v]
            if kept == wanted:
                break
            wanted = kept  # fewer values, or more refused axes for one
            summable = _summable(body.eqns, wanted, whole=whole, inputs=carries)
        parts: dict[Atom, Partial] = {}
        while True:
            sums = _Sums(inner, summable, self._secondary, parts)
            eqns = sums.run(body.eqns)
            found = [sums.partials.get(v) if v in wanted else None for v in body.outvars]
            pairs = list(zip(carries, found[:num_carry], strict=True))
            if not (more := {v: p._replace(parts=compat.Var(p.parts.aval)) for v, p in pairs if p and v not in parts}):
                break
            parts |= more  # there are only so many carries
        if any((p and p.axes) != (parts[v].axes if v in parts else None) for v, p in pairs):
            return None  # a carry must have the same type, and so the same parts, before and after a round
        if not any(found):
            return None
        ins = [parts[v].parts if v in parts else v for v in body.invars]
        outs = [v if p is None else p.parts for v, p in zip(body.outvars, found, strict=True)]
        jaxpr = compat.new_jaxpr(body, invars=ins, eqns=eqns, outvars=outs)
        before: list[compat.JaxprEqn] = []
        operands = list(eqn.invars)
        for k, v in enumerate(carries, start=first):
            if v in parts:
                more, (operands[k],) = trace_equations(functools.partial(self._placed, parts[v].axes), eqn.invars[k])
                before += more
        new = self._call(eqn, {"jaxpr": compat.ClosedJaxpr(jaxpr, ())}, operands, found, num_carry)
        return [*before, *new]

    def _inner_results(self, eqn: compat.JaxprEqn, body: compat.Jaxpr) -> tuple[Wanted, set[Atom]]:
        """Returns the results of an inner jaxpr that may be in parts, and the results that are needed as a whole."""
        wanted: dict[Atom, frozenset[str]] = {}
        whole: set[Atom] = set()
        for v, out in zip(body.outvars, eqn.outvars, strict=True):
            if isinstance(v, compat.Literal):
                continue
            if out in self._summable:
                wanted[v] = wanted.get(v, frozenset()) | self._summable[out]
            else:
                whole.add(v)
        return {v: refused for v, refused in wanted.items() if v not in whole}, whole

    def _call(
        self,
        eqn: compat.JaxprEqn,
        changes: Mapping[str, object],
        operands: Sequence[Atom],
        found: Sequence[Partial | None],
        stacked: int | None = None,
    ) -> list[compat.JaxprEqn]:
        """Binds an equation with a new inner jaxpr with results in parts; results from `stacked` on are stacks."""

        def call(*operands):
            outs = eqn.primitive.bind(*operands, **{**eqn.params, **changes})
            # A scan stacks its rounds in front of the axis of the parts, which must be the leading axis.
            below = [p is not None and stacked is not None and i >= stacked for i, p in enumerate(found)]
            return [jnp.moveaxis(x, 1, 0) if b else x for x, b in zip(outs, below, strict=True)]

        new = trace_equations(call, *operands)
        names: list[Any] = [new_v if p else v for new_v, v, p in zip(new.outs, eqn.outvars, found, strict=True)]
        for v, out, p in zip(eqn.outvars, new.outs, found, strict=True):
            if p is not None:
                assert isinstance(out, compat.Var)
                self.partials[v] = Partial(out, p.axes, eqn.ctx.cur_abstract_mesh)
        return [e.replace(source_info=eqn.source_info) for e in new.named(names)]

    def _traced(self, eqn: compat.JaxprEqn, fun: Callable, atoms: Sequence[Atom], axes: Axes) -> list[compat.JaxprEqn]:
        """Traces `fun` on `atoms`: its results are the parts of the results of `eqn`. Errors name the line of `eqn`."""
        eqns, outs = trace_equations(lambda *xs: jax.tree.leaves(fun(*xs)), *atoms)
        for v, out in zip(eqn.outvars, outs, strict=True):
            assert isinstance(out, compat.Var)
            self.partials[v] = Partial(out, axes, eqn.ctx.cur_abstract_mesh)
        return [e.replace(source_info=eqn.source_info) for e in eqns]

    def _placed(self, axes: Axes, x: jax.Array) -> jax.Array:
        """Returns a whole value as parts: all of it in the first, zeros in the others."""
        return jax.vmap(_first_only, in_axes=(None, 0))(x, self._numbers(axes))

    def _numbers(self, axes: Axes) -> jax.Array:
        numbers = jnp.arange(math.prod(self._sharded.sizes[n] for n in axes))
        lead = _explicit(axes, compat.current_mesh())
        return jax.reshard(numbers, PartitionSpec(lead)) if lead else numbers


def _explicit(axes: Axes, mesh: AbstractMesh) -> Axes:
    """Returns the Explicit axes among `axes`, which appear in types."""
    return tuple(n for n in axes if n in mesh.explicit_axes)


def _constrained_alike(eqn: compat.JaxprEqn, parts: jax.Array, axes: Axes) -> jax.Array:
    """Applies a sharding constraint to each part of its operand."""
    if eqn.primitive.name == "reshard":
        asked = eqn.params["dst_sharding"]
        if not asked.mesh.explicit_axes:
            return parts  # no constraint: JAX writes such equations without a mesh, or with Auto axes only
        lead = _explicit(axes, asked.mesh)
        return jax.reshard(parts, NamedSharding(asked.mesh, PartitionSpec(lead, *asked.spec.partitions)))
    asked = eqn.params["sharding"]  # has only Auto axes
    explicit = _explicit(axes, asked.mesh)
    lead = tuple(n for n in axes if n not in explicit)
    return lax.with_sharding_constraint(parts, NamedSharding(asked.mesh, PartitionSpec(lead, *asked.spec.partitions)))


def _whole(partial: Partial) -> Equations:
    """Returns the equations that sum parts, under the mesh of the parts."""
    with compat.use_abstract_mesh(partial.mesh):
        return trace_equations(_total, partial.parts)


def _total(parts: jax.Array) -> jax.Array:
    """Sums over the leading axis, in the dtype of the parts."""
    return lax.reduce(parts, np.zeros((), parts.dtype), lax.add, (0,))


def _first_only(x: jax.Array, number: jax.Array) -> jax.Array:
    """Returns a value in the first part, zeros in the others."""
    return jnp.where(number == 0, x, jnp.zeros_like(x))
