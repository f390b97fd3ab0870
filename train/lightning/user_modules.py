"""Checks that keep a user's own LightningModule from training or logging a wrong number."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringflash.errors import ConfigError
from ringflash.torch_private import enter_dicts
from ringflash.train.exchange import Place, Purpose, all_ranks
from ringflash.train.lightning.host_copies import HostCopy
from ringflash.train.lightning_private import trainer_of

if TYPE_CHECKING:
    from ringflash.train.lightning.sharded import ShardedStrategy
    from ringflash.train.lightning.strategy import RingAttentionStrategy

logger = logging.getLogger(__name__)

COUNT, POSITIONS = "num_valid_tokens", "position_ids"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
AVERAGES = (StochasticWeightAveraging, WeightAveraging)
TOLERANCE = 1e-5  # relative; far below the difference of two shards' losses
REMEDY = (
    "Log the mean over all ranks: mean = self.trainer.strategy.context.token_mean(token_losses, batch['labels']), then "
    "self.log(name, mean.value, batch_size=int(mean.num_valid), sync_dist=True)."
)
NO_ATTENTION = (
    "The training step called no attention of its context, so each of the %d ranks attends to its own part of the "
    "sequence alone. Call rf.ring_attention with context=self.trainer.strategy.context in place of rf.flash_attention "
    "or scaled_dot_product_attention, unless no token of this model sees another."
)
NO_POSITIONS = (
    "The training step did not read batch['position_ids'], the positions of this rank's tokens in the whole sequence. "
    "A model that counts positions itself gives the tokens of all %d ranks the same ones. Pass these positions to the "
    "model, unless it needs none."
)
UNEQUAL_LOSS = (
    "The loss of training_step differs between ranks: %s. Gradients are summed over ranks, so a mean over a shard is "
    "wrong, and a term beside the loss of token_mean counts once a rank. Add terms of each token to token_losses. "
    "Other terms are right if they are divided by self.trainer.world_size."
)
NOT_FINITE = (
    "The loss of an earlier training step was %s on rank %d, and training goes on. Look at the data, lower the "
    "learning rate, and pass EarlyStopping(monitor, check_finite=True) to the Trainer to stop such a run."
)
WHOLE_BATCH = (
    "The training step read all entries of its batch at once, so that its loss cannot be checked. It must be the loss "
    "of context.token_mean, or the local sum of token losses / batch['num_valid_tokens']: a mean over a shard trains a "
    "wrong model."
)
BATCH_NORM = (
    "%s normalises with the statistics of this rank's shard, and a checkpoint keeps the buffers of one rank. Use a "
    "norm of each token, such as LayerNorm or RMSNorm."
)
UNLIKE_BUFFER = (
    "The buffer %s differs between ranks, and a checkpoint keeps that of one rank. Change it by values that are equal "
    "on all ranks: sum them with torch.distributed.all_reduce. Or register it with persistent=False."
)
SEPARATE_WEIGHTS = (
    "%s and %s hold the same numbers, but train as two parameters. If they were tied, separate calls of fully_shard "
    "have parted them: put both into one child module with a forward of its own, and shard that child after its blocks."
)


@dataclass(eq=False)
class Reads:
    """Entries of a batch that were read.

    Args:
        names: their names.
        is_whole: whether the batch was read as a whole.
    """

    names: set[str] = field(default_factory=set)
    is_whole: bool = False


class WatchedBatch(dict[str, Any]):
    """A batch that records which entries `training_step` reads, also from copies that `tree_map` makes of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads = Reads()

    def __getitem__(self, key: str) -> Any:
        self.reads.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the entry `key`, or `default`."""
        self.reads.names.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        """Iterates over names. This override makes `{**batch}` read entries one by one."""
        return super().__iter__()

    def keys(self) -> Any:
        """Returns names, as `**batch` does before it reads each entry."""
        self.reads.is_whole = True
        return super().keys()

    def items(self) -> Any:
        """Returns names and entries, and records all as read."""
        self.reads.names.update(self)
        self.reads.is_whole = True
        return super().items()

    def values(self) -> Any:
        """Returns the entries, and records all as read."""
        self.reads.names.update(self)
        self.reads.is_whole = True
        return super().values()

    def pop(self, key: str, *default: Any) -> Any:
        """Removes and returns the entry `key`, or `default`."""
        self.reads.names.add(key)
        return super().pop(key, *default)


def _watched(entries: dict[str, Any], reads: Any) -> WatchedBatch:
    batch = WatchedBatch(entries)
    batch.reads = reads
    return batch


# Taking a tree apart records nothing: FSDP2 does so with each argument of a module, and reads no entry.
enter_dicts(WatchedBatch, lambda batch: batch.reads, _watched)


class StepChecks:
    """Checks of the training steps of a module on several ranks; each warning is given once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._has_compared = False
        self._last_loss: HostCopy | None = None

    def run(self, strategy: RingAttentionStrategy, batch: dict[str, Any], step: Callable[[WatchedBatch], Any]) -> Any:
        """Returns the result of `step` for the batch of this rank.

        Raises:
            ConfigError: the step neither calls `context.token_mean` nor reads `num_valid_tokens`. Such a loss does not
                give the gradient of the mean over all ranks.
        """
        context = strategy.context
        watched, means, passes = WatchedBatch(batch), context.token_means_made, context.passes
        result = step(watched)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        loss = loss.detach().reshape(1) if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self._look_at_last(strategy, loss)
        if strategy.world_size == 1:
            return result
        calls_mean = context.token_means_made > means
        if result is not None and not (calls_mean or COUNT in watched.reads.names):
            raise loss_error()
        if result is not None and watched.reads.is_whole and not (calls_mean or _has_policy(strategy)):
            self._warn(strategy, WHOLE_BATCH)
        if calls_mean and not self._has_compared:  # a collective as well, and so on every rank
            self._has_compared = True
            row = torch.zeros(1, device=strategy.root_device) if loss is None else loss
            values = all_ranks(row.double(), strategy.world_group).flatten().tolist()
            if not are_equal(values):
                self._warn(strategy, UNEQUAL_LOSS, values)
        if context.world_size > 1:
            if context.passes == passes:
                self._warn(strategy, NO_ATTENTION, context.world_size)
            elif POSITIONS not in watched.reads.names:
                self._warn(strategy, NO_POSITIONS, context.world_size)
        return result

    def _look_at_last(self, strategy: RingAttentionStrategy, loss: Tensor | None) -> None:
        """Warns if the loss of the step before was not finite; the host waits for that loss, not for this step."""
        if _has_policy(strategy) or NOT_FINITE in self._warned:
            return
        if self._last_loss is not None and not math.isfinite(value := self._last_loss.read()[0]):
            self._warned.add(NOT_FINITE)
            logger.warning(NOT_FINITE, value, strategy.global_rank)
        self._last_loss = None if loss is None else HostCopy(loss)

    def _warn(self, strategy: RingAttentionStrategy, text: str, *values: Any) -> None:
        if text not in self._warned and strategy.is_global_zero:
            logger.warning(text, *values)
        self._warned.add(text)


def _has_policy(strategy: RingAttentionStrategy) -> bool:
    """Returns whether the module is a RingModule, with its own loss and its own policy for one that is not finite."""
    return hasattr(strategy.lightning_module, "nonfinite")


def warn_of_batch_norms(module: nn.Module) -> None:
    """Warns of the first layer that normalises over tokens."""
    for name, layer in module.named_modules():
        if isinstance(layer, BATCH_NORMS):
            logger.warning(BATCH_NORM, name)
            return


def warn_of_parted_weights(module: nn.Module) -> None:
    """Warns of an embedding and another layer with equal shards of weights: FSDP2 parts tied weights in silence."""
    owners = dict(module.named_modules())
    sharded = [
        (name, owners[name.rpartition(".")[0]], weight)
        for name, weight in module.named_parameters()
        if isinstance(weight, DTensor) and weight.requires_grad and not weight.is_meta
    ]
    for name, owner, weight in sharded:
        for other_name, other_owner, other in sharded if isinstance(owner, nn.Embedding) else ():
            if isinstance(other_owner, nn.Embedding) or other.shape != weight.shape or other.dtype != weight.dtype:
                continue
            mine, theirs = weight.to_local(), other.to_local()
            if mine.numel() and torch.equal(mine, theirs) and bool((mine != mine.flatten()[0]).any()):
                logger.warning(SEPARATE_WEIGHTS, name, other_name)


def has_unlike_buffers(module: nn.Module, state_dict: Mapping[str, Any], group: dist.ProcessGroup) -> bool:
    """Returns whether a buffer to be saved differs between ranks, and names the first; a collective.

    BatchNorm's buffers are left out, because `warn_of_batch_norms` has named them.
    """
    norms = {name for name, layer in module.named_modules() if isinstance(layer, BATCH_NORMS)}
    saved = {name: state_dict[name] for name, _ in module.named_buffers() if name in state_dict}
    whole = {name: x for name, x in saved.items() if type(x) is Tensor}  # sharded ones are DTensors
    named = {name: _digest(x) for name, x in whole.items() if name.rpartition(".")[0] not in norms}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, named, group=group)
    unlike = [name for name, digest in gathered[0].items() if any(each.get(name) != digest for each in gathered)]
    if unlike and dist.get_rank(group) == 0:
        logger.warning(UNLIKE_BUFFER, unlike[0])
    return bool(unlike)


def _digest(x: Tensor) -> bytes:
    content = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def loss_error() -> ConfigError:
    """Makes the error for a loss that is not divided by the global number of valid tokens."""
    return ConfigError(
        "training_step",
        expected="a loss from context.token_mean, or the local sum of token losses / batch['num_valid_tokens']",
        got="a loss that uses neither; a mean over a shard gives gradients that are too large by the number of ranks, "
        "and wrong ones where ranks have unequal numbers of valid tokens",
        remedy="Return self.trainer.strategy.context.token_mean(token_losses, batch['labels']).loss.",
    )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raises ConfigError for callbacks that copy the whole module, and warns of a callback that cannot save."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, AVERAGES):
            raise ConfigError(
                "callbacks",
                expected="none that copies the module: its weights are sharded over ranks",
                got=type(callback).__name__,
                remedy="Use ringflash.train.ExponentialMovingAverage, which averages each rank's shards.",
            )
        if isinstance(callback, OnExceptionCheckpoint) and trainer.world_size > 1 and trainer.is_global_zero:
            text = "OnExceptionCheckpoint saves nothing on several ranks, which an error finds at different steps. %s"
            logger.warning(text, "Use ModelCheckpoint(every_n_train_steps=...) and resume from its last checkpoint.")


def check_early_copies(trainer: pl.Trainer) -> None:
    """Raises ConfigError for a callback that copied a module before `configure_model` builds its model.

    StochasticWeightAveraging would then average no weights, under any strategy, and say nothing.
    """
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "callbacks",
                expected="none that copies the module before it has weights",
                got=type(callback).__name__,
                remedy="Use ringflash.train.ExponentialMovingAverage.",
            )


def place_of_batch(module: pl.LightningModule | None, loader: int) -> Place:
    """Returns the place of the batch that the loop of the module's trainer is about to move.

    Ranks whose data have ended leave the loop after this batch, and the others would wait for them in another
    collective. So ranks compare here whether the batch is the last one. After the last batch of `max_steps` all ranks
    leave the loop, whatever is left of their data.

    Args:
        module: module of the run; None, or one without a trainer, outside of a run.
        loader: index of the batch's loader.
    """
    trainer = None if module is None else trainer_of(module)
    if trainer is None or (stage := trainer.state.stage) not in _LOOPS:
        return Place(Purpose.TRAINING_BATCH)
    purpose, loop_of = _LOOPS[stage]
    progress = loop_of(trainer).batch_progress
    ends_run = stage == RunningStage.TRAINING and 0 <= trainer.max_steps <= trainer.global_step + 1
    return Place(purpose, progress.current.ready, loader, progress.is_last_batch or ends_run)


def is_evaluating(module: pl.LightningModule | None) -> bool:
    """Returns whether the trainer of `module` validates, tests, or runs its sanity check."""
    trainer = None if module is None else trainer_of(module)
    return trainer is not None and trainer.state.stage is not None and trainer.state.stage.evaluating


def _validation_loop(trainer: pl.Trainer) -> Any:
    is_in_fit = trainer.state.fn == TrainerFn.FITTING
    return trainer.fit_loop.epoch_loop.val_loop if is_in_fit else trainer.validate_loop


_LOOPS: dict[RunningStage | None, tuple[Purpose, Callable[[pl.Trainer], Any]]] = {
    RunningStage.TRAINING: (Purpose.TRAINING_BATCH, lambda trainer: trainer.fit_loop.epoch_loop),
    RunningStage.SANITY_CHECKING: (Purpose.SANITY_BATCH, _validation_loop),
    RunningStage.VALIDATING: (Purpose.VALIDATION_BATCH, _validation_loop),
    RunningStage.TESTING: (Purpose.TEST_BATCH, lambda trainer: trainer.test_loop),
    RunningStage.PREDICTING: (Purpose.PREDICTION_BATCH, lambda trainer: trainer.predict_loop),
}


class MetricGuard(Callback):
    """Compares the ends of epochs, and logged metrics, over ranks before other callbacks act on them.

    Each end of an epoch is an exchange of its own before any metric is read, since reading may reduce it over ranks.
    A metric that a callback or a scheduler monitors must be equal on all ranks, because each rank acts on its own
    value. Any other metric that differs between ranks causes one warning.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises RankMismatch where other ranks have more batches."""
        _strategy_of(trainer).exchange(Purpose.VALIDATION_END)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises RankMismatch where other ranks have more batches."""
        _strategy_of(trainer).exchange(Purpose.TEST_END)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises RankMismatch where other ranks have more batches."""
        _strategy_of(trainer).exchange(Purpose.PREDICTION_END)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the metrics before ModelCheckpoint and EarlyStopping read them."""
        self._compare(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises RankMismatch where other ranks have more batches; else compares the metrics as after a validation."""
        _strategy_of(trainer).exchange(Purpose.TRAINING_END)
        self._compare(trainer)

    def _compare(self, trainer: pl.Trainer) -> None:
        strategy = _strategy_of(trainer)
        mine = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        gathered: list[Any] = [None] * strategy.world_size
        dist.all_gather_object(gathered, mine, group=strategy.cpu_group)
        monitored: set[Any] = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # pyright: ignore[reportAttributeAccessIssue]
        monitored |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
        for name in sorted(set[str].intersection(*(set(metrics) for metrics in gathered))):
            values = [metrics[name] for metrics in gathered]
            if are_equal(values):
                continue
            if name in monitored:
                raise ConfigError(
                    name, expected="one value on all ranks, as it is monitored", got=values, remedy=REMEDY
                )
            if name not in self._warned:
                self._warned.add(name)
                if trainer.is_global_zero:
                    logger.warning("%s differs between ranks: %s. Each logs its own share. %s", name, values, REMEDY)


def _strategy_of(trainer: pl.Trainer) -> ShardedStrategy:
    return cast("ShardedStrategy", trainer.strategy)


def are_equal(values: list[float]) -> bool:
    """Returns whether all ranks hold one value, up to rounding."""
    return all(math.isclose(values[0], value, rel_tol=TOLERANCE) for value in values) or all(map(math.isnan, values))
