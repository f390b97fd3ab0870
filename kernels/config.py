"""Tile sizes of the portable kernels, chosen by headdim and dtype.

A tile pair must fit registers (the accumulators, float32) and shared memory (num_stages copies of what is streamed).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is tiled.

    Args:
        block_m: rows of queries in a tile.
        block_n: rows of keys in a tile.
        block_d: headdim rounded up to a power of two.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        precision: of float32 matmuls; "ieee" keeps float32's own error, tf32 would not.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"


def padded_headdim(headdim: int) -> int:
    """`headdim` rounded up to a power of two that a matmul can take."""
    return max(16, 1 << (headdim - 1).bit_length())


def _config(headdim: int, dtype: torch.dtype, table: dict[tuple[bool, int], tuple[int, int, int, int]]) -> TileConfig:
    block_d = padded_headdim(headdim)
    block_m, block_n, num_warps, num_stages = table[dtype == torch.float32, max(64, block_d)]
    return TileConfig(block_m, block_n, block_d, num_warps, num_stages)


# (is float32, headdim up to) -> block_m, block_n, num_warps, num_stages; bfloat16 to 128 by a sweep on an H200
_FORWARD = {
    (False, 64): (64, 64, 4, 3),
    (False, 128): (128, 64, 8, 3),
    (False, 256): (128, 64, 8, 2),
    (True, 64): (64, 32, 4, 1),
    (True, 128): (32, 32, 4, 1),
    (True, 256): (32, 16, 4, 1),
}
_DQ = {
    (False, 64): (64, 64, 4, 3),
    (False, 128): (128, 64, 8, 3),
    (False, 256): (64, 32, 8, 1),
    (True, 64): (32, 32, 4, 1),
    (True, 128): (32, 32, 4, 1),
    (True, 256): (16, 16, 4, 1),
}
_DKDV = {
    (False, 64): (64, 64, 4, 3),
    (False, 128): (32, 64, 4, 3),
    (False, 256): (32, 64, 8, 1),
    (True, 64): (32, 32, 4, 1),
    (True, 128): (32, 32, 4, 1),
    (True, 256): (16, 16, 4, 1),
}


def forward_config(headdim: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of the forward kernel: BLOCK_M queries stay, BLOCK_N keys stream."""
    return _config(headdim, dtype, _FORWARD)


def dq_config(headdim: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of the dQ kernel: BLOCK_M queries stay, BLOCK_N keys stream."""
    return _config(headdim, dtype, _DQ)


def dkdv_config(headdim: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of the dK/dV kernel: BLOCK_N keys stay, BLOCK_M queries stream."""
    return _config(headdim, dtype, _DKDV)
