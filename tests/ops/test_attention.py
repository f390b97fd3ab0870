"""flash_attention on the CPU: exact, with errors for unsupported calls, and a proper torch operator."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.errors import ArgumentError
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate

MASKS = [None, rf.Causal()]
LENGTHS = [(1, 1), (3, 3), (64, 128), (113, 203), (239, 1), (300, 256), (799, 3), (257, 1025)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_accuracy(dtype: torch.dtype, seqlen: tuple[int, int], mask: rf.Causal | None) -> None:
    problem = Problem.random(seqlen=seqlen, dtype=dtype, mask=mask)
    assert_accurate(problem.flash(), problem)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("headdim", [16, 40, 96, 256])
def test_heads(heads: tuple[int, int], headdim: int) -> None:
    problem = Problem.random(seqlen=70, heads=heads, headdim=headdim, mask=rf.Causal())
    assert_accurate(problem.flash(), problem)


@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck(mask: rf.Causal | None) -> None:
    options = rf.AttentionOptions(return_lse=True)
    q = torch.randn(1, 5, 2, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 7, 1, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    call = lambda q, k, v: rf.flash_attention(q, k, v, mask=mask, options=options)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v))


def test_lse() -> None:
    problem = Problem.random(seqlen=33, dtype=torch.float64, mask=rf.Causal())
    result = rf.flash_attention(
        problem.q, problem.k, problem.v, mask=problem.mask, options=rf.AttentionOptions(return_lse=True)
    )
    assert isinstance(result, tuple)
    expected = reference.attention(problem.q, problem.k, problem.v, mask=problem.mask)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)


def test_the_keyword_return_lse_goes_before_the_option() -> None:
    context = rf.ContextParallel.local(2)
    problem = Problem.random(seqlen=32, heads=(2, 1), dtype=torch.float64, mask=rf.Causal())
    q, k, v = problem.q, problem.k, problem.v
    expected, lse = reference.attention(q, k, v, mask=problem.mask)
    with_lse = rf.AttentionOptions(return_lse=True)

    alone = rf.flash_attention(q, k, v, mask=problem.mask, return_lse=True)
    torch.testing.assert_close(alone, (expected, lse), rtol=0, atol=1e-13)
    out = rf.flash_attention(q, k, v, mask=problem.mask, options=with_lse, return_lse=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)

    q, k, v = (context.shard(x) for x in (q, k, v))
    ring_out, ring_lse = rf.ring_attention(q, k, v, context, mask=problem.mask, return_lse=True)
    torch.testing.assert_close(context.unshard(ring_out), expected, rtol=0, atol=1e-13)
    assert ring_lse.shape == lse.shape
    ring_out = rf.ring_attention(q, k, v, context, mask=problem.mask, options=with_lse, return_lse=False)
    torch.testing.assert_close(context.unshard(ring_out), expected, rtol=0, atol=1e-13)

    with pytest.raises(ArgumentError, match="return_lse: expected None, True or False, got 1"):
        rf.flash_attention(q, k, v, return_lse=1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    wrong: Any = 1
    with pytest.raises(ArgumentError, match=r"options\.return_lse: expected True or False, got 1"):
        rf.flash_attention(q, k, v, options=rf.AttentionOptions(return_lse=wrong))


def test_rows_that_see_nothing() -> None:
    problem = Problem.random(seqlen=(9, 4), mask=rf.Causal())
    out, dq, _, _ = problem.flash()
    assert torch.equal(out[:, :5], torch.zeros_like(out[:, :5]))
    assert torch.equal(dq[:, :5], torch.zeros_like(dq[:, :5]))
    result = rf.flash_attention(
        problem.q, problem.k, problem.v, mask=rf.Causal(), options=rf.AttentionOptions(return_lse=True)
    )
    assert (result[1][..., :5] == -math.inf).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_what_rows_that_see_nothing_hold_does_not_leak(value: float) -> None:
    clean = Problem.random(seqlen=(20, 12), mask=rf.Causal())
    expected = clean.flash()
    dirty = clean.mapped(torch.clone)
    dirty.q[:, :8] = value
    dirty.dout[:, :8] = value
    assert all(torch.equal(a, b) for a, b in zip(dirty.flash(), expected, strict=True))


def test_large_scores_stay_finite() -> None:
    problem = Problem.random(seqlen=50, dtype=torch.float64, mask=rf.Causal())
    large = Problem(problem.q * 1e4, problem.k, problem.v, problem.dout, problem.mask)
    assert all(torch.isfinite(x).all() for x in large.flash())


def _strided(x: Tensor) -> Tensor:
    storage = torch.full((*x.shape, 3), math.nan, dtype=x.dtype)
    storage[..., 1] = x
    return storage[..., 1]


def test_strides_do_not_matter() -> None:
    problem = Problem.random(seqlen=40, mask=rf.Causal())
    transposed = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    for change in (_strided, transposed):
        changed = problem.mapped(change)
        for a, b in zip(problem.flash(), changed.flash(), strict=True):
            assert torch.equal(a, b)


def test_expanded_inputs() -> None:
    problem = Problem.random(seqlen=20, heads=(4, 1), mask=rf.Causal())
    k, v = (x.expand(-1, -1, 4, -1) for x in (problem.k, problem.v))
    expanded = as_tensor(rf.flash_attention(problem.q, k, v, mask=rf.Causal()))
    assert torch.equal(expanded, as_tensor(rf.flash_attention(problem.q, k.clone(), v.clone(), mask=rf.Causal())))


def test_an_input_changed_after_the_forward_is_noticed() -> None:
    problem = Problem.random(seqlen=8)
    q = problem.q.requires_grad_()
    k = problem.k.clone()
    out = as_tensor(rf.flash_attention(q, k, problem.v))
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_uninitialised_memory_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(seqlen=(9, 4), mask=rf.Causal())
    expected = problem.flash()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        got = problem.flash()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_softmax_scale() -> None:
    problem = Problem.random(seqlen=12, dtype=torch.float64)
    got = rf.flash_attention(problem.q, problem.k, problem.v, softmax_scale=0.3)
    torch.testing.assert_close(got, reference.attention(problem.q, problem.k, problem.v, softmax_scale=0.3)[0])


def qkv(headdim: int = 16, nheads: int = 2, nheads_kv: int = 2, seqlen: int = 4, dtype: torch.dtype = torch.float32):
    q = torch.zeros(1, seqlen, nheads, headdim, dtype=dtype)
    return (
        q,
        torch.zeros(1, seqlen, nheads_kv, headdim, dtype=dtype),
        torch.zeros(1, seqlen, nheads_kv, headdim, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q: expected 4 dimensions, got shape \(4, 2, 16\)"),
        (lambda q, k, v: (q, k.half(), v), r"k: expected as q: torch.float32 on cpu, got torch.float16 on cpu"),
        (lambda q, k, v: (q, k, v.to("meta")), "v: expected as q: torch.float32 on cpu, got torch.float32 on meta"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "q: expected one of .*float16.* got torch.int64"),
        (lambda q, k, v: qkv(headdim=8), "headdim: expected 16 to 256, got 8"),
        (lambda q, k, v: qkv(headdim=512), "headdim: expected 16 to 256, got 512"),
        (lambda q, k, v: (q, k, v[..., :8]), "headdim of v: expected 16 to 256, got 8"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 17)), "headdim of v: expected 16 to 256, got 272"),
        (lambda q, k, v: qkv(nheads=3), "nheads: expected a positive multiple of nheads_kv = 2, got 3 and 2"),
        (lambda q, k, v: qkv(nheads_kv=0), "nheads: expected a positive multiple of nheads_kv = 1, got 2 and 0"),
        (lambda q, k, v: ([1.0], k, v), "q: expected a tensor, got list"),
        (lambda q, k, v: qkv(seqlen=0), "q, k: expected at least one row and head"),
        (
            lambda q, k, v: (q, k[..., :8], v),
            r"k, v: expected k \(1, seqlen_k, nheads_kv, 16\) and v \(.., headdim_v\) with the same",
        ),
        (
            lambda q, k, v: (q, k, v[:, :3]),
            r"k, v: expected k \(1, seqlen_k, nheads_kv, 16\) and v \(.., headdim_v\) with the same",
        ),
    ],
)
def test_bad_tensors(change, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rf.flash_attention(*change(*qkv()))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_bad_scale(scale: float) -> None:
    with pytest.raises(ArgumentError, match="softmax_scale: expected positive and finite"):
        rf.flash_attention(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["big", "0.5", [1.0], True, torch.tensor(0.5)])
def test_a_scale_that_is_no_number(scale: Any) -> None:
    for call in (rf.flash_attention, partial(rf.ring_attention, context=rf.ContextParallel.local(2))):
        with pytest.raises(ArgumentError, match="softmax_scale: expected a number, or None, got "):
            call(*qkv(), softmax_scale=scale)


def test_bad_backend() -> None:
    with pytest.raises(ArgumentError, match="backend: expected one of .*got 'cuda'"):
        rf.flash_attention(*qkv(), options=rf.AttentionOptions(backend="cuda"))


ONE_A_HEAD = "a floating-point tensor of shape"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": torch.zeros(3)}, rf"sinks: expected {ONE_A_HEAD} \(2,\) on cpu, got torch.float32 \(3,\) on cpu"),
        ({"sinks": torch.zeros(1, 2)}, rf"sinks: expected {ONE_A_HEAD} \(2,\) on cpu, got torch.float32 \(1, 2\)"),
        ({"sinks": torch.zeros(2).long()}, rf"sinks: expected {ONE_A_HEAD} .*got torch.int64 \(2,\) on cpu"),
        ({"sinks": torch.zeros(2).to("meta")}, rf"sinks: expected {ONE_A_HEAD} .* on cpu, got .* on meta"),
        ({"sinks": [0.0, 1.0]}, rf"sinks: expected {ONE_A_HEAD} .*got list"),
        ({"alibi_slopes": torch.zeros(3)}, rf"alibi_slopes: expected {ONE_A_HEAD} \(2,\) or \(1, 2\) .*\(3,\)"),
        ({"alibi_slopes": torch.zeros(2, 2)}, rf"alibi_slopes: expected {ONE_A_HEAD} \(2,\) or \(1, 2\) .*\(2, 2\)"),
        ({"alibi_slopes": torch.zeros(2).int()}, rf"alibi_slopes: expected {ONE_A_HEAD} .*got torch.int32"),
        ({"alibi_slopes": 0.5}, rf"alibi_slopes: expected {ONE_A_HEAD} .*got float"),
        ({"deterministic": "no"}, "deterministic: expected None, True or False, got 'no'"),
        (
            {"alibi_slopes": torch.zeros(2, requires_grad=True)},
            "alibi_slopes: expected slopes without gradient, got requires_grad. Detach them",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    for call in (rf.flash_attention, partial(rf.ring_attention, context=rf.ContextParallel.local(2))):
        with pytest.raises(ArgumentError, match=message):
            call(*qkv(), options=rf.AttentionOptions(**options))


@pytest.mark.parametrize("options", [None, {}, rf.DecodeOptions()])
def test_options_of_another_kind(options: Any) -> None:
    with pytest.raises(ArgumentError, match="options: expected a rf.AttentionOptions, got"):
        rf.flash_attention(*qkv(), options=options)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (rf.Documents([0, 3, 7]), "cu_seqlens: expected lengths that sum to the sequence's 8 keys, got a sum of 7"),
        (rf.Documents([0, 9]), "cu_seqlens: expected lengths that sum to the sequence's 8 keys, got a sum of 9"),
        (rf.KeyPadding([9]), "seqlens_k: expected none above the sequence's 8 keys, got 9"),
        (rf.PrefixLM([9]), "prefix_lens: expected none above the sequence's 8 keys, got 9"),
        (rf.BlockSparse([[True]], 4), r"blocks: expected \(2, 2\) for 8 tokens in blocks of 4, got \(1, 1\)"),
        (rf.Tree([-1, 0, 1], start=6), "mask: expected a tree that ends by 8, got one to 9"),
        (rf.KeyPadding([8, 8]), "mask: expected one of batch 1, got batch 2"),
    ],
)
def test_masks_of_another_sequence(mask: Mask, message: str) -> None:
    rings = [partial(rf.ring_attention, context=rf.ContextParallel.local(2, layout)) for layout in LAYOUTS]
    for call in (rf.flash_attention, *rings):
        for given in (mask, rf.Causal() & mask):
            with pytest.raises(ArgumentError, match=message):
                call(*qkv(seqlen=8), mask=given)


def test_a_mask_fits_the_keys_where_queries_are_fewer() -> None:
    q, k, v = qkv(seqlen=8)
    assert as_tensor(rf.flash_attention(q[:, -3:], k, v, mask=rf.Documents([0, 5, 8]))).shape == (1, 3, 2, 16)


def _large(problem: Problem) -> Problem:
    """Returns the problem with logits of 1e4, all different."""
    return replace(problem, q=problem.q * 100, k=problem.k * 30)


def _tied(problem: Problem) -> Problem:
    """Returns the problem with logits of 1e4 that are equal in each row."""
    return replace(problem, q=problem.q * 100, k=(problem.k[:, :1] * 30).expand_as(problem.k).contiguous())


def _close(problem: Problem) -> Problem:
    """Returns the problem with logits of 1e4 that differ by a few units."""
    return replace(problem, q=problem.q.abs() * 100, k=10 + problem.k * 1e-2)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("logits", [_large, _tied, _close])
def test_float32_gradients_at_logits_of_1e4(logits: Any, deterministic: bool, world: int) -> None:
    """Checks gradients where a single float32 for lse would change every probability by 5e-4."""
    for mask in (None, rf.Causal()):
        problem = logits(Problem.random(seqlen=90, mask=mask, sinks=True))
        options = {"deterministic": deterministic}
        got = problem.flash(**options) if world == 1 else problem.ring(rf.ContextParallel.local(world), **options)
        assert_accurate(got, problem)
