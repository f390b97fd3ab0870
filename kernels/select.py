"""Choice of the tile kernels that compute a hop, and the contract that all of them share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.contract import DqSum, ScoreConfig, TileProblem
from ringflash.kernels.eager import prefill
from ringflash.masks import Mask
from ringflash.state import AttentionState

BACKENDS = ("auto", "hopper", "triton", "eager")


class TileKernels(Protocol):
    """Kernels that compute one device's part of a hop.

    Shapes: q, dq (batch, seqlen_q, nheads, headdim); k, dk (batch, seqlen_k, nheads_kv, headdim); v, dv and out, dout
    likewise with headdim_v; lse (batch, nheads, seqlen_q) in `lse_dtype`, natural logarithm; delta likewise in
    `state_dtype`. All outputs are written in place.
    """

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the state and of unfinished gradients, which pass from hop to hop."""
        ...

    def new_dq(self, q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
        """Returns a sum of zeros, to which `backward_dkdv` adds the dq of `hops` hops; its `finish` returns dq."""
        ...

    def fuses_dq(
        self, q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool
    ) -> bool:
        """Returns whether `backward_dkdv` with dq is the faster backward.

        Args:
            q: the queries.
            v: values of one launch; in a ring, of one hop.
            mask: the keys that each query sees.
            score_config: parameters of scores and weights.
            hops: number of hops of the backward.
            deterministic: compare only deterministic backwards.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: TileProblem,
        *,
        state: AttentionState | None,
        out: Tensor,
        lse: Tensor,
        first: bool,
        last: bool,
    ) -> None:
        """Continues the online softmax of `state`; `first` does not read it, `last` writes out and lse instead."""
        ...

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """Returns rowsum(dout * out) - dlse in `state_dtype`."""
        ...

    def delta_of_one_hop(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
        """Returns delta as `backward_dkdv` of these kernels, with dq, takes it in a backward of one hop.

        It is the tensor, or a `PendingDelta`, which that launch computes on its way.
        """
        ...

    def backward_dq(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        problem: TileProblem,
        *,
        accumulate: bool,
    ) -> None:
        """Writes the dq of these keys, or adds it to `dq` when `accumulate`."""
        ...

    def backward_dkdv(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        dk: Tensor,
        dv: Tensor,
        problem: TileProblem,
        *,
        accumulate: bool,
        dq: DqSum | None = None,
    ) -> None:
        """Writes the dk and dv of these queries, contiguous, or adds them in `state_dtype` when `accumulate`.

        With `dq`, a sum from `new_dq`, the same pass adds the dq of these keys to the sum. The order of additions is
        fixed only if the sum is deterministic. Callers pass `dq` only where `fuses_dq` returns True.
        """
        ...


def kernels_of(x: Tensor) -> AbstractContextManager[None]:
    """Returns a context for kernels: the device of `x`, without autocast, so that their matmuls keep their dtype."""
    # Asking takes less time than ending an autocast that is not on.
    return _without_autocast(x) if torch.is_autocast_enabled(x.device.type) else torch.cuda.device_of(x)


@contextmanager
def _without_autocast(x: Tensor) -> Generator[None, None, None]:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        yield


def choose(name: str, q: Tensor) -> TileKernels:
    """Returns the kernels for `q`.

    "triton" and "eager" are the kernels of these names. "hopper" uses the kernels for sm_90, and Triton's for calls
    that those do not support. "auto" uses the first of hopper, triton and eager that device and dtype allow. If
    that is hopper, `kernels/auto.py` leaves backwards of little work to Triton's kernels.

    Raises:
        ArgumentError: if the name is unknown, or the named backend does not support the device or dtype.
    """
    if name not in BACKENDS:
        raise ArgumentError("backend", expected=f"one of {BACKENDS}", got=repr(name), remedy="Choose one of these.")
    if name == "eager" or (name == "auto" and not (q.is_cuda and q.dtype != torch.float64)):
        return prefill
    return _in_triton(name, q.device, q.dtype)


@lru_cache(maxsize=256)
def _in_triton(name: str, device: torch.device, dtype: torch.dtype) -> TileKernels:
    """Returns the kernels of the other backends; cached, because the checks give the same result in every call."""
    from ringflash.kernels import auto, fallback
    from ringflash.kernels.hopper import backend as hopper
    from ringflash.kernels.triton import backend  # imported here, so that CPU users never import Triton

    backend.check_supported(device, dtype)
    missing = None if name == "triton" else fallback.why_not(device)
    if name == "hopper" and missing is not None:
        remedy = 'Choose "auto" or "triton".'
        raise ArgumentError("backend", expected="what the hopper kernels run on", got=missing, remedy=remedy)
    if missing is not None:
        fallback.report_device(missing, fallback.remedy(device))
    if name == "triton" or missing is not None:
        return backend
    return hopper if name == "hopper" else auto
