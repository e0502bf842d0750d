"""examples/moe: equal to the same step without a pipeline, in one process and in four; saved, resumed, exported."""

import dataclasses
import functools
import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.parts import normal

import mpmd
import reshard

ROOT = Path(__file__).parents[2]
MODULES = ("train", "model", "parallel", "experts", "router")
SMALL = {"width": 32, "hidden": 16, "experts": 4, "dtype": jnp.float32}
ROWS, LENGTH = 8, 16  # of a microbatch

KEPT = optax.GradientTransformation(  # the state that it leaves behind is the gradient
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)


@pytest.fixture(scope="module")
def example():
    """The modules of the example, which lie beside each other and not in a package."""
    folder = str(ROOT / "examples" / "moe")
    sys.path.insert(0, folder)
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(folder)
        for name in MODULES:
            sys.modules.pop(name, None)


def tokens(num_microbatches: int, seed: int = 0) -> np.ndarray:
    shape = num_microbatches, ROWS, LENGTH + 1
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


def compiled_step(example, config, optimizer, mesh, schedule, num_microbatches):
    """The step, compiled; a function that makes its first state."""
    group, first = mesh.tracing_mesh(), example.train.make_init(config, optimizer)
    like = example.parallel.typed(group, jax.eval_shape(first, jax.random.key(0)), host="optimizer")
    rows = jax.ShapeDtypeStruct(
        (num_microbatches, ROWS, LENGTH + 1), jnp.int32, sharding=NamedSharding(group, P(None, *example.experts.ROWS))
    )
    step = example.train.make_step(config, optimizer, schedule, offload=True)
    compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower(like, rows).compile()
    return compiled, like, mpmd.jit(first, mpmd_mesh=mesh, out_shardings=compiled.input_shardings[0][0])


def without_a_pipeline(example, config, optimizer, data, expert, axis_type, batches):
    """The states and metrics of the same step under `jax.jit`, on the devices of one group."""
    axes = ("data", "expert")
    mesh = jax.make_mesh((data, expert), axes, (axis_type,) * 2, devices=jax.devices()[: data * expert])
    first, found = example.train.make_init(config, optimizer), []
    layout = jax.tree.map(lambda x: x.sharding, example.parallel.typed(mesh, jax.eval_shape(first, jax.random.key(0))))
    with jax.set_mesh(mesh):
        state = jax.device_put(jax.jit(first)(jax.random.key(0)), layout)
        step = jax.jit(example.train.make_step(config, optimizer, None, offload=False))
        for rows in batches:
            state, metrics = step(state, jax.device_put(rows, NamedSharding(mesh, P(None, *example.experts.ROWS))))
            found.append(jax.tree.map(np.asarray, (state, metrics)))
    return found


def assert_alike(found, expected):
    """Losses and gradients within 1e-5 of the largest element; what routers counted, bitwise."""
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        if any(word in name for word in ("tokens_per_expert", "entropy", "busiest", "dropped")):
            np.testing.assert_array_equal(x, y, name)
        else:
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(np.abs(y).max(), 1e-30), err_msg=name)


def assert_equal_to_the_step_without_a_pipeline(
    example, groups, data, expert, schedule, axis_type=AxisType.Explicit, num_microbatches=4, **options
):
    config = dataclasses.replace(example.model.Config(**SMALL | {"layers": groups}), **options)
    mesh = example.parallel.make_mesh(groups, data, expert, axis_type)
    compiled, _, make = compiled_step(example, config, KEPT, mesh, schedule, num_microbatches)
    batches = [tokens(num_microbatches, seed) for seed in (0, 1)]
    expected = without_a_pipeline(example, config, KEPT, data, expert, axis_type, batches)
    state, work = make(jax.random.key(0)), []
    for number, (rows, wanted) in enumerate(zip(batches, expected, strict=True)):
        if number == 1:  # the second call traces and compiles nothing
            jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: work.append(event))
        state, metrics = compiled(state, rows)
        assert not [event for event in work if "compile" in event or "trace" in event]
        assert_alike(mpmd.device_get((state, metrics)), wanted)
    assert {x.mpmd_sharding.memory_kind for x in jax.tree.leaves(state["optimizer"])} == {"pinned_host"}
    return compiled


@pytest.mark.slow
def test_stages_of_experts_equal_the_step_without_a_pipeline(example):
    """And what crosses is activations: no constant of a dispatch, no loss of a router, no parameter."""
    said = assert_equal_to_the_step_without_a_pipeline(example, 2, 1, 2, "1f1b", shared=8).explain()
    crossing = re.search(r"of each microbatch .* cross forward in (\d+) values?, .* backward in (\d+)", said)
    assert crossing and crossing.groups() == ("1", "1"), said
    once = said.partition("outside of the loops ")[2].partition(":")[0]
    assert re.match(r"\d+ B cross", once), once
    assert "needs all layers" not in said and "warning" not in said


LAYOUTS = [
    (2, 1, 4, "1f1b", {"k": 1, "capacity": 0.5}),  # one expert a device; many tokens are dropped
    (2, 1, 2, "zb-h1", {"exchange": "gather", "remat": "names", "k": 1, "axis_type": AxisType.Auto}),
    (4, 1, 2, "zb-h1", {"exchange": "gather", "remat": "names", "k": 1}),
    (4, 1, 2, "dualpipe-v", {"layers": 8, "num_microbatches": 8, "remat": "none", "shared": 8}),
    (2, 2, 2, "zb-v", {"layers": 4, "axis_type": AxisType.Auto, "exchange": "gather"}),
    (4, 1, 2, "1f1b", {}),
    (2, 1, 2, "interleaved-1f1b", {"layers": 4, "remat": "names"}),
    (2, 2, 1, "1f1b", {"experts": 6, "layers": 3}),  # no device shares its experts; stages of 2 and 1 layers
    (2, 1, 2, "1f1b", {"dtype": jnp.bfloat16}),  # routers compute in float32
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("groups", "data", "expert", "schedule", "options"), LAYOUTS)
def test_any_layout_schedule_and_exchange_equal_the_step_without_a_pipeline(
    example, groups, data, expert, schedule, options
):
    assert_equal_to_the_step_without_a_pipeline(example, groups, data, expert, schedule, **options)


# --- the exchanges --------------------------------------------------------------------------------


def dense(experts, x, weights, chosen):
    """Every expert on every row; those that a row did not choose count nothing."""
    h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, experts["gate"])) * jnp.einsum("btd,edf->btef", x, experts["up"])
    y = jnp.einsum("btef,efd->bted", h, experts["down"])
    used = (jax.nn.one_hot(chosen, len(experts["gate"])) * weights[..., None]).sum(2)
    return jnp.einsum("bted,bte->btd", y, used)


def emulated_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` by `all_gather`: XLA has none for CPUs."""
    me = jax.lax.axis_index(axis_name)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    for rows, starts, sizes, places in zip(
        *(list(gather(x)) for x in (operand, input_offsets, send_sizes, output_offsets)), strict=True
    ):
        at = jnp.arange(len(rows)) - starts[me]
        place = jnp.where((at >= 0) & (at < sizes[me]), places[me] + at, len(output))
        output = output.at[place].set(rows, mode="drop")
    return output


@pytest.mark.parametrize(
    ("exchange", "experts", "k"),
    [
        pytest.param("capacity", 8, 2, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=mark)
            for case, mark in [
                (("gather", 6, 3), pytest.mark.exhaustive),
                (("ragged", 8, 2), pytest.mark.slow),
                (("ragged", 4, 1), pytest.mark.exhaustive),
                (("ragged", 6, 3), pytest.mark.exhaustive),
            ]
        ),
    ],
)
def test_an_exchange_gives_what_all_experts_on_all_rows_give(example, monkeypatch, exchange, experts, k):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    keys = jax.random.split(jax.random.key(experts), 5)
    shapes = {"gate": (experts, 8, 16), "up": (experts, 8, 16), "down": (experts, 16, 8)}
    params = {n: normal(key, *s) / 3 for key, (n, s) in zip(keys, shapes.items(), strict=False)}
    x, router = normal(keys[3], 8, 5, 8), normal(keys[4], 8, experts)

    def loss(params, x, run):
        routing = example.router.route(router, x, k)
        y = run(params, x, routing.weights, routing.chosen)
        return (y**2).sum() + (y * x).sum()

    def exchanged(params, x, weights, chosen):
        y, dropped = example.experts.run_experts(params, x, weights, chosen, exchange, capacity=float(experts))
        return y + 0 * dropped

    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Auto,) * 2)):
        found = jax.jit(jax.value_and_grad(functools.partial(loss, run=exchanged), argnums=(0, 1)))(params, x)
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, run=dense), argnums=(0, 1)))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def test_an_expert_without_room_drops_the_last_rows_and_counts_them(example):
    x, weights = jnp.ones((4, 4, 8)), jnp.ones((4, 4, 1))
    chosen = jnp.zeros((4, 4, 1), jnp.int32)  # all rows want the first of four experts
    params = {"gate": jnp.ones((4, 8, 8)), "up": jnp.ones((4, 8, 8)), "down": jnp.ones((4, 8, 8))}
    with jax.set_mesh(jax.make_mesh((1, 4), ("data", "expert"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])):
        run = functools.partial(example.experts.run_experts, exchange="capacity", capacity=1.0)
        y, dropped = jax.jit(run)(params, x, weights, chosen)
    assert int(dropped) == 4 * 3  # each device has four rows, and room for one
    np.testing.assert_array_equal(np.abs(y).max(-1) > 0, [[True, False, False, False]] * 4)


def test_the_ragged_exchange_is_one_collective_each_way_on_gpus(example):
    params = {name: jnp.ones((4, 8, 8)) for name in ("gate", "up", "down")}
    x, weights, chosen = jnp.ones((4, 4, 8)), jnp.ones((4, 4, 2)), jnp.zeros((4, 4, 2), jnp.int32)
    run = functools.partial(example.experts.run_experts, exchange="ragged", capacity=1.0)
    with jax.set_mesh(jax.make_mesh((1, 4), ("data", "expert"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])):
        step = jax.jit(jax.value_and_grad(lambda p, x: run(p, x, weights, chosen)[0].sum(), argnums=(0, 1)))
        known = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
        text = jax.export.export(step, platforms=["cuda"], disabled_checks=[known])(params, x).mlir_module()
    assert text.count("@ragged_all_to_all") == 2 + 2  # forward and backward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--save-every 0", "--save-every 0: give a number of at least 1"),
        ("--k 0", "--k 0: give a number of at least 1"),
        ("--width 20", "--width 20 is not a multiple of 16"),
        ("--seed -1", "--seed -1: give a number of at least 0"),
        ("--resume", "--resume needs --checkpoint-dir, the folder to go on from"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(example, capsys, options, message):
    with pytest.raises(SystemExit):
        example.train.parse(options.split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": error: {message}")


def test_statistics_of_routers_are_shares(example):
    said = example.router.statistics(jnp.array([[4, 4, 0, 0], [2, 2, 2, 2]]), jnp.array([2, 0]))
    np.testing.assert_allclose(said["entropy"], [0.5, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(said["busiest"], [2.0, 1.0])
    np.testing.assert_array_equal(said["dropped"], [0.25, 0.0])


# --- a run ----------------------------------------------------------------------------------------

RUN = "--layers 2 --width 32 --hidden 16 --experts 4 --length 16 --batch 32 --microbatches 4 --lr 0.01 --float32"
RUN += " --steps 4"


@pytest.mark.slow
def test_a_state_goes_on_bitwise_in_other_groups_and_on_one_device_and_as_a_folder(example, tmp_path):
    """Muon's momentum comes from the host's memory and goes back there; no number depends on the layout."""
    config = example.model.Config(**SMALL, layers=2)
    optimizer = example.train.make_optimizer(1e-2, 4)
    compiled, _, make = compiled_step(
        example, config, optimizer, example.parallel.make_mesh(2, 1, 2), "zb-h1", num_microbatches=4
    )
    state, _ = compiled(make(jax.random.key(0)), tokens(4))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    saved = mpmd.device_get(state)

    other, like, _ = compiled_step(
        example, config, optimizer, example.parallel.make_mesh(1, 1, 4), "1f1b", num_microbatches=4
    )
    layout = other.input_shardings[0][0]
    state = reshard.restore(tmp_path / "state", like, layout)
    assert jax.tree.map(lambda x: x.mpmd_sharding, state) == layout
    jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(state), saved)
    state, metrics = other(state, tokens(4, 1))
    expected = without_a_pipeline(example, config, optimizer, 1, 4, AxisType.Explicit, [tokens(4), tokens(4, 1)])
    np.testing.assert_allclose(float(metrics["loss"]), expected[1][1]["loss"], rtol=2e-3)  # Muon magnifies rounding

    alone = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    with ocp.StandardCheckpointer() as checkpointer:
        whole = checkpointer.restore(tmp_path / "state", jax.tree.map(_on_one_device, alone))
    jax.tree.map(np.testing.assert_array_equal, whole, saved)

    params = reshard.restore(tmp_path / "state", alone, partial=True)["params"]
    example.train.export(config, params, str(tmp_path / "folder"))
    back = reshard.restore(tmp_path / "folder", alone["params"], mapping="auto")
    jax.tree.map(np.testing.assert_array_equal, back, params)
    said = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert said["model_type"] == "mixtral" and said["num_local_experts"] == 4


def _on_one_device(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.exhaustive
def test_two_processes_have_the_losses_of_one_and_go_on_in_one(tmp_path):
    def losses(processes: int, devices: int, options: str) -> dict[int, str]:
        done = subprocess.run(
            [ROOT / "scripts/launch_multihost.sh", "-n", str(processes), "--cpu-devices", str(devices), "--",
             sys.executable, ROOT / "examples/moe/train.py", *RUN.split(), *options.split()],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            cwd=tmp_path, text=True, capture_output=True, check=False, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return {int(n): loss for n, loss in re.findall(r"step (\d+)/\d+  loss (\S+)", done.stderr)}

    two = losses(2, 2, "--groups 2 --expert 2 --checkpoint-dir run --save-every 2")
    assert sorted(two) == [1, 2, 3, 4]
    (tmp_path / "run" / "4").rename(tmp_path / "later")  # as if the job had ended after step 2
    rest = losses(1, 4, "--groups 2 --expert 2 --checkpoint-dir run --resume")
    assert rest == {step: two[step] for step in (3, 4)}
