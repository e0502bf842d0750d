"""A model that scans over its layers against the same model with a Python loop over them: first call, step, memory.

    python benchmarks/scanned_layers.py [--layers 32] [--width 256] [--rows 256] [--steps 10]

Both train with AdamW and clipping by the global norm over 4 groups of one device, with the same cuts. Steps of the
two take turns. Checks that each group holds only its share of the layers' bytes (parameters, moments), and that both
compute the same loss. Prints the ratios with their targets, and the cost of the scan itself: the gradient of one
stage's layers under plain `jax.jit`, scanned against a loop. (XLA's CPU programs run a `while` loop slower than its
unrolled body.) The exit status says whether the ratios of processor time reach their targets: other work on the
machine disturbs processor time less.
"""

import argparse
import functools
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
import scheduler

GROUPS = 4
TARGET = 1.1


def layer(h, p):
    """Applies a residual block."""
    x = h * p["norm"] / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)
    return mpmd.mark_layer_end(h + jnp.tanh(x @ p["up"]) @ p["down"])


def loss(params, x, *, scanned):
    """Returns the mean square of the head's outputs."""
    h = jnp.tanh(x @ params["embedding"])
    if scanned:
        h, _ = lax.scan(lambda h, p: (layer(h, p), None), h, params["layers"])
    else:
        for p in params["layers"]:
            h = layer(h, p)
    return jnp.mean((h @ params["head"]) ** 2)


def initial(num_layers, width, scanned):
    """Makes parameters, with layers stacked or as a list."""
    up, down, embedding, head = jax.random.split(jax.random.key(0), 4)

    def normal(key, *shape):
        return jax.random.normal(key, shape) / width**0.5

    layers = {
        "norm": jnp.ones((num_layers, width)),
        "up": normal(up, num_layers, width, 2 * width),
        "down": normal(down, num_layers, 2 * width, width),
    }
    if not scanned:
        layers = [jax.tree.map(lambda x: x[i], layers) for i in range(num_layers)]  # noqa: B023
    return {"embedding": normal(embedding, width, width), "layers": layers, "head": normal(head, width, width)}


class Run:
    """One of the two models in training."""

    def __init__(self, num_layers, width, rows, scanned):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        params = initial(num_layers, width, scanned)
        self.state = params, optimizer.init(params)
        self.xs = jax.random.normal(jax.random.key(1), (8, rows, width))
        cuts = (num_layers // GROUPS,) * GROUPS
        one = functools.partial(loss, scanned=scanned)

        def step(state, xs):
            params, moments = state
            value, grads = mpmd.treduce(
                lambda x: jax.value_and_grad(one)(params, x), xs, schedule=scheduler.OneFOneB(GROUPS), cuts=cuts
            )
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        devices = jax.devices()[:GROUPS]
        mesh = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=[d]) for d in devices])
        self.jitted = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)

    def step(self):
        """Takes one step. Returns its seconds, by the clock and of the processor."""
        start = time.perf_counter(), time.process_time()
        self.state, self.loss = self.jitted(self.state, self.xs)
        jax.block_until_ready(jax.tree.leaves(self.state))
        return time.perf_counter() - start[0], time.process_time() - start[1]


def check_memory(run, width):
    """Checks that groups hold their shares of stacked arrays, and embedding or head with moments. Returns bytes."""
    stacks = [x for x in jax.tree.leaves(run.state) if x.pieces]
    layers = sum(x.nbytes for x in stacks)
    ends = 3 * 4 * width * width  # embedding or head, with two moments
    held = {d: sum(x.nbytes for x in jax.live_arrays() if x.devices() == {d}) for d in jax.devices()[:GROUPS]}
    analysis = run.jitted.lower(run.state, run.xs).compile().memory_analysis()
    for g, d in enumerate(jax.devices()[:GROUPS]):
        assert held[d] <= layers / GROUPS + ends + 2 * run.xs.nbytes + 4096, (g, held[d], layers)
        assert analysis[g]["parameters"] + analysis[g]["state"] <= layers / GROUPS + ends + 4096, (g, analysis[g])
        assert analysis[g]["gradients"] <= 2 * (layers + 3 * ends) / 3 / GROUPS + ends, (g, analysis[g])
    return layers, held


def plain_ratio(num_layers, width, rows, steps):
    """Returns how much longer the gradient of some layers takes if they are scanned, under plain `jax.jit`."""
    x, runs = jax.random.normal(jax.random.key(1), (rows, width)), {}
    for scanned in (True, False):
        gradient = jax.jit(jax.value_and_grad(functools.partial(loss, scanned=scanned)))
        params = initial(num_layers, width, scanned)
        jax.block_until_ready(gradient(params, x))
        runs[scanned] = gradient, params, []
    for _ in range(steps):
        for gradient, params, seconds in runs.values():
            start = time.perf_counter()
            jax.block_until_ready(gradient(params, x))
            seconds.append(time.perf_counter() - start)
    return statistics.median(runs[True][2]) / statistics.median(runs[False][2])


def main():
    """Measures and prints. Returns 1 if a ratio of processor time is above its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32, help="a multiple of 4 (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of a layer (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="of a microbatch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps (default: %(default)s)")
    args = parser.parse_args()
    first, losses = {}, {}
    for scanned in (True, False):
        run = Run(args.layers, args.width, args.rows, scanned)
        first[scanned], losses[scanned] = run.step(), float(run.loss)
        if scanned:
            layers, held = check_memory(run, args.width)
            shown = ", ".join(f"{n / 1e6:.1f}" for n in held.values())
            print(f"stacked arrays {layers / 1e6:.1f} MB; live in each group: {shown} MB")
            one = run
    assert abs(losses[True] - losses[False]) <= 1e-5 * abs(losses[False]), losses
    times = {True: [], False: []}
    for _ in range(args.steps):
        times[True].append(one.step())
        times[False].append(run.step())
    plain = plain_ratio(args.layers // GROUPS, args.width, args.rows, 5 * args.steps)
    print(f"plain jax.jit: a stage's gradient takes {plain:.2f} times as long scanned")
    failed = 0
    steps = {which: [statistics.median(part) for part in zip(*found, strict=True)] for which, found in times.items()}
    for what, seconds in {"first call": first, "step": steps}.items():
        for clock, mine, loop in zip(("by the clock", "processor"), seconds[True], seconds[False], strict=True):
            print(f"{what:10} {clock:12} scanned {mine:.3f} s, loop {loop:.3f} s: {mine / loop:.2f} (target {TARGET})")
        failed |= seconds[True][1] / seconds[False][1] > TARGET
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
