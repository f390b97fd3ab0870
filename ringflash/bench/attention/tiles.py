"""Arithmetic of tile sizes: the papers' formula, the shipped tiles, and the registers and shared memory they take.

    python -m ringflash.bench.attention.tiles docs/performance/tiles.md

This command renews the tables of the portable kernels in the page. Each table stands between two marks with the name of
a function of this file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ringflash.bench.attention import traffic
from ringflash.bench.attention.traffic import Shape, Tile
from ringflash.kernels.hopper import config as hopper
from ringflash.kernels.triton import config
from ringflash.kernels.triton.config import TileConfig

PORTABLE, HOPPER = "portable", "hopper"  # families of kernels with their own tiles
HEADDIMS = (64, 128, 256)
SHARED_BYTES = 227 * 1024  # of a block, out of 228 KiB of an SM, on H100 and H200
WARP = 32
ITEMSIZE = 2  # bfloat16 or float16


@dataclass(frozen=True)
class Kernel:
    """Tiles that a kernel keeps on chip, and tiles that it streams.

    Args:
        name: name in the page.
        config: chooses the tile sizes from headdim, dtype and the number of keys.
        keeps_queries: True if queries stay and keys stream, False if keys stay and queries stream.
        accumulators: number of float32 tiles of (rows that stay, headdim).
        scores: number of float32 tiles of (block_m, block_n) alive at once: s, and dp in the backward.
        stays: number of tiles of (rows that stay, headdim) in the inputs' dtype.
    """

    name: str
    config: Callable[[int, torch.dtype, int], TileConfig]
    keeps_queries: bool
    accumulators: int
    scores: int
    stays: int


def _square(choose: Callable[[config.Call], TileConfig]) -> Callable[[int, torch.dtype, int], TileConfig]:
    def tiles(headdim: int, dtype: torch.dtype, seqlen_k: int) -> TileConfig:
        return choose(config.Call(headdim, headdim, dtype, seqlen_k, config.LARGE_SHARED))

    return tiles


KERNELS = (
    Kernel("forward", _square(config.forward_config), True, 1, 1, 1),
    Kernel("dQ", _square(config.dq_config), True, 1, 2, 2),
    Kernel("dK/dV", _square(config.dkdv_config), False, 2, 2, 2),
)


@dataclass(frozen=True)
class Cost:
    """Registers and shared memory of one program of a kernel.

    Args:
        accumulators: 32-bit registers a thread for float32 accumulators and products.
        scores: 32-bit registers a thread for float32 tiles of scores and their gradients.
        operands: 32-bit registers a thread for the same tiles in the inputs' dtype, as operands of the next matmul.
        shared: bytes of the tiles that stay, and of `num_stages` copies of the pair of tiles that streams.
    """

    accumulators: int
    scores: int
    operands: int
    shared: int

    @property
    def registers(self) -> int:
        """Registers of a thread, without addresses, statistics and other values."""
        return self.accumulators + self.scores + self.operands


def papers_blocks(shared_bytes: int, headdim: int, itemsize: int = ITEMSIZE) -> tuple[int, int]:
    """Returns B_r = min(ceil(M / 4d), d) queries and B_c = ceil(M / 4d) keys, with M in elements of `itemsize` bytes.

    Source: Dao et al. 2022, "FlashAttention", algorithm 1, line 1.
    """
    block = -(-shared_bytes // (4 * headdim * itemsize))
    return min(block, headdim), block


def cost(kernel: Kernel, tiles: TileConfig) -> Cost:
    """Returns the computed cost of one kernel. The compiler's result differs."""
    threads = tiles.num_warps * WARP
    stay, stream = (tiles.block_m, tiles.block_n) if kernel.keeps_queries else (tiles.block_n, tiles.block_m)
    tile_of_scores = tiles.block_m * tiles.block_n // threads
    return Cost(
        kernel.accumulators * stay * tiles.block_d // threads,
        kernel.scores * tile_of_scores,
        kernel.scores * tile_of_scores // 2,
        (kernel.stays * stay + 2 * tiles.num_stages * stream) * tiles.block_d * ITEMSIZE,
    )


def papers_table() -> list[str]:
    """Returns the table of the formula's tiles and the registers that they would take."""
    lines = _header("headdim", "B_r queries", "B_c keys", "O and S in float32", "registers a thread, 8 warps")
    for headdim in HEADDIMS:
        rows, columns = papers_blocks(SHARED_BYTES, headdim)
        elements = rows * (headdim + columns)
        each = -(-elements // (8 * WARP))
        lines.append(_row(headdim, rows, columns, f"{elements * 4 / 1024:.0f} KiB", each))
    return lines


def shipped_table() -> list[str]:
    """Returns the table of the tiles in kernels/triton/config.py and their registers and shared memory."""
    lines = _header(
        "kernel", "headdim", "tokens", "queries", "keys", "warps", "stages", "accumulators", "scores", "operands",
        "registers", "shared KiB",
    )  # fmt: skip
    for kernel in KERNELS:
        for headdim in HEADDIMS:
            usual, many = (kernel.config(headdim, torch.bfloat16, seqlen) for seqlen in (0, config.LONG_KEYS))
            shown = {"any": usual}
            if many != usual:
                shown = {f"below {config.LONG_KEYS}": usual, f"from {config.LONG_KEYS}": many}
            for tokens, tiles in shown.items():
                takes = cost(kernel, tiles)
                chosen = (tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages)
                registers = (takes.accumulators, takes.scores, takes.operands, takes.registers)
                lines.append(_row(kernel.name, headdim, tokens, *chosen, *registers, takes.shared // 1024))
    return lines


def auto_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Returns HOPPER if backend "auto" chooses these kernels for inputs of `dtype`, else PORTABLE, on a CPU too.

    HOPPER leaves some problems to the portable kernels: see `pass_bytes`.
    """
    if device.type != "cuda":
        return PORTABLE
    from ringflash.kernels import fallback  # imported here, because it imports Triton

    return HOPPER if fallback.why_not(device) is None and dtype in fallback.DTYPES else PORTABLE


def pass_bytes(shape: Shape, kernels: str = PORTABLE) -> dict[str, int]:
    """Returns the bytes of each pass with the tiles of PORTABLE or HOPPER kernels, from their loads and stores.

    HOPPER leaves float32 and the backward of wide heads, which it does not support, to the portable kernels. Like
    backend "auto", it leaves them small backwards too.
    """
    passes = _portable_bytes(shape)
    return passes | _hopper_bytes(shape) if kernels == HOPPER else passes


def _portable_bytes(shape: Shape) -> dict[str, int]:
    dtype = torch.float32 if shape.itemsize == 4 else torch.bfloat16
    forward, dq, dkdv = (_tile(kernel, shape, dtype) for kernel in KERNELS)
    delta = traffic.delta_kernel(shape)
    backward = delta + traffic.dq_kernel(shape, dq) + traffic.dkdv_kernel(shape, dkdv)
    forward = traffic.forward_kernel(shape, forward)
    return {"forward": forward, "backward deterministic": backward, "backward fast": backward}


def _hopper_bytes(shape: Shape) -> dict[str, int]:
    """Returns the bytes of the passes that the Hopper kernels compute."""
    from ringflash.kernels import fallback  # imported here, because it imports Triton

    known = shape.itemsize == ITEMSIZE and shape.row % fallback.ALIGNMENT == 0
    passes: dict[str, int] = {}
    if known and shape.headdim <= fallback.WIDEST:
        visits = shape.seqlen / hopper.KEYS / (2 if shape.causal else 1)
        tiles = hopper.forward_config(
            shape.headdim, masked=shape.causal or shape.seqlen % hopper.KEYS > 0, visits=visits
        )
        passes["forward"] = traffic.forward_kernel(shape, Tile(tiles.consumers * hopper.ROWS, tiles.block_n))
        of_backward = hopper.backward_config(shape.headdim)
        tile = Tile(of_backward.block_m, of_backward.keys)
        before = traffic.delta_kernel(shape) + traffic.negated_statistics(shape)
        backward = before + traffic.dkdv_kernel(shape, tile)
        if not hopper.prefer_triton_backward(shape.batch, shape.seqlen, shape.seqlen, shape.nheads_kv, shape.headdim):
            short = hopper.adds_in_turns(shape.seqlen, shape.nheads, shape.nheads_kv, shape.headdim)
            for mode, in_turns in (("deterministic", True), ("fast", short)):
                passes[f"backward {mode}"] = backward + traffic.added_dq(shape, tile, in_turns=in_turns)
    return passes


def _tile(kernel: Kernel, shape: Shape, dtype: torch.dtype) -> Tile:
    tiles = kernel.config(shape.headdim, dtype, shape.seqlen)
    return Tile(tiles.block_m, tiles.block_n)


def traffic_table() -> list[str]:
    """Returns the table of computed bytes of one causal sequence with 16 heads, in GiB."""
    lines = _header(
        "headdim", "tokens", "forward: compulsory", "tiled", "standard",
        "backward: compulsory", "tiled", "standard",
    )  # fmt: skip
    for headdim in HEADDIMS:
        for seqlen in (8192, 131072):
            shape = Shape(1, seqlen, 16, 16, headdim, causal=True)
            must, tiled, materialised = traffic.compulsory(shape), pass_bytes(shape), traffic.standard(shape)
            forward = must.forward, tiled["forward"], materialised.forward
            backward = tiled["backward deterministic"], materialised.backward
            figures = [f"{figure / 2**30:,.2f}" for figure in (*forward, must.backward, *backward)]
            lines.append(_row(headdim, seqlen, *figures))
    return lines


def renewed(page: str) -> str:
    """Returns the page with its tables computed again."""
    for table in (papers_table, shipped_table, traffic_table):
        mark = f"<!-- {table.__name__} -->"
        body = "\n".join([mark, *table(), mark])
        page, count = re.subn(f"{mark}.*?{mark}", lambda _, body=body: body, page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has {count} tables between two marks {mark}; it needs one")
    return page


def _header(*names: str) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str]) -> int:
    """Renews the tables of the page that `argv` names."""
    page = Path(argv[0])
    page.write_text(renewed(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
