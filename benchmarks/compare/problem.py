"""The two problems of the comparison, as numpy arrays: the same weights and the same batches for each library.

`toy`: four layers `tanh(x @ w)`, so small that starting a task is nearly all the work. `gpt`: a byte-level decoder of
eight layers in four stages, with learned positions and a head of its own (no library has to share a weight between
stages). Both are trained with Adam on the mean loss over the microbatches.
"""

import dataclasses
from typing import Any

import numpy as np

NUM_STAGES = 4
LEARNING_RATE = 1e-3
VOCABULARY, WIDTH, HEAD_SIZE, LENGTH = 256, 64, 32, 64
LAYERS_PER_STAGE = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained: `params[s]` are the weights of stage s; a batch has num_microbatches * rows rows."""

    name: str
    num_microbatches: int
    rows: int
    params: list[dict[str, Any]]

    @property
    def num_tasks(self) -> int:
        """Tasks in a step: a forward and a backward of each microbatch in each stage."""
        return 2 * NUM_STAGES * self.num_microbatches

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of one step."""
        rng = np.random.default_rng((1, step))
        rows = self.num_microbatches * self.rows
        if self.name == "toy":
            x, y = rng.normal(size=(2, rows, 16)).astype(np.float32)
            return x, y
        text = rng.integers(0, VOCABULARY, size=(rows, LENGTH + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]


def make(name: str) -> Problem:
    """The problem of this name."""
    rng = np.random.default_rng(0)
    if name == "toy":
        weights = rng.normal(size=(NUM_STAGES, 16, 16)).astype(np.float32) / 4
        return Problem(name, 32, 4, [{"w": w} for w in weights])
    params: list[dict[str, Any]] = [
        {"layers": [_layer(rng) for _ in range(LAYERS_PER_STAGE)]} for _ in range(NUM_STAGES)
    ]
    params[0] |= {"embed": _normal(rng, VOCABULARY, WIDTH), "positions": _normal(rng, LENGTH, WIDTH)}
    params[-1] |= {"norm": np.ones(WIDTH, np.float32), "head": _normal(rng, WIDTH, VOCABULARY)}
    return Problem(name, 8, 2, params)


def _layer(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "attention_norm": np.ones(WIDTH, np.float32),
        "qkv": _normal(rng, WIDTH, 3 * WIDTH),
        "out": _normal(rng, WIDTH, WIDTH),
        "mlp_norm": np.ones(WIDTH, np.float32),
        "up": _normal(rng, WIDTH, 4 * WIDTH),
        "down": _normal(rng, 4 * WIDTH, WIDTH),
    }


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (0.05 * rng.normal(size=shape)).astype(np.float32)
