from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringflash.errors import ArgumentError
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.generate import Sampling, continue_prompts
from tests.helpers.distributed import run_ranks

CONFIG = ModelConfig(vocab_size=31, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48)
PROMPT = torch.tensor([3, 1, 4, 1, 5])


def decoder() -> Decoder:
    model = Decoder(CONFIG, seed=2)
    # Larger weights make distinct logits; a fresh model has almost equal ones.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def sample(model: Decoder, temperature: float = 1.0, count: int = 12, vocab_size: int | None = None) -> list[int]:
    sampling = Sampling(temperature, vocab_size=vocab_size)
    generator = torch.Generator().manual_seed(7)
    return continue_prompts(model, [PROMPT], count, sampling, generator=generator)[0].tolist()


def test_the_likeliest_tokens_are_those_of_whole_forwards() -> None:
    model, tokens = decoder(), PROMPT
    for _ in range(12):
        logits = model(tokens[None], torch.arange(len(tokens)))
        tokens = torch.cat((tokens, logits[0, -1].argmax(keepdim=True)))
    assert sample(model, temperature=0) == tokens[5:].tolist()


def test_sampling_is_seeded_and_follows_the_temperature() -> None:
    model = decoder()
    assert sample(model) == sample(model)
    assert sample(model, temperature=1e-4) == sample(model, temperature=0)
    assert sample(model, temperature=5.0) != sample(model, temperature=0)


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = decoder()
    assert {*sample(model, 50.0, 100, vocab_size=9)} == {*range(9)}
    assert max(sample(model, 50.0, 100)) >= 9


def test_only_the_likeliest_are_drawn() -> None:
    logits = torch.tensor([0.5, 0.1, 0.05, 0.3, 0.05]).log().expand(2000, 5)
    for sampling, kept in (
        (Sampling(), {0, 1, 2, 3, 4}),
        (Sampling(top_k=2), {0, 3}),
        (Sampling(top_k=9), {0, 1, 2, 3, 4}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(top_p=0.51), {0, 3}),
        (Sampling(top_p=0.85), {0, 1, 3}),
        (Sampling(top_k=2, top_p=0.6), {0}),  # token 0 has 0.625 of the two's probability
        (Sampling(vocab_size=2, top_p=0.99), {0, 1}),
    ):
        drawn = sampling.draw(logits, torch.Generator().manual_seed(0))
        assert {*drawn.tolist()} == kept
    share = (Sampling(top_k=2).draw(logits, torch.Generator().manual_seed(0)) == 0).double().mean()
    assert share.item() == pytest.approx(0.5 / 0.8, abs=0.05)


def test_sequences_end_with_the_stop_token_each_for_itself() -> None:
    prompts = [PROMPT, PROMPT[:2], torch.arange(9)]
    likeliest = Sampling(0)
    alone = [continue_prompts(decoder(), [prompt], 12, likeliest)[0] for prompt in prompts]
    assert all(
        torch.equal(a, b) for a, b in zip(continue_prompts(decoder(), prompts, 12, likeliest), alone, strict=True)
    )
    stop = int(alone[0][4])
    for got, whole in zip(continue_prompts(decoder(), prompts, 12, Sampling(0, stop_token=stop)), alone, strict=True):
        values = whole.tolist()
        assert got.tolist() == (values[: values.index(stop) + 1] if stop in values else values)


def test_no_new_tokens() -> None:
    assert sample(decoder(), count=0) == []


def _sharded_sample() -> list[int]:
    model = decoder()
    mesh = init_device_mesh("cpu", (2,))  # the default is a mesh of GPUs where there are any
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return sample(model)


def test_ranks_in_lockstep() -> None:
    one, two = run_ranks(2, _sharded_sample)
    assert one == two == sample(decoder())


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "message"),
    [
        (torch.empty(0, dtype=torch.int64), 1, 1.0, "prompt"),
        (PROMPT[None], 1, 1.0, "prompt"),
        (torch.tensor([3, 31]), 1, 1.0, "token ids from 0 to 30"),
        (PROMPT, -1, 1.0, "max_new_tokens"),
        (PROMPT, 1, -1.0, "temperature"),
    ],
)
def test_bad_arguments(prompt: torch.Tensor, count: int, temperature: float, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        continue_prompts(decoder(), [prompt], count, Sampling(temperature))


@pytest.mark.parametrize(("option", "value"), [("top_k", 0), ("top_p", 0.0), ("top_p", 1.1), ("vocab_size", 0)])
def test_bad_sampling(option: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=option):
        Sampling(**{option: value})  # pyright: ignore[reportArgumentType]


def test_no_prompts() -> None:
    with pytest.raises(ArgumentError, match="prompts: expected at least one, got none"):
        continue_prompts(decoder(), [], 1, Sampling())
