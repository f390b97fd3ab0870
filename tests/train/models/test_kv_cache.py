"""The KV cache, whole and sharded: exact logits for each token, with unequal prompts and with windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.masks import Mask
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.generate import Sampling, continue_prompts
from ringflash.train.models.kv_cache import KVCache
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.xdist_group("cache")

CONFIG = ModelConfig(vocab_size=31, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48)
LENGTHS, NEW = (13, 2, 20), 6
WINDOW = rf.Causal() & rf.SlidingWindow(5)
PROMPTS = [torch.randint(0, 31, (n,), generator=torch.Generator().manual_seed(n)) for n in (13, 1, 20)]


def decoder() -> Decoder:
    model = Decoder(CONFIG, seed=2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # distinct logits; a fresh model has almost equal ones
    return model


def tokens() -> Tensor:
    return torch.randint(0, 31, (3, max(LENGTHS) + NEW), generator=torch.Generator().manual_seed(0))


def follow(context: rf.ContextParallel | None) -> list[Tensor]:
    """Returns the newest logits after the prompts and after each step of new tokens."""
    model, x, lengths = decoder(), tokens(), torch.tensor(LENGTHS)
    given: dict[str, Any] = {"context": context, "prompt_lengths": lengths}
    cache = KVCache.empty(CONFIG, 3, max(LENGTHS) + NEW, "cpu", torch.float64, **given)
    whole = torch.where(torch.arange(20) < lengths[:, None], x[:, :20], 7)
    positions = torch.arange(20) if context is None else context.positions(20)
    prompt = whole if context is None else context.shard(whole)
    with torch.no_grad():
        out = [model(prompt, positions, context, cache, newest=True)[:, 0]]
        while (cache.seqlens < lengths + NEW).all():
            # one new token, then three at once, then one at a time
            count = 3 if int(cache.seqlens[0]) == LENGTHS[0] + 1 else 1
            at = cache.seqlens[:, None] + torch.arange(count)
            out.append(model(x.gather(1, at), at, context, cache, newest=True)[:, 0])
    return out


def expected_logits() -> list[Tensor]:
    model, x = decoder(), tokens()
    with torch.no_grad():
        logits = model(x, torch.arange(x.shape[1]))
    steps = [0, 1, *range(4, NEW + 1)]
    return [torch.stack([logits[b, n + step - 1] for b, n in enumerate(LENGTHS)]) for step in steps]


class Windowed:
    """Windowed attention of random queries, with keys added to the cache step by step.

    `out` has the outputs of the cache, and `expected` has those of attention over the whole sequence.
    """

    def __init__(self, lengths: tuple[int, ...], mask: Mask, context: rf.ContextParallel | None) -> None:
        generator = torch.Generator().manual_seed(3)
        batch, seqlen = len(lengths), max(lengths) + NEW
        draw = [torch.randn(batch, seqlen, n, 16, generator=generator, dtype=torch.float64) for n in (2, 1, 1)]
        given: dict[str, Any] = {"context": context, "prompt_lengths": torch.tensor(lengths)}
        cache = KVCache.empty(CONFIG, batch, seqlen, "cpu", torch.float64, **given)
        positions = torch.arange(max(lengths)) if context is None else context.positions(max(lengths))
        cache.begin(positions)
        q, k, v = (x[:, positions].contiguous() for x in draw)
        cache.attend(0, q, k, v, mask)
        cache.finish()
        self.out: list[Tensor] = []
        self.expected: list[Tensor] = []
        for step in range(NEW):
            at = torch.tensor(lengths)[:, None] + step
            cache.begin(at)
            sequences = torch.arange(batch)[:, None]
            q, k, v = (x[sequences, at] for x in draw)
            self.out.append(cache.attend(0, q, k, v, mask))
            cache.finish()
            for b, n in enumerate(lengths):
                whole = rf.flash_attention(*(x[b : b + 1, : n + step + 1] for x in draw), mask=mask)
                assert isinstance(whole, Tensor)
                self.expected.append(whole[0, -1:])

    def error(self) -> float:
        return float((torch.cat(self.out) - torch.stack(self.expected)).abs().max())


def windowed_errors(context: rf.ContextParallel | None) -> list[float]:
    cases = (((13, 13), WINDOW), ((3, 30), WINDOW & rf.SlidingWindow(4, 0)))
    return [Windowed(lengths, mask, context).error() for lengths, mask in cases]


def drawn(context: rf.ContextParallel | None) -> list[list[int]]:
    results = []
    for sampling in (Sampling(0), Sampling(2.0, top_k=20, top_p=0.9, stop_token=5)):
        generator = torch.Generator().manual_seed(7)
        new = continue_prompts(decoder(), PROMPTS, 5, sampling, context=context, generator=generator)
        results += [x.tolist() for x in new]
    return results


def failures(context: rf.ContextParallel) -> list[str]:
    texts = []
    for make in (_several_through_a_window, _full):
        try:
            make(context)
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def _several_through_a_window(context: rf.ContextParallel) -> None:
    cache, q = started(context)
    cache.begin(torch.arange(8, 11))
    cache.attend(0, q.expand(1, 3, 2, 16), q[:, :, :1].expand(1, 3, 1, 16), q[:, :, :1].expand(1, 3, 1, 16), WINDOW)


def _full(context: rf.ContextParallel) -> None:
    cache, q = started(context)
    for step in range(20):
        cache.begin(torch.tensor([8 + step]))
        cache.attend(0, q, q[:, :, :1], q[:, :, :1], rf.Causal())
        cache.finish()


def started(context: rf.ContextParallel) -> tuple[KVCache, Tensor]:
    given: dict[str, Any] = {"context": context, "prompt_lengths": torch.tensor([8])}
    cache = KVCache.empty(CONFIG, 1, 12, "cpu", torch.float64, **given)
    rows, q = len(context.positions(8)), torch.ones(1, 1, 2, 16, dtype=torch.float64)
    cache.begin(context.positions(8))
    k = torch.ones(1, rows, 1, 16, dtype=torch.float64)
    cache.attend(0, torch.ones(1, rows, 2, 16, dtype=torch.float64), k, k, rf.Causal())
    cache.finish()
    return cache, q


def _on_rank(layout: str) -> dict[str, Any]:
    context = rf.ContextParallel(dist.group.WORLD, layout=layout)
    return {
        "logits": follow(context),
        "windows": windowed_errors(context),
        "drawn": drawn(context),
        "alone": drawn(rf.ContextParallel(dist.new_subgroups(1)[0])),
        "failures": failures(context),
    }


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    return {2: run_ranks(2, _on_rank, "zigzag"), 3: run_ranks(3, _on_rank, "striped")}


def test_token_by_token_on_one_device() -> None:
    for got, want in zip(follow(None), expected_logits(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=0)
    assert max(windowed_errors(None)) <= 1e-12


@pytest.mark.parametrize("world_size", [2, 3])
def test_token_by_token_over_ranks(world_size: int, ranks: dict[int, list[dict[str, Any]]]) -> None:
    for rank in ranks[world_size]:
        for got, want in zip(rank["logits"], expected_logits(), strict=True):
            torch.testing.assert_close(got, want, atol=1e-11, rtol=0)
        assert max(rank["windows"]) <= 1e-12
        assert rank["drawn"] == rank["alone"] == drawn(None)


def test_what_ranks_cannot_do_is_raised_on_all(ranks: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (rank["failures"] for rank in ranks[2])
    assert all(
        "mask: expected one without a window to the left for a sharded cache" in texts[0] for texts in (first, second)
    )
    assert all("cache: expected room for 9 tokens" in texts[1] for texts in (first, second))


def test_more_new_tokens_than_a_call_of_flash_decode_takes() -> None:
    model, x = decoder(), torch.randint(0, 31, (2, 90), generator=torch.Generator().manual_seed(0))
    cache = KVCache.empty(CONFIG, 2, 90, "cpu", torch.float64)
    with torch.no_grad():
        parts = [model(x[:, part], torch.arange(90)[part], cache=cache) for part in (slice(0, 11), slice(11, 90))]
        torch.testing.assert_close(torch.cat(parts, 1), model(x, torch.arange(90)), atol=1e-11, rtol=0)
        with pytest.raises(ArgumentError, match="max_seqlen=90"):
            model(x[:, :1], torch.arange(90, 91), cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": rf.ContextParallel.local(2)}, "context: expected None, or processes"),
        ({"prompt_lengths": torch.tensor([3])}, "prompt_lengths: expected 2 lengths from 1 to 8"),
        ({"prompt_lengths": torch.tensor([3, 9])}, r"prompt_lengths: .* got \[3, 9\]"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KVCache.empty(CONFIG, 2, 8, "cpu", torch.float32, **options)


def test_a_cache_of_another_context() -> None:
    cache, x = KVCache.empty(CONFIG, 1, 8, "cpu", torch.float32), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="cache: expected a KVCache made for the context"):
        Decoder(CONFIG)(x, torch.arange(4), rf.ContextParallel.local(2), cache)
    with pytest.raises(ArgumentError, match="cache: .*got none"):
        Decoder(CONFIG)(x, torch.arange(4), newest=True)
    with pytest.raises(ArgumentError, match="position_ids: expected rising"):
        Decoder(CONFIG)(x, torch.arange(4).flip(0), cache=cache)
