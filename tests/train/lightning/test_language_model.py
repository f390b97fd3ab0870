"""LanguageModel: one device, the optimizer and its schedule, non-finite losses, configuration errors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from ringflash.errors import ArgumentError, ConfigError, StateError
from ringflash.train.data.module import TextDataModule
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import RopeScaling
from tests.helpers.distributed import run_ranks
from tests.train.conftest import RUNS, Worlds
from tests.train.runs import MODEL, Data, Outcome, Recorded, Run


def trainer(**arguments: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **(quiet | arguments))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # advice on loader processes for a toy data set
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of a name PyTorch has moved
def test_one_device_without_the_strategy(worlds: Worlds) -> None:
    run, outcome = RUNS["evaluate"], Outcome()
    module, data = Recorded(run, outcome), Data(run)
    one = trainer(max_steps=run.steps, limit_val_batches=3, num_sanity_val_steps=0)
    one.fit(module, data)
    assert module.context is None
    assert outcome.logged["train/loss"] == pytest.approx(worlds[1]["evaluate"].logged["train/loss"], rel=1e-12)
    assert outcome.logged["val/loss"] == pytest.approx(worlds[1]["evaluate"].logged["val/loss"][:2], rel=1e-12)


class Weights(Callback):
    """Records the weights after each step, and those that validation uses."""

    def __init__(self) -> None:
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        self.trained.append(parameters_to_vector(pl_module.parameters()).detach())

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.validated.append(parameters_to_vector(pl_module.parameters()).detach())


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # advice on loader processes for a toy data set
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of a name PyTorch has moved
@pytest.mark.filterwarnings("ignore:.*doesn't support sharding model layers")  # there are no shards
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")  # once, if this process has a process group
def test_lightning_s_moving_average_without_the_strategy() -> None:
    run, weights = Run(steps=4, epoch_batches=4), Weights()
    one = trainer(max_steps=4, callbacks=[weights, EMAWeightAveraging(decay=0.5)], limit_val_batches=1)
    module = LanguageModel(MODEL)
    one.fit(module, Data(run))
    average = weights.trained[0]
    for each in weights.trained[1:]:
        average = torch.lerp(average, each, 0.5)
    assert not torch.equal(average, weights.trained[-1])
    torch.testing.assert_close(weights.validated[-1], average)
    torch.testing.assert_close(parameters_to_vector(module.parameters()), average)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # advice on loader processes for a toy data set
def test_stochastic_averaging_is_refused_without_the_strategy() -> None:
    one = trainer(max_epochs=2, callbacks=[StochasticWeightAveraging(1e-2)], limit_val_batches=0)
    text = "callbacks: expected none that copies the module before it has weights, got StochasticWeightAveraging"
    with pytest.raises(ConfigError, match=f"{text}. Use .*ExponentialMovingAverage"):
        one.fit(LanguageModel(MODEL), Data(Run()))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # advice on loader processes for a toy data set
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of a name PyTorch has moved
def test_accumulation_without_the_strategy() -> None:
    run = Run(micro_batches=2)
    one = trainer(max_steps=1, accumulate_grad_batches=2, limit_val_batches=0)
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches: expected 1 under SingleDevice.*ring_attention"):
        one.fit(Recorded(run, Outcome()), Data(run))


def test_a_checkpoint_inside_an_accumulation_window_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = LanguageModel(MODEL)
    with mock.patch.object(LanguageModel, "trainer", SimpleNamespace(global_step=7, is_global_zero=True)):
        module.on_save_checkpoint({})
        assert not caplog.records
        module._window = [None] * 3  # micro-batches since the last step
        module.on_save_checkpoint({})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "after step 7 is inside an accumulation window, and has no gradients of its 3" in record.getMessage()


def test_a_poisoned_rank_stops_all(worlds: Worlds) -> None:
    errors = [rank["poisoned"] for rank in worlds.ranks[2]]
    assert errors[0] == errors[1]
    kind, text = errors[0]
    assert kind == "NonFiniteError"
    assert text.startswith(
        "step 1, batch 1: loss nan, gradient norm nan, first seen on ranks [1]. The optimizer has not"
    )


def test_norms_do_not_decay() -> None:
    module = LanguageModel(MODEL)
    module.trainer = trainer()
    module.configure_model()
    configured: Any = module.configure_optimizers()
    matrices, vectors = configured["optimizer"].param_groups
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(module.parameters()))


def test_a_step_gives_each_token_s_loss() -> None:
    module = LanguageModel(MODEL, compute_dtype="float64")
    module.trainer = trainer()
    module.configure_model()
    batch = {"input_ids": torch.randint(0, 61, (2, 9)), "labels": torch.randint(0, 61, (2, 9))}
    batch["labels"][1, 4:] = -100
    result = module.training_step(batch, 0)
    losses = result["token_losses"]
    assert losses.shape == (2, 9)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    assert ((losses == 0) == (batch["labels"] == -100)).all()
    assert result["loss"].item() == pytest.approx(losses.double().sum().item() / 13, rel=1e-6)


def shard_of_three_ranks(valid: int) -> tuple[LanguageModel, dict[str, torch.Tensor]]:
    """Returns a module and a batch with `valid` labels on this rank and 13 labels on all ranks together."""
    module = LanguageModel(MODEL, compute_dtype="float64")
    module.trainer = trainer()
    module.configure_model()
    batch = {"input_ids": torch.randint(0, 61, (2, 9)), "labels": torch.full((2, 9), -100)}
    batch["labels"].view(-1)[:valid] = torch.randint(0, 61, (valid,))
    return module, batch | {"num_valid_tokens": torch.tensor(13)}


def test_a_shard_s_loss_counts_the_valid_tokens_of_all_ranks() -> None:
    module, batch = shard_of_three_ranks(valid=5)
    result = module.training_step(batch, 0)
    assert result["loss"].item() == pytest.approx(result["token_losses"].double().sum().item() / 13, rel=1e-6)


def test_a_shard_of_masked_tokens_has_loss_0() -> None:
    module, batch = shard_of_three_ranks(valid=0)
    loss = module.training_step(batch, 0)["loss"]
    assert loss.item() == 0
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_label_outside_the_vocabulary() -> None:
    module = LanguageModel(MODEL)
    module.trainer = trainer()
    module.configure_model()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"batch\['labels'\]: expected ids from 0 to 60, .*, got 61 at \(0, 0\)"):
        module.training_step({"input_ids": ids, "labels": ids + 61}, 0)


def test_refused_activations() -> None:
    with pytest.raises(ConfigError, match='activation_checkpointing: expected "none" or "block", got True'):
        LanguageModel(MODEL, activation_checkpointing=True)  # type: ignore[arg-type]
    module = LanguageModel(MODEL, activation_checkpointing="block", activation_offload=True)
    module.trainer = trainer()
    with pytest.raises(ConfigError, match="activation_offload: expected False on a CPU"):
        module.configure_model()


@pytest.mark.parametrize(
    ("length", "longest", "scaling", "said"),
    [
        (65, 64, None, True),
        (64, 64, None, False),
        (65, None, None, False),
        (65, 64, RopeScaling("linear", 2.0), False),
    ],
)
def test_a_context_longer_than_the_model_s(
    length: int, longest: int | None, scaling: Any, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = "context_length 65 is more than the model's max_position_embeddings 64, and there is no rope_scaling"
    for fn in (TrainerFn.VALIDATING, TrainerFn.FITTING):
        module = LanguageModel(replace(MODEL, max_position_embeddings=longest, rope_scaling=scaling))
        module.trainer = trainer()
        module.trainer.datamodule = TextDataModule(context_length=length)  # pyright: ignore[reportAttributeAccessIssue]
        module.trainer.state.fn = fn
        assert text not in caplog.text
        module.configure_model()
    assert (text in caplog.text) == said


def test_before_configure_model() -> None:
    with pytest.raises(StateError, match="a module after configure_model"):
        _ = LanguageModel(MODEL).decoder


def _refused() -> list[str]:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    texts = []
    cases: list[dict[str, Any]] = [
        {"strategy": RingAttentionStrategy(), "plugins": [DoublePrecision()]},
        {"strategy": RingAttentionStrategy(), "precision": "bf16-mixed"},
        {"strategy": "ddp"},
        {"strategy": RingAttentionStrategy(context_parallel_size=3)},
    ]
    for arguments in cases:
        both = pl.Trainer(
            accelerator="cpu",
            devices=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_steps=1,
            **arguments,
        )
        run = Run()
        try:
            both.fit(Recorded(run, Outcome()), Data(run))
        except ConfigError as error:
            texts.append(str(error))
    return texts


def test_refused_configurations() -> None:
    for texts in run_ranks(2, _refused):
        double, mixed, ddp, sizes = texts
        assert "precision: expected 32-true, the Trainer's default, got 64-true" in double
        assert "got bf16-mixed" in mixed
        assert 'strategy: expected "ring_attention" with several ranks, got DDPStrategy' in ddp
        assert "data_parallel_size x context_parallel_size == 2 ranks, got auto x 3" in sizes


def test_float64_keeps_its_weights_in_float64(worlds: Worlds) -> None:
    assert {w.dtype for w in worlds[2]["uneven float64"].weights.values()} == {torch.float64}
    assert {w.dtype for w in worlds[2]["uneven"].weights.values()} == {torch.float32}
