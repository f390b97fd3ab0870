"""RoPE that depends on length, on processes with their own positions: results equal the model's on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.integrations.transformers.rope import largest_position, rotary_modules
from tests.helpers.distributed import run_ranks
from tests.integrations.hf_families import model_of
from tests.integrations.test_hf import FAMILIES, SEQLEN, by_name, relative, run, tokens

pytest.importorskip("transformers")

SHORT = 16  # length in tokens from which these kinds change their frequencies; half of the sequence is longer
HALF = 8  # number of frequencies of a head
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 20,
        "short_factor": [1.0] * HALF,
        "long_factor": [3.0] * HALF,
    },
}


def build(kind: str) -> Any:
    return FAMILIES["llama"].build(max_position_embeddings=SHORT, rope_parameters=ROPE[kind])


def together(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@dataclass
class Ranks:
    """Results of a rank for one kind of RoPE.

    Args:
        logits: logits of the whole sequence.
        gradients: gradients of all weights, averaged over the ranks.
        sharded: logits of the model sharded by FSDP2.
    """

    logits: Tensor
    gradients: Tensor
    sharded: Tensor


def _on_ranks() -> dict[str, Ranks]:
    """Returns the results of two ranks from a second forward, because the first one also checks the model."""
    context, results = rf.ContextParallel(dist.group.WORLD, "contiguous"), {}
    mesh = init_device_mesh("cpu", (context.world_size,))  # FSDP2's own choice would be the GPUs, if there are any
    given: dict[str, Any] = {"input_ids": context.shard(tokens()), "ring_context": context}
    given["position_ids"] = context.positions(SEQLEN)[None]
    for kind in ROPE:
        model = by_name(build(kind))
        run(model, context.unshard, **given)
        result = run(model, context.unshard, **given)
        gradients = together(result.gradients)
        dist.all_reduce(gradients)
        sharded = by_name(build(kind))
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        with torch.no_grad():
            logits = context.unshard(sharded(use_cache=False, **given).logits)
        # Each rank computed the loss of the whole sequence, so the sum of the gradients is divided.
        results[kind] = Ranks(result.logits, gradients / context.world_size, logits)
    return results


def _on_ranks_with_a_wrong_model() -> str:
    context = rf.ContextParallel(dist.group.WORLD)
    given = {"position_ids": context.positions(SEQLEN)[None], "ring_context": context}
    try:
        model_of("bart")(input_ids=context.shard(tokens()), use_cache=False, **given)
    except ArgumentError as error:
        return str(error)
    return "accepted"


def _both() -> tuple[dict[str, Ranks], str]:
    return _on_ranks(), _on_ranks_with_a_wrong_model()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, Ranks], str]]:
    return run_ranks(2, _both)


def test_each_rank_refuses_a_model_that_ignores_positions(ranks: list[tuple[dict[str, Ranks], str]]) -> None:
    for _, error in ranks:
        assert error.startswith("model: expected a model that uses position_ids, got BartForCausalLM, which ignores")


def test_two_ranks_agree_on_the_length(ranks: list[tuple[dict[str, Ranks], str]]) -> None:
    everyone = [results for results, _ in ranks]
    for kind in ROPE:
        expected = run(build(kind), input_ids=tokens())
        for results in everyone:
            assert relative(results[kind].logits, expected.logits) <= 1e-6
            assert relative(results[kind].sharded, expected.logits) <= 1e-6
            assert relative(results[kind].gradients, together(expected.gradients)) <= 1e-6


@pytest.mark.parametrize("kind", ROPE)
def test_modules_see_the_largest_position_of_all_ranks(kind: str) -> None:
    ids, model = tokens(), by_name(build(kind))
    rotary = model.model.rotary_emb
    positions, x = torch.arange(SEQLEN)[None], model.model.embed_tokens(ids)
    expected = [part[:, :10].clone() for part in rotary(x, positions)]
    alone = [part.clone() for part in by_name(build(kind)).model.rotary_emb(x[:, :10], positions[:, :10])]
    model = by_name(build(kind))
    names = rotary_modules(model)
    assert names == ("model.rotary_emb",)
    with largest_position(model, names, SEQLEN - 1):
        agreed = model.model.rotary_emb(x[:, :10], position_ids=positions[:, :10])
    for part, own, other in zip(agreed, expected, alone, strict=True):
        assert torch.equal(part, own)
        assert not torch.equal(part, other)
    assert not model.model.rotary_emb._forward_hooks


def test_models_of_one_scale_need_no_agreement() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    assert rotary_modules(FAMILIES["llama"].build(rope_parameters=yarn)) == ()
    assert rotary_modules(FAMILIES["gpt_oss"].build()) == ()


def test_a_kind_that_no_module_computes_is_refused() -> None:
    model = build("dynamic")
    del model.model.rotary_emb
    with pytest.raises(ArgumentError, match=r"rope_parameters: expected .*, got dynamic in LlamaForCausalLM, without"):
        rotary_modules(model)
