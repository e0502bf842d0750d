"""The examples do what they say. That the models of libraries equal plain JAX is in test_libraries."""

import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import slow_first

import mpmd

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("train_nnx", "flax"), ("train_equinox", "equinox")])
def test_an_example_trains(name, package, capsys):
    pytest.importorskip(package)
    losses = importlib.import_module(name).main(["--steps", "12"])
    assert losses[-1] < 0.8 * losses[0], losses
    assert capsys.readouterr().out.splitlines()[-1] == f"step   11  loss {losses[-1]:.4f}"


_SMALL = "--stages 2 --layers 2 --d-model 32".split()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("--stages 0", "--stages is 0; it must be at least 1"),
        ("--pages -5", "--pages is -5; it must be at least 1"),
        ("--layers 2", "--layers 2 is fewer than --stages 4; each stage needs a layer"),
        ("--d-model 33", "--d-model 33 is not a multiple of 32"),
    ],
)
def test_generate_refuses_what_cannot_be(options, fault, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("generate").parse_args(options.split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": error: {fault}")


@pytest.mark.parametrize("trained", slow_first("before", "here"))
def test_generate_writes_the_same_texts_one_at_a_time_and_in_flight(trained, tmp_path, capsys):
    pytest.importorskip("optax")
    if trained == "before":
        train = [
            *_SMALL,
            *"--steps 3 --batch 4 --microbatches 2 --seq-len 16".split(),
            "--checkpoint-dir",
            str(tmp_path),
        ]
        assert importlib.import_module("train_gpt").main(train) == 0
        capsys.readouterr()
    source = ["--steps", "2"] if trained == "here" else ["--checkpoint-dir", str(tmp_path)]
    status = importlib.import_module("generate").main(
        [*_SMALL, *source, *"--lanes 2 --rows 2 --texts 6 --length 5".split()]
    )
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert [line.partition(":")[0] for line in lines if line.endswith("tokens/s")] == [
        "one text at a time", "2 lanes of 2 rows"
    ]  # fmt: skip
    assert "the same texts" in lines
    assert sum(line.startswith("def ") for line in lines) == 4


@functools.partial(jax.jit, static_argnums=0)
def plain_byte(model, params, text, length, request):
    """The byte after the first `length` ones of a text, and its log-probability. The model reads the whole text."""
    logits = model.logits(params, text[None])[0, length - 1] / jnp.where(request.temperature, request.temperature, 1)
    key = jax.random.fold_in(jax.random.wrap_key_data(request.key), length)
    byte = jnp.where(request.temperature == 0, logits.argmax(), jax.random.categorical(key, logits))
    return byte, jax.nn.log_softmax(logits)[byte]


def plain_loop(model, params, request):
    """The text of a request, byte by byte and without caches."""
    text, log_probabilities = list(request.prompt), []
    arrays = request._replace(prompt=0, key=np.array(request.key, np.uint32))
    while len(log_probabilities) < request.length and text[-1:] != [request.stop]:
        window = np.array(text + [0] * (16 - len(text)), np.int32)
        byte, log_probability = jax.device_get(plain_byte(model, params, window, len(text), arrays))
        text.append(int(byte))
        log_probabilities.append(log_probability)
    return text[len(request.prompt) :], log_probabilities


@pytest.mark.slow
def test_a_text_of_the_sampler_is_the_plain_loops_whatever_is_in_flight_beside_it():
    pytest.importorskip("optax")
    generate, GPT = importlib.import_module("generate"), importlib.import_module("train_gpt").GPT
    model, traces = GPT(2, 32, num_stages=2), []
    rng, types = np.random.default_rng(0), jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), types)

    def make(jit, lanes):
        def counting(advance, **options):
            return jit(lambda *args: traces.append(args) or advance(*args), **options)

        return generate.Sampler(model, counting, lanes=lanes, rows=2, window=16, page_size=4, pages=6)

    requests = [
        generate.Request(bytes(range(65, 66 + i * 3 % 8)), 1 + i * 5 % 8, (7, i), 0.0 if i % 3 == 0 else 0.8)
        for i in range(11)
    ]
    stop = plain_loop(model, params, requests[4])[0][1]  # one that is not the last
    requests[4], requests[7] = requests[4]._replace(stop=stop), requests[7]._replace(stop=256)  # no byte
    plain = [plain_loop(model, params, request) for request in requests]
    assert len(plain[4][0]) == 2 < requests[4].length

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    alone, sampler = make(jax.jit, 1), make(functools.partial(mpmd.jit, mpmd_mesh=mesh), 2)
    together = sampler.start(params, requests)
    num_traces = len(traces)
    order = rng.permutation(11)
    shuffled = dict(zip(order, sampler.texts(params, [requests[i] for i in order]), strict=True))
    assert len(traces) == num_traces
    for i, text in enumerate(generate.on_host(together)):
        assert text.tokens.tolist() == plain[i][0]
        np.testing.assert_allclose(text.log_probabilities, plain[i][1], rtol=1e-5, atol=1e-6)
        for same in (shuffled[i], alone.texts(params, [requests[i]])[0]):
            np.testing.assert_array_equal(same, text)
    read = sum(len(request.prompt) + request.length - 1 for request in requests)
    assert len(together.steps) < 0.7 * read  # of at least a half: in most steps, both rows have a text

    with pytest.raises(ValueError) as refused:
        sampler.start(params, [requests[0], generate.Request(b"", 3), generate.Request(b"A" * 16, 1)])
    limits = "each must be at least 1, and both at most 16 together"
    assert str(refused.value) == (
        f"Sampler: request 1 has a prompt of 0 bytes and a length of 3; {limits}\n"
        f"  request 2 has a prompt of 16 bytes and a length of 1; {limits}"
    )
    small = generate.Sampler(model, jax.jit, lanes=1, rows=2, window=16, page_size=4, pages=2)
    with pytest.raises(ValueError, match=r"^Sampler: request 0 needs 4 pages; a lane has 2$"):
        small.start(params, [generate.Request(b"A" * 8, 8)])


@pytest.mark.slow
def test_answers_get_better_by_rewards_alone_with_the_numbers_of_jit(capsys):
    pytest.importorskip("optax")
    assert importlib.import_module("grpo").main(["--steps", "20", "--check-against-jit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rewards = [float(line.split("reward ")[1].split()[0]) for line in lines[:-1]]
    assert lines[-1] == "rewards and losses are those of jax.jit"
    first, *_, last = np.mean(np.reshape(rewards, (-1, 5)), axis=1)
    assert first < 0.15 and last > 1.3 * first, rewards
