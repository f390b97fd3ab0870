"""Tile sizes of the portable kernels, chosen by headdim and dtype.

A tile pair must fit registers (the accumulators, float32) and shared memory (num_stages copies of what is streamed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class _Tiles:
    """What sweeps choose of a `TileConfig`.

    Args:
        block_m: rows of queries in a tile.
        block_n: rows of keys in a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        max_registers: most a thread may use, so that another program fits beside; None is the hardware's limit.
        by_pointers: whether what streams does so by pointers even where the tensor memory accelerator could.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    by_pointers: bool = False


@dataclass(frozen=True, kw_only=True)
class TileConfig(_Tiles):
    """How a kernel is tiled.

    Args:
        block_d: headdim rounded up to a power of two.
        block_dv: the same of the values' headdim.
        precision: of float32 matmuls; "ieee" keeps float32's own error, tf32 would not.
    """

    block_d: int
    block_dv: int
    precision: str = "ieee"

    @property
    def launch(self) -> dict[str, Any]:
        """Triton's options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers} | FUSED


def padded_headdim(headdim: int) -> int:
    """`headdim` rounded up to a power of two that a matmul can take."""
    return max(16, 1 << (headdim - 1).bit_length())


_Table = dict[tuple[bool, int], _Tiles]  # (is float32, headdim up to)

# Multiplications and additions fuse. Triton 3.9 warns where a launch does not say so, and 3.10 will not fuse by itself.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}

LONG_KEYS = 131072  # from here on keys and values of a head leave no room in L2 for others
LARGE_SHARED = 90  # from this compute capability on a block has 227 KiB of shared memory, before at most 163 KiB


@dataclass(frozen=True)
class _Tables:
    """Tiles of one kernel.

    Args:
        usual: bfloat16 by sweeps on an H200; float16 as bfloat16.
        short: what differs where a row sees a part of the sequence, as under documents and windows: programs are many
            and short, so that several must fit beside each other.
        ragged: what differs where rows are loaded with bounds, which takes registers.
        lean: what differs under full and causal masks, and where tiles are listed, if neither bounds nor modes take
            registers: one more program fits beside.
        lean_short: the same under other masks, where a row sees a part of the sequence.
        small: what differs where shared memory is smaller; not measured, chosen by what compiles with few spills.
        long: what differs from LONG_KEYS keys on, under full and causal masks, without bounds: larger tiles read them
            less often.
    """

    usual: _Table
    short: _Table = field(default_factory=dict)
    ragged: _Table = field(default_factory=dict)
    lean: _Table = field(default_factory=dict)
    lean_short: _Table = field(default_factory=dict)
    small: _Table = field(default_factory=dict)
    long: _Table = field(default_factory=dict)


# Under short spans by pointers: the accelerator's barriers would leave a fourth program no room.
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
    """What tiles are chosen for.

    Args:
        headdim: of queries and keys.
        headdim_v: of values.
        dtype: of all of them.
        seqlen_k: keys of a sequence.
        capability: of the GPU, as in 90.
        ragged: whether a chunk is not a whole number of tiles, or headdim no power of two.
        short_spans: whether a row sees a part of the sequence: any mask but the full and the causal one.
        listed: whether tiles to visit are listed, as under a mask with a bitmap.
        modes: whether scores take more than a product and a factor: softcap, ALiBi or dropout.
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
        """The tiles of a kernel."""
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
    """Tiles of the forward kernel: BLOCK_M queries stay, BLOCK_N keys stream."""
    return call.choose(_FORWARD)


def dq_config(call: Call) -> TileConfig:
    """Tiles of the dQ kernel: BLOCK_M queries stay, BLOCK_N keys stream."""
    return call.choose(_DQ)


def dkdv_config(call: Call) -> TileConfig:
    """Tiles of the dK/dV kernel: BLOCK_N keys stay, BLOCK_M queries stream."""
    return call.choose(_DKDV)


def fuses_dq(headdim: int, headdim_v: int, *, listed: bool) -> bool:
    """Whether one kernel for dQ, dK and dV beats two, by sweeps on an H200.

    To add dQ up in memory takes longer than the two matmuls that it saves, except where tiles are listed. Above headdim
    64 a thread's registers hold its accumulators only in small tiles, so that dQ is added up more often.
    """
    return listed and max(headdim, headdim_v) <= 64


def single_pass_config(call: Call) -> TileConfig:
    """As `dkdv_config`, with dQ in the same kernel."""
    return call.choose(_SINGLE_PASS)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one elsewhere: the interpreter runs a program after another, the gate runs none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
