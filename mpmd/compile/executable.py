"""Loads one compiled program on the devices of every group that runs it. A program may run as several parts."""

import dataclasses
import math
import os
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import memory_kind
from mpmd.compile.absent import needs_said
from mpmd.compile.progress import CompileProgress
from mpmd.graphs import equations


class Threads:
    """Threads that compile and load programs in parallel, since XLA releases Python's lock. Counts the programs."""

    def __init__(self):
        self.num_compiled = 0  # programs that were lowered, and compiled or found in JAX's cache
        self.num_stored = 0  # programs found without lowering, because an earlier process compiled them
        self.num_loaded = 0  # how often a program was loaded on further devices
        self._progress = CompileProgress()
        self._pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="mpmd-compile")

    def close(self) -> None:
        """Closes the threads: later work is done at once by its caller; work under way is finished."""
        self._pool.shutdown(wait=False)
        self._progress.close()

    def compile(self, lowered: jax.stages.Lowered, program: compat.XlaProgram) -> Future:
        """Compiles a program in a thread."""

        def work() -> compat.LoadedProgram:
            with self._progress.compiling(program.name), needs_said(program):
                return compat.compile_program(lowered, program)

        self.num_compiled += 1
        self._progress.expect()
        return self.submit(work)

    def submit(self, fun: Callable, *args: object) -> Future:
        """Calls `fun(*args)` in a thread."""
        try:
            return self._pool.submit(fun, *args)
        except RuntimeError:  # closed
            done: Future = Future()
            done.set_result(fun(*args))
            return done

    def after(self, first: Future, fun: Callable) -> Future:
        """Calls `fun` with the result of `first`, in a thread, as soon as it is ready."""
        done: Future = Future()

        def work() -> None:
            try:
                done.set_result(fun(first.result()))
            except BaseException as e:
                done.set_exception(e)

        first.add_done_callback(lambda _: self.submit(work))
        return done


@dataclasses.dataclass(eq=False)
class DistinctProgram:
    """A program that equals no other one: compiled once, for the first mesh that needs it, and loaded on the others.

    Attributes:
      program: the program to compile, on the first mesh of this process that needs it, else the first of all; its
        shardings may be on another mesh of that shape.
    """

    threads: Threads
    program: compat.XlaProgram
    family: str  # programs of one family may run as parts of each other
    parts: "Parts | None" = None  # other programs that it runs as, if any
    loaded: dict[Mesh, Any] = dataclasses.field(default_factory=dict)  # a Future until it is ready
    _first: Future | None = None  # of a `LoadedProgram`, or of None if the stored program cannot be loaded

    @property
    def jaxpr(self) -> compat.Jaxpr:
        """The jaxpr of the program."""
        return self.program.closed.jaxpr

    @property
    def runs(self) -> "tuple[DistinctProgram, ...]":
        """The programs that a call runs, one after the other."""
        return (self,) if self.parts is None else tuple(p for part in self.parts.programs for p in part.runs)

    def made_in(self, result: int) -> tuple[int, ...]:
        """Returns the number of the part that makes a result, then of the part in that part. Later ones are greater."""
        if self.parts is None:
            return ()
        position = self.parts.results[result] - len(self.jaxpr.invars)
        for number, part in enumerate(self.parts.programs):
            if 0 <= position < len(part.jaxpr.outvars):
                return number, *part.made_in(position)
            position -= len(part.jaxpr.outvars)
        return ()  # an argument

    @property
    def is_started(self) -> bool:
        """Whether its compilation has begun."""
        return self._first is not None

    @property
    def shardings(self) -> dict[compat.Var, NamedSharding | None]:
        """The shardings of its arguments and results."""
        program = self.program
        return dict(
            zip((*self.jaxpr.invars, *self.jaxpr.outvars), (*program.in_shardings, *program.out_shardings), strict=True)
        )

    def lower(self, mesh: Mesh, name: str | None = None) -> jax.stages.Lowered:
        """Lowers the program on a mesh of its shape, under its own name or another one."""
        placed = self._program_on(mesh)
        fun, invars = compat.jaxpr_as_fun(placed.closed), self.jaxpr.invars
        args = [compat.abstract(v.aval, s) for v, s in zip(invars, placed.in_shardings, strict=True)]

        def program(*args):
            with compat.tracing(mesh.abstract_mesh):
                return fun(*(_typed_as(v.aval, x) for v, x in zip(invars, args, strict=True)))

        program.__name__ = program.__qualname__ = name or placed.name
        with jax.set_mesh(mesh), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jitted = jax.jit(
                program,
                out_shardings=list(placed.out_shardings),
                donate_argnums=self._usable(placed),
                keep_unused=True,
                compiler_options=placed.options,
            )
            with compat.lowering(mesh.abstract_mesh):
                return jitted.lower(*args)

    def _usable(self, placed: compat.XlaProgram) -> list[int]:
        """Returns the arguments that results take over.

        Where XLA chooses one of the layouts, JAX forgets which values are in host memory (`_set_up_aliases` in its
        mlir.py). It would pair such a result with an argument of its type in device memory, and XLA would raise an
        error or crash the process.
        """
        avals = [v.aval for v in (*self.jaxpr.invars, *self.jaxpr.outvars)]
        forgets = None in (*placed.in_shardings, *placed.out_shardings)
        on_host = {(aval.shape, aval.dtype) for aval in avals if forgets and compat.memory_kind(aval)}
        return [i for i in placed.donate if (avals[i].shape, avals[i].dtype) not in on_host]

    def start(self, mesh: Mesh) -> None:
        """Begins to compile or load it, in a thread, unless that has begun."""
        if self.parts is not None:
            for part in self.parts.programs:
                part.start(mesh)
        elif self._first is None:
            self.loaded[mesh] = self._first = self._begin(mesh)
        elif mesh not in self.loaded and not compat.is_described(mesh.devices.flat[0]):
            self.loaded[mesh] = self.threads.after(self._first, lambda first: first and first.load_on(mesh))

    def _begin(self, mesh: Mesh) -> Future:
        """Begins to load the program that an earlier process stored, or to compile it."""
        program = self._program_on(mesh)
        if (serialized := program.stored()) is not None:
            self.threads.num_stored += 1
            return self.threads.submit(compat.load_stored, serialized, program)
        return self._compile(program)

    def _compile(self, program: compat.XlaProgram) -> Future:
        with needs_said(program):
            lowered = self.lower(program.mesh)
        return self.threads.compile(lowered, program)

    def _program_on(self, mesh: Mesh) -> compat.XlaProgram:
        ins, outs = (
            tuple(None if s is None else on_mesh(mesh, s) for s in shardings)
            for shardings in (self.program.in_shardings, self.program.out_shardings)
        )
        return dataclasses.replace(self.program, mesh=mesh, in_shardings=ins, out_shardings=outs)

    def _origin(self) -> compat.LoadedProgram:
        """Waits for the program on the first mesh, and returns it."""
        assert self._first is not None  # by start
        if self._first.result() is None:  # the stored program cannot be loaded
            self._first = self._compile(self._program_on(next(iter(self.loaded))))
        return self._first.result()

    def on(self, mesh: Mesh) -> Any:
        """Waits for the compilation, and returns a callable for flat arrays. After a failure, a call compiles again."""
        try:
            return self._on(mesh)
        except Exception:
            if self._first is not None and self._first.done() and self._first.exception() is not None:
                self._first = None
                self.loaded.clear()
            else:
                self.loaded.pop(mesh, None)
            raise

    def _on(self, mesh: Mesh) -> Any:
        self.start(mesh)
        found = self.loaded.get(mesh)
        if self.parts is not None:
            found = found or Chain(self, self.parts, mesh)
        elif found is None:  # described devices load nothing, and all groups have the same program
            found = self._origin().compiled
        elif isinstance(found, Future):
            found = self._waited(found, mesh)
        self.loaded[mesh] = found
        return found

    def _waited(self, found: Future, mesh: Mesh) -> jax.stages.Compiled:
        origin = self._origin()
        if next(iter(self.loaded)) == mesh:
            return origin.compiled
        compiled = found.result() or origin.load_on(mesh)
        if compiled is None:
            return self._compile(self._program_on(mesh)).result().compiled
        self.threads.num_loaded += 1
        return compiled

    def release(self) -> None:
        """Frees memory that is kept for loading on further meshes: no other mesh is expected."""
        first = self._first
        if first is not None and first.done() and first.exception() is None and first.result() is not None:
            first.result().release()

    def text(self, dialect: str, name: str) -> str:
        """Returns the program as passed to XLA under a name (`stablehlo`), or as compiled by XLA (`hlo`)."""
        mesh = next(iter(self.loaded), self.program.mesh)
        return self.lower(mesh, name).as_text("stablehlo") if dialect == "stablehlo" else self.on(mesh).as_text()


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program on one group's devices, perhaps still being compiled."""

    name: str  # its name in the step; an equal program may have been compiled under another name
    mesh: Mesh
    compiled: DistinctProgram
    in_shardings: tuple[NamedSharding, ...]  # on the group's mesh
    out_shardings: tuple[NamedSharding, ...]  # on the group's mesh

    @property
    def call(self) -> Any:
        """A callable from flat arrays to flat arrays. Waits for the compilation."""
        return self.compiled.on(self.mesh)

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        return self.call(*arrays)

    def start(self) -> None:
        """Begins to load it on the group's devices."""
        self.compiled.start(self.mesh)

    @property
    def runs(self) -> tuple[DistinctProgram, ...]:
        """The programs that a call runs, one after the other."""
        return self.compiled.runs


@dataclasses.dataclass(frozen=True)
class Parts:
    """Programs that run one after the other as one."""

    programs: tuple[DistinctProgram, ...]
    takes: tuple[tuple[int, ...], ...]  # per program, places of its arguments among the whole's and all results so far
    results: tuple[int, ...]  # positions of the whole's results
    inner: int  # the position of the part that other programs share
    nbytes: int  # bytes on each device that parts pass to each other

    @classmethod
    def whole(cls, program: DistinctProgram) -> "Parts":
        """Returns a program that is not divided as its only part."""
        num_args, num_results = len(program.jaxpr.invars), len(program.jaxpr.outvars)
        return cls((program,), (tuple(range(num_args)),), tuple(range(num_args, num_args + num_results)), 0, 0)


class Chain:
    """A program in parts on a group's devices, with the methods of `jax.stages.Compiled` that are used here."""

    def __init__(self, whole: DistinctProgram, parts: Parts, mesh: Mesh):
        self._whole = whole
        self._parts = parts
        self._calls = [program.on(mesh) for program in parts.programs]
        self._steps = list(zip(self._calls, parts.takes, strict=True))

    def __call__(self, *args: jax.Array):
        values = list(args)
        for call, takes in self._steps:
            values += call(*[values[i] for i in takes])
        return [values[i] for i in self._parts.results]

    def as_text(self) -> str:
        return "\n".join(call.as_text() for call in self._calls)

    def cost_analysis(self) -> dict[str, float]:
        return dict(sum((Counter(call.cost_analysis() or {}) for call in self._calls), Counter()))

    def memory_analysis(self) -> types.SimpleNamespace:
        """Returns the memory of the whole program. Temporaries: the largest of any part, plus values between parts."""
        whole, jaxpr = self._whole.program, self._whole.jaxpr
        sizes = [getattr(call.memory_analysis(), "temp_size_in_bytes", 0) for call in self._calls]
        return types.SimpleNamespace(
            argument_size_in_bytes=sum(map(nbytes_on_a_device, jaxpr.invars, whole.in_shardings)),
            output_size_in_bytes=sum(map(nbytes_on_a_device, jaxpr.outvars, whole.out_shardings)),
            temp_size_in_bytes=max(sizes) + self._parts.nbytes,
        )


def _typed_as(aval: compat.Aval, x: jax.Array) -> jax.Array:
    """Restores the sharding type of an argument: `jit` drops it beside Auto axes, and makes it Explicit in `auto_axes`.

    For a program on one device, XLA does not report axes of length 1, but the type of the value names them.
    """
    found, typed = jax.typeof(x).sharding, aval.sharding
    if found.mesh != typed.mesh:
        is_typed = typed.mesh.empty or (found.mesh.empty and typed.mesh.are_all_axes_auto)
    elif typed.mesh.size == 1 and not typed.spec.unreduced:
        is_typed = found.spec == typed.spec
    else:
        is_typed = found.spec.reduced == typed.spec.reduced
    if is_typed:
        return x
    with compat.use_abstract_mesh(typed.mesh):
        return jax.reshard(x, typed)


def nbytes_on_a_device(v: compat.Var, sharding: Any) -> int:
    """Returns the bytes that a device holds of a variable with this sharding."""
    return equations.nbytes(v.aval) * math.prod(sharding.shard_shape(v.aval.shape)) // max(1, equations.size(v.aval))


def on_mesh(mesh: Mesh, sharding: Any) -> NamedSharding:
    """Converts any kind of sharding that XLA reports to a `NamedSharding` on the group's mesh."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=memory_kind(sharding))
    if mesh.size == 1 or sharding.is_fully_replicated:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind(sharding))
    return compat.named_sharding(sharding, mesh)
