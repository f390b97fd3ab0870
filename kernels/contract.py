"""Description of one hop: its queries and keys, the mask between them, and how scores become weights."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringflash.dropout import number_of
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask
from ringflash.state import LOG2E, AttentionState


@dataclass(frozen=True, eq=False)
class ScoreConfig:
    """Parameters that turn q k^T into scores, and scores into weights; the same in every hop.

    score = softcap * tanh(softmax_scale * q k^T / softcap) - alibi_slope * |position_q - position_k|

    Args:
        softmax_scale: factor of q k^T.
        softcap: bound of the scores; 0 means no bound.
        alibi_slopes: (batch or 1, nheads), contiguous, float32 (float64 for float64 inputs), or None.
        sinks: (nheads,), contiguous and of the same dtype, or None. A sink is one logit a head without a value; it
            takes weight from every row that sees a key.
        dropout_p: share of the weights that dropout drops.
        dropout_seed: seed that selects the dropped weights.
        first_head: number of the first head here, counted among all heads; dropout is keyed by it.
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
        """Returns the config for inputs of `dtype`; slopes and sinks may have any shape and dtype that ops accept."""
        dtype = torch.promote_types(dtype, torch.float32)
        return ScoreConfig(
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else torch.atleast_2d(alibi_slopes).to(dtype).contiguous(),
            sinks=None if sinks is None else sinks.to(dtype).contiguous(),
            dropout_p=dropout_p,
            dropout_seed=0 if dropout_seed is None else number_of(dropout_seed),
        )

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The slopes and the sinks, as far as there are any."""
        return tuple(x for x in (self.alibi_slopes, self.sinks) if x is not None)

    @cached_property
    def launch_key(self) -> Hashable:
        """Everything but addresses that launches take from this config; None with dropout, whose seed changes."""
        if self.dropout_p:
            return None
        layouts = (None if x is None else (x.shape, x.stride(), x.dtype) for x in (self.alibi_slopes, self.sinks))
        return self.softmax_scale, self.softcap, self.first_head, *layouts

    @cached_property
    def has_score_mods(self) -> bool:
        """Returns whether scores are more than `softmax_scale` q k^T, or weights are dropped."""
        return self.softcap != 0 or self.alibi_slopes is not None or self.dropout_p != 0

    def of_heads(self, heads: range) -> ScoreConfig:
        """Returns the config of a consecutive range of the heads."""
        slopes, sinks = self.alibi_slopes, self.sinks
        return replace(
            self,
            alibi_slopes=None if slopes is None else slopes[:, heads.start : heads.stop].contiguous(),
            sinks=None if sinks is None else sinks[heads.start : heads.stop].contiguous(),
            first_head=self.first_head + heads.start,
        )

    @property
    def before_tanh(self) -> float:
        """Factor of q k^T before the tanh; 1 without a softcap, because then there is no tanh."""
        return self.softmax_scale / self.softcap if self.softcap else 1.0

    @cached_property
    def to_base2(self) -> float:
        """Factor that follows the tanh, or q k^T without a softcap; it gives scores in units of log2, for exp2."""
        return (self.softcap or self.softmax_scale) * LOG2E

    @property
    def kept_scale(self) -> float:
        """Factor of the weights that dropout keeps."""
        return 1.0 / (1.0 - self.dropout_p)


class Tiling(NamedTuple):
    """Tiles of a launch under packed documents, and properties of its tables that the host knows.

    Args:
        own_block: rows of an owned tile.
        block: rows of a tile of the other side, which owned tiles process.
        by_keys: whether tiles of keys are the owned ones.
        ordered: whether tiles are owned in storage order, and take turns by a table.
        below: False if every row sees the beginning of each tile that its owned tile processes.
        above: False if every row sees the end of each such tile.
        skew: about the largest number of processed tiles over the average.
    """

    own_block: int
    block: int
    by_keys: bool
    ordered: bool
    below: bool = True
    above: bool = True
    skew: float = 2.0


@dataclass(frozen=True, eq=False)
class TileProblem:
    """Queries and keys of one hop; their chunks give their global positions.

    Args:
        q_chunks: global positions of the rows of q, in storage order.
        k_chunks: global positions of the rows of k and v, in storage order.
        mask: the keys that each query sees.
        score_config: parameters of scores and weights.
        cache: values that kernels keep from one hop of a pass for the next; None keeps nothing.
        place: a value that stands for the chunks and the mask: equal places have equal ones. None stands for nothing.
        tiling: tiles of the launch, if the GPU has made the tables of the mask. The place then stands for any mask of
            packed documents of the same form.
        tables: these tables.
    """

    q_chunks: tuple[Chunk, ...]
    k_chunks: tuple[Chunk, ...]
    mask: Mask
    score_config: ScoreConfig
    cache: dict[str, Any] | None = None
    place: Hashable = None
    tiling: Tiling | None = None
    tables: tuple[Tensor, ...] = ()

    def by_value(self) -> TileProblem:
        """Returns the problem for kernels whose tables the host makes of the mask."""
        if self.tiling is None:
            return self
        return replace(self, tiling=None, tables=(), place=(self.place, self.mask))

    def launch_key(self, *parts: Hashable) -> Hashable:
        """Returns a key of launches for this problem and further `parts`; None if none of them can be repeated."""
        of_scores = self.score_config.launch_key
        return None if self.place is None or of_scores is None else (self.place, of_scores, *parts)


class PendingDelta(NamedTuple):
    """delta = rowsum(dout * out) - dlse, not computed yet: a backend computes it before the gradients of the hop.

    Args:
        out: (batch, seqlen_q, nheads, headdim_v).
        dlse: (batch, nheads, seqlen_q), or None.
    """

    out: Tensor
    dlse: Tensor | None


class ForwardArguments(NamedTuple):
    """Arguments of `Backend.forward`, which continues the online softmax of `state` over the keys of one hop, in place.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_kv, headdim).
        v: (batch, seqlen_k, nheads_kv, headdim_v).
        problem: positions, mask and score settings of the hop.
        state: the state of the hops before, which is overwritten; None if the hop is first and last.
        out: (batch, seqlen_q, nheads, headdim_v), contiguous; written by the last hop.
        lse: (batch, nheads, seqlen_q), contiguous, natural logarithm; written by the last hop.
        first: start from the identity, without reading the state.
        last: write out and lse instead of the state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    problem: TileProblem
    state: AttentionState | None
    out: Tensor
    lse: Tensor
    first: bool
    last: bool


class BackwardArguments(NamedTuple):
    """Inputs of the gradients of one hop.

    Args:
        dout: gradient of out (batch, seqlen_q, nheads, headdim_v).
        q, k, v: as in `ForwardArguments`.
        lse: (batch, nheads, seqlen_q), contiguous, over the keys of all hops.
        delta: rowsum(dout * out) less the gradient of lse, contiguous, in the shape of lse; or what
            `Backend.delta_of_one_hop` returned.
        problem: as in `ForwardArguments`.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Any
    problem: TileProblem


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
