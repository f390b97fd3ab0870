"""LightningModule that trains a transformers model on pairs of answers by direct preference optimisation (DPO)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ringflash.errors import ArgumentError, CheckpointError, ConfigError
from ringflash.train.callbacks.observe import gathered
from ringflash.train.lightning.strategy import reshard
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.activations import Activations
from ringflash.train.models.lora import digest_of, without_adapters
from ringflash.train.models.loss import TokenLosses
from ringflash.train.preference.loss import dpo_losses, sum_by_document

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REFERENCE = "reference_digest"  # entry of a checkpoint
NAMES = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin")


class DpoModel(TransformersModel):
    """DPO of a `TransformersModel` on the batches of `PreferenceDataModule`, over a ring like any training.

    The reference is the model with which training begins. With `lora` it is the base model without adapters, and takes
    no memory. Without `lora` it is a second, frozen copy of the initial weights, sharded in the same way. The reference
    runs without dropout.

    Logs the metrics of `RingModule`, of which the losses are means over pairs. Beside each loss it logs means over the
    same pairs: accuracy (how often the chosen answer has the larger reward), reward_chosen, reward_rejected and
    reward_margin, under train/, val/ and test/. In accumulation windows, too, all pairs weigh the same.

    Args:
        model: as in `TransformersModel`.
        beta: scale of the rewards, beta * (log p of the policy - log p of the reference); smaller values let the policy
            move further away from the reference.
        label_smoothing: share of pairs whose answers are assumed to be swapped (cDPO), from 0 to below 0.5.
        options: further arguments of `TransformersModel`.

    Raises:
        ConfigError: as in `TransformersModel`; a value outside its range; or `lora.init_from`.
    """

    def __init__(
        self, model: PretrainedConfig | str | Path, beta: float = 0.1, label_smoothing: float = 0.0, **options: Any
    ) -> None:
        super().__init__(model, **options)
        if not 0 < beta < float("inf"):
            raise ConfigError("beta", expected="a positive number", got=beta, remedy="Try 0.1.")
        if not 0 <= label_smoothing < 0.5:
            remedy = "Try 0, or 0.1 for noisy labels."
            raise ConfigError("label_smoothing", expected="from 0 to below 0.5", got=label_smoothing, remedy=remedy)
        if self.lora is not None and self.lora.init_from is not None:
            raise ConfigError(
                "lora.init_from",
                expected="None: the reference is the model without adapters",
                got=self.lora.init_from,
                remedy="Merge these adapters first, with `ringflash export`, and pass the merged folder as the model.",
            )
        self.beta, self.label_smoothing = beta, label_smoothing
        self._frozen: list[Any] = []  # a list, so that the copy is no submodule: checkpoints do not hold it
        self._reference_digest: str | None = None  # None with `lora`: the base model is the reference
        self._rewards: list[Tensor] = []  # sums of each batch that no metric has counted yet

    @property
    def weight_copies(self) -> int:
        """Number of copies of the weights that a rank holds a shard of."""
        return 1 if self.lora else 2

    @property
    def model_config(self) -> None:
        """None: a step also runs the reference, which `Throughput` does not count."""
        return

    def configure_model(self) -> None:
        """Builds the policy, and without `lora` the reference. Raises as in `TransformersModel`."""
        super().configure_model()
        if self.lora is None and not self._frozen:
            dtype = next(self.decoder.parameters()).dtype
            plan, self.activation_plan = self.activation_plan, None  # no backward needs weights of the reference
            try:
                self._frozen.append(self._make(dtype, Activations("none")).requires_grad_(False).eval())
            finally:
                self.activation_plan = plan
            self._reference_digest = digest_of(self._frozen[0])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the digest of the reference. Raises as in `TransformersModel`."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[REFERENCE] = self._reference_digest or self._base_digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises CheckpointError when the checkpoint holds another model, or one with another reference or none."""
        super().on_load_checkpoint(checkpoint)
        saved, own = checkpoint.get(REFERENCE), self._reference_digest or self._base_digest
        if saved is None:
            remedy = (
                "Export it with `ringflash export`, and pass the folder as the model: it is then the reference too."
            )
            raise CheckpointError(
                "ckpt_path", expected="a checkpoint of a DPO run", got="one of another", remedy=remedy
            )
        if saved != own:
            raise CheckpointError(
                "ckpt_path",
                expected=f"a run whose reference is {self.init_from or 'the initial model of this one'}",
                got=f"one whose reference has digest {saved} instead of {own}",
                remedy="Pass the model with which the run began, unchanged; begin a new run for another reference.",
            )

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Makes the strategy weight micro-batches by pairs. Raises ArgumentError for a batch without pairs."""
        if "num_pairs" not in batch or "cu_seqlens" not in batch:
            raise ArgumentError(
                "batch",
                expected='"cu_seqlens" and "num_pairs" (batch,), as PreferenceDataModule makes them',
                got=", ".join(sorted(batch)),
                remedy="Use PreferenceDataModule, on a folder of `ringflash prepare --pairs`.",
            )
        ranks = 1 if self.context is None else self.context.world_size
        batch["num_valid_tokens"] = gathered(self.trainer, batch["num_pairs"].sum()[None]).sum() // ranks

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the window's rewards beside its loss. Raises as in `RingModule`."""
        batches = len(self._window)
        super().on_before_optimizer_step(optimizer)
        self._log_rewards("train", batches, on_step=True, on_epoch=False)

    def _log_evaluated(self, name: str) -> None:
        super()._log_evaluated(name)
        if self._evaluated:  # equal on every rank, like the loss
            self._log_rewards(name.partition("/")[0], len(self._evaluated), sync_dist=True, reduce_fx="max")

    def _log_rewards(self, stage: str, batches: int, **options: Any) -> None:
        # The last ones: validation runs amid a window, and an earlier run may have left a window unfinished.
        sums, self._rewards = self._rewards[-batches:], self._rewards[:-batches]
        right, chosen, rejected, pairs = gathered(self.trainer, torch.stack(sums).sum(0)).sum(0)
        values = torch.stack([right, chosen, rejected, chosen - rejected]) / pairs.clamp(min=1)
        self.log_dict(dict(zip((f"{stage}/{name}" for name in NAMES), values.float(), strict=True)), **options)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        """Returns this rank's share of the sum of the pairs' losses, and the number of pairs on all ranks."""
        with torch.no_grad():
            reference = self._reference_losses(batch)
        policy = self._token_losses(self.decoder, batch, each=True).tokens
        context, num_pairs = self.context, batch["num_pairs"][:, None]
        # A token's loss is -log p. Differences come before sums, which would round more.
        ratios = sum_by_document(reference.double() - policy.double(), batch["cu_seqlens"], context)
        rewards = self.beta * ratios.unflatten(1, (-1, 2))  # (batch, pairs, 2)
        is_pair = torch.arange(rewards.shape[1], device=rewards.device) < num_pairs  # others are empty, or padding
        losses = torch.where(is_pair, dpo_losses(rewards, self.label_smoothing), 0)
        share = 1 / (1 if context is None else context.world_size)
        found = rewards.detach().masked_fill(~is_pair[..., None], 0).flatten(0, 1)
        right = (found[:, 0] > found[:, 1]).sum()
        self._rewards.append(torch.stack([right, *found.sum(0), is_pair.sum()]) * share)
        total = (losses.sum() * share).to(policy.dtype)
        return TokenLosses(total, policy.detach()), batch["num_valid_tokens"]

    def _reference_losses(self, batch: dict[str, Tensor]) -> Tensor:
        if self._frozen:
            tokens = self._token_losses(self._frozen[0], batch).tokens
            reshard(self._frozen[0])  # no backward frees its gathered weights
            return tokens
        model = self.decoder
        was_training = model.training
        model.eval()
        with without_adapters(model):
            tokens = self._token_losses(model, batch).tokens
        model.train(was_training)
        return tokens
