"""The host benchmark has a figure for every call and contender, and its new documents are new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ringflash.bench.attention import host
from ringflash.commands.main import main
from ringflash.ops.attention import cache_info

CALLS = ["forward", "forward with gradients", "backward"]
DOCUMENTS = ["documents seen before", "new documents", "new documents on the GPU"]
OURS = [*CALLS, *(f"forward, {name}" for name in DOCUMENTS), "flash_decode"]


def test_every_call_has_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "CALLS", 2)
    assert main(["bench", "host", "--nheads-kv", "1", "--json", str(tmp_path / "host.json")]) == 0
    record = json.loads((tmp_path / "host.json").read_text())
    assert record["command"] == "ringflash bench host --nheads-kv 1 --json host.json"
    named = [(row["name"], row["call"]) for row in record["rows"]]
    assert sorted(named) == sorted([*(("ringflash", call) for call in OURS), *(("SDPA", call) for call in CALLS)])
    assert all(row["host_us"] > 0 and row["nheads_kv"] == 1 for row in record["rows"])


def test_new_documents_are_new_for_every_cache() -> None:
    assert len({*host._new_documents(128, "cpu", 600)}) == 600
    assert len({*map(id, host._new_documents(5, "cpu", 20))}) == 20
    fresh = [host._new_documents(40, "cpu", 5) for _ in range(2)]
    calls = host._calls(40, (2, 2), 16, torch.device("cpu"), torch.float32, fresh, with_compiled=False)
    before = cache_info()
    for _ in range(3):
        calls["ringflash", "forward, new documents"]()
        calls["ringflash", "forward, documents seen before"]()
    after = cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (4, 2)
