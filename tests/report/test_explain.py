"""`explain()` is the page to read before a big run: what it says of a loop, whole."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler
from mpmd.costs.machine import Machine

STAGES, MICROBATCHES, ROWS, WIDTH = 3, 3, 4, 16


@jax.checkpoint
def block(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def loss(params, tokens):
    mask = (tokens != 0)[:, None]
    x = first = params["embed"][tokens]
    for stage, w in enumerate(params["blocks"]):
        for _ in range(3 if stage == 1 else 1):
            x = block(w, x) * mask
        x = mpmd.mark_stage_end(x) if stage < STAGES - 1 else x
    return jnp.mean((x + first) @ params["embed"].T)


def step(params, tokens):
    value, grads = mpmd.treduce(
        lambda t: jax.value_and_grad(loss)(params, t), tokens, schedule=scheduler.OneFOneB(STAGES)
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def text():
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:STAGES]), ("stage",)), "stage")
    blocks = [{"a": np.ones((WIDTH, 2 * WIDTH), np.float32), "b": np.ones((2 * WIDTH, WIDTH), np.float32)}] * STAGES
    params = {"embed": np.ones((7, WIDTH), np.float32), "blocks": blocks}
    return mpmd.jit(step, mpmd_mesh=mesh).lower(params, np.ones((MICROBATCHES, ROWS), np.int32)).compile().explain()


def test_a_slow_stage_and_a_large_bubble_are_warnings_with_what_to_do(text):
    assert "stage 1 1.78 times the mean; with equal stages the loop would take 18% less time" in text
    assert (
        "warning: stage 1 holds the other stages up.\n"
        "  Put mark_layer_end after each layer, and the library chooses where stages end; or move marks;"
        " python -m mpmd tune compares cuts (docs/stages.md).\n"
        "warning: groups idle 40% of loop 0 even with equal tasks, for it has 3 microbatches for 3 stages.\n"
        "  More microbatches (smaller ones), or another schedule, make that less (docs/schedules.md).\n"
    ) in text


def test_what_crosses_in_a_loop_is_told_with_the_lines_that_make_and_read_it(text):
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  of each microbatch"))
    assert lines[start] == ("  of each microbatch 768 B cross forward in 3 values, 512 B of gradients backward in 2:")
    layer, skip = lines[start + 1 : start + 3]
    assert layer.startswith("    f32[4,16] (256 B) from stage 0 to 1, 1 to 2: mul makes it at ") and "(loss)" in layer
    assert skip.startswith("    f32[4,16] (256 B) from stage 0 to 2: gather makes it at ") and "add reads it at" in skip
    assert "test_explain.py:31" in skip


def test_work_that_is_done_twice_and_sums_over_groups_are_named(text):
    assert "  computed in several stages (0, 1, 2): 2 cheap equations on the microbatch, such as " in text
    assert "  computed again by the backward pass (jax.checkpoint): 50% of the forward pass" in text
    assert "  the gradient of params['embed'] (448 B) arises in groups 0, 2: its parts are summed once a step" in text


def test_a_line_of_an_installed_library_is_told_with_the_line_that_calls_it():
    library: dict = {}
    exec(compile("def apply(w, x):\n    return x @ w\n", "/env/site-packages/library/layers.py", "exec"), library)
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")

    def model(w, x):
        return mpmd.mark_stage_end(library["apply"](w[0], x)) @ w[1]

    weights = [np.ones((8, 8), np.float32)] * 2
    shardings = [mpmd.MpmdSharding(mesh, g, jax.sharding.PartitionSpec()) for g in (0, 1)]
    placed = mpmd.jit(lambda: weights, mpmd_mesh=mesh, out_shardings=shardings)()
    x = mpmd.jit(lambda: jnp.ones((64, 8)), mpmd_mesh=mesh, out_shardings=shardings[1])()
    text = mpmd.jit(model, mpmd_mesh=mesh).lower(placed, x).compile().explain()
    assert "dot_general reads it, at /env/site-packages/library/layers.py:2" in text
    assert "(apply), called from " + __file__ in text


def test_a_backward_that_is_whole_for_some_microbatches_and_in_halves_for_others_counts_once():
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")

    def model(ws, x):
        for w in ws[:-1]:
            x = mpmd.mark_stage_end(jnp.tanh(x @ w))
        return jnp.sum(jnp.square(x @ ws[-1]))

    def flops(schedule):
        step = mpmd.jit(
            lambda ws, xs: mpmd.treduce(lambda x: jax.grad(model)(ws, x), xs, schedule=schedule), mpmd_mesh=mesh
        )
        lowered = step.lower([np.ones((64, 64), np.float32)] * 4, np.ones((4, 8, 64), np.float32))
        (found,) = re.findall(r"balance, by operations \(([\d.]+) MFLOP a stage", lowered.compile().explain())
        return float(found), lowered.costs().duration("B", 0)  # the first stage has no first half

    assert flops(scheduler.DualPipeV(2)) == pytest.approx(flops(scheduler.InterleavedOneFOneB(4, 2)), rel=0.05)


@jax.custom_vjp
def _in_one_loop(w, x):
    return x + jnp.tanh(x @ w)


def _backward_in_one_loop(saved, g):  # both gradients from one `while`, as from a kernel that gives both
    (w, x), y = saved
    d = g * (1 - jnp.square(y - x))

    def add(row, sums):
        rows = jnp.where(jnp.arange(len(x)) == row, 1.0, 0.0)[:, None] * d
        return sums[0] + x.T @ rows, sums[1] + rows @ w.T

    return jax.lax.fori_loop(0, (jnp.abs(x[0, 0]) < 1e9) * len(x), add, (jnp.zeros_like(w), g))


_in_one_loop.defvjp(lambda w, x: (y := _in_one_loop(w, x), ((w, x), y)), _backward_in_one_loop)


def _plain(w, x):
    return x + jnp.tanh(x @ w)


@pytest.mark.parametrize("layer", [_in_one_loop, _plain, jax.checkpoint(_plain)], ids=["loop", "plain", "checkpoint"])
def test_an_equation_that_gives_all_gradients_of_a_stage_at_once_and_cannot_be_divided_is_a_warning(layer):
    def loss(ws, x):
        return jnp.sum(layer(ws[1], mpmd.mark_stage_end(layer(ws[0], x))) ** 2)

    def gradients(ws, xs):
        return mpmd.treduce(lambda x: jax.grad(loss)(ws, x), xs, schedule=scheduler.ZeroBubbleH1(2))

    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    args = [np.ones((8, 8), np.float32)] * 2, np.ones((2, 8, 8), np.float32)
    lowered = mpmd.jit(gradients, mpmd_mesh=mesh).lower(*args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = lowered.compile().explain()
    line = f"{__file__}:{loss.__code__.co_firstlineno + 1}:23 ({loss.__qualname__})"
    warning = (
        "the weight half (W) of the backward of stage 1 is empty: all of it is in the first half (I).\n"
        f"  while gives several gradients at once at {line}, and cannot be divided."
        " The schedule gains nothing over one without W\n"
        "  (1F1B, interleaved). Compute the gradients of weights by an operation of their own, or take such a schedule."
    )
    found = [str(w.message) for w in caught if "weight half" in str(w.message)]
    assert found == ([f"gradients: {warning}"] if layer is _in_one_loop else [])
    assert (f"warning: {warning}\n" in text) == (layer is _in_one_loop), text
    assert ("is empty" in text) == (layer is _in_one_loop)


def test_groups_that_share_a_device_share_its_memory(monkeypatch):
    machine = Machine(dataclasses.replace(mpmd.Target.named("h100"), memory_nbytes=400_000), memory_fraction=1.0)
    monkeypatch.setattr("mpmd.compiled.machine_of", lambda mesh: machine)

    def lines(devices):
        mesh = mpmd.MpmdMesh.from_groups([jax.sharding.Mesh(np.array([d]), ("x",)) for d in devices])
        square = mpmd.jit(lambda ws, x: x @ ws[0] @ ws[1], mpmd_mesh=mesh)
        compiled = square.lower([np.ones((128, 128), np.float32)] * 2, np.ones((128, 128), np.float32)).compile()
        return [x for x in compiled.explain().splitlines() if x.startswith(("memory: ", "warning: it does not fit"))]

    assert lines(jax.devices()[:2]) == [
        "memory: group 0 needs most, 328 KB of the 400 KB that it may use on each device (82%)"
    ]
    assert lines(jax.devices()[:1] * 2) == [
        "memory: group 0 needs most, 328 KB of the 200 KB that it may use on each device (164%)",
        "warning: it does not fit: group 0 needs more than a device has for a group.",
    ]
