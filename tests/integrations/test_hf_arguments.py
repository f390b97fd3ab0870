"""Arguments of a transformers model's forward that are refused on a ring, with a remedy for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringflash as rf
from ringflash.errors import ArgumentError
from tests.integrations.test_hf import SEQLEN, llama, refused, tokens

pytest.importorskip("transformers")


def labels() -> torch.Tensor:
    return rf.ContextParallel.local(2).shard(tokens())


def test_labels_are_refused_on_a_ring_of_several_ranks() -> None:
    expected = r"labels: expected None under a context of 2 ranks, got \(2, 37\): .* shard alone. Leave labels out, "
    with pytest.raises(ArgumentError, match=expected + r".* context.token_mean\(token_losses, labels\)."):
        llama()(**refused(labels=labels()))
    inputs = refused()
    ids, positions = inputs.pop("input_ids"), inputs.pop("position_ids")
    with pytest.raises(ArgumentError, match=expected):
        llama()(ids, None, positions, None, None, labels(), **inputs)
    assert llama()(**refused(labels=None)).loss is None


def test_labels_are_taken_by_one_rank_and_by_a_loss_of_shards() -> None:
    model, ids, one = llama(), tokens(), rf.ContextParallel.local(1)
    alone: dict[str, Any] = {"position_ids": one.positions(SEQLEN)[None], "ring_context": one, "use_cache": False}
    expected = model(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(model(ids, labels=ids, **alone).loss, expected)

    @rf.hf.loss_of_shards
    def count(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return logits.new_tensor(labels.numel())

    before, model.loss_function = model.loss_function, count
    try:
        assert model(**refused(labels=labels())).loss == 2 * SEQLEN
    finally:
        model.loss_function = before
