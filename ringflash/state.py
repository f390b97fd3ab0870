"""The online-softmax state (m, l, O): a commutative monoid of partial attention results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of lse for inputs of `dtype`: float64 for float32 and float64, else float32.

    The backward subtracts lse from scores. At scores of 1e4, rounding lse to float32 changes probabilities by 5e-4.
    """
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `shape` and the strides of a contiguous tensor: arguments of `new_empty_strided`.

    That takes the host half the time of `new_empty`.
    """
    strides = accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1)
    return shape, tuple(strides)[::-1]


@dataclass(frozen=True)
class AttentionState:
    """Partial attention of some queries over some keys.

    With s_ij = softmax_scale * log2(e) * q_i . k_j over the keys j seen so far:
    m_i = max_j s_ij, l_i = sum_j 2^(s_ij - m_i), O_i = sum_j 2^(s_ij - m_i) v_j.

    Args:
        m: row maximum in base 2, (batch, nheads, seqlen), float32, or float64 if kernels compute in float64.
        l: row sum, with the shape and dtype of m.
        o: unnormalised output, (batch, seqlen, nheads, headdim of v), with the dtype of m.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.1.
    """

    m: Tensor
    l: Tensor  # noqa: E741 - the paper's name
    o: Tensor

    @staticmethod
    def allocate(
        batch: int, seqlen: int, nheads: int, headdim: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> AttentionState:
        """Returns an uninitialised state, for a first hop, which writes the state without reading it."""
        m = torch.empty(batch, nheads, seqlen, device=device, dtype=dtype)
        return AttentionState(m, torch.empty_like(m), m.new_empty(batch, seqlen, nheads, headdim))

    @staticmethod
    def empty(
        batch: int,
        seqlen: int,
        nheads: int,
        headdim: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> AttentionState:
        """Returns the identity of `merge`, the attention over no keys: m = -inf, l = 0, O = 0."""
        state = AttentionState.allocate(batch, seqlen, nheads, headdim, device=device, dtype=dtype)
        state.m.fill_(-math.inf)
        state.l.zero_()
        state.o.zero_()
        return state

    def merge(self, other: AttentionState) -> AttentionState:
        """Returns the attention of the same queries over both key sets; associative and commutative.

        m = max(m1, m2), l = l1 2^(m1-m) + l2 2^(m2-m), O likewise. Rows fully masked on both sides remain the identity.
        """
        m = torch.maximum(self.m, other.m)
        shift = m.masked_fill(m == -math.inf, 0.0)  # -inf minus -inf would be NaN
        weight1, weight2 = torch.exp2(self.m - shift), torch.exp2(other.m - shift)
        row_sum = self.l * weight1 + other.l * weight2
        o = self.o * weight1.transpose(1, 2)[..., None] + other.o * weight2.transpose(1, 2)[..., None]
        return AttentionState(m, row_sum, o)

    def with_sinks(self, sinks: Tensor | None) -> AttentionState:
        """Returns the attention with one more key a head, of logit `sinks` (nheads,) and no value.

        Fully masked rows have no sink.
        """
        if sinks is None:
            return self
        logits = (sinks.to(self.m.dtype) * LOG2E)[:, None].expand_as(self.m).masked_fill(self.l == 0, -math.inf)
        return self.merge(AttentionState(logits, (logits > -math.inf).to(self.l.dtype), torch.zeros_like(self.o)))

    def finalize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Returns out = O / l in `dtype` (the state's own by default) and lse = ln sum exp(scale q.k).

        out is (batch, seqlen, nheads, headdim) and lse (batch, nheads, seqlen); 0 and -inf in fully masked rows.
        """
        seen = self.l != 0  # True for NaN, which must reach the gradients
        divisor = self.l.masked_fill(~seen, 1.0)
        out = self.o / divisor.transpose(1, 2)[..., None]
        lse = (self.m.double() + torch.log2(divisor.double())) * LN2  # float64: rounds the backward's exponent once
        return out.to(dtype or out.dtype), lse.masked_fill(~seen, -math.inf).to(self.m.dtype)
