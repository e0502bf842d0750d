"""Streams in one process, where both roles are: any layout to any layout, whole versions, and clear errors."""

import functools
import gc
import json
import re
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ports import free_port
from test_reshard_properties import DTYPES, SHAPES, put, shardings

import mpmd
import reshard
from mpmd.errors import ReshardError
from mpmd.resilience import keeper
from reshard.checkpoint import TensorFormat
from reshard.streams import publishing, receiving, serving
from reshard.streams.sending import Sender
from reshard.streams.serving import FarShelf, ShelfServer
from reshard.streams.shelf import Shelf, Shelved

PAGE = Path(__file__).parent.parent.parent / "docs" / "streams.md"
MESH = mpmd.MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
PLAIN = jax.make_mesh((2, 4), ("x", "y"))
STAGES = [mpmd.MpmdSharding(MESH, {i}, P("data")) for i in range(4)]


def there(*spec):
    return NamedSharding(PLAIN, P(*spec))


@st.composite
def cases(draw):
    shape = draw(st.sampled_from(SHAPES))
    source, target = draw(shardings(shape)), draw(shardings(shape))
    assume(not any(isinstance(s, reshard.HostMemory) for s in (source, target)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    return shape, dtype, draw(st.sampled_from([dtype, dtype, ml_dtypes.bfloat16])), source, target


def check_layouts(case, threshold):
    shape, dtype, wanted, source, target = case
    if wanted != dtype and not (jnp.issubdtype(dtype, jnp.floating)):
        wanted = dtype
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    like = jax.ShapeDtypeStruct(shape, wanted, sharding=target)
    stream = reshard.stream({"x": source}, {"x": like}, threshold=threshold)
    x = put(value, source)
    stream.send({"x": x}, version=7)
    x.delete()
    tree, version = stream.receive()
    y = tree["x"]
    assert version == 7 and y.dtype == wanted
    assert y.sharding == target if not isinstance(y, mpmd.MpmdArray) else y.mpmd_sharding == target
    assert np.array_equal(np.asarray(mpmd.device_get(y)), value.astype(wanted))


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def test_senders_that_leave_a_part_of_a_tensor_out_are_told():
    """As where each has another sharding of its own: half of the rows are nobody's."""
    leaf = ["w", "shared", [4], "float32", ""]
    told = [json.dumps({"tree": None, "leaves": [leaf], "given": [[0, [0], [2]]]}) for _ in range(2)]
    here = {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    with pytest.raises(ReshardError, match=r"no sender gives a part of tensor 0, .*: the senders' shardings differ"):
        receiving._ReceivePlan(told, None, here, None, 1 << 20)


@settings(relaxed, max_examples=20)
@given(cases(), st.sampled_from([None, 9, 100]))
def test_any_layout_arrives_in_any_other(case, threshold):
    check_layouts(case, threshold)


@pytest.mark.exhaustive
@settings(relaxed, max_examples=1000)
@given(cases(), st.sampled_from([None, 9, 100]))
def test_any_layout_arrives_in_any_other_many_more_times(case, threshold):
    check_layouts(case, threshold)


def weights(scale=1.0):
    value = {f"w{i}": scale * np.arange(32.0).reshape(8, 4) for i in range(4)}
    return {name: put(v.astype(np.float32), STAGES[i]) for i, (name, v) in enumerate(value.items())}


SOURCES = {f"w{i}": STAGES[i] for i in range(4)}


def test_a_receiver_skips_to_the_newest_version_and_gets_it_once():
    stream = reshard.stream(SOURCES, there("x"))
    assert stream.receive(wait=False) is None
    for version in (2, 3, 9):
        stream.send(weights(version), version=version)
    stream._sender._wait_until_idle()
    tree, version = stream.receive()
    assert version == 9
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(mpmd.device_get(a), b), weights(9.0), tree))
    assert stream.receive(wait=False) is None
    assert stream.bytes_sent == stream.bytes_received == 0  # between processes


def test_a_version_that_is_read_stays_while_newer_ones_are_sent():
    stream = reshard.stream(SOURCES, there("x"))
    shelf = stream._sender.shelf
    stream.send(weights(0.0), version=0)
    stream._sender._wait_until_idle()
    held = shelf.hold(0)
    for version in range(1, 8):
        stream.send(weights(version), version=version)
        assert len(shelf._versions) <= 3
    stream._sender._wait_until_idle()
    assert not held.read(1, held.values[1][0][0], np.dtype(np.float32)).any()
    assert set(shelf._versions) == {0, 7}
    shelf.release(0)
    assert set(shelf._versions) == {7}


def test_the_next_step_may_be_donated_what_was_sent():
    @mpmd.jit(mpmd_mesh=MESH, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda w: w + 1, state)

    stream, state = reshard.stream(SOURCES, there()), weights(0.0)
    for version in range(5):
        stream.send(state, version=version)
        state = step(state)
        tree, got = stream.receive()
        assert got == version and all((np.asarray(w) == version).all() for w in tree.values())


def test_a_tree_with_other_names_is_not_taken_for_the_one_before():
    stream = reshard.stream(STAGES[0], there("x"))
    one, two = (put(np.full((8, 4), i, np.float32), STAGES[0]) for i in (1, 2))
    stream.send({"a": one, "b": two}, version=0)
    stream.receive()
    stream.send({"a": two, "c": one}, version=1)
    tree, _ = stream.receive()
    assert {name: int(np.asarray(x)[0, 0]) for name, x in tree.items()} == {"a": 2, "c": 1}
    stream.close()
    assert said(lambda: stream.send({"a": two, "c": one}, version=2)) == "stream: it has been closed."
    assert said(stream.receive) == "stream: it has been closed by its sender." and stream.receive(wait=False) is None


def test_names_that_differ_in_dots_and_slashes_alone_are_told_apart():
    one, two = (put(np.full((8, 4), i, np.float32), STAGES[0]) for i in (1, 2))
    targets = {"a.b": there(), "a": {"b": there()}}
    for to in (there("x"), targets):
        stream = reshard.stream(STAGES[0], to)
        stream.send({"a.b": one, "a": {"b": two}}, version=0)
        tree, _ = stream.receive()
        assert (np.asarray(tree["a.b"])[0, 0], np.asarray(tree["a"]["b"])[0, 0]) == (1, 2)


def test_keys_with_percent_signs_are_names_of_their_own():
    one, two = (put(np.full((8, 4), i, np.float32), STAGES[0]) for i in (1, 2))
    stream = reshard.stream(STAGES[0], there("x"))
    stream.send({"a/b": one, "a%2Fb": two}, version=0)
    tree, _ = stream.receive()
    assert {name: int(np.asarray(x)[0, 0]) for name, x in tree.items()} == {"a/b": 1, "a%2Fb": 2}
    error = said(lambda: stream.send({"": one, ".": two}, version=1))
    assert error == "stream: two tensors of the tree are named '.'; rename one of them."


def test_a_stream_that_nobody_keeps_ends_its_thread_after_its_last_version():
    stream = reshard.stream(SOURCES, there("x"))
    idle = stream._sender._idle
    shelf = weakref.ref(stream._sender.shelf)
    stream.send(weights(1.0), version=0)
    del stream
    assert idle.wait(20)
    gc.collect()
    end = time.monotonic() + 20
    while shelf() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert shelf() is None


def test_keys_and_their_target_shardings():
    source = mpmd.MpmdSharding(MESH, {1, 2})
    keys = jax.random.split(jax.random.key(3), 4)
    stream = reshard.stream(source, there("x"))
    stream.send([reshard.spmd_to_mpmd_reshard(MESH, keys, source, donate=False)], version=0)
    ([received], _) = stream.receive()
    assert received.dtype == keys.dtype and np.array_equal(jax.random.key_data(received), jax.random.key_data(keys))


NAMES = {
    "stack": ["blocks"],
    "rules": [
        {"tensor": "layers.{layer}.w", "array": "blocks/{layer}/kernel", "axes": "out in -> in out"},
        {"tensor": "emb", "array": "embed"},
    ],
}


def test_layers_of_stages_are_stacked_and_transposed_on_the_way_and_back():
    random = np.random.default_rng(0)
    layers = [random.normal(size=(8, 4)).astype(np.float32) for _ in range(4)]
    embed = random.normal(size=(8, 2)).astype(np.float32)
    apart = {"layers": [{"w": sharding} for sharding in STAGES], "emb": mpmd.MpmdSharding(MESH, {0, 3})}
    values = {"layers": [{"w": w} for w in layers], "emb": embed}
    kernel = jax.ShapeDtypeStruct((4, 4, 8), jnp.bfloat16, sharding=there("x", None, "y"))
    stream = reshard.stream(apart, {"blocks": {"kernel": kernel}, "embed": there("x")}, names=NAMES, threshold=64)
    stream.send(reshard.spmd_to_mpmd_reshard(MESH, values, apart), version=0)
    tree, _ = stream.receive()
    stacked = np.stack([w.T for w in layers])
    assert np.array_equal(tree["blocks"]["kernel"], stacked.astype(jnp.bfloat16))
    assert np.array_equal(tree["embed"], embed)

    split = mpmd.MpmdSharding(MESH, range(4), P("stage", None, "data"))
    together = {"blocks": {"kernel": split}, "embed": mpmd.MpmdSharding(MESH, {0})}
    back = reshard.stream(
        together, {"emb": there(), **{f"layers.{i}.w": there("y", "x") for i in range(4)}}, names=NAMES
    )
    values = {"blocks": {"kernel": stacked}, "embed": embed}
    back.send(reshard.spmd_to_mpmd_reshard(MESH, values, together), version=0)
    tree, _ = back.receive()
    assert all(np.array_equal(tree[f"layers.{i}.w"], w) for i, w in enumerate(layers))


def said(function):
    with pytest.raises(ReshardError) as error:
        function()
    return str(error.value)


def test_what_cannot_be_sent_or_received_is_said():
    stream = reshard.stream(SOURCES, {"w0": there(), "other": jax.ShapeDtypeStruct((8,), "float32", sharding=there())})
    tree = weights()
    assert said(lambda: stream.send(tree, version=-1)) == "stream: version=-1 is not a whole number of 0 or more."
    moved = {**tree, "w1": tree["w0"], "w2": np.ones((8, 4))}
    group_0, group_1 = (f"MpmdSharding(group {i} of 4, P('data',))" for i in range(2))
    assert said(lambda: stream.send(moved, version=0)).splitlines()[:2] == [
        "stream: the tree does not fit:",
        f"  ['w1']: is in {group_0}, but the source sharding is {group_1}",
    ]
    stream.send(tree, version=np.int64(4))
    assert said(lambda: stream.send(tree, version=4)) == "stream: version 4 after version 4; each must be larger."
    tree["w3"].delete()
    assert said(lambda: stream.send(tree, version=5)) == "stream: the tree does not fit:\n  ['w3']: has been deleted"
    assert "nobody sends other" in said(stream.receive) and "there is no place for w1" in said(stream.receive)
    as_int = {name: jax.ShapeDtypeStruct((8, 4), "int32", sharding=there()) for name in SOURCES}
    stream = reshard.stream(SOURCES, as_int)
    stream.send(weights(), version=0)
    assert "w0: its dtype is float32, but the target has int32: only floats are cast, to floats" in said(stream.receive)
    narrow = {name: jax.ShapeDtypeStruct((8, 4), "float16", sharding=there()) for name in SOURCES}
    stream = reshard.stream(SOURCES, narrow)
    stream.send(weights(1e4), version=0)
    assert re.fullmatch(r"stream: w0: \d+ values of float32 are too large for float16\.", said(stream.receive))
    stream = reshard.stream(STAGES[0], there())
    stream.send({0: weights()["w0"]}, version=0)
    assert "there is no place for 0" in said(stream.receive)
    assert said(stream.receive).endswith("cannot be sent: give target_shardings for the whole tree.")
    stream = reshard.stream(STAGES[0], there(), names=NAMES)
    stream.send({"blocks": {"kernel": weights()["w0"]}, "more": weights()["w0"]}, version=0)
    assert "The other way round: mapping names does not fit" in said(stream.receive)
    assert said(lambda: reshard.stream(SOURCES, reshard.HostMemory())) == (
        "stream: target_shardings has HostMemory(process 0), which is a HostMemory, not a sharding."
    )


def test_what_was_damaged_on_the_way_is_an_error_and_strangers_are_dropped(monkeypatch):
    server, shelf = ShelfServer("127.0.0.1", 0, "secret"), Shelf()
    server.serve("x", shelf)
    box = serving.Box((0,), (4,))
    shelf.put(Shelved(1, "{}", {0: [(box, np.arange(4.0))]}))
    far = FarShelf(server.address, "x", "secret")
    assert far.versions(-1, 0) == [1] and far.hold(1) == "{}"
    part, into = serving.SentPart(0, 0, box, np.dtype(np.float32), 0, box, box, None), np.zeros(4, np.float32)
    far.read([(part, into)])
    assert far.bytes_received == 16 and np.array_equal(into, np.arange(4))
    with pytest.raises(ReshardError, match=r"^t: 1 values of float64 are too large for float16\.$"):
        shelf.put(Shelved(2, '{"leaves": [["t"]]}', {0: [(box, np.arange(4.0) * 3e4)]}))
        far.hold(2)
        far.read([(part._replace(dtype=np.dtype(np.float16)), into.astype(np.float16))])
    far = FarShelf(server.address, "x", "secret")
    far.hold(1)
    monkeypatch.setattr(far, "_about", far._about + 1)
    with pytest.raises(OSError, match="damaged on the way"):  # the right bytes, of another version
        far.read([(part, into)])
    monkeypatch.undo()
    exactly = serving.keeper.exactly

    def flip(connection, into):
        exactly(connection, into)
        if isinstance(into, np.ndarray):  # not a header
            into[3] ^= 1
        return into

    monkeypatch.setattr(serving.keeper, "exactly", flip)
    with pytest.raises(OSError, match="damaged on the way"):
        far.read([(part, into)])
    monkeypatch.undo()
    for message in (bytes(64), b"GET / HTTP/1.1\r\n\r\n" * 4, secrets.token_bytes(4096)):  # of strangers
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(message)
    far.read([(part, into)])
    shelf.close()
    with pytest.raises(ReshardError, match=r"^it has been closed by its sender\.$"):
        far.versions(2, 1.0)
    far.close()
    server.close()
    with pytest.raises(OSError, match="the token is another one"):
        FarShelf(ShelfServer("127.0.0.1", 0, "secret").address, None, "guess")


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 16384, 16387, (1 << 20) - 1, 1 << 20, 2 * (1 << 20) + 16384 + 5])
def test_a_checksum_differs_if_any_bit_does(nbytes):
    random = np.random.default_rng(nbytes)
    data = random.integers(0, 256, nbytes + 1, np.uint8)[1:]  # words need not be aligned
    sum = serving._checksum(data, 3)
    assert sum == serving._checksum(data.copy(), 3) and (sum != serving._checksum(data, 4))
    for i in {0, nbytes - 1, *random.integers(0, nbytes, 20)} if nbytes else ():
        bit = np.uint8(1 << random.integers(8))
        data[i] ^= bit
        assert serving._checksum(data, 3) != sum, i
        data[i] ^= bit
    assert serving._checksum(data, 3) == sum


def test_a_subscriber_gets_what_is_published_by_its_name():
    address = f"127.0.0.1:{free_port()}"
    like = {name: jax.ShapeDtypeStruct((8, 4), jnp.bfloat16) for name in SOURCES}
    policy = reshard.subscribe(f"{address}/policy", like, there("x"), token="secret")
    assert said(policy.receive) == f"subscribe: {address}/policy: Connection refused"
    for version in (3, 5):
        reshard.publish("policy", weights(version), version, address=address, token="secret")
    reshard.publish("value", [weights()["w0"]], 1, address=address, token="secret")
    tree, version = policy.receive()
    while version < 5:
        tree, version = policy.receive()
    assert all(w.dtype == jnp.bfloat16 and w.sharding == there("x") for w in tree.values())
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(mpmd.device_get(a), b), weights(5.0), tree))
    assert policy.receive(wait=False) is None
    ((w,), _) = reshard.subscribe(f"{address}/value", [like["w0"]], there(), token="secret").receive()
    assert np.array_equal(w, mpmd.device_get(weights()["w0"]).astype(jnp.bfloat16))
    two = reshard.subscribe(address, like, there(), token="secret")
    text = "policy and value is published there; ask for one of them"
    assert said(two.receive) == f"subscribe: {address}: {text}, as {address}/NAME"
    wrong = reshard.subscribe(f"{address}/policy", like, there(), token="guess")
    assert said(wrong.receive).endswith("the token is another one than the publisher's")
    assert said(lambda: reshard.publish("more", weights(), 0, address=address, token="guess")) == (
        f"publish: {address} was opened with another token."
    )


def test_a_tree_that_cannot_be_published_opens_nothing():
    address = f"127.0.0.1:{free_port()}"
    publish = functools.partial(reshard.publish, address=address, token="secret")
    text = "publish: policy: the tree does not fit:\n  ['w']: is a ndarray, not an array on devices"
    assert said(lambda: publish("policy", {"w": np.ones(4)}, 0)) == text
    assert said(lambda: publish("policy", {}, 0)) == "publish: policy: the tree has no arrays."
    assert said(lambda: publish("policy", weights(), -1)).endswith("is not a whole number of 0 or more.")
    like = {name: jax.ShapeDtypeStruct((8, 4), jnp.float32) for name in SOURCES}
    policy = reshard.subscribe(address, like, there(), token="secret")
    assert said(policy.receive).endswith("Connection refused")
    publish("value", weights(), 0)
    assert policy.receive()[1] == 0


def test_a_subscriber_follows_a_publisher_that_begins_anew_after_a_loss(monkeypatch):
    """A process that replaces a lost one does not know the sender of the others: all make a new one."""
    address = f"127.0.0.1:{free_port()}"
    publish = functools.partial(reshard.publish, "policy", address=address, token="secret")
    like = {name: jax.ShapeDtypeStruct((8, 4), jnp.float32) for name in SOURCES}
    polls, waits = (reshard.subscribe(address, like, there(), token="secret") for _ in range(2))
    publish(weights(5.0), 5)
    assert polls.receive()[1] == waits.receive()[1] == 5
    old = publishing._published[address][1]["policy"]
    with monkeypatch.context() as patch:
        patch.setattr(Sender, "is_current", property(lambda sender: sender is not old))
        publish(weights(3.0), 3)
    publishing._published[address][1]["policy"]._wait_until_idle()
    for policy, wait in ((polls, False), (waits, True)):
        assert said(lambda policy=policy, wait=wait: policy.receive(wait=wait)).endswith("closed by its sender.")
        found = policy.receive(wait=wait)
        assert found is not None
        tree, version = found
        assert version == 3 and np.array_equal(mpmd.device_get(tree["w0"]), mpmd.device_get(weights(3.0)["w0"]))
    assert not old.shelf._versions


def test_after_an_interrupt_a_subscriber_receives_again(monkeypatch):
    def interrupted(connection):
        raise KeyboardInterrupt

    address = f"127.0.0.1:{free_port()}"
    reshard.publish("policy", weights(), 0, address=address, token="secret")
    like = {name: jax.ShapeDtypeStruct((8, 4), jnp.float32) for name in SOURCES}
    policy = reshard.subscribe(address, like, there(), token="secret")
    assert policy.receive()[1] == 0
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(keeper, "answer", interrupted)  # as Ctrl-C while the answer is on its way
        policy.receive()
    reshard.publish("policy", weights(2.0), 1, address=address, token="secret")
    tree, version = policy.receive()
    assert version == 1 and np.array_equal(mpmd.device_get(tree["w0"]), mpmd.device_get(weights(2.0)["w0"]))


def test_a_publisher_of_another_version_is_told_apart():
    """Versions before this one said no format, and had other checksums."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def older():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(32))
                keeper.exactly(connection, bytearray(32))
                keeper.send(connection, {"run": "0", "names": ["policy"]})
                connection.recv(1)

        thread = threading.Thread(target=older)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        like = {"w0": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        stream = reshard.subscribe(address, like, there(), token="secret")
        assert said(stream.receive).endswith("another version of jax-mpmd: publish and subscribe with the same one")
        thread.join()


@pytest.mark.slow
def test_the_programs_of_the_page_run(capsys, tmp_path):
    roles, program, publish, subscribe, lost, folders = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    names = {
        "jax": jax,
        "mpmd": mpmd,
        "train_step": lambda state: state + 1,
        "sampling_step": lambda params: 2 * params,
    }
    exec(roles, names)
    assert float(names["learn"](1.0)) == 2.0 and float(names["sample"](1.0)) == 2.0
    names = {}
    exec(program, names)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [f"version {i}" for i in range(20)]
    names["token"], address = "secret", f"127.0.0.1:{free_port()}"
    for block in (publish, subscribe, lost):
        if block is lost:
            names["policy"]._connect = lambda: [FarShelf("127.0.0.1:1", None, "secret")]
            names["policy"].close()
        exec(block.replace("10.0.0.3:5000", address), names)
    assert names["weights"]["first"].dtype == jnp.bfloat16 and names["version"] == 19
    assert capsys.readouterr().out == f"subscribe: {address}: Connection refused\n"
    exec(folders, names)
    assert [names["write_version"](tmp_path, names["params"], TensorFormat()) for _ in range(4)] == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3", "latest"}
    assert (tmp_path / "latest").readlink() == Path("3")
    saved = reshard.restore(tmp_path / "latest", jax.tree.map(np.asarray, jax.device_get(names["weights"])))
    assert np.array_equal(saved["first"].astype(jnp.bfloat16), names["weights"]["first"])


@pytest.mark.parametrize(
    ("address", "token", "text"),
    [
        ("127.0.0.1:5000", "", "there is no token: give a secret that both sides know"),
        ("0.0.0.0:5000", "secret", "expected host:port with the interface of one host"),
        ("5000", "secret", "expected host:port with the interface of one host"),
    ],
)
def test_there_is_no_publishing_without_a_token_or_an_interface(address, token, text):
    assert text in said(lambda: reshard.publish("w", weights(), 0, address=address, token=token))
    assert text in said(lambda: reshard.subscribe(address, {}, {}, token=token))
