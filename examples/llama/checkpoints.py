"""The newest states of a run, in one folder: written while training goes on, restored into any layout.

Orbax's own manager keeps them. Faults of a checkpoint raise an `OSError` or a `ReshardError` with one line: the fault,
its place, and a remedy.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import mpmd
import reshard.checkpoint  # makes Orbax take the arrays of a pipeline


class Checkpoints:
    """The newest checkpoints of a run.

    Args:
      folder: the folder of the checkpoints; made if it does not exist.
      keep: how many checkpoints are kept.

    Raises:
      OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str, keep: int):
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax also logs each error, with long stacks
        self.folder = Path(folder).resolve()
        self.manager = ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep))

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return self.manager.latest_step() or 0

    def save(self, step: int, state: Any) -> None:
        """Begins to write a state, unless that step is saved already. Training may continue, and donate the state."""
        if self.newest == step:
            return
        jax.block_until_ready(state)  # Orbax waits for the other processes; no step may be in flight
        with self._explained():
            self.manager.save(step, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        """Waits until all begun checkpoints are written."""
        with self._explained():
            self.manager.wait_until_finished()

    def restore(self, like: Any, shardings: Any) -> Any:
        """Restores the newest state into `shardings`, also with other groups, stages and processes than before."""
        path = self.folder / str(self.newest)
        try:
            return reshard.checkpoint.restore(path, like, shardings)
        except (OSError, mpmd.ReshardError) as error:
            older = [step for step in self.manager.all_steps() if step != self.newest]
            instead = f"goes on after step {max(older)}" if older else "starts from the beginning"
            raise mpmd.ReshardError(
                f"{error}\n  So the run cannot go on after step {self.newest}. If files there are damaged or missing,"
                f" delete {path}: then the same command {instead}. If it is of another model or optimizer, give another"
                " folder."
            ) from error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises the errors of its storage libraries
            steps = [int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdigit()]
            then = f"goes on after step {max(steps)}" if steps else "starts from the beginning"
            raise OSError(
                f"a checkpoint could not be written in {self.folder}: {error}\n  When this is mended, the same command"
                f" {then}."
            ) from error
