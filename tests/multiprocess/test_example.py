"""The example under the launcher: the losses of one process, also when it goes on with other processes."""

import re
import subprocess
import sys

import pytest
from jobs import ROOT

pytestmark = pytest.mark.slow

SMALL = ("--d-model", "32", "--seq-len", "32", "--steps", "6", "--seed", "1")


def losses(*options, launcher=()) -> dict[str, str]:
    """Step to loss, as printed."""
    command = [*launcher, sys.executable, str(ROOT / "examples" / "train_gpt.py"), *SMALL, *options]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(re.findall(r"step (\d+)/6 +loss ([\d.]+)", ended.stderr))


def launched(processes, devices):
    """The launcher's part of a command."""
    return (str(ROOT / "scripts" / "launch_multihost.sh"), "-n", str(processes), "--cpu-devices", str(devices), "--")


def test_the_example_goes_on_in_other_processes_with_the_same_losses(tmp_path):
    alone = losses()
    assert len(alone) == 6
    saving = ("--checkpoint-dir", str(tmp_path / "run"), "--save-every", "3")
    assert losses(*saving, launcher=launched(4, 1)) == alone
    subprocess.run(["rm", "-r", str(tmp_path / "run" / "6")], check=True)
    rest = losses(*saving, "--resume", launcher=launched(2, 2))
    assert rest == {step: alone[step] for step in ("4", "5", "6")}
