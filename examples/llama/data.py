"""From text to batches, with Grain: documents are packed into rows, rows are shuffled, sources are mixed.

Everything is random access: the batch of a step depends on the step alone, and not on how many processes read it. So
the number of steps is all that a checkpoint needs to know of the data, and a run that goes on with other processes or
groups sees exactly the examples that it would have seen.
"""

import json
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import grain
import numpy as np


class Tokenizer(Protocol):
    """Text to numbers and back."""

    vocabulary: int
    end: int  # stands behind each document

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
    """The tokenizer of a Hugging Face folder (tokenizer.json)."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer as Fast

        self.tokenizer = Fast.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        end = config.get("eos_token_id")
        self.end = int(end[0] if isinstance(end, list) else end or 0)
        self.vocabulary = int(config["vocab_size"])

    def encode(self, text: bytes) -> np.ndarray:
        ids = self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return np.array(ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(list(tokens))


def tokenizer_of(folder: str | None) -> Tokenizer:
    """That of a Hugging Face folder where it has one, else bytes."""
    if folder and (Path(folder) / "tokenizer.json").exists():
        return OfFolder(Path(folder))
    return Bytes()


class Packed(grain.sources.RandomAccessDataSource):
    """Rows of `length` tokens, cut from documents that stand one behind the other.

    A row has `tokens` and the `targets` behind them, `segments` (which document), `positions` (in the document), and
    `weights`, which are 0 where the target is of another document.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer, length: int):
        documents = [np.append(tokenizer.encode(file.read_bytes()), tokenizer.end) for file in files]
        self.stream = np.concatenate(documents).astype(np.int32)
        self.starts = np.cumsum([0, *map(len, documents)])[:-1]
        self.length = length
        if len(self) == 0:
            raise ValueError(f"{len(files)} files have {len(self.stream)} tokens, too few for a row of {length}")

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
    """The file itself, or all text files below a folder, in the order of their names."""
    root = Path(path)
    found = (
        [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in (".txt", ".py", ".md", ".rst"))
    )
    if not found:
        raise FileNotFoundError(f"{path}: there is no such file, and no text in such a folder")
    return found


def standard_library() -> str:
    """A folder of text that every machine has: the sources of Python's standard library."""
    return sysconfig.get_paths()["stdlib"]


class Batches:
    """Training batches, and others that are held out.

    Args:
      sources: `path` or `path=weight` each; a path is a file or a folder of text. By default Python's own library.
      tokenizer: text to tokens.
      rows: of a batch.
      length: tokens of a row.
      microbatches: into how many parts a batch is cut.
      seed: of the shuffling.
    """

    def __init__(
        self, sources: Sequence[str], tokenizer: Tokenizer, rows: int, length: int, microbatches: int, seed: int = 0
    ):
        self.microbatches = microbatches
        parts, weights, held_out = [], [], []
        for source in sources or [standard_library()]:
            path, _, weight = source.partition("=")
            files = files_of(path) if sources else sorted(Path(path).glob("*.py"))
            away = files[::20] if len(files) > 1 else files  # one document of twenty is held out
            kept = [file for file in files if file not in away] or files
            train = grain.MapDataset.source(Packed(kept, tokenizer, length))
            parts.append(train.shuffle(seed=seed).repeat())
            weights.append(float(weight or 1))
            held_out.append(grain.MapDataset.source(Packed(away, tokenizer, length)))
        mixed = grain.MapDataset.mix(parts, weights) if len(parts) > 1 else parts[0]
        self.train = mixed.batch(rows)
        self.held_out = grain.MapDataset.concatenate(held_out).repeat().batch(rows)

    def at(self, step: int, held_out: bool = False) -> dict[str, np.ndarray]:
        """The batch of a step, leaves of (microbatches, rows / microbatches, length)."""
        batch = (self.held_out if held_out else self.train)[step]
        assert batch is not None  # Grain: for elements that were filtered out
        return {name: x.reshape(self.microbatches, -1, x.shape[-1]) for name, x in batch.items()}
