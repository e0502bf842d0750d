"""Batches with one document in each row, in buckets by length: lists of microbatches, each of one length.

A pass over the text contains every document once. The microbatches of a pass are interleaved, so that each step has
short and long ones, and they cost about the same. As in `data.py`, the batch of a step depends on the step alone.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from balance import Cost, deal_documents
from data import Tokenizer, array_of, documents_of, mixed, parted

import mpmd

# A microbatch before it is made: the tokens of a row, and the documents, each with its last target; None: an empty row.
Dealt = tuple[int, list[np.ndarray | None]]


def num_tokens(document: np.ndarray) -> int:
    """Returns the number of tokens of a document's row: the last token is only a target."""
    return len(document) - 1


class Pass:
    """The microbatches of each pass over some documents.

    Args:
      sources: the documents of each source, and its weight.
      rows: the rows of a microbatch for each length; lengths ascend.
      seed: the seed of the shuffling; None for no shuffling.

    Attributes:
      streams: for each length, its documents in all passes.
      counts: for each length, the rows of a pass.
      order: the microbatches of a pass: a length, and a number among the microbatches of this length.
    """

    def __init__(self, sources: Sequence[tuple[list[np.ndarray], float]], rows: Mapping[int, int], seed: int | None):
        self.rows, self.sources = rows, sources
        sizes = [sum(map(num_tokens, documents)) for documents, _ in sources]
        if not all(sizes):
            raise ValueError("a source of the text has no tokens to train on, or none to hold out; give more text")
        # How many passes over each source are in one over all of them: the weights are shares of tokens.
        scale = sum(sizes) / sum(weight for _, weight in sources)
        self.speeds = [scale * weight / size for size, (_, weight) in zip(sizes, sources, strict=True)]
        self.streams: dict[int, grain.MapDataset] = {}
        self.counts: dict[int, int] = {}
        for length, shorter in zip(rows, (0, *rows), strict=False):
            own = [[x for x in documents if shorter < num_tokens(x) <= length] for documents, _ in sources]
            shares = {i: self.speeds[i] * len(x) for i, x in enumerate(own) if x}
            if shares:
                self.counts[length] = max(1, round(sum(shares.values())))
                self.streams[length] = mixed(
                    [grain.MapDataset.source(own[i]) for i in shares], [*shares.values()], seed
                )
        numbers = {length: -(-count // rows[length]) for length, count in self.counts.items()}
        self.order = sorted(  # all lengths come at the beginning: programs for them are compiled in the first step
            ((length, k) for length, number in numbers.items() for k in range(number)),
            key=lambda which: (which[1] / numbers[which[0]], which),
        )

    def microbatch(self, number: int) -> tuple[int, list[np.ndarray]]:
        """Returns the length and the documents of a microbatch, counted from the first one of the first pass."""
        passes, place = divmod(number, len(self.order))
        length, k = self.order[place]
        count, rows = self.counts[length], self.rows[length]
        numbers = range(passes * count + k * rows, passes * count + min(count, (k + 1) * rows))
        documents = [self.streams[length][i] for i in numbers]
        return length, [x for x in documents if x is not None]  # Grain: for elements that were filtered out

    def total(self, amount: Callable[[int], float]) -> float:
        """Sums `amount`, a function of a document's tokens, over a pass."""
        sums = (sum(amount(num_tokens(x)) for x in documents) for documents, _ in self.sources)
        return sum(speed * x for speed, x in zip(self.speeds, sums, strict=True))


class BatchesByLength:
    """Batches that are lists of microbatches, with rows that are padded documents of about the same length.

    Documents longer than the greatest length are cut into pieces. Otherwise like `Batches`.

    Args:
      sources, tokenizer, microbatches, seed: as in `Batches`.
      rows: the rows of a microbatch for each length (`balance.rows_of`); lengths ascend.
      cost: the cost of a row by its number of tokens.
      data: devices that share the rows of a microbatch.

    Attributes:
      checksum: a checksum of all tokens, to compare processes.

    Raises:
      ValueError: there is no text.
    """

    def __init__(
        self, sources: Sequence[str], tokenizer: Tokenizer, rows: Mapping[int, int], cost: Cost, microbatches: int,
        data: int = 1, seed: int = 0,
    ):  # fmt: skip
        self.tokenizer, self.rows, self.cost, self.microbatches, self.data = tokenizer, rows, cost, microbatches, data
        self.checksum = 0
        train, held_out, weights = zip(*parted(sources, self._pieces), strict=True)
        self.train = Pass([*zip(train, weights, strict=True)], rows, seed)
        self.held_out = Pass([*zip(held_out, weights, strict=True)], rows, None)

    def _pieces(self, files: Sequence[Path]) -> list[np.ndarray]:
        documents, longest = documents_of(files, self.tokenizer), max(self.rows)
        for document in documents:
            self.checksum = zlib.crc32(document.data, self.checksum)
        return [x[i : i + longest + 1] for x in documents for i in range(0, num_tokens(x), longest)]

    def per_step(self, amount: Callable[[int], float]) -> float:
        """Sums `amount`, a function of a document's tokens, over the documents of a step, on average."""
        return self.train.total(amount) * self.microbatches / len(self.train.order)

    def __str__(self):
        lengths, longest = [length for length, _ in self.train.order], max(self.rows)
        works = [self.rows[length] * self.cost(length) for length in lengths]
        tokens, padded = self.train.total(float), sum(self.rows[length] * length for length in lengths)
        shapes = ", ".join(f"{rows} rows of {length}" for length, rows in self.rows.items())
        return (
            f"microbatches: {shapes}; work of the most loaded one {max(works) * len(works) / sum(works):.2f} of the"
            f" mean; padding {1 - tokens / padded:.0%} of the tokens"
            f" (one length for all: {1 - tokens / (longest * sum(self.train.counts.values())):.0%})"
        )

    def dealt(self, step: int, held_out: bool = False) -> list[Dealt]:
        """Returns the microbatches of a step. Documents of one length go where they make the work even."""
        numbers = range(step * self.microbatches, (step + 1) * self.microbatches)
        found = [(self.held_out if held_out else self.train).microbatch(number) for number in numbers]
        documents = {length: [x for other, xs in found for x in xs if other == length] for length, _ in found}
        rest = {length: iter(self._dealt(length, xs, found)) for length, xs in documents.items()}
        return [(length, next(rest[length])) for length, _ in found]

    def _dealt(
        self, length: int, documents: list[np.ndarray], among: Sequence[tuple[int, Any]]
    ) -> list[list[np.ndarray | None]]:
        """Returns the rows of the microbatches of one length; the rows of each device are adjacent."""
        number, room = sum(other == length for other, _ in among), self.rows[length] // self.data
        parts = deal_documents([num_tokens(x) for x in documents], self.cost, number, self.data)
        return [
            [row for part in microbatch for row in [*(documents[i] for i in part), *[None] * (room - len(part))]]
            for microbatch in parts
        ]

    def at(self, step: int, held_out: bool = False) -> list[dict[str, np.ndarray]]:
        """Returns the whole batch of a step: leaves of (rows, length) for each microbatch."""
        return [
            {name: filled(name, rows, length) for name in ("tokens", "targets", "weights")}
            for length, rows in self.dealt(step, held_out)
        ]

    def placed(
        self, step: int, shardings: Mapping[str, mpmd.MpmdSharding], held_out: bool = False
    ) -> list[dict[str, mpmd.MpmdArray]]:
        """Places the batch of a step where the groups want it. A process makes the rows that its own devices read.

        Args:
          step: the number of the step, from 0.
          shardings: where each leaf of a microbatch is wanted.
          held_out: whether the batch is for evaluation.
        """

        def array(name: str, length: int, rows: list[np.ndarray | None]) -> mpmd.MpmdArray:
            def part(name: str, index: Any) -> np.ndarray:
                return filled(name, rows[index[0]], length)[:, index[1]]

            return array_of(name, (len(rows), length), shardings[name], part)

        return [{name: array(name, length, rows) for name in shardings} for length, rows in self.dealt(step, held_out)]


def filled(name: str, rows: Sequence[np.ndarray | None], length: int) -> np.ndarray:
    """Makes a leaf of a microbatch, (rows, length): `tokens`, the `targets` after them, or `weights`.

    Weights are 0 on padding.
    """
    found = np.zeros((len(rows), length), np.float32 if name == "weights" else np.int32)
    for row, document in zip(found, rows, strict=True):
        if document is not None:
            row[: num_tokens(document)] = {"tokens": document[:-1], "targets": document[1:]}.get(name, 1)
    return found
