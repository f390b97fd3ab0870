"""The tile computations of one rank in a pass: the settings of its kernels, and the gradients of one tile at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.backend import Backend
from ringflash.kernels.contract import BackwardArguments, DqSum, PendingDelta, ScoreConfig, TileProblem
from ringflash.masks import Mask
from ringflash.ring.buffers import Buffers, Pair
from ringflash.ring.plan import Hop, Plan
from ringflash.state import lse_dtype


@dataclass(frozen=True)
class KernelRun:
    """Kernels of a pass, with the settings common to all hops.

    Args:
        kernels: the backend.
        score_config: parameters of scores and weights.
        deterministic: whether gradients must be bitwise repeatable.
        cache: values that kernels keep from one hop of the pass for the next.
    """

    kernels: Backend
    score_config: ScoreConfig
    deterministic: bool
    cache: dict[str, Any] = field(default_factory=dict, compare=False)

    def problem(self, plan: Plan, hop: Hop) -> TileProblem:
        """Returns the positions of the queries and keys at `hop`, with the mask and score settings for the kernels."""
        place = plan.identity, hop.index
        return TileProblem(plan.q_chunks, hop.chunks, plan.mask, self.score_config, self.cache, place)

    def single_pass(self, q: Tensor, v: Tensor, mask: Mask, *, hops: int) -> bool:
        """Returns whether one kernel computes dq, dk and dv at each hop, instead of one for dq and one for dk and dv.

        The choice is made once for a backward of `hops` hops. It assumes that every hop has as many keys as `v` has
        rows.
        """
        deterministic = self.deterministic
        return self.kernels.fuses_dq(q, v, mask, self.score_config, hops=hops, deterministic=deterministic)

    def new_dq(self, q: Tensor, *, hops: int) -> DqSum:
        """Returns the accumulator to which the one kernel of `single_pass` adds dq over `hops` hops."""
        return self.kernels.new_dq(q, hops=hops, deterministic=self.deterministic)


class TileGradients:
    """Computes the gradients of one tile after another, while dK and dV of its keys arrive and afterwards.

    With separate kernels the dQ kernel runs before the arrival, and the dK/dV kernel adds to what arrived. With one
    kernel for all three gradients (`KernelRun.single_pass`), its dK and dV are added to what arrived.
    """

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        lse: Tensor,
        delta: Tensor | PendingDelta,
        plan: Plan,
        kernel_run: KernelRun,
        gradients: Buffers,
    ) -> None:
        self._dout, self._q, self._lse, self._delta = dout, q, lse, delta
        self._plan, self._kernel_run, self._gradients = plan, kernel_run, gradients
        self._dq: Tensor | None = None
        self._dq_sum: DqSum | None = None
        self._share: Pair | None = None
        self._tile: BackwardArguments | None = None

    def before_arrival(self, hop: Hop, kv: Buffers) -> None:
        """Computes dQ of a tile; with one kernel also this rank's share of dK and dV."""
        self._share = self._tile = None
        if not hop.meets:
            return
        q, hops, kernels = self._q, len(self._plan.hops), self._kernel_run.kernels
        keys, values = kv.keys_and_values(hop)
        is_first = self._dq is None and self._dq_sum is None
        if is_first and self._kernel_run.single_pass(q, values, self._plan.mask, hops=hops):
            self._dq_sum = self._kernel_run.new_dq(q, hops=hops)
        if self._dq_sum is None and isinstance(delta := self._delta, PendingDelta):
            self._delta = kernels.delta(delta.out, self._dout, delta.dlse)
        problem = self._kernel_run.problem(self._plan, hop)
        inputs = BackwardArguments(self._dout, q, keys, values, self._lse, self._delta, problem)
        if self._dq_sum is not None:
            self._share = self._gradients.gradient(hop) if hop.starts else self._gradients.scratch(hop)
            kernels.backward_dkdv(inputs, *self._share, accumulate=False, dq=self._dq_sum)
            return
        if self._dq is None:
            rounds_once = self._plan.world_size == 1 or self._plan.grouped
            dtype = q.dtype if rounds_once else kernels.state_dtype(q.dtype)
            self._dq = q.new_empty(q.shape, dtype=dtype)
        kernels.backward_dq(inputs, self._dq, accumulate=not is_first)
        self._tile = inputs

    def after_arrival(self, hop: Hop) -> None:
        """Adds this rank's share of dK and dV to the sum of earlier ranks."""
        if self._tile is not None:
            self._share = self._gradients.gradient(hop)
            self._kernel_run.kernels.backward_dkdv(self._tile, *self._share, accumulate=not hop.starts)
        self._gradients.store(hop, self._share)
        self._share = self._tile = None

    def dq(self) -> Tensor:
        """Returns dq in the dtype of q, after the last tile."""
        if self._dq_sum is not None:
            return self._dq_sum.finish()
        return self._q.new_zeros(self._q.shape) if self._dq is None else self._dq.to(self._q.dtype)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates uninitialised storage for out and lse, the results of `forward`."""
    batch, seqlen, nheads, _ = q.shape
    lse = q.new_empty((batch, nheads, seqlen), dtype=lse_dtype(q.dtype))
    return q.new_empty((batch, seqlen, nheads, v.shape[3])), lse


def sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns dsinks = sum over this rank's rows of exp(sink - lse) * -delta, (nheads,); empty without sinks.

    The shares of other ranks are not added. A sink is a key without a value, so the gradient of its score is its weight
    times -delta. Fully masked rows have no sink.
    """
    if sinks is None:
        return lse.new_empty(0)
    weights = torch.exp(sinks[:, None].double() - lse.double()).masked_fill(lse == -torch.inf, 0.0)
    return (weights * -delta).masked_fill(lse == -torch.inf, 0.0).sum((0, 2)).to(lse.dtype)
