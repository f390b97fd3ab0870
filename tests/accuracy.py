"""How accurate attention must be: one table of bars, one comparison with float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.masks import Mask

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Bar:
    """Most that an error may be.

    Args:
        max_absolute: absolute, for results of size 1 (in proportion for larger ones: they have larger ulps).
        max_ratio: as a multiple of plain attention's largest error in the same dtype.
        rms_ratio: the same of RMS errors.
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
    """Random q, k, v and dout."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask | None
    softcap: float = 0.0

    @staticmethod
    def random(
        *,
        seqlen: int | tuple[int, int],
        heads: tuple[int, int] = (4, 2),
        headdim: int = 32,
        batch: int = 2,
        dtype: torch.dtype = torch.float32,
        mask: Mask | None = None,
        softcap: float = 0.0,
        device: str = "cpu",
        seed: int = 0,
    ) -> Problem:
        """Normal inputs; `seqlen` is (seqlen_q, seqlen_k) or both."""
        seqlen_q, seqlen_k = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
        generator = torch.Generator().manual_seed(seed)

        def draw(length: int, nheads: int) -> Tensor:
            x = torch.randn(batch, length, nheads, headdim, generator=generator, dtype=torch.float64)
            return x.to(device, dtype)

        q, k, v = draw(seqlen_q, heads[0]), draw(seqlen_k, heads[1]), draw(seqlen_k, heads[1])
        return Problem(q, k, v, draw(seqlen_q, heads[0]), mask, softcap)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with `change` made to every tensor."""
        return Problem(change(self.q), change(self.k), change(self.v), change(self.dout), self.mask, self.softcap)

    def run(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """out, dq, dk and dv of `attention`, on these inputs or on a copy in `dtype`."""
        q, k, v = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.q, self.k, self.v))
        out = attention(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.dout.to(out.dtype))]

    def exact(self) -> list[Tensor]:
        """out, dq, dk and dv in float64."""
        return self.run(
            lambda q, k, v: reference.attention(q, k, v, mask=self.mask, softcap=self.softcap)[0], torch.float64
        )

    def plain(self) -> list[Tensor]:
        """out, dq, dk and dv of the plain formula in the inputs' dtype."""
        return self.run(self._reference)

    def _reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, mask=self.mask, softcap=self.softcap)[0]

    def flash(self, **options: object) -> list[Tensor]:
        """out, dq, dk and dv of flash_attention."""
        rest = self._rest(options)
        return self.run(lambda q, k, v: as_tensor(rf.flash_attention(q, k, v, **rest)))

    def ring(self, context: rf.ContextParallel, **options: object) -> list[Tensor]:
        """out, dq, dk and dv of the whole sequence by ring_attention."""
        rest = self._rest(options)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (context.shard(x) for x in (q, k, v))
            return context.unshard(as_tensor(rf.ring_attention(q, k, v, context, **rest)))

        return self.run(attention)

    def _rest(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"mask": self.mask, "softcap": self.softcap, "options": rf.AttentionOptions(**options)}


def as_tensor(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def assert_accurate(got: Sequence[Tensor], problem: Problem, *, rounding: float = 0.0) -> None:
    """Each of out, dq, dk and dv is within the bar of its dtype.

    `rounding` is what may always be, in eps of the result's size: for kernels that compute float32 in float32. Rows
    that see a key or two, which make the largest errors, are exact in plain attention by luck, while a flash backward
    rounds dP and delta apart.
    """
    bar = BARS[got[0].dtype]
    for name, g, e, p in zip(NAMES, got, problem.exact(), problem.plain(), strict=True):
        assert g.shape == e.shape
        assert torch.isfinite(g).all(), f"{name} has a NaN or Inf"
        error, plain_error = (g.double() - e).abs(), (p.double() - e).abs()
        size = max(1.0, e.abs().max().item())
        terms = problem.q.shape[1] * problem.q.shape[2] / problem.k.shape[2] if name in ("dk", "dv") else 1.0
        few_keys = 1.0 if problem.k.shape[1] <= 3 else 0.0
        floor = rounding if g.dtype == torch.float32 else 0.0
        allowed = max(floor, few_keys) * torch.finfo(g.dtype).eps * max(size, math.sqrt(terms) / 4)
        largest = min(bar.max_absolute * size, _multiple(bar.max_ratio, plain_error.max().item(), allowed))
        rms_limit = _multiple(bar.rms_ratio, rms_of(plain_error), allowed / 4)
        assert error.max().item() <= largest, f"{name}: max error {error.max().item():.3g}, bar {largest:.3g}"
        assert rms_of(error) <= rms_limit, f"{name}: RMS error {rms_of(error):.3g}, bar {rms_limit:.3g}"


def _multiple(ratio: float, error: float, least: float) -> float:
    return math.inf if ratio == math.inf else max(ratio * error, least)


def rms_of(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()
