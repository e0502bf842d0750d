"""What the watchdog knows of a step that is checked for NaNs, timed, or fails on the way."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mpmd
import scheduler
from mpmd.job.activity import Activity

NUM_GROUPS, MICROBATCHES = 2, 3


class Alone:
    """A job of one process, without a watchdog."""

    rank, num_ranks, epoch = 0, 1, 0
    as_a_whole = contextlib.nullcontext

    def __init__(self):
        self.activity = Activity(0)

        self.calls = SimpleNamespace(note=lambda *call: None, settle=lambda ranks=None: None, check=lambda: None)

    def exchange(self, what, text, ranks, about="", call=None):
        return {0: text}

    def new_number(self, ranks, what, about="", call=None, *, is_brief=False):
        return 1


def compiled_step(on_host):
    """A step whose first stage calls `on_host` for each microbatch, as a process of a job runs it; the job."""
    mesh = mpmd.MpmdMesh.from_groups([Mesh(np.array([d]), ("data",)) for d in jax.devices()[:NUM_GROUPS]])

    def loss(x):
        x = jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")
        return jnp.sum(mpmd.mark_stage_end(x) ** 2)

    @mpmd.jit(mpmd_mesh=mesh)
    def step(xs):
        return mpmd.treduce(loss, xs, schedule=scheduler.GPipe(NUM_GROUPS))

    compiled = step.lower(jnp.ones((MICROBATCHES, 2))).compile()
    job: Any = Alone()
    compiled._executor.job, compiled._executor._activity = job, job.activity
    return compiled, job


@pytest.fixture
def debug_nans():
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def test_the_watchdog_knows_the_instruction_of_a_step_that_is_checked_for_nans(debug_nans):
    boards = []

    def on_host(x):
        boards.append(job.activity.board())
        return x

    compiled, job = compiled_step(on_host)
    jax.block_until_ready(compiled(jnp.ones((MICROBATCHES, 2)))._arrays)
    assert [(b.phase, b.step, b.doing) for b in boards] == [
        ("step", 1, f"0F{m} in group 0") for m in range(MICROBATCHES)
    ]
    assert job.activity.board().phase == "idle"


@pytest.mark.parametrize("timing", [False, True], ids=["plain", "timed"])
def test_a_step_that_raises_is_left(timing, debug_nans):
    compiled, job = compiled_step(lambda x: np.full_like(x, np.nan))
    compiled.timing = timing
    with pytest.raises(FloatingPointError, match="invalid value") as raised:
        compiled(jnp.ones((MICROBATCHES, 2)))
    assert raised.value.__notes__[0] == "jax-mpmd: while it ran 0F0 in group 0"
    assert job.activity.board().phase == "idle"


def test_a_timed_step_frees_what_an_untimed_one_frees():
    compiled, _ = compiled_step(lambda x: x)
    collect, filled = compiled._executor._collect, []

    def collected(slots):
        filled.append([x is not None for x in slots])
        return collect(slots)

    compiled._executor._collect = collected
    for timing in (False, True):
        compiled.timing = timing
        assert float(compiled(jnp.ones((MICROBATCHES, 2)))) == 2.0 * MICROBATCHES
    plain, timed = filled
    assert timed == plain and not all(timed)
    assert len(compiled.last_timeline().orders[0]) == MICROBATCHES
