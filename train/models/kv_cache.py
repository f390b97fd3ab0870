"""KV cache of the tokens so far, on one device or sharded over a ring, and attention over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.train.models.config import ModelConfig

MOST_QUERIES = 64  # limit of one flash_decode call
NO_POSITION = torch.iinfo(torch.int64).max


class KVCache:
    """Keys and values, (batch, capacity, n_kv_heads, headdim) a layer, of this rank.

    The tokens of the first forward are the prompts. With a context each rank passes its shard, the shards run over the
    ring, and each rank keeps the keys of its shard. Every rank receives all later tokens. The keys of each later
    forward go to the rank with the fewest such keys, and `rf.flash_decode` merges the ranks' states.

    Prompts of several lengths are padded after their ends. Causal attention masks the padding, and new tokens overwrite
    it. Each sequence's keys are therefore consecutive rows with rising positions, on any rank.

    A forward calls `begin`, then `attend` in each layer, then `finish`, under torch.no_grad().

    Attributes:
        seqlens: (batch,) int64 on the CPU, tokens of each sequence so far on all ranks.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        context: rf.ContextParallel | None = None,
        prompt_lengths: Tensor | None = None,
    ) -> None:
        batch, capacity = keys[0].shape[:2]
        self.keys, self.values, self.context = keys, values, context
        self.seqlens = torch.zeros(batch, dtype=torch.int64)
        self._prompt_lengths = prompt_lengths
        self._rows = torch.zeros(batch, dtype=torch.int64)  # tokens on this rank
        self._positions = torch.full((batch, capacity), NO_POSITION)
        self._forwards, self._seqlen_q, self._owner = 0, 0, 0
        self._given = [0] * (1 if context is None else context.world_size)  # new tokens of each rank
        self._written = self._ends = torch.empty(0, dtype=torch.int64)

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        batch: int,
        max_seqlen: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        context: rf.ContextParallel | None = None,
        prompt_lengths: Tensor | None = None,
    ) -> KVCache:
        """Makes an empty cache with room for sequences of `max_seqlen` tokens.

        Args:
            config: the decoder's shape.
            batch: number of sequences.
            max_seqlen: tokens of the longest sequence, including its new ones. With a context a rank has room for its
                share, if new tokens come one at a time.
            device: device of the decoder.
            dtype: dtype of the keys and values that the decoder computes.
            context: ranks that share the sequences; None when this rank has all of them.
            prompt_lengths: (batch,) int64 on the CPU, lengths before padding; required with a context. None is all
                tokens of the first forward.

        Raises:
            ArgumentError: virtual ranks, or the layout "balanced"; a context without `prompt_lengths`, or lengths that
                do not fit.
        """
        remedy = "Use processes, and a layout that is the same under every mask."
        if context is not None and (context.layout == "balanced" or len(context.local_ranks) > 1):
            expected = "None, or processes with another layout than balanced"
            raise ArgumentError("context", expected=expected, got=repr(context), remedy=remedy)
        lengths = [] if prompt_lengths is None else prompt_lengths.tolist()
        if (context is not None or lengths) and not (
            len(lengths) == batch and all(1 <= n <= max_seqlen for n in lengths)
        ):
            expected, remedy = f"{batch} lengths from 1 to {max_seqlen}", "Say how long each prompt is."
            raise ArgumentError("prompt_lengths", expected=expected, got=lengths or None, remedy=remedy)
        world_size = 1 if context is None else context.world_size
        # Shards of the prompt and numbers of new tokens each differ by at most one.
        capacity = max_seqlen if world_size == 1 else -(-max_seqlen // world_size) + 2
        shape = (batch, capacity, config.n_kv_heads, config.headdim)
        keys, values = (
            [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layers)] for _ in range(2)
        )
        return cls(keys, values, context, prompt_lengths)

    @property
    def max_seqlen(self) -> int:
        """Number of tokens that fit on this rank."""
        return self.keys[0].shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, including those of the forward that has begun."""
        if self._forwards:
            return int(self.seqlens.max()) + self._seqlen_q
        return self._seqlen_q if self._prompt_lengths is None else int(self._prompt_lengths.max())

    def begin(self, position_ids: Tensor) -> None:
        """Makes room for the tokens of a forward.

        Args:
            position_ids: positions of the tokens, (seqlen,) or (batch, seqlen). Positions of prompts must rise and be
                equal for all sequences.

        Raises:
            ArgumentError: no room is left, or positions of the prompts do not rise.
        """
        try:
            self._begin(position_ids)
        except ArgumentError as error:
            if self.context is not None:
                self.context.announce_failure(error)  # the other ranks are about to wait for this one
            raise

    def _begin(self, position_ids: Tensor) -> None:
        batch, device = len(self.seqlens), self.keys[0].device
        seqlen, before = position_ids.shape[-1], self._rows
        prompt, rank = not self._forwards, 0 if self.context is None else self.context.rank
        self._seqlen_q, self._owner = seqlen, self._given.index(min(self._given))
        taken = seqlen if prompt or rank == self._owner else 0
        if (end := int(before.max()) + taken) > self.max_seqlen:
            raise ArgumentError(
                "cache",
                expected=f"room for {end} tokens",
                got=f"max_seqlen={self.max_seqlen}",
                remedy="Make a longer cache with KVCache.empty.",
            )
        if prompt:
            self._begin_prompt(position_ids.reshape(-1, seqlen).cpu())
            return
        self._given[self._owner] += seqlen
        written = before[:, None] + torch.arange(taken)
        self._positions.scatter_(1, written, self.seqlens[:, None] + torch.arange(taken))
        self._rows, self._written = before + taken, written.to(device)
        self._ends = torch.full((batch,), seqlen - 1)

    def _begin_prompt(self, positions: Tensor) -> None:
        own = positions[0].contiguous()
        if bool((positions != own).any()) or bool((own.diff() < 0).any()):
            expected, got = "rising, and alike for all sequences of the prompt", "others"
            raise ArgumentError("position_ids", expected=expected, got=got, remedy="Leave them as the layout has them.")
        lengths = self._prompt_lengths
        if lengths is None:
            lengths = torch.full_like(self.seqlens, len(own))
        self._rows = torch.searchsorted(own, lengths)
        for b, rows in enumerate(self._rows.tolist()):
            self._positions[b, :rows] = own[:rows]
        # Row of each sequence's last token; -1 if another rank has it.
        last = torch.searchsorted(own, lengths - 1).clamp(max=len(own) - 1)
        self._ends = torch.where(own[last] == lengths - 1, last, -1)
        self._prompt_lengths = lengths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Computes attention of the forward's tokens to all tokens so far, including themselves.

        Args:
            layer: index of the layer, from 0.
            q: (batch, seqlen, nheads, headdim), rotated.
            k: (batch, seqlen, n_kv_heads, headdim), rotated.
            v: (batch, seqlen, n_kv_heads, headdim).
            mask: `rf.Causal()`, optionally with `rf.SlidingWindow`s.

        Returns:
            (batch, seqlen, nheads, headdim).

        Raises:
            ArgumentError: a mask that decoding does not support, such as documents; a window over several new tokens on
                a ring.
        """
        keys, values = self.keys[layer], self.values[layer]
        if not self._forwards:
            keys[:, : k.shape[1]], values[:, : v.shape[1]] = k, v
            if self.context is not None:
                out = rf.ring_attention(q, k, v, self.context, mask=mask)
            else:
                out = rf.flash_attention(q, k, v, mask=mask)
            assert isinstance(out, Tensor)
            return out
        if self._written.shape[1]:
            sequences = torch.arange(len(keys), device=keys.device)[:, None]
            keys[sequences, self._written], values[sequences, self._written] = k, v
        parts = [
            self._decode(q[:, i : i + MOST_QUERIES], i, keys, values, mask) for i in range(0, q.shape[1], MOST_QUERIES)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _decode(self, q: Tensor, start: int, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
        """Computes attention of the new tokens from index `start` on."""
        after = self._seqlen_q - start - q.shape[1]  # new tokens that these do not see yet
        rows = self._rows - (after if self._written.shape[1] else 0)
        seen = mask
        if self.context is not None and self._seqlen_q == 1:
            # A causal token sees the whole cache. Through a window it sees the last rows of each rank: positions rise.
            keys, values, rows = self._within(mask, keys, values)
            rest = [part for part in mask.parts if not isinstance(part, rf.Causal | rf.SlidingWindow)]
            seen = None if not rest else mask  # flash_decode raises for the other parts
        out = rf.flash_decode(
            q,
            keys,
            values,
            cache_seqlens=rows.to(q.device),
            mask=seen,
            context=self.context,
            options=rf.DecodeOptions(newest_rank=self._owner),
        )
        assert isinstance(out, Tensor)
        return out

    def _within(self, mask: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's keys and values that the newest token sees through the mask's windows, and row counts."""
        lefts = [p.left for p in mask.parts if isinstance(p, rf.SlidingWindow) and p.left is not None]
        if not lefts:
            return keys, values, self._rows
        first = torch.searchsorted(self._positions, self.seqlens[:, None] - min(lefts))[:, 0].clamp(max=self._rows)
        rows = self._rows - first
        width = max(int(rows.max()), 1)
        if bool((first == first[0]).all()):
            begin = min(int(first[0]), self.max_seqlen - width)  # if no key is visible here, any row will do
            window = slice(begin, begin + width)
            return keys[:, window], values[:, window], rows
        index = (first[:, None] + torch.arange(width)).clamp(max=self.max_seqlen - 1).to(keys.device)
        sequences = torch.arange(len(keys), device=keys.device)[:, None]
        return keys[sequences, index], values[sequences, index], rows

    def finish(self) -> None:
        """Counts the tokens of the forward, after every layer has processed them."""
        if self._forwards:
            self.seqlens = self.seqlens + self._seqlen_q
        else:
            assert self._prompt_lengths is not None
            self.seqlens = self._prompt_lengths
        self._forwards += 1

    def newest(self, x: Tensor) -> Tensor:
        """Returns each sequence's newest row of the last forward: (batch, seqlen, dim) -> (batch, 1, dim).

        Every rank gets all rows.
        """
        ends = self._ends.to(x.device)
        rows = x[torch.arange(len(x), device=x.device), ends.clamp(min=0)]
        if self.context is None or self._forwards > 1:
            return rows[:, None]
        return over_ranks(torch.where((ends >= 0)[:, None], rows, 0), self.context)[:, None]


def over_ranks(x: Tensor, context: rf.ContextParallel) -> Tensor:
    """Sums all ranks' `x` (batch, ...), of one shape and dtype, with the same bits on each rank; a collective.

    If the other ranks pass zeros, this broadcasts one rank's tensor.
    """
    # In a sequence of world_size tokens each rank holds one, so `unshard` gathers one `x` from each rank.
    return context.unshard(x[:, None]).sum(1, dtype=x.dtype)
