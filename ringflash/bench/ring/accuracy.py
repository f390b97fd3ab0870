"""Errors of attention against the plain formula, computed in blocks of rows and in any dtype.

The blocks allow lengths at which no memory holds all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringflash.bench.common.problem import Problem

ROWS = 1024
TENSORS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Errors:
    """Errors of one tensor against float64: absolute, and over the errors of plain attention in the same dtype."""

    rms: float
    rms_ratio: float
    max_ratio: float


def first_group(problem: Problem) -> Problem:
    """Returns the first sequence's first KV head and its query heads. They suffice, since heads are independent."""
    group = problem.group
    cut = replace(problem, q=problem.q[:, :, :group], k=problem.k[:, :, :1], v=problem.v[:, :, :1])
    return replace(cut, dout=problem.dout[:, :, :group]).map(lambda x: x[:1])


def plain_by_rows(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Returns out, dq, dk and dv by the plain formula, with all matmuls and the softmax in `dtype`.

    Each block has `ROWS` queries and the keys that they may see. Autograd computes the gradients of a block. dk and dv
    are added up in float32 (float64 for float64).
    """
    q, k, v, dout = (x.detach().to(dtype) for x in (problem.q, problem.k, problem.v, problem.dout))
    seqlen, group, scale = q.shape[1], problem.group, q.shape[3] ** -0.5
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    dk, dv = (torch.zeros_like(x, dtype=accumulation) for x in (k, v))
    outs, dqs = [], []
    for begin in range(0, seqlen, ROWS):
        end = min(begin + ROWS, seqlen)
        seen = end if problem.causal else seqlen
        rows = q[:, begin:end].clone().requires_grad_()
        keys, values = (x[:, :seen].clone().requires_grad_() for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", rows * scale, keys.repeat_interleave(group, 2))
        if problem.mask is not None:
            positions = torch.arange(seen, device="cpu")
            scores.masked_fill_(~problem.mask.dense(positions[begin:end], positions)[:, None].to(q.device), -torch.inf)
        elif problem.causal:
            hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
            scores[..., begin:].masked_fill_(hidden, -torch.inf)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values.repeat_interleave(group, 2))
        dq, dk_part, dv_part = torch.autograd.grad(out, (rows, keys, values), dout[:, begin:end])
        outs.append(out.detach())
        dqs.append(dq)
        dk[:, :seen] += dk_part
        dv[:, :seen] += dv_part
    return [torch.cat(outs, 1), torch.cat(dqs, 1), dk.to(dtype), dv.to(dtype)]


@dataclass(frozen=True)
class Yardstick:
    """Reference results of a problem's first group: out, dq, dk, dv.

    Args:
        exact: results in float64.
        plain: results of the plain formula in the problem's dtype.
    """

    exact: list[Tensor]
    plain: list[Tensor]

    @staticmethod
    def of(problem: Problem) -> Yardstick:
        """Computes both. float64 takes 14 seqlen^2 headdim operations a query head of the group, or half if causal."""
        group = first_group(problem)
        return Yardstick(plain_by_rows(group, torch.float64), plain_by_rows(group, group.q.dtype))

    def errors(self, results: Sequence[Tensor]) -> dict[str, Errors]:
        """Returns the errors of out, dq, dk and dv of the whole problem, each (batch, seqlen, heads, headdim)."""
        errors = {}
        for name, result, exact, plain in zip(TENSORS, results, self.exact, self.plain, strict=True):
            got = result.detach()[: exact.shape[0], :, : exact.shape[2]]
            error, plain_error = (got.double() - exact).abs(), (plain.double() - exact).abs()
            rms, plain_rms = (x.square().mean().sqrt().item() for x in (error, plain_error))
            errors[name] = Errors(rms, rms / plain_rms, (error.max() / plain_error.max()).item())
        return errors
