"""Sampling text from a decoder, token by token with a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.train.model import Decoder, KVCache


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    cache_dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The `max_new_tokens` tokens that follow `prompt`, sampled from softmax(logits / temperature).

    Under FSDP all ranks call it together, with equally seeded generators: each has the whole prompt and cache, and
    their forward passes gather the weights. So it never ends early; cut at the end-of-document token instead.

    Args:
        model: the decoder.
        prompt: (seqlen,) int64, at least one token.
        max_new_tokens: how many.
        temperature: 0 takes the likeliest token.
        generator: on the CPU, where tokens are drawn.
        cache_dtype: dtype of keys and values; the weights' unless FSDP or autocast computes in another.
        vocab_size: of the tokenizer, where the model's is padded: ids from there on are never drawn.

    Returns:
        (max_new_tokens,) int64 on the CPU.

    Raises:
        ArgumentError: empty prompt, or with ids that the model lacks; negative temperature or number of tokens.
    """
    for name, fits, expected, got, remedy in (
        ("prompt", prompt.ndim == 1 and len(prompt) > 0, "(seqlen,) tokens", tuple(prompt.shape), "Give one token."),
        ("temperature", temperature >= 0, "at least 0", temperature, "0 takes the likeliest token."),
        ("max_new_tokens", max_new_tokens >= 0, "at least 0", max_new_tokens, "Say how many tokens to add."),
    ):
        if not fits:
            raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
    known = model.config.vocab_size
    if not 0 <= int(prompt.min()) <= int(prompt.max()) < known:
        got, remedy = prompt.unique().tolist(), "Encode it as the training text was."
        raise ArgumentError("prompt", expected=f"token ids from 0 to {known - 1}", got=got, remedy=remedy)
    weight = model.embed_tokens.weight
    length = len(prompt) + max_new_tokens
    cache = KVCache.empty(model.config, 1, length, weight.device, cache_dtype or weight.dtype)
    tokens, new = prompt.to(weight.device), []
    for _ in range(max_new_tokens):
        positions = torch.arange(cache.length, cache.length + len(tokens), device=weight.device)
        logits = model(tokens[None], positions, cache=cache)[0, -1, :vocab_size].float().cpu()
        if temperature == 0:
            token = logits.argmax(keepdim=True)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        new.append(token)
        tokens = token.to(weight.device)
    return torch.cat(new) if new else torch.empty(0, dtype=torch.int64)
