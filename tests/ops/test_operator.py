"""Attention as a torch operator: it compiles into one graph, and checkpointing can keep its results."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.masks import Mask
from ringflash.ring import schedule
from tests.helpers.accuracy import as_tensor, rms_of

# torch 2.11 warns when its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")

TWO_RANKS = rf.ContextParallel.local(2, "contiguous")
ATTENTION = torch.ops.ringflash.attention.default
BACKWARD = torch.ops.ringflash.attention_backward.default


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
    for ends in ([0, 12, 24], [0, 13, 24]):
        mask = rf.Causal() & rf.Documents(ends)
        assert torch.equal(compiled(q, mask), flash(q, mask))
    assert counter.frame_count == seen


def test_compiles_into_one_graph_on_a_gpu() -> None:
    """Needs no GPU: tracing with fake CUDA tensors takes the path of a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 24, 2, 16, device="cuda", dtype=torch.bfloat16)
        out = torch.compile(flash, backend="eager", fullgraph=True)(q, rf.Causal())
        assert (out.device.type, out.shape) == ("cuda", q.shape)


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
    original = schedule.forward
    monkeypatch.setattr(schedule, "forward", lambda *args: (runs.append(1), original(*args))[1])
    context = rf.ContextParallel.local(2)

    def block(x: Tensor) -> Tensor:
        return as_tensor(rf.ring_attention(x.sin(), x, x.cos(), context, mask=rf.Causal())).sin()

    x = torch.randn(1, 12, 2, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    keep = partial(create_selective_checkpoint_contexts, [ATTENTION])
    for context_fn, times in ((noop_context_fn, 2), (keep, 1)):
        runs.clear()
        (grad,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum(), x)
        assert torch.equal(grad, expected)
        assert len(runs) == 2 * times


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("last", [lambda x: x, lambda x: x.flatten(2) + 1])
def test_checkpoints_in_which_nothing_is_saved_after_attention(last: Callable[[Tensor], Tensor], keeps: bool) -> None:
    context = rf.ContextParallel.local(2)

    def block(x: Tensor) -> Tensor:
        x = as_tensor(rf.ring_attention(x.sin(), x, x.cos(), context, mask=rf.Causal()))
        return last(as_tensor(rf.flash_attention(x.sin(), x, x, mask=rf.Causal())))

    x = torch.randn(1, 12, 2, 16, requires_grad=True)
    context_fn = partial(create_selective_checkpoint_contexts, [ATTENTION]) if keeps else noop_context_fn
    grads = []
    for out in (block(x), checkpoint(block, x, use_reentrant=False, context_fn=context_fn)):
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        grads.append(grad)
    assert torch.equal(*grads)


MASKS: list[Callable[[Tensor], Mask]] = [
    lambda ends: rf.Causal() & rf.Documents(ends),
    lambda ends: rf.Documents([0, 4, 24]) & rf.SlidingWindow(3),
    lambda ends: rf.KeyPadding(ends[1:2]),
    lambda ends: rf.PrefixLM([5]),
    lambda ends: rf.Tree([-1, 0, 0], start=21) & rf.Causal(),
    lambda ends: rf.BlockSparse([[True, False], [True, True]], 12),
]


@pytest.mark.parametrize("make", MASKS)
def test_masks_that_are_made_while_compiling(make: Callable[[Tensor], Mask]) -> None:
    def attention(q: Tensor, ends: Tensor) -> Tensor:
        return as_tensor(rf.flash_attention(q, q, q, mask=make(ends)))

    q, ends = torch.randn(1, 24, 2, 16), torch.tensor([0, 4, 24])
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, ends), attention(q, ends))


def _blocks(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool)


@pytest.mark.parametrize(
    "masks",
    [
        [rf.SlidingWindow(left, right) for left, right in ((2, 0), (3, 0), (3, None), (1, 2))],
        [rf.Causal() & rf.Tree([-1, 0, 0, 1], start=start) for start in (8, 7, 6)],
        [rf.BlockSparse(_blocks(12 // size), size) for size in (4, 6, 3)],
    ],
    ids=["windows", "trees", "blocks"],
)
def test_masks_with_other_integers_compile(masks: list[Mask]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, mask: rf.flash_attention(q, q, q, mask=mask), backend="aot_eager", fullgraph=True
    )
    for mask in masks:
        q = torch.randn(1, 12, 2, 16)
        assert torch.equal(compiled(q, mask), as_tensor(rf.flash_attention(q, q, q, mask=mask)))


def test_numbers_of_a_mask_that_was_compiled_are_checked() -> None:
    q = torch.randn(1, 24, 2, 16)
    attention = torch.compile(
        lambda ends: rf.flash_attention(q, q, q, mask=rf.Documents(ends)), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(ArgumentError, match="cu_seqlens: expected 0 first and never falling"):
        attention(torch.tensor([0, 25, 24]))


MODES: list[dict[str, Any]] = [
    {},
    {"sinks": torch.randn(2, requires_grad=True), "softcap": 2.0},
    {"slopes": torch.rand(2), "seed": torch.tensor(5), "p": 0.3},
]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mask", "tensors"), [("", []), ("causal & documents", [torch.tensor([0, 2, 6])])])
@pytest.mark.parametrize("context", ["", "local"])
def test_opcheck(context: str, mask: str, tensors: list[Tensor], mode: dict[str, Any], deterministic: bool) -> None:
    name = rf.ContextParallel.local(2).name if context else ""
    q, k, v = (torch.randn(1, 6, 2, width, requires_grad=True) for width in (24, 24, 16))
    extra = (mode.get("sinks"), mode.get("slopes"), mode.get("seed"))
    values = (0.25, mode.get("softcap", 0.0), mode.get("p", 0.0), "auto", deterministic)
    inputs: tuple[Any, ...] = (q, k, v, *extra, name, mask, tensors, *values)
    torch.library.opcheck(torch.ops.ringflash.attention_with_gradients.default, inputs)
    inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    q, k, v, *others = inputs
    out, lse = ATTENTION(*inputs)
    torch.library.opcheck(ATTENTION, inputs)
    torch.library.opcheck(BACKWARD, (out, lse, q, k, v, out, lse, *others))


def _inputs_of_operator(*, requires_grad: bool = True) -> tuple[Any, ...]:
    q = torch.randn(1, 24, 2, 16, requires_grad=requires_grad)
    return q, q, q, None, None, None, "", "causal", [], 0.25, 0.0, 0.0, "auto", False


def test_the_operators_refuse_inputs_that_require_grad() -> None:
    inputs = _inputs_of_operator()
    with pytest.raises(ArgumentError, match="ringflash.attention: expected a call without gradients.*Call rf.flash"):
        ATTENTION(*inputs)
    with torch.no_grad():
        out, lse = ATTENTION(*inputs)
    with pytest.raises(ArgumentError, match="ops.ringflash.attention_backward: expected a call without gradients"):
        BACKWARD(out, None, *inputs[:3], out, lse, *inputs[3:])
    (dq,) = torch.autograd.grad(torch.ops.ringflash.attention_with_gradients.default(*inputs)[0].sum(), inputs[0])
    expected = torch.autograd.grad(as_tensor(rf.flash_attention(*inputs[:3], mask=rf.Causal())).sum(), inputs[0])
    torch.testing.assert_close(dq, expected[0])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("exported_with_gradients", [True, False])
def test_an_exported_program_trains(exported_with_gradients: bool, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flash(q, rf.Causal())

    q = torch.randn(1, 24, 2, 16, requires_grad=True)
    with torch.set_grad_enabled(exported_with_gradients):
        program = torch.export.export(Model(), (q.detach(),), strict=strict)
    (got,) = torch.autograd.grad(program.module()(q).square().sum(), q)
    (expected,) = torch.autograd.grad(flash(q, rf.Causal()).square().sum(), q)
    torch.testing.assert_close(got, expected)


def test_compiled_vmap_has_the_gradients_of_eager_calls() -> None:
    mapped = torch.vmap(lambda q, k: q + flash(q, rf.Causal()) * k)
    inputs = [torch.randn(3, 1, 24, 2, 16, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(mapped(*inputs).square().sum(), inputs)
    got = torch.autograd.grad(torch.compile(mapped, backend="aot_eager")(*inputs).square().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # about the backend of torch's own tests
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled_graphs_have_the_operators_without_gradients(requires_grad: bool) -> None:
    """Checks that no rule of autograd runs in a compiled step: one in Python takes the host as long as a look-up."""
    backend = AotEagerAndRecordGraphs()
    q = torch.randn(1, 24, 2, 16, requires_grad=requires_grad)
    with torch.set_grad_enabled(requires_grad):
        out = torch.compile(flash, backend=backend)(q, rf.Causal())
    expected = ["ringflash.attention.default"]
    if requires_grad:
        out.sum().backward()
        expected.append("ringflash.attention_backward.default")
    nodes = [node for graph in (*backend.fw_graphs, *backend.bw_graphs) for node in graph.graph.nodes]
    assert [str(node.target) for node in nodes if "ringflash" in str(node.target)] == expected


def _squares(q: Tensor, k: Tensor) -> Tensor:
    return (q + as_tensor(rf.flash_attention(q, k, k, mask=rf.Causal()))).square().sum()


def _gradients(q: Tensor, k: Tensor) -> Any:
    return torch.func.grad(_squares, (0, 1))(q, k)


def _gradients_of_each(q: Tensor, k: Tensor) -> Any:
    return torch.vmap(torch.func.grad(_squares, (0, 1)))(q[None], k[None])


@pytest.mark.parametrize("gradients", [_gradients, _gradients_of_each])
def test_compiled_gradients_of_torch_func(gradients: Callable[[Tensor, Tensor], Any]) -> None:
    q, k = (torch.randn(1, 24, 2, 16) for _ in range(2))
    for a, b in zip(torch.compile(gradients, backend="aot_eager")(q, k), gradients(q, k), strict=True):
        torch.testing.assert_close(a, b)


def _tangent(q: Tensor, k: Tensor) -> Tensor:
    return torch.func.jvp(_squares, (q, k), (q, k))[1]


def _second_gradient(q: Tensor, k: Tensor) -> Tensor:
    return torch.func.grad(lambda q: torch.func.grad(_squares)(q, k).sum())(q)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("derivative", [_tangent, _second_gradient])
def test_compiled_derivatives_that_would_be_wrong_are_refused(derivative: Callable[..., Tensor]) -> None:
    with pytest.raises(ArgumentError, match="derivative of attention: expected"):
        torch.compile(derivative, backend="aot_eager")(torch.randn(1, 24, 2, 16), torch.randn(1, 24, 2, 16))


def test_modes_compile_into_one_graph() -> None:
    sinks, slopes = torch.randn(2, requires_grad=True), torch.rand(2)
    q = torch.randn(1, 24, 2, 16, requires_grad=True)

    def attention(q: Tensor, sinks: Tensor) -> Tensor:
        options = rf.AttentionOptions(sinks=sinks, alibi_slopes=slopes)
        rest: dict[str, Any] = {"softcap": 5.0, "dropout": rf.Dropout(0.2, seed=4), "options": options}
        return as_tensor(rf.flash_attention(q, q, q[..., :16], mask=rf.Causal(), **rest))

    results = []
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        out = call(q, sinks)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, sinks))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_compiled_dropout_draws_anew_in_each_call() -> None:
    q = torch.randn(1, 24, 2, 16)
    attention = lambda q: as_tensor(rf.flash_attention(q, q, q, dropout=rf.Dropout(0.5)))  # noqa: E731
    call = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first, second = call(q), call(q)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(call(q), first)


def test_a_misfit_is_told_when_compiled_too() -> None:
    compiled = torch.compile(flash, backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 24, 2, 16)
    compiled(q, rf.Documents([0, 24]))
    with pytest.raises(ArgumentError, match="cu_seqlens: expected lengths that sum to the sequence's 24 keys"):
        compiled(q, rf.Documents([0, 20]))


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, 70, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return as_tensor(rf.flash_attention(q, k, v, mask=rf.Causal()))


def _ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return as_tensor(rf.ring_attention(q, k, v, TWO_RANKS, mask=rf.Causal()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", [_attend, _ring])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_is_as_in_torch(autocast: torch.dtype, dtype: torch.dtype, attention: Any, compiled: bool) -> None:
    inputs = _inputs(dtype)
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    with torch.autocast("cpu", dtype=autocast):
        out = call(*inputs)
        q, k, v = (x.transpose(1, 2) for x in inputs)
        expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)
    for grad in torch.autograd.grad(out.float().square().sum(), inputs):
        assert grad.dtype == dtype


@pytest.mark.parametrize("attention", [_attend, _ring])
def test_kernels_compute_under_autocast_as_without(attention: Any) -> None:
    """Checks that autocast leaves the CPU kernels alone: they are PyTorch code that accumulates in a wider dtype."""
    inputs = _inputs(torch.bfloat16)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = attention(*inputs)
            results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_of_what_linear_layers_give() -> None:
    layer = torch.nn.Linear(32, 96)
    x = torch.randn(2, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = layer(x).view(2, 9, 3, 2, 16).unbind(2)
        out = rf.flash_attention(q.float(), k, v, mask=rf.Causal())  # as from a rotary embedding in float32
    assert as_tensor(out).dtype == torch.bfloat16
    as_tensor(out).float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_autocast_leaves_a_cache_as_it_is() -> None:
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 40, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = as_tensor(rf.flash_decode(q, cache, cache, cache_seqlens=40))
    assert out.dtype == torch.float32
    assert rms_of(out - as_tensor(rf.flash_decode(q, cache, cache, cache_seqlens=40))) == 0
