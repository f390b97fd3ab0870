"""Tile sizes of the Triton decoding kernel, and the number of parts into which it cuts the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringflash.kernels.decode_step import MAX_SPLITS, DecodeTiles
from ringflash.kernels.triton.config import padded_headdim

ROWS_WITHOUT_WGMMA = 32  # most rows of a tile without WGMMA, which takes 64
MIN_KEYS = 256  # a part with fewer keys costs more to merge than it saves


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and occupancy of the decoding kernel for one shape.

    Args:
        tiles: keys in a tile, warps and stages.
        max_rows: most rows (query heads of a group times queries) in a tile; a power of two.
        programs: programs of the smallest tile that are resident on one SM, as registers and shared memory permit.
        precision: precision of float32 matmuls; "ieee" keeps float32's own error, tf32 would not.
    """

    tiles: DecodeTiles
    max_rows: int
    programs: int
    precision: str = "ieee"

    def block_m(self, rows: int) -> int:
        """Returns the rows of a tile if there are `rows` in all; at least 16, the fewest that a matmul takes."""
        return min(self.max_rows, max(16, 1 << (rows - 1).bit_length()))

    def resident(self, rows: int) -> int:
        """Returns the programs resident on one SM; 2 for tiles of more than 16 rows."""
        return self.programs if self.block_m(rows) == 16 else 2


# (is float32, largest headdim) -> block_n, num_warps, num_stages; most rows; programs on an SM
_TABLE = {
    (False, 64): (128, 4, 3, 64, 2),
    (False, 128): (64, 4, 3, 64, 3),
    (False, 256): (32, 4, 3, 32, 3),
    (True, 64): (32, 4, 2, 32, 4),
    (True, 128): (32, 4, 2, 32, 3),
    (True, 256): (16, 4, 2, 16, 2),
}


def decode_config(headdim: int, headdim_v: int, dtype: torch.dtype, tiles: DecodeTiles | None) -> DecodeConfig:
    """Returns the shipped config of a shape; `tiles`, where given, replace the shipped tiles."""
    width = max(64, padded_headdim(max(headdim, headdim_v)))
    *own, max_rows, programs = _TABLE[dtype == torch.float32, width]
    return DecodeConfig(tiles or DecodeTiles(*own), max_rows, programs)


def splits_for(programs: int, keys: int, slots: int) -> int:
    """Returns the parts into which to cut `keys`, so that `programs` a part fill the device's `slots` in whole waves.

    The result is the fewest parts with a use of the waves within a tenth of the best, because each part must be merged.
    """
    most = max(1, min(MAX_SPLITS, keys // MIN_KEYS))
    use = [_last_wave_use(programs * splits, slots) for splits in range(1, most + 1)]
    return 1 + next(index for index, value in enumerate(use) if value >= 0.9 * max(use))


def _last_wave_use(programs: int, slots: int) -> float:
    return programs / (-(-programs // slots) * slots)
