"""dQ while kernels add to it, of one hop after another."""

from __future__ import annotations

import torch
from torch import Tensor


class DqSum:
    """A sum of gradients of q (batch, seqlen_q, nheads, headdim) in `dtype`, which `finish` rounds to that of q."""

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self._q, self._dtype = q, dtype
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """What to add to, as q, in `dtype`: zeros at first."""
        if self._rows is None:
            self._rows = self._q.new_zeros(self._q.shape, dtype=self._dtype)
        return self._rows

    def finish(self) -> Tensor:
        """The sum, as q; zeros where nothing was added."""
        return torch.zeros_like(self._q) if self._rows is None else self._rows.to(self._q.dtype)
