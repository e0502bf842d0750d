"""A training loop under `mpmd.resilient`, in which something goes wrong in the first attempts.

    resilience.py CASE NUM_STEPS [FAULT…]    prints `step I BITS` in every rank, and `end HASH` in rank 0

A case is one of `training.py`, for the devices that the job has, and `half` is that of half of its devices (the first
attempt has twice as many). A fault is JSON: `{"attempt": 0, "rank": 1, "step": 3, "what": …}` and more.
A spare has a number above those of the ranks, also when it is in the place of one.
"""

import functools
import json
import os
import signal
import sys
import threading
import time

import flips
import jax
import jax.numpy as jnp
import moments
import numpy as np
import training
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import process_allgather

import mpmd
from mpmd.job import joining
from mpmd.resilience import copies, keepers
from mpmd.resilience.keeper import TOKEN

PAUSE_S = [0.005]  # of a device, in each task of a stage, where some process is to become slow
NUMBER = int(os.environ.get("MPMD_PROCESS_ID", "0"))
ATTEMPT = int(os.environ.get("MPMD_ATTEMPT", "0"))
WRONG = [False]
OTHER = [False]  # this process reads another batch, once
LIES = [False]  # a bit of what it holds is about to change


def batch_at(i: int):
    random = np.random.default_rng(i)
    tokens = random.integers(0, training.VOCABULARY, (training.MICROBATCHES, training.ROWS))
    keys = jax.random.split(jax.random.key(i), training.MICROBATCHES)
    wanted = 7 * tokens % training.VOCABULARY
    return {"tokens": tokens.astype(np.int32), "targets": wanted.astype(np.int32), "key": keys}


def keeper_here() -> keepers.Connection:
    own = keepers.own(os.environ, "127.0.0.1")
    assert own is not None
    return keepers.Connection(own, os.environ[TOKEN], shares_memory=True)


def paused(x):
    """The same values, from a device that pauses in each forward and is told for how long by its process."""

    def pause(value):
        time.sleep(PAUSE_S[0])
        return value

    start = jax.lax.stop_gradient(x.ravel()[0])
    return x + 0 * jax.pure_callback(pause, jax.ShapeDtypeStruct((), x.dtype), start)


def damage(step: int, owners: tuple[int, ...]) -> None:
    """Flips a byte in the middle of what the keeper of this host has of a step, of some ranks, once it is whole."""
    connection = keeper_here()
    deadline = time.monotonic() + 60
    while len(found := [r for r in connection.records() if r["step"] == step]) < jax.process_count():
        assert time.monotonic() < deadline, connection.records()
        time.sleep(0.01)
    for record in found:
        if record["owner"] in owners:
            header = json.loads(connection.header(record["number"]))
            _, _, _, offset, nbytes, _ = max(header["pieces"], key=lambda piece: piece[4])
            connection.read(record["number"], offset, nbytes)[nbytes // 2] ^= 0x10


def prepare(fault: dict) -> None:
    """What a fault needs before the loop begins."""
    if fault["what"] == "copy":  # killed while it copies: with half of its bytes written
        plain = copies.written

        def written(layout, taken, into):
            if fault.pop("now", False):
                plain(layout, taken, into)
                into[into.nbytes // 2 :] = 0
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(layout, taken, into)

        copies.written = written
    if fault["what"] == "moment":
        moments.prepare(fault)


def begin(fault: dict) -> None:
    """The step begins in which it goes wrong."""
    match fault["what"]:
        case "moment":
            fault["is_due"] = fault["phase"] != "recovery" or fault.get("is_due")
        case "soon":
            moments.later(fault)
        case "signal":  # somewhere in the step
            os_kill = functools.partial(os.kill, os.getpid(), fault["signal"])
            threading.Timer(fault.get("after_s", 0.0), os_kill).start()
        case "copy":
            fault["now"] = True
        case "damage":
            for step in fault["steps"]:
                damage(step, tuple(fault["owners"]))
            os.kill(os.getpid(), signal.SIGKILL)
        case "keeper":  # of this host; `for_good`: with the process that would start another one
            pid = moments.keeper()
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            os.kill(parent if fault.get("for_good") else pid, signal.SIGKILL)
        case "data":
            OTHER[0] = True
        case "raise":
            raise RuntimeError("as was asked for")
        case "flip":  # from here on, its device computes wrong
            WRONG[0] = True
        case "rest":  # in its memory, when the step is over
            LIES[0] = True
        case "slow":  # from here on
            PAUSE_S[0] *= fault["times"]
        case "wait":  # for a test that does something to this process
            print("waits", flush=True)
            time.sleep(600)


def restored(folder: str, state: dict):
    """A manager that saves after each second step, the newest state that it has, and the step after that."""
    import orbax.checkpoint as ocp  # takes long, and few jobs save

    import reshard.checkpoint

    manager = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2))
    if (newest := manager.latest_step()) is None:
        return manager, state, 0
    print("restores step", newest, flush=True)
    train = manager.restore(newest, args=ocp.args.StandardRestore(reshard.checkpoint.abstract(state["train"])))
    return manager, {**state, "train": train}, newest + 1


def save(manager, i: int, train) -> None:
    import orbax.checkpoint as ocp

    if manager.should_save(i):
        jax.block_until_ready(train)
        manager.save(i, args=ocp.args.StandardSave(train))


def publish(train, i: int) -> None:
    if port := os.environ.get("TEST_PUBLISH"):
        import reshard

        reshard.publish("train", train, i, address=f"127.0.0.1:{port}", token="secret")


def lose_bit(state) -> None:
    """Of what this process has of it, if that is due."""
    if LIES[0]:
        LIES[0] = False
        leaves = jax.block_until_ready(jax.tree.leaves(state))
        flips.flip_in_memory(next(x for leaf in leaves for x in leaf._arrays.values()))


def gather(size: str, number: int) -> None:
    """All processes tell each other their rank, small or large, and something that all have alike."""
    length = {"small": 3, "large": 1 << 18}[size]
    ranks = multihost_utils.process_allgather(np.full(length, jax.process_index(), np.int64))
    assert ranks.shape[1:] == (length,) and ranks.dtype == np.int32
    assert (ranks == np.arange(jax.process_count())[:, None]).all()
    tiled = process_allgather({"x": jnp.full(2, jax.process_index(), jnp.bfloat16)}, tiled=True)["x"]
    assert tiled.dtype == jnp.bfloat16 and tiled.tolist() == np.repeat(range(jax.process_count()), 2).tolist()
    assert multihost_utils.broadcast_one_to_all({"x": number + jax.process_index()})["x"] == number
    multihost_utils.sync_global_devices(f"step {number}")


def main() -> None:
    name, num_steps = sys.argv[1], int(sys.argv[2])
    faults = [json.loads(text) for text in sys.argv[3:]]
    for fault in faults:
        if fault["step"] < -1 and (fault["attempt"], fault["rank"]) == (ATTEMPT, NUMBER):  # a spare may wait then
            moments.later(fault)
    mpmd.initialize()
    if folder := jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        print("finds", sum(name.endswith("-mpmd") for name in os.listdir(folder)), "programs", flush=True)
    mark = mpmd.mark_stage_end
    faulty = flips.flipping(jax.local_devices()[0], lambda name: WRONG[0])
    if any(f["what"] == "flip" for f in faults):
        faulty.__enter__()
    if any(f["what"] == "slow" for f in faults):
        mark = lambda x: mpmd.mark_stage_end(paused(x))  # noqa: E731
    faults = [f for f in faults if (f["attempt"], f["rank"]) == (ATTEMPT, NUMBER)]
    for fault in faults:
        prepare(fault)
    for fault in faults:
        if fault["step"] == -1:  # before the loop
            begin(fault)
    gathers = os.environ.get("TEST_GATHERS", "") if jax.process_count() > 1 else ""
    if gathers:
        gather(gathers, jax.process_count())
    case = training.cases(jax.device_count())[name]
    mesh = training.mesh_of(case)
    reduce = functools.partial(mpmd.treduce, schedule=case.schedule)
    audit_every = int(os.environ.get("TEST_AUDIT_EVERY", "0"))
    step = mpmd.jit(
        training.make_step(case, mark, reduce), mpmd_mesh=mesh, donate_argnums=0, audit_every=audit_every
    )  # fmt: skip
    make = functools.partial(training.init, num_stages=case.schedule.num_stages)
    layout = step.lower(jax.eval_shape(make, jax.random.key(0)), batch_at(0)).compile().input_shardings[0][0]
    rows = mpmd.MpmdSharding(mesh, range(mesh.num_groups), split={g: ((g, g + 1),) for g in range(mesh.num_groups)})
    state = {
        "train": mpmd.jit(make, mpmd_mesh=mesh, out_shardings=layout)(jax.random.key(0)),
        "rows": mpmd.jit(lambda: jnp.arange(4.0)[: mesh.num_groups], mpmd_mesh=mesh, out_shardings=rows)(),
        "key": jax.random.key(5), "seen": np.zeros(3, np.int16), "number": 0,
    }  # fmt: skip

    manager, start = None, 0
    if folder := os.environ.get("TEST_MANAGER"):
        manager, state, start = restored(folder, state)

    def body(i, state):
        job = joining.current()
        print("begins", i, ATTEMPT, job.epoch if job else 0, flush=True)
        for fault in faults:
            if fault["step"] == i:
                begin(fault)
        batch, OTHER[0] = batch_at(i + 100 * OTHER[0]), False
        train, metrics = step(state["train"], batch)
        lose_bit(train)
        if gathers:
            gather(gathers, i)
        publish(train, i)
        folder = os.environ.get("TEST_SAVES")
        if folder and i % 2 and not os.path.exists(path := os.path.join(folder, str(i))):
            import reshard.checkpoint  # Orbax takes long to import, and few jobs save

            reshard.checkpoint.save(path, train)
        if manager is not None:
            save(manager, i, train)
        if mesh.local_groups:
            print("step", i, json.dumps(training.bits(metrics)), flush=True)
        key = jax.random.split(state["key"], 2)[1]
        number = state["number"] + 1
        return {
            "train": train,
            "rows": state["rows"],
            "key": key,
            "seen": state["seen"] + np.int16(i),
            "number": number,
        }, metrics

    state = mpmd.resilient(body, state, num_steps, start=start)
    if manager is not None:
        manager.close()
    sys.setprofile(None)  # of a moment that has not come
    found = jax.tree.map(np.asarray, mpmd.device_get({**state, "key": jax.random.key_data(state["key"])}))
    if jax.process_index() == 0:
        assert found["rows"].tolist() == list(range(mesh.num_groups)), found["rows"]
        print("end", training.digest({k: v for k, v in found.items() if k != "rows"}), flush=True)
    assert (joining.current() is None) == (jax.process_count() == 1)


if __name__ == "__main__":
    main()
