"""A plan of a step against what a person counts, on CPU devices: the same code plans for any other."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import scheduler
from mpmd.__main__ import _loaded, _users_warnings
from mpmd.arrays.targets import Target
from mpmd.costs.collectives import Collective
from mpmd.costs.machine import Machine
from mpmd.planning.plan import _counted, plan_step

D, ROWS, MICROBATCHES = 64, 16, 8
TARGET = dataclasses.replace(Target.named("h100"), memory_nbytes=1 << 30)


def loss(weights, x):
    for w in weights[:-1]:
        x = mpmd.mark_stage_end(jax.nn.relu(x @ w))
    return jnp.mean((x @ weights[-1]) ** 2)


def step(state, xs):
    weights, momenta = state
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule="1f1b")
    momenta = [0.9 * m + g for m, g in zip(momenta, grads, strict=True)]
    return ([w - 0.1 * m for w, m in zip(weights, momenta, strict=True)], momenta), value


def compiled_for(step, rows=ROWS):
    mesh = mpmd.MpmdMesh(jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2), "stage")
    weights = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * 4
    sharding = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    xs = jax.ShapeDtypeStruct((MICROBATCHES, rows, D), jnp.float32, sharding=sharding)
    return mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower((weights, weights), xs).compile()


@pytest.fixture(scope="module")
def compiled():
    return compiled_for(step)


def plan_of(compiled, costs=None, copies=None, devices_per_host=8, **changes):
    machine = Machine(dataclasses.replace(TARGET, **changes), devices_per_host, memory_fraction=1)
    return plan_step(compiled._programs, compiled.program, machine, costs=costs, copies=copies)


def test_bytes_of_parameters_state_gradients_and_data_are_those_of_the_arrays(compiled):
    for group in plan_of(compiled).groups:
        assert group.memory["parameters"] == group.memory["state"] == D * D * 4
        assert group.memory["gradients"] == D * D * 4 + (8 if group.group == 3 else 0)  # and the loss, with its part
        assert group.memory["data"] == (MICROBATCHES * ROWS * D * 4 // 2 if group.group == 0 else 0)
        assert group.memory["peak"] == compiled.memory_analysis()[group.group]["peak"]


@pytest.mark.parametrize("trains", [True, False])
def test_frozen_weights_are_parameters_that_are_gathered_and_have_no_gradients(trains):
    def stepped(weights, frozen, xs):
        read = lambda ws, x: loss([w @ f for w, f in zip(ws, frozen, strict=True)], x)  # noqa: E731
        if not trains:
            return mpmd.treduce(lambda x: read(weights, x), xs, schedule="1f1b")
        grads = mpmd.treduce(lambda x: jax.grad(read)(weights, x), xs, schedule="1f1b")
        return [w - g for w, g in zip(weights, grads, strict=True)]

    mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4]), "stage")
    weights, xs = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * 4, jax.ShapeDtypeStruct((2, 1, D), jnp.float32)
    compiled = mpmd.jit(stepped, mpmd_mesh=mesh).lower(weights, weights, xs).compile()
    plan = plan_of(compiled)
    all_weights = 4 * D * D * 4
    assert [g.memory["data"] for g in plan.groups] == [2 * D * 4, 0, 0, 0] and plan.unpipelined.rows == 2
    gathered = (3 + 2 if trains else 1 + 1) * all_weights * 3 / 4
    assert plan.unpipelined.communication_s * plan.machine.ring_bandwidth(4, 1) == pytest.approx(gathered)
    assert plan_of(compiled, copies=1).copies.state_nbytes == trains * all_weights  # what is frozen is no state


def test_operations_are_those_of_the_products(compiled):
    one = 2 * ROWS * D * D
    # Forward, and both gradients of each product, but for the gradient of the data.
    assert plan_of(compiled).total.products == MICROBATCHES * (4 + 4 + 3) * one


def test_the_gradients_are_summed_over_the_devices_of_each_group_once_a_step(compiled):
    plan = plan_of(compiled)
    for group in plan.groups:
        assert all(cost.collectives == () for cost in group.tasks.values())
        assert {(c.kind, c.num_devices) for c in group.once} == {("all-reduce", 2)}
        assert sum(c.nbytes for c in group.once) == D * D * 4 + (4 if group.group == 3 else 0)  # and the loss
    assert "collectives once a step:\n  group 0, 1, 2, 3: 1 all-reduce (16.4 KB)" in str(plan)


def test_collectives_say_what_goes_on_beside_products():
    gathers = [Collective("all-gather", 10**6, 8, times=3, is_async=True, is_hidden=n == 0) for n in range(2)]
    text = _counted([*gathers, Collective("all-reduce", 4, 8)])
    assert text == "6 all-gather (6 MB, 3 MB beside products), 1 all-reduce (4 B)"


def test_a_step_fits_to_the_byte(compiled):
    plan = plan_of(compiled)
    group = max(plan.groups, key=lambda g: g.memory["peak"])
    needed = group.memory["peak"]
    assert plan_of(compiled, memory_nbytes=needed).faults == []
    faults = plan_of(compiled, memory_nbytes=needed - 1).faults
    assert len(faults) == 1
    assert faults[0].startswith(f"It does not fit: group {group.group} needs")


def test_copies_take_the_memory_and_the_network_of_hosts_that_a_person_counts(compiled):
    state = 4 * 2 * D * D * 4  # of four stages, weights and momenta
    plan = plan_of(compiled, copies=1, devices_per_host=2, network_bandwidth=1e9)
    assert (plan.copies.state_nbytes, plan.copies.sent_nbytes) == (state, state // 4)
    assert plan.copies.host_nbytes == 2 * 2 * state // 4  # its own part and another host's, two versions of each
    assert plan.copies.seconds == pytest.approx(state / 4 / (2 * 1e9 * plan.machine.link_efficiency))
    assert "copies=1): a state of 131 KB" in str(plan) and "while the next step runs" in str(plan)
    assert "every=" in str(plan_of(compiled, copies=3, devices_per_host=2, network_bandwidth=1e5))
    assert "no other host" in str(plan_of(compiled, copies=1))  # all eight devices in one
    assert plan_of(compiled).copies is None


def test_slower_links_make_a_longer_step(compiled):
    fast, slow = (plan_of(compiled, link_bandwidth=b) for b in (450e9, 5e6))
    assert slow.step.seconds > fast.step.seconds
    assert slow.groups[1].exposed_s > fast.groups[1].exposed_s


def test_measured_costs_give_the_step_that_the_scheduler_simulates(compiled):
    costs = scheduler.Costs((1.0, 2.0, 1.0, 3.0), (0.0, 2.0, 1.0, 3.0), 2.0)
    plan = plan_of(compiled, costs)
    expected = scheduler.simulate(scheduler.OneFOneB(4), MICROBATCHES, costs)
    assert plan.step.seconds == pytest.approx(expected.makespan, rel=1e-3)  # transfers take microseconds
    assert plan.picture.timeline.orders == expected.orders
    assert plan.picture.timeline.makespan == pytest.approx(expected.makespan, rel=1e-3)
    assert {n: c.seconds for g in plan.groups for n, c in g.tasks.items()}["B3"] == 5.0
    text = str(plan)
    assert "The times of tasks were measured" in text and "do not pipeline" not in text
    assert f"the loop, {plan.picture.timeline.makespan:.3g} s from left to right:\n" in text
    assert "     3 |" in text


def test_a_long_loop_is_drawn_with_fewer_microbatches(compiled):
    costs = scheduler.Costs(forward=0.2, input_grad=1.5, weight_grad=1.5)
    plan = plan_of(compiled, costs)
    assert plan.picture.timeline.makespan / 0.2 > 150
    shorter = scheduler.simulate(scheduler.OneFOneB(4), plan.picture.microbatches, costs)
    assert plan.picture.microbatches < MICROBATCHES
    assert plan.picture.shown.makespan == pytest.approx(shorter.makespan, rel=1e-3)
    assert f"drawn with {plan.picture.microbatches} microbatches, so that each task can be seen (" in str(plan)
    assert plan.loops[0].seconds == pytest.approx(plan.picture.timeline.makespan)
    assert f"loop 0: OneFOneB(num_stages=4), {MICROBATCHES} microbatches, {plan.loops[0].seconds:.3g} s; " in str(plan)


@pytest.mark.slow
def test_of_two_loops_the_longest_is_drawn_by_its_own_schedule_and_transfers():
    def evaluates_first(state, xs):
        value = mpmd.treduce(lambda x: loss(state[0], x), xs, schedule="gpipe")
        return step(state, xs), value

    costs = scheduler.Costs(forward=0.2, input_grad=1.5, weight_grad=1.5)
    alone, second = (plan_of(compiled_for(one), costs, link_bandwidth=5e4).picture for one in (step, evaluates_first))
    assert second.microbatches == alone.microbatches and second.shown.orders == alone.shown.orders
    assert second.shown.costs.transfer_s == pytest.approx(alone.shown.costs.transfer_s)


def test_costs_of_another_number_of_stages_are_refused(compiled):
    with pytest.raises(ValueError) as caught:
        plan_of(compiled, scheduler.Costs((1.0, 2.0, 1.0)))
    assert str(caught.value) == (
        "Costs: forward has 3 entries and the schedule 4 stages; give one number or one for each stage."
    )


def wide_step(state, xs, wrap=lambda f: f):
    """Residuals of a stage are many times its input."""

    def stage(w, x):
        for k in range(6):
            x = jnp.tanh(x @ w + k)
        return x

    def loss(weights, x):
        for w in weights[:-1]:
            x = mpmd.mark_stage_end(wrap(stage)(w, x))
        return jnp.mean(wrap(stage)(weights[-1], x) ** 2)

    weights, momenta = state
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule="1f1b")
    momenta = [0.9 * m + g for m, g in zip(momenta, grads, strict=True)]
    return ([w - 0.1 * m for w, m in zip(weights, momenta, strict=True)], momenta), value


@pytest.mark.slow
def test_estimated_savings_are_close_to_those_of_the_changed_step():
    rows = 512

    def recomputing(state, xs):
        return wide_step(state, xs, jax.checkpoint)

    plans = [plan_of(compiled_for(s, n)) for s, n in ((wide_step, rows), (recomputing, rows), (wide_step, rows // 2))]
    model = [plan.utilization * plan.step.seconds for plan in plans]
    assert plans[1].hardware_utilization > 1.1 * plans[1].utilization
    assert model[0] == pytest.approx(model[1], rel=1e-3) == pytest.approx(2 * model[2], rel=1e-3)
    now, recomputed, halved = (plan.groups for plan in plans)
    for group in (0, 1):  # those that hold most microbatches
        estimated = {saving.text.split()[0]: saving.nbytes for saving in now[group].savings}
        # The data counts too: with half as many rows there would be twice as many microbatches of it.
        less_data = now[group].memory["data"] - halved[group].memory["data"]
        saved = now[group].memory["peak"] - halved[group].memory["peak"] - less_data
        assert estimated["microbatches"] == pytest.approx(saved, rel=0.2)
        saved = now[group].memory["peak"] - recomputed[group].memory["peak"]
        assert 0.6 * saved < estimated["jax.checkpoint"] <= saved  # it promises no more than it keeps


def test_the_text_and_the_document_say_the_same(compiled):
    plan = plan_of(compiled)
    document = json.loads(plan.as_json())
    assert document["groups"][2]["memory"] == plan.groups[2].memory
    assert document["step"]["seconds"] == plan.step.seconds
    text = str(plan)
    assert "It fits." in text
    assert "989 TFLOP/s" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrix_efficiency": 0.0}, "a machine cannot be like this: matrix efficiency is 0.0."),
        (
            {"latency_s": -1.0, "devices_per_host": 0},
            "a machine cannot be like this: devices per host is 0, latency is -1.0.",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        Machine(TARGET, **changes)
    assert str(caught.value) == message


def test_a_plan_that_takes_long_says_what_it_is_at_and_how_far(compiled):
    said = []
    plan_step(compiled._programs, compiled.program, Machine(TARGET), told=said.append)
    texts, shares = zip(*said, strict=True)
    assert texts[0] == "mpmd: checking that the step cannot deadlock"
    assert texts[-1] == "mpmd: memory and communication of group 3"
    assert list(shares) == sorted(shares) and shares[0] == 0.0 and 0.9 < shares[-1] < 1


def test_a_warning_of_the_command_points_to_the_function_that_made_the_step(tmp_path):
    file = tmp_path / "made_for_a_warning.py"
    file.write_text("\n\ndef build(mesh):\n    pass\n")
    with pytest.warns(UserWarning) as found, _users_warnings(f"{file}:build"):
        _loaded(f"{file}:build")
        warnings.warn_explicit("all compute the same", UserWarning, scheduler.__file__, 12)
        warnings.warn_explicit("the user's own", UserWarning, "/somewhere/model.py", 7)
    assert [(w.filename, w.lineno) for w in found] == [(str(file), 3), ("/somewhere/model.py", 7)]


def test_a_collective_goes_as_far_as_the_hosts_of_its_group():
    """Three groups of two devices, with hosts of three: the group in the middle is in two of them."""
    mesh = mpmd.MpmdMesh(jax.make_mesh((3, 2), ("stage", "data"), devices=jax.devices()[:6]), "stage")
    weights = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * 3
    sharding = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    xs = jax.ShapeDtypeStruct((3, ROWS, D), jnp.float32, sharding=sharding)
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower((weights, weights), xs).compile()
    plan = plan_of(compiled, devices_per_host=3, devices_per_link_domain=1)
    assert [{c.num_hosts for c in group.once} for group in plan.groups] == [{1}, {2}, {1}]


def test_tasks_of_several_loops_and_steps_that_run_nothing_are_shown():
    def evaluates(state, xs):
        return step(state, xs), mpmd.treduce(lambda x: loss(state[0], x), xs, schedule="gpipe")

    plan = plan_of(compiled_for(evaluates))
    names = {name for g in plan.groups for name in g.tasks}
    assert {"loop0:F0", "loop0:B0", "loop1:F0"} <= names and "F0" not in names
    assert "loop1:F" in str(plan) and json.loads(plan.as_json())["groups"][0]["tasks"].keys() <= names
    nothing = plan_of(compiled_for(lambda state, xs: state))
    assert nothing.utilization == 0 and nothing.tokens_per_s is None and "It fits." in str(nothing)
