"""Matrix products in which masked pairs contribute nothing, whatever the storage of masked rows holds.

A masked pair has weight 0, but 0 * NaN and 0 * Inf are NaN. Tiles without a masked pair need no care, and neither do
finite operands: for both, the product is the plain matmul, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_finite(x: Tensor) -> bool:
    """Returns True if the sum of `x` is finite, so that all of `x` is. Waits for a GPU."""
    return bool(x.sum().isfinite())


def isolated_matmul(weights: Tensor, x: Tensor, seen: Callable[[], Tensor], *, finite: bool) -> Tensor:
    """Returns weights @ x over the pairs that are seen.

    Infinite and undefined elements of `x` are taken out of the matmul and counted instead: a positive weight on Inf
    gives Inf, a weight of 0 on Inf gives NaN, any weight on NaN gives NaN. All other elements keep their bits.

    Args:
        weights: (..., rows, columns), exactly 0 where a pair is masked; a NaN row gives NaN.
        x: (..., columns, headdim).
        seen: returns bool (..., rows, columns), broadcast to `weights`; called only if not `finite`.
        finite: whether `x` is known to be finite.
    """
    if finite:
        return weights @ x
    pairs = seen().expand_as(weights)
    infinities, undefined = torch.where(x.isinf(), x.sign(), 0.0), x.isnan()
    signs = weights.sign()
    sizes, net = signs.abs() @ infinities.abs(), signs @ infinities
    zeros = pairs & ~(weights.abs() > 0)
    lost = zeros.to(x.dtype) @ infinities.abs() + pairs.to(x.dtype) @ undefined.to(x.dtype)
    product = weights @ x.masked_fill(undefined | x.isinf(), 0.0)
    product += torch.where(sizes + net > 0, torch.inf, 0.0)
    product += torch.where(sizes - net > 0, -torch.inf, 0.0)
    return product.masked_fill_(lost > 0, torch.nan)
