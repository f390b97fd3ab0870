"""What a hop computes: which queries meet which keys, and how their scores become weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringflash.dropout import number_of
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask
from ringflash.state import LOG2E


@dataclass(frozen=True, eq=False)
class ScoreConfig:
    """How scores are made from q k^T, and weights from scores; the same in every hop.

    score = softcap * tanh(softmax_scale * q k^T / softcap) - alibi_slope * |position_q - position_k|

    Args:
        softmax_scale: what q k^T is multiplied with.
        softcap: bound of the scores; 0 is none.
        alibi_slopes: (batch or 1, nheads), contiguous, float32 (float64 for float64 inputs), or None.
        sinks: (nheads,), likewise, a logit a head that takes weight from every row and has no value, or None.
        dropout_p: share of the weights that is dropped.
        dropout_seed: which ones.
        first_head: the number, among all heads, of the first one here; dropout goes by it.
    """

    softmax_scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    first_head: int = 0

    @staticmethod
    def of(
        dtype: torch.dtype,
        softmax_scale: float,
        softcap: float,
        *,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        dropout_p: float = 0.0,
        dropout_seed: Tensor | None = None,
    ) -> ScoreConfig:
        """From what a custom op is given: slopes and sinks of any shape and dtype allowed, for inputs of `dtype`."""
        dtype = torch.promote_types(dtype, torch.float32)
        return ScoreConfig(
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else torch.atleast_2d(alibi_slopes).to(dtype).contiguous(),
            sinks=None if sinks is None else sinks.to(dtype).contiguous(),
            dropout_p=dropout_p,
            dropout_seed=0 if dropout_seed is None else number_of(dropout_seed),
        )

    @property
    def has_score_mods(self) -> bool:
        """Whether scores are more than `softmax_scale` q k^T, or weights are dropped."""
        return self.softcap != 0 or self.alibi_slopes is not None or self.dropout_p != 0

    def of_heads(self, heads: range) -> ScoreConfig:
        """The same for some of the heads, next to each other."""
        slopes, sinks = self.alibi_slopes, self.sinks
        return replace(
            self,
            alibi_slopes=None if slopes is None else slopes[:, heads.start : heads.stop].contiguous(),
            sinks=None if sinks is None else sinks[heads.start : heads.stop].contiguous(),
            first_head=self.first_head + heads.start,
        )

    @property
    def before_tanh(self) -> float:
        """What q k^T is multiplied with before the tanh; without a softcap there is none."""
        return self.softmax_scale / self.softcap if self.softcap else 1.0

    @property
    def to_base2(self) -> float:
        """What comes next: scores in units of log2, for exp2."""
        return (self.softcap or self.softmax_scale) * LOG2E

    @property
    def kept_scale(self) -> float:
        """What the weights that dropout keeps are multiplied with."""
        return 1.0 / (1.0 - self.dropout_p)


@dataclass(frozen=True, eq=False)
class TileProblem:
    """Queries and keys of one hop; both know their global positions from their chunks.

    Args:
        q_chunks: where the rows of q stand, in storage order.
        k_chunks: where the rows of k and v stand.
        mask: which keys a query sees.
        score_config: what becomes of q k^T.
        cache: what kernels keep from one hop of a pass for the next, if there are several.
    """

    q_chunks: tuple[Chunk, ...]
    k_chunks: tuple[Chunk, ...]
    mask: Mask
    score_config: ScoreConfig
    cache: dict[str, Any] | None = None
