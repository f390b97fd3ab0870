"""The choice of blocks in training: the same on all ranks and bitwise without effect on losses, refusals, the log."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from ringflash.errors import ConfigError
from ringflash.train.exchange import Purpose
from ringflash.train.lightning import memory_plan, ring_module
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_layers import TrainedLayer
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.activations import Activations
from ringflash.train.models.budget import ActivationPlan, plan_activations, with_margin
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.memory import GIB, TrainingShape, estimate_memory
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_model import Run as TransformersRun
from tests.train.lightning.test_transformers_model import config_of
from tests.train.runs import MODEL, Data, Outcome, Recorded, Run, attempt, train, whole

FOUR = replace(MODEL, n_layers=4)
# What these runs have in common: packed documents, two micro-batches a step, sharded weights.
RUN = Run(steps=2, micro_batches=2, packed=True, model=FOUR, batch_size=8)
TOKENS = 8 * 26  # of a micro-batch on each of two ranks: activations then take more than gradients


def budget_for(kept: int, **options: Any) -> str:
    shape = TrainingShape(TOKENS, 2, torch.float32, "block", kept, **options)
    return f"{(with_margin(estimate_memory(FOUR, shape)) + 64) / GIB:.9f}GiB"


def _transformers_options() -> list[dict[str, Any]]:
    config = TransformersModel(config_of(TransformersRun(family="Llama"))).estimated_config
    assert config is not None
    shape = TrainingShape(TOKENS, 2, torch.float32, "block", 1, float32_norms=True)
    budget = f"{(with_margin(estimate_memory(config, shape)) + 64) / GIB:.9f}GiB"
    return [{"activation_checkpointing": mode} for mode in ("none", "block")] + [{"activation_memory": budget}]


def _train_transformers(**options: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns the choice of each layer, and the weights after two steps over a ring, sharded with FSDP2."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"accelerator": "cpu", "devices": 2, "limit_val_batches": 0, "enable_model_summary": False}
    trainer = pl.Trainer(strategy=RingAttentionStrategy(), max_steps=2, accumulate_grad_batches=2, **quiet)
    module = TransformersModel(config_of(TransformersRun(family="Llama")), compute_dtype="float32", **options)
    trainer.fit(module, Data(RUN))
    layers = [layer.forward for layer in module.decoder.model.layers]
    choices = [each._run.__name__ if isinstance(each, TrainedLayer) else "" for each in layers]
    return choices, {name: whole(p) for name, p in module.decoder.named_parameters()}


def _on_rank() -> dict[str, Any]:
    """Trains with everything kept, nothing kept, and a budget between; ranks report memories of their own."""
    # torch warns when its compiler is imported, and when the compiler inspects the input of the second block
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    plans, rank = [], dist.get_rank()

    def noted(*args: Any) -> Any:
        plans.append(plan_activations(*args))
        return plans[-1]

    found: dict[str, Any] = {"plans": plans}
    backend = partialmethod(Decoder.compile_blocks, backend="aot_eager")
    with (
        mock.patch.object(memory_plan, "host_memory", return_value=int((8, 4)[rank] * GIB)),
        mock.patch.object(memory_plan, "plan_activations", noted),
        mock.patch.object(Decoder, "compile_blocks", backend),
    ):
        torch._dynamo.reset()
        for compiled in (False, True):
            run = replace(RUN, compile_blocks=compiled)
            budget = budget_for(2, compiled=compiled, in_pieces=compiled)
            for name, options in (
                ("none", {"checkpointing": "none"}),
                ("block", {"checkpointing": "block"}),
                ("budget", {"checkpointing": None, "memory": budget}),
            ):
                found[f"{name} {compiled}"] = train(replace(run, **options))
        found["transformers"] = [_train_transformers(**options) for options in _transformers_options()]
        plans.pop()
        with mock.patch.object(ring_module, "shard_model", wraps=ring_module.shard_model) as sharding:
            found["share"] = train(replace(RUN, checkpointing=None, memory="50%"))
        found["reshards"] = [call.kwargs["reshard_after_forward"] for call in sharding.mock_calls]
        found["small"] = attempt(replace(RUN, checkpointing=None, memory="0.0001GiB"))
        found["above"] = attempt(replace(RUN, checkpointing=None, memory="6GiB"))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, _on_rank)


@pytest.mark.parametrize("compiled", [False, True])
def test_losses_gradients_and_weights_are_bitwise_those_without_a_budget(
    compiled: bool, ranks: list[dict[str, Any]]
) -> None:
    none, block, budget = (ranks[0][f"{name} {compiled}"] for name in ("none", "block", "budget"))
    for other in (none, block):
        assert budget.logged == other.logged
        for kind in ("gradients", "weights"):
            assert all(torch.equal(x, getattr(other, kind)[name]) for name, x in getattr(budget, kind).items())


def test_a_model_of_transformers_learns_the_same_on_a_ring(ranks: list[dict[str, Any]]) -> None:
    (_, none), (_, block), (choices, budget) = ranks[0]["transformers"]
    assert choices == ["_recompute", "_keep"]
    assert all(torch.equal(x, none[name]) and torch.equal(x, block[name]) for name, x in budget.items())


def test_all_ranks_choose_what_the_least_memory_allows(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["plans"] == ranks[1]["plans"]
    assert [plan.activations.kept_blocks for plan in ranks[0]["plans"]] == [2, 2, 4]
    assert ranks[0]["plans"][2].available == 2 * GIB  # half of the 4 GiB of rank 1


def test_gathered_weights_stay_where_all_fit_and_change_no_bit(ranks: list[dict[str, Any]]) -> None:
    assert [plan.keeps_weights for plan in ranks[0]["plans"]] == [False, False, True]
    assert ranks[0]["reshards"] == [False]
    none, share = ranks[0]["none False"], ranks[0]["share"]
    assert share.logged == none.logged
    assert all(torch.equal(x, none.weights[name]) for name, x in share.weights.items())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("small", "activation_memory: expected at least 0.0"),
        ("above", "activation_memory: expected at most the 4.00 GiB of memory that there is, got 6GiB"),
    ],
)
def test_a_budget_is_refused_on_all_ranks(name: str, text: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0][name] == ranks[1][name]
    kind, found = ranks[0][name]
    assert kind == "ConfigError"
    assert found.startswith(text)


def configured(module: Any, data: Any = None) -> Any:
    """Configures a module on one CPU device, as `fit` does."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Any = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    module.trainer, trainer.datamodule = trainer, data
    module.trainer.state.fn = TrainerFn.FITTING
    module.configure_model()
    return module


def test_a_model_of_transformers_keeps_its_last_layers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = config_of(TransformersRun(family="Llama"))
    whole = configured(TransformersModel(config), Data(Run()))
    shape = replace(whole.training_shape(), checkpointing="block", kept_blocks=1)
    least = with_margin(estimate_memory(whole.estimated_config, shape)) + 64
    module = configured(TransformersModel(config, activation_memory=f"{least / GIB:.9f}GiB"), Data(Run()))
    trained = [layer.forward for layer in module.decoder.model.layers]
    assert all(isinstance(each, TrainedLayer) for each in trained)
    assert [each._run.__name__ for each in trained] == ["_recompute", "_keep"]
    assert [line for line in caplog.messages if line.startswith("Activations")] == [
        f"Activations: {module.activation_plan}"
    ]
    assert module.memory_estimate() == module.activation_plan.estimate


def test_on_a_cpu_auto_keeps_everything(caplog: pytest.LogCaptureFixture) -> None:
    module = configured(LanguageModel(FOUR), Data(Run()))
    assert module.activation_plan is None
    assert {block.checkpointing for block in module.decoder.layers} == {"none"}
    assert "Activations" not in caplog.text


def test_a_budget_needs_a_shape(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=r"activation_memory: expected a known shape, got none of a micro-batch: .*context_l"
    ):
        configured(LanguageModel(FOUR, activation_memory="1GiB"))
    unknown = config_of(TransformersRun(family="Gemma2"))
    with pytest.raises(ConfigError, match="activation_memory: expected a known shape, got none of the model"):
        configured(TransformersModel(unknown, activation_memory="1GiB"), Data(Run()))


@pytest.mark.parametrize("family", [None, "Llama"])
def test_the_first_blocks_are_offloaded_as_planned(family: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = None if family is None else config_of(TransformersRun(family=family))
    whole = configured(LanguageModel(MODEL) if config is None else TransformersModel(config), Data(Run()))
    assert whole.estimated_config is not None
    shape = replace(whole.training_shape(), checkpointing="block", offloaded_blocks=1)
    estimate = estimate_memory(whole.estimated_config, shape)
    groups = 2 if family is None else 1
    plan = ActivationPlan(Activations("block", 0, 1, groups), 2, False, estimate, int(GIB), "free")
    monkeypatch.setattr(ring_module, "choose_activations", lambda _: plan)
    module = configured(LanguageModel(MODEL) if config is None else TransformersModel(config), Data(Run()))
    blocks = module.decoder.layers if config is None else [each.forward for each in module.decoder.model.layers]
    assert [each.host_memory is None for each in blocks] == [False, True]
    assert config is not None or [each.head_groups for each in blocks] == [2, 1]
    assert module.memory_estimate() == estimate
    assert estimate.host > 0


class Gpus(RingAttentionStrategy):
    """Strategy of ranks that have 20 and 30 GiB free."""

    def exchange(self, purpose: Purpose, *flags: int) -> list[list[int]]:
        assert purpose == Purpose.MEMORY
        return [[*flags], [flags[0] + int(10 * GIB), *flags[1:2], *(flag // 2 for flag in flags[2:])]]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(19 * GIB), int(80 * GIB)))
    for name, gib in (("memory_reserved", 5), ("memory_allocated", 4), ("max_memory_allocated", 18)):
        monkeypatch.setattr(torch.cuda, name, lambda _, gib=gib: int(gib * GIB))


def test_the_rank_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    # 19 GiB are free, and 1 GiB of torch's cache is unused; 3 GiB stay for the buffers of the ring and of NCCL
    expected = 17 * GIB, 80 * GIB, 50, "free on rank 0"
    assert memory_plan._least_memory(Gpus(), torch.device("cuda"), 100) == expected
    alone = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).strategy
    assert memory_plan._least_memory(alone, torch.device("cuda"), 100) == (17 * GIB, 80 * GIB, 100, "free")


def test_the_log_compares_the_plan_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_gpu(monkeypatch)
    caplog.set_level(logging.INFO)
    module = mock.Mock()
    module.trainer.strategy = Gpus()
    monkeypatch.setattr(Gpus, "root_device", torch.device("cuda"))
    module.activation_plan.planned = int(20 * GIB)
    memory_plan.report_measured(module)
    assert caplog.messages == ["Memory: torch allocated 28.00 GiB at most, on rank 1; 20.00 were planned"]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # advice on loader processes for a toy data set
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of a name PyTorch has moved
def test_memory_is_reported_once_after_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(
        "ringflash.train.lightning.ring_module.report_measured", lambda module: steps.append(module.trainer.global_step)
    )
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=4, limit_val_batches=0, enable_model_summary=False, **quiet
    )
    trainer.fit(Recorded(Run(), Outcome()), Data(Run()))
    assert steps == [2]
