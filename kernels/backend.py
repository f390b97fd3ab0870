"""The interface of the backends `eager`, `triton` and `hopper`; the file `backend.py` of each has its class.

The classes decide, and functions of other files compute. Such a function is a static method of its class, because a
method around it would add a Python frame to every call.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ringflash.kernels.contract import BackwardArguments, DqSum, ForwardArguments, ScoreConfig, Tiling
from ringflash.kernels.decode_step import Partials, Step
from ringflash.masks import Mask
from ringflash.masks.base import Packing


class Backend(Protocol):
    """Attention by one family of kernels; it keeps nothing between calls, so one instance serves a process.

    Shapes: q, dq (batch, seqlen_q, nheads, headdim); k, dk (batch, seqlen_k, nheads_kv, headdim); v, dv and out, dout
    likewise with headdim_v; lse (batch, nheads, seqlen_q) in `lse_dtype`, natural logarithm; delta likewise in
    `state_dtype`; lengths (batch,). Methods that return None write their outputs in place.

    Methods of decoding take the whole cache as k and v, and read the first `lengths` keys of each sequence.

    Args:
        name: "eager", "triton" or "hopper".
    """

    name: str

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

    def packed_tilings(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, deterministic: bool
    ) -> tuple[Tiling, Tiling] | None:
        """Returns the tiles of forward and backward under packed documents whose tables the GPU makes.

        Such a call is one hop without score mods, whose backward is `backward_dkdv` with dq. None if these kernels read
        no such tables, or not for tensors like these.
        """
        ...

    def forward(self, given: ForwardArguments) -> None:
        """Continues the online softmax of the state over the keys of one hop, or starts or ends it."""
        ...

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """Returns rowsum(dout * out) - dlse in `state_dtype`."""
        ...

    def delta_of_one_hop(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
        """Returns delta as `backward_dkdv` of this backend, with dq, takes it in a backward of one hop.

        It is the tensor, or a `PendingDelta`, which that launch computes on its way.
        """
        ...

    def backward_dq(self, inputs: BackwardArguments, dq: Tensor, *, accumulate: bool) -> None:
        """Writes the dq of these keys, or adds it to `dq` when `accumulate`."""
        ...

    def backward_dkdv(
        self, inputs: BackwardArguments, dk: Tensor, dv: Tensor, *, accumulate: bool, dq: DqSum | None = None
    ) -> None:
        """Writes the dk and dv of these queries, contiguous, or adds them in `state_dtype` when `accumulate`.

        With `dq`, a sum from `new_dq`, the same pass adds the dq of these keys to the sum. The order of additions is
        fixed only if the sum is deterministic. Callers pass `dq` only where `fuses_dq` returns True.
        """
        ...

    def decode(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Returns out and lse of a decoding step."""
        ...

    def decode_splits(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> int:
        """Returns the number of parts into which `decode` cuts each sequence's keys."""
        ...

    def decode_partial(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> Partials:
        """Returns one state of a decoding step, without sinks."""
        ...

    def decode_combine(
        self, partials: Partials, score_config: ScoreConfig, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns out in `dtype` and lse over the keys of all states."""
        ...
