"""examples/llama: the pipeline's losses are those of one device, and a run goes on elsewhere with the same losses."""

import contextlib
import csv
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import slow_first

import mpmd
import reshard
from mpmd.costs.collectives import collectives_of
from reshard.checkpoint import TensorFormat

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example():
    """The modules of the example, which lie beside each other and not in a package."""
    pytest.importorskip("grain")
    sys.path.insert(0, str(ROOT / "examples" / "llama"))
    try:
        yield importlib.import_module("train")
    finally:
        sys.path.remove(str(ROOT / "examples" / "llama"))
        for name in ("train", "model", "attention", "data", "buckets", "balance", "logs", "parallel", "context"):
            sys.modules.pop(name, None)


LAYERS = 4
FAMILIES = {
    "llama": {"rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    "qwen": {"qk_norm": True, "qkv_bias": True, "tied": True},
    "gemma": {
        "norm_plus_one": True, "post_norms": True, "scale_embedding": True, "tied": True, "activation": "gelu",
        "attention_cap": 50.0, "logit_cap": 30.0, "windows": (8, 0, 8, 0),
    },
    "mixtral": {"experts": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", "--groups 4 --schedule 1f1b", marks=pytest.mark.exhaustive),
        pytest.param("qwen", "--groups 2 --data 2 --schedule interleaved-1f1b", marks=pytest.mark.exhaustive),
        ("gemma", "--groups 2 --tensor 2 --schedule zb-h1 --muon"),
        pytest.param("mixtral", "--groups 2 --schedule 1f1b --lora 4", marks=pytest.mark.exhaustive),
        pytest.param("llama", "--groups 2 --schedule 1f1b --whole-rows", marks=pytest.mark.exhaustive),
        pytest.param("llama", "--groups 2 --schedule 1f1b --data 2 --context 2", marks=pytest.mark.exhaustive),
        pytest.param("gemma", "--groups 2 --schedule zb-h1 --context 4 --whole-rows", marks=pytest.mark.exhaustive),
    ],
)
def test_the_losses_are_those_of_one_device(example, family, options):
    options = example.parse([*options.split(), *"--microbatches 4 --batch 8 --length 32 --steps 20".split()])
    config = example.Config(
        width=64, hidden=96, layers=LAYERS, head_dim=16, dtype=jnp.float32, lora_rank=options.lora, **FAMILIES[family]
    )
    if "interleaved" not in options.schedule and options.groups < LAYERS:
        windows = config.all_windows[: options.groups]
        config = example.dataclasses.replace(config, layers=options.groups, windows=windows)
    batches = example.Batches([], example.tokenizer_of(None), options.batch, options.length, options.microbatches)
    mesh = example.make_mesh(options.groups, options.data, options.tensor, options.context)
    program = example.Program(config, options, mesh)
    abstract, batch = program.abstract()
    compiled = program.step.lower(abstract, batch).compile()
    make = example.mpmd.jit(program.init, mpmd_mesh=program.mesh, out_shardings=compiled.input_shardings[0][0])
    state, plain_state = make(jax.random.key(0)), program.init(jax.random.key(0))
    plain = jax.jit(program._step)
    for step in range(8):
        state, metrics = compiled(state, batches.placed(step, compiled.input_shardings[0][1]))
        plain_state, expected = plain(plain_state, {name: x for name, x in batches.at(step).items() if name in batch})
        np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=2e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), float(expected["grad_norm"]), rtol=1e-3)


def test_the_losses_of_documents_in_buckets_are_those_of_a_plain_loop(example, tmp_path):
    for i in range(60):
        (tmp_path / f"{i:02}.txt").write_text("to be or not to be, that is the question " * (i % 5) + str(i))
    options = "--groups 2 --data 2 --microbatches 4 --batch 8 --buckets 16,64 --eval-batches 1 --layers 2 --width 32"
    options = example.parse([*options.split(), "--text", str(tmp_path)])
    config = example.dataclasses.replace(example.config_of(options, example.tokenizer_of(None)), dtype=jnp.float32)
    program = example.Program(config, options, example.make_mesh(2, 2, 1))
    batches = example.batches_of(options, config, example.tokenizer_of(None))
    lowered = program.step.lower(*program.abstract())
    program.cuts = lowered.cuts
    compiled = lowered.compile()
    layout = example.batch_layout(compiled)
    state, plain_state = example.first_state(program, compiled.input_shardings[0][0]), program.init(jax.random.key(0))
    plain = jax.jit(program._step)
    for step in range(2):
        state, metrics = program.step(state, batches.placed(step, layout))
        plain_state, expected = plain(plain_state, batches.at(step))
        np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=2e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), float(expected["grad_norm"]), rtol=1e-3)
    expected = jax.jit(program._evaluate)(plain_state["params"], batches.at(0, held_out=True))
    found = program.held_out_loss(state["params"], batches, layout)
    np.testing.assert_allclose(found, float(expected), rtol=2e-5)


def test_devices_that_share_parameters_gather_them_and_sum_no_activations(example):
    options = example.parse("--groups 2 --data 2 --microbatches 2 --batch 8 --length 128".split())
    config = example.Config(width=64, hidden=96, layers=4, head_dim=16, dtype=jnp.float32)
    program = example.Program(config, options, example.make_mesh(2, 2, 1))
    compiled = program.step.lower(*program.abstract()).compile()
    activation = 4 // 2 * 128 * 64 * 4  # bytes of a device's rows
    for stage in range(2):
        found = collectives_of(compiled.as_text(stage=stage, kind="F"), 2)
        kinds = [c.kind for c in found if c.nbytes >= activation]
        assert "all-gather" in {c.kind for c in found} and "all-reduce" not in kinds, found
    memory = compiled.memory_analysis()[0]
    assert memory["gradients"] < 1.1 * memory["parameters"]  # each device adds up its own part


@pytest.mark.parametrize("rows", slow_first("--microbatches 2", "--microbatches 2 --whole-rows"))
def test_devices_that_divide_rows_send_keys_around_and_hold_no_row(example, rows):
    options = example.parse(f"--groups 1 --context 2 --batch 2 --length 480 {rows}".split())
    config = example.Config(width=64, hidden=96, layers=2, head_dim=16, dtype=jnp.float32)
    program = example.Program(config, options, example.make_mesh(1, 1, 1, 2))
    compiled = program.step.lower(*program.abstract()).compile()
    for kind in "FB":
        text = compiled.as_text(stage=0, kind=kind)
        assert {c.kind for c in collectives_of(text, 2) if c.nbytes > 4} == {"collective-permute"}  # and the loss
        assert not re.search(r"f32\[(\d+,)*480[,\]]", text)  # values of a row
        assert not re.search(r"\[(\d+,)*(240|480)(,\d+)*,(240|480)[,\]]", text)


def test_the_commands_of_the_page_have_options_that_exist(example):
    page = (ROOT / "docs/finetuning.md").read_text()
    commands = [line.split("train.py ")[1] for line in page.splitlines() if "python examples/llama/train.py" in line]
    assert len(commands) == 3
    for command in commands:
        example.parse(shlex.split(command, comments=True))


NOTING = """
import os, runpy, sys, zlib
sys.path.insert(0, {folder!r})
import data
file = open(os.environ["SEEN"] + os.environ["MPMD_PROCESS_ID"], "a")
placed, row = data.Batches.placed, data.Batches.row

def noted_placed(self, step, *about, **more):
    self.step = step + 1
    return placed(self, step, *about, **more)

def noted_row(self, number, held_out=False):
    found = row(self, number, held_out)
    print(self.step, number, zlib.crc32(b"".join(found[name].tobytes() for name in sorted(found))), file=file)
    return found

data.Batches.placed, data.Batches.row = noted_placed, noted_row
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_goes_on_in_fewer_processes_and_other_stages_with_the_same_losses_and_examples(tmp_path):
    """Two processes, of which a checkpoint of the middle is left, then one with two devices a group; two sources."""
    pytest.importorskip("grain")
    noting = tmp_path / "noting.py"
    noting.write_text(NOTING.format(folder=str(ROOT / "examples" / "llama")))
    for name, words in (("a", "to be or not to be, "), ("b", "the quality of mercy ")):
        (tmp_path / f"{name}.txt").write_text("".join(f"{i} {words}" for i in range(200)))

    def run(log: str, processes: int, devices: int, *options: str) -> tuple[dict[int, float], set[str]]:
        launcher = [ROOT / "scripts/launch_multihost.sh", "-n", str(processes), "--cpu-devices", str(devices), "--"]
        command = [sys.executable, noting, ROOT / "examples/llama/train.py", "--text", "a.txt=3", "b.txt"]
        small = "--layers 2 --width 64 --microbatches 4 --batch 8 --length 32 --steps 6 --eval-every 0"
        small += " --report-every 1 --save-every 3 --checkpoint-dir run"
        done = subprocess.run(
            [*launcher, *command, *small.split(), "--log", tmp_path / log, *options],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "SEEN": str(tmp_path / f"{log}-rows.")},
            cwd=tmp_path, text=True, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        rows = list(csv.DictReader((tmp_path / log / "metrics.csv").open()))
        losses = {int(row["step"]): float(row["loss"]) for row in rows}
        return losses, {line for file in tmp_path.glob(f"{log}-rows.*") for line in file.read_text().splitlines()}

    losses, seen = run("whole", 2, 1, "--groups", "2")
    assert len(seen) == 6 * 8
    shutil.rmtree(tmp_path / "run" / "6")  # as if the job had ended after step 3
    again, seen_again = run("resumed", 1, 4, *"--groups 2 --data 2 --schedule gpipe --generate to".split())
    assert sorted(again) == [4, 5, 6]
    for step, loss in again.items():
        assert loss == pytest.approx(losses[step], rel=2e-3)  # bfloat16, in other stages
    assert seen_again == {line for line in seen if int(line.split()[0]) > 3}


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        *[(f"--{name} 0", f"--{name} 0: give a number of at least 1") for name in ("batch", "length", "keep")],
        ("--eval-batches 0", "--eval-batches 0: give a number of at least 1"),
        *[(f"--{name} -1", f"--{name} -1: give a number of at least 0") for name in ("lora", "steps", "eval-every")],
        ("--lr -1", "--lr -1.0: give a positive number"),
        ("--lr nan", "--lr nan: give a positive number"),
        ("--experts 1", "--experts 1: each token goes to two experts; give 0 for none, or at least 2"),
        *[
            (f"--profile {x}", f"argument --profile: '{x}' is no A:B with 1 <= A <= B, such as 5:8")
            for x in ("3", "5:2", "0:2", "a:b")
        ],
        ("--cuts a", "argument --cuts: 'a' is no list of numbers such as 64,128,256"),
        (
            "--schedule dualpipe-v --microbatches 4 --batch 8",
            (
                "--schedule DualPipeV: num_microbatches is 4 and num_groups 4; the pairs need two microbatches a group."
                " Use at least 8."
            ),
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_compiles(example, options, fault, capsys):
    with pytest.raises(SystemExit) as exit_:
        example.parse(options.split())
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2] == fault


def test_the_step_that_is_planned_takes_any_schedule_and_number_of_microbatches(example, monkeypatch):
    for name, axis in example.RULES.items():
        monkeypatch.setitem(example.RULES, name, axis)  # so that they come back
    mesh = mpmd.MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
    _, (*_, batch) = example.plan(mesh, "dualpipe-v", 4)
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(batch)} == {(4, 2)}


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_of_a_text_that_is_not_positive_is_refused(example, weight):
    with pytest.raises(ValueError) as caught:
        example.Batches([f"{ROOT}/docs={weight}"], example.tokenizer_of(None), 2, 16, 1)
    assert str(caught.value) == f"--text {ROOT}/docs={weight}: the weight is {weight}; give a positive number"


def test_the_numbers_of_a_step_that_comes_again_replace_those_of_before(example, tmp_path):
    def rows() -> list[dict[str, str]]:
        with (tmp_path / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    to_csv = importlib.import_module("logs").to_csv
    write = to_csv(tmp_path / "metrics.csv")
    for step in (1, 2, 3, 4):
        write(step, {"loss": step} | ({"held_out_loss": 9} if step == 3 else {}))
    for step in (3, 4, 5):  # the writer of a process that was not lost
        write(step, {"loss": 10 * step})
    assert [(row["step"], row["loss"]) for row in rows()] == [*zip("12345", ("1", "2", "30", "40", "50"), strict=True)]
    to_csv(tmp_path / "metrics.csv")(4, {"loss": 7})
    assert [row["step"] for row in rows()] == [*"1234"]


def test_a_signal_after_the_last_step_stops_nothing(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example.Stop, "agreed", lambda self: True)
    (tmp_path / "text.txt").write_text("to be or not to be, " * 40)
    small = "--groups 1 --microbatches 1 --batch 2 --length 16 --layers 1 --width 32 --steps 1 --eval-every 0"
    assert example.run(example.parse([*small.split(), "--generate", "to be", "--text", f"{tmp_path}/text.txt"])) == 0
    assert capsys.readouterr().out.startswith("to be")


def test_what_a_user_can_mend_is_said_in_few_words(example, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    make_folder(tmp_path / "base")
    (tmp_path / "text.txt").write_text("to be or not to be, " * 40)
    small = f"--text {tmp_path}/text.txt --groups 1 --microbatches 1 --batch 2 --length 16 --steps 2 --eval-every 0"

    def said(change=lambda folder: None, *options: str) -> str:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(tmp_path / "base", tmp_path / "model")
        change(tmp_path / "model")
        with example.told(OSError, example.mpmd.ReshardError):
            assert example.run(example.parse([*small.split(), "--model", f"{tmp_path}/model", *options])) == 0
        return ""

    def message(*arguments) -> str:
        with pytest.raises(SystemExit) as caught:
            said(*arguments)
        return str(caught.value)

    def config(**changes):
        def change(folder):
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))

        return change

    assert "model_type is 'gpt2'" in message(config(model_type="gpt2"))
    assert "which this tokenizer does not have" in message(config(eos_token_id=128001))
    assert "it has made token 84, and config.json says vocab_size 80" in message(config(vocab_size=80, eos_token_id=7))
    assert "config.json is damaged, or no configuration" in message(lambda f: os.truncate(f / "config.json", 99))
    assert "tokenizer.json is damaged, or no tokenizer" in message(lambda f: os.truncate(f / "tokenizer.json", 99))
    assert "but no *.safetensors" in message(lambda f: (f / "model.safetensors").unlink())
    assert "it is cut off or too long" in message(lambda f: os.truncate(f / "model.safetensors", 9999))
    saved = ("--checkpoint-dir", str(tmp_path / "run"), "--save-every", "1")
    said(lambda folder: None, *saved)
    data = max((tmp_path / "run" / "2").rglob("d/*"), key=lambda file: file.stat().st_size)
    os.truncate(data, 100)
    found = message(lambda folder: None, *saved)
    assert "the checkpoint is damaged" in found and "then the same command goes on after step 1" in found


def make_folder(folder: Path) -> dict:
    """A small random Llama with a tokenizer whose words are letters; its tensors, as a tree."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code - 32 for code in range(32, 128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [], unk_token=" "))
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "rms_norm_eps": 1e-5}
    config |= sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 95, "head_dim": 16}
    width, hidden, kv = 32, 48, 16
    shapes = {"model.embed_tokens.weight": (96, width), "lm_head.weight": (96, width), "model.norm.weight": (width,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (m, width) for n, m in (("q", width), ("k", kv), ("v", kv))}
        shapes |= {f"{layer}self_attn.o_proj.weight": (width, width), f"{layer}mlp.down_proj.weight": (width, hidden)}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (hidden, width) for n in ("gate", "up")}
        shapes |= {f"{layer}{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    tree: dict = {}
    for name, shape in shapes.items():
        node, *path = tree, *name.split(".")
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = (jax.random.normal(keys[name], shape) / 6 + (len(shape) == 1)).astype(jnp.bfloat16)
    reshard.save(folder, tree, tensors=TensorFormat())
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tree


def ranks_in(folder: Path) -> list[int]:
    """The processes that run train.py there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            is_ours = b"python" in command[0] and any(b"train.py" in word for word in command)
            if is_ours and (process / "cwd").resolve() == folder.resolve():
                found.append(int(process.name))
    return found


def test_two_processes_fine_tune_a_folder_are_replaced_after_sigterm_and_sigkill_and_write_one(tmp_path):
    """LoRA, evaluated in the layout of the training."""
    pytest.importorskip("grain")
    base = make_folder(tmp_path / "base")
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text("to be or not to be, " * 40)
    launcher = [str(ROOT / "scripts/launch_multihost.sh"), "-n", "2", "--cpu-devices", "1", "--restarts", "1", "--"]
    options = "--model base --text text --lora 2 --lr 0.05 --groups 2 --microbatches 2 --batch 4 --length 16 --steps 40"
    options += " --report-every 1 --eval-every 4 --eval-batches 1 --log log --checkpoint-dir run --export tuned"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    job = subprocess.Popen(
        [*launcher, sys.executable, str(ROOT / "examples/llama/train.py"), *options.split()],
        env=environment | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert job.stderr is not None
    lines = []
    signals = {"[0] step 4/": signal.SIGTERM, "step 20/": signal.SIGKILL}
    for line in job.stderr:
        lines.append(line)
        for beginning in [beginning for beginning in signals if beginning in line]:
            os.kill(ranks_in(tmp_path)[0], signals.pop(beginning))
    assert job.wait(300) == 0, "".join(lines)[-3000:]
    text = "".join(lines)
    assert "was told to end (SIGTERM)" in text and "starts over" not in text
    assert re.findall(r"killed by (SIG\w+); spare (\d) is started", text) == [("SIGTERM", "2"), ("SIGKILL", "3")]
    rows = list(csv.DictReader((tmp_path / "log/metrics.csv").open()))
    losses = {int(row["step"]): float(row["held_out_loss"]) for row in rows if row["held_out_loss"]}
    assert losses[40] < losses[4]
    tuned = reshard.restore(tmp_path / "tuned", jax.eval_shape(lambda: base))
    changed = {
        jax.tree_util.keystr(path)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(base), jax.tree.leaves(tuned), strict=True)
        if (np.asarray(x) != np.asarray(y)).any()
    }
    assert changed == {f"['model']['layers']['{i}']['self_attn']['q_proj']['weight']" for i in range(2)}


CHOOSING = """
import os, sys
words = sys.argv[1:]
if os.environ["MPMD_PROCESS_ID"] == "1":
    words = [word + "-of-1" if os.path.exists(word + "-of-1") else word for word in words]
os.execv(sys.executable, [sys.executable, *words])
"""


def test_processes_that_see_other_files_do_not_train(tmp_path):
    """Each would take its part of a batch from its own text, or its layers from its own step."""
    pytest.importorskip("grain")
    (tmp_path / "choosing.py").write_text(CHOOSING)
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text("to be or not to be, " * 40)
    launcher = [str(ROOT / "scripts/launch_multihost.sh"), *"-n 2 --cpu-devices 1 --".split(), sys.executable]
    options = "--text text --layers 2 --width 32 --groups 2 --microbatches 2 --batch 4 --length 16 --steps 2"
    options += " --eval-every 0 --checkpoint-dir run --save-every 1"

    def run() -> tuple[int, str]:
        done = subprocess.run(
            [*launcher, "choosing.py", ROOT / "examples/llama/train.py", *options.split()],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            cwd=tmp_path, text=True, capture_output=True, check=False, timeout=200,
        )  # fmt: skip
        return done.returncode, done.stderr

    status, err = run()
    assert status == 0, err[-3000:]
    shutil.copytree(tmp_path / "run", tmp_path / "run-of-1")
    shutil.rmtree(tmp_path / "run-of-1" / "2")
    status, err = run()
    assert status == 1
    assert "the step of the newest checkpoint (--checkpoint-dir) is 2 in rank 0 and 1 in rank 1.\n" in err
    shutil.rmtree(tmp_path / "run-of-1")
    shutil.copytree(tmp_path / "text", tmp_path / "text-of-1")
    (tmp_path / "text-of-1" / "2.txt").unlink()
    status, err = run()
    assert status == 1 and "the checksum of the text (--text) is " in err and "loss" not in err
