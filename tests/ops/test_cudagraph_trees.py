"""Calls under torch.compile with CUDA graphs, whose pools take back the memory that a call allocates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringflash as rf
from tests.helpers.accuracy import as_tensor

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's own: a decorator that it uses, and the empty graph with which it makes a pool
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return as_tensor(rf.flash_attention(q * 1.5, k, v, mask=rf.Causal())) * 2.0


def test_tables_of_a_first_call_outlive_the_graphs_pool() -> None:
    """Compiles a shape that no eager call has made, so that its tables are uploaded within a call of the graph."""
    compiled = torch.compile(_attention, mode="reduce-overhead")
    shape = (2, 768, 4, 64)
    for _ in range(4):
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k, v).clone()
        torch.testing.assert_close(out, _attention(q, k, v), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("headdim", [64, 128])
def test_replays_between_eager_calls(headdim: int) -> None:
    """Compares graphs with eager calls, whose counters must not lie in memory that the graphs reuse."""
    compiled = torch.compile(_attention, mode="reduce-overhead")
    for index in range(8):
        shape = (2, 1024 if index % 2 else 512, 4, headdim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        results = []
        for function in (_attention, compiled, _attention):
            torch.compiler.cudagraph_mark_step_begin()
            out = function(q, k, v)
            results.append([x.clone() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))])
        for eager, graph, again in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(again, eager, rtol=2e-2, atol=2e-2)
