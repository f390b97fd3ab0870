"""Sum of dQ, to which kernels add in one hop after another."""

from __future__ import annotations

import torch
from torch import Tensor


class DqSum:
    """Sum in `dtype` of gradients of q (batch, seqlen_q, nheads, headdim); `finish` rounds the sum to the dtype of q.

    With `ordered`, kernels must add in the same order in every run.
    """

    def __init__(self, q: Tensor, dtype: torch.dtype, *, ordered: bool) -> None:
        self.q, self._dtype, self.ordered = q, dtype, ordered
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """Returns the tensor to add to, contiguous, of q's shape and in `dtype`; at first it holds zeros."""
        if self._rows is None:
            self._rows = self.q.new_zeros(self.q.shape, dtype=self._dtype)
        return self._rows

    def finish(self) -> Tensor:
        """Returns the sum, contiguous and of q's shape and dtype, or zeros if nothing was added; forgets the sum."""
        total, self._rows = self._rows, None
        return self.q.new_zeros(self.q.shape) if total is None else total.to(self.q.dtype)
