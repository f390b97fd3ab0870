"""Problems of the benchmarks: random self-attention, its form for a contender, and the shared options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash.commands.options import Described, add_shared

AGREEMENT = 0.05  # share of the largest value: above errors of low precision, below errors of a wrong mask or scale


@dataclass(frozen=True)
class Problem:
    """Self-attention of whole sequences: full, causal, or under any other mask.

    Args:
        q: (batch, seqlen, nheads, headdim).
        k: (batch, seqlen, nheads_kv, headdim).
        v: (batch, seqlen, nheads_kv, headdim).
        dout: (batch, seqlen, nheads, headdim).
        causal: whether a query sees only keys up to its own position.
        mask: the whole mask, the causal part included; None means that `causal` is the whole mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool = True
    mask: Any = None

    @property
    def row_bytes(self) -> int | None:
        """Returns the bytes of a token's keys and values, as `ContextParallel.plan` takes them; None on CPUs."""
        return sum(x[:, 0].nbytes for x in (self.k, self.v)) if self.k.is_cuda else None

    @staticmethod
    def random(
        seqlen: int,
        nheads: int,
        nheads_kv: int,
        headdim: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch: int = 1,
        causal: bool = True,
        mask: Any = None,
    ) -> Problem:
        """Returns a problem with normally distributed inputs, the same in every process."""
        generator = torch.Generator(device).manual_seed(seqlen)

        def draw(heads: int) -> Tensor:
            return torch.randn(batch, seqlen, heads, headdim, generator=generator, device=device, dtype=dtype)

        return Problem(draw(nheads), draw(nheads_kv), draw(nheads_kv), draw(nheads), causal, mask)

    @property
    def seqlen(self) -> int:
        """Number of tokens in a whole sequence."""
        return self.q.shape[1]

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def visible(self) -> Any:
        """Returns the mask to pass to attention."""
        return self.mask or (rf.Causal() if self.causal else None)

    @property
    def forward_flops(self) -> float:
        """Returns the FLOPs of a forward: 4 batch seqlen^2 nheads headdim, halved for a causal problem.

        Under `mask`, the exact number of visible pairs replaces seqlen^2.
        """
        batch, seqlen, nheads, headdim = self.q.shape
        if self.mask is not None:
            return 4.0 * batch * int(self.mask.area(seqlen, seqlen).row_pairs.sum()) * nheads * headdim
        return (2.0 if self.causal else 4.0) * batch * seqlen**2 * nheads * headdim

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Returns the problem with `change` applied to every tensor."""
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v), dout=change(self.dout))

    def repeated(self) -> Problem:
        """Returns the problem with KV heads repeated to the query heads, for contenders without grouped heads."""
        return replace(self, k=self.k.repeat_interleave(self.group, 2), v=self.v.repeat_interleave(self.group, 2))

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v as leaves that require gradients, on the same storage."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v


@dataclass(frozen=True)
class Setup:
    """A problem, or one rank's part of it, in the form that a contender takes.

    Args:
        inputs: q, k and v in the contender's form, as leaves that require gradients.
        dout: the gradient of the output.
        call: the attention function of q, k and v.
        whole: converts an output or gradient to (batch, seqlen, heads, headdim), with the parts of all ranks joined.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    whole: Callable[[Tensor], Tensor]

    def forward(self) -> Tensor:
        """Runs one forward and returns out."""
        return self.call(*self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv of `out`, and keeps its graph for the next call."""
        return torch.autograd.grad(out, self.inputs, self.dout, retain_graph=True)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Runs one forward and backward, and returns out, dq, dk and dv."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.inputs, self.dout)


Contender = Callable[[Problem], AbstractContextManager[Setup]]


def add_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any], seqlens: str) -> None:
    """Adds the options that the benchmarks on one device share.

    Args:
        parser: parser of a benchmark.
        defaults: the defaults on a GPU, for the help.
        seqlens: the default of --seqlens, for the help.
    """
    told: dict[str, Any] = {name: Described(str(defaults[name])) for name in ("nheads", "rounds")}
    told["headdims"] = Described(" ".join(map(str, defaults["headdims"])))
    add_shared(parser, "json", seqlens=Described(seqlens), nheads_kv=Described("as --nheads"), dtype="bfloat16", **told)


def check_agreement(names: Sequence[str], got: Sequence[Tensor], expected: Sequence[Tensor], of: str = "") -> None:
    """Raises ValueError if a result differs from another contender's by more than rounding explains; names the worst.

    Args:
        names: name of each result.
        got: results of a contender.
        expected: results of another one.
        of: text after the name of a result.
    """
    apart = {name: difference(*pair) for name, *pair in zip(names, got, expected, strict=True)}
    worst = max(apart, key=lambda name: inf if isnan(apart[name]) else apart[name])
    if not apart[worst] < AGREEMENT:
        raise ValueError(f"another result: {worst}{of} differs by {apart[worst]:.2g} of the largest value")


def difference(got: Tensor, expected: Tensor) -> float:
    """Returns the largest difference as a share of the largest expected value."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def unchanged(x: Tensor) -> Tensor:
    """Returns `x`, for contenders that take (batch, seqlen, heads, headdim)."""
    return x


def swapped(x: Tensor) -> Tensor:
    """Returns (batch, seqlen, heads, headdim) as (batch, heads, seqlen, headdim) or the reverse, contiguous."""
    return x.transpose(1, 2).contiguous()


def failure(error: Exception) -> str:
    """Returns the first line of a contender's exception, for its row."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
