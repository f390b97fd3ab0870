"""Base of LightningModules that train on a ring: optimizer, schedule, losses and gradients over all ranks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

import ringflash as rf
from ringflash.errors import ConfigError, StateError
from ringflash.train.callbacks.nonfinite import NonFinite, StepResult
from ringflash.train.callbacks.observe import gathered
from ringflash.train.callbacks.progress import RingProgressBar
from ringflash.train.checkpoint.load import compare_model_configs
from ringflash.train.lightning.memory_plan import check_run_memory, choose_activations, report_measured, shape_of
from ringflash.train.lightning.optimizer import (
    ConfiguredOptimizer,
    OptimizerConfig,
    can_skip_on_device,
    clip_to_norm,
    make_adamw,
    norm_of,
    parameters_of,
    step_only_if,
)
from ringflash.train.lightning.sharded import shard_model
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.user_modules import check_early_copies
from ringflash.train.models.activations import ALL_BLOCKS, ActivationCheckpointing, Activations
from ringflash.train.models.budget import ActivationPlan, check_activations
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.loss import TokenLosses
from ringflash.train.models.memory import MemoryEstimate, TrainingShape, estimate_memory
from ringflash.train.torchao_private import LinearDtype, check_float8, checked_linear_dtype, refresh_scales, use_float8

log = logging.getLogger(__name__)

ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]


@dataclass(frozen=True)
class _MicroBatch:
    """Results of a training step that the end of its accumulation window needs."""

    batch_idx: int
    loss_sum: Tensor
    num_valid: Tensor


class RingModule(pl.LightningModule, ABC):
    """Next-token training of the model that `configure_model` makes, under `RingAttentionStrategy` or on one device.

    Logs train/loss, train/grad_norm (before clipping) and train/learning_rate every optimizer step, val/loss and
    test/loss every epoch. Losses are means over all valid tokens of all ranks.

    Args:
        optimizer: AdamW and its schedule.
        compute_dtype: dtype of activations and gathered weights; "auto" is bfloat16 on CUDA and float32 elsewhere.
            Weights and optimizer state are kept, and gradients reduced, in float32 (float64 for "float64"). Frozen
            weights of LoRA are kept in this dtype.
        activation_checkpointing: "block" keeps each block's input and attention's result for the backward. The backward
            recomputes the rest of the block without repeating its ring. "none" keeps everything. None: the last blocks
            keep everything, as many as `activation_memory` allows.
        reshard_after_forward: free each block's gathered weights between its forward and its backward. None: unless
            `activation_memory` has room for them once every block keeps everything. With None a LanguageModel on one
            rank is not sharded at all.
        seed: seed of the initial weights.
        nonfinite: policy for a step with a NaN or infinite loss or gradient; None: such a step stops the run.
        activation_offload: keep in host memory, until the backward, the tensors that "block" keeps.
        compile_blocks: compile each block's forward and backward with torch.compile, when training begins.
        activation_memory: memory that training may take on a GPU, weights included: a size such as "60GiB", or a share
            of the GPU's memory such as "80%". "auto" is the memory that is free; on a CPU every block keeps everything.
            If recomputing every block is not enough, blocks keep their tensors in host memory.
        linear_dtype: dtype in which the linear layers of blocks multiply: "compute" is `compute_dtype`, "fp8" is float8
            with one scale a tensor, "fp8_rowwise" with one a row.

    Raises:
        ConfigError: an unknown activation_checkpointing, activation_memory or linear_dtype, the first two together, or
            activation_offload without "block" or with float8.
    """

    in_pieces = False  # whether feed-forward layers process their tokens in pieces
    float32_norms = False  # whether blocks are transformers' layers, whose norms keep float32 copies of their inputs
    own_head = True  # whether the strategy shards the head apart from the embedding
    adapts_all = False  # whether adapters of all linear layers train
    nf4 = False  # whether frozen linear layers are stored in 4 bits
    weight_copies = 1  # copies of the model's weights, of which a rank holds its shard
    init_from: str | None = None  # folder of the initial weights; its tokenizer is compared with the data

    def __init__(
        self,
        optimizer: OptimizerConfig | None,
        compute_dtype: ComputeDtype,
        activation_checkpointing: ActivationCheckpointing | None,
        reshard_after_forward: bool | None,
        seed: int,
        nonfinite: NonFinite | None,
        activation_offload: bool,
        compile_blocks: bool,
        activation_memory: str,
        linear_dtype: LinearDtype,
    ) -> None:
        super().__init__()
        self.nonfinite, self._skipped = nonfinite or NonFinite(), 0
        self.optimizer_config = optimizer or OptimizerConfig()
        self.compute_dtype: ComputeDtype = compute_dtype
        check_activations(activation_checkpointing, activation_memory, activation_offload)
        self.linear_dtype: LinearDtype = checked_linear_dtype(linear_dtype, activation_offload)
        self.activation_checkpointing: ActivationCheckpointing | None = activation_checkpointing
        self.activation_memory = activation_memory
        self.activation_plan: ActivationPlan | None = None
        self.activation_offload, self.compile_blocks = activation_offload, compile_blocks
        self.reshard_after_forward = reshard_after_forward
        self.seed = seed
        self._decoder: Any = None
        self._window: list[_MicroBatch] = []
        self._first_steps = 0  # optimizer steps until the memory is logged
        self._norm: Tensor | None = None  # norm of the gradients that are about to be clipped
        self._unread: StepResult | None = None  # result of the last optimizer step, until the host has read it
        self._configured: ConfiguredOptimizer | None = None
        self._logged: tuple[Tensor, Tensor] | None = None  # last loss and norm that this epoch has logged
        self._evaluated: list[tuple[Tensor, Tensor]] = []

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Number of token ids of the model; None if it is unknown. Ids of batches are checked against it."""

    @abstractmethod
    def model_fields(self) -> dict[str, Any]:
        """Returns the model's configuration as plain values. Checkpoints store and compare it."""

    @abstractmethod
    def _make(self, dtype: torch.dtype, activations: Activations) -> Any:
        """Returns the model, as `configure_model` builds it, with weights stored in `dtype`."""

    @abstractmethod
    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        """Returns the losses of this rank's tokens, and the number of valid tokens on all ranks."""

    def _scaled_loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        """Returns the result of `_loss` with scales of the weights as they are now, after a step, a load or a swap."""
        if self.linear_dtype == "fp8":
            refresh_scales(self.decoder)
        return self._loss(batch)

    def configure_model(self) -> None:
        """Builds the model: sharded under `RingAttentionStrategy`, unless it `rounds_weights`; whole under others.

        Raises:
            ConfigError: several ranks under another strategy, a Trainer precision that would cast behind FSDP,
                offloading without a GPU, StochasticWeightAveraging, or training that cannot fit into the GPU's memory.
        """
        if self._decoder is None:
            self._check_strategy()
            compute = self.resolved_dtype(self.trainer.strategy.root_device)
            check_float8(self.linear_dtype, self.trainer.strategy.root_device, compute)
            self._check_context_length()
            dtype = torch.float64 if compute == torch.float64 else torch.float32
            self._decoder = self._make(dtype, self._choose_activations())

    @property
    def trained_size(self) -> int | None:
        """Number of parameters that train; None if all do."""
        return None

    def rounds_weights(self, world_size: int) -> bool:
        """Returns whether, on `world_size` ranks, layers round their weights themselves instead of FSDP."""
        return False

    def is_saved(self, name: str) -> bool:
        """Returns whether checkpoints hold the module's tensor `name`."""
        return True

    @property
    def decoder(self) -> Any:
        """The model; available after `configure_model` has run."""
        if self._decoder is None:
            remedy = "Read it only after that: in `setup` or a later hook."
            raise StateError("decoder", expected="a module after configure_model", got="one before it", remedy=remedy)
        return self._decoder

    @property
    def context(self) -> rf.ContextParallel | None:
        """Context-parallel ring of the sequence; None under a single-device strategy."""
        strategy = self.trainer.strategy
        return strategy.context if isinstance(strategy, RingAttentionStrategy) else None

    @property
    def estimated_config(self) -> ModelConfig | None:
        """Decoder configuration that needs the same memory as the model; None if it is unknown."""
        return None

    @property
    def asked_activations(self) -> Activations:
        """Activations that blocks keep without a plan."""
        offloaded = ALL_BLOCKS if self.activation_offload else 0
        return Activations(self.activation_checkpointing or "none", offloaded_blocks=offloaded)

    def memory_estimate(self) -> MemoryEstimate | None:
        """Returns the least memory of one GPU under the Trainer's strategy; None without `estimated_config`."""
        if (config := self.estimated_config) is None:
            return None
        shape = self.training_shape()
        if (plan := self.activation_plan) is not None:
            reshard = not plan.keeps_weights
            shape = replace(shape, **plan.activations._asdict(), reshard_after_forward=reshard)
        return estimate_memory(config, shape)

    def training_shape(self) -> TrainingShape:
        """Returns the shape of the run under the Trainer's strategy."""
        strategy, data = self.trainer.strategy, self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        world_size = strategy.world_size if isinstance(strategy, RingAttentionStrategy) else 1
        return shape_of(self, data, strategy.root_device, strategy, world_size)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns AdamW of the parameters that train, fused on CUDA, and its schedule by optimizer step."""
        trained = (parameter for parameter in self.decoder.parameters() if parameter.requires_grad)
        made = ConfiguredOptimizer(make_adamw(trained, self.optimizer_config), self.optimizer_config)
        self._configured = made
        return {"optimizer": made.optimizer, "lr_scheduler": {"scheduler": made.scheduler, "interval": "step"}}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Computes the local sum of token losses / the micro-batch's valid tokens on all ranks.

        Returns:
            loss: this quotient, a scalar.
            token_losses: (batch, seqlen_local) float32 of this rank's tokens, detached, 0 where the label is -100.

        Raises:
            ConfigError: gradients are accumulated by a strategy that takes the mean of the micro-batches' means.
        """
        micro_batches, strategy = self.trainer.accumulate_grad_batches, self.trainer.strategy
        if micro_batches > 1 and not isinstance(strategy, RingAttentionStrategy):
            raise ConfigError(
                "accumulate_grad_batches",
                expected=f"1 under {type(strategy).__name__}, which averages over micro-batches instead of tokens",
                got=micro_batches,
                remedy='Pass Trainer(strategy="ring_attention"), on one device too.',
            )
        losses, num_valid = self._scaled_loss(batch)
        self._window.append(_MicroBatch(batch_idx, losses.total.detach(), num_valid))
        return {"loss": losses.total / num_valid.clamp(min=1), "token_losses": losses.tokens.float()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Adds the batch to val/loss or test/loss."""
        losses, num_valid = self._scaled_loss(batch)
        self._evaluated.append((losses.total, num_valid))

    test_step = validation_step

    def on_fit_start(self) -> None:
        """Drops the result of a step that an earlier run left unread, and a window that it left unfinished."""
        self._unread, self._first_steps = None, 2
        self._window, self._logged = [], None

    def on_train_start(self) -> None:
        """Gives the optimizer its hyperparameters again, in place of those of a checkpoint that was loaded."""
        made = self._configured
        if self.trainer.ckpt_path is None or made is None or self.trainer.optimizers != [made.optimizer]:
            return
        if (changed := made.restore()) and self.trainer.is_global_zero:
            log.warning("Resumed with the configuration of this run: %s", ", ".join(changed))

    def on_train_epoch_start(self) -> None:
        """Drops a window that an earlier run left unfinished."""
        self._window, self._logged = [], None

    def on_validation_epoch_start(self) -> None:
        """Starts val/loss. Raises NonFiniteError as `on_before_optimizer_step` does."""
        self._settle()
        self._evaluated = []

    def on_test_epoch_start(self) -> None:
        """Starts test/loss."""
        self._evaluated = []

    def on_validation_epoch_end(self) -> None:
        """Logs val/loss."""
        self._log_evaluated("val/loss")

    def on_test_epoch_end(self) -> None:
        """Logs test/loss."""
        self._log_evaluated("test/loss")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the window's loss and gradient norm, and keeps the optimizer from a step in which one is not finite.

        All ranks hold the same values, so they all skip a step, and either all raise or none does. With a fused Adam or
        AdamW, as on a GPU, the optimizer skips the step on the device: weights, moments and step counts keep their
        bits. The host reads the result at the next step, when the device has work for the meantime. The last finite
        values are then logged again for a skipped step. With other optimizers, and at the first step of an epoch, the
        host waits for the result here.

        Raises:
            NonFiniteError: a loss or norm is NaN or infinite, of this step or of the step before. `nonfinite` stops the
                run, or has skipped too many steps in a row. The optimizer has not applied the step that is named, nor
                any later one.
        """
        window, self._window = self._window, []
        losses = gathered(self.trainer, torch.stack([m.loss_sum for m in window]))
        loss = losses.sum() / torch.stack([m.num_valid for m in window]).sum().clamp(min=1)
        norm = self._gradient_norm(optimizer)
        result = StepResult(self.trainer.global_step, [m.batch_idx for m in window], loss, norm, losses)
        self._settle()
        self._unread = result
        if self._logged is not None and can_skip_on_device(optimizer):
            step_only_if(optimizer, result.is_finite)
            loss, norm = map(partial(torch.where, result.is_finite), (loss, norm), self._logged)
        elif not self._settle():
            optimizer.zero_grad()  # the optimizer skips parameters without gradients
            self._norm = None
            return
        self._logged = loss, norm
        # Lightning reads what it hands to a bar at every step. RingProgressBar takes it from the callbacks' metrics.
        bar = self.trainer.progress_bar_callback
        in_bar = bar is not None and not isinstance(bar, RingProgressBar)
        self.log("train/loss", loss, prog_bar=in_bar, on_step=True, on_epoch=False)
        self.log("train/grad_norm", norm, on_step=True, on_epoch=False)
        # Lightning would copy a number from the host, and wait for the device before it does.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        rate = torch.full((), optimizer.param_groups[0]["lr"], dtype=dtype, device=loss.device)
        self.log("train/learning_rate", rate, on_step=True, on_epoch=False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Makes later steps of the optimizer unconditional, for instance those of the program after training.

        After the second step it logs the memory. In the first backward AdamW's moments do not exist yet.
        """
        if self._first_steps and not self._window:
            self._first_steps -= 1
            if not self._first_steps:
                report_measured(self)
        for optimizer in self.trainer.optimizers:
            if can_skip_on_device(optimizer):
                step_only_if(optimizer, None)

    def on_train_epoch_end(self) -> None:
        """Raises NonFiniteError for the last step of the epoch or run, as `on_before_optimizer_step` does."""
        self._settle()

    on_train_end = on_train_epoch_end

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips gradients. Clipping by norm takes the norm that `on_before_optimizer_step` has computed and logged."""
        norm, self._norm = self._norm, None
        if norm is None or not gradient_clip_val or gradient_clip_algorithm not in (None, "norm"):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            clip_to_norm(parameters_of(optimizer), gradient_clip_val, norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the model's configuration. Raises NonFiniteError as `on_before_optimizer_step` does."""
        self._settle()
        if self._window and self.trainer.is_global_zero:
            text = "The checkpoint after step %d is inside an accumulation window, and has no gradients of its %d "
            text += "micro-batches. A resumed run leaves them out: save and validate between windows."
            log.warning(text, self.trainer.global_step, len(self._window))
        checkpoint["model_config"] = self.model_fields()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises CheckpointError when the checkpoint holds another model."""
        compare_model_configs(checkpoint.get("model_config"), self.model_fields())

    def _settle(self) -> bool:
        """Reads the result of the last optimizer step, unless that was done; returns False if the step was skipped.

        Raises:
            NonFiniteError: as in `on_before_optimizer_step`.
        """
        result, self._unread = self._unread, None
        if result is None:
            return True
        if (error := result.error()) is None:
            self._skipped = 0
            return True
        self._skipped = self.nonfinite.skip(error, self._skipped, speak=self.trainer.is_global_zero)
        return False

    def _gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the norm of the model's gradients over all ranks, and keeps it for clipping."""
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        of_model = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        # In the optimizer's order: the norm, and so the clipped gradients, have the bits of `clip_grad_norm_`.
        are_same = {id(x) for x in gradients} == {id(x) for x in of_model}
        norm = norm_of(gradients if are_same else of_model)
        self._norm = norm if are_same else None
        return norm

    def _check_strategy(self) -> None:
        strategy = self.trainer.strategy
        check_early_copies(self.trainer)
        if not isinstance(strategy, RingAttentionStrategy) and self.trainer.world_size > 1:
            raise ConfigError(
                "strategy",
                expected='"ring_attention" with several ranks',
                got=type(strategy).__name__,
                remedy='Pass Trainer(strategy="ring_attention"); others average over ranks instead of tokens.',
            )
        if isinstance(strategy, RingAttentionStrategy) and type(strategy.precision_plugin) is not Precision:
            plugin = strategy.precision_plugin
            raise refused_precision(getattr(plugin, "precision", type(plugin).__name__))
        if self.activation_offload and strategy.root_device.type == "cpu":
            raise ConfigError(
                "activation_offload",
                expected="False on a CPU",
                got=True,
                remedy="Activations are in the host's memory already.",
            )

    def _check_context_length(self) -> None:
        """Logs a warning if the data module's sequences are longer than the model's max_position_embeddings."""
        config, data = self.estimated_config, getattr(self.trainer, "datamodule", None)
        longest = None if config is None or config.rope_scaling is not None else config.max_position_embeddings
        length = getattr(data, "context_length", None) or 0
        fits = longest is None or length <= longest
        if fits or self.trainer.state.fn != TrainerFn.FITTING or not self.trainer.is_global_zero:
            return
        text = f"context_length {length} is more than the model's max_position_embeddings {longest}, and there is no "
        text += (
            "rope_scaling: set that, or a larger rope_theta, with max_position_embeddings, for the model to reach it"
        )
        log.warning(text)

    def _choose_activations(self) -> Activations:
        """Returns the activations that blocks keep; checks memory.

        Raises:
            ConfigError: training cannot fit, or as `choose_activations`.
        """
        self.activation_plan = choose_activations(self)
        check_run_memory(self)
        if self.activation_plan is not None:
            return self.activation_plan.activations
        return self.asked_activations

    def _use_float8(self, blocks: Iterable[nn.Module]) -> None:
        """Makes linear layers of `blocks` compute in float8, if asked; before `_shard`."""
        strategy, speak = self.trainer.strategy, self.trainer.is_global_zero
        sharded = isinstance(strategy, RingAttentionStrategy) and not self.rounds_weights(strategy.world_size)
        use_float8(blocks, self.linear_dtype, strategy.root_device, sharded=sharded, speak=speak)

    def _shard(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        strategy: RingAttentionStrategy,
        head: nn.Module | None = None,
    ) -> None:
        """Shards `model` block by block with FSDP, after `_choose_activations`."""
        dtype, reshard = self.resolved_dtype(strategy.root_device), self.reshard_after_forward
        if reshard is None:
            reshard = self.activation_plan is None or not self.activation_plan.keeps_weights
        shard_model(model, blocks, strategy.shard_mesh, dtype, head=head, reshard_after_forward=reshard)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.resolved_dtype(self.device)
        if self.context is None and dtype == torch.bfloat16:
            return torch.autocast(self.device.type, dtype)
        return nullcontext()

    def resolved_dtype(self, device: torch.device) -> torch.dtype:
        """Returns the dtype of activations on `device`."""
        if self.compute_dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[self.compute_dtype]

    def _log_evaluated(self, name: str) -> None:
        if not self._evaluated:
            return
        local, counts = (torch.stack(column) for column in zip(*self._evaluated, strict=True))
        loss = gathered(self.trainer, local.sum()[None]).sum() / counts.sum().clamp(min=1)
        # The loss is already equal on every rank. Lightning asks for a reduction; the maximum keeps equal values.
        self.log(name, loss, prog_bar=True, sync_dist=True, reduce_fx="max")


def refused_precision(got: object) -> ConfigError:
    """Makes the error for a Trainer precision that would cast behind FSDP."""
    return ConfigError(
        "precision",
        expected="32-true, the Trainer's default",
        got=got,
        remedy="Choose the dtype with LanguageModel(compute_dtype=...): FSDP casts, not the Trainer.",
    )
