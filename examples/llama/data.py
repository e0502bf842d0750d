"""From text to batches, with Grain: documents are packed into rows, rows are shuffled, sources are mixed.

Everything is random access: the batch of a step depends on the step alone, not on the number of processes that read
it. So a checkpoint needs no state of the data but the number of steps, and a run that continues with other processes or
groups sees exactly the examples that it would have seen.

A process makes only the rows that its own devices read.
"""

import functools
import math
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grain
import jax
import numpy as np
from context import num_parts, zigzag
from model import config_json

import mpmd


class Tokenizer(Protocol):
    """A conversion of text to numbers and back."""

    vocabulary: int
    end: int  # comes after each document

    def encode(self, text: bytes) -> np.ndarray: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """Each byte is a token; documents end with a zero."""

    vocabulary, end = 256, 0

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        text = bytes(token for token in tokens if token).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class OfFolder:
    """The tokenizer of a Hugging Face folder (tokenizer.json).

    Raises:
      ValueError: it is damaged, or of another model: raised here, or at a token that the model does not have.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer as Fast

        self.file = folder / "tokenizer.json"
        try:
            self.tokenizer = Fast.from_file(str(self.file))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"{self.file} is damaged, or no tokenizer: {error}. Copy it again.") from error
        config = config_json(folder)
        end = config.get("eos_token_id")
        self.end = int(end[0] if isinstance(end, list) else end or 0)
        self.vocabulary = int(config.get("vocab_size", 0))
        if self.tokenizer.id_to_token(self.end) is None:
            self._refuse(
                f"config.json says that documents end with token {self.end}, which this tokenizer does not have"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"{self.file} is the tokenizer of another model: {why}. Copy the one that belongs to the model."
        )

    def encode(self, text: bytes) -> np.ndarray:
        ids = np.array(self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids, np.int32)
        if len(ids) and ids.max() >= self.vocabulary:
            self._refuse(f"it has made token {ids.max()}, and config.json says vocab_size {self.vocabulary}")
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(list(tokens))


def tokenizer_of(folder: str | None) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder; without a folder, bytes.

    Raises:
      FileNotFoundError: the folder has no config.json or no tokenizer.json.
    """
    if folder is None:
        return Bytes()
    config_json(folder)
    if not (Path(folder) / "tokenizer.json").exists():
        raise FileNotFoundError(
            f"{folder}: there is no tokenizer.json. With `transformers`, AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(folder) writes one."
        )
    return OfFolder(Path(folder))


def documents_of(files: Sequence[Path], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the tokens of each file, with the token that ends a document."""
    return [np.append(tokenizer.encode(file.read_bytes()), tokenizer.end).astype(np.int32) for file in files]


class Packed(grain.sources.RandomAccessDataSource):
    """Rows of `length` tokens, cut from the concatenated documents.

    A row has `tokens` and the `targets` after them, `segments` (which document), `positions` (in the document), and
    `weights`, which are 0 where the target is in another document.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer, length: int):
        documents = documents_of(files, tokenizer)
        self.stream = np.concatenate(documents)
        self.starts = np.cumsum([0, *map(len, documents)])[:-1]
        self.length = length
        if len(self) == 0:
            raise ValueError(
                f"the text ({files[0]}{' and others' * (len(files) > 1)}) has {len(self.stream)} tokens, too few for a"
                f" row of --length {length} and its last target; give more text, or a smaller --length"
            )

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.length

    def __getitem__(self, row) -> dict[str, np.ndarray]:
        at = np.arange(int(row) * self.length, (int(row) + 1) * self.length + 1)
        document = np.searchsorted(self.starts, at, side="right") - 1
        return {
            "tokens": self.stream[at[:-1]],
            "targets": self.stream[at[1:]],
            "segments": (document - document[0] + 1)[:-1].astype(np.int32),
            "positions": (at - self.starts[document])[:-1].astype(np.int32),
            "weights": (document[1:] == document[:-1]).astype(np.float32),
        }


def files_of(path: str) -> list[Path]:
    """Returns the file itself, or all text files below a folder, in the order of their names."""
    root = Path(path)
    found = (
        [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in (".txt", ".py", ".md", ".rst"))
    )
    if not found:
        raise FileNotFoundError(f"{path}: there is no such file, and no text in such a folder")
    return found


def standard_library() -> str:
    """Returns a folder of text that every machine has: the sources of Python's standard library."""
    return sysconfig.get_paths()["stdlib"]


def path_and_weight(source: str) -> tuple[str, float]:
    """Parses `path` or `path=weight`.

    Raises:
      ValueError: the weight is not positive.
    """
    path, _, text = source.rpartition("=")
    try:
        path, weight = (path, float(text)) if path else (source, 1.0)
    except ValueError:  # a path that contains =
        return source, 1.0
    if not 0 < weight < math.inf:
        raise ValueError(f"--text {source}: the weight is {text}; give a positive number")
    return path, weight


def parted(sources: Sequence[str], rows_of: Callable[[Sequence[Path]], Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yields, for each source, the rows to train on, the held-out rows, and its weight.

    Held out are one document of twenty, or the end of a single document.

    Args:
      sources: as in `Batches`.
      rows_of: maps files to a sequence of rows.
    """
    for source in sources or [standard_library()]:
        path, weight = path_and_weight(source)
        files = files_of(path) if sources else sorted(Path(path).glob("*.py"))
        if len(files) > 1:
            yield rows_of([file for i, file in enumerate(files) if i % 20]), rows_of(files[::20]), weight
        else:
            whole = rows_of(files)
            last = max(1, len(whole) // 20) if len(whole) > 1 else 0
            yield whole[: len(whole) - last], whole[-last:], weight


def mixed(parts: Sequence[grain.MapDataset], weights: Sequence[float], seed: int | None) -> grain.MapDataset:
    """Mixes the rows of several sources, repeated endlessly, and shuffled anew in each pass if there is a seed."""
    rows = [(part if seed is None else part.shuffle(seed=seed)).repeat() for part in parts]
    return grain.MapDataset.mix(rows, weights) if len(rows) > 1 else rows[0]


def array_of(
    name: str, shape: tuple[int, ...], sharding: mpmd.MpmdSharding, part: Callable[[str, Any], np.ndarray]
) -> mpmd.MpmdArray:
    """Makes a leaf of a batch where the groups want it. Each process makes the parts that its own devices read.

    The positions of a row are in the order in which the mesh divides them (`context.zigzag`).

    Args:
      part: maps the name and an index into the array to the values there. The last index is an array of positions.
    """
    dtype = np.float32 if name == "weights" else np.int32
    order = zigzag(shape[-1], num_parts(sharding.mpmd_mesh.lowering_mesh()))

    def stored(index: Any) -> np.ndarray:
        return part(name, (*index[:-1], order[index[-1]]))

    here = {
        group: jax.make_array_from_callback(shape, sharding.group_sharding(group), stored, dtype)
        for group in sharding.groups
        if group in sharding.mpmd_mesh.local_groups
    }
    return mpmd.MpmdArray(here, sharding, shape, dtype)


class Batches:
    """Batches for training, and held-out ones: one document of twenty, or the end of a single document.

    Args:
      sources: `path` or `path=weight` each; a path is a file or a folder of text. By default Python's own library.
      tokenizer: text to tokens.
      rows: the rows of a batch.
      length: the tokens of a row.
      microbatches: the number of parts of a batch.
      seed: the seed of the shuffling.

    Attributes:
      checksum: a checksum of all tokens, to compare processes.
    """

    def __init__(
        self, sources: Sequence[str], tokenizer: Tokenizer, rows: int, length: int, microbatches: int, seed: int = 0
    ):
        self.shape = (microbatches, rows // microbatches, length)
        self.checksum = 0
        parts = parted(sources, lambda files: self._rows(Packed(files, tokenizer, length)))
        train, held_out, weights = zip(*parts, strict=True)
        self.train, self.held_out = mixed(train, weights, seed), mixed(held_out, weights, None)

    def _rows(self, source: Packed) -> grain.MapDataset:
        self.checksum = zlib.crc32(source.stream.data, self.checksum)
        return grain.MapDataset.source(source)

    def per_step(self, amount: Callable[[int], float]) -> float:
        """Sums `amount`, a function of a row's tokens, over the rows of a step."""
        return self.shape[0] * self.shape[1] * amount(self.shape[2])

    def row(self, number: int, held_out: bool = False) -> dict[str, np.ndarray]:
        """Returns a row, counted from the first one of the first batch."""
        row = (self.held_out if held_out else self.train)[number]
        assert row is not None  # Grain: for elements that were filtered out
        return row

    def at(self, step: int, held_out: bool = False) -> dict[str, np.ndarray]:
        """Returns the whole batch of a step, leaves of (microbatches, rows / microbatches, length)."""
        count = self.shape[0] * self.shape[1]
        rows = [self.row(number, held_out) for number in range(step * count, (step + 1) * count)]
        return {name: np.stack([row[name] for row in rows]).reshape(self.shape) for name in rows[0]}

    def placed(self, step: int, shardings: Mapping[str, mpmd.MpmdSharding], held_out: bool = False) -> dict[str, Any]:
        """Places the batch of a step where the groups want it. A process makes the rows that its own devices read.

        Args:
          step: the number of the step, from 0.
          shardings: the sharding of each leaf, as in `compiled.input_shardings`.
          held_out: whether the batch is for evaluation.
        """
        row = functools.lru_cache(self.shape[0] * self.shape[1])(lambda number: self.row(number, held_out))

        def part(name: str, index: Any) -> np.ndarray:
            parts, rows = (range(size)[i] for size, i in zip(self.shape, index[:2], strict=False))
            first = [(step * self.shape[0] + m) * self.shape[1] for m in parts]
            return np.stack([[row(k + r)[name][index[2]] for r in rows] for k in first])

        return {name: array_of(name, self.shape, sharding, part) for name, sharding in shardings.items()}
