"""What the softmax's backward subtracts from every row of dP: delta = rowsum(dout * out) - dlse.

Shapes: out, dout (batch, seqlen_q, nheads, headdim); dlse, delta (batch, nheads, seqlen_q). Source: FlashAttention-2
(Dao 2023), algorithm 2, line 4; a gradient of lse adds P * dlse to dS, so it is subtracted here.
"""

# Triton's DSL is not Python to a type checker: constexpr arguments.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.config import padded_headdim
from ringflash.kernels.tiles import SIZES, load_rows, row_pointers, wide, with_unit_stride


@triton.jit(do_not_specialize=SIZES)
def _delta_kernel(
    out,
    dout,
    dlse,
    delta,
    ntiles,
    seqlen_q,
    nheads,
    stride_ob,
    stride_os,
    stride_oh,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_lb,
    stride_lh,
    stride_ls,
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
    left = seqlen_q - row
    rows = tl.arange(0, BLOCK_M)
    out_pointers = row_pointers(out + batch * stride_ob + head * stride_oh, row, stride_os, BLOCK_M, BLOCK_D)
    dout_pointers = row_pointers(dout + batch * stride_dob + head * stride_doh, row, stride_dos, BLOCK_M, BLOCK_D)
    out_tile = load_rows(out_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True).to(tl.float32)
    dout_tile = load_rows(dout_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True).to(tl.float32)
    x = tl.sum(out_tile * dout_tile, 1)
    if HAS_DLSE:
        dlse_row = dlse + batch * stride_lb + head * stride_lh + wide(row) * stride_ls
        x -= tl.load(dlse_row + rows * stride_ls, mask=rows < left, other=0.0)
    tl.store(delta + (batch * nheads + head) * seqlen_q + row + rows, x, mask=rows < left)


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, float32 (batch, nheads, seqlen_q); see `TileKernels.delta`."""
    batch, seqlen_q, nheads, headdim = out.shape
    result = out.new_empty((batch, nheads, seqlen_q), dtype=torch.float32)
    block_m, block_d = 64, padded_headdim(headdim)
    ntiles = triton.cdiv(seqlen_q, block_m)
    dout = with_unit_stride(dout)
    dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
    _delta_kernel[(ntiles * batch * nheads,)](
        out, dout, result if dlse is None else dlse, result, ntiles, seqlen_q, nheads,
        *out.stride()[:3], *dout.stride()[:3], *dlse_strides,
        HAS_DLSE=dlse is not None, HEADDIM=headdim, BLOCK_D=block_d, BLOCK_M=block_m,
    )  # fmt: skip
    return result
