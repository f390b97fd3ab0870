"""Packed documents in tests: devices, packings, and tables compared with those of the host."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ringflash.kernels.contract import Tiling
from ringflash.kernels.document_tables import document_tables, table_spec
from ringflash.kernels.hopper.mask_tables import intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask
from ringflash.masks.base import Packing

CPU = torch.device("cpu")
GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda", torch.cuda.current_device()) if GPU else CPU
interpreted = pytest.mark.skipif(GPU, reason="the interpreter makes tables for tensors on a CPU")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs sm_90")
NAMES = "bounds", "tiles", "order", "turns"


def packing_of(mask: Mask) -> Packing:
    packing = mask.packing
    assert packing is not None
    return packing


def made(mask: Mask, tiling: Tiling, seqlen_q: int, seqlen_k: int, device: torch.device) -> Sequence[Tensor]:
    left, right, documents = packing_of(mask)
    return document_tables(documents, table_spec(tiling, left, right, seqlen_q, seqlen_k, device))


def check_tables(mask: Mask, seqlen_q: int, seqlen_k: int, tiling: Tiling) -> None:
    """Compares each table with that of the host; bounds of fully masked rows may be any empty interval."""
    q_chunks, k_chunks = (Chunk(seqlen_k - seqlen_q, seqlen_q),), (Chunk(0, seqlen_k),)
    expected = intervals(mask, q_chunks, k_chunks, tiling.own_block, tiling.block, CPU, tiling.by_keys, tiling.ordered)
    tables = made(mask, tiling, seqlen_q, seqlen_k, DEVICE)
    assert len(tables) == 3 + tiling.ordered
    for name, got in zip(NAMES, tables, strict=False):
        got, want = got.cpu(), getattr(expected, name).int()
        if name == "bounds":
            live = want[..., 1] > want[..., 0]
            assert torch.equal(got[..., 1] > got[..., 0], live)
            got, want = got[live], want[live]
        if name == "turns":
            got, want = (turns_of(expected.tiles, x) for x in (got, want))
        assert torch.equal(got, want), name


def turns_of(tiles: Tensor, turns: Tensor) -> Tensor:
    """Returns the turn of each owned tile at each tile that it processes, and the number of turns there."""
    ntiles, rows = tiles.shape[1], []
    for sequence, row in enumerate(turns.expand(len(tiles), -1)):
        ranks, firsts, counts = row[:ntiles], row[ntiles::2], row[ntiles + 1 :: 2]
        for tile, (begin, _, _, end) in enumerate(tiles[sequence].tolist()):
            rows += [(int(ranks[tile] - firsts[other]), int(counts[other])) for other in range(begin, end)]
    return torch.tensor(rows)
