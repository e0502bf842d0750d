"""The costs of each unit of a loop's body, before anything is compiled: seconds by the roofline, bytes by types.

Operations are counted in the equations. The memory of a layer follows from the arrays that its equations read:
parameters with their gradients and their part of the optimizer's state, and forward values that its backward reads.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.costs.machine import Machine
from mpmd.costs.work import works
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.placed_body import PlacedBody, Span, place_in_units
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node
from mpmd.graphs.sharded_axes import ShardedAxes
from mpmd.tracing.state import match_state
from mpmd.tracing.trace import Trace
from scheduler.optimize.units import Units


def unit_costs(
    trace: Trace,
    eqn: compat.JaxprEqn,
    candidates: Candidates,
    mesh: MpmdMesh,
    machine: Machine,
    layouts: Mapping[compat.Var, Layout],
) -> Units:
    """Returns the costs of a loop, unit by unit; the arguments are those of `choose`."""
    placed = place_in_units(eqn, candidates)
    sizes = _Sizes(trace, eqn, placed.body, mesh, layouts)
    forward, input_grad, weight_grad = _seconds(placed, machine, mesh.groups[0].size)
    parameters = _Parameters(placed, sizes)
    held, shared = parameters.held()
    accumulated, once = parameters.traffic()
    weight_grad = tuple(w + machine.memory_s(nbytes) for w, nbytes in zip(weight_grad, accumulated, strict=True))
    crossing = _crossing(placed, sizes)
    is_near = sum(g.size for g in mesh.groups) <= machine.num_near
    transfer_s = tuple(machine.transfer_s(nbytes, is_near) for nbytes in crossing)
    activations = _activations(placed, sizes)
    once_s = tuple(map(machine.memory_s, once))
    return Units(forward, input_grad, weight_grad, transfer_s, held, activations, once_s, shared, machine.launch_s)


def _seconds(placed: PlacedBody, machine: Machine, num_devices: int) -> list[tuple[float, ...]]:
    """Returns the seconds of F, I and W of each unit."""
    seconds = [[0.0] * placed.num_units for _ in range(3)]
    for node in placed.body.nodes:
        if node.place is None or not node.per_microbatch:
            continue
        which = 0
        if node.place.kind == "B":
            which = 1 if any(v in placed.input_grads for v in node.eqn.outvars) else 2
        span = placed.spans[node.place.stage]
        each = machine.work_s(works([node.eqn]), num_devices) / span.num_units
        for unit in span.units:
            seconds[which][unit] += each
    return [tuple(one) for one in seconds]


class _Sizes:
    """Bytes on each device of a group."""

    def __init__(
        self, trace: Trace, eqn: compat.JaxprEqn, body: Body, mesh: MpmdMesh, layouts: Mapping[compat.Var, Layout]
    ):
        self.trace = trace
        self._root: dict[compat.Var, compat.Var] = {}
        before = list(itertools.takewhile(lambda e: e is not eqn, trace.jaxpr.eqns))
        for e in before:  # casts of parameters
            read = equations.variables(e.invars)
            if len(read) == 1 and len(e.outvars) == 1 and read[0].aval.shape == e.outvars[0].aval.shape:
                self._root[e.outvars[0]] = self.root(read[0])
        sharded = ShardedAxes(mesh.groups[0], {v: spec for v, (spec, _) in layouts.items()})
        self.nbytes = sharded.read([*before, *(node.eqn for node in body.nodes)]).nbytes

    def root(self, v: compat.Var) -> compat.Var:
        """Returns the argument of the step that `v` is a cast of, or `v` itself."""
        return self._root.get(v, v)


class _Parameters:
    """The memory that units always hold: parameters, their gradients, and their part of the optimizer's state."""

    def __init__(self, placed: PlacedBody, sizes: _Sizes):
        self.placed, self.sizes = placed, sizes
        self.trains = any(n.place is not None and n.place.kind == "B" for n in placed.body.nodes)
        self.units: dict[compat.Var, set[int]] = defaultdict(set)
        self.layers: dict[compat.Var, Span] = {}  # stacked parameters: an equal part for each layer of a scan
        for node in placed.body.nodes:
            if node.place is not None and node.per_microbatch:
                self._read(node, placed.spans[node.place.stage])

    def _read(self, node: Node, span: Span) -> None:
        is_layers = span.scan is not None and node.eqn.primitive.name == "scan"
        num_whole = sum(compat.scan_sizes(node.eqn)) if is_layers else 0
        for i, v in enumerate(node.eqn.invars):
            if isinstance(v, compat.Literal) or (source := self._source(v)) is None:
                continue
            if node.eqn.primitive.name == "dynamic_slice" and v in self.placed.body.operands:
                continue  # a microbatch of the data
            if is_layers and i >= num_whole:
                self.layers.setdefault(source, span)
            else:
                self.units[source].update(span.units)

    def _source(self, v: compat.Var) -> compat.Var | None:
        """Returns the operand that `v` is, or is a part of; None for values that each microbatch computes."""
        body = self.placed.body
        while (node := body.source(v)) is not None:
            if node.per_microbatch:
                return None
            read = equations.variables(node.eqn.invars)
            if not read:
                return None  # a constant
            if len(read) != 1 or equations.shrinks(node.eqn):
                return v if equations.size(v.aval) > 1 else None
            v = read[0]
        return v if v in body.operands and equations.size(v.aval) > 1 else None

    def held(self) -> tuple[tuple[float, ...], tuple[tuple[float, tuple[int, ...]], ...]]:
        """Returns the bytes of each unit, and the bytes that several units share."""
        ratio = self._state_ratio()
        held = [0.0] * self.placed.num_units
        shared = []
        for v in dict.fromkeys([*self.layers, *self.units]):
            nbytes = self._nbytes(v, ratio)
            units = sorted(self.units.get(v, ()))
            if not units and (span := self.layers[v]):
                for unit in span.units:
                    held[unit] += nbytes / span.num_units
            elif len(units) == 1:
                held[units[0]] += nbytes
            else:
                shared.append((nbytes, tuple(units)))
        return tuple(held), tuple(shared)

    def traffic(self) -> tuple[list[float], list[float]]:
        """Returns the bytes that each unit reads and writes to accumulate gradients, in every microbatch, and in the
        optimizer's update, once a step: the update reads the sums, and reads and writes parameters and state.
        """
        accumulated, once = ([0.0] * self.placed.num_units for _ in range(2))
        ratio = self._state_ratio() if self.trains else 0.0
        for v in dict.fromkeys([*self.layers, *self.units]):
            if not self._has_gradient(v):
                continue
            span = self.layers.get(v)
            units = span.units if span else sorted(self.units[v])
            own, of_argument = self.sizes.nbytes(v), self.sizes.nbytes(self.sizes.root(v))
            for unit in units:
                accumulated[unit] += 2 * own / (len(units) if span else 1)  # each reader has its own sum
                once[unit] += (own + 2 * of_argument * (1 + ratio)) / len(units)
        return accumulated, once

    def _has_gradient(self, v: compat.Var) -> bool:
        return self.trains and jax.dtypes.issubdtype(v.aval.dtype, np.inexact)

    def _nbytes(self, v: compat.Var, ratio: float) -> float:
        """Returns the bytes of a parameter, the argument it is cast from, its gradient, and its part of the state."""
        own, root = self.sizes.nbytes(v), self.sizes.root(v)
        if not self._has_gradient(v):
            return own
        of_argument = self.sizes.nbytes(root)
        return of_argument * (1 + ratio) + own + (own if root is not v else 0.0)

    def _state_ratio(self) -> float:
        """Returns the bytes of state that no loop reads (the optimizer's) per byte of parameters."""
        trace = self.sizes.trace
        args = trace.arguments
        state = {args[i] for i in match_state(trace) if i is not None}
        read = {self.sizes.root(v) for v in (*self.layers, *self.units)}
        parameters = sum(equations.nbytes(v.aval) for v in read)
        other = sum(equations.nbytes(v.aval) for v in state - read)
        return other / parameters if parameters else 0.0


def _activations(placed: PlacedBody, sizes: _Sizes) -> tuple[float, ...]:
    """Returns the bytes that each unit keeps of a microbatch for its backward."""
    body = placed.body
    found = [0.0] * placed.num_units
    kept: set[compat.Var] = set()
    for node in body.nodes:
        for _, v, source in _read(placed, node) if node.place is not None and node.place.kind == "B" else ():
            if source.place is None or source.place.kind != "F" or v in kept:
                continue
            kept.add(v)
            span = placed.spans[source.place.stage]
            nbytes = sizes.nbytes(v)
            is_stacked = span.scan is not None and source.eqn.outvars.index(v) >= compat.scan_sizes(source.eqn)[1]
            if is_stacked:
                for unit in span.units:
                    found[unit] += nbytes / span.num_units
            else:
                found[span.last] += nbytes
    return tuple(found)


def _read(placed: PlacedBody, node: Node) -> Iterator[tuple[int, compat.Var, Node]]:
    """Yields operands computed per microbatch: position, value behind views (readers repeat views), and its node."""
    for i, v in enumerate(node.eqn.invars):
        while (source := placed.body.source_in_loop(v)) is not None and equations.is_free_view(source.eqn):
            read = equations.variables(source.eqn.invars)
            if len(read) != 1:
                break
            v = read[0]
        if source is not None and source.place is not None:
            yield i, v, source


def _crossing(placed: PlacedBody, sizes: _Sizes) -> tuple[float, ...]:
    """Returns the bytes that cross behind each unit in the forward pass, if a stage ends there."""
    body = placed.body
    found = [0.0] * placed.num_units
    until: dict[compat.Var, int] = {}  # the last unit that reads a value of another span
    for node in body.nodes:
        if node.place is None or node.place.kind != "F":
            continue
        span = placed.spans[node.place.stage]
        is_layers = span.scan is not None and node.eqn.primitive.name == "scan"
        num_consts, num_carry = compat.scan_sizes(node.eqn) if is_layers else (0, 0)
        for i, v, _ in _read(placed, node):
            is_carried = 0 <= i - num_consts < num_carry
            until[v] = max(until.get(v, 0), span.first if is_carried else span.last)
        if is_layers:
            carried = node.eqn.outvars[:num_carry]
            for unit in range(span.first, span.last):
                found[unit] += sum(map(sizes.nbytes, carried))
    for v, reader in until.items():
        source = body.source_in_loop(v)
        assert source is not None and source.place is not None
        for unit in range(placed.spans[source.place.stage].last, reader):
            found[unit] += sizes.nbytes(v)
    return tuple(found)
