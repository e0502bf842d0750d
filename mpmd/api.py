"""`mpmd.jit`: from a user's step to a running pipeline, in the stages that `jax.jit` has.

    jit(step) ── .trace ──► Traced ── .lower ──► Lowered ── .compile ──► Compiled ──► call

Each stage can be printed and asked; calling the decorated step runs through them once per set of shapes.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd import transfer
from mpmd.array import MpmdArray
from mpmd.errors import StageError
from mpmd.execute import Executor
from mpmd.explain import explain, flops_per_step, memory_by_group
from mpmd.mesh import MpmdMesh, MpmdSharding
from mpmd.outline import Outline, outline_step
from mpmd.program import step_program
from mpmd.stepping import StepPrograms, compile_step
from mpmd.timing import Timed, timeline
from mpmd.trace import Trace, trace_step
from scheduler import Program, Timeline


@overload
def jit(
    fun: Callable,
    *,
    mpmd_mesh: MpmdMesh,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    donate_argnums: int | tuple[int, ...] = ...,
    static_argnums: int | tuple[int, ...] = ...,
) -> "Jitted": ...


@overload
def jit(
    fun: None = None,
    *,
    mpmd_mesh: MpmdMesh,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    donate_argnums: int | tuple[int, ...] = ...,
    static_argnums: int | tuple[int, ...] = ...,
) -> "Callable[[Callable], Jitted]": ...


def jit(
    fun: Callable | None = None,
    *,
    mpmd_mesh: MpmdMesh,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | tuple[int, ...] = (),
    static_argnums: int | tuple[int, ...] = (),
) -> Any:
    """Compiles a training step for the groups of `mpmd_mesh`, as a pipeline where it has `mpmd.treduce` loops.

    The step is traced once per set of argument shapes, cut where `mpmd.mark_stage_end` says, and run by the
    schedules of its loops. It computes what `jax.jit(fun)` computes.

    Args:
      fun: the step. Without it, a decorator is returned.
      mpmd_mesh: the groups of devices.
      in_shardings, out_shardings: pytree prefixes of the arguments and of the result; leaves are `MpmdSharding`
        (groups and spec), `NamedSharding` or `PartitionSpec` (spec; groups are found) or None (all is found).
      donate_argnums: arguments whose memory the step may take over, as in `jax.jit`. They are deleted.
      static_argnums: arguments that are part of the program, as in `jax.jit`.

    Returns:
      A callable with `.trace`, `.lower` and `.eval_shape`. It takes host arrays, arrays of this process and
      MpmdArrays, and returns MpmdArrays. State that is returned in the place of an argument stays in its groups.

    Raises:
      StageError: at the first call (or at `.trace`, `.lower`) if the step cannot be cut; it says where and why.

    Example:
      >>> import jax, jax.numpy as jnp, mpmd, scheduler
      >>> mesh = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 2)
      >>> def loss(w, x): return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)
      >>> @mpmd.jit(mpmd_mesh=mesh)
      ... def step(w, xs):
      ...     grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2))
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
      >>> w = step([jnp.eye(3)] * 2, jnp.ones((4, 2, 3)))   # 4 microbatches of 2 rows
    """
    if fun is None:
        return functools.partial(
            jit, mpmd_mesh=mpmd_mesh, in_shardings=in_shardings, out_shardings=out_shardings,
            donate_argnums=donate_argnums, static_argnums=static_argnums,
        )  # fmt: skip
    if not isinstance(mpmd_mesh, MpmdMesh):
        raise TypeError(f"mpmd.jit: mpmd_mesh is a {type(mpmd_mesh).__name__}. Pass an mpmd.MpmdMesh.")
    if not callable(fun):
        raise TypeError(f"mpmd.jit: fun is a {type(fun).__name__}. Pass the step, a function.")
    return Jitted(fun, mpmd_mesh, in_shardings, out_shardings, _ints(donate_argnums), _ints(static_argnums))


def _ints(x) -> tuple[int, ...]:
    return (x,) if isinstance(x, int) else tuple(x)


class Jitted:
    """What `mpmd.jit` returns: the step, compiled anew for each new set of argument shapes."""

    def __init__(self, fun, mpmd_mesh, in_shardings, out_shardings, donate_argnums, static_argnums):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._mesh = mpmd_mesh
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._donate = donate_argnums
        self._static = static_argnums
        self._cache: dict[Any, list[Compiled]] = {}

    def __call__(self, *args, **kwargs):
        call = self._read(args, kwargs)
        for compiled in self._cache.get(call.key, ()):
            if compiled._fits(call.leaves):
                return compiled._run(call.leaves)
        compiled = self._trace(call).lower().compile()
        self._cache.setdefault(call.key, []).append(compiled)
        return compiled._run(call.leaves)

    def trace(self, *args, **kwargs) -> "Traced":
        """The step as one jaxpr, for arguments of these shapes (`jax.ShapeDtypeStruct` will do)."""
        return self._trace(self._read(args, kwargs))

    def lower(self, *args, **kwargs) -> "Lowered":
        """The step, cut into tasks and placed on groups."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args, **kwargs):
        """The shapes and dtypes of the result; nothing is compiled."""
        traced = self.trace(*args, **kwargs)._trace
        out = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.outvars]
        return jax.tree.unflatten(traced.out_tree, out)

    def _read(self, args, kwargs) -> "_Call":
        static = {i % len(args) if args else i for i in self._static}
        missing = [i for i in static if i >= len(args)]
        if missing:
            raise ValueError(
                f"mpmd.jit: static_argnums has {missing[0]}, but the step was called with {len(args)} arguments."
            )
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        fixed = tuple((i, args[i]) for i in sorted(static))
        for i, value in fixed:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"mpmd.jit: static argument {i} is a {type(value).__name__}, which cannot be hashed."
                ) from None
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        explicit = {
            n for n, t in zip(self._mesh.lowering_mesh().axis_names, self._mesh.lowering_mesh().axis_types, strict=True)
            if t == AxisType.Explicit
        } - {self._mesh.mpmd_axis_name}  # fmt: skip
        types = tuple(_leaf_type(x, explicit) for x in leaves)
        return _Call(len(args), fixed, leaves, tree, types, (tree, fixed, types))

    def _trace(self, call: "_Call") -> "Traced":
        names = _argument_names(self._fun, call)
        _check_leaves(call.leaves, names)
        args_tree, kwargs_tree = call.tree.children()
        wish = _broadcast(
            self._in_shardings, args_tree, "in_shardings", skip=[i for i, _ in call.fixed], total=call.num_args
        )
        wish += [None] * kwargs_tree.num_leaves
        hints = [_hint(w, x, self._mesh, n) for w, x, n in zip(wish, call.leaves, names, strict=True)]
        lowering = self._mesh.lowering_mesh()
        avals = [
            _traced_type(x, h, lowering, self._mesh.mpmd_axis_name) for x, h in zip(call.leaves, hints, strict=True)
        ]

        def fun(*dynamic, **kwargs):
            args = list(dynamic)
            for i, value in call.fixed:
                args.insert(i, value)
            return self._fun(*args, **kwargs)

        trace = trace_step(fun, avals, call.tree, names, self._mesh)
        donated = _donated(call, self._donate)
        return Traced(trace, self, tuple(hints), donated)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one call, flat."""

    num_args: int
    fixed: tuple[tuple[int, Any], ...]
    leaves: list
    tree: Any
    types: tuple
    key: Any


@dataclasses.dataclass(frozen=True)
class _Hint:
    """What is known of an argument's (or result's) layout before the step is placed."""

    groups: frozenset[int] | None = None
    layout: tuple[PartitionSpec, str | None] | None = None


# --- stages ---------------------------------------------------------------------------------------


class Traced:
    """A step as one jaxpr. `str()` prints it."""

    def __init__(self, trace: Trace, owner: Jitted, hints: tuple[_Hint, ...], donated: frozenset[int]):
        self._trace = trace
        self._owner = owner
        self._hints = hints
        self._donated = donated

    @property
    def jaxpr(self):
        """The jaxpr, flat; loops are `treduce` equations."""
        return compat.ClosedJaxpr(self._trace.jaxpr, ())

    @property
    def out_tree(self):
        """The structure of the result."""
        return self._trace.out_tree

    def lower(self) -> "Lowered":
        """Cuts the step into tasks and places everything on groups."""
        owner, trace = self._owner, self._trace
        wish = _broadcast(owner._out_shardings, trace.out_tree, "out_shardings")
        outs = [
            _hint(w, None, owner._mesh, n) if w is not None else _Hint()
            for w, n in zip(wish, trace.out_names, strict=True)
        ]
        outline = outline_step(trace, owner._mesh, [h.groups for h in self._hints], [h.groups for h in outs])
        return Lowered(outline, owner._mesh, self._hints, tuple(outs), self._donated)

    def __str__(self):
        return str(self._trace)


class Lowered:
    """A step, cut into tasks and segments. `.as_text()` prints the partition."""

    def __init__(self, outline: Outline, mesh: MpmdMesh, ins, outs, donated):
        self._outline = outline
        self._mesh = mesh
        self._ins = ins
        self._outs = outs
        self._donated = donated

    def as_text(self) -> str:
        """Each stage's tasks: their equations, what they read and write, and the bytes that cross."""
        return str(self._outline)

    __str__ = as_text

    def compile(self) -> "Compiled":
        """Compiles each distinct task once, builds the program and checks it."""
        programs = compile_step(
            self._outline, self._mesh, [h.layout for h in self._ins], [h.layout for h in self._outs], self._donated
        )
        return Compiled(programs, step_program(programs), self._donated)


class Compiled:
    """A compiled step: call it with arguments of the shapes that it was compiled for.

    Attributes:
      timing: set it to True to have calls measured for `.last_timeline()`.
    """

    def __init__(self, programs: StepPrograms, program: Program, donated: frozenset[int]):
        self._programs = programs
        self._program = program
        self._donated = donated
        self._executor = Executor(programs, program)
        self._timed: list[Timed] | None = None
        self.timing = False
        outline = programs.outline
        trace = outline.trace
        mesh = programs.mesh
        num_consts = len(trace.consts)
        invars = trace.jaxpr.invars
        in_shardings = [
            _mpmd_sharding(mesh, groups, programs.layouts[v]) for v, groups in zip(invars, outline.inputs, strict=True)
        ]
        self._consts = [
            {g: transfer.put(c, s.group_sharding(g)) for g in groups}
            for c, s, groups in zip(trace.consts, in_shardings, outline.inputs, strict=False)
        ]
        self._ins = in_shardings[num_consts:]
        self._in_avals: list[Any] = [v.aval for v in invars[num_consts:]]
        self._in_tree = trace.in_tree
        self._outs = [
            (
                _mpmd_sharding(mesh, groups, _layout(programs, v)),
                v.aval.shape,
                v.aval.dtype,
                getattr(v.aval, "weak_type", False),
            )
            for v, groups in outline.outputs
        ]
        self._out_tree = trace.out_tree

    # --- what it is -------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """What each group runs, sends, receives and frees; checked."""
        return self._program

    @property
    def input_shardings(self):
        """`(args, kwargs)` of `MpmdSharding`, as in `jax.stages.Compiled`."""
        return jax.tree.unflatten(self._in_tree, self._ins)

    @property
    def output_shardings(self):
        """The result's tree of `MpmdSharding`."""
        return jax.tree.unflatten(self._out_tree, [s for s, *_ in self._outs])

    @property
    def in_tree(self):
        """The structure of `(args, kwargs)`."""
        return self._in_tree

    @property
    def out_tree(self):
        """The structure of the result."""
        return self._out_tree

    def as_text(self) -> str:
        """The partition and the program, for people."""
        return f"{self._programs.outline}\n\n{self._program}"

    def explain(self) -> str:
        """What runs where: parameters and bytes per stage, transfers, executables, the schedule's bubble."""
        return explain(self._programs, self._program, self._executor, self._in_avals, self._ins)

    def memory_analysis(self) -> dict[int, dict[str, int]]:
        """Per group, bytes of arguments and of the largest temporaries of any executable, as XLA reports them."""
        return memory_by_group(self._programs, self._program, self._in_avals, self._ins)

    def cost_analysis(self) -> dict[str, float]:
        """Floating-point operations of one step, by XLA's cost analysis of each executable."""
        return {"flops": flops_per_step(self._programs, self._program)}

    def last_timeline(self) -> Timeline:
        """When each task of the (last) loop ran, measured.

        Of the last call while `.timing` was True (each task is then waited for, so calls are slower); if there was
        none, of one call on zeros that is made now. `Costs.measured` of it feeds `scheduler.simulate` and `search`.

        Raises:
          ValueError: the step has no pipelined loop.
        """
        if not self._programs.loops:
            raise ValueError("last_timeline: the step has no treduce loop, so there are no tasks to show.")
        if self._timed is None:
            zeros = [
                {g: jax.jit(functools.partial(_zeros, v.aval), out_shardings=s.group_sharding(g))() for g in s.groups}
                for v, s in zip(self._programs.outline.trace.jaxpr.invars[len(self._consts) :], self._ins, strict=True)
            ]
            for _ in range(2):  # the first run of an executable is not typical; donated zeros are made anew
                _, self._timed = self._executor.timed([*self._consts, *jax.tree.map(lambda x: x.copy(), zeros)])
        assert self._timed is not None
        return timeline(self._timed, self._programs.loops[-1].loop.schedule.placement)

    # --- running ----------------------------------------------------------------------------------

    def __call__(self, *args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._in_tree:
            raise TypeError(
                "mpmd: the compiled step was called with another structure of arguments.\n"
                f"  got      {tree}\n  expected {self._in_tree}"
            )
        _check_leaves(leaves, self._programs.outline.trace.in_names)
        faults = [
            f"  {name}: got {_short(x)}, expected {aval.str_short()}"
            for name, x, aval in zip(self._programs.outline.trace.in_names, leaves, self._in_avals, strict=True)
            if _leaf_type(x, frozenset())[:2] != (aval.shape, aval.dtype)
        ]
        if faults:
            raise TypeError(
                "mpmd: the compiled step was called with other shapes or dtypes;"
                " call the jitted step to compile again.\n" + "\n".join(faults)
            )
        return self._run(leaves)

    def _fits(self, leaves) -> bool:
        """Whether every MpmdArray lies as this program takes it, so that nothing need move."""
        for x, sharding in zip(leaves, self._ins, strict=True):
            if (
                type(x) is MpmdArray
                and x._mpmd_sharding is not sharding
                and not x._mpmd_sharding.is_equivalent_to(sharding, x.ndim)
            ):
                return False
        return True

    def _run(self, leaves):
        arguments = [*self._consts, *(map(self._place, leaves, self._ins, self._in_avals))]
        if self.timing:
            results, self._timed = self._executor.timed(arguments)
        else:
            results = self._executor(arguments)
        kept = {id(a) for arrays in results for a in arrays.values()} if self._donated else set()
        for i in self._donated:
            _consume(leaves[i], arguments[len(self._consts) + i], kept)
        out = [
            MpmdArray._unchecked(arrays, sharding, shape, dtype, weak)
            for arrays, (sharding, shape, dtype, weak) in zip(results, self._outs, strict=True)
        ]
        return jax.tree.unflatten(self._out_tree, out)

    def _place(self, x, sharding: MpmdSharding, aval) -> dict[int, jax.Array]:
        if type(x) is MpmdArray:
            x._check_not_gone()
            if x._mpmd_sharding is sharding or x._mpmd_sharding.is_equivalent_to(sharding, x.ndim):
                return x._arrays
            x = x._readable()
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable:
                raise ValueError(
                    f"mpmd: {x.aval.str_short()} spans other processes in the layout {x.sharding}.\n"
                    "  Bring it into the step's layout first:"
                    " reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, compiled.input_shardings[0])."
                )
        else:
            x = np.asarray(x, aval.dtype)
        placed: dict[int, jax.Array] = {}
        for group in sharding.groups:
            placed[group] = transfer.put(x, sharding.group_sharding(group))
        return placed


# --- arguments ------------------------------------------------------------------------------------


def _leaf_type(x, explicit):
    """Shape, dtype, weak type and the spec on Explicit axes of one argument."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        aval = compat.shaped_array(x)
        return aval.shape, aval.dtype, aval.weak_type, ()
    sharding = getattr(x, "sharding", None) if explicit else None
    spec = _only(sharding.spec, explicit) if isinstance(sharding, NamedSharding) else ()
    return (
        x.shape,
        jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True),
        getattr(x, "weak_type", False),
        spec,
    )


def _only(spec, names) -> tuple:
    """The part of a spec on the axes `names`, as a tuple without trailing Nones."""
    entries = []
    for entry in spec:
        kept = tuple(n for n in (entry if isinstance(entry, tuple) else (entry,)) if n in names)
        entries.append(kept or None)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def _traced_type(x, hint: _Hint, mesh, mpmd_axis) -> jax.ShapeDtypeStruct:
    """The type under which an argument is traced: with a sharding on Explicit axes, where it has one."""
    shape, dtype, weak, _ = _leaf_type(x, frozenset())
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit} - {
        mpmd_axis
    }
    spec, kind = hint.layout or (PartitionSpec(), None)
    typed = PartitionSpec(*(e if e is None or len(e) > 1 else e[0] for e in _only(spec, explicit)))
    sharding = NamedSharding(mesh.abstract_mesh, typed, memory_kind=kind) if kind or len(typed) else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)


def _hint(wish, x, mesh: MpmdMesh, name: str) -> _Hint:
    """What the user's sharding, or else the argument itself, says of its layout."""
    if isinstance(x, MpmdArray) and wish is None:
        wish = x.mpmd_sharding
    if (
        wish is None
        and isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        and isinstance(x.sharding, (NamedSharding, MpmdSharding))
    ):
        wish = x.sharding
        if isinstance(wish, NamedSharding) and not set(wish.mesh.axis_names) & set(mesh.lowering_mesh().axis_names):
            return _Hint()
        if isinstance(wish, NamedSharding) and not _only(
            wish.spec, set(mesh.groups[0].axis_names) - {mesh.mpmd_axis_name}
        ):
            return _Hint()
    if wish is None:
        return _Hint()
    if isinstance(wish, MpmdSharding):
        if wish.mpmd_mesh != mesh:
            raise ValueError(
                f"mpmd.jit: {name} has a sharding on another mesh, {wish.mpmd_mesh}, than the step's, {mesh}."
            )
        return _Hint(wish.mesh_ids or frozenset([0]), (wish.spec, wish.memory_kind))
    if isinstance(wish, (NamedSharding, PartitionSpec)):
        kind = transfer.memory_kind(wish) if isinstance(wish, NamedSharding) else None
        spec = wish.spec if isinstance(wish, NamedSharding) else wish
        return _Hint(None, (MpmdSharding(mesh, 0, spec).spec, kind))
    raise TypeError(
        f"mpmd.jit: the sharding of {name} is {wish!r}. Pass an MpmdSharding, NamedSharding, PartitionSpec or None."
    )


def _broadcast(shardings, tree, what, skip=(), total=None):
    """A flat list, one sharding per leaf of `tree`, from a pytree prefix."""
    if shardings is None:
        return [None] * tree.num_leaves
    if skip and isinstance(shardings, (tuple, list)) and len(shardings) == total:
        shardings = tuple(s for i, s in enumerate(shardings) if i not in skip)

    def is_leaf(x):
        return x is None or isinstance(x, (MpmdSharding, jax.sharding.Sharding, PartitionSpec))

    if isinstance(shardings, list):
        shardings = tuple(shardings) if what == "in_shardings" else shardings
    full = jax.tree.unflatten(tree, range(tree.num_leaves))
    flat: list = [None] * tree.num_leaves

    def fill(wish, part):
        for i in jax.tree.leaves(part):
            flat[i] = wish

    try:
        jax.tree.map(fill, shardings, full, is_leaf=is_leaf)
    except ValueError as e:
        raise ValueError(
            f"mpmd.jit: {what} is not a prefix of the step's"
            f" {'arguments' if what == 'in_shardings' else 'result'}.\n  {e}"
        ) from None
    return flat


def _argument_names(fun, call: _Call):
    """`state['w']` rather than `args[0]['w']`, where the step's signature tells."""
    args, kwargs = jax.tree.unflatten(call.tree, range(call.tree.num_leaves))
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positions = [i for i in range(call.num_args) if i not in {i for i, _ in call.fixed}]
    names = []
    for i, arg in zip(positions, args, strict=True):
        plain = i < len(parameters) and parameters[i].kind is not inspect.Parameter.VAR_POSITIONAL
        root = parameters[i].name if plain else f"args[{i}]"
        names += [root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]]
    for key in sorted(kwargs):
        names += [key + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(kwargs[key])[0]]
    return names


def _check_leaves(leaves, names):
    for x, name in zip(leaves, names, strict=True):
        if isinstance(x, compat.Tracer):
            raise StageError(
                f"mpmd.jit: {name} is being traced, so the step was called inside jax.jit, jax.grad or jax.vmap.\n"
                "  A pipelined step is not a JAX function: call it at the top level, and differentiate inside treduce."
            )
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex, np.generic)):
            raise TypeError(
                f"mpmd.jit: {name} is a {type(x).__name__}, not an array."
                " Name it in static_argnums if it is part of the program."
            )


def _donated(call: _Call, donate_argnums) -> frozenset[int]:
    """Flat positions of donated arguments."""
    args, _ = jax.tree.unflatten(call.tree, range(call.tree.num_leaves))
    positions = [i for i in range(call.num_args) if i not in {i for i, _ in call.fixed}]
    wanted = {i % call.num_args for i in donate_argnums} if call.num_args else set()
    return frozenset(
        leaf for i, arg in zip(positions, args, strict=True) if i in wanted for leaf in jax.tree.leaves(arg)
    )


def _consume(leaf, placed, kept):
    """Deletes a donated argument, as `jax.jit` does, but for buffers that the step returned as they came."""
    if isinstance(leaf, MpmdArray):
        leaf._consume()
    elif isinstance(leaf, jax.Array) and not leaf.is_deleted() and not any(id(a) in kept for a in placed.values()):
        leaf.delete()


def _zeros(aval):
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=str(jax.random.key_impl(aval))), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


def _layout(programs: StepPrograms, v):
    return (
        (PartitionSpec(), None) if isinstance(v, compat.Literal) else programs.layouts.get(v, (PartitionSpec(), None))
    )


def _mpmd_sharding(mesh, groups, layout) -> MpmdSharding:
    spec, kind = layout
    return MpmdSharding(mesh, groups, spec, kind)


def _short(x) -> str:
    shape, dtype, *_ = _leaf_type(x, frozenset())
    return f"{dtype}[{','.join(map(str, shape))}]"
