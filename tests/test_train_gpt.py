"""The example trains: its parts are what they say, and the script as a user starts it agrees with plain `jax.jit`."""

import dataclasses
import gc
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from scheduler import OneFOneB
from scheduler.schedules import catalogue

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_gpt  # noqa: E402  (found by the line above)

TINY = train_gpt.GPT(num_layers=4, d_model=32, head_size=16, num_stages=4)
TINY_RUN = "--d-model 32 --seq-len 16 --batch 8 --microbatches 4 --steps 6".split()


def run_example(*options: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *TINY_RUN, *options]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


def test_a_batch_follows_from_the_seed_and_the_step_alone():
    text = np.arange(200, dtype=np.uint8)
    batch = train_gpt.batch_at(text, seed=3, step=5, rows=4, length=9)
    assert batch.shape == (4, 9)
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(9))
    np.testing.assert_array_equal(batch, train_gpt.batch_at(text, seed=3, step=5, rows=4, length=9))
    assert not np.array_equal(batch, train_gpt.batch_at(text, seed=3, step=6, rows=4, length=9))
    assert not np.array_equal(batch, train_gpt.batch_at(text, seed=4, step=5, rows=4, length=9))


def test_rotary_scores_depend_on_the_distance_of_two_positions_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 16))
    rows = [train_gpt.rotary(jnp.broadcast_to(x, (1, 8, 1, 16)))[0, :, 0] for x in (q, k)]
    scores = np.asarray(rows[0] @ rows[1].T)
    for distance in range(8):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_prediction_reads_no_later_byte():
    params = jax.jit(TINY.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 12), 0, 256)
    changed = tokens.at[0, 7].set((tokens[0, 7] + 1) % 256)
    before, after = (np.asarray(jax.jit(TINY.logits)(params, t)[0]) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:7], after[:7])
    assert np.abs(before[7:] - after[7:]).max(axis=-1).min() > 0


@pytest.mark.slow
def test_untrained_predictions_are_near_uniform():
    params = jax.jit(TINY.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 33), 0, 256)
    assert abs(float(jax.jit(TINY.loss)(params, tokens)) - np.log(256)) < 0.2


def test_dropout_keeps_the_mean_and_drops_the_share_it_was_told():
    x = jnp.ones(100_000)
    dropped = np.asarray(train_gpt.dropout(x, 0.25, jax.random.key(0)))
    assert abs((dropped == 0).mean() - 0.25) < 0.01
    assert abs(dropped.mean() - 1) < 0.01
    assert train_gpt.dropout(x, 0.25, None) is x


@pytest.mark.parametrize("name", catalogue.SCHEDULES)
def test_every_schedule_can_be_asked_for(name):
    args = train_gpt.parse_args(["--schedule", name, "--stages", "4", "--layers", "4", "--microbatches", "8"])
    assert args.schedule == name


def test_groups_share_devices_where_there_are_too_few():
    mesh = train_gpt.make_mesh(num_groups=8, data_parallel=2)
    devices = [group.devices.flatten().tolist() for group in mesh.groups]
    assert [len(group) for group in devices] == [2] * 8
    assert devices[0] == devices[1] != devices[2]
    assert {device for group in devices for device in group} == set(jax.devices())


@pytest.mark.exhaustive
def test_a_step_on_groups_that_share_devices_agrees_with_plain_jit():
    model = dataclasses.replace(TINY, num_layers=2, num_stages=2)
    mesh = train_gpt.make_mesh(num_groups=2, data_parallel=8)
    assert mesh.groups[0] == mesh.groups[1]
    optimizer = train_gpt.make_optimizer(1e-3, 10)
    train_step = train_gpt.make_step(model, optimizer, OneFOneB(2), num_microbatches=2)
    state = jax.jit(train_gpt.make_init(model, optimizer))(jax.random.key(0))
    step, reference = mpmd.jit(train_step, mpmd_mesh=mesh), jax.jit(train_step)
    pipelined = state
    for index in range(3):
        tokens = train_gpt.batch_at(np.arange(200, dtype=np.uint8), seed=0, step=index, rows=8, length=9)
        pipelined, metrics = step(pipelined, tokens)
        state, expected = reference(state, tokens)
        np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=2e-5)
    assert max(train_gpt.relative_differences(pipelined, state).values()) < 2e-5


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--groups 2", "--schedule 1f1b has one stage a group; num_stages is 4 and num_groups 2."),
        ("--layers 2", "--layers 2 is fewer than --stages 4; each stage needs a layer"),
        ("--d-model 40", "--d-model 40 is not a multiple of 32"),
        ("--batch 10", "--batch 10 does not split into --microbatches 8"),
        ("--data-parallel 3", "a microbatch has 2 rows, which --data-parallel 3 does not divide"),
        ("--text no-such-book.txt", "--text no-such-book.txt is not a file"),
        ("--dropout 1", "--dropout 1.0 is not in [0, 1)"),
        ("--plot loss.pdf", "--plot loss.pdf ends in neither .svg nor .png"),
        (
            "--checkpoint-dir no-such-folder",
            "--checkpoint-dir under --restarts needs --resume, to go on from the checkpoints of the job itself",
        ),
        ("--check-against-jit", "--check-against-jit cannot follow a process that is lost; leave out --restarts"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_to_change(options, fault, capsys, monkeypatch):
    monkeypatch.setenv("MPMD_KEEPER", "as the launcher sets it with --restarts")
    with pytest.raises(SystemExit) as exit_:
        train_gpt.parse_args(options.split())
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2] == fault


def test_a_last_step_that_comes_again_is_not_saved_again_and_other_runs_are_refused(tmp_path):
    checkpoints = train_gpt.Checkpoints(str(tmp_path), every=4, keep=2)
    assert checkpoints.start(resume=False, steps=3) is None
    for _ in range(2):  # after the loss of a process in the last step
        checkpoints.save(3, {"w": jnp.ones(2)}, last=True)  # pyright: ignore[reportArgumentType]
    checkpoints.manager.wait_until_finished()
    assert checkpoints.start(resume=True, steps=3) == 3
    with pytest.raises(SystemExit, match="has checkpoints up to step 3: add --resume, or give another folder"):
        checkpoints.start(resume=False, steps=3)
    with pytest.raises(SystemExit, match="has a checkpoint after step 3: give more --steps than 2"):
        checkpoints.start(resume=True, steps=2)
    checkpoints.manager.close()


@pytest.mark.slow
def test_the_loss_of_a_step_is_let_go_when_it_was_read(monkeypatch, capsys):
    counts, show = [], train_gpt.Progress.show

    def counted(*arguments):
        gc.collect()
        counts.append(sum(isinstance(x, mpmd.MpmdArray) for x in gc.get_objects()))
        show(*arguments)

    monkeypatch.setattr(train_gpt.Progress, "show", counted)
    assert train_gpt.main([*TINY_RUN, "--stages", "2", "--layers", "2"]) == 0
    assert len(counts) == 6 and len(set(counts[1:5])) == 1, counts
    assert "step 6/6" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_trains_and_agrees_with_plain_jit(tmp_path):
    plot = tmp_path / "loss.svg"
    run = run_example("--layers", "4", "--check-against-jit", "--plot", str(plot))
    assert run.returncode == 0, run.stderr
    assert "in 4 stages on 4 groups of 1 cpu device(s); 1f1b, 4 microbatches" in run.stderr
    assert "step 6/6" in run.stderr
    assert "against plain jax.jit: losses differ by at most" in run.stderr
    assert run.stdout.startswith("def ")
    assert plot.read_text().rstrip().endswith("</svg>")


@pytest.mark.exhaustive
def test_the_script_trains_interleaved_on_groups_of_two_devices_with_dropout_and_text_of_its_own(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("All happy families are alike; each unhappy family is unhappy in its own way. " * 20)
    options = "--schedule interleaved-1f1b --data-parallel 2 --dropout 0.1 --check-against-jit"
    run = run_example(*options.split(), "--text", str(text))
    assert run.returncode == 0, run.stderr
    assert "in 4 stages on 2 groups of 2 cpu device(s); interleaved-1f1b, 4 microbatches" in run.stderr
    assert f"{text.stat().st_size:,} bytes of text" in run.stderr
