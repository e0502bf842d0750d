"""The loop over microbatches as users write it: `treduce` and `treduce_i`, which check and trace its body."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpmd import _jax_compat as compat
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.keys import is_key
from mpmd.errors import StageError
from mpmd.ops import lists
from mpmd.ops.lists import Microbatches
from mpmd.ops.loop_primitive import LoopInfo, treduce_p
from mpmd.ops.means import Means
from mpmd.ops.microbatches import check_microbatch_axis, doubt_of, may_be_of_shapes, what_fun_sees
from mpmd.ops.reductions import (
    Add,
    Operation,
    broadcast_operation,
    check_alike,
    check_operations,
    output_leaves,
)
from mpmd.ops.stage_end import mark_p, without
from mpmd.pytrees import PyTree, TreeDef
from scheduler import Adaptive, Schedule
from scheduler.base.texts import counted
from scheduler.schedules import catalogue
from scheduler.task import is_schedule


@compat.api_boundary
def treduce(
    fun: Callable,
    xs: PyTree,
    schedule: Schedule | str | None,
    *,
    axis: int = 0,
    operation: PyTree = Add,
    cuts: Sequence[int] | None = None,
    weights: Callable | None = None,
) -> PyTree:
    """Runs `fun` on each slice of `xs` along `axis` as a pipelined loop, and reduces its outputs.

    Microbatches of several shapes are a list: each entry is a microbatch, a pytree of arrays. Pass the list as an
    argument of the step. `fun` is traced once for each distinct shape, and each stage is compiled once for each; any
    number of microbatches of these shapes, in any order, runs without tracing or compiling again. They are summed in
    the order of the list.

    Differentiate inside `fun` (`jax.value_and_grad` per microbatch): the backward pass is part of the loop, and
    schedules order both passes. With `schedule=None`, or outside of `mpmd.jit`, this is a `lax.scan` with the same
    result.

    Args:
      fun: takes a slice of `xs` (the microbatch axis removed) and returns a pytree of arrays. It may close
        over parameters and anything else that is the same for every microbatch.
      xs: a pytree of arrays, each with the same number of microbatches on axis `axis`; or a list of microbatches of
        one structure. (Put several arrays with a microbatch axis into a tuple or a dict.)
      schedule: a schedule of the `scheduler` package, for instance `scheduler.OneFOneB(4)`; or its name, `"1f1b"`: then
        the groups of the mesh and the marks determine the number of stages; or None.
      axis: the microbatch axis of every leaf of `xs`.
      operation: `Add` (the default: the sum), `Mean`, `Max`, `Min` or `Concat`, an instance such as `Concat(axis=1)`, a
        subclass of `mpmd.Operation`, or a pytree prefix of these for the outputs of `fun`.
      cuts: for a model with `mark_layer_end`, how many layers each stage gets, one number for each stage of the
        schedule. Layer k ends with the k-th mark; code before the first layer belongs to the first stage, code after
        the last one to the last stage. With n marks the numbers add up to n (a last 0: the last stage begins behind
        the last mark), or to n + 1 if the last layer has no mark. None: chosen by cost and memory.
      weights: for `Mean`, maps a microbatch to its weight, a scalar such as its number of tokens: the outputs are
        multiplied by it, summed, and divided by the sum of all weights. None: microbatches count alike.

    Returns:
      The outputs of `fun`, reduced over the microbatches in order, in their own dtypes.

    Raises:
      StageError: if the leaves of `xs` differ in their number of microbatches, or have no such axis; for a list, if the
        microbatches have several structures, or `fun` returns different shapes for some of them.

    Examples:
      >>> import jax, jax.numpy as jnp, mpmd
      >>> def loss(w, x): return jnp.mean((x @ w) ** 2)
      >>> w, xs = jnp.ones((3, 3)), jnp.ones((4, 2, 3))   # 4 microbatches of 2 rows
      >>> value, grad = mpmd.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, schedule=None)
    """
    _check_fun(fun, "treduce")
    if weights is not None and not callable(weights):
        raise StageError(
            f"treduce: weights is a {type(weights).__name__}. Pass a function from a microbatch to its weight, a"
            " scalar: weights=lambda x: x['mask'].sum()."
        )
    if isinstance(xs, list):
        return _treduce_list(fun, xs, schedule, axis, operation, cuts, weights)
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(xs)
    leaves = [leaf if is_plain(leaf) else jnp.asarray(leaf) for _, leaf in paths_and_leaves]
    names = ["xs" + jax.tree_util.keystr(path) for path, _ in paths_and_leaves]
    num_microbatches = check_microbatch_axis(names, leaves, axis)
    means = None if weights is None else Means(fun, operation, weights, num_microbatches)
    given = fun if means is None else means.sums

    def take(index):
        sliced = [_slice(leaf, index, axis % leaf.ndim) for leaf in leaves]
        try:
            return given(jax.tree.unflatten(treedef, sliced))
        except Exception as error:
            if may_be_of_shapes(error):
                error.add_note(what_fun_sees(names, leaves, sliced, axis))
            raise

    doubt = doubt_of(names, [(x.shape[: axis % x.ndim] + x.shape[axis % x.ndim + 1 :], x.dtype) for x in leaves])
    if means is None:
        return _treduce(take, num_microbatches, schedule, operation, cuts, "treduce", doubt)
    return means.of(_treduce(take, num_microbatches, schedule, means.operations, cuts, "treduce", doubt))


def _treduce_list(
    fun: Callable,
    xs: list,
    schedule: Schedule | str | None,
    axis: int,
    operation: PyTree,
    cuts: Sequence[int] | None,
    weights: Callable | None,
) -> PyTree:
    """Runs `treduce` for a list: in a pipelined step, a loop over one microbatch that stands for all."""
    if axis != 0:
        raise StageError(f"treduce: axis is {axis!r}, and xs is a list, whose entries are whole microbatches.")

    def given(x):
        try:
            return fun(x)
        except Exception as error:
            if may_be_of_shapes(error):
                error.add_note(
                    "treduce: xs is a list, and fun sees one entry of it, a microbatch. Arrays with a microbatch axis"
                    " stand in a tuple or a dict."
                )
            raise

    if schedule is None or compat.setting("jax_disable_jit") or lists.arguments.get() is None:
        if schedule is not None:
            _check_schedule(schedule, "treduce")
        _checked_cuts(cuts, schedule, "treduce")
        return _plain_list(given, xs, operation, weights)
    if not isinstance(xs, Microbatches):
        list(lists.elements(xs))
        raise lists.found(xs)
    xs.check_is_unchanged()
    means = Means(given, operation, weights, xs.number)
    leaves, treedef = jax.tree.flatten(xs.one)

    def take(index):
        outs = means.sums(jax.tree.unflatten(treedef, [_whole(x, index) for x in leaves]))
        if not xs.is_counted and any(op.reads_number for op in means.operations):
            raise lists.CountsList(xs.path)
        return outs

    return means.of(_treduce(take, xs.num_microbatches, schedule, means.operations, cuts, "treduce", of=xs))


def _whole(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns a microbatch's whole array as a slice at the index, so that its readers are not hoisted out of the loop.

    XLA drops such a slice: it begins at 0, whatever index is given.
    """
    if not x.ndim:
        return lax.squeeze(_whole(lax.expand_dims(x, (0,)), index), (0,))
    return lax.dynamic_slice(x, (index, *[np.int32(0)] * (x.ndim - 1)), x.shape, allow_negative_indices=False)


def _plain_list(fun: Callable, xs: list, operation: PyTree, weights: Callable | None) -> PyTree:
    """Runs the plain loop over a list; `fun` is traced once for each distinct shape."""
    # A pipelined step gets the number with each call: here, too, XLA must not divide by a constant.
    means = Means(fun, operation, weights, lax.optimization_barrier(jnp.int32(len(xs))))
    runs: dict[tuple, Callable] = {}
    first: list = []
    accs: list = []
    for i, (leaves, treedef) in enumerate(lists.elements(xs)):
        leaves = [x if is_plain(x) else jnp.asarray(x) for x in leaves]
        types = tuple(map(jax.typeof, leaves))
        if types not in runs:
            runs[types], outs = _run_of(means, leaves, treedef)
            first = first or outs
            check_operations(means.operations, outs, "treduce")
            check_alike(first, outs, means.operations)
        if i == 0:
            accs = [op.init(aval, len(xs)) for op, aval in zip(means.operations, first, strict=True)]
        accs = runs[types](lax.optimization_barrier(accs), np.int32(i), leaves)
    return means.of([op.finish(acc, len(xs)) for op, acc in zip(means.operations, accs, strict=True)])


def _run_of(means: Means, leaves: list, treedef: TreeDef) -> tuple[Callable, list]:
    """Returns a function that updates accumulators by one microbatch of these shapes, and the types of its outputs.

    Stage ends in it have no effect.
    """

    def sums(*xs):
        return means.sums(jax.tree.unflatten(treedef, xs))

    if compat.setting("jax_disable_jit"):  # `fun` sees the values
        outs = list(map(jax.typeof, sums(*leaves)))
        return lambda accs, index, leaves: _updated(means.operations, accs, sums(*leaves), index), outs
    body = jax.make_jaxpr(sums)(*leaves)
    closed = compat.ClosedJaxpr(compat.constvars_to_invars(without(body.jaxpr, (mark_p,))), ())

    def update(accs, index, leaves, consts):
        return _updated(means.operations, accs, compat.jaxpr_as_fun(closed)(*consts, *leaves), index)

    run = jax.jit(update)
    return lambda accs, index, leaves: run(accs, index, leaves, body.consts), body.out_avals


@compat.api_boundary
def treduce_i(
    fun: Callable,
    n: int,
    schedule: Schedule | str | None,
    *,
    operation: PyTree = Add,
    cuts: Sequence[int] | None = None,
) -> PyTree:
    """Runs `fun(i)` for i = 0 … n-1 (an int32 scalar) and reduces: `treduce` over the microbatch index.

    Args, Returns, Raises: as in `treduce`; `n` is the number of microbatches.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> int(mpmd.treduce_i(lambda i: i * i, 4, schedule=None))
      14
    """
    _check_fun(fun, "treduce_i")
    if not isinstance(n, (int, np.integer)) or n < 1:
        raise StageError(f"treduce_i: n is {n!r}. Pass the number of microbatches, an int of at least 1.")
    return _treduce(fun, int(n), schedule, operation, cuts, "treduce_i")


def _slice(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return lax.squeeze(lax.dynamic_slice_in_dim(x, index, 1, axis, allow_negative_indices=False), (axis,))


def _treduce(
    take: Callable,
    num_microbatches: int,
    schedule: Schedule | str | None,
    operation: PyTree,
    cuts: Sequence[int] | None,
    name: str,
    doubt: str | None = None,
    of: Microbatches | None = None,
) -> PyTree:
    """Traces `take(index)` once and binds the loop; values that it closes over become operands."""
    if schedule is not None:
        _check_schedule(schedule, name)
    cuts = _checked_cuts(cuts, schedule, name)
    if compat.setting("jax_disable_jit"):
        return _eager_loop(take, num_microbatches, operation, name)
    out_tree: TreeDef = None
    frozen: dict[int, np.ndarray] = {}

    def flat(index):
        nonlocal out_tree
        leaves, out_tree = output_leaves(take(index), name)
        frozen.clear()  # float0 leaves (gradients of integers) hold nothing to reduce
        frozen.update((k, np.zeros(x.shape, x.dtype)) for k, x in enumerate(leaves) if _is_float0(x))
        return [x if is_plain(x) else jnp.asarray(x) for k, x in enumerate(leaves) if k not in frozen]

    index = jax.ShapeDtypeStruct((), np.int32, sharding=compat.sharding_here())
    body = compat.written_out(_without_outer_refs(jax.make_jaxpr(flat)(index), name))
    if of is not None:
        body = _with_own_constants(_varying(body), of.holds_constants)
    operations = broadcast_operation(operation, out_tree, name)
    operations = tuple(op for k, op in enumerate(operations) if k not in frozen)
    check_operations(operations, body.out_avals, name)
    jaxpr = body.jaxpr if schedule is not None else without(body.jaxpr, (mark_p,))
    closed = compat.ClosedJaxpr(compat.constvars_to_invars(jaxpr), ())
    info = LoopInfo(schedule, num_microbatches, operations, cuts, doubt, None if of is None else of.path)
    reduced = treduce_p.bind(*body.consts, jaxpr=closed, info=info)
    rest = iter(reduced)
    leaves = [frozen[k] if k in frozen else next(rest) for k in range(out_tree.num_leaves)]
    return jax.tree.unflatten(out_tree, leaves)


def _with_own_constants(body: compat.ClosedJaxpr, holds_arrays: bool) -> compat.ClosedJaxpr:
    """Returns a loop's body that contains the NumPy constants that it captured (masks, positions): they may differ for
    other shapes. JAX's arrays are mostly the same for all shapes (weights); `holds_arrays`: it contains them, too.
    """
    own, rest = {}, []
    for v, c in zip(body.jaxpr.constvars, body.consts, strict=True):
        is_traced = isinstance(c, compat.Tracer)
        if is_traced or (isinstance(c, jax.Array) and not (holds_arrays and c.is_fully_addressable)):
            rest.append((v, c))
        else:
            own[v] = compat.Literal(c if is_key(c.dtype) else np.asarray(c), v.aval)
    eqns = compat.renamed_equations(body.jaxpr.eqns, own)
    outvars = [compat.renamed(v, own) for v in body.jaxpr.outvars]
    jaxpr = compat.new_jaxpr(body.jaxpr, constvars=[v for v, _ in rest], eqns=eqns, outvars=outvars)
    return compat.ClosedJaxpr(jaxpr, [c for _, c in rest])


def _varying(body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Returns a loop's body in which each output depends on the index. An output that is the same for all microbatches
    of one shape, such as their number of tokens, may differ for another shape.
    """
    still = [not moves for moves in _moving(body.jaxpr, [True])]
    if not any(still):
        return body

    def varying(index):
        outs = compat.jaxpr_as_fun(body)(index)
        return [_whole(jnp.asarray(x), index) if fixed else x for x, fixed in zip(outs, still, strict=True)]

    return jax.make_jaxpr(varying)(jax.ShapeDtypeStruct((), np.int32, sharding=compat.sharding_here()))


def _moving(jaxpr: compat.Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Returns which results depend on the inputs that are `given`; through calls, since these are inlined later."""
    moving = {v for v, moves in zip(jaxpr.invars, given, strict=True) if moves}

    def moves(v: compat.Var | compat.Literal) -> bool:
        return isinstance(v, compat.Var) and v in moving

    for eqn in jaxpr.eqns:
        ins = list(map(moves, eqn.invars))
        called = compat.called_jaxpr(eqn)
        if called is not None:
            outs = _moving(called.jaxpr, ins)
        elif eqn.primitive is mark_p or eqn.primitive.name == "optimization_barrier":
            outs = ins
        else:
            outs = [any(ins)] * len(eqn.outvars)
        moving.update(v for v, moved in zip(eqn.outvars, outs, strict=True) if moved)
    return list(map(moves, jaxpr.outvars))


def _updated(operations: Sequence[Operation], accs: Sequence[jax.Array], outs: Sequence[jax.Array], index: Any) -> list:
    return [op.update(acc, x, index) for op, acc, x in zip(operations, accs, outs, strict=True)]


def _without_outer_refs(body: compat.ClosedJaxpr, name: str) -> compat.ClosedJaxpr:
    """Refuses a loop that reads or writes a ref from outside: microbatches would depend on each other."""
    for v in body.jaxpr.constvars:
        if compat.is_ref(v.aval):
            user = next((e for e in body.jaxpr.eqns if v in e.invars), None)
            where = "" if user is None else f" at {compat.source_line(user)},"
            raise StageError(
                f"{name}: fun uses {v.aval.str_short(short_dtypes=True)},{where} a ref that was made outside of the"
                " loop.\n  Make it inside of fun (jax.new_ref), and return what it holds, with an operation such as"
                " mpmd.Add or mpmd.Concat."
            )
    return body


def _eager_loop(take: Callable, num_microbatches: int, operation: PyTree, name: str) -> PyTree:
    """Runs the loop under `jax.disable_jit`: `take` sees the values of each microbatch in turn."""
    operations, accs, leaves, tree = [], [], [], None
    for i in range(num_microbatches):
        leaves, tree = output_leaves(take(jnp.int32(i)), name)
        outs = [jnp.asarray(x) for x in leaves if not _is_float0(x)]
        if i == 0:
            of_all = zip(broadcast_operation(operation, tree, name), leaves, strict=True)
            operations = [op for op, x in of_all if not _is_float0(x)]
            check_operations(operations, list(map(jax.typeof, outs)), name)
            accs = [op.init(jax.typeof(x), num_microbatches) for op, x in zip(operations, outs, strict=True)]
        accs = _updated(operations, accs, outs, np.int32(i))
    done = (op.finish(acc, num_microbatches) for op, acc in zip(operations, accs, strict=True))
    return jax.tree.unflatten(tree, [x if _is_float0(x) else next(done) for x in leaves])


def _check_fun(fun: object, name: str) -> None:
    if not callable(fun):
        first = "a microbatch" if name == "treduce" else "its index"
        raise StageError(f"{name}: fun is a {type(fun).__name__}. Pass a function of {first} first: {name}(fun, ...).")


def _is_float0(x: object) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _check_schedule(schedule: object, name: str) -> None:
    if isinstance(schedule, str):
        try:
            catalogue.find(schedule)
        except ValueError as e:
            raise StageError(f"{name}: {e}") from None
    elif isinstance(schedule, Adaptive):
        pass  # it has checked itself; for a name, the marks determine the number of stages
    elif not is_schedule(schedule):
        raise StageError(
            f"{name}: schedule is {schedule!r}. Pass a schedule such as scheduler.OneFOneB(num_stages), a name such as"
            " '1f1b', or None."
        )


def _checked_cuts(cuts: object, schedule: Any, name: str) -> tuple[int, ...] | None:
    """Returns the user's cuts as a tuple, if they can be cuts of any model; the marks are not known yet."""
    if cuts is None:
        return None
    what = f"{name}: cuts is {cuts!r:.80}"
    if not isinstance(cuts, (tuple, list)) or not cuts:
        raise StageError(f"{what}. Pass how many layers each stage gets, as in cuts=(3, 4, 4, 1), or None.")
    if wrong := [x for x in cuts if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or x < 0]:
        raise StageError(f"{what}, and {wrong[0]!r} is no number of layers. Pass whole numbers of at least 0.")
    if 0 in cuts[:-1]:
        raise StageError(
            f"{what}: stage {list(cuts).index(0)} gets no layer. Only the last entry may be 0: then the last stage"
            " has what follows the last mark alone, the head for instance."
        )
    if hasattr(schedule, "num_stages") and len(cuts) != schedule.num_stages:
        raise StageError(
            f"{what}, {counted(len(cuts), 'entry')}, and {schedule} has {counted(schedule.num_stages, 'stage')}. Pass"
            " one number for each."
        )
    return tuple(map(int, cuts))
