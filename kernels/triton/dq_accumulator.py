"""dQ while kernels add to it, of one hop after another."""

from __future__ import annotations

import torch
from torch import Tensor


class DqSum:
    """A sum of gradients of q (batch, seqlen_q, nheads, headdim) in `dtype`, which `finish` rounds to that of q.

    `ordered` is whether what is added is to be so in one order in every run.
    """

    def __init__(self, q: Tensor, dtype: torch.dtype, *, ordered: bool) -> None:
        self.q, self._dtype, self.ordered = q, dtype, ordered
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """What to add to, contiguous and of q's shape, in `dtype`: zeros at first."""
        if self._rows is None:
            self._rows = self.q.new_zeros(self.q.shape, dtype=self._dtype)
        return self._rows

    def finish(self) -> Tensor:
        """The sum, contiguous and of q's shape and dtype, zeros where nothing was added; it is forgotten here."""
        total, self._rows = self._rows, None
        return self.q.new_zeros(self.q.shape) if total is None else total.to(self.q.dtype)
