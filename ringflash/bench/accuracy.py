"""Errors at lengths whose scores no memory holds: the plain formula row block by row block, in any dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.bench.peers import Problem

ROWS = 1024


@dataclass(frozen=True)
class Errors:
    """Errors of one tensor against float64, as multiples of plain attention's in the same dtype."""

    rms_ratio: float
    max_ratio: float


def first_group(problem: Problem) -> Problem:
    """The first KV head and the query heads that share it: what is compared, since heads are independent."""
    group = problem.q.shape[2] // problem.k.shape[2]
    return Problem(problem.q[:, :, :group], problem.k[:, :, :1], problem.v[:, :, :1], problem.dout[:, :, :group])


def causal_by_rows(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv of causal attention by the plain formula, all matmuls and the softmax in `dtype`.

    Blocks of `ROWS` queries against the keys they see; a block's gradients come from autograd, those of keys are
    added up in float32 (float64 for float64).
    """
    q, k, v, dout = (x.detach().to(dtype) for x in (problem.q, problem.k, problem.v, problem.dout))
    seqlen, group, scale = q.shape[1], q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    dk, dv = (torch.zeros_like(x, dtype=accumulation) for x in (k, v))
    outs, dqs = [], []
    for begin in range(0, seqlen, ROWS):
        end = min(begin + ROWS, seqlen)
        rows = q[:, begin:end].clone().requires_grad_()
        keys, values = (x[:, :end].clone().requires_grad_() for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", rows * scale, keys.repeat_interleave(group, 2))
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        scores[..., begin:].masked_fill_(hidden, -torch.inf)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values.repeat_interleave(group, 2))
        dq, dk_part, dv_part = torch.autograd.grad(out, (rows, keys, values), dout[:, begin:end])
        outs.append(out.detach())
        dqs.append(dq)
        dk[:, :end] += dk_part
        dv[:, :end] += dv_part
    return [torch.cat(outs, 1), torch.cat(dqs, 1), dk.to(dtype), dv.to(dtype)]


def compare(got: list[Tensor], problem: Problem) -> dict[str, Errors]:
    """Errors of `got` (out, dq, dk, dv of the first KV head's group) beside those of the plain formula in its dtype."""
    exact, plain = causal_by_rows(problem, torch.float64), causal_by_rows(problem, got[0].dtype)
    errors = {}
    for name, g, p, e in zip(("out", "dq", "dk", "dv"), got, plain, exact, strict=True):
        error, plain_error = (g.double() - e).abs(), (p.double() - e).abs()
        rms = (error.square().mean().sqrt() / plain_error.square().mean().sqrt()).item()
        errors[name] = Errors(rms, (error.max() / plain_error.max()).item())
    return errors
