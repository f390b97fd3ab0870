"""LightningModule that trains a Decoder: sharding, optimizer, schedule, losses over all ranks."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ringflash as rf
from ringflash.errors import ConfigError, RingflashError
from ringflash.train.batch import all_ranks
from ringflash.train.checkpoint import compare_model_configs
from ringflash.train.loss import count_valid, token_loss
from ringflash.train.model import Decoder, ModelConfig
from ringflash.train.strategy import RingAttentionStrategy

ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]


class NonFiniteError(RingflashError, ArithmeticError):
    """A loss or gradient that is NaN or infinite; raised on every rank before the optimizer steps."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warmup and cosine decay.

    Args:
        lr: highest learning rate.
        betas: decay of the gradient's first and second moment.
        weight_decay: of matrices; norms have none.
        warmup_steps: steps of linear rise to `lr`.
        max_steps: step at which the cosine ends.
        min_lr_ratio: learning rate from there on, as a part of `lr`.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    max_steps: int = 1000
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError("lr", expected="a positive number", got=self.lr, remedy="Try 3e-4.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                "betas", expected="two numbers from 0 to below 1", got=self.betas, remedy="Try 0.9, 0.95."
            )
        if not self.weight_decay >= 0:
            raise ConfigError(
                "weight_decay", expected="0 or a positive number", got=self.weight_decay, remedy="Try 0.1."
            )
        if not 0 <= self.warmup_steps < self.max_steps:
            raise ConfigError(
                "warmup_steps",
                expected=f"from 0 to below max_steps={self.max_steps}",
                got=self.warmup_steps,
                remedy="Warm up for a few percent of the steps.",
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError("min_lr_ratio", expected="from 0 to 1", got=self.min_lr_ratio, remedy="Try 0.1.")

    def lr_scale(self, step: int) -> float:
        """The learning rate of `step`, from 0, as a part of `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min((step - self.warmup_steps) / (self.max_steps - self.warmup_steps), 1.0)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class _MicroBatch:
    """What a training step leaves for the end of its accumulation window."""

    batch_idx: int
    loss_sum: Tensor
    num_valid: Tensor


class LanguageModel(pl.LightningModule):
    """Next-token training of a `Decoder`.

    Under `RingAttentionStrategy` the blocks are sharded with FSDP2 and the sequence runs over the ring; under a
    single-device strategy the same model trains whole. Logs train/loss and train/grad_norm (before clipping) every
    optimizer step, val/loss and test/loss every epoch; losses are means over all valid tokens of all ranks.

    Args:
        model: shape of the decoder.
        optimizer: AdamW and its schedule.
        compute_dtype: of activations and gathered weights; "auto" is bfloat16 on CUDA and float32 elsewhere.
            Weights and optimizer state are kept, and gradients reduced, in float32 (float64 for "float64").
        activation_checkpointing: keep only each block's input for the backward and run the block again there.
        reshard_after_forward: free each block's gathered weights between its forward and its backward.
        seed: of the initial weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig | None = None,
        compute_dtype: ComputeDtype = "auto",
        activation_checkpointing: bool = False,
        reshard_after_forward: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model_config = model
        self.optimizer_config = optimizer or OptimizerConfig()
        self.compute_dtype: ComputeDtype = compute_dtype
        self.activation_checkpointing = activation_checkpointing
        self.reshard_after_forward = reshard_after_forward
        self.seed = seed
        self._decoder: Decoder | None = None
        self._window: list[_MicroBatch] = []
        self._evaluated: list[tuple[Tensor, Tensor]] = []

    @property
    def decoder(self) -> Decoder:
        """The model; there once `configure_model` has run."""
        if self._decoder is None:
            raise RuntimeError("The decoder exists only after configure_model.")
        return self._decoder

    @property
    def context(self) -> rf.ContextParallel | None:
        """The ring the sequence runs over; None under a single-device strategy."""
        strategy = self.trainer.strategy
        return strategy.context if isinstance(strategy, RingAttentionStrategy) else None

    def configure_model(self) -> None:
        """Builds the decoder, sharded and without storage under `RingAttentionStrategy`, whole elsewhere.

        Raises:
            ConfigError: several ranks under another strategy, or a Trainer precision that would cast behind FSDP.
        """
        if self._decoder is not None:
            return
        strategy = self.trainer.strategy
        self._check_strategy()
        compute = self._resolved_dtype(strategy.root_device)
        with torch.device("meta"):
            decoder = Decoder(self.model_config, seed=self.seed)
        decoder.to(torch.float64 if compute == torch.float64 else torch.float32)
        decoder.set_activation_checkpointing(self.activation_checkpointing)
        if isinstance(strategy, RingAttentionStrategy):
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
            if compute == torch.bfloat16:
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            options: dict[str, Any] = {"mesh": strategy.shard_mesh, "mp_policy": policy}
            for block in decoder.layers:
                fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
            fully_shard(decoder, reshard_after_forward=False, **options)
        else:
            decoder.to_empty(device=strategy.root_device)
            for module in decoder.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        self._decoder = decoder

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, fused on CUDA, and its schedule by optimizer step."""
        config = self.optimizer_config
        parameters = list(self.decoder.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        fused = parameters[0].device.type == "cuda"
        optimizer = AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)
        scheduler = LambdaLR(optimizer, config.lr_scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Local sum of token losses over the micro-batch's valid tokens on all ranks.

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
        loss_sum, num_valid = self._loss(batch)
        self._window.append(_MicroBatch(batch_idx, loss_sum.detach(), num_valid))
        return loss_sum / num_valid.clamp(min=1)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Adds the batch to val/loss."""
        self._evaluated.append(self._loss(batch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Adds the batch to test/loss."""
        self._evaluated.append(self._loss(batch))

    def on_train_epoch_start(self) -> None:
        """Forgets a window that an earlier run left unfinished."""
        self._window = []

    def on_validation_epoch_start(self) -> None:
        """Starts val/loss."""
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
        """Logs the window's loss and gradient norm; all ranks hold the same figures, so all raise or none.

        Raises:
            NonFiniteError: either is NaN or infinite.
        """
        window, self._window = self._window, []
        losses = self._gather(torch.stack([m.loss_sum for m in window]))
        loss = losses.sum() / torch.stack([m.num_valid for m in window]).sum().clamp(min=1)
        gradients = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            bad = [
                (m.batch_idx, rank)
                for rank, row in enumerate(losses)
                for m, x in zip(window, row, strict=True)
                if not math.isfinite(x.item())
            ]
            batches = sorted({batch for batch, _ in bad}) or [m.batch_idx for m in window]
            where = f", first seen on ranks {sorted({rank for _, rank in bad})}" if bad else ""
            raise NonFiniteError(
                f"step {self.trainer.global_step}, batch {', '.join(map(str, batches))}: loss {loss.item()}, "
                f"gradient norm {norm.item()}{where}. The optimizer has not stepped. Look at the batch; "
                "lower the learning rate or lengthen the warmup; resume from the last checkpoint."
            )
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        self.log("train/grad_norm", norm, on_step=True, on_epoch=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the model's shape, as plain values."""
        checkpoint["model_config"] = asdict(self.model_config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises CheckpointError when the checkpoint is of another model."""
        compare_model_configs(checkpoint.get("model_config"), asdict(self.model_config))

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        input_ids, labels = batch["input_ids"], batch["labels"]
        position_ids, num_valid = batch.get("position_ids"), batch.get("num_valid_tokens")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        with self._autocast():
            logits = self.decoder(input_ids, position_ids, self.context)
        return token_loss(logits, labels), count_valid(labels) if num_valid is None else num_valid

    def _check_strategy(self) -> None:
        strategy = self.trainer.strategy
        if not isinstance(strategy, RingAttentionStrategy) and self.trainer.world_size > 1:
            raise ConfigError(
                "strategy",
                expected='"ring_attention" with several ranks',
                got=type(strategy).__name__,
                remedy='Pass Trainer(strategy="ring_attention"); others average over ranks instead of tokens.',
            )
        if isinstance(strategy, RingAttentionStrategy) and type(strategy.precision_plugin) is not Precision:
            raise ConfigError(
                "precision",
                expected="32-true, the Trainer's default",
                got=getattr(strategy.precision_plugin, "precision", type(strategy.precision_plugin).__name__),
                remedy="Choose the dtype with LanguageModel(compute_dtype=...): FSDP casts, not the Trainer.",
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._resolved_dtype(self.device)
        if self.context is None and dtype == torch.bfloat16:
            return torch.autocast(self.device.type, dtype)
        return nullcontext()

    def _resolved_dtype(self, device: torch.device) -> torch.dtype:
        if self.compute_dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[self.compute_dtype]

    def _gather(self, local: Tensor) -> Tensor:
        """(n,) of this rank -> (world_size, n) of all, in rank order."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, RingAttentionStrategy):
            return local[None]
        return all_ranks(local, strategy.shard_mesh.get_group())

    def _log_evaluated(self, name: str) -> None:
        if not self._evaluated:
            return
        local, counts = (torch.stack(column) for column in zip(*self._evaluated, strict=True))
        loss = self._gather(local.sum()[None]).sum() / counts.sum().clamp(min=1)
        # Equal on every rank already. Lightning asks for a reduction, and the maximum leaves equal values untouched.
        self.log(name, loss, prog_bar=True, sync_dist=True, reduce_fx="max")
