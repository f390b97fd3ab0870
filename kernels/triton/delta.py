"""delta = rowsum(dout * out) - dlse in Triton: the softmax's backward subtracts it from every row of dP.

Shapes: out, dout (batch, seqlen_q, nheads, headdim_v); dlse, delta (batch, nheads, seqlen_q). Source: FlashAttention-2
(Dao 2023), algorithm 2, line 4; a gradient of lse adds P * dlse to dS, so dlse is subtracted here.
"""

# Triton's DSL is not Python to a type checker: constexpr arguments.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED, padded_headdim
from ringflash.kernels.triton.tiles import Strided, head_of, load_rows, row_pointers, strided, wide


@triton.jit(do_not_specialize=["ntiles", "seqlen_q", "nheads"])
def _delta_kernel(
    out,
    dout,
    dlse,
    delta,
    ntiles,
    seqlen_q,
    nheads,
    HAS_DLSE: tl.constexpr,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0)
    row = program % ntiles * BLOCK_M
    batch_head = program // ntiles
    batch = (batch_head // nheads).to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    rows_left = seqlen_q - row
    rows = tl.arange(0, BLOCK_M)
    out_pointers = row_pointers(head_of(out, batch, head), row, out.row, BLOCK_M, BLOCK_D)
    dout_pointers = row_pointers(head_of(dout, batch, head), row, dout.row, BLOCK_M, BLOCK_D)
    out_tile = load_rows(out_pointers, rows_left, HEADDIM, BLOCK_M, BLOCK_D).to(tl.float32)
    dout_tile = load_rows(dout_pointers, rows_left, HEADDIM, BLOCK_M, BLOCK_D).to(tl.float32)
    x = tl.sum(out_tile * dout_tile, 1)
    if HAS_DLSE:
        x -= tl.load(head_of(dlse, batch, head) + wide(row + rows) * dlse.row, mask=rows < rows_left, other=0.0)
    tl.store(delta + (batch * nheads + head) * seqlen_q + row + rows, x, mask=rows < rows_left)


_launches = Launches()


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns rowsum(dout * out) - dlse, float32 (batch, nheads, seqlen_q); see `Backend.delta`."""
    batch, seqlen_q, nheads, headdim = out.shape
    result = out.new_empty((batch, nheads, seqlen_q), dtype=torch.float32)
    given = () if dlse is None else (dlse,)
    tensors, key = (out, dout, result, *given), (*(x.dtype for x in given), *layout(out, dout, *given))
    if _launches.repeat(key, tensors):
        return result
    block_m, block_d = 64, padded_headdim(headdim)
    ntiles = triton.cdiv(seqlen_q, block_m)
    read = result if dlse is None else dlse
    dlse_rows = Strided(read, read.stride(0), read.stride(2), read.stride(1))
    arguments = (
        strided(out), strided(dout), dlse_rows, result, ntiles, seqlen_q, nheads,
        dlse is not None, headdim, block_d, block_m,
    )  # fmt: skip
    _launches.first(key, _delta_kernel, (ntiles * batch * nheads,), arguments, FUSED, tensors)
    return result
