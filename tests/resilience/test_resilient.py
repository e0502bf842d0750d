"""`mpmd.resilient` in one process, with a keeper beside it; which copies make up a whole state, and who keeps what."""

import atexit
import contextlib
import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpmd
from mpmd import _jax_compat as compat
from mpmd.arrays.boxes import Box, held_cells
from mpmd.errors import RankLostError, ScheduleError
from mpmd.job import joining, processes
from mpmd.job.job import Job
from mpmd.job.verdict import Board
from mpmd.job.watchdog import Watchdog
from mpmd.resilience import copies, keepers, layout, loop, restoring, versions
from mpmd.resilience import keeper as keeper_module
from mpmd.resilience.copies import Copies, started, written
from mpmd.resilience.keeper import TOKEN
from mpmd.resilience.keepers import Address
from mpmd.resilience.meeting import Meeting
from mpmd.resilience.ranks import OnlyRank
from mpmd.resilience.versions import Stored
from reshard.checkpoint import meeting

PAGE = Path(__file__).parents[2] / "docs" / "resilience.md"
KEEPER = Path(loop.__file__).with_name("keeper.py")
A, B, C = (Address(host, 1, host) for host in "abc")


@pytest.fixture
def keeper(monkeypatch):
    """A keeper as the launcher starts one; gives the connection that a rank of this host has."""
    environment = os.environ | {TOKEN: "secret"}
    process = subprocess.Popen(
        [sys.executable, str(KEEPER), "--bind", "127.0.0.1"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    _, port, name = process.stdout.readline().split()
    monkeypatch.setenv("MPMD_KEEPER", f"{port}:{name}")
    monkeypatch.setenv(TOKEN, "secret")
    own = keepers.own(os.environ, "127.0.0.1")
    assert own is not None
    connection = keepers.Connection(own, "secret", shares_memory=True)
    yield connection
    connection.close()
    process.stdin.close()
    with process.stdout:
        assert process.wait(10) == 0


def again(monkeypatch, *arguments, attempt: int = 1, **more):
    """The same call, as the program makes it when it has been started over."""
    monkeypatch.setattr(loop, "_calls", 0)
    monkeypatch.setenv("MPMD_ATTEMPT", str(attempt))
    return mpmd.resilient(*arguments, **more)


class LossError(Exception):
    """Stands for the loss of a process."""


def until(step: int, body):
    """The body, whose process is lost when a step begins."""

    def failing(i, state):
        if i == step:
            raise LossError
        return body(i, state)

    return failing


def same(one, other) -> None:
    """Asserts that two trees agree in types and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        if isinstance(a, jax.Array):
            assert a.dtype == b.dtype
            assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
            a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        else:
            assert (type(a), repr(a)) == (type(b), repr(b))
        assert isinstance(a, int | str) or np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_outside_a_job_it_is_the_plain_loop():
    seen = []

    def body(i, state):
        seen.append(i)
        return {"x": state["x"] * 2 + i}, {1: i, "no keys": "in any order"}

    assert mpmd.resilient(body, {"x": 1}, 5, start=2) == {"x": ((1 * 2 + 2) * 2 + 3) * 2 + 4}
    assert seen == [2, 3, 4]
    assert mpmd.resilient(body, {"x": 7}, 0) == {"x": 7}


def test_the_programs_of_the_page_resilience_md_run(tmp_path):
    loop_text, start_text = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {
        "mpmd": mpmd, "num_steps": 5, "state": [np.array(1)], "batch_at": lambda i: i, "ocp": ocp,
        "target": [np.array(0)], "step": lambda state, batch: ([state[0] * 2 + batch], {"loss": batch}),
    }  # fmt: skip
    exec(loop_text, names)
    assert names["state"] == [58]
    with ocp.CheckpointManager(tmp_path / "run") as names["manager"]:
        names["state"] = [np.array(1)]
        exec(start_text, names)
        assert names["state"] == [58]
        names["manager"].save(2, args=ocp.args.StandardSave([np.array(14)]))
        names["manager"].wait_until_finished()
        exec(start_text, names)
    assert names["state"] == [(14 * 2 + 3) * 2 + 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2, 3), "mpmd.resilient: body is a int, not a function."),
        ((print, 2, -1), "mpmd.resilient: num_steps is -1; it must be at least 0."),
        ((print, 2, "7"), "mpmd.resilient: num_steps is '7', not a whole number."),
        ((print, 2, True), "mpmd.resilient: num_steps is True, not a whole number."),
        (
            (print, [int], 1),
            (
                "mpmd.resilient: state[0] is a type; the leaves of a state are arrays, numbers and strings.\n"
                "  Keep everything else outside of the state, in the function `body`."
            ),
        ),
        (
            (print, np.zeros(3, [("a", "i4"), ("b", "f4")]), 1),
            (
                "mpmd.resilient: state is a ndarray of [('a', '<i4'), ('b', '<f4')]; the leaves of a state are arrays,"
                " numbers and strings.\n  Keep everything else outside of the state, in the function `body`."
            ),
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError) as raised:
        mpmd.resilient(*arguments)
    assert str(raised.value) == message


def test_all_wrong_numbers_are_named_at_once():
    with pytest.raises(ValueError) as raised:
        mpmd.resilient(print, 0, 1, copies=-1, every=0)
    expected = "mpmd.resilient: copies is -1; it must be at least 0; every is 0; it must be at least 1."
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("result", "returned"),
    [
        ([0, 0], "PyTreeDef([*, *])"),
        ({1: 0, "a": 0}, "no tree (Comparator raised exception while sorting pytree dictionary keys.)"),
    ],
)
def test_a_body_that_returns_another_tree_is_told_so(result, returned):
    with pytest.raises(ValueError) as raised:
        mpmd.resilient(lambda i, state: result, 0, 1)
    assert str(raised.value) == (
        "mpmd.resilient: body(0, state) returned another tree than it was given.\n  given:    PyTreeDef(*)\n"
        f"  returned: {returned}\n  Return the next state, or (state, metrics)."
    )


def test_a_leaf_of_another_dtype_or_shape_than_the_given_one_is_told_at_once():
    for new, text in ((jnp.zeros(3, "bfloat16"), "bfloat16[3]"), (np.zeros(4, "float32"), "float32[4]")):
        with pytest.raises(ValueError) as raised:
            mpmd.resilient(lambda i, state, new=new: {"m": new}, {"m": jnp.zeros(3)}, 1)
        assert str(raised.value) == (
            f"mpmd.resilient: body(0, state) returned state['m'] as {text}, and it was given float32[3]: after a loss,"
            " the loop could not go on. Return each leaf in the shape and dtype of the given one, or begin with a state"
            " as body returns it."
        )


def test_a_body_may_change_the_tree_and_numbers_of_steps_may_be_those_of_numpy(keeper, monkeypatch):
    def body(i, state):
        state["x"] = state["x"] + 1
        return state

    assert mpmd.resilient(body, (given := {"x": jnp.zeros(3)}), np.int64(3), every=np.int32(1))["x"][0] == 3
    assert not given["x"].any()


def everything():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sharded = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, PartitionSpec("x")))
    return {
        "bf16": jnp.arange(5, dtype=jnp.bfloat16), "fp8": jnp.ones(3, "float8_e4m3fn"), "int4": jnp.ones(3, "int4"),
        "keys": jax.random.split(jax.random.key(1), 3), "rbg": jax.random.key(2, impl="rbg"), "weak": jnp.asarray(2.0),
        "none": None, "empty": jnp.zeros((0, 3)), "numpy": np.arange(6).reshape(2, 3), "scalar": np.float32(0.1),
        "bool": True, "int": 1 << 100, "float": float("nan"), "text": "hé", "counter": 0, "sharded": sharded,
        "weak axes": jnp.full((3,), 1.0), "weak and placed": jax.device_put(jnp.full((3,), 1.0), jax.devices()[1]),
        "big-endian": np.array([1, 2, 3], ">i4"), "names": np.array(["a", "bcd"]), "date": np.datetime64("2026-01-02"),
    }  # fmt: skip


def one_step(i, state):
    keys = jax.vmap(lambda key: jax.random.split(key)[1])(state["keys"])
    numbers = {name: state[name] * 1.5 for name in ("bf16", "weak", "weak axes", "weak and placed")}
    numbers |= {"numpy": state["numpy"] * 3 + i, "big-endian": (state["big-endian"] + 1).astype(">i4")}
    return {**state, **numbers, "keys": keys, "counter": state["counter"] + jnp.int32(1)}


def test_every_kind_of_leaf_comes_back_with_its_type_and_bits(keeper, monkeypatch, capfd):
    expected = everything()
    for i in range(7):
        expected = one_step(i, expected)
    with pytest.raises(LossError):
        again(monkeypatch, until(4, one_step), everything(), 7, attempt=0)
    steps = []
    found = again(monkeypatch, lambda i, state: (steps.append(i), one_step(i, state))[1], everything(), 7)
    assert steps == [4, 5, 6]
    same(found, expected)
    assert found["sharded"].sharding == expected["sharded"].sharding
    assert capfd.readouterr().err == "mpmd.resilient: goes on after step 3, from memory\n"


def in_another_order(i, state):
    x = np.array([[1e8, 1], [-1e8, 1]], np.float32)  # of which numpy adds what lies first in memory first
    return {"x": np.asfortranarray(x), "y": x.T[::-1], "sum": state["x"].sum() + 10 * state["y"].sum()}


def first_weak(i, state):
    product = state["x"] * jnp.full(3, 1.1, jnp.bfloat16)  # a bfloat16, if x is weak
    return {"x": state["y"], "y": state["y"] * np.float32(1.1), "sum": product.astype(jnp.float32).sum()}


@pytest.mark.parametrize(
    ("body", "x", "y"),
    [
        (in_another_order, np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)),
        (first_weak, jnp.asarray(1.0), jnp.asarray(1.0)),
    ],
)
def test_a_step_after_a_loss_finds_leaves_of_the_order_and_weakness_that_it_would_have_found(
    body, x, y, request, monkeypatch
):
    state = {"x": x, "y": y, "sum": np.float32(0)}
    expected = mpmd.resilient(body, state, 3)
    request.getfixturevalue("keeper")
    with pytest.raises(LossError):
        again(monkeypatch, until(2, body), state, 3, attempt=0)
    same(again(monkeypatch, body, state, 3), expected)


def groups_of(size: int, kind: AxisType) -> mpmd.MpmdMesh:
    devices = np.array(jax.devices()).reshape(-1, size)
    return mpmd.MpmdMesh.from_groups([Mesh(row, ("x",), axis_types=(kind,)) for row in devices])


def placed(mesh: mpmd.MpmdMesh, split):
    """A state in the groups of a mesh: a sharded array in each, one that all have, and one that is split over them."""
    last = mesh.num_groups - 1

    def put(x, groups, spec=(), **more):
        wanted = mpmd.MpmdSharding(mesh, groups, spec, **more)
        return mpmd.jit(lambda: jnp.asarray(x), mpmd_mesh=mesh, out_shardings=wanted)()

    numbers = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    return {
        "first": put(numbers, 0, PartitionSpec("x")), "last": put(numbers * 2, last, PartitionSpec(None, "x")),
        "tied": put(numbers * 3, {0, last}), "rows": put(numbers * 4, range(mesh.num_groups), split=split),
        "key": put(3, {0}), "own": np.int64(5),
    }  # fmt: skip


def test_a_state_comes_back_in_other_groups(keeper, monkeypatch, capfd):
    old, new = groups_of(2, AxisType.Auto), groups_of(4, AxisType.Explicit)
    first = placed(old, {g: ((2 * g, 2 * g + 2),) for g in range(4)})

    def body(i, state):
        return jax.tree.map(lambda x: x, {**state, "own": state["own"] + i})

    with pytest.raises(LossError):
        again(monkeypatch, until(2, body), first, 4, attempt=0)
    given = placed(new, {0: ((0, 3), (5, 8)), 1: ((3, 5),)})
    layouts = {name: x.mpmd_sharding for name, x in given.items() if name != "own"}
    found = again(monkeypatch, body, given, 4)
    assert {name: x.mpmd_sharding for name, x in found.items() if name != "own"} == layouts
    for name, x in found.items():
        expected = first[name] if name != "own" else np.int64(5 + 6)
        assert np.asarray(x).tobytes() == np.asarray(expected).tobytes(), name
    assert given["first"].is_deleted()
    record = keeper.records()[-1]
    sizes = 4 * 64 * 4 + 64 + 64  # each array once, whoever has it, and two scalars
    assert len(keeper.read(record["number"], 0, sizes)) == sizes


def damage(keeper, step: int) -> None:
    (number,) = [r["number"] for r in keeper.records() if r["step"] == step]
    keeper.read(number, 0, 8)[3] ^= 1


def test_a_damaged_copy_gives_way_to_the_version_before_and_then_to_the_given_state(keeper, monkeypatch, capfd):
    def body(i, state):
        return {"x": state["x"] + i}

    start = {"x": jnp.zeros(1000)}
    with pytest.raises(LossError):
        again(monkeypatch, until(5, body), start, 9, attempt=0)
    assert [r["step"] for r in keeper.records()] == [3, 4]
    damage(keeper, 4)
    with pytest.raises(LossError):
        again(monkeypatch, until(4, body), start, 9)
    assert [r["step"] for r in keeper.records()] == [3]
    lost = "of the state after step {}, state['x'] of rank 0 can be read from none of 1 copies (damaged on 127.0.0.1)"
    assert capfd.readouterr().err == f"mpmd.resilient: goes on after step 3, from memory ({lost.format(4)})\n"
    damage(keeper, 3)
    found = again(monkeypatch, body, start, 9, attempt=2)
    assert found["x"].tolist() == [sum(range(9))] * 1000
    assert capfd.readouterr().err == f"mpmd.resilient: begins with step 0 and the given state: {lost.format(3)}\n"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"y": jnp.zeros(3)}, "the given state has no state['x']"),
        ({"x": jnp.zeros(4)}, "state['x'] is float32[3] there, and float32[4] in the given state"),
        ({"x": jnp.zeros(3, int)}, "state['x'] is float32[3] there, and int32[3] in the given state"),
        ({"x": 5}, "state['x'] is float32[3] there, and a int in the given state"),
    ],
)
def test_a_state_of_another_kind_is_not_taken_for_the_one_that_is_kept(keeper, monkeypatch, capfd, other, why):
    with pytest.raises(LossError):
        again(monkeypatch, until(2, lambda i, state: state), {"x": jnp.zeros(3)}, 9, attempt=0)
    again(monkeypatch, lambda i, state: state, other, 9)
    expected = f"mpmd.resilient: begins with step 0 and the given state: of the state after step 1, {why}\n"
    assert capfd.readouterr().err == expected


def test_a_state_that_was_computed_of_calls_that_differ_is_not_kept(keeper, monkeypatch):
    """Its copy waits for the comparison, and says what that has found."""

    class Differing(OnlyRank):
        def calls_until_now(self):
            def compare():
                raise ScheduleError("rank 1 gave other values")

            return compare if len(steps) == 3 else super().calls_until_now()

    steps = []
    monkeypatch.setattr(loop, "OnlyRank", Differing)
    with pytest.raises(ScheduleError, match="rank 1 gave other values"):
        again(monkeypatch, lambda i, x: (steps.append(i), x + 1)[1], np.int64(0), 6, attempt=0)
    assert {record["step"] for record in keeper.records()} == {0, 1}


def test_a_loop_in_the_body_of_another_one_is_refused(keeper):
    with pytest.raises(ValueError, match=r"mpmd\.resilient: it is called in the body of another one"):
        mpmd.resilient(lambda i, x: mpmd.resilient(lambda j, y: y, x, 2), np.int64(0), 2)
    assert mpmd.resilient(lambda i, x: x + 1, 0, 2) == 2


def test_states_are_kept_every_so_many_steps_and_at_the_end(keeper, monkeypatch):
    again(monkeypatch, lambda i, x: x + 1, np.zeros(3), 8, attempt=0, every=3, start=1)
    assert [r["step"] for r in keeper.records()] == [5, 7]


def test_a_checkpoint_that_is_newer_than_what_lies_in_memory_wins(keeper, monkeypatch, capfd):
    with pytest.raises(LossError):
        again(monkeypatch, until(3, lambda i, x: x + 1), np.zeros(3), 8, attempt=0)
    found = again(monkeypatch, lambda i, x: x + 1, np.full(3, 6.0), 8, start=6)
    assert found.tolist() == [8, 8, 8]
    assert capfd.readouterr().err == (
        "mpmd.resilient: begins with step 6 and the given state: the state after step 2 is not of the steps 6 to 7\n"
    )


def test_memory_is_used_again_and_a_second_loop_replaces_the_first(keeper, monkeypatch):
    monkeypatch.setattr(loop, "_calls", 0)
    for _ in range(2):
        mpmd.resilient(lambda i, x: x + 1, jnp.zeros(1000), 5)
    assert [(r["call"], r["step"]) for r in keeper.records()] == [(1, 3), (1, 4)]
    maps = {id(keeper.read(r["number"], 0, 1).base) for r in keeper.records()}
    assert len(maps) == 2


def test_a_version_that_can_become_whole_is_kept_also_when_a_rank_was_lost(keeper):
    class Ranks(OnlyRank):
        num_ranks = 2

        def published(self):
            return {0: "0 0", 1: "0 0"}

        def check(self):
            raise RankLostError("rank 1 was lost")

    about = {"attempt": 0, "call": 0, "owner": 0, "num_ranks": 2}
    own = keepers.own(os.environ, "127.0.0.1")
    connection = keepers.Connection(own, "secret", shares_memory=True)
    copies = Copies(Ranks(), {own: connection}, about, False, None)
    for step in range(2):
        copies.keep(step, jnp.arange(3.0) + step)
    copies.close()
    assert [record["step"] for record in keeper.records()] == [0, 1]


def signalled_keeper(number=signal.SIGKILL) -> int:
    """Sends a signal to the process that has the memory, and returns its pid."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ["MPMD_KEEPER"].split(":")[1])
        pid, *_ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(pid, number)
    return pid


def test_a_keeper_that_did_not_answer_for_a_while_gets_copies_again(keeper, monkeypatch, capfd):
    monkeypatch.setattr(keepers, "_LIMIT_S", 0.5)
    monkeypatch.setattr(copies, "_AGAIN_LIMIT_S", 0.2)

    def body(i, x):
        if i == 2:
            pid = signalled_keeper(signal.SIGSTOP)
            threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        return x + 1

    with pytest.raises(LossError):
        again(monkeypatch, until(6, body), np.zeros(3), 9, attempt=0)
    silent, answers = capfd.readouterr().err.splitlines()
    assert silent.startswith("mpmd.resilient: the keeper on 127.0.0.1 does not answer (")
    assert answers == "mpmd.resilient: the keeper on 127.0.0.1 answers again, and gets copies again"
    assert again(monkeypatch, lambda i, x: x + 1, np.full(3, 7.0), 9).tolist() == [9, 9, 9]
    assert capfd.readouterr().err == "mpmd.resilient: goes on after step 5, from memory\n"


def test_a_keeper_of_another_host_that_had_no_room_for_a_while_gets_copies_again(monkeypatch, capfd):
    make, full = keeper_module._Buffer.__init__, threading.Event()

    def make_or_fail(self, nbytes):
        if full.is_set():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        make(self, nbytes)

    monkeypatch.setattr(keeper_module._Buffer, "__init__", make_or_fail)
    monkeypatch.setattr(copies, "_AGAIN_S", 0.0)
    memory = keeper_module.Memory()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection):
            keeper_module._Connection(connection, memory, "secret").serve()

        threading.Thread(target=keeper_module.serve_forever, args=(listener, serve), daemon=True).start()
        address = keepers.Address("127.0.0.1", listener.getsockname()[1], "other")
        connection = keepers.Connection(address, "secret", shares_memory=False)
        about = {"attempt": 0, "call": 0, "owner": 0, "num_ranks": 1}
        kept = Copies(OnlyRank(), {address: connection}, about, True, None)
        kept.keep(0, jnp.arange(3.0))
        kept.finish()
        full.set()
        kept.keep(1, jnp.arange(4.0))  # needs another buffer
        time.sleep(0.5)
        full.clear()
        kept.finish()
        kept.keep(2, jnp.arange(4.0))
        kept.finish()
        kept.close()
    assert [record["step"] for record in memory.list()][-1] == 2
    lacks, again = capfd.readouterr().err.splitlines()
    assert lacks.startswith("mpmd.resilient: the keeper on 127.0.0.1 takes no copies now (no room for 64 bytes: Cannot")
    assert again == "mpmd.resilient: the keeper on 127.0.0.1 answers again, and gets copies again"


def test_a_keeper_that_was_killed_has_a_successor_that_is_given_the_next_version(keeper, monkeypatch, capfd):
    """Three times in a row; then nothing is kept any more, and the loop goes on."""
    killed = []

    def body(i, x):
        if i in (2, 4, 6):
            killed.append(signalled_keeper())
        return x + 1

    with pytest.raises(LossError):
        again(monkeypatch, until(6, body), np.zeros(3), 9, attempt=0)
    text = "mpmd.resilient: the keeper on 127.0.0.1 was killed, and has a successor: what it had is lost\n"
    assert capfd.readouterr().err == 2 * text
    assert again(monkeypatch, body, np.full(3, 7.0), 9).tolist() == [9, 9, 9]
    goes_on, *lost = capfd.readouterr().err.splitlines(keepends=True)
    assert goes_on == "mpmd.resilient: goes on after step 5, from memory\n"
    assert "the keeper on 127.0.0.1 cannot be used any more" in lost[0] and "no more copies" in lost[1]
    assert len({*killed}) == 3


def test_a_host_whose_keeper_was_lost_goes_on_keeping_with_another_one(keeper, capfd):
    own = keepers.own(os.environ, "127.0.0.1")

    class Ranks(OnlyRank):
        num_ranks = 2

        def exchange(self, what, text):
            return {0: text, 1: json.dumps({**json.loads(text), "keeper": own, "records": []})}

    meeting = Meeting(Ranks(), Address("127.0.0.1", 1, "lost"), 0, (4, 1, 1, 0), False)
    copies = meeting.copies(1, None)
    copies.keep(0, jnp.arange(3.0))
    copies.close()
    assert [(record["step"], record["owner"]) for record in keeper.records()] == [(0, 0)]
    assert "rank 0: the keeper of its host cannot be reached" in capfd.readouterr().err
    with pytest.raises(OSError, match=r"^there is none any more$"):
        meeting._end(Board(0), 9)


def test_a_connection_that_was_late_with_an_answer_is_not_asked_again(keeper, monkeypatch):
    """What it says then would be taken for the answer to the next question; the other copy is read."""
    closed, records = [], [[Stored(0, 0, 0, 0, 1, keeper, 1) for keeper in (A, B)]]

    def header(number):
        raise TimeoutError("timed out")

    header_of = {A: header, B: lambda number: json.dumps({"leaves": [], "pieces": [], "numbers": {}})}

    def connect(address):
        return Mock(shares_memory=address == A, header=header_of[address], close=lambda: closed.append(address))

    reading = restoring.Reading(Mock(records=records), 0, 1, connect)
    assert reading.load([], []) == []
    assert closed == [A, B]  # B when all has been read


def test_each_process_gets_back_what_was_its_own_in_the_kind_and_shape_that_it_had():
    states = [{"number": 1, "x": np.arange(3)}, {"number": 0.5, "x": np.ones((2, 2))}]
    names, records = layout.names_of(states[0]), []
    for rank, state in enumerate(states):
        planned = layout.plan(names, leaves := [*state.values()], rank)
        data = np.empty(planned.nbytes, np.uint8)
        records.append((written(planned, started(leaves, planned), data), data))

    def connect(address):
        return Mock(header=lambda n: records[n][0], read=lambda n, start, size: records[n][1][start : start + size])

    version = Mock(records=[[Stored(0, 0, 0, rank, 2, A, rank)] for rank in range(2)])
    for rank, state in enumerate(states):
        reading = restoring.Reading(version, rank, 2, connect)
        data = reading.load(names, [*state.values()])
        same([*map(restoring.put, state.values(), reading.leaves, data)], [*state.values()])
    with pytest.raises(restoring.LostError, match=r"number.* differs between the 2 processes of that time"):
        restoring.Reading(version, 0, 3, connect).load(names, [*states[0].values()])


@pytest.mark.parametrize(
    ("theirs", "other"),
    [(["state[0] (float32[2] of all)", "state[1] (int32[] of all)"], "state[1] (int32[] of all)"), ([], "missing")],
)
def test_processes_whose_states_are_other_trees_are_told_so_before_the_first_step(keeper, monkeypatch, theirs, other):
    class Ranks(OnlyRank):
        num_ranks = 2

        def exchange(self, what, text):
            is_begin = what == "mpmd.resilient (begin)"
            return {0: text, 1: json.dumps({**json.loads(text), "leaves": 0} if is_begin else theirs)}

    monkeypatch.setattr(loop, "OnlyRank", Ranks)
    wanted = mpmd.MpmdSharding(mesh := groups_of(2, AxisType.Auto), {0})
    state = [mpmd.jit(lambda: jnp.zeros(2), mpmd_mesh=mesh, out_shardings=wanted)(), 5]
    with pytest.raises(ValueError) as raised:
        mpmd.resilient(print, state, 1)
    mine = "state[1] (its own)" if theirs else "state[0] (float32[2] of all)"
    assert str(raised.value) == (
        f"mpmd.resilient: a leaf of state is {mine} in process 0 and {other} in process 1. Every process must call it"
        " with the same numbers and the same tree."
    )


def test_a_connection_without_the_token_is_refused(keeper):
    own = keepers.own(os.environ, "127.0.0.1")
    assert own is not None
    for shares_memory in (True, False):
        with (
            pytest.raises(OSError, match=r"ended|reset|Broken pipe"),
            contextlib.closing(keepers.Connection(own, "guessed", shares_memory=shares_memory)) as connection,
        ):
            connection.records()


def test_another_host_keeps_and_gives_back_the_same_bytes(keeper):
    own = keepers.own(os.environ, "127.0.0.1")
    assert own is not None
    far = keepers.Connection(own, "secret", shares_memory=False)
    about = {"attempt": 0, "call": 0, "step": 3, "owner": 1, "num_ranks": 2}
    data = np.random.default_rng(0).integers(0, 256, 9 << 20).astype(np.uint8)
    far.put(data, (0, 0), about, "a header")
    (record,) = far.records()
    assert record == {**about, "number": 1}
    assert far.header(1) == "a header"
    assert np.array_equal(far.read(1, 5, 8 << 20), data[5 : 5 + (8 << 20)])
    assert np.array_equal(keeper.read(1, 0, data.nbytes), data)
    far.close()


# --- pure parts -----------------------------------------------------------------------------------


def kept(keeper: Address, step: int, owner: int, num_ranks: int = 2, attempt: int = 0, call: int = 0) -> Stored:
    return Stored(attempt, call, step, owner, num_ranks, keeper, 1)


def test_a_version_is_whole_when_some_keeper_has_a_record_of_each_rank():
    records = [kept(A, 5, 0), kept(B, 5, 0), kept(A, 5, 1), kept(A, 6, 0), kept(B, 6, 0), kept(A, 9, 0, 1, call=1)]
    (version,) = versions.whole(records, 0)
    assert (version.step, version.records) == (5, ((kept(A, 5, 0), kept(B, 5, 0)), (kept(A, 5, 1),)))
    assert versions.lost_text(records, 0) == "of the state after step 6 every copy of rank 1 is lost"
    assert versions.lost_text(records, 2) == "no keeper has a copy of this loop"
    assert versions.lost_text([], 2) == "no keeper has a copy"


def test_records_of_two_attempts_are_never_mixed():
    records = [kept(A, 6, 0), kept(A, 6, 1, attempt=1), kept(A, 4, 0, 1, attempt=1)]
    assert [(v.step, v.attempt) for v in versions.whole(records, 0)] == [(4, 1)]


@given(st.integers(1, 6), st.integers(0, 7))
def test_buddies_are_other_hosts_and_all_hosts_keep_equally_much(num_hosts, copies):
    hosts = [Address(f"host{i}", i, str(i)) for i in range(num_hosts)]
    chosen = [versions.buddies(hosts, host, copies) for host in hosts]
    for host, mine in zip(hosts, chosen, strict=True):
        assert host not in mine
        assert len(set(mine)) == len(mine) == min(copies, num_hosts - 1)
    counts = [sum(host in mine for mine in chosen) for host in hosts]
    assert set(counts) == {min(copies, num_hosts - 1)}


def test_no_buddy_is_the_same_machine_under_another_name():
    hosts = [Address(host, i, str(i)) for i, host in enumerate(["10.0.0.1", "10.0.0.1", "10.0.0.2"])]
    assert [[buddy.name for buddy in versions.buddies(hosts, host, 2)] for host in hosts] == [["2"], ["2"], ["0", "1"]]


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_each_element_is_kept_once_and_by_a_process_that_has_it(arrays):
    load: dict[int, int] = {}
    for size, first, is_sharded in arrays:
        devices = np.array(jax.devices()).reshape(-1, size)
        mesh = mpmd.MpmdMesh.from_groups([Mesh(row, ("x",)) for row in devices])
        groups = {0, first % mesh.num_groups}
        sharding = mpmd.MpmdSharding(mesh, groups, PartitionSpec("x") if is_sharded else PartitionSpec())
        owners = layout.owners(sharding, (8, 3), 4, load)
        assert sum(box.size for box in owners) == 24
        assert not [1 for a in owners for b in owners if a != b and (a & b).size]
        cells = held_cells(sharding, (8, 3))[1]
        assert all(owner in cells[box] for box, owner in owners.items())
    assert sum(load.values()) == 24 * 4 * len(arrays)


def test_processes_that_have_the_same_keep_equally_much(monkeypatch):
    cells = {Box((0,), (4,)): (0, 1, 2)}
    monkeypatch.setattr(layout, "held_cells", lambda sharding, shape: ((4,), cells))
    load: dict[int, int] = {}
    assert [next(iter(layout.owners(None, (4,), 4, load).values())) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_loop_over_lists_of_microbatches_comes_back_with_the_same_bits(keeper, monkeypatch, capfd):
    def train(params, microbatches):
        def loss(params, x):
            return jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1], x)

        grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), microbatches, "1f1b")
        return [p - 0.01 * g for p, g in zip(params, grads, strict=True)]

    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("stage", "data")), "stage")
    step, rng = mpmd.jit(train, mpmd_mesh=mesh, donate_argnums=0), np.random.default_rng(0)
    rows = [(2, 3, 2), (3, 2), (4, 2, 3, 4), (3, 3, 2)]
    batches = [[rng.normal(size=(n, 4)).astype(np.float32) for n in of] for of in rows]

    def body(i, params):
        return step(params, batches[i])

    def start():
        return step([np.eye(4, dtype=np.float32)] * 2, batches[0])

    expected = start()
    for i in range(4):
        expected = body(i, expected)
    with pytest.raises(LossError):
        again(monkeypatch, until(2, body), start(), 4, attempt=0)
    found = again(monkeypatch, body, start(), 4)
    assert "goes on after step 1, from memory" in capfd.readouterr().err
    same(mpmd.device_get(found), mpmd.device_get(expected))


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: ValueError("a body's own"), lambda e: OSError(5, str(e))])
def test_an_error_of_a_save_may_come_of_a_loss_that_is_heard_of_later(wrap):
    try:
        try:
            raise RankLostError("rank 1 was lost")
        except RankLostError as error:
            raise wrap(error) from error
    except Exception as error:
        found = error
    heard = iter([[], [], ["rank 1"], ["rank 1"]])

    class Late:
        activity = types.SimpleNamespace(goes_on=True)
        lost = property(lambda self: next(heard))

    assert Job.has_lost(Late(), found)


def test_what_a_lost_process_has_said_last_does_not_count_for_a_spare_that_comes_after_it(monkeypatch, tmp_path):
    """Two losses in quick succession: rank 1 is gone, and its spare has said nothing yet."""

    class Store(dict):
        key_value_try_get = dict.__getitem__

        def key_value_dir_get(self, folder):
            return [(key, self[key]) for key in self if key.startswith(folder)]

        def key_value_set(self, key, text, allow_overwrite=False):
            self[key] = text

    monkeypatch.setattr(Watchdog, "start", lambda self: None)
    monkeypatch.setattr(atexit, "register", lambda *arguments: None)
    monkeypatch.setattr(compat, "forget_collectives", lambda: None)
    (tmp_path / "taken").write_text("0 2\n1 3\n")
    gone = Board(1, machine=processes.machine(), pid=2**22, started=1, phase="step")
    store = Store({"mpmd/board/1": json.dumps({"beat": 7, "board": gone.to_json()})})
    job = Job(store, None, {"MPMD_NUM_SPARES": "1", "MPMD_SPARE": "2", "MPMD_STATUS_DIR": str(tmp_path)})
    job.watchdog.boards.read()
    assert set(job.watchdog.boards.views()) == {0}
    store["mpmd/board/3"] = json.dumps({"beat": 0, "board": gone.to_json()})  # the next process says something
    job.watchdog.boards.read()
    assert set(job.watchdog.boards.views()) == {0, 1}
    job.end_process = ended = Mock()  # of a process that stops while all meet again
    job.go_on()
    assert job.epoch == 2 and job.end_process is ended
    job.calls.stop(5)


def test_nobody_waits_for_the_end_of_a_save_whose_process_was_lost(monkeypatch):
    nothing = jax.errors.JaxRuntimeError("NOT_FOUND: KEY")
    store = Mock(blocking_key_value_get=Mock(side_effect=nothing), key_value_try_get=Mock(side_effect=nothing))
    monkeypatch.setattr(meeting, "store", lambda: store)
    with pytest.raises(TimeoutError, match=r"^save: another process has not said KEY after 0 s$"):
        meeting.meetings.find("KEY", 0)
    monkeypatch.setattr(joining, "_job", Mock(check=Mock(side_effect=RankLostError)))
    with pytest.raises(RankLostError):
        meeting.meetings.find("KEY", 60)


def test_an_error_of_the_body_is_no_loss():
    begun = time.monotonic()
    assert not Job.has_lost(types.SimpleNamespace(activity=types.SimpleNamespace(goes_on=True), lost=[]), ValueError())
    assert time.monotonic() - begun < 1


def test_a_rank_that_is_lost_again_and_again_has_all_start_over_unless_the_loop_gets_further():
    losses = loop._Losses()
    for step in (4, 4, 5, 5, 5, 6):
        losses.note([1, 2])
        losses.goes_on_after(step)
    losses.note([1])
    losses.note([2, 1])
    losses.note([1])
    with pytest.raises(mpmd.HangError, match=r"rank 1 was lost 4 times after step 6; the job starts over\.$"):
        losses.note([0, 1])
