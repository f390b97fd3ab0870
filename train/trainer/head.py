"""Loss of a transformers model inside of its own forward, without whole logits where its head permits that.

DDP must see the loss among the outputs of the forward that it wraps: it takes parameters that the outputs do not
depend on as unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash.train.lightning.transformers_head import why_whole_logits
from ringflash.train.models.linear_loss import linear_token_loss
from ringflash.train.models.loss import token_losses


class HeadLoss:
    """Sum of the losses of a model's tokens, computed with chunks of logits.

    During a forward the head passes final states on, and the model's own call of its `loss_function` multiplies them
    with the head's weight. Models for which this would be wrong have whole logits.

    Args:
        model: causal language model of transformers, before DDP wraps it.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.why_whole = model, None
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.why_whole = why_whole_logits(model) or self._why_other_loss(device)

    def total(self, wrapped: Any, labels: Tensor, **given: Any) -> Tensor:
        """Returns the sum of the losses of valid tokens, a scalar with a graph.

        Args:
            wrapped: the model, or what DDP or peft made of it.
            labels: (batch, seqlen) shifted labels of the tokens.
            given: keywords of the model's forward.
        """
        if self.why_whole is not None:
            return token_losses(wrapped(**given).logits, labels).total
        with self._in_chunks() as called:
            loss = wrapped(labels=labels, **given).loss
        assert len(called) == 1, "the check at the start has seen the model call its loss function"
        return loss

    @contextmanager
    def _in_chunks(self) -> Iterator[list[Tensor]]:
        """Makes forwards of the model with labels return the sum; yields the results of its loss function."""
        head, before, called = self.model.get_output_embeddings(), self.model.loss_function, list[Tensor]()

        @rf.hf.loss_of_shards
        def total(logits: Tensor, labels: Tensor, *_args: Any, **_keywords: Any) -> Tensor:
            called.append(linear_token_loss(logits.to(head.weight.dtype), head.weight, labels).total)
            return called[-1]

        head.forward, self.model.loss_function = _pass_on, total
        try:
            yield called
        finally:
            del head.forward
            self.model.loss_function = before

    @torch.no_grad()
    def _why_other_loss(self, device: torch.device) -> str | None:
        """Returns what the model does to the result of its loss function, or None for nothing."""
        tokens = torch.arange(2, device=device)[None]
        given: dict[str, Any] = {"position_ids": tokens, "use_cache": False, "ring_dropout_seed": 0}
        with self._in_chunks() as called:
            loss = self.model(tokens, labels=tokens.flip(1), **given).loss
        return None if len(called) == 1 and torch.equal(called[0], loss) else "does not return that of `loss_function`"


def _pass_on(states: Tensor) -> Tensor:
    return states
