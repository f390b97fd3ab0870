"""Generation: continues prompts token by token with a KV cache, on one device or over a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.kv_cache import KVCache, over_ranks


@dataclass(frozen=True)
class Sampling:
    """Rule for drawing tokens from logits and for ending a sequence.

    Args:
        temperature: tokens are drawn from softmax(logits / temperature); 0 takes the likeliest.
        top_k: draw from the k likeliest tokens only; None from all.
        top_p: draw from the fewest likeliest tokens with a total probability, after top_k, of at least this.
        stop_token: the token after which a sequence ends; None for none.
        vocab_size: size of the tokenizer's vocabulary, if the model's is padded: ids from there on are never drawn.

    Raises:
        ArgumentError: a number out of its range.

    Source: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, fits, expected, remedy in (
            ("temperature", self.temperature >= 0, "at least 0", "0 takes the likeliest token."),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or at least 1", "None draws from all tokens."),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1", "1 draws from all tokens."),
            ("vocab_size", self.vocab_size is None or self.vocab_size >= 1, "None or at least 1", "Leave it out."),
        ):
            if not fits:
                raise ArgumentError(name, expected=expected, got=getattr(self, name), remedy=remedy)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws a token of each row: (batch, vocab_size) on the CPU -> (batch,) int64."""
        logits = logits[:, : self.vocab_size]
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            enough = ordered.cumsum(-1) - ordered >= self.top_p  # the tokens before this one already reach top_p
            probabilities = probabilities.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), 0)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


@torch.no_grad()
def continue_prompts(
    model: Decoder,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    context: rf.ContextParallel | None = None,
    generator: torch.Generator | None = None,
    cache_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Returns the tokens that follow each prompt; all sequences form one batch.

    With `context` each rank computes its shard of the prompts in a ring and keeps the shard's keys and values. All
    ranks then compute each new token together, with `rf.flash_decode` over their caches, and the first rank draws.
    Every rank calls this function with the same arguments and gets the same result. Only the last logits of each prompt
    are computed.

    Under FSDP without `context` each rank has the whole prompts and cache, and the forward passes gather the weights.
    All ranks then call it together, with equally seeded generators and without a stop token.

    Args:
        model: the decoder, whole on every rank.
        prompts: (seqlen,) int64 each, at least one token, of any lengths.
        max_new_tokens: largest number of new tokens for each prompt.
        sampling: rule for drawing tokens and for ending a sequence.
        context: ranks that share the sequences; None when this rank works alone.
        generator: generator on the CPU, where tokens are drawn.
        cache_dtype: dtype of keys and values; None is the weights' dtype. Set it if FSDP or autocast computes in
            another.

    Returns:
        Per prompt (at most max_new_tokens,) int64 on the CPU, including the stop token.

    Raises:
        ArgumentError: no prompt, an empty one, or one with ids that the model lacks; a negative number of tokens; a
            context over which a `KVCache` cannot be sharded.
    """
    _check(model, prompts, max_new_tokens)
    device = model.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    # A shard has at least one token. Padding follows a prompt's end, where causal attention masks it.
    seqlen = longest if context is None else max(longest, context.world_size)
    tokens = torch.stack([torch.nn.functional.pad(prompt.cpu(), (0, seqlen - len(prompt))) for prompt in prompts])
    cache = KVCache.empty(
        model.config,
        len(prompts),
        seqlen + max_new_tokens,
        device,
        cache_dtype or model.embed_tokens.weight.dtype,
        context=context,
        prompt_lengths=lengths,
    )
    position_ids = torch.arange(seqlen) if context is None else context.positions(seqlen)
    tokens = tokens if context is None else context.shard(tokens)
    new = torch.empty(len(prompts), 0, dtype=torch.int64)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    while new.shape[1] < max_new_tokens and not ended.all():
        logits = model(tokens.to(device), position_ids.to(device), context, cache, newest=True)[:, 0]
        drawn = torch.zeros(len(prompts), dtype=torch.int64)
        if context is None or context.rank == 0:
            drawn = sampling.draw(logits.float().cpu(), generator)
        if context is not None:  # the ranks' logits could differ in their last bits
            drawn = over_ranks(drawn.to(device), context).cpu()
        new = torch.cat((new, drawn[:, None]), 1)
        if sampling.stop_token is not None:
            ended |= drawn == sampling.stop_token
        tokens, position_ids = drawn[:, None], cache.seqlens[:, None]
    return [_up_to(row, sampling.stop_token) for row in new]


def _check(model: Decoder, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
    if max_new_tokens < 0:
        expected, remedy = "at least 0", "Say how many tokens to add."
        raise ArgumentError("max_new_tokens", expected=expected, got=max_new_tokens, remedy=remedy)
    if not prompts:
        raise ArgumentError("prompts", expected="at least one", got="none", remedy="Give one, of one token or more.")
    known = model.config.vocab_size
    for prompt in prompts:
        if prompt.ndim != 1 or not len(prompt):
            got, remedy = tuple(prompt.shape), "Give one token or more."
            raise ArgumentError("prompt", expected="(seqlen,) tokens", got=got, remedy=remedy)
        if not 0 <= int(prompt.min()) <= int(prompt.max()) < known:
            got, remedy = prompt.unique().tolist(), "Encode it as the training text was."
            raise ArgumentError("prompt", expected=f"token ids from 0 to {known - 1}", got=got, remedy=remedy)


def _up_to(tokens: Tensor, stop_token: int | None) -> Tensor:
    """Returns `tokens` up to and including the first stop token."""
    stops = (tokens == stop_token).nonzero()[:, 0] if stop_token is not None else tokens[:0]
    return tokens[: int(stops[0]) + 1] if len(stops) else tokens
