"""The example under the launcher: what one process goes on with from its middle has the same losses."""

import re
import subprocess
import sys

import pytest
from jobs import ROOT

pytestmark = pytest.mark.slow

SMALL = "--stages 2 --layers 2 --d-model 32 --seq-len 32 --steps 6 --seed 1".split()


def train_gpt(*options, launcher=()) -> subprocess.CompletedProcess:
    command = [*launcher, sys.executable, str(ROOT / "examples" / "train_gpt.py"), *SMALL, *options]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT, timeout=300)


def losses(*options, launcher=()) -> dict[str, str]:
    """Step to loss, as printed."""
    ended = train_gpt(*options, launcher=launcher)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(re.findall(r"step (\d+)/6 +loss ([\d.]+)", ended.stderr))


def launched(processes, devices):
    """The launcher's part of a command."""
    return (str(ROOT / "scripts" / "launch_multihost.sh"), "-n", str(processes), "--cpu-devices", str(devices), "--")


def test_the_example_goes_on_in_other_processes_with_the_same_losses(tmp_path):
    folder = tmp_path / "run"
    saving = ("--checkpoint-dir", str(folder), "--save-every", "2", "--keep", "2")
    together = losses(*saving, launcher=launched(2, 1))
    assert len(together) == 6
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    again = train_gpt(*saving)
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1] == (
        f"{folder} has checkpoints up to step 6: add --resume, or give another folder"
    )
    shorter = train_gpt(*saving, "--resume", "--steps", "5")
    assert shorter.stderr.splitlines()[-1] == f"{folder} has a checkpoint after step 6: give more --steps than 5"
    wider = train_gpt(*saving, "--resume", "--d-model", "64")
    assert (wider.returncode, wider.stderr.splitlines()[-2:]) == (1, [
        "train_gpt.py: params.embed: expected shape (256, 64), but the checkpoint has (256, 32).",
        f"  If it is damaged, delete {folder}/6; if it is of another model, give another folder.",
    ])  # fmt: skip
    nowhere = train_gpt("--checkpoint-dir", "/proc/nowhere")
    assert nowhere.stderr.splitlines()[-1] == "train_gpt.py: [Errno 2] No such file or directory: '/proc/nowhere'"
    (folder / "6").rename(tmp_path / "6")
    rest = losses(*saving, "--resume")
    assert rest == {step: together[step] for step in ("5", "6")}
