"""Tile sizes of the Triton kernels, chosen by headdim and dtype.

A pair of tiles must fit registers (float32 accumulators) and shared memory (num_stages copies of the streamed tiles).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes that sweeps choose, as a part of `TileConfig`.

    Args:
        block_m: rows of queries in a tile.
        block_n: rows of keys in a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        max_registers: most registers of a thread, so that one more program fits on an SM; None is the hardware's limit.
        by_pointers: load streamed tiles by pointers even where the tensor memory accelerator could load them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    by_pointers: bool = False


@dataclass(frozen=True, kw_only=True)
class TileConfig(_Tiles):
    """Tile sizes and launch options of a kernel.

    Args:
        block_d: headdim rounded up to a power of two.
        block_dv: headdim_v rounded up to a power of two.
        precision: precision of float32 matmuls; "ieee" keeps float32's own error, tf32 would not.
    """

    block_d: int
    block_dv: int
    precision: str = "ieee"

    @property
    def launch(self) -> dict[str, Any]:
        """Options that Triton takes at a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers} | FUSED


def padded_headdim(headdim: int) -> int:
    """Returns `headdim` rounded up to a power of two that a matmul can take."""
    return max(16, 1 << (headdim - 1).bit_length())


_Table = dict[tuple[bool, int], _Tiles]  # key: (is float32, largest headdim)

# Fuses multiplications and additions. Triton 3.9 warns if a launch does not set it, and 3.10 will not fuse by default.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}

LONG_KEYS = 131072  # from this many keys on, one head's keys and values leave no room in L2 for others
LARGE_SHARED = 90  # from this compute capability on, a block has 227 KiB of shared memory; below, at most 163 KiB


@dataclass(frozen=True)
class _Tables:
    """Tile sizes of one kernel: the usual ones, and replacements for special calls.

    Args:
        usual: sizes for bfloat16 by sweeps on an H200; float16 uses the same sizes.
        short: replacements for masks under which a row sees a part of the sequence, such as documents and windows.
            Programs are then many and short, so several must fit on an SM.
        ragged: replacements for loads with bounds checks, which take registers.
        lean: replacements for full and causal masks, and for listed tiles, if neither bounds checks nor score
            modifications take registers. One more program then fits on an SM.
        lean_short: the same for other masks, under which a row sees a part of the sequence.
        small: replacements for GPUs with less shared memory; not measured, but chosen to compile with few spills.
        long: replacements from LONG_KEYS keys on, under full and causal masks without bounds checks. Larger tiles read
            the keys less often.
    """

    usual: _Table
    short: _Table = field(default_factory=dict)
    ragged: _Table = field(default_factory=dict)
    lean: _Table = field(default_factory=dict)
    lean_short: _Table = field(default_factory=dict)
    small: _Table = field(default_factory=dict)
    long: _Table = field(default_factory=dict)


# Short spans are loaded by pointers, because the accelerator's barriers would leave no room for a fourth program.
_FORWARD = _Tables(
    usual={
        (False, 64): _Tiles(64, 128, 4, 3),
        (False, 128): _Tiles(64, 64, 4, 3),
        (False, 256): _Tiles(128, 64, 8, 2),
        (True, 64): _Tiles(64, 32, 4, 1),
        (True, 128): _Tiles(32, 32, 4, 1),
        (True, 256): _Tiles(32, 16, 4, 1),
    },
    short={(False, 64): _Tiles(64, 64, 4, 3, 128, by_pointers=True)},
    ragged={(False, 64): _Tiles(64, 64, 4, 3)},
    lean={(False, 64): _Tiles(64, 128, 4, 2, 160)},
    small={(False, 64): _Tiles(64, 64, 4, 3)},
    long={(False, 128): _Tiles(128, 128, 8, 3)},
)
_DQ = _Tables(
    usual={
        (False, 64): _Tiles(64, 64, 4, 3),
        (False, 128): _Tiles(128, 64, 8, 3),
        (False, 256): _Tiles(128, 64, 8, 1),
        (True, 64): _Tiles(32, 32, 4, 1),
        (True, 128): _Tiles(32, 32, 4, 1),
        (True, 256): _Tiles(16, 16, 4, 1),
    },
    small={(False, 128): _Tiles(128, 64, 8, 2), (False, 256): _Tiles(64, 32, 8, 1)},
)
_DKDV = _Tables(
    usual={
        (False, 64): _Tiles(64, 64, 4, 3),
        (False, 128): _Tiles(64, 64, 4, 2),
        (False, 256): _Tiles(64, 64, 8, 2),
        (True, 64): _Tiles(32, 32, 4, 1),
        (True, 128): _Tiles(32, 32, 4, 1),
        (True, 256): _Tiles(16, 16, 4, 1),
    },
    ragged={(False, 128): _Tiles(32, 64, 4, 3)},
    lean_short={(False, 64): _Tiles(64, 64, 4, 2, 168)},
    small={(False, 64): _Tiles(64, 64, 4, 2), (False, 128): _Tiles(32, 64, 4, 3), (False, 256): _Tiles(32, 64, 8, 1)},
)
_SINGLE_PASS = _Tables(
    usual={
        (False, 64): _Tiles(64, 64, 4, 3),
        (True, 64): _Tiles(32, 32, 4, 1),
    },
    small={(False, 64): _Tiles(64, 64, 4, 2)},
)


@dataclass(frozen=True)
class Call:
    """Properties of a call by which tile sizes are chosen.

    Args:
        headdim: width of queries and keys.
        headdim_v: width of values.
        dtype: dtype of queries, keys and values.
        seqlen_k: keys of a sequence.
        capability: compute capability of the GPU, such as 90.
        ragged: whether a chunk is not a whole number of tiles, or a headdim is no power of two.
        short_spans: whether a row sees a part of the sequence: any mask except the full and the causal one.
        listed: whether the tiles to process are listed, as under a mask with a bitmap.
        modes: whether weights take more than a product and a factor: softcap, ALiBi or dropout.
    """

    headdim: int
    headdim_v: int
    dtype: torch.dtype
    seqlen_k: int
    capability: int
    ragged: bool = False
    short_spans: bool = False
    listed: bool = False
    modes: bool = False

    def choose(self, tables: _Tables) -> TileConfig:
        """Returns the tile sizes of a kernel for this call."""
        block_d, block_dv = padded_headdim(self.headdim), padded_headdim(self.headdim_v)
        table = tables.usual | (tables.ragged if self.ragged else {}) | (tables.short if self.short_spans else {})
        if not (self.ragged or self.modes):
            table |= tables.lean_short if self.short_spans and not self.listed else tables.lean
        if self.capability < LARGE_SHARED:
            table |= tables.small
        elif self.seqlen_k >= LONG_KEYS and not (self.ragged or self.short_spans):
            table |= tables.long
        tiles = table[self.dtype == torch.float32, max(64, block_d, block_dv)]
        return TileConfig(**vars(tiles), block_d=block_d, block_dv=block_dv)


def forward_config(call: Call) -> TileConfig:
    """Returns the tiles of the forward kernel, which keeps BLOCK_M queries and streams BLOCK_N keys."""
    return call.choose(_FORWARD)


def dq_config(call: Call) -> TileConfig:
    """Returns the tiles of the dQ kernel, which keeps BLOCK_M queries and streams BLOCK_N keys."""
    return call.choose(_DQ)


def dkdv_config(call: Call) -> TileConfig:
    """Returns the tiles of the dK/dV kernel, which keeps BLOCK_N keys and streams BLOCK_M queries."""
    return call.choose(_DKDV)


def fuses_dq(headdim: int, headdim_v: int, *, listed: bool) -> bool:
    """Returns whether one kernel for dQ, dK and dV is faster than two, by sweeps on an H200.

    Summing dQ in memory takes longer than the two matmuls that one kernel saves, except where tiles are listed. Above
    headdim 64 a thread's registers hold only the accumulators of small tiles, so dQ would be added more often.
    """
    return listed and max(headdim, headdim_v) <= 64


def single_pass_config(call: Call) -> TileConfig:
    """Returns the tiles of the dK/dV kernel that also computes dQ."""
    return call.choose(_SINGLE_PASS)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU, else 1: the interpreter runs programs one by one, the gate runs none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
