"""A user's own LightningModule under RingAttentionStrategy: loss, gradients, logged figures, callbacks."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils.data import DataLoader

import ringflash as rf
from ringflash.errors import ConfigError, RingflashError
from ringflash.train.lightning.strategy import RingAttentionStrategy, sum_gradients
from ringflash.train.lightning.user_modules import WatchedBatch, warn_of_batch_norms, warn_of_parted_weights
from tests.helpers.distributed import run_ranks
from tests.test_token_mean import TinyModel, alone, make_batches, make_model


class UserModule(pl.LightningModule):
    """A module as a user may write it; `way` selects a right or a wrong version."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.model = way, make_model()
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.second: rf.ContextParallel | None = None

    def configure_model(self) -> None:
        strategy = cast("RingAttentionStrategy", self.trainer.strategy)
        if not hasattr(self.model, "unshard"):
            fully_shard(self.model, mesh=strategy.shard_mesh)

    def _context(self) -> rf.ContextParallel:
        return cast("RingAttentionStrategy", self.trainer.strategy).context

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, labels, context = batch["input_ids"], batch["labels"], self._context()
        if self.way != "no positions":
            assert len(batch["position_ids"]) == ids.shape[1]  # the model has none
        if self.way == "cut twice":
            ids, labels = context.shard(ids), context.shard(labels)
            return context.token_mean(self.model(ids, labels, context), labels).loss
        if self.way == "second context":
            self.second = self.second or rf.ContextParallel(dist.group.WORLD, context.layout)
        losses = self.model(ids, labels, None if self.way == "no ring" else self.second or context)
        if self.way == "batch as a whole":
            batch = {name: value for name, value in batch.items() if name != "labels"}
            return losses.sum() / batch["num_valid_tokens"]
        if self.way == "mean logged":
            self.log("mean", context.token_mean(losses, batch["labels"]).value)
        if self.way.startswith("mean"):
            return losses.sum() / (batch["labels"] >= 0).sum().clamp(min=1)
        mean = self._context().token_mean(losses, batch["labels"])
        self.losses.append(mean.value.item())
        if self.way == "more terms":
            return mean.loss + 0.1 * losses.square().mean()
        return mean.loss * (float("nan") if self.way == "not finite" else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = self.model.named_parameters()
        self.gradients.append({name: cast("Any", p.grad).full_tensor().clone() for name, p in named})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        losses = self.model(batch["input_ids"], batch["labels"], self._context())
        share = losses.sum() / batch["num_valid_tokens"]
        if self.way.startswith("share"):
            self.log("val_loss", share, batch_size=6, sync_dist=self.way == "share synced")
        else:
            mean = self._context().token_mean(losses, batch["labels"])
            self.log("val_loss", mean.value, batch_size=int(mean.num_valid))
            self.log("val_loss_synced", mean.loss, batch_size=int(mean.num_valid), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Buffered(UserModule):
    """A module that counts the tokens that it has seen: those of its shard, or those of all ranks."""

    def __init__(self, way: str) -> None:
        super().__init__("value")
        self.norm = torch.nn.BatchNorm1d(2, affine=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(()), persistent=way == "counts all")
        self.register_buffer("seen", torch.zeros(3))
        self.counted = way

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        count = (batch["labels"] >= 0).sum()
        self.norm(torch.rand(4, 2) + self.global_rank)
        self.steps += 1
        self.seen += batch["num_valid_tokens"] if self.counted == "counts all" else count
        self.scratch += 0 if self.counted == "counts all" else count
        return super().training_step(batch, batch_idx)


class OneArgument(UserModule):
    """A module whose step does not take the number of the batch, which Lightning allows."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(batch, 0)


def quiet() -> None:
    """Ignores warnings about these toy models."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*configure_model.*doesn't support sharding")
    # Lightning gives this advice even to modules that follow it
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log.*sync_dist=True")


def _fit(way: str, data_parallel: int = 1, accumulate: int = 2) -> dict[str, Any]:
    quiet()
    rows = [
        {"input_ids": tokens[row], "labels": labels[row]}
        for tokens, labels in make_batches(6)
        for row in range(tokens.shape[0])
    ]
    callbacks: list[Any] = [EarlyStopping("val_loss")] if way in ("value", "one argument", "share monitored") else []
    callbacks += [StochasticWeightAveraging(1e-2)] if way == "swa" else []
    callbacks += [EMAWeightAveraging()] if way == "ema" else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(data_parallel_size=data_parallel, layout="contiguous"),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=data_parallel > 1 and way != "unsharded data",  # it would shuffle
        callbacks=callbacks,
    )
    module = OneArgument("value") if way == "one argument" else UserModule(way)
    size = 6 // data_parallel
    training = DataLoader(cast("Any", rows[:24]), batch_size=size, shuffle=way == "shuffled")
    held_out = DataLoader(cast("Any", rows[24:]), batch_size=size)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ringflash").addHandler(handler)
    error = None
    try:
        trainer.fit(module, training, held_out)
    except RingflashError as raised:
        error = type(raised).__name__, str(raised)
    logging.getLogger("ringflash").removeHandler(handler)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"error": error, "metrics": metrics, "gradients": module.gradients, "records": records}


def _records_of_saves(folder: str) -> list[list[str]]:
    return [[text for text in _saved(way, f"{folder}/{way}") if "norm " not in text] for way in ("own", "counts all")]


def _saved(way: str, folder: str) -> list[str]:
    """Returns the warnings of a run that saves two checkpoints."""
    quiet()
    warnings.filterwarnings("ignore", message=".*val_dataloader")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(layout="contiguous"),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rows = [{"input_ids": tokens[0], "labels": labels[0]} for tokens, labels in make_batches(1)]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ringflash").addHandler(handler)
    trainer.fit(Buffered(way), DataLoader(cast("Any", rows)))
    for name in ("one", "two"):
        trainer.save_checkpoint(f"{folder}/{name}")
    logging.getLogger("ringflash").removeHandler(handler)
    return records


def test_a_saved_buffer_that_differs_between_ranks_is_named_once(tmp_path: Any) -> None:
    (first, equal), (second, _) = run_ranks(2, _records_of_saves, str(tmp_path))
    (record,) = first
    assert "The buffer seen differs between ranks, and a checkpoint keeps that of one rank" in record
    assert "all_reduce" in record
    assert equal == second == []


def _ways() -> dict[str, dict[str, Any]]:
    world_size = dist.get_world_size()
    outcomes = {way: _fit(way) for way in ("value", "one argument")}
    if world_size == 2:
        outcomes |= {way: _fit(way) for way in ("mean", "share", "share synced", "share monitored", "swa", "ema")}
        outcomes |= {
            way: _fit(way)
            for way in (
                "no ring",
                "second context",
                "cut twice",
                "no positions",
                "mean logged",
                "more terms",
                "not finite",
                "batch as a whole",
            )
        }
        outcomes["data parallel"] = _fit("value", data_parallel=2)
        outcomes["shuffled"] = _fit("shuffled", data_parallel=2)
        outcomes["unsharded data"] = _fit("unsharded data", data_parallel=2)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[str, dict[str, Any]]]]:
    return {world_size: run_ranks(world_size, _ways) for world_size in (1, 2, 3)}


def test_the_model_of_the_plain_loop() -> None:
    assert isinstance(make_model(), TinyModel)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_and_monitored_loss_are_one_process_s(outcomes: Any, world_size: int) -> None:
    gradients, _, validation = alone()
    for rank in outcomes[world_size]:
        for name in {"value", "one argument", "data parallel"} & rank.keys():
            outcome = rank[name]
            assert outcome["error"] is None
            assert outcome["metrics"]["val_loss"] == pytest.approx(validation, rel=1e-6)
            assert outcome["metrics"]["val_loss_synced"] == pytest.approx(validation, rel=1e-6)
            if name != "data parallel":  # data-parallel ranks take every other sequence, not the first half
                for actual, expected in zip(outcome["gradients"], gradients, strict=True):
                    for parameter, gradient in expected.items():
                        torch.testing.assert_close(actual[parameter], gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("way", "texts"),
    [
        ("mean", ["training_step: expected a loss from context.token_mean", "a mean over a shard"]),
        ("share synced", ["sync_dist: expected a value that is equal on all ranks", "token_mean"]),
        ("share monitored", ["val_loss: expected one value on all ranks, as it is monitored", "token_mean"]),
        ("swa", ["callbacks: expected none that copies the module", "StochasticWeightAveraging", "MovingAverage"]),
        ("ema", ["callbacks: expected none that copies the module", "EMAWeightAveraging", "MovingAverage"]),
    ],
)
def test_a_wrong_number_raises_on_every_rank(outcomes: Any, way: str, texts: list[str]) -> None:
    for rank in outcomes[2]:
        kind, text = rank[way]["error"]
        assert kind == "ConfigError"
        assert all(part in text for part in texts), text


def test_a_share_that_nobody_monitors_is_named_once(outcomes: Any) -> None:
    first, second = (rank["share"] for rank in outcomes[2])
    assert first["error"] is second["error"] is None
    assert len(first["records"]) == 1
    assert "val_loss differs between ranks" in first["records"][0]
    assert second["records"] == []


def test_a_step_without_attention_of_its_context_is_named_once(outcomes: Any) -> None:
    first, second = (rank["no ring"] for rank in outcomes[2])
    assert first["error"] is second["error"] is None
    (record,) = first["records"]
    assert "called no attention of its context, so each of the 2 ranks attends to its own part" in record
    assert "Call rf.ring_attention" in record
    assert second["records"] == []


def test_attention_over_another_context_of_the_same_ranks_is_seen(outcomes: Any) -> None:
    for rank in outcomes[2]:
        assert rank["second context"]["error"] is None
        assert rank["second context"]["records"] == []


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("no positions", "did not read batch.'position_ids'.*gives the tokens of all 2 ranks the same ones"),
        ("batch as a whole", "read all entries of its batch at once, so that its loss cannot be checked"),
        ("mean logged", "loss of training_step differs between ranks.*a mean over a shard is wrong"),
        ("more terms", "loss of training_step differs between ranks.*divided by self.trainer.world_size"),
    ],
)
def test_a_step_that_may_train_a_wrong_model_is_named_once(outcomes: Any, way: str, text: str) -> None:
    first, second = (rank[way] for rank in outcomes[2])
    assert first["error"] is second["error"] is None
    (record,) = first["records"]
    assert re.search(text, record)
    assert second["records"] == []


def test_a_loss_that_is_not_finite_is_named_once(outcomes: Any) -> None:
    for rank, outcome in enumerate(outcomes[2]):
        (record,) = outcome["not finite"]["records"]
        assert f"The loss of an earlier training step was nan on rank {rank}" in record
        assert "EarlyStopping(monitor, check_finite=True)" in record


def _warnings_of_weights(tied: bool) -> list[str]:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
    if tied:
        cast("Any", model["head"]).weight = model["embed"].weight
    for child in model.values():
        fully_shard(child)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ringflash").addHandler(handler)
    warn_of_parted_weights(model)
    logging.getLogger("ringflash").removeHandler(handler)
    return records


def test_tied_weights_that_were_sharded_apart_are_named() -> None:
    for records in run_ranks(2, _warnings_of_weights, True):
        (record,) = records
        assert "embed.weight and head.weight hold the same numbers" in record
        assert "one child module" in record
    assert run_ranks(2, _warnings_of_weights, False) == [[], []]


def test_batch_norms_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4))
    warn_of_batch_norms(model)
    warn_of_batch_norms(model[:1])
    (record,) = caplog.records
    assert record.getMessage().startswith("1 normalises with the statistics of this rank's shard")


def test_a_batch_that_is_cut_twice_raises_on_every_rank(outcomes: Any) -> None:
    for rank in outcomes[2]:
        kind, text = rank["cut twice"]["error"]
        assert kind == "ArgumentError"
        assert "labels: expected this rank's part of the batch, (6, " in text
        assert "cut twice. Leave out context.shard" in text


def test_equal_batches_of_data_parallel_groups_warn_once(outcomes: Any) -> None:
    first, second = (rank["unsharded data"] for rank in outcomes[2])
    assert len(first["records"]) == 1
    assert "All data-parallel groups hold the same batch" in first["records"][0]
    assert "use_distributed_sampler=True" in first["records"][0]
    assert second["records"] == []
    for rank in outcomes[2]:
        assert rank["data parallel"]["records"] == rank["shuffled"]["records"] == []
        assert rank["shuffled"]["error"] is None


READS: dict[str, Callable[[WatchedBatch], Any]] = {
    "index": lambda batch: batch["num_valid_tokens"],
    "get": lambda batch: batch.get("num_valid_tokens"),
    "pop": lambda batch: batch.pop("num_valid_tokens"),
    "keywords": lambda batch: dict(**batch),
    "copy": lambda batch: {**batch, "more": 1},
    "method": lambda batch: batch.copy(),
    "items": lambda batch: {name: x for name, x in batch.items() if name != "labels"},
    "values": lambda batch: [*batch.values()],
}


@pytest.mark.parametrize("way", READS)
def test_every_way_to_read_the_number_of_valid_tokens_is_noticed(way: str) -> None:
    batch = WatchedBatch(labels=1, num_valid_tokens=5)
    assert [*batch] == ["labels", "num_valid_tokens"]
    assert batch["labels"] == 1
    assert batch.reads.names == {"labels"}
    READS[way](batch)
    assert "num_valid_tokens" in batch.reads.names


def test_trees_enter_a_batch_and_notice_what_is_read_afterwards() -> None:
    batch = WatchedBatch(labels=1, num_valid_tokens=5)
    (doubled, rest) = _pytree.tree_map(lambda x: 2 * x, (batch, [3]))
    assert rest == [6]
    assert type(doubled) is WatchedBatch
    assert batch.reads.names == set()
    assert doubled["num_valid_tokens"] == 10
    assert doubled.pop("labels") == 2
    assert batch.reads.names == {"num_valid_tokens", "labels"}
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_leaves_with_path(batch)]
    assert paths == ["['labels']", "['num_valid_tokens']"]
    assert not batch.reads.is_whole
    assert _pytree.tree_map(lambda x, y: x + y, batch, batch)["labels"] == 2


class Failing(UserModule):
    """A module that raises on rank 1, and on rank 0 after rank 1 has ended."""

    def __init__(self, store: Any) -> None:
        super().__init__("value")
        self.store = store

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 0:
            self.store.wait(["rank 1 has ended"])
            raise RuntimeError("connection closed by peer")
        raise RuntimeError("the first error")


def _fail(folder: str) -> dict[str, Any]:
    quiet()
    warnings.simplefilter("ignore")  # Lightning's advice about validation and checkpoints, which this run does not have
    store: Any = FileStore(f"{folder}/meeting", 2)
    rows = [{"input_ids": tokens[0], "labels": labels[0]} for tokens, labels in make_batches(2)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RingAttentionStrategy(),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        callbacks=[OnExceptionCheckpoint(f"{folder}/saved")],
    )
    text = ""
    try:
        trainer.fit(Failing(store), DataLoader(cast("Any", rows)))
    except RuntimeError as error:
        text = str(error)
    if dist.get_rank() == 1:
        store.set("rank 1 has ended", "")
    try:
        sum_gradients(DistributedDataParallel(torch.nn.Linear(3, 3)))
    except ConfigError as error:
        return {"error": text, "ddp": str(error)}
    return {"error": text, "ddp": ""}


def test_a_checkpoint_on_exception_does_not_wait_for_ranks_without_one(tmp_path: Any) -> None:
    first, second = run_ranks(2, _fail, str(tmp_path))
    assert second["error"] == "the first error"
    assert first["error"] == "connection closed by peer"
    assert not (tmp_path / "saved").exists()
    for rank in (first, second):
        assert rank["ddp"].startswith("model: expected a module sharded with fully_shard, got DistributedDataParallel")
        assert "context.token_mean" in rank["ddp"]


@pytest.mark.parametrize("precision", ["64-true", "16-mixed"])
def test_a_precision_that_does_not_work_names_those_that_do(precision: Any) -> None:
    with pytest.raises(ValueError, match="32-true.*bf16-mixed.*bf16-true.*16-true"):
        pl.Trainer(accelerator="cpu", strategy=RingAttentionStrategy(), precision=precision, logger=False)
