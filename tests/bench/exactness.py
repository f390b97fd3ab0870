"""The largest error of a contender of the ring benchmark against the reference."""

from __future__ import annotations

import torch

import ringflash as rf
from ringflash import reference
from ringflash.bench.common.problem import Contender, Problem


def largest_error(contender: Contender, problem: Problem) -> float:
    """Returns the largest error of out, dq, dk and dv over whole sequences; a collective of the contender's ranks."""
    inputs = problem.leaves()
    out, _ = reference.attention(*inputs, mask=rf.Causal())
    expected = [out, *torch.autograd.grad(out, inputs, problem.dout)]
    with contender(problem) as setup:
        results = [setup.whole(x.detach()) for x in setup.forward_backward()]
    return max((got - want).abs().max().item() for got, want in zip(results, expected, strict=True))
