"""`mpmd.jit`: from a user's step to a running pipeline, in the stages that `jax.jit` has.

    jit(step) ── .trace ──► Traced ── .lower ──► Lowered ── .compile ──► Compiled ──► call

Each stage can be printed and inspected. Calling the decorated step runs through all of them once per set of shapes.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Required, TypedDict, TypeVar, Unpack, overload

import jax
from jax.typing import ArrayLike

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.bucketed_step import BucketedStep
from mpmd.buckets import Bucketing, Buckets
from mpmd.compile.compiler import CompilerOptions
from mpmd.compiled import Compiled
from mpmd.errors import StageError
from mpmd.job import joining
from mpmd.microbatch_list import MicrobatchList
from mpmd.observe import ledger
from mpmd.ops import lists
from mpmd.ops.role import RoleTable, checked_table
from mpmd.pytrees import PyTree, TreeDef
from mpmd.run.audits import audited_options, check_audits
from mpmd.run.device_get import device_get
from mpmd.stages import Lowered, Traced, check_options, shape_of
from mpmd.tracing.arguments import (
    Args,
    CallArguments,
    Fixed,
    Hint,
    Kwargs,
    argument_names,
    broadcast,
    check_is_outside,
    check_leaves,
    check_static,
    donated_leaves,
    fault_with_name,
    fixed_ways,
    hint_of,
    leaf_type,
    named_positions,
    short_type,
    traced_type,
)
from mpmd.tracing.role_groups import with_roles
from mpmd.tracing.surroundings import surroundings
from mpmd.tracing.trace import Trace, trace_step
from scheduler.base.bounded import BoundedDict
from scheduler.base.collector import without_collection
from scheduler.base.texts import type_text
from scheduler.base.waiting import waiting

_T = TypeVar("_T")


class _Options(TypedDict, total=False):
    """The keyword arguments of `jit`."""

    mpmd_mesh: Required[MpmdMesh]
    in_shardings: PyTree
    out_shardings: PyTree
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    compiler_options: CompilerOptions | None
    roles: Mapping[str, int | Sequence[int]] | None
    audit_every: int


@overload
def jit(fun: Callable, **options: Unpack[_Options]) -> "Jitted": ...


@overload
def jit(fun: None = None, **options: Unpack[_Options]) -> "Callable[[Callable], Jitted]": ...


@compat.api_boundary
def jit(
    fun: Callable | None = None,
    *,
    mpmd_mesh: MpmdMesh,
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    compiler_options: CompilerOptions | None = None,
    roles: Mapping[str, int | Sequence[int]] | None = None,
    audit_every: int = 0,
) -> "Jitted | Callable[[Callable], Jitted]":
    """Compiles a training step for the groups of `mpmd_mesh`, as a pipeline where it has `mpmd.treduce` loops.

    The step is traced once per set of argument shapes, cut where `mpmd.mark_stage_end` says, and run by the
    schedules of its loops. It computes what `jax.jit(fun)` computes. Under `jax.disable_jit()` it runs `fun` as plain
    Python, on one device.

    Args:
      fun: the step. Without it, a decorator is returned.
      mpmd_mesh: the groups of devices.
      in_shardings, out_shardings: pytree prefixes of the arguments and of the result; leaves are `MpmdSharding`
        (groups and spec), `NamedSharding` or `PartitionSpec` (spec; groups are found) or None (all is found).
      donate_argnums, donate_argnames: arguments to donate, as in `jax.jit`. They are deleted.
      static_argnums, static_argnames: arguments that are part of the program, as in `jax.jit`.
      compiler_options: options for XLA, as in `jax.jit`. `{2: {"xla_…": True}}` adds options for the tasks of stage 2.
      roles: the group, or groups, of each name that `mpmd.role` gives a part of the step. It may contain names that the
        step does not use.
      audit_every: once in so many calls, other groups run one program of the step again, and all bits are compared, to
        find devices that compute wrong (docs/resilience.md). 0: never. On GPUs this sets `xla_gpu_deterministic_ops`,
        unless `compiler_options` do.

    Returns:
      A callable with `.trace`, `.lower` and `.eval_shape`. It takes host arrays, arrays of this process and
      MpmdArrays, and returns MpmdArrays. A result that replaces an argument stays in the argument's groups.

    Raises:
      StageError: at the first call (or at `.trace`, `.lower`) if the step cannot be cut; it says where and why.
      CorruptionError: at a call after the audited one, if a device computed other bits than others did.

    Examples:
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
            donate_argnums=donate_argnums, donate_argnames=donate_argnames,
            static_argnums=static_argnums, static_argnames=static_argnames, compiler_options=compiler_options,
            roles=roles, audit_every=audit_every,
        )  # fmt: skip
    if not isinstance(mpmd_mesh, MpmdMesh):
        raise TypeError(f"mpmd.jit: mpmd_mesh is a {type(mpmd_mesh).__name__}. Pass an mpmd.MpmdMesh.")
    if not callable(fun):
        raise TypeError(f"mpmd.jit: fun is a {type(fun).__name__}. Pass the step, a function.")
    donated = named_positions(fun, donate_argnums, donate_argnames, "donate")
    static = named_positions(fun, static_argnums, static_argnames, "static")
    if both := [*sorted(donated[0] & static[0]), *sorted(donated[1] & static[1])]:
        raise ValueError(
            f"mpmd.jit: argument {both[-1]!r} is static and donated. A static argument is part of the program, and has"
            " no memory to take over."
        )
    check_options(compiler_options, "mpmd.jit")
    table = checked_table(roles, mpmd_mesh.num_groups)
    check_audits(audit_every, mpmd_mesh)
    if audit_every:
        compiler_options = audited_options(compiler_options, mpmd_mesh)
    return Jitted(fun, mpmd_mesh, in_shardings, out_shardings, donated, static, compiler_options, table, audit_every)


class Jitted:
    """The step that `mpmd.jit` returns, which is compiled for each new set of argument shapes."""

    def __init__(
        self,
        fun: Callable,
        mpmd_mesh: MpmdMesh,
        in_shardings: PyTree,
        out_shardings: PyTree,
        donated: tuple[frozenset[int], frozenset[str]],
        static: tuple[frozenset[int], frozenset[str]],
        compiler_options: CompilerOptions | None,
        roles: RoleTable,
        audit_every: int,
    ):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._mesh = mpmd_mesh
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._options = dict(compiler_options or {})
        self._donated = donated
        self._static = static
        self._roles = roles
        self._audit_every = audit_every
        self._cache: _Made[Compiled] = _Made()
        self._locks: dict[Hashable, threading.RLock] = {}  # held while a step is compiled for arguments of a type
        self._traced: _Made[Traced] = _Made()
        self._wished: BoundedDict[Hashable, list[object]] = BoundedDict(_MOST_TYPES)
        self._lists: dict[lists.Path, set[type]] = {}  # arguments that are lists of microbatches
        self._bucketed: _Made[Buckets] = _Made()
        self._asked: _Made[Traced] = _Made()

    @compat.api_boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree):
        if compat.setting("jax_disable_jit"):
            args, kwargs = _on_one_device((args, kwargs))
            return self._fun(*args, **kwargs)
        return self._finding_lists(self._call, args, kwargs)

    def _call(self, args: Args, kwargs: Kwargs) -> PyTree:
        if self._lists and (xs := self._lists_in(args, kwargs)):
            step, leaves = self._bucketed_step(self._buckets_for(args, kwargs, xs), xs)
            return step._run(leaves)
        call = self._read(args, kwargs)
        compiled = self._known(call)
        if compiled is None:
            if len(self._locks) > _MOST_TYPES:
                self._locks.clear()
            with self._locks.setdefault(call.key, threading.RLock()):
                compiled = self._known(call) or self._newly_compiled(call)  # by another thread meanwhile, or here
        return compiled._run(call.leaves)

    def _known(self, call: CallArguments) -> Compiled | None:
        """Returns a compiled step that can run this call, if there is one."""
        for compiled in self._cache.get(call.key, ()):
            if compiled._fits(call.leaves, call.wishes):
                return compiled
        return None

    def _newly_compiled(self, call: CallArguments) -> Compiled:
        with joining.compiling(), without_collection():
            traced = self._trace(call)
            check_is_outside()
            compiled = traced._lowered._compiled
        self._cache[call.key].append(compiled)
        return compiled

    def _bucketed_step(
        self, buckets: tuple[list[Buckets], Bucketing, CallArguments], xs: Sequence[MicrobatchList]
    ) -> tuple[BucketedStep, Sequence[ArrayLike]]:
        """Returns the step that runs these lists, and its arguments."""
        steps, bucketing, call = buckets
        step = next((step for step in steps if step.fits(call)), None)
        if step is None:
            check_is_outside()
            steps.append(step := Buckets())
        return step.prepared(bucketing, call.leaves, xs)

    def __get__(self, obj: object, owner: type | None = None):
        return self if obj is None else functools.partial(self, obj)

    @compat.api_boundary
    def trace(self, *args: PyTree, **kwargs: PyTree) -> Traced:
        """Traces the step to one jaxpr, for arguments of these shapes (`jax.ShapeDtypeStruct` will do).

        A step is cut and compiled once: a call with such arguments runs the result of `.trace(...).lower().compile()`.
        """
        return self._finding_lists(self._traced_for, args, kwargs)

    def _traced_for(self, args: Args, kwargs: Kwargs) -> Traced:
        if xs := self._lists_in(args, kwargs):
            _, bucketing, _ = self._buckets_for(args, kwargs, xs)
            dynamic, named, fixed = self._without_static(args, kwargs)
            around = _around(dynamic, named, fixed, xs)
            types = [None if isinstance(x, list) else leaf_type(x, ())[:2] for x in around[0]]
            dtypes = [[{t[1] for t in of_leaf} for of_leaf in zip(*x.types, strict=True)] for x in xs]
            act = functools.partial(self._for_call, fixed, [x.tree for x in xs], dtypes, (types, around[1]))
            for_call = functools.partial(self._finding_lists, act)
            bucketing.asked[:] = [dataclasses.replace(bucketing.for_lists(xs), _for_call=for_call)]
            return bucketing.asked[0]
        return self._trace(self._read(args, kwargs))

    def _for_call(
        self,
        fixed: Fixed,
        trees: Sequence[TreeDef],
        dtypes: Sequence[Sequence[Set[Hashable]]],
        around: tuple[Sequence[tuple | None], TreeDef],
        dynamic: Args,
        kwargs: Kwargs,
    ) -> tuple[BucketedStep, Sequence[ArrayLike]]:
        """Returns the step that runs a call with lists of microbatches, and its arguments.

        Args:
          trees: per list, the structure of a microbatch.
          dtypes: per list, the possible dtypes of each array of a microbatch.
          around: shape and dtype of each argument (None for a list), and the structure of all arguments.

        Raises:
          TypeError: the call has other lists or other arguments than the step was compiled for.
        """
        args, named = _with_static(dynamic, kwargs, fixed)
        if len(xs := self._lists_in(args, named)) != len(self._lists):
            raise TypeError("mpmd: this step was compiled for lists of microbatches; give it lists in the same places.")
        for x, tree in zip(xs, trees, strict=False):
            if x.tree != tree:
                raise TypeError(
                    "mpmd: the compiled step was called with microbatches of another structure; call the jitted step to"
                    f" compile again.\n  got {x.tree}, expected {tree}"
                )
        buckets = self._buckets_for(args, named, xs)
        leaves, tree = _around(dynamic, kwargs, fixed, xs)
        if tree != around[1]:
            raise TypeError(
                "mpmd: the compiled step was called with another structure of arguments.\n"
                f"  got      {tree}\n  expected {around[1]}"
            )
        wrong = _of_other_types(leaves, around[0], xs, dtypes)
        if wrong:
            names = argument_names(self._fun, CallArguments(len(args), fixed, leaves, tree, (), None))
            raise TypeError(
                "mpmd: the compiled step was called with other shapes or dtypes; call the jitted step to compile"
                " again.\n" + "\n".join(f"  {names[i]}{fault}" for i, fault in wrong[:8])
            )
        return self._bucketed_step(buckets, xs)

    def _finding_lists(self, act: Callable[[Args, Kwargs], _T], args: Args, kwargs: Kwargs) -> _T:
        """Calls `act`, and calls it again each time that the step turns out to use an argument as a list."""
        known: set[tuple[lists.Path, type]] = set()
        while True:
            try:
                return act(args, kwargs)
            except lists.TakesList as found:
                way = found.path, type(found)
                if way in known:
                    raise StageError(
                        f"treduce: xs is the argument{jax.tree_util.keystr(found.path[1:])}, which is part of another"
                        " list of microbatches.\n  Pass it as an argument of its own."
                    ) from None
                known.add(way)
                self._lists.setdefault(found.path, set()).add(type(found))  # another thread may have found it too

    def _lists_in(self, args: Args, kwargs: Kwargs) -> list[MicrobatchList]:
        """Returns the known lists of microbatches among the arguments."""
        found = ((path, lists.at((args, kwargs), path)) for path in list(self._lists))
        return [MicrobatchList.of(path, x, self._explicit) for path, x in found if type(x) in (list, lists.Reordered)]

    @functools.cached_property
    def _explicit(self) -> set[str]:
        return {*self._mesh.tracing_mesh().explicit_axes} - {self._mesh.mpmd_axis_name}

    def _buckets_for(
        self, args: Args, kwargs: Kwargs, xs: Sequence[MicrobatchList]
    ) -> tuple[list[Buckets], Bucketing, CallArguments]:
        """Returns the steps for such lists and other arguments, the means to make more steps, and the arguments."""
        leaves, structure, places = lists.flattened((args, kwargs), {x.path: x.given for x in xs})
        ways = {x.path: frozenset(self._lists[x.path]) for x in xs}  # a copy: another thread may find more

        def read(ones: Sequence[object]) -> CallArguments:
            new = {x.path: x.standing_for(one, ways[x.path]) for x, one in zip(xs, ones, strict=True)}
            replaced = [new[places[i]] if i in places else leaf for i, leaf in enumerate(leaves)]
            return self._read(*jax.tree.unflatten(structure, replaced))

        call = read([None] * len(xs))
        key = call.key, tuple((x.path, x.tree) for x in xs)
        without_constants = [path for path, found in ways.items() if lists.HoldsConstants not in found]
        return self._bucketed[key], Bucketing(read, self._trace, self._asked[key], without_constants), call

    @property
    def mpmd_mesh(self) -> MpmdMesh:
        """The mesh that it runs on."""
        return self._mesh

    def __deepcopy__(self, memo: dict[int, object]) -> "Jitted":
        return self  # like a function, which is its own copy

    def clear_cache(self) -> None:
        """Forgets all traces and compiled programs, like `clear_cache` of a function of `jax.jit`."""
        self._cache.clear()
        self._bucketed.clear()
        self._asked.clear()
        self._traced.clear()
        _traces_of(self._fun).clear()

    @compat.api_boundary
    def lower(self, *args: PyTree, **kwargs: PyTree) -> Lowered:
        """Cuts the step into tasks and places them on groups."""
        with without_collection():
            return self.trace(*args, **kwargs).lower()

    @compat.api_boundary
    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the shapes and dtypes of the result; compiles nothing."""
        traced = self.trace(*args, **kwargs)._trace
        avals = [v.aval for v in traced.jaxpr.outvars]
        out = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
        return jax.tree.unflatten(traced.out_tree, out)

    def _without_static(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, Fixed]:
        """Separates the static arguments from the others, which come first."""
        positions, names = self._static
        if not (positions or names):
            return args, kwargs, ()
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        named = {k: v for k, v in kwargs.items() if k in names}
        kwargs = {k: v for k, v in kwargs.items() if k not in names}
        found = [(i, a) for i, a in enumerate(args) if i in positions] + sorted(named.items())
        fixed = tuple((where, type(value), value) for where, value in found)  # 2, 2.0 and True are equal
        check_static(fixed)
        return dynamic, kwargs, fixed

    def _read(self, args: Args, kwargs: Kwargs) -> CallArguments:
        dynamic, kwargs, fixed = self._without_static(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        explicit = self._explicit
        wishes = self._wishes(tree, fixed, len(args))
        types, fault = (), None
        try:
            types = tuple(leaf_type(x, explicit if w is None else ()) for x, w in zip(leaves, wishes, strict=True))
        except (TypeError, ValueError, OverflowError) as e:
            fault = e
        if fault is not None:  # raised again, with the argument's name
            names = argument_names(self._fun, CallArguments(len(args), fixed, leaves, tree, (), None))
            check_leaves(leaves, names)
            raise fault_with_name(fault, leaves, names) from None
        key = tree, fixed, types, compat.trace_context()
        return CallArguments(len(args), fixed, leaves, tree, types, key, wishes)

    def _wishes(self, tree: TreeDef, fixed: Fixed, num_args: int) -> list[object]:
        """Returns the user's sharding of each leaf, or None."""
        if self._in_shardings is None:
            return [None] * tree.num_leaves
        static = tuple(where for where, *_ in fixed if isinstance(where, int))
        if (key := (tree, static, num_args)) not in self._wished:
            args_tree, kwargs_tree = tree.children()
            wishes = broadcast(self._in_shardings, args_tree, "in_shardings", skip=static, total=num_args)
            numbers = lists.numbers(args_tree)
            wishes = [None if i in numbers else wish for i, wish in enumerate(wishes)]
            self._wished[key] = wishes + [None] * kwargs_tree.num_leaves
        return self._wished[key]

    def _trace(self, call: CallArguments, given: Mapping[int, Hint] | None = None) -> Traced:
        """Traces the step for such arguments; `given` are layouts of some, which replace their current layouts."""
        names = argument_names(self._fun, call)
        check_leaves(call.leaves, names)
        hints = [hint_of(w, x, self._mesh, n) for w, x, n in zip(call.wishes, call.leaves, names, strict=True)]
        hints = [(given or {}).get(i, hint) for i, hint in enumerate(hints)]
        for i in lists.leaves_of_one(call.tree):  # one stands for all, which may be in different groups
            hints[i] = dataclasses.replace(hints[i], groups=None, split_axis=None, ranges=())
        lowering = self._mesh.groups[0]
        avals = [
            traced_type(x, h, lowering, self._mesh.mpmd_axis_name) for x, h in zip(call.leaves, hints, strict=True)
        ]

        def fun(*dynamic, **kwargs):
            args, kwargs = _with_static(dynamic, kwargs, call.fixed)
            with lists.of_arguments((args, kwargs), list(self._lists)):
                return self._fun(*args, **kwargs)

        fun.__wrapped__ = self._fun  # pyright: ignore[reportFunctionMemberAccess]
        read = call.key, tuple(names), surroundings(self._fun)
        for traced in self._traced[read]:
            if traced._is_of(hints):
                return traced
        known = _traces_of(self._fun)
        key = *read, tuple(hints), shape_of(self._mesh), tuple(self._roles.items())
        if (trace := known.get(key)) is None:
            with waiting(lambda: ("mpmd: tracing the step", 0.0)), ledger.during(ledger.COMPILING):
                trace = trace_step(fun, avals, call.tree, names, self._mesh)
                trace = with_roles(trace, self._roles)
                trace = known[key] = dataclasses.replace(trace, fixed=fixed_ways(self._fun, call))
        donated = donated_leaves(call, *self._donated)
        name = getattr(self._fun, "__name__", type(self._fun).__name__)
        traced = Traced(trace, name, self._mesh, tuple(hints), self._out_shardings, donated, self._options)
        traced = dataclasses.replace(traced, _audit_every=self._audit_every)
        self._traced[read].append(traced)
        return traced


def _around(dynamic: Args, kwargs: Kwargs, fixed: Fixed, xs: Sequence[MicrobatchList]) -> tuple[list, TreeDef]:
    """Flattens the dynamic arguments of a call, and returns their structure: each list of microbatches is a leaf."""
    whole = _with_static(dynamic, kwargs, tuple((where, kind, None) for where, kind, _ in fixed))
    return lists.flattened(whole, {x.path: x.given for x in xs})[:2]


def _of_other_types(
    leaves: Sequence[ArrayLike],
    types: Sequence[tuple | None],
    xs: Sequence[MicrobatchList],
    dtypes: Sequence[Sequence[Set]],
) -> list[tuple[int, str]]:
    """Returns the numbers of arguments with wrong types, and what is wrong. Microbatches may have other shapes."""
    wrong = [
        (i, f": got {short_type(x)}, expected {type_text(*kind)}")
        for i, (x, kind) in enumerate(zip(leaves, types, strict=True))
        if kind is not None and leaf_type(x, ())[:2] != kind
    ]
    for x, known in zip(xs, dtypes, strict=True):
        i = next(i for i, leaf in enumerate(leaves) if leaf is x.given)
        for m, found in enumerate(x.types):
            if strange := [n for n, (t, of_leaf) in enumerate(zip(found, known, strict=True)) if t[1] not in of_leaf]:
                n = strange[0]
                path = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(x.items[m])[0][n][0])
                expected = " or ".join(sorted(map(str, known[n])))
                m = m if x.permutation is None else x.permutation[m]
                wrong.append((i, f"[{m}]{path}: got {type_text(*found[n][:2])}, expected {expected}"))
    return wrong


def _with_static(dynamic: Args, kwargs: Kwargs, fixed: Fixed) -> tuple[Args, Kwargs]:
    """Returns all arguments of the user's function, with the static ones in their places."""
    args, named = list(dynamic), dict(kwargs)
    for where, _, value in fixed:
        if isinstance(where, int):
            args.insert(where, value)
        else:
            named[where] = value
    return tuple(args), named


_MOST_TYPES = 4096  # the most sets of argument types that are remembered, as by `jax.jit`


class _Made(BoundedDict[Hashable, list[_T]]):
    """A cache of the objects that were made from a function, for the latest types of arguments."""

    def __init__(self):
        super().__init__(_MOST_TYPES)

    def __missing__(self, key: Hashable) -> list[_T]:
        found = self[key] = []
        return found


_traces: weakref.WeakKeyDictionary[Callable, dict[Hashable, Trace]] = weakref.WeakKeyDictionary()


def _traces_of(fun: Callable) -> dict[Hashable, Trace]:
    """Returns the traces of a function, which are kept while it lives: as under `jax.jit`, a step is traced once for
    all meshes of one shape, however often it is passed to `mpmd.jit`.
    """
    try:
        return _traces.setdefault(fun, BoundedDict(_MOST_TYPES))
    except TypeError:  # it does not allow weak references
        return {}


def _on_one_device(tree: PyTree) -> PyTree:
    """Replaces MpmdArrays by arrays on the default device, which plain JAX can combine with other arrays."""
    return jax.tree.map(lambda x: jax.numpy.asarray(device_get(x)) if isinstance(x, MpmdArray) else x, tree)
