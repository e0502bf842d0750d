"""The examples of the libraries train. That such models equal plain JAX is in test_libraries."""

import importlib
import sys
from pathlib import Path

import pytest
from programs.program import quickly_compiled

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.parametrize(("name", "package"), [("train_nnx", "flax"), ("train_equinox", "equinox")])
def test_an_example_trains(name, package, capsys):
    pytest.importorskip(package)
    with quickly_compiled():
        losses = importlib.import_module(name).main(["--steps", "12"])
    assert losses[-1] < 0.8 * losses[0], losses
    assert capsys.readouterr().out.splitlines()[-1] == f"step   11  loss {losses[-1]:.4f}"
