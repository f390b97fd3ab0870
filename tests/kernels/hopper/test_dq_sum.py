"""dQ's sum becomes rows again, whatever was added in which order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringflash.kernels.hopper.dq_sum import ArrangedSum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 128, 3, 64), (1, 300, 2, 64), (2, 131, 2, 128), (1, 64, 1, 96), (1, 1, 2, 40)]


def arrange(rows: Tensor) -> Tensor:
    """(batch, nheads, tokens, columns) in rows as the kernel's sum has it: by definition, a number at a time."""
    batch, nheads, tokens, columns = rows.shape
    block_m = 8192 // columns
    halves = (slice(0, 64), slice(64, 128))
    tiles = []
    for tile in rows.reshape(-1, block_m, columns):
        for half in halves:
            x = tile[half, :] if columns == 64 else tile[:, half]
            flat = x.new_empty(4096)
            for row in range(64):
                warp, second, thread = row // 16, row % 16 // 8, row % 8
                at = torch.arange(64, device=x.device)
                group, pair, which = at // 8, at % 8 // 2, at % 2
                flat[(((warp * 8 + group) * 8 + thread) * 4 + pair) * 4 + second * 2 + which] = x[row]
            tiles.append(flat)
    return torch.stack(tiles).reshape(batch, nheads, tokens, columns)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_rows", [False, True])
def test_finish_gives_rows(shape: tuple[int, ...], with_rows: bool) -> None:
    seqlen, headdim = shape[1], shape[3]
    q = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
    total = ArrangedSum(q)
    tiles = total.tiles(0.5)
    rows = torch.randn(tiles.shape, device=DEVICE)
    tiles += arrange(rows)
    expected = 0.5 * rows[:, :, :seqlen, :headdim].transpose(1, 2)
    if with_rows:  # of kernels that take what these do not
        more = torch.randn(shape, device=DEVICE)
        total.rows().add_(more)
        expected = expected + more
    result = total.finish()
    assert torch.equal(result, expected.half())
    assert result.is_contiguous()


def test_nothing_added_is_zeros() -> None:
    q = torch.full((1, 5, 2, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    assert torch.equal(ArrangedSum(q).finish(), torch.zeros_like(q))


def test_only_rows_added() -> None:
    q = torch.zeros(1, 5, 2, 64, dtype=torch.float16, device=DEVICE)
    total = ArrangedSum(q)
    total.rows().add_(3.0)
    assert torch.equal(total.finish(), torch.full_like(q, 3.0))
