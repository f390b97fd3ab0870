"""The accuracy benchmark: its ways agree where nothing is merged, and differ where they round."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ringflash.bench.common.problem import Problem
from ringflash.bench.ring.accuracy import plain_by_rows
from ringflash.bench.ring.merging import ways
from ringflash.commands.main import main


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the rows of a small run, which also draws them."""
    folder = tmp_path_factory.mktemp("accuracy")
    sizes = ["--seqlen", "128", "--world-sizes", "1", "16", "--depth-seqlen", "32", "--layer-counts", "1", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        files = ["--json", str(folder / "a.json"), "--png", str(folder / "a.png")]
        assert main(["bench", "accuracy", *sizes, *files]) == 0
    assert (folder / "a.png").stat().st_size > 10_000
    record = json.loads((folder / "a.json").read_text())
    assert record["command"] == "ringflash bench accuracy " + " ".join(sizes) + " --json a.json --png a.png"
    return record["rows"]


def _errors(rows: list[dict[str, Any]], name: str, **of: int) -> list[float]:
    (row,) = (
        row for row in rows if row["name"] == name and of.items() <= row.items() and len(of) == 1 + ("layers" in row)
    )
    return [*row["errors"].values()]


def test_one_rank_merges_nothing(rows: list[dict[str, Any]]) -> None:
    alone = [_errors(rows, name, world_size=1) for name in ways(1)]
    assert alone[0] == alone[1] == alone[2]


def test_errors_grow_with_what_is_rounded(rows: list[dict[str, Any]]) -> None:
    alone = _errors(rows, "float32 state", world_size=1)
    state, partials, sums = (_errors(rows, name, world_size=16) for name in ways(16))
    assert state == pytest.approx(alone, rel=0.02)
    assert all(a < b < c for a, b, c in zip(state, partials, sums, strict=True))
    deep = [_errors(rows, name, world_size=8, layers=3)[0] for name in ways(8)]
    assert max(deep) == deep[2]


@pytest.mark.parametrize("name", ways(1))
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_every_way_computes_attention(name: str, world_size: int) -> None:
    problem = Problem.random(48, 4, 2, 16, torch.device("cpu"), torch.bfloat16, batch=2)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = ways(world_size)[name](q, k, v)
    results = out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout)
    for result, exact in zip(results, plain_by_rows(problem, torch.float64), strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=0.05, atol=0.05)


def test_parts_of_unequal_length_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", "--seqlen", "100", "--world-sizes", "1", "3"]) == 2
    assert "--world-sizes: expected divisors of the 100 tokens" in capsys.readouterr().err
