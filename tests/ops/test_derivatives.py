"""Attention under torch.func's transforms, and its refusal of forward mode and second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import ringflash as rf
from ringflash import reference
from ringflash.errors import ArgumentError
from tests.helpers.accuracy import as_tensor

# torch warns when its forward mode is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

MASK = rf.Causal() & rf.Documents([0, 2, 6])
SINKS, SLOPES = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([0.5, 0.25])
DROPOUT = rf.Dropout(0.3, seed=3)
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _flash(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    options = rf.AttentionOptions(sinks=sinks, alibi_slopes=SLOPES)
    return as_tensor(rf.flash_attention(q, k, v, mask=MASK, softcap=3.0, dropout=DROPOUT, options=options))


def _ring(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    context = rf.ContextParallel.local(2)
    options = rf.AttentionOptions(sinks=sinks, alibi_slopes=SLOPES)
    q, k, v = map(context.shard, (q, k, v))
    out = rf.ring_attention(q, k, v, context, mask=MASK, softcap=3.0, dropout=DROPOUT, options=options)
    return context.unshard(as_tensor(out))


def _plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    rest: dict[str, Any] = {"mask": MASK, "softcap": 3.0, "dropout": DROPOUT, "alibi_slopes": SLOPES}
    return reference.attention(q, k, v, **rest, sinks=sinks)[0]


def _inputs(*outer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(*outer, 1, 6, 2, 16, dtype=torch.float64)
    k, v = (torch.randn(*outer, 1, 6, 1, 16, dtype=torch.float64) for _ in range(2))
    return q, k, v, SINKS.clone()


def _scalar(attention: Attention) -> Callable[..., Tensor]:
    return lambda *inputs: attention(*inputs).square().sum()


def _assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", [_flash, _ring])
def test_grad(attention: Attention) -> None:
    inputs, every = _inputs(), (0, 1, 2, 3)
    _assert_same(grad(_scalar(attention), every)(*inputs), grad(_scalar(_plain), every)(*inputs))


@pytest.mark.parametrize("attention", [_flash, _ring])
def test_vjp(attention: Attention) -> None:
    inputs = _inputs()
    dout = torch.randn(1, 6, 2, 16, dtype=torch.float64)
    (out, pull, *_), (expected, expected_pull, *_) = vjp(attention, *inputs), vjp(_plain, *inputs)
    _assert_same([out, *pull(dout)], [expected, *expected_pull(dout)])


@pytest.mark.parametrize("attention", [_flash, _ring])
def test_jacrev(attention: Attention) -> None:
    inputs = _inputs()
    first = lambda call: lambda *given: call(*given)[0, 2:4, 0, :2]  # noqa: E731 - each entry costs a backward
    _assert_same(jacrev(first(attention), (0, 1, 2, 3))(*inputs), jacrev(first(_plain), (0, 1, 2, 3))(*inputs))


@pytest.mark.parametrize("attention", [_flash, _ring])
def test_vmap(attention: Attention) -> None:
    inputs = _inputs(3)
    dims = (0, 0, 0, None)
    _assert_same([vmap(attention, dims)(*inputs)], [vmap(_plain, dims)(*inputs)])
    got, expected = (vmap(grad(_scalar(call), (0, 1, 2, 3)), dims)(*inputs) for call in (attention, _plain))
    _assert_same(got, expected)


def test_vmap_within_ordinary_autograd() -> None:
    q, k, v, sinks = _inputs(3)
    k.requires_grad_()
    got, expected = (vmap(call, (0, 0, 0, None))(q, k, v, sinks).square().sum() for call in (_flash, _plain))
    _assert_same(torch.autograd.grad(got, k), torch.autograd.grad(expected, k))


@pytest.mark.parametrize("share", [0, 1])
def test_grad_of_what_takes_lse(share: int) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = rf.flash_attention(q, k, v, options=rf.AttentionOptions(return_lse=True))
        return lse.sum() + share * out[0, 0, 0, 0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = reference.attention(q, k, v)
        return lse.sum() + share * out[0, 0, 0, 0]

    inputs = _inputs()[:3]
    _assert_same(grad(loss, (0, 1, 2))(*inputs), grad(plain, (0, 1, 2))(*inputs))


def test_the_gradient_is_that_of_autograd_bit_for_bit() -> None:
    inputs = [x.requires_grad_() for x in _inputs()]
    expected = torch.autograd.grad(_scalar(_flash)(*inputs), inputs)
    got = grad(_scalar(_flash), (0, 1, 2, 3))(*(x.detach() for x in inputs))
    assert all(map(torch.equal, got, expected))


def _dual(attention: Attention, *inputs: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return attention(forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0])), *inputs[1:])


FORWARD: dict[str, Callable[..., Any]] = {
    "jvp": lambda attention, *inputs: jvp(attention, inputs, inputs),
    "jacfwd": lambda attention, *inputs: jacfwd(attention)(*inputs),
    "hessian": lambda attention, *inputs: hessian(_scalar(attention))(*inputs),
    "dual": _dual,
}


@pytest.mark.parametrize("attention", [_flash, _ring])
@pytest.mark.parametrize("way", FORWARD)
def test_forward_mode_is_refused(way: str, attention: Attention) -> None:
    with pytest.raises(ArgumentError, match="expected reverse mode, got a tangent .*Use torch.func.vjp or jacrev"):
        FORWARD[way](attention, *_inputs())


def test_a_tangent_of_something_else_is_none_of_it() -> None:
    q, k, v, sinks = _inputs()
    _, tangent, *_ = jvp(lambda x: _flash(q, k, v, sinks).sum() * x, (torch.ones(()),), (torch.ones(()),))
    assert torch.equal(tangent, _flash(q, k, v, sinks).sum())


@pytest.mark.parametrize("attention", [_flash, _ring])
def test_second_derivatives_are_refused(attention: Attention) -> None:
    message = "expected one of first order, got a gradient of its gradient. .*reference.attention"
    q, *rest = _inputs()
    with pytest.raises(ArgumentError, match=message):
        grad(lambda q: grad(_scalar(attention))(q, *rest).sum())(q)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(_scalar(attention)(q, *rest), q, create_graph=True)  # alone no second derivative
    with pytest.raises(ArgumentError, match=message):
        dq.sum().backward()


def _decode(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    options = rf.DecodeOptions(sinks=sinks)
    return as_tensor(rf.flash_decode(q, k, v, cache_seqlens=6, options=options))


@pytest.mark.parametrize("way", ["jvp", "jacfwd", "dual"])
def test_decoding_refuses_a_tangent(way: str) -> None:
    with pytest.raises(ArgumentError, match="q: expected none with a tangent: decoding has no derivative, got a dual"):
        FORWARD[way](_decode, *_inputs())


def test_decoding_refuses_a_gradient_of_torch_func() -> None:
    with pytest.raises(ArgumentError, match="q: expected none that requires a gradient"):
        grad(_scalar(_decode))(*_inputs())


def test_decoding_under_vmap() -> None:
    inputs = _inputs(3)
    got = vmap(_decode, (0, 0, 0, None))(*inputs)
    for index in range(3):
        q, k, v = (x[index] for x in inputs[:3])
        assert torch.equal(got[index], _decode(q, k, v, SINKS))
