"""What single processes of the tests do: `python scenarios.py NAME COORDINATOR NUM_PROCESSES PROCESS_ID ARGUMENTS`."""

import faulthandler
import json
import os
import signal
import sys
from typing import Any

import jax

SCENARIOS: dict[str, Any] = {}


def scenario(fun: Any) -> Any:
    SCENARIOS[fun.__name__] = fun
    return fun


@scenario
def save(path: str, groups: int, seed: int = 0, v1: bool = False, data: str | None = "data", scale: int = 1) -> Any:
    import importlib

    from layouts import mesh_of, place_all, shardings_for

    import reshard.checkpoint

    mesh = mesh_of(groups)
    tree = place_all(random_values(seed, scale), shardings_for(mesh, data))
    if v1:
        new = importlib.import_module("orbax.checkpoint.experimental.v1")
        context = new.Context()
        context.array.saving.use_compression = False
        with context:
            new.save(path, tree)
    else:
        reshard.checkpoint.save(path, tree)
    return {"groups": mesh.local_groups}


@scenario
def restore(path: str, groups: int, seed: int = 0, data: str | None = "data", scale: int = 1, v1: bool = False) -> Any:
    import importlib

    import numpy as np
    from layouts import bytes_read, check_equal, mesh_of, shardings_for

    import reshard.checkpoint

    mesh, values = mesh_of(groups), random_values(seed, scale)
    before = bytes_read()
    if v1:
        new = importlib.import_module("orbax.checkpoint.experimental.v1")
        tree = new.load(path, reshard.checkpoint.abstract(values, shardings_for(mesh, data)))
    else:
        tree = reshard.checkpoint.restore(path, values, shardings_for(mesh, data))
    shards = jax.tree.map(check_equal, tree, values)
    held = {
        (name, str(shard.index)): shard.data.nbytes  # a part that several devices have counts once
        for name, array in enumerate(jax.tree.leaves(tree))
        for shard in array.addressable_shards
    }
    found = {"shards": sum(jax.tree.leaves(shards)), "read": bytes_read() - before, "held": sum(held.values())}
    # On single devices, of which the other processes get no shard; a leaf for each device.
    on_one = [jax.sharding.SingleDeviceSharding(d) for d in jax.devices()]
    numbered = jax.tree.unflatten(jax.tree.structure(values), range(len(jax.tree.leaves(values))))
    places = jax.tree.map(lambda n: on_one[n % len(on_one)], numbered)
    if v1:
        tree = new.load(path, reshard.checkpoint.abstract(values, places))
    else:
        tree = reshard.checkpoint.restore(path, values, places)
    for array, value, place in zip(*map(jax.tree.leaves, (tree, values, places)), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (value.shape, value.dtype, place)
        if place.is_fully_addressable:
            np.testing.assert_array_equal(array, value)
    return found


@scenario
def unlike(path: str) -> Any:
    """Saves and restores of which each process makes another one; what is raised, and that equal ones go on."""
    import shutil

    import orbax.checkpoint as ocp
    from layouts import check_equal, mesh_of, place_all, shardings_for

    import mpmd
    import reshard.checkpoint

    rank, shardings = jax.process_index(), shardings_for(mesh_of(2))
    trees = [place_all(random_values(seed), shardings) for seed in range(2)]
    like = reshard.checkpoint.abstract(trees[0])
    args = ocp.args
    manager = ocp.CheckpointManager(f"{path}/run")
    for step, tree in enumerate(trees):
        manager.save(step, args=args.StandardSave(tree))
        manager.wait_until_finished()
    if rank == 0:
        shutil.copytree(f"{path}/run/0", f"{path}/copy/0")
    mpmd.device_get(trees[0])
    found = []

    def refused(call: Any) -> None:
        try:
            call()
            found.append("")
        except ValueError as error:
            found.append(str(error).replace(path, "PATH"))

    refused(lambda: reshard.checkpoint.save(f"{path}/{rank}", trees[0]))
    refused(lambda: reshard.checkpoint.save(f"{path}/new", {"a" * (1 + rank): trees[0]}))
    refused(lambda: manager.save(7 + rank, args=args.StandardSave(trees[0])))
    refused(lambda: manager.restore(rank, args=args.StandardRestore(like)))
    for place in (f"{path}/run/0", f"{path}/copy/0"):  # one checkpoint in two places
        folder = place if rank else f"{path}/run/0"
        jax.tree.map(check_equal, reshard.checkpoint.restore(f"{folder}/default", like), random_values(0))
    refused(lambda: reshard.checkpoint.restore(f"{path}/run/{rank}/default", like))
    return found


@scenario
def alone(path: str, call: str) -> Any:
    """Process 0 saves or restores through Orbax where process 1 takes a step; what each of them is told."""
    import orbax.checkpoint as ocp
    from layouts import mesh_of, place_all, shardings_for

    import mpmd
    import reshard.checkpoint

    mesh = mesh_of(2)
    tree = place_all(random_values(0), shardings_for(mesh))
    try:
        if call != "make" or jax.process_index() == 0:
            manager = ocp.CheckpointManager(path)
            manager.save(0, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
        if jax.process_index() == 1:
            mpmd.jit(lambda x: 2 * x, mpmd_mesh=mesh)(1.0)
        elif call == "save":
            manager.save(1, args=ocp.args.StandardSave(tree))
        else:
            manager.restore(0, args=ocp.args.StandardRestore(reshard.checkpoint.abstract(tree)))
    except mpmd.ScheduleError as error:
        return str(error)
    return "nothing"


@scenario
def save_stock(path: str, scale: int = 1) -> Any:
    """Stock Orbax over all processes, each array sharded over all devices; this library is never imported."""
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    values = random_values(scale=scale)
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def place(x: Any) -> jax.Array:
        spec = PartitionSpec("x") if x.ndim else PartitionSpec()
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, jax.tree.map(place, values))
    assert not {"mpmd", "reshard"} & set(sys.modules)
    return None


@scenario
def manager(path: str, groups: int, steps: int, scale: int = 1, restore: bool = False, named: bool = False) -> Any:
    """Saves steps with Orbax's CheckpointManager and prints each that is finished; or restores the last one."""
    import orbax.checkpoint as ocp
    from layouts import check_equal, mesh_of, place_all, shardings_for

    import reshard.checkpoint

    mesh = mesh_of(groups)
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    if named:
        processes = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
        options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=processes)
    with ocp.CheckpointManager(path, options=options) as checkpoints:
        if restore:
            step = checkpoints.latest_step()
            values = random_values(step, scale)
            target = reshard.checkpoint.abstract(values, shardings_for(mesh))
            tree = checkpoints.restore(step, args=ocp.args.StandardRestore(target))
            jax.tree.map(check_equal, tree, values)
            return {"step": step, "steps": checkpoints.all_steps()}
        first = (checkpoints.latest_step() or 0) + 1
        for step in range(first, first + steps):
            tree = place_all(random_values(step, scale), shardings_for(mesh))
            checkpoints.save(step, args=ocp.args.StandardSave(tree))
            checkpoints.wait_until_finished()
            print(json.dumps({"finished": step}), flush=True)
        return {"steps": checkpoints.all_steps()}


@scenario
def save_where_one_cannot(path: str, other: str, how: str, unable: int) -> Any:
    """What each process is told, and in how many seconds; then the disk is mended, and all save there and elsewhere."""
    import importlib
    import subprocess
    import time

    import orbax.checkpoint as ocp
    from layouts import mesh_of, place_all, shardings_for

    from mpmd.errors import ReshardError
    from reshard.checkpoint import TensorFormat, save

    tree = place_all(random_values(1, 1), shardings_for(mesh_of(2)))
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=how == "manager")
    manager = ocp.CheckpointManager(path, options=options) if "manager" in how else None
    v1 = importlib.import_module("orbax.checkpoint.experimental.v1") if "v1" in how else None
    steps = v1.training.Checkpointer(path) if "steps" in how else None

    def save_in(folder: str) -> None:
        if steps is not None and folder == path:
            steps.save_async(1, tree).result()
        elif v1 is not None:
            v1.save_async(f"{folder}/state", tree).result()
        elif manager is None:
            save(f"{folder}/state", tree, tensors=TensorFormat() if how == "tensors" else None, timeout_s=100)
        elif folder == path:
            assert manager.save(1, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
        else:
            manager.close()
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(f"{folder}/state", tree)

    found = {}
    for name, folder in (("first", path), ("again", path), ("mended", path), ("other", other)):
        if name == "mended" and jax.process_index() == unable:
            subprocess.run(["mount", "-o", "remount,rw,bind", path], check=True)
        begun = time.monotonic()
        try:
            save_in(folder)
            found[name] = ["saved"]
        except (OSError, ReshardError) as error:
            found[name] = [type(error).__name__, str(error)]
        found[name].append(time.monotonic() - begun)
    found["left"] = sorted(os.listdir(path))
    return found


@scenario
def copy_where_one_cannot(path: str) -> Any:
    """Process 1 has no memory for the copy of the first step, when process 0 has copied; the second step is saved."""
    import time

    import orbax.checkpoint as ocp
    from layouts import mesh_of, place_all, shardings_for

    from reshard.checkpoint import leaf_handler

    plain = leaf_handler.start_copies

    def start_copies(*arguments: Any) -> Any:
        leaf_handler.start_copies = plain
        time.sleep(1)
        raise MemoryError("no memory")

    if jax.process_index() == 1:
        leaf_handler.start_copies = start_copies
    tree = place_all(random_values(1, 1), shardings_for(mesh_of(2)))
    found = []
    with ocp.CheckpointManager(path) as checkpoints:
        for step in (1, 2):
            try:
                found.append(checkpoints.save(step, args=ocp.args.StandardSave(tree)))
            except (OSError, MemoryError) as error:
                found.append(str(error))
        return [*found, checkpoints.all_steps()]


@scenario
def last_file_where_one_cannot(path: str) -> Any:
    """What each process is told, and in how many seconds, when process 0 cannot write the last file of a folder."""
    import errno
    import time

    from layouts import mesh_of, place_all, shardings_for

    from reshard.checkpoint import TensorFormat, save
    from reshard.storage.tensor_files import TensorFiles

    def finish(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if jax.process_index() == 0:
        TensorFiles.finish = finish
    begun = time.monotonic()
    try:
        save(path, place_all(random_values(1, 1), shardings_for(mesh_of(2))), tensors=TensorFormat(), timeout_s=100)
    except OSError as error:
        return [str(error), time.monotonic() - begun]


@scenario
def disk_full(path: str) -> Any:
    """The disk of process 1 is full while a CheckpointManager saves; it prints what it is told."""
    import errno

    import orbax.checkpoint as ocp
    from layouts import mesh_of, place_all, shardings_for

    from reshard.checkpoint import leaf_handler

    async def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if jax.process_index() == 1:
        leaf_handler.checksums.write = write
    checkpoints = ocp.CheckpointManager(path)
    tree = place_all(random_values(1, 1), shardings_for(mesh_of(2)))
    checkpoints.save(1, args=ocp.args.StandardSave(tree))
    try:
        checkpoints.wait_until_finished()
    except OSError as error:
        print(json.dumps(str(error)), flush=True)
        if jax.process_index() == 0:  # it serves the store: were it gone, JAX would end process 1 before it has said so
            signal.pause()  # until the test ends it
        os._exit(0)


@scenario
def mixed(path: str, groups: int) -> Any:
    """Keys, an SPMD array over all processes, host values and arrays of other processes, in one tree and back."""
    import importlib

    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec
    from layouts import check_equal, mesh_of, place

    import reshard.checkpoint
    from mpmd.arrays.array import MpmdArray
    from mpmd.arrays.sharding import MpmdSharding

    mesh = mesh_of(groups)
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(5), 4)))

    def keys(sharding: MpmdSharding) -> MpmdArray:
        integers = place(data, sharding)
        arrays = {g: jax.random.wrap_key_data(integers.array_in(g)) for g in sharding.groups if g in mesh.local_groups}
        return MpmdArray(arrays, sharding, (4,), jax.random.key(0).dtype)

    values = np.arange(64, dtype=np.int32).reshape(8, 8)
    tree = {
        "keys": keys(MpmdSharding(mesh, groups - 1, PartitionSpec("data"))),
        "spmd": place(values, NamedSharding(mesh.jax_mesh, PartitionSpec(("stage", "data")))),
        "first": place(values, MpmdSharding(mesh, 0, PartitionSpec(None, "data"))),
        "bf16": place(values.astype(jax.numpy.bfloat16), MpmdSharding(mesh, range(groups))),
        "host": values,
        "epoch": 3,
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        standard = checkpointer.restore(path, tree)
    new = importlib.import_module("orbax.checkpoint.experimental.v1")
    new.save_async(f"{path}-of-v1", tree).result()
    with new.training.Checkpointer(f"{path}-steps") as steps:
        steps.save_async(1, tree).result()
        of_steps = steps.load(1, reshard.checkpoint.abstract(tree))
    of_v1 = [new.load(path, reshard.checkpoint.abstract(tree)), new.load(f"{path}-of-v1", tree), of_steps]
    shards = 0
    for found in (standard, reshard.checkpoint.restore(path, tree), *of_v1):
        for name in ("spmd", "first", "host"):
            shards += check_equal(found[name], values)
        assert found["epoch"] == 3
        assert found["keys"].dtype == tree["keys"].dtype
        assert found["keys"].shape == (4,)
        for shard in found["keys"].addressable_shards:
            np.testing.assert_array_equal(jax.random.key_data(shard.data), data[shard.index[0]])
    return {"shards": shards, "keys": len(tree["keys"].addressable_shards)}


@scenario
def save_local_array(path: str) -> Any:
    """A jax.Array that each process has for itself cannot be saved; all processes say so."""
    import jax.numpy as jnp
    from layouts import mesh_of, place

    import reshard.checkpoint
    from mpmd.arrays.sharding import MpmdSharding
    from mpmd.errors import ReshardError

    mesh = mesh_of(jax.process_count())
    tree = {"w": place([1.0, 2.0], MpmdSharding(mesh, 0)), "step": jnp.int32(3)}
    try:
        reshard.checkpoint.save(path, tree)
    except ReshardError as error:
        return str(error)
    return None


@scenario
def save_without_last(path: str, timeout_s: int) -> Any:
    """The last process never comes."""
    import time

    from layouts import mesh_of, place

    import reshard.checkpoint
    from mpmd.arrays.sharding import MpmdSharding

    mesh = mesh_of(jax.process_count())
    if jax.process_index() == jax.process_count() - 1:
        time.sleep(2 * timeout_s)
        return None
    started = time.monotonic()
    try:
        reshard.checkpoint.save(path, {"w": place([1.0, 2.0], MpmdSharding(mesh, 0))}, timeout_s=timeout_s)
    except TimeoutError as error:
        return {"error": str(error), "waited": time.monotonic() - started, "exists": os.path.exists(path)}
    return None


def random_values(seed: int = 0, scale: int = 1) -> Any:
    """A small state that no compression shrinks: per-stage arrays, a stack of layers, a tied array, a counter."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> Any:
        return rng.integers(0, 2**32, shape, np.uint32).view(np.int32)

    return {
        "layers": [{"w": noise(64, 32 * scale), "b": noise(64)} for _ in range(4)],
        "stack": noise(8, 32, 64 * scale),
        "split": noise(16, 32, 16 * scale),
        "tied": noise(128, 16 * scale),
        "step": np.int32(17),
    }


def main() -> None:
    name, coordinator, num_processes, process_id, arguments = sys.argv[1:]
    faulthandler.dump_traceback_later(140)  # where it hangs, before the test ends it
    if int(num_processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(num_processes), int(process_id))
    result = SCENARIOS[name](**json.loads(arguments))
    print(json.dumps(result, default=str), flush=True)
    if int(num_processes) > 1:
        jax.distributed.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
