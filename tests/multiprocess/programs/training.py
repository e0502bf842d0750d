"""One training step with everything in it, in many layouts: what it gives must not depend on the processes.

    training.py CASE…        prints, as JSON, per case the bits of losses and metrics, and a hash of the final state;
                             `timed:CASE` measures its steps on the way

Tied weights, a dropout key for each microbatch, clipping by the global norm, Adam, a dictionary of metrics, a
donated state that is initialised straight into its layout, and a second shape of batch.
"""

import functools
import hashlib
import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import wires
from jax.sharding import AxisType, Mesh, PartitionSpec

import mpmd
import scheduler

VOCABULARY, WIDTH, ROWS, MICROBATCHES = 16, 8, 4, 4
NUM_STEPS = 3


class Case(NamedTuple):
    """A layout.

    Attributes:
      schedule: it says how many stages the model has.
      groups: of which devices each consists.
      explicit: whether the mesh has Explicit axes, rather than Auto ones.
      local_data: the batch is given per process, by those that have a part of it.
      recomputed: whether the backward computes each layer again.
      reshaped: whether the last batch has another shape.
    """

    schedule: Any
    groups: tuple[tuple[int, ...], ...]
    explicit: bool = False
    local_data: bool = False
    recomputed: bool = False
    reshaped: bool = False


def cases(n: int) -> dict[str, Case]:
    """All layouts of `n` devices."""
    one = tuple((d,) for d in range(n))
    pairs = tuple((d, d + 1) for d in range(0, n, 2))
    across = tuple((d, d + n // 2) for d in range(n // 2))
    turned = tuple((d + n // 2, d) if d % 2 else (d, d + n // 2) for d in range(n // 2))
    return {
        "1f1b": Case(scheduler.OneFOneB(n), one),
        "zb-h1": Case(scheduler.ZeroBubbleH1(n), one, reshaped=True),
        "interleaved": Case(scheduler.InterleavedOneFOneB(n, n // 2), across),
        "zbv": Case(scheduler.ZeroBubbleV(n // 2), pairs),
        "pairs": Case(scheduler.OneFOneB(n // 2), pairs, local_data=True),
        "across": Case(scheduler.ZeroBubbleH1(n // 2), across),
        "turned": Case(scheduler.OneFOneB(n // 2), turned),
        "explicit": Case(scheduler.OneFOneB(n // 2), across, explicit=True, local_data=True, reshaped=True),
        "uneven": Case(scheduler.OneFOneB(3), ((0, 1), (2,), (n - 1,))),
        "recomputed": Case(scheduler.DualPipeV(n // 2), across, recomputed=True),
        "shared": Case(scheduler.OneFOneB(4), ((0,), (0,), (n - 1,), (n - 1,))),
    }


def mesh_of(case: Case) -> mpmd.MpmdMesh:
    devices = jax.devices()
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    meshes = [Mesh(np.array([devices[d] for d in group]), ("data",), axis_types=(kind,)) for group in case.groups]
    return mpmd.MpmdMesh.from_groups(meshes)


def init(key, num_stages: int):
    embed_key, *keys = jax.random.split(key, num_stages + 1)
    scale = WIDTH**-0.5
    params = {
        "embed": 0.5 * jax.random.normal(embed_key, (VOCABULARY, WIDTH)),
        "layers": [{"w": scale * jax.random.normal(k, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)} for k in keys],
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": jax.tree.map(jnp.copy, zeros), "step": jnp.int32(0)}


def make_step(case: Case | None, mark, reduce):
    """The step; `mark` and `reduce` are the library's, or plain ones for one device."""

    def rows(x):
        spec = PartitionSpec("data")
        if case is None:
            return x
        return jax.reshard(x, spec) if case.explicit else jax.lax.with_sharding_constraint(x, spec)

    def looked_up(embed, tokens):
        return jax.nn.one_hot(tokens, VOCABULARY) @ embed

    def block(layer, x, key):
        kept = jax.random.bernoulli(key, 0.9, (x.shape[-1],))
        return x + jnp.tanh(x @ layer["w"] + layer["b"]) * kept

    if case is not None and case.recomputed:
        block = jax.checkpoint(block)

    def loss(params, microbatch):
        x = rows(looked_up(params["embed"], microbatch["tokens"]))
        for stage, layer in enumerate(params["layers"]):
            x = x if stage == 0 else mark(x)
            key = jax.random.fold_in(microbatch["key"], stage)
            x = rows(block(layer, x, key))
        logits = x @ params["embed"].T
        wanted = jax.nn.one_hot(microbatch["targets"], VOCABULARY)
        value = -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, axis=-1))
        hits = jnp.argmax(logits, axis=-1) == microbatch["targets"]
        return value, {"loss": value, "hits": jnp.sum(hits.astype(jnp.int32))}

    def step(state, batch):
        def one(microbatch):
            (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch)
            return grads, metrics

        grads, metrics = reduce(one, batch, operation=(mpmd.Mean, {"loss": mpmd.Mean, "hits": mpmd.Add}))
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
        count = state["step"] + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, state["square"], grads)

        def updated(p, m, s):
            return p - 0.01 * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-6)

        params = jax.tree.map(updated, state["params"], mean, square)
        return {"params": params, "mean": mean, "square": square, "step": count}, {**metrics, "norm": norm}

    return step


def batches(num_rows: int = ROWS):
    """New values for every step, the same in every process."""
    for i in range(NUM_STEPS):
        random = np.random.default_rng(i)
        tokens = random.integers(0, VOCABULARY, (MICROBATCHES, num_rows))
        keys = jax.random.split(jax.random.key(i), MICROBATCHES)
        yield {"tokens": tokens.astype(np.int32), "targets": (7 * tokens % VOCABULARY).astype(np.int32), "key": keys}


def given_locally(batch, shardings):
    """Tokens and targets as arrays of the groups that read them, each process giving its own rows."""

    def one(host, sharding):
        group = sharding.groups[0]
        target = sharding.group_sharding(group)
        mine = target.addressable_devices_indices_map(host.shape)
        if not mine:
            return mpmd.MpmdArray({}, sharding, host.shape, host.dtype)
        starts = [index[1].indices(host.shape[1])[:2] for index in mine.values()]
        rows = host[:, min(a for a, _ in starts) : max(b for _, b in starts)]
        return mpmd.MpmdArray([jax.make_array_from_process_local_data(target, rows, host.shape)], sharding)

    return {"key": batch["key"], **{name: one(batch[name], shardings[name]) for name in ("tokens", "targets")}}


def digest(tree) -> str:
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        hashed.update(f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes())
    return hashed.hexdigest()[:16]


def bits(metrics) -> dict[str, str]:
    """Scalars that every process reads, to the last bit."""
    return {name: np.asarray(value).tobytes().hex() for name, value in sorted(metrics.items())}


def run(case: Case, timed: bool) -> dict[str, Any]:
    mesh = mesh_of(case)
    reduce = functools.partial(mpmd.treduce, schedule=case.schedule)
    rows = PartitionSpec(None, "data")
    specs = {"tokens": rows, "targets": rows, "key": PartitionSpec()}
    wish = {"in_shardings": (None, specs)} if case.local_data else {}
    step = mpmd.jit(make_step(case, mpmd.mark_stage_end, reduce), mpmd_mesh=mesh, donate_argnums=0, **wish)
    make = functools.partial(init, num_stages=case.schedule.num_stages)
    first = next(batches())
    compiled = step.lower(jax.eval_shape(make, jax.random.key(0)), first).compile()
    compiled.timing = timed
    state_shardings, batch_shardings = compiled.input_shardings[0]
    state = mpmd.jit(make, mpmd_mesh=mesh, out_shardings=state_shardings)(jax.random.key(0))
    start = digest(mpmd.device_get(state))
    history = []
    for batch in batches():
        given = given_locally(batch, batch_shardings) if case.local_data else batch
        old = state
        state, metrics = compiled(state, given)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        history.append(bits(metrics))
    if case.reshaped:  # another shape: all compile again, for the same state
        state, metrics = step(state, next(batches(2 * ROWS)))
        history.append(bits(metrics))
    return {"start": start, "history": history, "end": digest(mpmd.device_get(state))}


def read_uncommitted() -> list[float]:
    """The values of an array that JAX has not committed to its device, in every process."""
    mesh = mpmd.MpmdMesh.from_groups([Mesh(np.array(jax.devices()[:1]), ("data",))])
    sharding = mpmd.MpmdSharding(mesh, 0, PartitionSpec())
    mine = [jnp.arange(4.0)] if mesh.local_groups else []
    return mpmd.device_get(mpmd.MpmdArray(mine, sharding, (4,), jnp.zeros(0).dtype)).tolist()


def reference(num_stages: int) -> list[dict[str, float]]:
    """The metrics that plain `jax.jit` gives on one device, of another shape last."""

    def reduce(one, batch, operation):
        grads, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one, batch))
        mean = functools.partial(jax.tree.map, lambda x: x / MICROBATCHES)
        return mean(grads), {**metrics, "loss": mean(metrics["loss"])}

    step = jax.jit(make_step(None, lambda x: x, reduce))
    state, history = init(jax.random.key(0), num_stages), []
    for batch in (*batches(), next(batches(2 * ROWS))):
        state, metrics = step(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return history


if __name__ == "__main__":
    wires.choose()
    mpmd.initialize()
    chosen = {name: cases(jax.device_count())[name.removeprefix("timed:")] for name in sys.argv[1:]}
    found = {name: run(case, name.startswith("timed:")) for name, case in chosen.items()}
    found["uncommitted"] = read_uncommitted()
    if jax.process_count() == 1:
        plain = {s: reference(s) for s in {case.schedule.num_stages for case in chosen.values()}}
        for name, case in chosen.items():
            found[name]["reference"] = plain[case.schedule.num_stages]
    print(json.dumps(found))
