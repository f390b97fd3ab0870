"""LightningModule that trains a causal language model of transformers on a ring of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.train.activations import ActivationCheckpointing, recompute
from ringflash.train.batch import check_tokens, documents_of, positions_of
from ringflash.train.loss import TokenLosses, count_valid, token_losses
from ringflash.train.nonfinite import NonFinite
from ringflash.train.optimizer import OptimizerConfig
from ringflash.train.ring_module import ComputeDtype, RingModule
from ringflash.train.strategy import RingAttentionStrategy

if TYPE_CHECKING:
    from transformers import PretrainedConfig


PASSING = ("transformers_version", "_name_or_path", "dtype", "architectures")  # not of the model itself


class TransformersModel(RingModule):
    """Next-token training of any `AutoModelForCausalLM` whose layers hand keywords down to attention.

    Batches may hold packed documents: "cu_seqlens" (batch, ndocuments + 1), of the whole sequences. The loss is of the
    logits alone: a mixture of experts is trained without the auxiliary loss of its router.

    Each rank holds the whole model on its CPU before it keeps its shard.

    Args:
        model: a configuration, for new weights, or a folder with a model's config.json and weights.
        optimizer: as in `RingModule`.
        compute_dtype: as in `RingModule`.
        activation_checkpointing: as in `RingModule`.
        reshard_after_forward: as in `RingModule`.
        seed: of new weights, and of dropout in attention.
        nonfinite: as in `RingModule`.
    """

    def __init__(
        self,
        model: PretrainedConfig | str | Path,
        optimizer: OptimizerConfig | None = None,
        compute_dtype: ComputeDtype = "auto",
        activation_checkpointing: ActivationCheckpointing = "none",
        reshard_after_forward: bool = True,
        seed: int = 0,
        nonfinite: NonFinite | None = None,
    ) -> None:
        from transformers import AutoConfig

        super().__init__(optimizer, compute_dtype, activation_checkpointing, reshard_after_forward, seed, nonfinite)
        self._folder = str(model) if isinstance(model, str | Path) else None
        self.config: Any = AutoConfig.from_pretrained(model) if isinstance(model, str | Path) else model

    def configure_model(self) -> None:
        """Builds the model, each layer sharded under `RingAttentionStrategy`, whole elsewhere.

        Raises:
            ConfigError: as `LanguageModel`.
            ArgumentError: a model that cannot run on a ring; see `ringflash.hf.check_model`.
        """
        if self._decoder is not None:
            return
        strategy = self.trainer.strategy
        self._check_strategy()
        compute = self._resolved_dtype(strategy.root_device)
        model = self._build()
        rf.hf.check_model(model)
        model.to(torch.float64 if compute == torch.float64 else torch.float32).train()
        if self.activation_checkpointing == "block":
            for layer in layers_of(model):
                # Its forward alone: FSDP's hooks wrap the checkpoint and gather the weights once for its re-run.
                layer.forward = partial(recompute, layer.forward)
        if isinstance(strategy, RingAttentionStrategy):
            self._shard(model, layers_of(model), strategy)
        else:
            model.to(strategy.root_device)
        self._decoder = model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads; a collective of all ranks."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.decoder, options=options)
        if self.trainer.is_global_zero:
            model: Any = self.decoder
            model.save_pretrained(folder, state_dict=weights)
        self.trainer.strategy.barrier()

    def _build(self) -> Any:
        from transformers import AutoModelForCausalLM

        rf.hf.register()
        options: dict[str, Any] = {"attn_implementation": rf.hf.NAME, "dtype": torch.float32}
        if self._folder is not None:
            return AutoModelForCausalLM.from_pretrained(self._folder, config=self.config, **options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # the same weights on every rank
            return AutoModelForCausalLM.from_config(self.config, **options)

    @property
    def vocab_size(self) -> int | None:
        """Token ids that the model has."""
        return getattr(self.config.get_text_config(), "vocab_size", None)

    def model_fields(self) -> dict[str, Any]:
        """The configuration, without what may differ between versions and places of one model."""
        fields = json.loads(self.config.to_json_string(use_diff=True))
        return {n: x for n, x in fields.items() if n not in PASSING}

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        input_ids, labels = batch["input_ids"], batch["labels"]
        position_ids, num_valid = torch.atleast_2d(positions_of(batch)), batch.get("num_valid_tokens")
        if self.context is None and self.vocab_size is not None:
            check_tokens(batch, self.vocab_size)
        keywords: dict[str, Any] = {"ring_context": self.context, "ring_dropout_seed": self._dropout_seed()}
        if (documents := documents_of(batch)) is not None:
            keywords["ring_documents"] = documents
        model: Any = self.decoder
        with self._autocast():
            logits = model(input_ids, position_ids=position_ids, use_cache=False, **keywords).logits
        return token_losses(logits, labels), count_valid(labels) if num_valid is None else num_valid

    def _dropout_seed(self) -> int:
        """The same on all ranks that share a sequence, another one at every micro-batch."""
        strategy = self.trainer.strategy
        data_rank = strategy.distributed_sampler_kwargs["rank"] if isinstance(strategy, RingAttentionStrategy) else 0
        words = f"{self.seed}/{self.trainer.fit_loop.total_batch_idx}/{data_rank}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) >> 1


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of a transformers model that are checkpointed, and so sharded, one by one.

    Raises:
        ConfigError: there are none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            "model",
            expected="layers of transformers' GradientCheckpointingLayer",
            got=f"none in {type(model).__name__}",
            remedy="Shard it in a LightningModule of your own, and call it with ring_context.",
        )
    return layers
