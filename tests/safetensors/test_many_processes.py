"""Real processes import and export a Hugging Face folder: each reads its bytes and no others, in little memory."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_process_reads_its_bytes_once_and_what_they_write_together_is_the_folder(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        benchmark = importlib.import_module("import_safetensors")
    finally:
        sys.path.pop(0)
    rows = benchmark.measured(128, 4, "16MiB", tmp_path, ("stages", "tensor"))
    assert len(rows) == 8
    for row in rows:
        assert row["shards"] > 24 << 20
        assert row["read"] == row["shards"]
        assert row["by the system"] < 1.05 * row["shards"] + (1 << 20)  # headers, and modules that are imported late
        assert row["memory"] < row["shards"] + (16 << 20) + (24 << 20)  # threads, and what a first call allocates
    assert [row["same"] for row in rows if "same" in row] == [True, True]
