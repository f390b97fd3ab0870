"""Prepared calls: found again for the same arguments only, and never where more than the arguments decides."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ringflash as rf
from ringflash import recent_calls, reference
from ringflash.errors import ArgumentError
from ringflash.ops.attention import cache_info
from ringflash.ops.prepared import key_of
from tests.helpers.accuracy import as_tensor


def _inputs(seqlen: int = 24, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, seqlen, heads, 16, **options) for heads in (4, 2, 2))
    return q, k, v


def _found(call: Any) -> bool:
    before = cache_info()
    call()
    after = cache_info()
    assert (after.hits - before.hits) + (after.misses - before.misses) <= 1
    return after.hits > before.hits


def test_a_call_is_found_by_everything_but_values() -> None:
    mask = rf.Causal() & rf.Documents([0, 7, 24])
    rf.flash_attention(*_inputs(), mask=mask)
    assert _found(lambda: rf.flash_attention(*_inputs(), mask=mask))
    assert _found(lambda: rf.flash_attention(*_inputs(), mask=rf.Causal() & rf.Documents([0, 7, 24])))
    q, k, v = _inputs()
    assert _found(lambda: rf.flash_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, mask=mask))
    others: list[Any] = [
        lambda: rf.flash_attention(*_inputs(25), mask=rf.Causal()),
        lambda: rf.flash_attention(*_inputs(), mask=rf.Causal() & rf.Documents([0, 8, 24])),
        lambda: rf.flash_attention(*_inputs(dtype=torch.float64), mask=mask),
        lambda: rf.flash_attention(*_inputs(), mask=mask, softmax_scale=0.3),
        lambda: rf.flash_attention(*_inputs(), mask=mask, softcap=3.0),
        lambda: rf.flash_attention(*_inputs(), mask=mask, return_lse=True),
        lambda: rf.flash_attention(*_inputs(), mask=mask, options=rf.AttentionOptions(deterministic=True)),
        lambda: rf.flash_attention(*_inputs(), mask=mask, options=rf.AttentionOptions(backend="eager")),
    ]
    for index, other in enumerate(others):
        assert not _found(other), index
        assert _found(other), index


def test_results_of_found_calls_are_those_of_their_own_inputs() -> None:
    for _ in range(3):
        q, k, v = _inputs(dtype=torch.float64)
        dout, leaves = torch.randn_like(q), [x.requires_grad_() for x in (q, k, v)]
        got = as_tensor(rf.flash_attention(*leaves, mask=rf.Causal()))
        expected, _ = reference.attention(*leaves, mask=rf.Causal())
        torch.testing.assert_close(got, expected)
        wanted = torch.autograd.grad(expected, leaves, dout)
        for x, y in zip(torch.autograd.grad(got, leaves, dout), wanted, strict=True):
            torch.testing.assert_close(x, y)


WRONG: list[dict[str, Any]] = [
    {"softmax_scale": "1"},
    {"softmax_scale": float("nan")},
    {"softmax_scale": [1.0]},
    {"softcap": -1.0},
    {"return_lse": 1},
    {"return_lse": 0},
    {"mask": rf.Causal},
    {"mask": torch.ones(24, 24, dtype=torch.bool)},
    {"mask": rf.Causal() & rf.Documents([0, 25])},
    {"options": rf.AttentionOptions(deterministic=1)},  # pyright: ignore[reportArgumentType]
    {"options": rf.AttentionOptions(backend="none")},
    {"options": {}},
    {"dropout": 0.5},
]
RIGHT: list[dict[str, Any]] = [
    {"softmax_scale": 1.0},
    {"softmax_scale": 1},
    {"softcap": 0},
    {"softcap": 0.0},
    {"return_lse": True},
    {"return_lse": False},
    {"options": rf.AttentionOptions(deterministic=True)},
    {"options": rf.AttentionOptions(return_lse=True)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:60])
def test_a_wrong_argument_is_refused_however_often_right_ones_came(wrong: dict[str, Any]) -> None:
    for right in RIGHT:
        rf.flash_attention(*_inputs(), **right)
    for _ in range(2):
        size = cache_info().size
        with pytest.raises(ArgumentError):
            rf.flash_attention(*_inputs(), **wrong)
        assert cache_info().size == size


def test_wrong_tensors_are_refused_however_often_right_ones_came() -> None:
    q, k, v = _inputs()
    rf.flash_attention(q, k, v)
    wrong: list[Any] = [
        (q.tolist(), k, v),
        (q[0], k, v),
        (q.half(), k, v),
        (q, k.half(), v),
        (q, k, v[:, :-1]),
        (q[:, :, :3], k, v),
        (q.long(), k.long(), v.long()),
        (q[:, :0], k, v),
        (q.to("meta"), k, v),
    ]
    for arguments in wrong:
        for _ in range(2):
            with pytest.raises(ArgumentError):
                rf.flash_attention(*arguments)


class _Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operators_forward_and_backward() -> None:
    q, k, v = (x.requires_grad_() for x in _inputs())
    out = as_tensor(rf.flash_attention(q, k, v))
    with _Sees() as mode:
        inside = as_tensor(rf.flash_attention(q, k, v))
        torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    assert "ringflash.attention.default" in mode.names
    assert "ringflash.attention_backward.default" in mode.names
    assert torch.equal(inside, out)


def _negated(x: Tensor) -> Tensor:
    """Returns -x as a view, whose memory holds x."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


class _Own(Tensor):
    pass


def test_calls_that_are_never_prepared() -> None:
    q, k, v = _inputs()
    key: dict[str, Any] = {"mask": None, "softmax_scale": None, "dropout": None, "softcap": 0.0}
    key |= {"options": rf.AttentionOptions(), "return_lse": None}
    assert key_of(q, k, v, **key) is not None
    assert key_of(nn.Parameter(q), k, v, **key) is not None
    assert key_of(q.as_subclass(_Own), k, v, **key) is None
    assert key_of(_negated(q), k, v, **key) is None
    assert key_of(q, k, v, **{**key, "dropout": rf.Dropout(0.5)}) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert key_of(q, k, v, **key) is None
        assert key_of(q.bfloat16(), k.bfloat16(), v.bfloat16(), **key) is not None
    with torch.autograd.forward_ad.dual_level():
        assert key_of(q, k, v, **key) is None


def test_a_negated_view_and_its_gradient_are_read_as_they_are() -> None:
    q, k, v = _inputs(dtype=torch.float64)
    expected = rf.flash_attention(-q, k, v)
    assert torch.equal(as_tensor(rf.flash_attention(_negated(q), k, v)), as_tensor(expected))
    leaf = q.clone().requires_grad_()
    out = as_tensor(rf.flash_attention(leaf, k, v))
    dout = torch.randn_like(out)
    plain = torch.autograd.grad(out, leaf, -dout, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, leaf, _negated(dout))[0], plain)


def test_autocast_converts_in_found_calls_too() -> None:
    q, k, v = _inputs()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert as_tensor(rf.flash_attention(q, k, v)).dtype == torch.bfloat16
            assert as_tensor(rf.flash_attention(q.bfloat16(), k, v)).dtype == torch.bfloat16
        assert as_tensor(rf.flash_attention(q, k, v)).dtype == torch.float32


def test_calls_that_autocast_converts_are_found() -> None:
    q, k, v = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        rf.flash_attention(q, k.bfloat16(), v)
        assert _found(lambda: rf.flash_attention(q.bfloat16(), k, v.bfloat16()))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_calls, "MOST", 3)
    for seqlen in range(30, 36):
        rf.flash_attention(*_inputs(seqlen))
    assert cache_info().size <= 3
    assert not _found(lambda: rf.flash_attention(*_inputs(30)))
    assert _found(lambda: rf.flash_attention(*_inputs(35)))


def test_a_prepared_call_keeps_no_tensor_of_a_call() -> None:
    import gc
    import weakref

    q, k, v = (x.requires_grad_() for x in _inputs(40))
    rf.flash_attention(q, k, v, mask=rf.Causal())
    out = as_tensor(rf.flash_attention(q, k, v, mask=rf.Causal()))
    out.sum().backward()
    gone = [weakref.ref(x) for x in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert not any(x() is not None for x in gone)


def test_under_torch_compile_results_and_graphs_stay() -> None:
    q, k, v = _inputs()
    compiled = torch.compile(
        lambda q, k, v: rf.flash_attention(q, k, v, mask=rf.Causal()), fullgraph=True, backend="aot_eager"
    )
    expected = as_tensor(rf.flash_attention(q, k, v, mask=rf.Causal()))
    for _ in range(2):
        assert torch.equal(as_tensor(compiled(q, k, v)), expected)


def test_calls_of_a_ring_are_found_on_their_context() -> None:
    context, other = rf.ContextParallel.local(3), rf.ContextParallel.local(3, "contiguous")
    mask = rf.Causal() & rf.Documents([0, 9, 24])
    for number in range(3):
        for of in (context, other):
            q, k, v = (of.shard(x).requires_grad_() for x in _inputs(dtype=torch.float64))
            out = as_tensor(rf.ring_attention(q, k, v, of, mask=mask))
            expected, _ = reference.attention(*(of.unshard(x) for x in (q, k, v)), mask=mask)
            torch.testing.assert_close(of.unshard(out), expected)
            dout = torch.randn_like(out)
            wanted = torch.autograd.grad(expected, (q, k, v), of.unshard(dout))
            for x, y in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
                torch.testing.assert_close(x, y)
            assert of.prepared_calls.info() == (number, 1, 1)


def test_a_wrong_call_of_a_ring_is_refused_however_often_right_ones_came() -> None:
    context = rf.ContextParallel.local(2)
    q, k, v = map(context.shard, _inputs())
    rf.ring_attention(q, k, v, context)
    documents, call = rf.Causal() & rf.Documents([0, 25]), cast("Any", rf.ring_attention)
    wrong: list[Any] = [(q[:, :-2], k, v), (q.to("meta"), k.to("meta"), v.to("meta")), (q, k[:, :, :1], v)]
    for _ in range(2):
        for arguments in wrong:
            with pytest.raises(ArgumentError):
                call(*arguments, context)
        with pytest.raises(ArgumentError):
            rf.ring_attention(q, k, v, context, mask=documents)
        rf.ring_attention(q, k, v, context)


def test_a_closed_context_refuses_calls_that_it_has_prepared() -> None:
    context = rf.ContextParallel.local(2)
    q, k, v = (context.shard(x).requires_grad_() for x in _inputs())
    out = as_tensor(rf.ring_attention(q, k, v, context))
    context.close()
    with pytest.raises(ArgumentError):
        rf.ring_attention(q, k, v, context)
    with pytest.raises(ArgumentError):
        out.sum().backward()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(24, 24), (5, 24), (24, 5)])
def test_a_problem_without_visible_pairs_is_known_as_such(seqlen_q: int, seqlen_k: int) -> None:
    bitmap = torch.zeros(2, 2, dtype=torch.bool)
    masks = [None, rf.Causal(), rf.KeyPadding([0, 0]), rf.KeyPadding([0, 3]), rf.BlockSparse(bitmap, 12)]
    for mask in masks:
        q, k, v = (
            torch.randn(2, n, 2, 16, dtype=torch.float64).requires_grad_() for n in (seqlen_q, seqlen_k, seqlen_k)
        )
        if isinstance(mask, rf.BlockSparse) and seqlen_k != seqlen_q:
            continue
        out = as_tensor(rf.flash_attention(q, k, v, mask=mask))
        expected, _ = reference.attention(q, k, v, mask=mask)
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        wanted = torch.autograd.grad(expected, (q, k, v), dout, materialize_grads=True)
        for x, y in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
            torch.testing.assert_close(x, y)


def test_threads_may_prepare_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_calls, "MOST", 2)
    calls: recent_calls.RecentCalls[int] = recent_calls.RecentCalls()

    def prepare(first: int) -> None:
        for key in range(first, first + 2000):
            assert calls.get(key) in (None, key)
            calls.put(key, key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(prepare, range(0, 800, 200)))
    assert calls.info().size == 2
    assert pickle.loads(pickle.dumps(calls)).info() == (0, 0, 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_may_round_saved_tensors(world_size: int) -> None:
    """Checks that a rounded lse has the dtype that kernels of earlier calls read and write."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    context = rf.ContextParallel.local(world_size)
    q, k, v = (torch.randn(1, 256, 2, 64, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    dout = torch.randn(1, 256, 2, 64, device=device, dtype=dtype)

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16() if x.ndim == 3 else x  # lse alone

    def gradients() -> tuple[Tensor, ...]:
        out = as_tensor(rf.ring_attention(q, k, v, context, mask=rf.Causal()))
        return torch.autograd.grad(out, (q, k, v), dout)

    expected = gradients()
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(rounded, lambda x: x):
            actual = gradients()
        for x, y in zip(actual, expected, strict=True):
            assert (x - y).norm() < 0.03 * y.norm()
