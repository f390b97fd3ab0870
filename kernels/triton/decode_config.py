"""Tiles of the Triton decoding kernel, and into how many parts it cuts the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringflash.kernels.decode_step import MAX_SPLITS, DecodeTiles
from ringflash.kernels.triton.config import padded_headdim

ROWS_WITHOUT_WGMMA = 32  # of a tile: WGMMA takes 64
MIN_KEYS = 256  # a part shorter than this costs more to merge than it saves


@dataclass(frozen=True)
class DecodeConfig:
    """How one shape is run.

    Args:
        tiles: keys in a tile, warps and stages.
        max_rows: most rows (query heads of a group times queries) in a tile; a power of two.
        programs: how many of the smallest tile are resident on one SM, by its registers and shared memory.
        precision: of float32 matmuls; "ieee" keeps float32's own error, tf32 would not.
    """

    tiles: DecodeTiles
    max_rows: int
    programs: int
    precision: str = "ieee"

    def block_m(self, rows: int) -> int:
        """Rows of a tile when there are `rows` in all: at least the 16 that a matmul takes."""
        return min(self.max_rows, max(16, 1 << (rows - 1).bit_length()))

    def resident(self, rows: int) -> int:
        """Programs on one SM: two of the larger tiles."""
        return self.programs if self.block_m(rows) == 16 else 2


# (is float32, headdim up to) -> block_n, num_warps, num_stages; most rows; programs on an SM
_TABLE = {
    (False, 64): (128, 4, 3, 64, 2),
    (False, 128): (64, 4, 3, 64, 3),
    (False, 256): (32, 4, 3, 32, 3),
    (True, 64): (32, 4, 2, 32, 4),
    (True, 128): (32, 4, 2, 32, 3),
    (True, 256): (16, 4, 2, 16, 2),
}


def decode_config(headdim: int, headdim_v: int, dtype: torch.dtype, tiles: DecodeTiles | None) -> DecodeConfig:
    """What is shipped for a shape, with `tiles` in the place of its own where given."""
    width = max(64, padded_headdim(max(headdim, headdim_v)))
    *own, max_rows, programs = _TABLE[dtype == torch.float32, width]
    return DecodeConfig(tiles or DecodeTiles(*own), max_rows, programs)


def splits_for(programs: int, keys: int, slots: int) -> int:
    """Parts to cut `keys` into, so that `programs` programs a part fill the device's `slots` in whole waves.

    The fewest that come within a tenth of the best use of the last wave: every part more is one more to merge.
    """
    most = max(1, min(MAX_SPLITS, keys // MIN_KEYS))
    use = [_last_wave_use(programs * splits, slots) for splits in range(1, most + 1)]
    return 1 + next(index for index, value in enumerate(use) if value >= 0.9 * max(use))


def _last_wave_use(programs: int, slots: int) -> float:
    return programs / (-(-programs // slots) * slots)
