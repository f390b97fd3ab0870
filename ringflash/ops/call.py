"""One attention call: its rare options, and the parameters that operators, fakes and gradients share, spelled once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ringflash.kernels import select
from ringflash.kernels.contract import ScoreConfig
from ringflash.masks import Mask, mask_from_spec, validated
from ringflash.ring.tiles import KernelRun


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of a call that are rarely changed.

    Args:
        return_lse: return (out, lse), lse (batch, nheads, seqlen_q) in natural logarithm; differentiable too.
        deterministic: gradients bitwise the same from run to run; False lets kernels add dq up in any order, where that
            is faster. None does what torch.use_deterministic_algorithms says.
        alibi_slopes: (nheads,) or (batch, nheads) float32; scores lose slope * |position_q - position_k|, after the
            softcap. Has no gradient. Source: Press et al. 2021, "Train short, test long".
        sinks: (nheads,), a learned logit a head that takes part in the softmax of every row that sees a key and has no
            value; lse includes it. Its gradient is of the rows here: in a ring each rank has its share, as of any
            parameter. Source: Xiao et al. 2023, "Efficient streaming language models with attention sinks".
        backend: "hopper" (Gluon kernels for sm_90, where they know mask and modes, else Triton's), "triton", "eager",
            or "auto": the first of these that the device and dtype allow; but on sm_90 the backward of up to 1024 rows
            (in the default mode above headdim 64: 512) whose heads do not share keys is Triton's, as fast or faster.
            Under `Documents`, with causal masks and windows alone, it is not.
    """

    return_lse: bool = False
    deterministic: bool | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    backend: str = "auto"


class AttentionCall(NamedTuple):
    """Parameters of an attention operator after q, k and v, in the order of its schema.

    An operator takes tensors and plain values, so a context crosses its boundary by name, and a mask as text and
    tensors.

    Args:
        sinks: (nheads,), a logit a head, or None.
        alibi_slopes: (nheads,) or (batch, nheads), or None.
        dropout_seed: a number in an int64 tensor; None without dropout.
        context: the name of the context; empty for a single device.
        mask: the text of the mask's `operands`.
        mask_tensors: the tensors of the mask's `operands`.
        softmax_scale: factor of q k^T.
        softcap: bound of the scores; 0 is none.
        dropout_p: share of the weights that is dropped.
        backend: "auto", "hopper", "triton" or "eager".
        deterministic: whether gradients must be bitwise repeatable.
    """

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    dropout_seed: Tensor | None
    context: str
    mask: str
    mask_tensors: Sequence[Tensor]
    softmax_scale: float
    softcap: float
    dropout_p: float
    backend: str
    deterministic: bool

    def without_tensors(self) -> AttentionCall:
        """Returns the call without sinks, slopes and seed, which differ between calls; it keeps the mask's tensors."""
        if self.sinks is None and self.alibi_slopes is None and self.dropout_seed is None:
            return self
        return self._replace(sinks=None, alibi_slopes=None, dropout_seed=None)

    def key(self, q: Tensor, k: Tensor, v: Tensor, mask: Hashable = None) -> Hashable:
        """Returns a key of this call for tensors like these; None if it has tensors besides the mask's.

        The context is no part of the key. A mask without tensors is its words alone. `mask` is the mask if the caller
        has made it already, or its packed form.
        """
        if self.sinks is not None or self.alibi_slopes is not None or self.dropout_seed is not None:
            return None
        mask = mask or (mask_from_spec(self.mask, self.mask_tensors) if self.mask_tensors else self.mask)
        plain = self.softmax_scale, self.softcap, self.backend, self.deterministic
        return q.shape, k.shape, v.shape, q.dtype, q.device, mask, *plain

    def mask_of(self, seqlen_k: int) -> Mask:
        """Returns the mask, checked for `seqlen_k` keys in all."""
        mask = mask_from_spec(self.mask, self.mask_tensors)
        return mask if self.context else validated(mask, seqlen_k)  # here, for a call that torch.compile has traced too

    def kernel_run(self, q: Tensor) -> KernelRun:
        """Returns the kernels for `q` and how they make scores."""
        score_config = ScoreConfig.of(
            q.dtype,
            self.softmax_scale,
            self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            dropout_p=self.dropout_p,
            dropout_seed=self.dropout_seed,
        )
        return KernelRun(select.choose(self.backend, q), score_config, self.deterministic)


SCHEMA = (
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? dropout_seed, str context, str mask, Tensor[] mask_tensors, "
    "float softmax_scale, float softcap, float dropout_p, str backend, bool deterministic"
)
