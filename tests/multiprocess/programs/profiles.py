"""Profiles a pipeline of one stage a process, and compares clocks that are wrong on purpose. Prints both."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import mpmd
import scheduler
from mpmd.job import clocks, joining

MICROBATCHES, STEPS, WRONG_S = 4, 2, 5.0


def main():
    mpmd.initialize()
    rank, count = jax.process_index(), jax.process_count()
    mesh = mpmd.MpmdMesh.from_groups([Mesh(np.array([d]), ("data",)) for d in jax.devices()])

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(weights, xs):
        def loss(weights, x):
            for stage, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                x = mpmd.mark_stage_end(x) if stage < count - 1 else x
            return jnp.mean(x**2)

        schedule = scheduler.OneFOneB(count)
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=schedule)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    weights, xs = [np.eye(8, dtype=np.float32)] * count, np.ones((MICROBATCHES, 4, 8), np.float32)
    compiled = step.lower(weights, xs).compile()
    num_programs = repr(compiled)
    profile = compiled.profile((weights, xs), steps=STEPS)
    job = joining.current()
    found = clocks.offset(job, range(count), lambda: time.perf_counter() + rank * WRONG_S, f"kernel {rank}")
    print(
        json.dumps(
            {
                "text": str(profile),
                "trace": profile.to_chrome_trace(),
                "tasks": [[str(t) for r in runs for t in r.tasks] for runs in profile.typical.by_group],
                "ranks": [sorted({r.rank for r in runs}) for runs in profile.typical.by_group],
                "moves": [[*m.way, m.start, m.end, profile.typical.sent[m.way]] for m in profile.typical.moves],
                "ends": {str(t): [r.start, r.end] for r in profile.typical.runs for t in r.tasks},
                "clock_error_s": profile.clock_error_s,
                "offset": list(found),
                "loss": float(profile.result[1]),
                "programs": [num_programs, repr(compiled)],
            }
        )
    )


if __name__ == "__main__":
    main()
