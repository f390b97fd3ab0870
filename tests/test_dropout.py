"""Dropout: the known answers of Philox, the rate, and the same dropped weights for every cut of the sequence."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.dropout import kept, philox
from ringflash.errors import ArgumentError, RankMismatch
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Full
from tests.helpers.accuracy import as_tensor
from tests.helpers.distributed import run_ranks

WORD = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((WORD,) * 4, (WORD,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    """Compares with the test vectors of Random123, the implementation by Philox's authors."""
    words = philox([torch.tensor(word) for word in counter], key[0] | key[1] << 32)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_a_weight_is_one_word_of_its_position() -> None:
    p, seed, position = 0.4, 2**62 + 3, (1, 2, 5, 11)  # batch, head, row, column
    batch, head, row, column = position
    word = philox([torch.tensor(x) for x in (column // 4, row, head, batch)], seed)[column % 4]
    drops = int(word) / 2**32 < p
    assert kept(p, seed, 2, 3, torch.arange(6), torch.arange(12))[position] == (not drops)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate(p: float) -> None:
    positions = torch.arange(256)
    draws = [kept(p, seed, 2, 8, positions + 1000 * seed, positions) for seed in range(8)]  # 8 million weights
    dropped = 1.0 - sum(float(draw.double().mean()) for draw in draws) / len(draws)
    assert abs(dropped - p) <= 0.005 * p


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p: float) -> None:
    draw = kept(p, 7, 2, 8, torch.arange(256), torch.arange(256)).double()
    other_seed = kept(p, 8, 2, 8, torch.arange(256), torch.arange(256)).double()
    pairs = {
        f"dimension {dim}": (draw.narrow(dim, 1, n - 1), draw.narrow(dim, 0, n - 1)) for dim, n in enumerate(draw.shape)
    }
    for name, (a, b) in {**pairs, "seed": (draw, other_seed)}.items():
        correlation = ((a - 1 + p) * (b - 1 + p)).mean() / (p * (1 - p))
        assert abs(correlation) <= 5 / math.sqrt(a.numel()), name


def _weights(attention: Callable[..., Any], seqlen: int, dropout: rf.Dropout) -> Tensor:
    """Returns the weights (batch, nheads, seqlen, seqlen) of `attention`, made visible by the identity as values."""
    q, k = torch.randn(2, seqlen, 4, 16, dtype=torch.float64), torch.randn(2, seqlen, 2, 16, dtype=torch.float64)
    v = torch.eye(seqlen, dtype=torch.float64)[None, :, None].expand(2, -1, 2, -1)
    return as_tensor(attention(q, k, v, dropout=dropout)).transpose(1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [0, 1, 2, 3, 5])
def test_what_is_dropped_depends_on_positions_alone(world: int, layout: str) -> None:
    context = rf.ContextParallel.local(max(world, 1), layout)

    def ring(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        q, k, v = (context.shard(x, mask=Full()) for x in (q, k, v))
        return context.unshard(as_tensor(rf.ring_attention(q, k, v, context, **rest)), mask=Full())

    weights = _weights(ring if world else rf.flash_attention, 83, rf.Dropout(0.35, seed=99))
    assert torch.equal(weights > 0, kept(0.35, 99, 2, 4, torch.arange(83), torch.arange(83)))


def test_queries_that_are_the_last_ones_keep_their_positions() -> None:
    last = lambda q, k, v, **rest: rf.flash_attention(q[:, -20:], k, v, **rest)  # noqa: E731
    weights = _weights(last, 50, rf.Dropout(0.35, seed=1))
    assert torch.equal(weights > 0, kept(0.35, 1, 2, 4, torch.arange(30, 50), torch.arange(50)))


def test_the_mean_over_seeds_is_attention_without_dropout() -> None:
    q, k, v = (torch.randn(1, 12, 2, 16, dtype=torch.float64) for _ in range(3))
    outs = torch.stack([as_tensor(rf.flash_attention(q, k, v, dropout=rf.Dropout(0.3, seed))) for seed in range(300)])
    error = (outs.mean(0) - as_tensor(rf.flash_attention(q, k, v))).abs()
    assert (error <= 5 * outs.std(0) / math.sqrt(300)).all()


def _qkv() -> list[Tensor]:
    return [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]


def test_without_a_seed_torch_draws_one_a_call() -> None:
    qkv = _qkv()
    call = lambda: as_tensor(rf.flash_attention(*qkv, dropout=rf.Dropout(0.5)))  # noqa: E731
    torch.manual_seed(5)
    first, second = call(), call()
    torch.manual_seed(5)
    again = call()
    assert torch.equal(again, first)
    assert not torch.equal(second, first)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("context", [None, rf.ContextParallel.local(2)])
def test_checkpointing_drops_the_same_again(context: rf.ContextParallel | None, use_reentrant: bool) -> None:
    qkv = _qkv()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rest: dict[str, Any] = {"mask": rf.Causal(), "dropout": rf.Dropout(0.5)}
        if context is None:
            return as_tensor(rf.flash_attention(q, k, v, **rest)).sin()
        return as_tensor(rf.ring_attention(q, k, v, context, **rest)).sin()

    results = []
    for call in (attention, lambda *qkv: checkpoint(attention, *qkv, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        out = call(*qkv)
        torch.rand(10)  # other code may draw random numbers before the backward
        for x in qkv:
            x.grad = None
        out.square().sum().backward()  # reentrant checkpoints do not support torch.autograd.grad
        results.append([out, *(x.grad for x in qkv)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_seed_in_a_tensor_is_the_number() -> None:
    qkv = _qkv()
    outs = [
        as_tensor(rf.flash_attention(*qkv, dropout=rf.Dropout(0.5, seed)))
        for seed in (17, torch.tensor(17), torch.tensor([17]))
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("p", [-0.1, 1.0, 2, math.nan, "a"])
def test_bad_probabilities(p: Any) -> None:
    with pytest.raises(ArgumentError, match=r"dropout: expected a probability in \[0, 1\), got"):
        rf.Dropout(p)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", True])
def test_bad_numbers_as_seed(seed: Any) -> None:
    with pytest.raises(ArgumentError, match=f"seed: expected a whole number from 0 to 2.63 - 1, got {seed!r}"):
        rf.Dropout(0.1, seed)


@pytest.mark.parametrize(
    "seed", [torch.tensor(1.0), torch.tensor(1, dtype=torch.int32), torch.tensor([1, 2]), torch.tensor(1).to("meta")]
)
def test_bad_tensors_as_seed(seed: Tensor) -> None:
    with pytest.raises(ArgumentError, match="seed: expected one int64 on the CPU, got torch"):
        rf.Dropout(0.1, seed)


def test_a_tensor_below_0_as_seed() -> None:
    with pytest.raises(ArgumentError, match="seed: expected a whole number from 0 to 2.63 - 1, got -5"):
        rf.Dropout(0.1, torch.tensor(-5))


def test_a_number_is_no_dropout() -> None:
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ArgumentError, match="dropout: expected None or a rf.Dropout, got 0.1"):
        rf.flash_attention(q, q, q, dropout=0.1)  # type: ignore[arg-type]


CAPTURED = "dropout: expected a whole number as seed while a CUDA graph is captured, got one that may change"


def _attend(q: Tensor, dropout: rf.Dropout) -> Tensor:
    return as_tensor(rf.flash_attention(q, q, q, dropout=dropout))


def _pretend_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch's compiler
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", [None, torch.tensor(3)])
def test_a_captured_graph_does_not_keep_a_seed_that_changes(
    seed: Tensor | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(1, 20, 2, 16)
    call = torch.compile(_attend, backend="aot_eager", fullgraph=True) if compiled else _attend
    call(q, rf.Dropout(0.5, seed))
    _pretend_to_capture(monkeypatch)
    with pytest.raises(ArgumentError, match=CAPTURED):
        call(q, rf.Dropout(0.5, seed))


def test_a_captured_graph_keeps_a_seed_that_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 20, 2, 16)
    expected = _attend(q, rf.Dropout(0.5, 3))
    _pretend_to_capture(monkeypatch)
    assert torch.equal(_attend(q, rf.Dropout(0.5, 3)), expected)
    assert torch.isfinite(_attend(q, rf.Dropout(0.0))).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_dropout_in_a_captured_graph() -> None:
    q = torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16)
    expected = _attend(q, rf.Dropout(0.5, 3))  # also compiles the kernels, before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attend(q, rf.Dropout(0.5, 3))
        with pytest.raises(ArgumentError, match=CAPTURED):
            _attend(q, rf.Dropout(0.5))
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def _drawn_on_ranks_seeded_differently() -> str:
    context = rf.ContextParallel(dist.group.WORLD)
    torch.manual_seed(context.rank)
    x = context.shard(torch.randn(1, 8, 1, 16))
    with pytest.raises(RankMismatch) as caught:
        rf.ring_attention(x, x, x, context, dropout=rf.Dropout(0.5))
    return str(caught.value)


def test_seeds_that_ranks_draw_differently_are_refused_with_the_remedy() -> None:
    for text in run_ranks(2, _drawn_on_ranks_seeded_differently):
        assert "ranks disagree on dropout" in text
        assert "pass rf.Dropout(p, seed=number), with another number in each step" in text
