"""Jaxprs, types and meshes in the parameters of equations: of every primitive of JAX that carries a jaxpr."""

import functools
import gc
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.scheduling_groups import xla_metadata_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd import _jax_compat as compat


@jax.custom_jvp
def _with_jvp(x):
    return jnp.sin(x)


_with_jvp.defjvps(lambda t, ans, x: 2 * t * jnp.cos(x))


@jax.custom_vjp
def _with_vjp(x):
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (3 * t * jnp.cos(x),))


@jax.custom_batching.custom_vmap
def _with_vmap(x):
    return jnp.sin(x)


@_with_vmap.def_vmap
def _batched(size, batched, x):
    return jnp.sin(x), True


@custom_partitioning
def _partitioned(x):
    return jnp.sin(x)


def _plan(mesh, args, result):
    return mesh, jnp.sin, args[0].sharding, (args[0].sharding,)


_partitioned.def_partition(partition=_plan, sharding_rule="i j -> i j")


def _double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0


def _kernel(x):
    spec = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double, out_shape=out, interpret=True, grid=(x.shape[0],), in_specs=[spec], out_specs=spec)(
        x
    )


def _prefetching_kernel(x):
    """As splash attention has it: the index maps read an operand."""
    spec = pl.BlockSpec((1, x.shape[1]), lambda i, order: (order[i], 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=x.shape[:1], in_specs=[spec], out_specs=spec)
    call = pl.pallas_call(
        lambda order_ref, x_ref, o_ref: _double(x_ref, o_ref),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, grid_spec=grid,
    )  # fmt: skip
    return call(jnp.arange(x.shape[0], dtype=jnp.int32)[::-1], x)


def _in_each_device(f):
    def program(x):
        return jax.shard_map(f, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)

    return program


def _solved(x):
    return lax.custom_linear_solve(lambda v: 2.0 * v, x, lambda matvec, b: b / 2.0, lambda vecmat, b: b / 2.0)


def _stateful(x):
    ref = jax.new_ref(x)
    lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., jnp.tanh(ref[...])), None)
    return ref[...]


def _linear(x):
    return jax.custom_derivatives.linear_call(lambda r, v: 2.0 * v, lambda r, t: 2.0 * t, (), x)


def _optimized(x):
    @jax.custom_vjp
    def f(x):
        return jnp.cos(x)

    f.defvjp(lambda x: (jnp.cos(x), x), lambda x, t: (-t * jnp.sin(x),), optimize_remat=True)
    return jax.vjp(f, x)[1](x)[0]


def _scattered(x):
    return x.at[jnp.array([0, 1])].add(jnp.ones((2, x.shape[1])), out_sharding=jax.typeof(x).sharding)


def _merged(x):
    return lax.reduce(x, np.float32(0), lambda a, b: a + 2.0 * b, (1,))[:, None] + x


def _windows(x):
    return lax.reduce_window(x, np.float32(0), lambda a, b: a + 2.0 * b, (1, 2), (1, 1), "SAME")


# By primitive; what has two ways to hide a jaxpr says which one after a dot.
PROGRAMS = {
    "jit": jax.jit(lambda x: jnp.sin(x)),
    "remat2": jax.checkpoint(lambda x: jnp.sin(x)),
    "custom_jvp_call": _with_jvp,
    "custom_vjp_call": _with_vjp,
    "custom_vmap_call": _with_vmap,
    "custom_linear_solve": _solved,
    "custom_partitioning": _in_each_device(_partitioned),
    "composite": lax.composite(lambda x: jnp.sin(x), name="mpmd.sine"),
    "linear_call": _linear,
    "remat_opt": _optimized,
    "scan": lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1],
    "cond": lambda x: lax.cond(x.shape[0] * jnp.ones(()) > 1, jnp.sin, jnp.cos, x),
    "cond.platforms": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "shard_map": _in_each_device(jnp.sin),
    "pallas_call": _in_each_device(_kernel),
    "pallas_call.prefetch": _in_each_device(_prefetching_kernel),
    "scan.state": _stateful,
    "reduce": _merged,
    "reduce_window": _in_each_device(_windows),
    "scatter-add": _scattered,
    "xla_metadata_call": xla_metadata_call(jax.jit(lambda x: jnp.sin(x)), name="mpmd"),
}


def _reachable(x):
    """Everything that an object holds, found by the garbage collector, which knows no type; no functions or modules."""
    seen, stack = {}, [x]
    while stack:
        y = stack.pop()
        if (
            id(y) in seen
            or isinstance(y, (types.ModuleType, types.FrameType, str, bytes))
            or callable(y)
            or type(y).__name__ == "WrappedFun"
        ):
            continue
        seen[id(y)] = y
        if not isinstance(y, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
            stack += [y.mesh] if isinstance(y, NamedSharding) else gc.get_referents(y)
    return seen.values()


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.jaxprs_in(eqn.params):
            yield from _equations(inner)


@pytest.fixture(
    params=[pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive), AxisType.Explicit], ids=str, scope="module"
)
def mesh(request):
    return jax.make_mesh((2, 2), ("stage", "data"), axis_types=(request.param,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize("name", PROGRAMS)
def test_jaxprs_and_meshes_are_found_wherever_they_hide(name, mesh):
    x = jnp.linspace(0, 1, 32).reshape(4, 8)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        traced = jax.jit(PROGRAMS[name]).trace(rows).jaxpr
    eqns = [e for e in _equations(traced.jaxpr) if e.primitive.name == name.partition(".")[0]]
    assert eqns
    for eqn in eqns:
        jaxprs = list(compat.jaxprs_in(eqn.params))
        within = {id(y) for j in jaxprs for y in _reachable(j)}
        assert {id(y) for y in _reachable(eqn.params) if isinstance(y, compat.Jaxpr)} <= within
    group = mpmd.MpmdMesh(mesh, "stage").groups[0].abstract_mesh
    rebased = compat.rebase(traced, group, mesh.abstract_mesh)
    left = [y for e in _equations(rebased.jaxpr) for y in _reachable((e.params, e.ctx, e.invars, e.outvars))]
    assert not [y for y in left if y is not mesh and getattr(y, "axis_names", ()) == mesh.axis_names and y.size == 4]


@pytest.mark.slow
def test_programs_with_inner_jaxprs_run_in_groups_of_two_as_under_jit(mesh):
    def predict(xs, schedule):
        def one(x):
            x = jax.reshard(x, P("data")) if mesh.explicit_axes else lax.with_sharding_constraint(x, P("data"))
            hidden = mpmd.mark_stage_end({name: f(x) for name, f in PROGRAMS.items()})
            return {name: f(hidden[name]) for name, f in PROGRAMS.items()}

        return mpmd.treduce(one, xs, schedule=schedule, operation=mpmd.Concat)

    xs = jnp.linspace(0, 1, 64).reshape(2, 4, 8)
    group = mpmd.MpmdMesh(mesh, "stage").groups[0]
    with jax.set_mesh(group):
        plain = jax.jit(lambda xs: predict(xs, None))(xs)
    step = mpmd.jit(lambda xs: predict(xs, "1f1b"), mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))
    for name, found in step(np.asarray(xs)).items():
        np.testing.assert_array_equal(found, plain[name], err_msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_ref_inside_of_a_loop_trains_as_under_jit_and_one_of_its_surroundings_is_refused(mesh, schedule):
    def block(w, x):
        ref = jax.new_ref(jnp.zeros_like(x))

        def once(i, _):
            ref[...] = ref[...] + jnp.tanh(x @ w)

        lax.fori_loop(0, 2, once, None)
        return jax.freeze(ref)

    def loss(ws, x):
        return (block(ws[1], mpmd.mark_stage_end(block(ws[0], x))) ** 2).sum()

    def step(ws, xs, schedule):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

    ws, xs = [np.eye(4, dtype=np.float32) / 2] * 2, np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 2, 4)
    plain = jax.jit(lambda ws, xs: step(ws, xs, None))(ws, xs)
    jitted = functools.partial(mpmd.jit, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))
    found = jitted(lambda ws, xs: step(ws, xs, schedule))(ws, xs)
    jax.tree.map(np.testing.assert_array_equal, found, plain)

    def counted(xs):
        count = jax.new_ref(jnp.zeros(()))

        def one(x):
            count[...] = count[...] + 1
            return x.sum()

        return mpmd.treduce(one, xs, schedule=None), count[...]

    with pytest.raises(mpmd.StageError) as error:
        jax.jit(counted)(xs)
    where = f"{__file__}:{inspect.getsourcelines(counted)[1] + 4}:25 ({counted.__qualname__}.<locals>.one)"
    assert str(error.value) == (
        f"treduce: fun uses Ref{{f32[]}}, at {where}, a ref that was made outside of the"
        " loop.\n  Make it inside of fun (jax.new_ref), and return what it holds, with an operation such as"
        " mpmd.Add or mpmd.Concat."
    )

    def kept(xs, memory):
        memory[...] += mpmd.treduce(lambda x: mpmd.mark_stage_end(x * 2).sum(), xs, schedule)

    memory = jax.new_ref(jnp.zeros(()))
    for call, error, text in (
        (lambda: jitted(kept)(xs, memory), TypeError, "memory is a ref"),
        (lambda: jitted(lambda xs: kept(xs, memory))(xs), mpmd.StageError, r"a Ref\{f32\[\]\} is used at .*kept\)"),
    ):
        with pytest.raises(error, match=f"^mpmd.jit: {text}.*\n  Pass what it holds"):
            call()


MORE_DTYPES = "float16 float32 float8_e4m3fn int8 uint32 bool".split()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "int32", *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_DTYPES)]
)
def test_constants_in_a_kernel_have_their_types(dtype):
    def doubled(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x ^ True if dtype == "bool" else x * 2

    def step(x):
        return pl.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    x = jnp.ones((2, 4), dtype)
    np.testing.assert_array_equal(np.asarray(mpmd.jit(step, mpmd_mesh=mesh)(x)), np.asarray(jax.jit(step)(x)))


def test_a_key_that_an_inner_function_captured_is_returned():
    key = jax.random.key(3)
    inner = jax.jit(lambda: key)
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    found, _ = mpmd.jit(lambda x: (inner(), x + 1), mpmd_mesh=mesh)(jnp.ones(3))
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(key))


def test_operations_without_a_rule_for_explicit_axes_work_where_their_lowering_traces_them_again():
    sizes = jnp.array([2, 4], jnp.int32)

    @jax.custom_batching.custom_vmap
    def grouped(x, w):
        return lax.ragged_dot(x, w, sizes)

    grouped.def_vmap(lambda n, batched, x, w: (lax.map(lambda x: grouped(x, w), x), True))
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    args = jnp.ones((6, 8)), jnp.ones((2, 8, 8))
    np.testing.assert_array_equal(mpmd.jit(lambda x, w: grouped(x, w), mpmd_mesh=mesh)(*args), jax.jit(grouped)(*args))
