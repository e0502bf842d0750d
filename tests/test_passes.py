"""The passes of the partition one by one, each on a jaxpr of a few lines."""

import dataclasses

import jax
import jax.numpy as jnp

import mpmd
import scheduler


def test_a_schedule_computes_its_orders_once_for_a_step_and_its_report():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counted(scheduler.GPipe):
        def orders(self, num_microbatches):
            calls.append(num_microbatches)
            return super().orders(num_microbatches)

    def step(w, xs):
        return mpmd.treduce(lambda x: jnp.sum(mpmd.mark_stage_end(x @ w) @ w), xs, schedule=Counted(2))

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(jnp.eye(3), jnp.ones((4, 2, 3))).compile()
    assert "Counted" in compiled.explain() and calls == [4]
    assert float(compiled(jnp.eye(3), jnp.ones((4, 2, 3)))) == 24 and calls == [4]
