"""LightningModule that trains a Decoder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ringflash.errors import ConfigError
from ringflash.train.callbacks.nonfinite import NonFinite
from ringflash.train.lightning.batch import check_tokens, documents_of, positions_of
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype, RingModule
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.activations import ActivationCheckpointing, Activations
from ringflash.train.models.budget import AUTO
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.huggingface import read_config
from ringflash.train.models.loss import TokenLosses, count_valid
from ringflash.train.models.weights import Weights
from ringflash.train.torchao_private import LinearDtype, compile_options


class LanguageModel(RingModule):
    """Next-token training of a `Decoder`.

    Under `RingAttentionStrategy` the blocks are sharded with FSDP2 and the sequence runs over the ring. Under a
    single-device strategy the same model trains whole. `RingModule` lists the metrics that it logs.

    Args:
        model: shape of the decoder; None takes it from `init_from`.
        optimizer: as in `RingModule`.
        compute_dtype: as in `RingModule`.
        activation_checkpointing: as in `RingModule`.
        activation_offload: as in `RingModule`.
        compile_blocks: as in `RingModule`.
        reshard_after_forward: as in `RingModule`.
        seed: seed of the initial weights.
        nonfinite: as in `RingModule`.
        init_from: transformers folder, with config.json and safetensors, that holds the initial weights.
        activation_memory: as in `RingModule`.
        linear_dtype: as in `RingModule`.

    Raises:
        ConfigError: neither a model nor a folder, a folder of another kind of model, or as in `RingModule`.
        CheckpointError: a folder without a model.
    """

    in_pieces = True

    def __init__(
        self,
        model: ModelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        compute_dtype: ComputeDtype = "auto",
        activation_checkpointing: ActivationCheckpointing | None = None,
        activation_offload: bool = False,
        compile_blocks: bool = False,
        reshard_after_forward: bool | None = None,
        seed: int = 0,
        nonfinite: NonFinite | None = None,
        init_from: str | None = None,
        activation_memory: str = AUTO,
        linear_dtype: LinearDtype = "compute",
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            compute_dtype=compute_dtype,
            activation_checkpointing=activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
            seed=seed,
            nonfinite=nonfinite,
            activation_offload=activation_offload,
            compile_blocks=compile_blocks,
            activation_memory=activation_memory,
            linear_dtype=linear_dtype,
        )
        if model is None and init_from is None:
            raise ConfigError("model", expected="a shape, or init_from", got=None, remedy="Set model or init_from.")
        self.model_config = read_config(str(init_from)) if model is None else model
        self.init_from = init_from
        self.weights = None if init_from is None else Weights(init_from)

    @property
    def decoder(self) -> Decoder:
        """The model; available after `configure_model` has run."""
        return super().decoder

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self.model_config.vocab_size

    @property
    def estimated_config(self) -> ModelConfig:
        """The model's shape."""
        return self.model_config

    def model_fields(self) -> dict[str, Any]:
        """Returns the model's shape as plain values."""
        return asdict(self.model_config)

    def configure_model(self) -> None:
        """Builds the model as a `RingModule` does, and makes its layers round their weights where FSDP is left out."""
        super().configure_model()
        strategy = self.trainer.strategy
        rounds = isinstance(strategy, RingAttentionStrategy) and self.rounds_weights(strategy.world_size)
        # Set each time: another strategy, under which autocast rounds the weights, may have built the model.
        self.decoder.round_weights(self.resolved_dtype(strategy.root_device) if rounds else None)

    def _make(self, dtype: torch.dtype, activations: Activations) -> Decoder:
        """Returns the decoder, without storage under `RingAttentionStrategy`."""
        strategy = self.trainer.strategy
        with torch.device("meta"):
            decoder = Decoder(self.model_config, seed=self.seed, weights=self.weights)
        decoder.to(dtype)
        self._use_float8(decoder.layers)
        decoder.keep_activations(**activations._asdict())
        if self.compile_blocks:
            decoder.compile_blocks(options=compile_options(self.linear_dtype))
        if not isinstance(strategy, RingAttentionStrategy):
            decoder.materialise(strategy.root_device)
        elif not self.rounds_weights(strategy.world_size):
            self._shard(decoder, decoder.layers, strategy, decoder.lm_head)
        return decoder

    def rounds_weights(self, world_size: int) -> bool:
        """Returns whether layers round their weights themselves, and FSDP does not shard the model.

        That is so on one rank, unless `reshard_after_forward` says what FSDP does with the weights that it gathers.
        """
        return world_size == 1 and self.reshard_after_forward is None

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        input_ids, labels = batch["input_ids"], batch["labels"]
        num_valid = batch.get("num_valid_tokens")
        if self.context is None:  # RingAttentionStrategy has checked the batch on the CPU already
            check_tokens(batch, self.vocab_size)
        with self._autocast():
            losses = self.decoder(
                input_ids, positions_of(batch), self.context, documents=documents_of(batch), labels=labels
            )
        return losses, count_valid(labels) if num_valid is None else num_valid
