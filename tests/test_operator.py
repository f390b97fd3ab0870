"""Attention as a torch operator: compiles into one graph, and checkpointing can keep its results."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import ringflash as rf
from ringflash import ring
from ringflash.masks import Mask
from tests.accuracy import as_tensor

# torch 2.11's own, when its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")

ATTENTION = torch.ops.ringflash.attention.default


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def flash(q: Tensor, mask: Mask | None) -> Tensor:
    return as_tensor(rf.flash_attention(q, q, q, mask=mask)) * 2


def test_compiles_into_one_graph_and_other_documents_reuse_it() -> None:
    counter = CompileCounter()
    compiled = torch.compile(flash, backend=counter, fullgraph=True)
    q = torch.randn(1, 24, 2, 16)
    for mask in (None, rf.Causal()):
        assert torch.equal(compiled(q, mask), flash(q, mask))
    compiled(q, rf.Causal() & rf.Documents([0, 9, 24]))
    seen = counter.frame_count
    for ends in ([0, 12, 20], [0, 13, 24]):
        mask = rf.Causal() & rf.Documents(ends)
        assert torch.equal(compiled(q, mask), flash(q, mask))
    assert counter.frame_count == seen


def test_compiled_gradients_equal_eager_ones() -> None:
    context = rf.ContextParallel.local(3)

    def attention(q: Tensor) -> Tensor:
        q = context.shard(q)
        return context.unshard(as_tensor(rf.ring_attention(q, q, q, context, mask=rf.Causal())))

    q = torch.randn(1, 24, 2, 16, requires_grad=True)
    grads = []
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        (grad,) = torch.autograd.grad(call(q).square().sum(), q)
        grads.append(grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-6)


def test_checkpointing_that_keeps_attention_does_not_run_the_ring_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = ring.forward
    monkeypatch.setattr(ring, "forward", lambda *args: (runs.append(1), original(*args))[1])
    context = rf.ContextParallel.local(1)

    def block(x: Tensor) -> Tensor:
        return as_tensor(rf.ring_attention(x.sin(), x, x.cos(), context, mask=rf.Causal())).sin()

    x = torch.randn(1, 12, 2, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    keep = partial(create_selective_checkpoint_contexts, [ATTENTION])
    for context_fn, times in ((noop_context_fn, 2), (keep, 1)):
        runs.clear()
        (grad,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum(), x)
        assert torch.equal(grad, expected)
        assert len(runs) == times


@pytest.mark.parametrize(("mask", "tensors"), [("", []), ("causal & documents", [torch.tensor([0, 2, 6])])])
@pytest.mark.parametrize("context", ["", "local"])
def test_opcheck(context: str, mask: str, tensors: list[Tensor]) -> None:
    name = rf.ContextParallel.local(2).name if context else ""
    q, k, v = (torch.randn(1, 6, 2, 16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(ATTENTION, (q, k, v, name, mask, tensors, 0.25, 0.0, "auto"))
