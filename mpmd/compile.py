"""One executable per distinct task or segment, with shardings found in data-flow order.

What a program's inputs are sharded like is known from the user, from the program that made them, or (the
first use of an argument) chosen by XLA; its outputs tell the next program. The whole step is never compiled
as one. Equal programs are compiled once and loaded on the devices of each group that runs them.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd import costs
from mpmd.errors import StageError
from mpmd.markers import explicit_sharding
from mpmd.transfer import memory_kind


class Executable:
    """A program on one group's devices, perhaps still being compiled.

    Attributes:
      in_shardings, out_shardings: `NamedSharding`s on the group's mesh.
    """

    def __init__(self, name: str, mesh: Mesh, compiled: "_Distinct", in_shardings, out_shardings):
        self.name = name
        self.mesh = mesh
        self.in_shardings: tuple[NamedSharding, ...] = tuple(in_shardings)
        self.out_shardings: tuple[NamedSharding, ...] = tuple(out_shardings)
        self._compiled = compiled

    @property
    def call(self) -> Any:
        """Takes and returns flat arrays; waits for the compilation."""
        return self._compiled.on(self.mesh)


class _Distinct:
    """One distinct program: compiled once, on the mesh that asked first, and loaded on the others."""

    def __init__(self, compiler: "Compiler", build: Callable):
        self.compiler = compiler
        self.build = build
        self.loaded: dict[Mesh, Any] = {}  # a Future while it is compiled

    def start(self, mesh: Mesh) -> None:
        """Begins to compile, in a thread, unless it has begun."""
        if not self.loaded:
            self.compiler.num_compiled += 1
            self.loaded[mesh] = self.compiler.submit(self.build(mesh).compile)

    def on(self, mesh: Mesh) -> Any:
        self.start(mesh)
        found = self.loaded.get(mesh)
        if isinstance(found, Future):
            found = self._callable(found.result(), mesh)
        if found is None:
            origin = next(iter(self.loaded))
            found = compat.load_on(self.compiled_on(origin), mesh)
            if found is None:
                found = self.build(mesh).compile()
                self.compiler.num_compiled += 1
            else:
                self.compiler.num_loaded += 1
            found = self._callable(found, mesh)
        return found

    def compiled_on(self, mesh: Mesh) -> jax.stages.Compiled:
        """As `on`, for everything but calls."""
        found = self.on(mesh)
        return found.compiled if isinstance(found, _ByJit) else found

    def _callable(self, compiled, mesh: Mesh):
        if any(_is_sub_byte(a.dtype) for a in jax.tree.leaves(compiled.args_info)):
            compiled = _ByJit(compiled, self.build(mesh, by_jit=True), mesh)
        self.loaded[mesh] = compiled
        return compiled


class _ByJit:
    """A program called through `jax.jit`: on CPU devices, compiled ones refuse int4 arguments, theirs among them."""

    def __init__(self, compiled: jax.stages.Compiled, jitted: Callable, mesh: Mesh):
        self.compiled, self._jitted, self._mesh = compiled, jitted, mesh

    def __call__(self, *args):
        with compat.use_mesh(self._mesh):
            return self._jitted(*args)

    def __getattr__(self, name):
        return getattr(self.compiled, name)


def _is_sub_byte(dtype) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.integer) and jax.numpy.iinfo(dtype).bits < 8


class Compiler:
    """Compiles jaxprs for groups, each distinct one once. Counts what it did.

    Programs whose shardings are all known beforehand (groups of one device; Explicit axes) are compiled in
    threads beside each other: XLA does not hold Python's lock. What runs in other processes alone is compiled here
    only where the shardings that it tells are needed.

    Args:
      traced_on: the abstract mesh that jaxprs come on.
      own: the meshes of this process's groups.
    """

    def __init__(self, traced_on: AbstractMesh, own: Sequence[Mesh]):
        self.traced_on = traced_on
        self._own = {_shape(mesh): mesh for mesh in reversed(own)}
        self._is_own = set(own)
        self.num_compiled = 0
        self.num_loaded = 0
        self._distinct: dict = {}
        self._kept: list = []
        self._closed = False
        self._threads = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="mpmd-compile")

    def close(self):
        """No more programs will come; those under way are finished."""
        self._threads.shutdown(wait=False)
        self._closed = True

    def submit(self, fun: Callable) -> Future:
        """Calls `fun` in a thread; at once where none is left."""
        if not self._closed:
            return self._threads.submit(fun)
        done: Future = Future()
        done.set_result(fun())
        return done

    def compile(
        self,
        name: str,
        closed: compat.ClosedJaxpr,
        mesh: Mesh,
        in_shardings: Sequence[NamedSharding | None],
        out_shardings: Sequence[NamedSharding | None],
        donate: Sequence[int] = (),
    ) -> Executable:
        """`closed` (traced on `traced_on`) for the group `mesh`.

        Args:
          name: for HLO dumps and profiles.
          in_shardings, out_shardings: None lets XLA choose.
          donate: arguments whose memory the program may take over.
        """
        try:
            closed = compat.rebase(closed, mesh.abstract_mesh, self.traced_on)
        except ValueError as e:
            raise StageError(
                f"{name} does not fit the group's mesh {dict(mesh.shape)}; the step was traced on"
                f" {dict(self.traced_on.shape)}.\n  {e}\n"
                "  Groups that run a stage need the mesh axes that the stage names."
            ) from None
        replicated = NamedSharding(mesh, PartitionSpec())
        ins = [s or _typed(v.aval, mesh) for s, v in zip(in_shardings, closed.jaxpr.invars, strict=True)]
        outs = [s or _typed(v.aval, mesh) for s, v in zip(out_shardings, closed.jaxpr.outvars, strict=True)]
        if not any(ins) and not any(outs):
            ins, outs = ([replicated, *ins[1:]], outs) if ins else (ins, [replicated for _ in outs])
        key = (
            compat.jaxpr_key(closed), _shape(mesh),
            tuple(map(_spec, ins)), tuple(map(_spec, outs)), tuple(donate), mesh.devices.flat[0].platform,
        )  # fmt: skip
        known = all(s is not None for s in (*ins, *outs))
        if key not in self._distinct:
            self._kept.append(closed)  # keys hold identities of its constants

            def build(mesh: Mesh, by_jit=False):
                return _lowered(name, closed, mesh, ins, outs, donate, by_jit)

            self._distinct[key] = _Distinct(self, build)
        distinct = self._distinct[key]
        if mesh in self._is_own:
            distinct.start(mesh)
        if not known:
            distinct.start(self._own.get(_shape(mesh), mesh))
            compiled = distinct.on(next(iter(distinct.loaded)))
            ins, outs = compiled.input_shardings[0], compiled.output_shardings
        return Executable(name, mesh, distinct, (_on(mesh, s) for s in ins), (_on(mesh, s) for s in outs))


def _shape(mesh: Mesh):
    return mesh.axis_names, mesh.devices.shape, mesh.axis_types


def _lowered(name, closed, mesh, ins, outs, donate, by_jit):
    fun = compat.jaxpr_as_fun(closed)

    def program(*args):
        return fun(*(_typed_as(v.aval, x) for v, x in zip(closed.jaxpr.invars, args, strict=True)))

    program.__name__ = program.__qualname__ = name
    ins = [None if s is None else _on(mesh, s) for s in ins]
    outs = [None if s is None else _on(mesh, s) for s in outs]
    args = [_abstract(v.aval, s) for v, s in zip(closed.jaxpr.invars, ins, strict=True)]
    with compat.use_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        jitted = jax.jit(program, out_shardings=outs, donate_argnums=tuple(donate), keep_unused=True)
        return jitted if by_jit else jitted.lower(*args)


def _typed_as(aval, x):
    """An argument whose sharding XLA chooses has no type on Explicit axes beside Auto ones; here it gets it."""
    typed = explicit_sharding(aval)
    return x if typed is None or not jax.typeof(x).sharding.mesh.empty else jax.reshard(x, typed.spec)


def _abstract(aval, sharding):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _typed(aval, mesh: Mesh) -> NamedSharding | None:
    """The sharding that follows from a type alone: on one device, on Explicit axes, of scalars."""
    kind = compat.memory_kind(aval)
    if mesh.size == 1 or costs.size(aval) <= 1:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    typed = getattr(aval, "sharding", None)
    if typed is not None and all(t == AxisType.Explicit for t in mesh.axis_types):
        return NamedSharding(mesh, typed.spec, memory_kind=kind)
    return None


def _spec(sharding):
    return None if sharding is None else (str(sharding.spec), memory_kind(sharding))


def _on(mesh: Mesh, sharding) -> NamedSharding:
    """Whatever kind of sharding XLA reports, as a spec on the group's mesh."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=memory_kind(sharding))
    if mesh.size == 1 or sharding.is_fully_replicated:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind(sharding))
    return compat.named_sharding(sharding, mesh)
