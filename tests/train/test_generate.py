from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ringflash.errors import ArgumentError
from ringflash.train.generate import generate
from ringflash.train.model import Decoder
from ringflash.train.model_config import ModelConfig
from tests.distributed import run_ranks

CONFIG = ModelConfig(vocab_size=31, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48)
PROMPT = torch.tensor([3, 1, 4, 1, 5])


def decoder() -> Decoder:
    model = Decoder(CONFIG, seed=2)
    # Sharper than a fresh model, whose logits are all but equal.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def sample(model: Decoder, temperature: float = 1.0) -> list[int]:
    return generate(model, PROMPT, 12, temperature=temperature, generator=torch.Generator().manual_seed(7)).tolist()


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
    drawn = generate(model, PROMPT, 100, temperature=50.0, generator=torch.Generator().manual_seed(7), vocab_size=9)
    assert {*drawn.tolist()} == {*range(9)}
    assert max(generate(model, PROMPT, 100, temperature=50.0, generator=torch.Generator().manual_seed(7))) >= 9


def test_no_new_tokens() -> None:
    assert generate(decoder(), PROMPT, 0).shape == (0,)


def _sharded_sample() -> list[int]:
    model = decoder()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
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
        generate(decoder(), prompt, count, temperature=temperature)
