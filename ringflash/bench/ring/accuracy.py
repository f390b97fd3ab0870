"""Errors at lengths whose scores no memory holds: the plain formula row block by row block, in any dtype."""

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
    """Errors of one tensor against float64: absolute, and as multiples of plain attention's in the same dtype."""

    rms: float
    rms_ratio: float
    max_ratio: float


def first_group(problem: Problem) -> Problem:
    """The first sequence's first KV head and its query heads: what is compared, since heads are independent."""
    group = problem.group
    cut = replace(problem, q=problem.q[:, :, :group], k=problem.k[:, :, :1], v=problem.v[:, :, :1])
    return replace(cut, dout=problem.dout[:, :, :group]).map(lambda x: x[:1])


def plain_by_rows(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv of attention by the plain formula, all matmuls and the softmax in `dtype`.

    Blocks of `ROWS` queries against the keys they see; a block's gradients come from autograd, those of keys are
    added up in float32 (float64 for float64).
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
    """What results of one problem are compared with, for its first group: out, dq, dk, dv.

    Args:
        exact: in float64.
        plain: by the plain formula in the problem's dtype.
    """

    exact: list[Tensor]
    plain: list[Tensor]

    @staticmethod
    def of(problem: Problem) -> Yardstick:
        """Computes both; float64 takes a group's 14 seqlen^2 headdim operations, halved where causal."""
        group = first_group(problem)
        return Yardstick(plain_by_rows(group, torch.float64), plain_by_rows(group, group.q.dtype))

    def errors(self, results: Sequence[Tensor]) -> dict[str, Errors]:
        """Errors of out, dq, dk and dv of the whole problem, each (batch, seqlen, heads, headdim)."""
        errors = {}
        for name, result, exact, plain in zip(TENSORS, results, self.exact, self.plain, strict=True):
            got = result.detach()[: exact.shape[0], :, : exact.shape[2]]
            error, plain_error = (got.double() - exact).abs(), (plain.double() - exact).abs()
            rms, plain_rms = (x.square().mean().sqrt().item() for x in (error, plain_error))
            errors[name] = Errors(rms, rms / plain_rms, (error.max() / plain_error.max()).item())
        return errors
