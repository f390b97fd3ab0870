"""Arguments of a transformers model's forward that are refused on a ring, with a remedy for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringflash as rf
from ringflash.errors import ArgumentError
from tests.integrations.test_hf import LLAMA, SEQLEN, by_name, llama, refused, tokens

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


# A process of virtual ranks holds the whole sequence, so shards of real ranks are half as long as its tensors here.
HALF = (SEQLEN + 1) // 2
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "whole ids": (
        {"position_ids": torch.arange(HALF)[None]},
        rf"position_ids: expected as many positions as input_ids .* shard, got {SEQLEN} tokens and {HALF} positions. "
        r"Cut both: pass context.shard\(input_ids\), and context.positions\(seqlen\)\[None\]",
    ),
    "whole embeddings": (
        {"input_ids": None, "inputs_embeds": torch.zeros(2, SEQLEN, 64), "position_ids": torch.arange(HALF)},
        rf"position_ids: expected as many positions as inputs_embeds .* got {SEQLEN} tokens and {HALF} positions",
    ),
    "one dimension": (
        {"position_ids": rf.ContextParallel.local(2).positions(SEQLEN)},
        rf"position_ids: expected \(1 or 2, {SEQLEN}\), as \(batch or 1, tokens of the shard\), got \({SEQLEN},\)",
    ),
    "another batch": (
        {"position_ids": torch.zeros(3, SEQLEN, dtype=torch.int64)},
        rf"position_ids: expected \(1 or 2, {SEQLEN}\), as .* got \(3, {SEQLEN}\)",
    ),
    "whole mask": (
        {"attention_mask": torch.ones(2, 2 * SEQLEN)},
        rf"attention_mask: expected None, or ones for the {SEQLEN} tokens .*, got {2 * SEQLEN} columns. Leave it out",
    ),
    "whole mask with padding": (
        {"attention_mask": torch.eye(2, 2 * SEQLEN)},
        rf"attention_mask: .* got {2 * SEQLEN} columns, with padding. Cut padding off",
    ),
    "default positions": (
        {"position_ids": torch.arange(SEQLEN)[None]},
        rf"position_ids: expected .*, got 0 to {SEQLEN - 1}, as of a sequence that was not cut. Cut whole input_ids by",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_arguments_that_are_not_of_one_shard_are_refused(name: str) -> None:
    changes, message = SHAPES[name]
    with pytest.raises(ArgumentError, match=message):
        llama()(**refused(**changes))


KNOWN = "expected a keyword that this attention knows, such as ring_context, ring_documents and ring_dropout_seed, got"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("context", r"Did you mean ring_context\?"),
        ("cp_context", r"Did you mean ring_context\?"),
        ("documents", r"Did you mean ring_documents\?"),
        ("ring_dropout", r"Did you mean ring_dropout_seed\?"),
        ("ring_mask", "Pass one of these; masks follow from the model, position_ids and ring_documents."),
        ("position_bias", "Leave it out, or choose attn_implementation"),
    ],
)
def test_unknown_keywords_name_those_of_the_library(name: str, remedy: str) -> None:
    for changes in ({}, {"ring_context": ...}):
        with pytest.raises(ArgumentError, match=f"^{name}: {KNOWN} {name}. {remedy}"):
            llama()(**refused(**changes, **{name: object()}))


@pytest.mark.parametrize("first_called", [False, True])
def test_a_configuration_that_another_model_has_changed(first_called: bool) -> None:
    model = by_name(LLAMA.build())
    if first_called:
        model(**refused())
    type(model)(model.config).set_attn_implementation(LLAMA.own)
    message = "attn_implementation: expected ring_attention, got sdpa.* the same config object .* copy.deepcopy"
    with pytest.raises(ArgumentError, match=message):
        model(**refused())
