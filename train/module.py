"""LightningModule that trains a Decoder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ringflash.errors import ConfigError
from ringflash.train.activations import ActivationCheckpointing
from ringflash.train.batch import check_tokens, documents_of, positions_of
from ringflash.train.huggingface import read_config
from ringflash.train.loss import TokenLosses, count_valid
from ringflash.train.memory import GIB, MemoryEstimate, TrainingShape, check_memory, estimate_memory
from ringflash.train.model import Decoder
from ringflash.train.model_config import ModelConfig
from ringflash.train.nonfinite import NonFinite
from ringflash.train.optimizer import OptimizerConfig
from ringflash.train.ring_module import ComputeDtype, RingModule
from ringflash.train.strategy import RingAttentionStrategy
from ringflash.train.weights import Weights


class LanguageModel(RingModule):
    """Next-token training of a `Decoder`.

    Under `RingAttentionStrategy` the blocks are sharded with FSDP2 and the sequence runs over the ring; under a
    single-device strategy the same model trains whole. What it logs: see `RingModule`.

    Args:
        model: shape of the decoder; None takes it from `init_from`.
        optimizer: as in `RingModule`.
        compute_dtype: as in `RingModule`.
        activation_checkpointing: as in `RingModule`.
        activation_offload: what "block" keeps lies in the host's memory meanwhile.
        compile_blocks: compile each block's forward and backward with torch.compile, when training begins.
        reshard_after_forward: as in `RingModule`.
        seed: of the initial weights.
        nonfinite: as in `RingModule`.
        init_from: folder of transformers', with config.json and safetensors, whose weights to begin with.

    Raises:
        ConfigError: neither a model nor a folder, or a folder of another kind of model.
        CheckpointError: a folder without a model.
    """

    def __init__(
        self,
        model: ModelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        compute_dtype: ComputeDtype = "auto",
        activation_checkpointing: ActivationCheckpointing = "none",
        activation_offload: bool = False,
        compile_blocks: bool = False,
        reshard_after_forward: bool = True,
        seed: int = 0,
        nonfinite: NonFinite | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(optimizer, compute_dtype, activation_checkpointing, reshard_after_forward, seed, nonfinite)
        if model is None and init_from is None:
            raise ConfigError("model", expected="a shape, or init_from", got=None, remedy="Set model or init_from.")
        self.model_config = read_config(str(init_from)) if model is None else model
        self.weights = None if init_from is None else Weights(init_from)
        self.activation_offload, self.compile_blocks = activation_offload, compile_blocks

    @property
    def decoder(self) -> Decoder:
        """The model; there once `configure_model` has run."""
        return super().decoder

    @property
    def vocab_size(self) -> int:
        """Token ids that the model has."""
        return self.model_config.vocab_size

    def model_fields(self) -> dict[str, Any]:
        """The model's shape."""
        return asdict(self.model_config)

    def configure_model(self) -> None:
        """Builds the decoder, sharded and without storage under `RingAttentionStrategy`, whole elsewhere.

        Raises:
            ConfigError: several ranks under another strategy, a Trainer precision that would cast behind FSDP,
                offloading without a GPU, or training that cannot fit into the GPU's memory.
        """
        if self._decoder is not None:
            return
        strategy = self.trainer.strategy
        self._check_strategy()
        if self.activation_offload and strategy.root_device.type == "cpu":
            raise ConfigError(
                "activation_offload",
                expected="False on a CPU",
                got=True,
                remedy="Activations are in the host's memory already.",
            )
        compute = self._resolved_dtype(strategy.root_device)
        if strategy.root_device.type == "cuda" and self.trainer.state.fn == TrainerFn.FITTING:
            estimate = self.memory_estimate()
            available = torch.cuda.get_device_properties(strategy.root_device).total_memory
            if self.trainer.is_global_zero:
                print(f"Memory: {estimate}, of {available / GIB:.2f}", flush=True)
            check_memory(estimate, available)
        with torch.device("meta"):
            decoder = Decoder(self.model_config, seed=self.seed, weights=self.weights)
        decoder.to(torch.float64 if compute == torch.float64 else torch.float32)
        decoder.keep_activations(self.activation_checkpointing, offload=self.activation_offload)
        if self.compile_blocks:
            decoder.compile_blocks()
        if isinstance(strategy, RingAttentionStrategy):
            self._shard(decoder, decoder.layers, strategy)
        else:
            decoder.materialise(strategy.root_device)
        self._decoder = decoder

    def memory_estimate(self) -> MemoryEstimate:
        """What training under the Trainer's strategy takes at least, on one GPU.

        Activations are counted where the data module has `context_length` and `batch_size`, as TextDataModule.
        """
        strategy, data = self.trainer.strategy, self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        compute = self._resolved_dtype(strategy.root_device)
        context, data_parallel, shard, gathered = 1, 1, 1, False
        if isinstance(strategy, RingAttentionStrategy):
            context, shard = strategy.context.world_size, strategy.shard_size
            data_parallel = strategy.world_size // context
            gathered = shard > 1 or compute == torch.bfloat16
        seqlen, batch_size = (getattr(data, name, None) or 0 for name in ("context_length", "batch_size"))
        shape = TrainingShape(
            tokens=(seqlen // context) * (batch_size // data_parallel),
            shard_size=shard,
            compute_dtype=compute,
            checkpointing=self.activation_checkpointing,
            offload=self.activation_offload,
            reshard_after_forward=self.reshard_after_forward,
            gathered=gathered,
            compiled=self.compile_blocks,
        )
        return estimate_memory(self.model_config, shape)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        input_ids, labels = batch["input_ids"], batch["labels"]
        num_valid = batch.get("num_valid_tokens")
        if self.context is None:  # a ring's strategy has looked at the batch while it was on the CPU
            check_tokens(batch, self.vocab_size)
        with self._autocast():
            losses = self.decoder(
                input_ids, positions_of(batch), self.context, documents=documents_of(batch), labels=labels
            )
        return losses, count_valid(labels) if num_valid is None else num_valid
