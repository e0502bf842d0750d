"""Programs in JaxPP's words give what plain JAX gives: steps, schedules of one's own, arrays and moves, tasks."""

import dataclasses
import functools
import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import mpmd.jaxpp as jaxpp
import scheduler
from mpmd.jaxpp import experimental, schedules
from mpmd.jaxpp.steps import _title_of_task

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(num_groups: int, per_group: int = 1, types: AxisType = AUTO) -> jaxpp.MpmdMesh:
    devices = jax.devices()[: num_groups * per_group]
    return jaxpp.MpmdMesh(
        jax.make_mesh((num_groups, per_group), ("stage", "data"), (types,) * 2, devices=devices), "stage"
    )


def problem(num_stages: int, num_microbatches: int):
    random = np.random.default_rng(0)
    params = [random.normal(size=(8, 8)).astype(np.float32) / 3 for _ in range(num_stages)]
    return params, random.normal(size=(num_microbatches, 4, 8)).astype(np.float32)


def train_step(params, xs, schedule):
    """One step in JaxPP's words: marks behind all stages, no operation said."""

    def loss(params, x):
        for w in params:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    losses, grads = jaxpp.treduce(functools.partial(jax.value_and_grad(loss), params), xs, schedule=schedule)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), losses


def assert_close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


class Snake(jaxpp.BaseSchedule):
    """Two stages a group, there and back; a forward of each, then their backwards, one microbatch after the other."""

    def get_mpmd_idx(self, stage_id):
        return min(stage_id, self.num_stages - 1 - stage_id)

    def tasks(self, n_mubatches):
        make, kinds = jaxpp.Task.make, jaxpp.TaskType
        rows = []
        for group in range(self.num_stages // 2):
            first, last = group, self.num_stages - 1 - group
            row = []
            for i in range(n_mubatches):
                halves = make(last, i, kinds.BWD_I), make(last, i, kinds.BWD_W)
                row += [make(first, i, kinds.FWD), make(last, i, kinds.FWD), None]
                row += [jaxpp.FusedTask(halves), make(first, i, kinds.BWD)]
            rows.append(row)
        return rows


def compare(schedule, num_microbatches, per_group=1, types=AUTO):
    mesh = mesh_of(schedule.num_groups, per_group, types)
    params, xs = problem(schedule.num_stages, num_microbatches)
    step = functools.partial(train_step, schedule=schedule)
    wanted = jax.jit(step)(params, xs)
    jitted = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=(None, P(None, "data")), donate_argnums=0)
    found = jitted(params, xs)
    assert found[1].shape == (num_microbatches,)  # stacked, not summed
    assert_close(found, wanted)
    assert_close(jitted(found[0], xs), jax.jit(step)(wanted[0], xs))
    assert found[0][0].is_deleted()


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "per_group", "types"),
    [
        pytest.param(jaxpp.Std1F1B(2), 4, 2, EXPLICIT, marks=pytest.mark.slow),
        (Snake(4), 3, 1, AUTO),
        (jaxpp.DualPipeV(4, 2), 4, 1, EXPLICIT),
    ],
)
def test_a_step_in_its_words_equals_plain_jax(schedule, num_microbatches, per_group, types):
    compare(schedule, num_microbatches, per_group, types)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "num_microbatches"),
    [
        (jaxpp.Eager1F1B(4), 5),
        (jaxpp.Interleaved1F1B(8, 4), 5),
        (jaxpp.KimiK2(8, 4, fuse_steady_state=True), 9),
        (jaxpp.GPipe(4), 3),
        (jaxpp.InterleavedGPipe(4, 2), 5),
        (jaxpp.ZeroBubble(4), 6),
        (jaxpp.InterleavedZeroBubble(8, 4), 8),
        (jaxpp.DualPipeV(8, 4), 8),
    ],
)
@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_each_of_its_schedules_equals_plain_jax(schedule, num_microbatches, types):
    compare(schedule, num_microbatches, 2, types)


# --- schedules ----------------------------------------------------------------------------------------


def test_its_orders_are_those_of_our_schedules_of_the_same_kind():
    for theirs, ours in [
        (jaxpp.Std1F1B(4), scheduler.OneFOneB(4)),
        (jaxpp.Eager1F1B(4), scheduler.EagerOneFOneB(4)),
        (jaxpp.Interleaved1F1B(6, 3), scheduler.InterleavedOneFOneB(6, 3)),
        (jaxpp.GPipe(4), scheduler.GPipe(4)),
        (jaxpp.DualPipeV(6, 3), scheduler.DualPipeV(3)),
    ]:
        assert theirs.orders(9) == ours.orders(9) and theirs.placement == ours.placement
        assert [theirs.get_mpmd_idx(stage) for stage in range(theirs.num_stages)] == list(ours.placement)


@pytest.mark.parametrize(
    "schedule",
    [
        jaxpp.Interleaved1F1B(8, 4), jaxpp.Interleaved1F1B(8, 4, fuse_steady_state=True), jaxpp.KimiK2(8, 4),
        jaxpp.InterleavedGPipe(8, 4), jaxpp.ZeroBubble(4), jaxpp.InterleavedZeroBubble(8, 4), jaxpp.DualPipeV(8, 4),
    ],
)  # fmt: skip
def test_its_schedules_run_whatever_the_number_of_microbatches(schedule):
    for num_microbatches in (8, 12, 16):
        timeline = scheduler.simulate(schedule, num_microbatches)  # checks the orders
        assert sum(map(len, timeline.orders)) >= 2 * schedule.num_stages * num_microbatches
    assert pickle.loads(pickle.dumps(schedule)) == schedule == dataclasses.replace(schedule)


def test_its_zero_bubble_runs_any_number_of_microbatches_as_fast_as_can_be():
    for groups, per_group, count in itertools.product((2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 7, 10)):
        schedule = jaxpp.InterleavedZeroBubble(groups * per_group, groups)
        costs = scheduler.Costs(*[1 / per_group] * 3)
        makespan = scheduler.simulate(schedule, count, costs).makespan
        if count >= groups:
            assert makespan == pytest.approx(3 * count + (groups - 1) / per_group)
        else:
            assert (
                makespan <= scheduler.simulate(jaxpp.Interleaved1F1B(groups * per_group, groups), count, costs).makespan
            )


def test_a_schedule_may_have_attributes_of_its_own_that_its_equality_does_not_see():
    class Mine(jaxpp.BaseSchedule):
        def __init__(self, num_stages, is_last_first):
            super().__init__(num_stages)
            object.__setattr__(self, "is_last_first", is_last_first)

        def tasks(self, n_mubatches):
            of = list(range(n_mubatches))
            kinds = (jaxpp.TaskType.FWD, of), (jaxpp.TaskType.BWD, of[::-1] if self.is_last_first else of)
            return [[jaxpp.Task.make(s, m, kind) for kind, ms in kinds for m in ms] for s in range(self.num_stages)]

    class Reversed(jaxpp.DualPipeV):
        def tasks(self, n_mubatches):
            return [[t for kind in "FB" for t in of_kind(kind, n_mubatches, group)] for group in range(self.mpmd_dim)]

    def of_kind(kind, count, group):
        stages = (group, 3 - group) if kind == "F" else (3 - group, group)
        return [jaxpp.Task.make(s, m, jaxpp.TaskType(kind)) for s in stages for m in range(count)]

    one, other = Mine(2, False), Mine(2, True)
    assert one == other  # by its fields
    assert " ".join(map(str, one.orders(2)[0])) == "0F0 0F1 0B0 0B1"
    assert " ".join(map(str, other.orders(2)[0])) == "0F0 0F1 0B1 0B0"
    assert " ".join(map(str, Reversed(4, 2).orders(4)[0][:8])) == "0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3"


def test_its_tasks_print_as_there():
    group = jaxpp.Interleaved1F1B(4, 2).tasks(3)[1]
    assert " ".join(map(str, group)) == (
        "fwd_1__0 fwd_1__1 fwd_1__2 FusedTask(fwd_3__0, bwd_3__0) FusedTask(fwd_3__1, bwd_3__1)"
        " FusedTask(fwd_3__2, bwd_3__2) bwd_1__0 bwd_1__1 bwd_1__2"
    )
    zero_bubble = jaxpp.ZeroBubble(2)
    assert zero_bubble.is_partial_bwd
    assert " ".join(map(str, zero_bubble.tasks(2)[1])) == "fwd_1__0 bwdA_1__0 fwd_1__1 bwdA_1__1 bwdW_1__0 bwdW_1__1"


def test_what_shall_run_together_is_one_backward_or_a_pair():
    make, kinds = jaxpp.Task.make, jaxpp.TaskType

    class Pairs(jaxpp.BaseSchedule):
        def tasks(self, n_mubatches):
            halves = make(0, 0, kinds.BWD_I), make(0, 0, kinds.BWD_W)
            both = jaxpp.FusedTask((make(0, 1, kinds.FWD), *halves))
            return [[make(0, 0, kinds.FWD), both, make(0, 1, kinds.BWD_I), make(0, 1, kinds.BWD_W)]]

    schedule = Pairs(1)
    assert " ".join(map(str, schedule.orders(2)[0])) == "0F0 0F1 0B0 0B1"
    assert schedule.fused(2) == {(scheduler.Task(0, "F", 1), scheduler.Task(0, "B", 0))}
    assert jaxpp.Std1F1B(2).fused(4) == frozenset()  # a forward and its own backward wait for each other


def test_faults_of_a_schedule_say_where():
    """In words that hold those of JaxPP, which its own tests compare."""

    class Forgetful(jaxpp.BaseSchedule):
        def tasks(self, n_mubatches):
            return [[jaxpp.Task.make(0, i, jaxpp.TaskType.FWD) for i in range(n_mubatches)]]

    class Untranslated(jaxpp.BaseSchedule):
        def tasks(self, n_mubatches):
            return [["fwd_0__0"]]

    with pytest.raises(scheduler.ScheduleError) as error:
        Forgetful(2).orders(1)
    assert str(error.value).startswith("Forgetful.tasks(1): ")
    with pytest.raises(scheduler.ScheduleError) as error:
        Untranslated(1).orders(1)
    assert str(error.value) == (
        "Untranslated.tasks: 'fwd_0__0' is a str. Make tasks by mpmd.jaxpp.Task.make(stage_id, mubatch_idx,"
        " mpmd.jaxpp.TaskType.FWD), None for a step without work."
    )
    for make, message in [
        (
            lambda: jaxpp.Std1F1B(0),
            "Std1F1B: num_stages is 0. The argument `num_stages` must be `>= 0`, whole and not 0.",
        ),
        (
            lambda: jaxpp.KimiK2(4, -1),
            "KimiK2: mpmd_dim is -1. The argument `mpmd_dim` must be `>= 0`, whole and not 0.",
        ),
        (
            lambda: jaxpp.Interleaved1F1B(4, 3),
            "Interleaved1F1B: num_stages 4 can not be evenly divided by mpmd_dim 3, to give every group as many.",
        ),
        (
            lambda: jaxpp.GPipe(4, 2),
            "GPipe: mpmd_dim is 2 and num_stages 4. It requires mpmd_dim == num_stages: use InterleavedGPipe.",
        ),
        (
            lambda: jaxpp.DualPipeV(3, 3),
            "DualPipeV only supports 2 * mpmd_dim stages, self.num_stages=3 requested with self.mpmd_dim=3: use 6.",
        ),
        (
            lambda: jaxpp.DualPipeV(6, 3).tasks(5),
            "DualPipeV requires n_mubatches=5 >= self.num_stages=6: its pairs need two microbatches a group.",
        ),
    ]:
        with pytest.raises(ValueError) as fault:
            make()
        assert str(fault.value) == message


# --- loops and steps ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Largest:
    """An operation in JaxPP's words."""

    def state(self, n, a):
        return jnp.full(a.shape, -jnp.inf, a.dtype)

    def update(self, state, update, index):
        return jnp.maximum(state, update + index)


def test_operations_in_its_words_and_in_ours_reduce_the_same_loop():
    xs = jnp.arange(12.0).reshape(3, 4).T
    found = jaxpp.treduce(
        lambda x: (x.sum(), x, (x[0], x)), xs, None, 1, (jaxpp.Concat(), Largest(), (jaxpp.Add, jaxpp.Max))
    )
    rows = np.asarray(xs).T
    wanted = rows.sum(1), (rows + np.arange(3)[:, None]).max(0), (rows[:, 0].sum(), rows.max(0))
    assert_close(found, wanted)
    stacked, total = jaxpp.treduce_i(lambda i: (i, i), 4, None)
    assert list(stacked) == [0, 1, 2, 3] and total == 6


def test_a_compiled_step_says_where_its_arguments_are_and_a_move_brings_them_there():
    mesh = mesh_of(2, 4)
    whole = NamedSharding(mesh.jax_mesh, P(("stage", "data")))
    params, xs = problem(2, 4)
    state = [jax.device_put(w, whole) for w in params]
    step = functools.partial(train_step, schedule=jaxpp.Std1F1B(mesh.mpmd_dim))
    jitted = jaxpp.mpmd_jit_with_loop(
        step, mpmd_mesh=mesh, in_shardings=([whole] * 2, None), out_specs=(whole.spec, P())
    )
    compiled = jitted.compile(state, xs)
    (ins, _), no_names = compiled.in_shardings
    assert no_names == {} and [s.mesh_ids for s in ins] == [{0}, {1}] and {s.spec for s in ins} == {P("data")}
    assert compiled.out_shardings[1].mesh_ids == {1}
    assert "treduce" in str(compiled.closed_jaxpr) and compiled.explain() and jitted.lower(state, xs).cuts is None
    placed = jaxpp.spmd_to_mpmd_reshard(mesh, state, ins, threshold=1)  # each array alone
    assert all(x.is_deleted() for x in state) and isinstance(placed[0], jaxpp.MpmdArray)
    found, losses = compiled(placed, xs)
    wanted = jax.jit(step)(params, xs)
    assert_close((found, losses), wanted)
    moved = jaxpp.mpmd_to_mpmd_reshard(found, [jaxpp.MpmdSharding(mesh, {0, 1}, s.spec) for s in ins])
    back = jaxpp.mpmd_to_spmd_reshard(mesh, moved, [whole] * 2, threshold=1 << 20)
    assert_close(back, wanted[0])
    assert {x.sharding for x in back} == {whole} and all(x.is_deleted() for x in moved)


def test_values_of_several_groups_meet_in_its_words():
    mesh = mesh_of(2)
    params, xs = problem(2, 2)

    def norms(params, xs):
        new, _ = train_step(params, xs, jaxpp.Std1F1B(2))
        each = [jnp.vdot(w, w) for w in new]
        return (
            jaxpp.cross_mpmd_all_reduce(*each), jaxpp.add_multi_p.bind(*each), jaxpp.cross_mpmd_stack(new, axis=1),
            jaxpp.gather_multi_p.bind(*new, axis=-1), jaxpp.place_with(new[0], new[1]) + new[1],
        )  # fmt: skip

    found = jaxpp.mpmd_jit_with_loop(norms, mesh)(params, xs)
    assert [x.mpmd_idxs for x in found[:4]] == [(0, 1)] * 4
    new, _ = jax.jit(functools.partial(train_step, schedule=None))(params, xs)
    total = sum(float(jnp.vdot(w, w)) for w in new)
    assert_close(found, (total, total, np.stack(new, 1), np.concatenate(new, 1), new[0] + new[1]))


def test_functions_without_a_loop_run_stage_by_stage_or_where_their_results_shall_be():
    mesh = mesh_of(2, 2)
    params, xs = problem(4, 1)

    def predict(params, x):
        for w in params:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return x

    found = jaxpp.mpmd_jit_by_yield(predict, mesh, target_num_stages=4)(params, xs[0])
    assert_close(found, jax.jit(predict)(params, xs[0]))

    def init(key):
        return {"first": jax.random.normal(key, (4, 4)), "both": jnp.ones(4)}

    init_jit = jaxpp.mpmd_jit_rev(
        init, mesh, out_refs={"first": {1}, "both": {0, 1}}, out_shardings={"first": P("data"), "both": P()}
    )
    state = init_jit(jax.random.key(0))
    assert {k: (x.mpmd_idxs, x.spec) for k, x in state.items()} == {"first": ((1,), P("data")), "both": ((0, 1), P())}
    assert_close(state, init(jax.random.key(0)))


def test_times_are_collected_by_task():
    mesh = mesh_of(2)
    params, xs = problem(2, 3)
    step, schedule = jaxpp.mpmd_jit_with_loop(train_step, mesh, static_argnums=2), jaxpp.Std1F1B(2)
    wanted = step(params, xs, schedule)
    with jaxpp.collect_task_times_ms() as times:
        found = step(params, xs, schedule)
    assert {name: len(ms) for name, ms in times.items() if name[3] == "_"} == {
        "fwd_0": 3, "bwd_0": 3, "fwd_1": 3, "bwd_1": 3,
    }  # fmt: skip
    assert all(ms >= 0 for every in times.values() for ms in every)
    assert_close(found, wanted)
    with jaxpp.collect_task_times_ms(enabled=False) as times:
        step(params, xs, schedule)
    assert times is None
    assert _title_of_task(scheduler.Task(1, "R", 0)) == "recompute_1"


def test_what_has_no_counterpart_says_what_to_write_when_it_is_used():
    with pytest.raises(NotImplementedError) as error:
        jaxpp.RemoteMpmdMesh(2, (1, 1), ("data", "model"))
    assert str(error.value) == (
        "mpmd.jaxpp.RemoteMpmdMesh is not here: write MpmdMesh(jax_mesh, axis_name) in a script that calls"
        " mpmd.initialize(), and start it by scripts/launch_multihost.sh."
    )
    for name in ("ArrayRef", "LoopOutput", "accumulate_grads", "pipelined", "run_replicated_dced"):
        with pytest.raises(NotImplementedError, match=f"^mpmd.jaxpp.{name} is not here: "):
            getattr(jaxpp, name)()
    with pytest.raises(ValueError) as fault:
        jaxpp.mpmd_jit_with_loop(abs, mesh_of(1), in_specs=P(), in_shardings=P())
    assert str(fault.value) == "mpmd_jit_with_loop: in_shardings and in_specs are one argument. Pass one."
    with pytest.warns(DeprecationWarning, match="write mark_stage_end") as warned:
        assert jaxpp.pipeline_enter_stage(jnp.ones(2), "name").shape == (2,)
    assert warned[0].filename == __file__


# --- meshes and arrays ------------------------------------------------------------------------------------


def test_a_mesh_has_its_names():
    mesh, devices = mesh_of(4, 2), jax.devices()
    with mesh as same:
        assert same is mesh and mesh == mpmd.MpmdMesh(mesh.jax_mesh, "stage")
    assert mesh.mpmd_axis == 0 and mesh.unstack == list(mesh.groups) and mesh.lowering_mesh() == mesh.groups[0]
    assert mesh.device_coords[devices[5]] == (2, 1) and mesh.device_mpmd_idx[devices[5]] == 2
    assert mesh.mpmd_idx_for_mesh[mesh.groups[3]] == 3
    middle = mesh.mpmd_submesh([2, 1])
    assert mesh.mpmd_indices_for_mesh(middle.jax_mesh) == (2, 1) and isinstance(middle, jaxpp.MpmdMesh)
    assert mesh.mpmd_indices_for_mesh(jax.make_mesh((8,), ("data",))) is None
    across = jax.sharding.Mesh(mesh.jax_mesh.devices.T, ("stage", "data"))
    assert mesh.mpmd_indices_for_mesh(across) is None


def test_a_sharding_that_names_the_mpmd_axis_splits_nothing():
    mesh = mesh_of(2, 2)
    sharding = jaxpp.MpmdSharding(mesh, {0, 1}, P(("stage", "data"), None))
    assert isinstance(sharding, jaxpp.MpmdSharding) and sharding.split_axis is None and sharding.spec == P("data", None)
    assert isinstance(mpmd.MpmdSharding(mesh, 0), jaxpp.MpmdSharding) and not isinstance(P(), jaxpp.MpmdSharding)


def test_an_array_may_lack_what_another_process_would_have():
    mesh = mesh_of(3, 2)
    sharding = jaxpp.MpmdSharding(mesh, {0, 2}, P("data"))
    arrays = [jax.device_put(jnp.arange(2.0), sharding.group_sharding(g)) for g in (0, 2)]
    nothing = jaxpp.MpmdArray([], sharding, shape=(2,), dtype=jnp.float32)
    second = jaxpp.MpmdArray([arrays[1]], sharding)
    both = jaxpp.MpmdArray(partially_addressable_arrays=arrays, mpmd_sharding=sharding)
    assert [x.is_partially_addressable for x in (nothing, second, both)] == [False, True, True]
    assert nothing.to_mpmd_local_array is None and second.first_mpmd_replica is None
    assert all(isinstance(x, jaxpp.MpmdArray) and x.is_mpmd_replicated for x in (nothing, second, both))
    assert jaxpp._to_global_jax_array(both).sharding == sharding.sharding
    with pytest.raises(ValueError, match=r"^x: .* was made without the arrays of all groups"):
        jaxpp.mpmd_jit_with_loop(lambda x: x + 1, mesh)(nothing)
    with pytest.raises(ValueError, match=r"the arrays are in the groups \[1\]"):
        jaxpp.MpmdArray([jax.device_put(jnp.ones(2), sharding.group_sharding(1))], sharding)


# --- programs of tasks -----------------------------------------------------------------------------------


def two_stages(mesh):
    """A program of two stages, with values of both that meet."""
    task, transfer, stack, slice_ = (
        getattr(experimental.mpmd, name) for name in ("task", "transfer", "stack", "slice")
    )
    rows = [NamedSharding(group, P("data")) for group in mesh.unstack]
    whole = [NamedSharding(group, P()) for group in mesh.unstack]
    over_both = NamedSharding(mesh.mpmd_submesh([0, 1]).jax_mesh, P())

    @experimental.mpmd.mpmd(mesh, in_shardings=(tuple(whole[:2]), rows[0]), infer_donation=True)
    def program(params, x):
        @task(out_shardings=(P("data"), None))
        def first(w, x):
            y = jnp.tanh(x @ w)
            return y, y.sum()

        y, total = first(params[0], x)
        future = transfer({"y": y}, out_shardings=rows[1])
        loss = task(lambda w, y: jnp.mean((y @ w) ** 2), name="second", out_shardings=P())(
            params[1], future.done()["y"]
        )
        both = stack(total, loss)
        summed = task(lambda parts: parts.sum(0), name="sum", out_shardings=over_both)(both)
        return y, loss, *slice_(both, [0, 1]), *slice_(summed, [[0, 1]])

    return program


def two_stages_plain(params, x):
    y = np.tanh(x @ params[0])
    loss = np.mean((y @ params[1]) ** 2)
    return y, loss, [y.sum()], [loss], y.sum() + loss


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_a_program_of_tasks_runs_where_it_says(types):
    mesh = mesh_of(3, 2, types)
    params, xs = problem(2, 1)
    program = two_stages(mesh)
    wanted = two_stages_plain(params, xs[0])
    assert isinstance(program, experimental.mpmd.MpmdFunction)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (tuple(params), xs[0]))
    lowered = program.lower(*shapes)
    outs = lowered(*jax.device_put((tuple(params), xs[0]), lowered.in_shardings))
    assert_close(outs, wanted)
    assert_close(program(tuple(params), np.asarray(xs[0], np.float64)), wanted)
    assert [x.sharding for x in outs] == jax.tree.leaves(lowered.out_shardings)
    assert [mesh.mpmd_indices_for_mesh(x.sharding.mesh) for x in outs] == [(0,), (1,), (0,), (1,), (0, 1)]
    assert lowered.used_inputs == ((True, True), True) and lowered.out_shape[0].shape == (4, 8)


def test_a_task_that_runs_for_each_microbatch_is_traced_once():
    mesh, traces = mesh_of(2, 2), []
    here = NamedSharding(mesh.unstack[0], P())

    def double(x):
        traces.append(x.shape)
        return 2 * x

    @experimental.mpmd.mpmd(mesh, in_shardings=here)
    def program(x):
        run = experimental.mpmd.task(double, out_shardings=here)
        y = experimental.mpmd.task(lambda x: x, out_shardings=here)(x)
        return run(y), run(run(y))

    assert [list(x) for x in jax.tree.leaves(program(np.ones(2, np.float32)))] == [[2, 2], [4, 4]]
    assert traces == [(2,)]


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_a_pullback_whose_shape_was_found_before_runs_in_a_program(types):
    """As Marin splits its backwards: a task gives the arrays of a pullback, two others use it."""
    mesh, task = mesh_of(2, 2, types), experimental.mpmd.task
    here = mesh.unstack[0]
    rows, whole = NamedSharding(here, P("data")), NamedSharding(here, P())

    def loss(w, x):
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
        return jnp.sin(jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=None, **specs)(w, x)).sum()

    w, x = np.eye(4, dtype=np.float32) * 2, np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    with jax.set_mesh(here):
        expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(jax.device_put(w, whole), jax.device_put(x, rows))
        leaves, tree = jax.tree.flatten(
            jax.eval_shape(lambda w, x: jax.vjp(loss, w, x)[1], jax.device_put(w, whole), jax.device_put(x, rows))
        )
    places = [leaf.sharding if isinstance(leaf.sharding, NamedSharding) else whole for leaf in leaves]
    places = tuple(NamedSharding(here, s.spec) for s in places)

    @experimental.mpmd.mpmd(mesh, in_shardings=(whole, rows))
    def program(w, x):
        kept = task(lambda w, x: tuple(jax.tree.leaves(jax.vjp(loss, w, x)[1])), out_shardings=places)(w, x)
        half = lambda i: lambda *kept: tree.unflatten(kept)(jnp.ones(()))[i]  # noqa: E731
        return [task(half(i), out_shardings=s)(*kept) for i, s in enumerate((whole, rows))]

    assert_close(program(w, x), list(expected))


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_each_task_is_one_program_and_its_group_keeps_the_order_of_the_text(types):
    """A pipeline by hand: as many programs for six microbatches as for three, and no group waits for all of them."""
    mesh, task, transfer = mesh_of(2, 1, types), experimental.mpmd.task, experimental.mpmd.transfer
    first, second = (NamedSharding(group, P()) for group in mesh.unstack)
    params, (x,) = problem(2, 1)

    def lowered(n):
        @experimental.mpmd.mpmd(mesh, in_shardings=((first, second), (first,) * n))
        def program(params, xs):
            forward = task(lambda w, x: jnp.tanh(x @ w), out_shardings=first)
            gradient = task(jax.grad(lambda w, y: jnp.mean((y @ w) ** 2)), out_shardings=second)
            add, total = task(jnp.add, out_shardings=second), None
            for x in xs:
                y = transfer(forward(params[0], x), out_shardings=second).done()
                grad = gradient(params[1], y)
                total = grad if total is None else add(total, grad)
            return total

        return program.lower(tuple(params), (x,) * n)

    few, many = lowered(3), lowered(6)
    expected = jax.grad(lambda w: 6 * jnp.mean((jnp.tanh(x @ params[0]) @ w) ** 2))(params[1])
    assert_close(many(tuple(params), (x,) * 6), expected)
    programs = [re.findall(r"executables of all groups; (\d+) programs", c.compiled.explain()) for c in (few, many)]
    assert programs[0] == programs[1] != []
    one, other = str(many.compiled.program).split("\ngroup 1\n")
    does = [re.findall(r"^ *\d+ +(call|send|recv)\b", text, re.MULTILINE) for text in (one, other)]
    assert does[0] == ["call", "send"] * 6 and does[1].count("call") == 11
    assert does[1][:4] == ["recv", "call", "recv", "call"]  # the first gradient before the second value is there


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_a_value_may_pass_through_a_group_that_does_not_read_it(types):
    mesh, task, transfer = mesh_of(3, 2, types), experimental.mpmd.task, experimental.mpmd.transfer
    first, second, third = (NamedSharding(group, P("data")) for group in mesh.unstack)

    @experimental.mpmd.mpmd(mesh, in_shardings=(first, second))
    def program(x, y):
        doubled = task(lambda x: 2 * x, out_shardings=first)(x)
        on_way = transfer(doubled, out_shardings=second).done()
        more = task(lambda x: x + 1, out_shardings=third)(transfer(on_way, out_shardings=third).done())
        product = task(jnp.multiply, out_shardings=first)(transfer(more, out_shardings=first).done(), doubled)
        return on_way, product, x, transfer(y, out_shardings=third).done()

    x = np.arange(4, dtype=np.float32)
    assert_close(program(x, -x), (2 * x, (2 * x + 1) * 2 * x, x, -x))


def test_a_task_may_keep_values_on_the_host():
    mesh = mesh_of(2, 2, EXPLICIT)
    here, there = (NamedSharding(group, P("data")) for group in mesh.unstack)
    on_host = here.with_memory_kind("pinned_host")

    @experimental.mpmd.mpmd(mesh, in_shardings=(here,))
    def program(x):
        kept = experimental.mpmd.task(lambda x: jax.device_put(2 * x, on_host), out_shardings=on_host)(x)
        back = experimental.mpmd.task(lambda x: jax.device_put(x, here) + 1, out_shardings=here)(kept)
        return kept, experimental.mpmd.transfer(back, out_shardings=there).done()

    kept, sent = program(np.arange(4, dtype=np.float32))
    assert kept.sharding.memory_kind == "pinned_host" and list(kept) == [0, 2, 4, 6] and list(sent) == [1, 3, 5, 7]


def test_faults_of_a_program_are_told():
    mesh = mesh_of(2, 2)
    task, transfer, stack = experimental.mpmd.task, experimental.mpmd.transfer, experimental.mpmd.stack
    here, there = (NamedSharding(group, P()) for group in mesh.unstack)
    others = jax.make_mesh((2,), ("data",), (AUTO,), devices=jax.devices()[4:6])

    def fault(body, error=ValueError):
        with pytest.raises(error) as found:
            experimental.mpmd.mpmd(mesh, in_shardings=here)(body)(np.ones(2, np.float32))
        return str(found.value)

    def done_twice(x):
        future = transfer(x, out_shardings=there)
        future.done()
        return future.done()

    def uneven(x):
        rows = NamedSharding(here.mesh, P("stage")), NamedSharding(there.mesh, P("stage"))
        one = task(lambda x: jnp.stack([x, x]), out_shardings=rows[0])(x)
        other = task(lambda x: x[None], out_shardings=rows[1])(transfer(x, out_shardings=there).done())
        return one, other

    for which, options in [("out_shardings", {"out_shardings": there}), ("argument shardings", {"mesh": there.mesh})]:
        assert fault(lambda x, o=options: task(lambda x: x, **{"out_shardings": P(), **o})(x)) == (
            f"task <lambda>: task {which} must be on the same mesh; they are in the groups (0,) and (1,). Move values"
            " by transfer(x, out_shardings=...).done() first."
        )
    assert fault(lambda x: task(lambda: jnp.ones(2), out_shardings=P())(), RuntimeError) == (
        "task <lambda>: nothing says where it runs, so a PartitionSpec requires a non-empty mesh: pass mesh= or"
        " NamedShardings."
    )
    assert "does not belong to the MPMD mesh" in fault(
        lambda x: task(lambda: jnp.ones(2), mesh=others, out_shardings=P())()
    )
    assert fault(lambda x: x.value + 1, TypeError).startswith("a result is a ")
    assert fault(done_twice, RuntimeError) == "transfer: done() may only be called once. Keep what it returned."
    assert fault(lambda x: stack(x, x)) == (
        "stack: the arguments are in the groups [0, 0]; a duplicate MPMD index cannot be stacked."
    )
    assert (
        fault(lambda x: stack(*uneven(x))) == "stack: the arguments need as many rows for each group; they have [2, 1]."
    )
    with pytest.raises(ValueError, match=r"^A program takes no keyword arguments: x\. "):
        experimental.mpmd.mpmd(mesh, in_shardings=here)(lambda x: x)(x=1)
    with pytest.raises(TypeError, match="out_shardings"):
        task(abs)  # pyright: ignore[reportCallIssue]


def test_schedules_has_the_names_of_its_module():
    names = {"BaseSchedule", "DualPipeV", "FusedTask", "GPipe", "KimiK2", "Std1F1B", "Task", "TaskType", "ZeroBubble"}
    assert all(getattr(schedules, name) is getattr(jaxpp, name) for name in names)
    assert {getattr(jaxpp, name).__name__ for name in names} - names == {"JaxppTask"}


def test_a_program_of_tasks_is_traced_again_for_other_settings_of_jax_and_keeps_weak_types():
    mesh = mesh_of(2)
    here = NamedSharding(mesh.unstack[0], P())

    @experimental.mpmd.mpmd(mesh, in_shardings=(here, here))
    def program(x, factor):
        draw = experimental.mpmd.task(
            lambda x, f: (x * f, jax.random.normal(jax.random.key(0), (3,))), out_shardings=here
        )
        return draw(x, factor)

    x = jnp.ones(3, jnp.bfloat16)
    scaled, noise = program(x, 2.0)
    assert scaled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(noise), jax.random.normal(jax.random.key(0), (3,)))
    with jax.threefry_partitionable(False):
        wanted = jax.random.normal(jax.random.key(0), (3,))
        np.testing.assert_array_equal(np.asarray(program(x, 2.0)[1]), wanted)
    assert (np.asarray(noise) != np.asarray(wanted)).any()
