"""The decoding benchmark runs, writes its figures, and reports failures."""

import json
from pathlib import Path

import pytest
import torch

from ringflash.bench.decode.latency import main
from ringflash.bench.decode.peers import CacheShape
from ringflash.errors import ArgumentError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shows on a CPU that it runs")


def test_it_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cache-seqlens", "40", "64", "--dtype", "float32", "--rounds", "2"]
    assert main([*arguments, "--json", str(tmp_path / "decode.json")]) == 0
    assert "ringflash" in capsys.readouterr().out
    record = json.loads((tmp_path / "decode.json").read_text())
    assert record["command"].endswith("--rounds 2 --json decode.json")
    ours = [row for row in record["rows"] if row["name"] == "ringflash"]
    assert [row["length"] for row in ours] == [40, 64]
    assert all(row["queued_us"] > 0 and row["errors"]["rms_over_plain"] < 1 for row in ours)
    peers = [row for row in record["rows"] if row["name"] == "torch math packed"]
    assert all("failed" not in row for row in peers)


def test_a_peer_that_cannot_is_said_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache-seqlens", "40", "--dtype", "float32", "--rounds", "1", "--seqlen-q", "3"]) == 0
    assert "40 torch math: ValueError: its causal diagonal begins at the first key" in capsys.readouterr().out


def test_bytes_count_the_cache_once() -> None:
    shape = CacheShape(131072, 8, 32, 8, 128, 1, torch.bfloat16)
    assert shape.kv_bytes == 2**32
    assert shape.bytes - shape.kv_bytes == 2 * 8 * 32 * 128 * 2


def test_a_sweep_needs_a_gpu() -> None:
    with pytest.raises(ArgumentError, match="--sweep: expected a GPU, got the CPU"):
        main(["--sweep"])
