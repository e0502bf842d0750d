"""Programs that XLA compiled for GPUs that are not here: donation, collectives, their order, and what they hold."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plugins import needs_plugin

import mpmd
import scheduler
from mpmd.__main__ import main
from mpmd.costs.collectives import collectives_of
from mpmd.report.explain import sent_by
from mpmd.report.shares import Shares
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


def step(state, xs, schedule, operation=mpmd.Add):
    value, grads = mpmd.treduce(
        lambda x: jax.value_and_grad(loss)(state[0], x), xs, schedule=schedule, operation=operation
    )
    return updated(state, grads), value


def step_that_asks_for_one_sum(state, xs, schedule):
    once = jax.tree.map(lambda p: jax.reshard(p, P(reduced={"data"})), state[0])
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(once, x), xs, schedule=schedule)
    return updated(state, jax.tree.map(lambda g: jax.reshard(g, P()), grads)), value


def step_that_sums_in_tasks(state, xs, schedule):
    return step(state, xs, schedule, mpmd.Add(once=False))


def compiled_for(step, schedule):
    mesh = mpmd.topology_mesh("h100", (GROUPS, DEVICES), ("stage", "data"), "stage", devices_per_host=DEVICES)
    stages = GROUPS * (2 if schedule == "zb-v" else 1)
    rows = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    weights, momenta = ([jax.ShapeDtypeStruct((WIDTH, WIDTH), d)] * stages for d in (jnp.bfloat16, jnp.float32))
    xs = jax.ShapeDtypeStruct((MICROBATCHES, 32, WIDTH), jnp.bfloat16, sharding=rows)
    made = mpmd.jit(lambda state, xs: step(state, xs, schedule), mpmd_mesh=mesh, donate_argnums=0)
    return made.lower((weights, momenta), xs).compile()


@pytest.fixture(scope="module")
def compiled():
    return compiled_for(step, "1f1b")


@pytest.fixture(scope="module")
def asked():
    return compiled_for(step_that_asks_for_one_sum, "1f1b")


@pytest.fixture(scope="module")
def in_tasks():
    return compiled_for(step_that_sums_in_tasks, "1f1b")


def collectives(compiled):
    """Of all tasks, by name, and of each group around the loop: kinds, bytes and devices."""
    tasks = {
        str(place): collectives_of(e.call.as_text(), e.mesh.size)
        for place, e in compiled._programs.loops[0].executables.items()
    }
    around = [
        [
            c
            for i in instructions
            if isinstance(i, Call)
            for e in compiled._programs.executables_of(i)
            for c in collectives_of(e.call.as_text(), e.mesh.size)
        ]
        for instructions in compiled.program.groups
    ]
    if jax.__version_info__ < (0, 12):  # since then only where there is something to overlap with
        assert all(c.is_async for found in (*tasks.values(), *around) for c in found)
    return {name: shown(found) for name, found in tasks.items() if found}, list(map(shown, around))


def shown(found):
    return [(c.kind, c.nbytes, c.num_devices) for c in found]


@needs_plugin
@pytest.mark.parametrize("written", ["compiled", "asked"])
def test_gradients_are_reduced_once_a_step_asynchronously_and_nothing_is_gathered(written, request):
    """Written plainly, and where the step asks for it; in bfloat16, as the gradients are."""
    tasks, around = collectives(request.getfixturevalue(written))
    assert tasks == {}
    gradient = ("all-reduce", WEIGHT, DEVICES)
    assert [[c for c in found if c[1] > 4] for found in around] == [[gradient]] * GROUPS
    assert [c for found in around for c in found if c[1] <= 4] == [("all-reduce", 4, DEVICES)]  # the loss


@needs_plugin
def test_gradients_that_are_to_be_summed_in_tasks_are_not_summed_again(in_tasks):
    tasks, around = collectives(in_tasks)
    assert {name: found for name, found in tasks.items() if name[0] == "B"} == (
        {f"B{stage}": [("all-reduce", WEIGHT, DEVICES)] for stage in range(GROUPS)}
    )
    assert around == [[]] * GROUPS


@needs_plugin
def test_tensor_parallel_stages_sum_activations_and_gather_no_parameter():
    """Each stage's first weights are split by columns and its second ones by rows, over two devices of four."""
    mesh = mpmd.topology_mesh(
        "h100", (2, 2, 2), ("stage", "data", "model"), "stage", devices_per_host=4, axis_types=(AxisType.Auto,) * 3
    )

    def sharded(*spec):
        return NamedSharding(mesh.tracing_mesh(), P(*spec))

    def loss(weights, x):
        for stage, (up, down) in enumerate(weights):
            x = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up) @ down, sharded("data"))
            x = mpmd.mark_stage_end(x) if stage == 0 else x
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule="1f1b")
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    up, down = (
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=sharded(*spec))
        for spec in ((None, "model"), ("model", None))
    )
    xs = jax.ShapeDtypeStruct((4, 32, WIDTH), jnp.bfloat16, sharding=sharded(None, "data"))
    compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower([(up, down)] * 2, xs).compile()
    tasks, around = collectives(compiled)
    activation = ("all-reduce", 32 // 2 * WIDTH * 2, 2)
    assert tasks == {"F0": [activation], "F1": [activation], "B1": [activation]}
    assert [sum(nbytes for _, nbytes, _ in found if nbytes > 4) for found in around] == [WEIGHT // 2 * 2] * 2
    assert {(kind, devices) for found in around for kind, nbytes, devices in found if nbytes > 4} == {("all-reduce", 2)}
    assert [m["parameters"] for m in compiled.memory_analysis().values()] == [WEIGHT // 2 * 2] * 2


def in_place(text):
    """Types of the arguments of a program whose memory its results take."""
    head = text.partition("\n\n")[0]
    arguments = re.findall(r"\w+\[[\d,]*\]", head.partition("entry_computation_layout=")[2].partition(")->")[0])
    aliases = re.search(r"input_output_alias=\{(.*?alias\)) \}", head)
    return sorted(arguments[int(number)] for number in re.findall(r": \((\d+), ", aliases[1])) if aliases else []


@needs_plugin
def test_accumulators_and_the_whole_state_are_updated_in_place(compiled):
    program = compiled.program
    weight, part = (f"bf16[{rows}{WIDTH},{WIDTH}]" for rows in ("", "1,"))
    for group in range(GROUPS):
        calls = [i for i in program.groups[group] if isinstance(i, Call)]
        (update,) = [i for i in calls if any("state" in v.name for v in i.donates)]
        assert sum("state" in v.name for v in update.donates) == 2  # its weight and its momentum
        (executable,) = compiled._programs.executables_of(update)
        assert in_place(executable.call.as_text()) == [weight, f"f32[{WIDTH},{WIDTH}]"]
        assert in_place(compiled.as_text(stage=group, kind="B")) == [part]  # of its gradient
    assert in_place(compiled.as_text(stage=GROUPS - 1, kind="F")) == ["f32[1]"]  # of the loss


@needs_plugin
def test_products_and_what_is_sent_stay_in_bfloat16(compiled):
    for stage in range(GROUPS):
        for kind in "FB":
            text = compiled.as_text(stage=stage, kind=kind)
            products = re.findall(r"= (\w+)\[[\d,]*\]\S* (?:dot|custom-call)\((.*?)\), ", text)
            assert products and {dtype for dtype, _ in products} == {"bf16"}
            assert f"f32[{WIDTH},{WIDTH}]" not in text
            # No operand of a product was widened before it.
            wide = set(re.findall(r"(%[\w.-]+) = f32\[", text))
            assert not wide & {name for _, operands in products for name in operands.split(", ")}
    sizes = {
        nbytes for g in range(GROUPS) for found in sent_by(compiled.program, g, Shares()).values() for nbytes in found
    }
    assert sizes == {32 * WIDTH * 2, 4}  # and the loss


@needs_plugin
def test_bytes_are_those_that_a_person_counts(compiled):
    """Parameters, optimizer state and gradients exactly; temporaries as XLA reports them."""
    for group, memory in compiled.memory_analysis().items():
        last = group == GROUPS - 1
        assert memory["parameters"] == WEIGHT
        assert memory["state"] == MOMENT
        assert memory["gradients"] == WEIGHT + (8 if last else 0)  # and the loss, with this device's part of it
        assert memory["data"] == (MICROBATCHES * 32 * WIDTH * 2 // DEVICES if group == 0 else 0)
        instructions = [i for i in compiled.program.groups[group] if isinstance(i, (Run, Call))]
        executables = {e for i in instructions for e in compiled._programs.executables_of(i)}
        assert memory["temporaries"] == max(e.call.memory_analysis().temp_size_in_bytes for e in executables)


@needs_plugin
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_no_collective_can_wait_behind_a_transfer(schedule, compiled):
    """Each device does its work, its collectives and its transfers in order, also if two groups share it."""
    program = (compiled if schedule == "1f1b" else compiled_for(step, schedule)).program
    scheduler.check(program, streams=[[group] for group in range(GROUPS) for _ in range(DEVICES)])
    scheduler.check(program, streams=[range(GROUPS)])
    scheduler.check(program, streams=[[0, 3], [1, 2]])
    with pytest.raises(scheduler.ScheduleError, match="deadlock"):  # all of group 0, and then group 2
        alone = [(g, i) for g in (0, 2) for i in program.groups[g]]
        scheduler.check(program, streams=[alone, [1], [3]])


@needs_plugin
def test_stages_of_one_kind_are_one_program(compiled):
    executables = compiled._programs.loops[0].executables
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
    _, text = planned(capsys, "--json", "--memory-fraction", "1")
    needs = {g["group"]: g["memory"]["peak"] for g in json.loads(text)["groups"]}
    group = max(needs, key=lambda g: needs[g])
    exact = ["--memory-fraction", "1", "--memory", repr(needs[group] / 1e9)]
    assert planned(capsys, *exact)[0] == 0
    less = ["--memory-fraction", "1", "--memory", repr((needs[group] - 1) / 1e9)]
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
