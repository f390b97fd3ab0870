"""Which tile kernels compute a hop: the contract they share, and the choice between them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.contract import ScoreConfig, TileProblem
from ringflash.kernels.eager import prefill
from ringflash.kernels.fallback import report_device
from ringflash.kernels.triton.dq_accumulator import DqSum
from ringflash.masks import Mask
from ringflash.state import AttentionState

BACKENDS = ("auto", "hopper", "triton", "eager")


class TileKernels(Protocol):
    """One device's work in a hop.

    Shapes: q, dq (batch, seqlen_q, nheads, headdim); k, dk (batch, seqlen_k, nheads_kv, headdim); v, dv and out, dout
    likewise with headdim_v; lse (batch, nheads, seqlen_q) in `lse_dtype`, natural logarithm; delta likewise in
    `state_dtype`. All outputs are written in place.
    """

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the state, and gradients that are still added to, pass from hop to hop."""
        ...

    def new_dq(self, q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
        """Zeros to which `backward_dkdv` adds dq's share of so many hops; in the end its `finish` gives dq."""
        ...

    def fuses_dq(
        self, q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool
    ) -> bool:
        """Whether `backward_dkdv` with dq is the faster backward, of those that are deterministic where it is to be.

        q, and v of as many rows as a launch takes of keys: in a ring those of each of so many hops.
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
        """rowsum(dout * out) - dlse, in `state_dtype`."""
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
        """Writes dq over these keys, or adds it when `accumulate`."""
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
        """Writes dk and dv, contiguous, over these queries, or adds them, then float32, when `accumulate`.

        With `dq`, from `new_dq`, its share of these keys is added to it in the same pass, in any order unless that was
        asked for a deterministic one: only where `fuses_dq`.
        """
        ...


def kernels_of(x: Tensor) -> AbstractContextManager[None]:
    """Where kernels run: on the device of `x`, and without autocast, so that their own matmuls keep their dtype."""
    # To end an autocast that is not on would take longer than to ask.
    return _without_autocast(x) if torch.is_autocast_enabled(x.device.type) else torch.cuda.device_of(x)


@contextmanager
def _without_autocast(x: Tensor) -> Generator[None, None, None]:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        yield


def choose(name: str, q: Tensor) -> TileKernels:
    """The kernels for `q`.

    "triton" and "eager" are those. "hopper" are those for sm_90, with Triton's for what they do not know. "auto" is
    the first of hopper, triton and eager that device and dtype allow; where that is hopper it is `automatic`, which
    leaves backwards of little work to Triton's.

    Raises:
        ArgumentError: unknown name, or a device or dtype that the named backend cannot do.
    """
    if name not in BACKENDS:
        raise ArgumentError("backend", expected=f"one of {BACKENDS}", got=repr(name), remedy="Choose one of these.")
    if name == "eager" or (name == "auto" and not (q.is_cuda and q.dtype != torch.float64)):
        return prefill
    return _in_triton(name, q.device, q.dtype)


@lru_cache(maxsize=256)
def _in_triton(name: str, device: torch.device, dtype: torch.dtype) -> TileKernels:
    """`choose` of the others, which asks what does not change while a process runs, and in every call."""
    from ringflash.kernels import auto
    from ringflash.kernels.hopper import backend as hopper
    from ringflash.kernels.triton import backend  # here, so that CPU users never import Triton

    backend.check_supported(device, dtype)
    missing = None if name == "triton" else hopper.why_not(device)
    if name == "hopper" and missing is not None:
        remedy = 'Choose "auto" or "triton".'
        raise ArgumentError("backend", expected="what the hopper kernels run on", got=missing, remedy=remedy)
    if missing is not None:
        report_device(missing, hopper.remedy(device))
    if name == "triton" or missing is not None:
        return backend
    return hopper if name == "hopper" else auto
