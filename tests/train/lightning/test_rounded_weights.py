"""Weights that layers round themselves: on one rank, bitwise as with FSDP, in checkpoints too, and where FSDP stays."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from ringflash.errors import ConfigError
from ringflash.train.lightning import ring_module
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.decoder import Decoder
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_model import Run as TransformersRun
from tests.train.lightning.test_transformers_model import config_of
from tests.train.runs import MODEL, SEQLEN, Data, Outcome, Run, train

RUN = Run(steps=1, micro_batches=2, packed=True, dtype="bfloat16")
RUNS = {
    "plain": RUN,
    "recomputed": replace(RUN, checkpointing="block"),
    "biases and norms": replace(RUN, model=replace(MODEL, qkv_bias=True, o_bias=True, qk_norm=True)),
    "tied": replace(RUN, model=replace(MODEL, tie_embeddings=True)),
}
FLOAT32 = replace(RUN, dtype="float32", epoch_batches=4, max_epochs=2)
WIDE = replace(MODEL, ffn_dim=128)  # float8 takes widths that are multiples of 16


def _on_one_rank() -> dict[str, list[Outcome]]:
    runs = {**RUNS, "float32": FLOAT32}
    found = {name: [train(run), train(replace(run, reshard=True))] for name, run in runs.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name, reshard in (("own", None), ("sharded", True)):
            path = f"{folder}/{name}"
            train(replace(FLOAT32, max_epochs=1, save=path, reshard=reshard))
            found[f"resumed {name}"] = [train(replace(FLOAT32, resume=path, reshard=other)) for other in (None, True)]
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    (found,) = run_ranks(1, _on_one_rank)
    return found


@pytest.mark.parametrize("name", [*RUNS])
def test_losses_and_gradients_are_bitwise_those_of_fsdp(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    own, fsdp = outcomes[name]
    assert own.logged["train/loss"][0] == fsdp.logged["train/loss"][0]
    embedding = "embed_tokens.weight"  # FSDP adds the gradients of equal tokens, and of a tied head, in bfloat16
    assert {*own.gradients} == {*fsdp.gradients}
    assert all(torch.equal(x, fsdp.gradients[name]) for name, x in own.gradients.items() if name != embedding)
    assert not torch.equal(own.gradients[embedding], fsdp.gradients[embedding])
    error = (own.gradients[embedding] - fsdp.gradients[embedding]).abs().max()
    assert error < 0.01 * fsdp.gradients[embedding].abs().max()


def test_training_in_float32_is_bitwise_that_with_fsdp(outcomes: dict[str, list[Outcome]]) -> None:
    own, fsdp = outcomes["float32"]
    assert own.logged == fsdp.logged
    assert all(torch.equal(x, fsdp.weights[name]) for name, x in own.weights.items())


@pytest.mark.parametrize("saved", ["own", "sharded"])
def test_checkpoints_go_on_with_and_without_fsdp(saved: str, outcomes: dict[str, list[Outcome]]) -> None:
    whole = outcomes["float32"][0]
    for resumed in outcomes[f"resumed {saved}"]:
        assert all(torch.equal(x, whole.weights[name]) for name, x in resumed.weights.items())


def _sharded() -> list[bool]:
    """Returns whether FSDP shards a model, by its options."""
    found = []
    for options in ({}, {"reshard": True}, {"reshard": False}, {"linears": "fp8", "model": WIDE}):
        with mock.patch.object(ring_module, "shard_model", wraps=ring_module.shard_model) as sharding:
            train(replace(RUN, **options))
        found.append(sharding.called)
    return found


def test_fsdp_shards_several_ranks_and_where_an_option_is_about_it() -> None:
    assert run_ranks(1, _sharded) == [[False, True, True, False]]
    assert run_ranks(2, _sharded) == [[True] * 4] * 2


def test_the_forward_rounds_and_the_stored_weights_stay() -> None:
    decoder = Decoder(MODEL, seed=3)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    decoder.round_weights(torch.bfloat16)
    ids = torch.arange(SEQLEN)[None] % MODEL.vocab_size
    logits = decoder(ids, ids[0])
    assert isinstance(logits, torch.Tensor)
    assert logits.dtype == torch.bfloat16
    expected = Decoder(MODEL, seed=3).bfloat16()(ids, ids[0])
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(logits, expected)
    logits.float().square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def _built_by_another_strategy() -> list[Any]:
    """Returns the dtypes in which a model computes under one strategy after another, and what other modules get."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")  # this process has a group
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "limit_val_batches": 1}
    module, dtypes = LanguageModel(MODEL, compute_dtype="bfloat16"), []
    for strategy in ("auto", RingAttentionStrategy(), "auto"):
        pl.Trainer(strategy=strategy, **quiet).validate(module, Data(RUN), verbose=False)
        dtypes.append(module.decoder.embed_tokens.rounding)
    own = TransformersModel(config_of(TransformersRun(family="Llama")), compute_dtype="bfloat16")
    pl.Trainer(strategy="auto", **quiet).validate(own, Data(RUN), verbose=False)
    with pytest.raises(ConfigError, match="every parameter sharded"):
        pl.Trainer(strategy=RingAttentionStrategy(), **quiet).validate(own, Data(RUN), verbose=False)
    return dtypes


def test_a_model_of_another_strategy_computes_in_its_dtype() -> None:
    assert run_ranks(1, _built_by_another_strategy) == [[None, torch.bfloat16, None]]
