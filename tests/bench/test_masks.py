"""The mask benchmark counts visible pairs, compares documents with a batch of them, and reports failures."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

import ringflash as rf
from ringflash.bench.attention import masks, single
from ringflash.bench.attention.mask_cases import cases
from ringflash.bench.common import timing
from ringflash.commands.main import main
from ringflash.errors import ArgumentError

CELL = "--seqlens 300 --headdims 16 --nheads 2 --window-left 39 --num-documents 4 --dtype float32 --rounds 2"
NAMES = ["causal", "window of 40", "25% of blocks of 128", "4 documents of mixed lengths", "4 documents", "batch of 4"]


@pytest.fixture(autouse=True)
def _quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_CALLS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_case_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "masks", *CELL.split(), "--nheads-kv", "1", "--json", str(tmp_path / "masks.json")]) == 0
    record = json.loads((tmp_path / "masks.json").read_text())
    assert record["command"] == f"ringflash bench masks {CELL} --nheads-kv 1 --json masks.json"
    assert [row["name"] for row in record["rows"]] == NAMES
    causal = record["rows"][0]
    for row in record["rows"]:
        for part in ("forward", "backward_fast", "backward_deterministic"):
            expected = row["share"] * causal[f"{part}_ms"]
            assert row[f"{part}_expected_ms"] == pytest.approx(expected, rel=0.01, abs=1e-3)
            assert row[f"{part}_cost"] == pytest.approx(row[f"{part}_ms"] / expected, rel=0.05)
            assert causal[f"{part}_cost"] == 1.0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)


def test_without_arguments_it_shows_that_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert masks.main(["--backend", "eager"]) == 0
    assert "256 tokens, 2:2 heads of 32, bfloat16, backend eager, CPU" in capsys.readouterr().out


@pytest.mark.parametrize(("seqlen", "window", "documents"), [(300, 40, 4), (256, 1, 1), (12, 100, 12)])
def test_pairs_are_those_of_the_mask(seqlen: int, window: int, documents: int) -> None:
    for case in cases(seqlen, window, documents):
        positions = torch.arange(seqlen // case.sequences)
        seen = case.mask.dense(positions, positions)
        assert case.pairs == case.sequences * int(seen.sum()), case.name


def test_a_case_that_fails_is_said_in_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    attention, calls = rf.flash_attention, iter(range(7))

    def flawed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: object, **more: object) -> torch.Tensor:
        if "Sparse" in repr(mask):
            raise ArgumentError("mask", expected="an interval", got="blocks", remedy="Use another backend.")
        if "Window" in repr(mask) and next(calls) == 6:
            raise torch.OutOfMemoryError("tried to allocate 9 TiB\nand more")
        out = attention(q, k, v, mask=mask, **more)  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert isinstance(out, torch.Tensor)
        return out * 1.2 if "Documents" in repr(mask) else out

    monkeypatch.setattr(rf, "flash_attention", flawed)
    path = tmp_path / "masks.json"
    assert masks.main([*CELL.split(), "--json", str(path)]) == 1
    failed = {row["name"]: row["failed"] for row in json.loads(path.read_text())["rows"] if "failed" in row}
    wrong = failed.pop("batch of 4")  # every tensor by the same share, but for rounding
    assert wrong.startswith("ValueError: another result: ")
    assert wrong.endswith(" differs by 0.17 of the largest value")
    assert failed == {
        "window of 40": "OutOfMemoryError: tried to allocate 9 TiB",
        "25% of blocks of 128": "ArgumentError: mask: expected an interval, got blocks. Use another backend.",
    }
    assert "window of 40, ringflash: OutOfMemoryError: tried to allocate 9 TiB" in capsys.readouterr().out


def _cute() -> ModuleType:
    """Returns a fake of FlashAttention-4's module with its functions, computed by flash_attention."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: Any = (None, None)) -> Any:
        assert causal
        window = window_size[0]
        mask = rf.Causal() if window is None else rf.Causal() & rf.SlidingWindow(window)
        return rf.flash_attention(q, k, v, mask=mask), None

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **ends: Any) -> Tensor:
        assert causal
        assert ends["max_seqlen_q"] == ends["max_seqlen_k"] == ends["cu_seqlens_q"].diff().max()
        assert torch.equal(ends["cu_seqlens_q"], ends["cu_seqlens_k"])
        mask = rf.Causal() & rf.Documents(ends["cu_seqlens_q"].tolist())
        out = rf.flash_attention(q[None], k[None], v[None], mask=mask)
        assert isinstance(out, Tensor)
        return out[0]

    module = ModuleType("flash_attn.cute")
    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    return module


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """Replaces torch's flex attention, which has no backward on CPUs; applies the mask's rule for single pairs."""
    zero, row = torch.zeros((), dtype=torch.int64), torch.arange(q.shape[2])
    seen = block_mask.mask_mod(zero, zero, row[:, None], row)
    return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=enable_gqa)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from Dynamo
def test_peers_are_given_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", _cute())
    monkeypatch.setattr(single, "flex_attention", _flex_attention)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(masks, "_check", lambda *_: None)
    path = tmp_path / "masks.json"
    assert masks.main([*CELL.split(), "--nheads-kv", "1", "--peers", "--json", str(path)]) == 0
    rows = {(row["by"], row["name"]): row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == [(by, name) for name in NAMES for by in ("ringflash", "FlashAttention-4", "FlexAttention")]
    assert rows["FlashAttention-4", NAMES[2]].pop("unavailable") == "is not given blocks here"
    for (by, name), row in rows.items():
        if (by, name) != ("FlashAttention-4", NAMES[2]):
            expected = row["share"] * rows[by, "causal"]["backward_fast_ms"]
            assert row["backward_fast_cost"] == pytest.approx(row["backward_fast_ms"] / expected, rel=0.05)
            assert ("backward_deterministic_ms" in row) == (by == "ringflash")


def test_a_peer_that_is_not_there_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(masks, "_check", lambda *_: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(masks, "flex", masks.flash_attention_4)
    path = tmp_path / "masks.json"
    assert masks.main([*CELL.split(), "--peers", "--json", str(path)]) == 0
    peers = [row for row in json.loads(path.read_text())["rows"] if row["by"] != "ringflash"]
    assert [row["unavailable"] for row in peers] == ["not installed"] * 12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--num-documents 7", "--num-documents: expected a number that divides 300 tokens, got 7"),
        ("--window-left -1", "--window-left: expected at least 0, got -1"),
        ("--nheads-kv 3", "nheads: expected a positive multiple of nheads_kv = 3"),
        ("--backend cuda", "backend: expected one of "),
        ("--peers", "--peers: expected a GPU, got none"),
    ],
)
def test_bad_arguments_measure_nothing(changed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "masks", *CELL.split(), *changed.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
