"""Row vectors of the Hopper backward: lse and delta, scaled, negated and padded to whole tiles.

Shapes: lse, delta (batch, nheads, seqlen_q).
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.hopper.config import padded_rows
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED


@triton.jit(do_not_specialize=["seqlen", "padded"])
def _vectors_kernel(lse, delta, minus_lse, minus_delta, lost, factor, seqlen, padded, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < seqlen
    of_lse = tl.load(lse + head * seqlen + rows, mask=inside, other=0.0)
    of_delta = tl.load(delta + head * seqlen + rows, mask=inside, other=0.0)
    tl.store(minus_lse + head * padded + rows, tl.where(inside, of_lse * factor, -3e38), mask=rows < padded)
    tl.store(minus_delta + head * padded + rows, -of_delta, mask=rows < padded)
    if tl.sum(of_lse * 0.0 + of_delta * 0.0, 0) != 0.0:  # NaN
        tl.store(lost, -1)


_launches = Launches()


def vectors(
    lse: Tensor, delta: Tensor, factor: float, lost: Tensor, cache: dict[str, Any] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lse * factor and -delta, each (batch, nheads, padded rows), and `lost`.

    `lost` is one int32 that is not negative; it becomes -1 if any lse or delta is not finite. Rows past the end have
    probability 0 from a finite lse. Hops of a pass with the same factor share the results through `cache`.
    """
    name = f"vectors of {factor}"
    if cache is not None and name in cache:
        of, known = cache[name]
        if of[0] is lse and of[1] is delta:
            return known
    batch, nheads, seqlen = lse.shape
    padded = padded_rows(seqlen)
    minus_lse, minus_delta = (lse.new_empty((batch, nheads, padded)) for _ in range(2))
    tensors, key = (lse, delta, minus_lse, minus_delta, lost), (factor, *layout(lse, delta))
    if not _launches.repeat(key, tensors):
        grid = (batch * nheads, triton.cdiv(padded, 1024))
        _launches.first(key, _vectors_kernel, grid, (*tensors, factor, seqlen, padded, 1024), FUSED, tensors)
    if cache is not None:
        cache[name] = (lse, delta), (minus_lse, minus_delta, lost)
    return minus_lse, minus_delta, lost
