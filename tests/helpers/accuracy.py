"""Accuracy that attention must have: one table of bars, and one comparison with float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.masks import Mask, as_mask

NAMES = ("out", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Bar:
    """Upper limits of an error.

    Args:
        max_absolute: limit for results of size 1. It grows in proportion for larger results, which have larger ulps.
        max_ratio: limit as a multiple of plain attention's largest error in the same dtype.
        rms_ratio: limit of the RMS error as a multiple of plain attention's RMS error.
    """

    max_absolute: float = math.inf
    max_ratio: float = math.inf
    rms_ratio: float = math.inf


BARS = {
    torch.float64: Bar(max_absolute=1e-12),
    torch.float32: Bar(max_absolute=1e-5, max_ratio=2.0),
    torch.float16: Bar(max_ratio=1.25, rms_ratio=0.75),
    torch.bfloat16: Bar(max_ratio=1.25, rms_ratio=0.75),
}


@dataclass(frozen=True)
class Problem:
    """Random q, k, v and dout, and the options of the attention over them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask | None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout: rf.Dropout | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @staticmethod
    def random(
        *,
        seqlen: int | tuple[int, int],
        heads: tuple[int, int] = (4, 2),
        headdim: int | tuple[int, int] = 32,
        batch: int = 2,
        dtype: torch.dtype = torch.float32,
        mask: Mask | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        dropout: rf.Dropout | None = None,
        alibi: int = 0,
        sinks: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> Problem:
        """Draws inputs from a normal distribution.

        Args:
            seqlen: (seqlen_q, seqlen_k), or one length for both.
            headdim: (headdim of q and k, headdim of v), or one width for both.
            alibi: number of dimensions of the slopes: 1 for (nheads,), 2 for (batch, nheads), 0 for no slopes.
        """
        seqlen_q, seqlen_k = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
        generator = torch.Generator().manual_seed(seed)
        of_qk, of_v = (headdim, headdim) if isinstance(headdim, int) else headdim

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        q, k = draw(batch, seqlen_q, heads[0], of_qk), draw(batch, seqlen_k, heads[1], of_qk)
        v, dout = draw(batch, seqlen_k, heads[1], of_v), draw(batch, seqlen_q, heads[0], of_v)
        slopes = torch.rand((batch, heads[0])[2 - alibi :], generator=generator).to(device) / 4 if alibi else None
        logits = draw(heads[0]) if sinks else None
        return Problem(q, k, v, dout, mask, softmax_scale, softcap, dropout, slopes, logits)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Returns a copy of the problem with `change` applied to q, k, v and dout."""
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v), dout=change(self.dout))

    def run(self, attention: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Returns out, dq, dk, dv and any dsinks of `attention` on these inputs, or on a copy in `dtype`."""
        given = [self.q, self.k, self.v, *([] if self.sinks is None else [self.sinks])]
        inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        out = attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.dout.to(out.dtype))]

    @cached_property
    def exact(self) -> list[Tensor]:
        """Returns the results of the plain formula in float64."""
        return self.run(self._reference, torch.float64)

    @cached_property
    def plain(self) -> list[Tensor]:
        """Returns the results of the plain formula in the inputs' dtype."""
        return self.run(self._reference)

    def _reference(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return reference.attention(q, k, v, **self._modes, alibi_slopes=self.alibi_slopes, sinks=sinks)[0]

    def flash(self, **options: Any) -> list[Tensor]:
        """Returns the results of flash_attention."""
        return self.run(
            lambda q, k, v, sinks=None: as_tensor(rf.flash_attention(q, k, v, **self._rest(sinks, options)))
        )

    def ring(self, context: rf.ContextParallel, **options: Any) -> list[Tensor]:
        """Returns the results of ring_attention, joined to the whole sequence."""

        def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            mask = as_mask(self.mask)
            q, k, v = (context.shard(x, mask=mask) for x in (q, k, v))
            out = rf.ring_attention(q, k, v, context, **self._rest(sinks, options))
            return context.unshard(as_tensor(out), mask=mask)

        return self.run(attention)

    def _rest(self, sinks: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
        chosen = rf.AttentionOptions(alibi_slopes=self.alibi_slopes, sinks=sinks, **options)
        return {**self._modes, "options": chosen}

    @property
    def _modes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mask", "softmax_scale", "softcap", "dropout")}


def as_tensor(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def assert_accurate(got: Sequence[Tensor], problem: Problem, *, rounding: float = 0.0) -> None:
    """Checks that each of out, dq, dk, dv and dsinks is within the bar of its dtype."""
    assert_accurate_together([got], [problem], rounding=rounding)


def assert_accurate_together(
    results: Sequence[Sequence[Tensor]], problems: Sequence[Problem], *, rounding: float = 0.0
) -> None:
    """Like `assert_accurate`, but takes several problems that differ only in their numbers as one sample.

    A few rows decide the largest error of a kernel. The largest errors of two kernels are therefore comparable only
    over many rows.

    Rows that see one or two keys have the largest errors. Plain attention computes them exactly by luck, while a flash
    backward rounds dP and delta separately. dsinks has one number per head, too few for steady ratios. It may always
    have the error of a random walk with steps of one eps per row.

    Args:
        rounding: error that float32 results may always have, in eps of the result's size. It is for kernels that
            compute float32 in float32.
    """
    problem = problems[0]
    bar = BARS[problem.q.dtype]
    for index, name in enumerate(NAMES[: len(results[0])]):
        g = torch.cat([got[index] for got in results])
        e, p = (
            torch.cat([of[index] for of in side]) for side in zip(*((x.exact, x.plain) for x in problems), strict=True)
        )
        assert g.shape == e.shape
        assert torch.isfinite(g).all(), f"{name} has a NaN or Inf"
        error, plain_error = (g.double() - e).abs(), (p.double() - e).abs()
        size = max(1.0, e.abs().max().item())
        terms = problem.q.shape[1] * problem.q.shape[2] / problem.k.shape[2] if name in ("dk", "dv") else 1.0
        few_keys = 1.0 if problem.k.shape[1] <= 3 else 0.0
        floor = rounding if g.dtype == torch.float32 else 0.0
        eps = torch.finfo(g.dtype).eps
        allowed = max(floor, few_keys) * eps * max(size, math.sqrt(terms) / 4)
        if name == "dsinks":
            allowed = max(allowed, eps * math.sqrt(problem.q.shape[0] * problem.q.shape[1]))
        largest = min(bar.max_absolute * size, _multiple(bar.max_ratio, plain_error.max().item(), allowed))
        rms_limit = _multiple(bar.rms_ratio, rms_of(plain_error), allowed / 4)
        assert error.max().item() <= largest, f"{name}: max error {error.max().item():.3g}, bar {largest:.3g}"
        assert rms_of(error) <= rms_limit, f"{name}: RMS error {rms_of(error):.3g}, bar {rms_limit:.3g}"


def _multiple(ratio: float, error: float, least: float) -> float:
    return math.inf if ratio == math.inf else max(ratio * error, least)


def rms_of(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()
