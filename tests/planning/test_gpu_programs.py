"""Programs that XLA compiled for GPUs that are not here: donation, collectives, their order, and what they hold."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plugins import needs_plugin

import mpmd
import scheduler
from mpmd.__main__ import main
from mpmd.planning.collectives import collectives_of
from mpmd.report.memory import executables_of
from scheduler import Call, Run

GROUPS, DEVICES, WIDTH, MICROBATCHES = 4, 4, 256, 6
WEIGHT, MOMENT = WIDTH * WIDTH * 2, WIDTH * WIDTH * 4  # bytes


def loss(weights, x):
    for w in weights[:-1]:
        x = mpmd.mark_stage_end(jax.nn.relu(x @ w))
    return jnp.mean((x @ weights[-1]).astype(jnp.float32) ** 2)


def updated(state, grads):
    weights, momenta = state
    momenta = [0.9 * m + g.astype(m.dtype) for m, g in zip(momenta, grads, strict=True)]
    return [w - (0.1 * m).astype(w.dtype) for w, m in zip(weights, momenta, strict=True)], momenta


def step(state, xs, schedule):
    """The gradients are summed over the devices of a group in each backward task."""
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(state[0], x), xs, schedule=schedule)
    return updated(state, grads), value


def step_that_sums_once(state, xs, schedule):
    once = jax.tree.map(lambda p: jax.reshard(p, P(reduced={"data"})), state[0])
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(once, x), xs, schedule=schedule)
    return updated(state, jax.tree.map(lambda g: jax.reshard(g, P()), grads)), value


def compiled_for(step, schedule):
    mesh = mpmd.topology_mesh("h100", (GROUPS, DEVICES), ("stage", "data"), "stage", devices_per_host=DEVICES)
    stages = GROUPS * (2 if schedule == "zb-v" else 1)
    rows = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    weights, momenta = ([jax.ShapeDtypeStruct((WIDTH, WIDTH), d)] * stages for d in (jnp.bfloat16, jnp.float32))
    xs = jax.ShapeDtypeStruct((MICROBATCHES, 32, WIDTH), jnp.bfloat16, sharding=rows)
    made = mpmd.jit(lambda state, xs: step(state, xs, schedule), mpmd_mesh=mesh, donate_argnums=0)
    return made.lower((weights, momenta), xs).compile()


@pytest.fixture(scope="module")
def in_tasks():
    return compiled_for(step, "1f1b")


@pytest.fixture(scope="module")
def once():
    return compiled_for(step_that_sums_once, "1f1b")


def collectives(compiled):
    """Of each segment and task that has any."""
    named = {**compiled._programs.segments}
    named.update((str(place), e) for place, e in compiled._programs.loops[0].executables.items())
    found = {name: collectives_of(e.call.as_text(), DEVICES) for name, e in named.items()}
    return {name: cs for name, cs in found.items() if cs}


@needs_plugin
def test_gradients_are_reduced_once_a_step_where_written_so(once, in_tasks):
    found = collectives(once)
    assert {name for name in found if not name.startswith("segment")} == {f"F{GROUPS - 1}"}  # the loss
    after = [cs for name, cs in found.items() if name.startswith("segment")]
    assert [[(c.kind, c.nbytes, c.num_devices) for c in cs] for cs in after] == (
        [[("all-reduce", WEIGHT, DEVICES)]] * GROUPS
    )
    assert {f"B{stage}" for stage in range(GROUPS)} < set(collectives(in_tasks))


@needs_plugin
def test_all_collectives_are_asynchronous(once, in_tasks):
    for compiled in (once, in_tasks):
        assert all(c.is_async for cs in collectives(compiled).values() for c in cs)


def aliases(text):
    """How many results of a program take the memory of an argument."""
    return len(re.findall(r"(?:may|must)-alias", text.partition("entry_computation_layout")[0]))


@needs_plugin
def test_accumulators_and_the_whole_state_are_updated_in_place(in_tasks):
    program = in_tasks.program
    for group in range(GROUPS):
        (update,) = [i for i in program.groups[group] if isinstance(i, Call) and i.name.startswith("segment")]
        assert sum("state" in v.name for v in update.donates) == 2  # its weight and its momentum
        assert aliases(executables_of(in_tasks._programs, update)[0].call.as_text()) >= 2
        assert aliases(in_tasks.as_text(stage=group, kind="B")) == 1


@needs_plugin
def test_bytes_are_those_that_a_person_counts(in_tasks):
    """Parameters, optimizer state and gradients exactly; temporaries as XLA reports them."""
    for group, memory in in_tasks.memory_analysis().items():
        last = group == GROUPS - 1
        assert memory["parameters"] == WEIGHT
        assert memory["state"] == MOMENT
        assert memory["gradients"] == WEIGHT + (4 if last else 0)  # and the loss
        assert memory["data"] == (MICROBATCHES * 32 * WIDTH * 2 // DEVICES if group == 0 else 0)
        instructions = [i for i in in_tasks.program.groups[group] if isinstance(i, (Run, Call))]
        executables = {e for i in instructions for e in executables_of(in_tasks._programs, i)}
        assert memory["temporaries"] == max(e.call.memory_analysis().temp_size_in_bytes for e in executables)


@needs_plugin
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_no_collective_can_wait_behind_a_transfer(schedule, in_tasks):
    """Each device does its work, its collectives and its transfers in order, also if two groups share it."""
    program = (in_tasks if schedule == "1f1b" else compiled_for(step, schedule)).program
    scheduler.check(program, streams=[[group] for group in range(GROUPS) for _ in range(DEVICES)])
    scheduler.check(program, streams=[range(GROUPS)])
    scheduler.check(program, streams=[[0, 3], [1, 2]])
    with pytest.raises(scheduler.ScheduleError, match="deadlock"):  # all of group 0, and then group 2
        alone = [(g, i) for g in (0, 2) for i in program.groups[g]]
        scheduler.check(program, streams=[alone, [1], [3]])


@needs_plugin
def test_stages_of_one_kind_are_one_program(in_tasks):
    executables = in_tasks._programs.loops[0].executables
    for kind in "FB":
        middle = {e.compiled for place, e in executables.items() if place.kind == kind and 0 < place.stage < GROUPS - 1}
        assert len(middle) == 1


# --- the command ----------------------------------------------------------------------------------

STEP = Path(__file__).with_name("steps_to_plan.py")
COMMAND = f"plan {STEP}:build --groups 2 --devices-per-group 4 --devices-per-host 4".split()


def planned(capsys, *options):
    status = main([*COMMAND, *options])
    return status, capsys.readouterr().out


@needs_plugin
def test_a_device_a_byte_too_small_is_named_and_one_of_the_exact_size_fits(capsys):
    _, text = planned(capsys, "--json", "--reserved-nbytes", "0")
    needs = {g["group"]: g["memory"]["peak"] for g in json.loads(text)["groups"]}
    group = max(needs, key=lambda g: needs[g])
    exact = ["--reserved-nbytes", "0", "--memory", repr(needs[group] / 1e9)]
    assert planned(capsys, *exact)[0] == 0
    less = ["--reserved-nbytes", "0", "--memory", repr((needs[group] - 1) / 1e9)]
    status, text = planned(capsys, *less)
    assert status == 3
    assert f"It does not fit: group {group} needs" in text
    assert f"({needs[group]:,} B)" in text
    assert "Estimates of what would help" in text


@needs_plugin
def test_measured_costs_replace_the_machines(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward": [1.0, 2.0], "input_grad": 1.0, "weight_grad": 1.5}')
    _, text = planned(capsys, "--json", "--costs", str(costs), "--microbatches", "4")
    found = json.loads(text)
    assert found["costs_are_measured"]
    assert [{n: t["seconds"] for n, t in g["tasks"].items()} for g in found["groups"]] == (
        [{"F0": 1.0, "B0": 2.5}, {"F1": 2.0, "B1": 2.5}]
    )
    simulated = scheduler.simulate(scheduler.OneFOneB(2), 4, scheduler.Costs((1.0, 2.0), 1.0, 1.5)).makespan
    assert found["step"]["seconds"] == pytest.approx(simulated, rel=1e-3)  # and the optimizer, and transfers


@needs_plugin
def test_costs_of_another_number_of_stages_are_refused(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward": [1.0, 2.0, 3.0]}')
    assert main([*COMMAND, "--costs", str(costs)]) == 2
    assert capsys.readouterr().err == (
        "python -m mpmd plan: Costs: forward has 3 entries and the schedule 2 stages;"
        " give one number or one for each stage.\n"
    )
