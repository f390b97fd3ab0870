"""LightningModule that trains a transformers causal language model on a ring of ranks."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import ringflash as rf
from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.callbacks.nonfinite import NonFinite
from ringflash.train.checkpoint.collective import on_every_rank
from ringflash.train.lightning.batch import check_tokens, documents_of, positions_of
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype, RingModule
from ringflash.train.lightning.strategy import RingAttentionStrategy, reshard
from ringflash.train.lightning.transformers_head import states_loss, why_whole_logits
from ringflash.train.lightning.transformers_layers import TrainedLayer, layers_of
from ringflash.train.models.activations import ActivationCheckpointing, Activations, BlockActivations, HostMemory
from ringflash.train.models.adapter_folder import load_adapter, save_adapter
from ringflash.train.models.budget import AUTO
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.huggingface import from_transformers
from ringflash.train.models.lora import (
    BASE,
    BASE_DIGEST,
    LORA,
    Lora,
    adapter_size,
    add_adapters,
    base_modules,
    check_installed,
    digest_of,
    is_adapter,
    store_base,
)
from ringflash.train.models.loss import TokenLosses, count_valid, token_losses
from ringflash.train.torchao_private import LinearDtype, compile_options
from ringflash.train.weights.nf4 import LEAST_SHARE, check_nf4, store_nf4
from ringflash.train.weights.transformers_weights import (
    NotInParts,
    TransformersWeights,
    build_without_storage,
    check_in_parts,
    materialise,
    stand_in_weights,
)

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


PASSING = ("transformers_version", "_name_or_path", "dtype", "architectures")  # not properties of the model
CHUNKED_LOSS = "chunked_loss"  # a second method of the model, besides forward, for which FSDP gathers the head


class TransformersModel(RingModule):
    """Next-token training of any `AutoModelForCausalLM` with layers that pass keywords down to attention.

    Batches may hold packed documents: "cu_seqlens" (batch, ndocuments + 1), of the whole sequences. The loss uses the
    logits only: a mixture of experts is trained without the auxiliary loss of its router. The whole logits are never
    stored, unless the model changes the output of its head; a warning in the log then says so.

    Weights of a folder are read in parts: the model is built without storage, and each rank reads the slices of its
    shard from the safetensors. New weights, `lora` and folders that only transformers can load make each rank hold the
    whole model on its CPU before it keeps its shard; of a folder, a line of the log gives the reason.

    Args:
        model: a configuration, for new weights, or a folder with a model's config.json and weights.
        optimizer: as in `RingModule`.
        compute_dtype: as in `RingModule`.
        activation_checkpointing: as in `RingModule`.
        reshard_after_forward: as in `RingModule`.
        seed: seed of new weights, and of dropout in attention.
        nonfinite: as in `RingModule`.
        activation_offload: as in `RingModule`.
        compile_blocks: as in `RingModule`.
        activation_memory: as in `RingModule`.
        lora: options of LoRA; only adapters then train, and checkpoints hold them without the base model, which `model`
            must name. Its base "nf4" is QLoRA. None: all weights train.
        linear_dtype: as in `RingModule`; not with `lora`.

    Raises:
        ConfigError: as in `RingModule`; no such model, or quantised weights; or `lora` without peft, without trained
            weights, or with float8.
    """

    float32_norms, own_head = True, False

    def __init__(
        self,
        model: PretrainedConfig | str | Path,
        optimizer: OptimizerConfig | None = None,
        compute_dtype: ComputeDtype = "auto",
        activation_checkpointing: ActivationCheckpointing | None = None,
        reshard_after_forward: bool | None = None,
        seed: int = 0,
        nonfinite: NonFinite | None = None,
        activation_offload: bool = False,
        compile_blocks: bool = False,
        activation_memory: str = AUTO,
        lora: Lora | None = None,
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
        self.init_from = str(model) if isinstance(model, str | Path) else None
        self.lora, self._base_digest = lora, None
        if lora is not None:
            self._check_lora(lora)
            self.adapts_all, self.nf4 = lora.targets is None, lora.base == "nf4"
            self.strict_loading = False  # a checkpoint holds no base model
        self.config: Any = _read_config(model) if isinstance(model, str | Path) else model

    def _make(self, dtype: torch.dtype, activations: Activations) -> Any:
        """Returns the model, with each layer sharded under `RingAttentionStrategy`.

        Raises:
            ConfigError: the model lacks a target of `lora`, or `lora.init_from` has others.
            CheckpointError: `lora.init_from` has no adapters, or those of another model.
            ArgumentError: the model cannot run on a ring; see `ringflash.hf.check_model`.
            CheckpointError: on every rank, when the folder does not fit the model or a rank cannot read it.
            ConfigError: on every rank, when one cannot store the base as `lora.base` asks.
        """
        strategy = self.trainer.strategy
        if self.nf4:
            self._on_every_rank(lambda: check_nf4(strategy.root_device))
        model, weights = self._build()
        model.to(dtype).train()
        with stand_in_weights(model):
            rf.hf.check_model(model)
            why = why_whole_logits(model)
        if why is None:
            setattr(model, CHUNKED_LOSS, partial(states_loss, model))
        elif self.trainer.is_global_zero:
            log.warning("Loss: of whole logits, since %s %s", type(model).__name__, why)
        layers = layers_of(model)
        self._use_float8(layers)
        sharded = isinstance(strategy, RingAttentionStrategy)
        if self.nf4:
            share = self._on_every_rank(lambda: store_nf4(base_modules(model), strategy.root_device))[0]
            if share < LEAST_SHARE and self.trainer.is_global_zero:
                log.warning(
                    "lora.base: nf4 stores %.0f%% of the blocks' weights; the others, such as experts, are in the "
                    "compute dtype",
                    100 * share,
                )
        if self.lora is not None:
            store_base(model, layers, self.resolved_dtype(strategy.root_device), sharded=sharded)
        self._prepare(layers, activations.of_blocks(len(layers)))
        if sharded:
            self._shard(model, layers, strategy)
            if why is None:
                register_fsdp_forward_method(model, CHUNKED_LOSS)
        elif weights is None:
            model.to(strategy.root_device)
        if weights is not None:

            def read() -> None:
                materialise(model, strategy.root_device)
                weights.fill(model)

            self._on_every_rank(read)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads; a collective of all ranks.

        With `lora` the folder holds the adapters alone, for `peft.PeftModel.from_pretrained`.
        """
        if self.lora is not None:
            reshard(self.decoder)  # gathered weights are rounded
            named = {name: x for name, x in self.decoder.named_parameters() if is_adapter(name)}
            adapters = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}
            if self.trainer.is_global_zero:
                save_adapter(self.decoder, adapters, self._base, str(self._base_digest), folder)
            self.trainer.strategy.barrier()
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.decoder, options=options)
        if self.trainer.is_global_zero:
            model: Any = self.decoder
            model.save_pretrained(folder, state_dict=weights)
        self.trainer.strategy.barrier()

    def _build(self) -> tuple[Any, TransformersWeights | None]:
        """Returns the model, and the weights that it still needs if its parameters have no storage."""
        from transformers import AutoModelForCausalLM

        rf.hf.register()
        options: dict[str, Any] = {"attn_implementation": rf.hf.NAME, "dtype": torch.float32}
        if self.init_from is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)  # the same weights on every rank
                return AutoModelForCausalLM.from_config(self.config, **options), None
        try:
            return self._open(self.init_from, options)
        except NotInParts as reason:
            if self.trainer.is_global_zero:
                log.warning("Weights: each rank loads the whole of %s, since %s", self.init_from, reason)
        folder, loaded = self.init_from, []

        def load() -> None:
            loaded.append(AutoModelForCausalLM.from_pretrained(folder, config=self.config, **options))

        self._on_every_rank(load)
        model = loaded[0]
        if self.lora is not None:
            digest = self._base_digest = digest_of(model)
            add_adapters(model, self.lora, self.seed)
            if self.lora.init_from is not None:
                load_adapter(model, self.lora, digest, self._base)
        return model, None

    def _open(self, folder: str, options: dict[str, Any]) -> tuple[Any, TransformersWeights]:
        """Returns a model without storage and its weights in `folder`.

        Raises:
            ArgumentError: on every rank, as `AutoModelForCausalLM.from_config` under this attention.
            CheckpointError: on every rank, as `TransformersWeights`, or when the ranks find different tensors.
            NotInParts: on every rank, when one of them cannot read the folder in parts.
        """
        opened: list[tuple[Any, TransformersWeights]] = []

        def look() -> NotInParts | str:
            try:
                if self.lora is not None:
                    raise NotInParts("the digest of the base model and its adapters need all weights")
                check_in_parts(folder, self.config)
                model = build_without_storage(folder, self.config, **options)
                opened.append((model, TransformersWeights(folder, model, self.config)))
            except NotInParts as reason:
                return reason
            return opened[0][1].digest

        found = self._on_every_rank(look)
        for result in found:
            if not isinstance(result, str):
                raise result
        if others := [rank for rank, digest in enumerate(found) if digest != found[0]]:
            remedy = "Give all ranks the same folder."
            expected, got = "the same tensors on all ranks", f"others on ranks {others} than on rank 0"
            raise CheckpointError(folder, expected=expected, got=got, remedy=remedy)
        return opened[0]

    def _on_every_rank(self, function: Callable[[], Any]) -> list[Any]:
        """Returns the results of all ranks; an error on one rank, such as of a disk, is raised on all."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, RingAttentionStrategy):
            return [function()]
        return on_every_rank(function, Path(str(self.init_from)), strategy.cpu_group)

    def _prepare(self, layers: Sequence[nn.Module], choices: Sequence[BlockActivations]) -> None:
        """Replaces the layers' forwards with checkpointed, offloaded or compiled ones, as the arguments ask."""
        if {*choices} == {"none"} and not self.compile_blocks:
            return
        host_memory = HostMemory()
        for layer, choice in zip(layers, choices, strict=True):
            trained: Any = TrainedLayer(layer, choice, host_memory)
            layer.forward = trained
            if self.compile_blocks:
                trained.compile(options=compile_options(self.linear_dtype))

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids of the model."""
        return getattr(self.config.get_text_config(), "vocab_size", None)

    @property
    def estimated_config(self) -> ModelConfig | None:
        """Configuration of a Decoder of the same shape, for Llama, Mistral, Qwen 2 and Qwen 3; None for others."""
        try:
            return from_transformers(self.config.to_dict())
        except ConfigError:
            return None

    @property
    def model_config(self) -> ModelConfig | None:
        """Configuration by which `Throughput` counts a step's FLOPs; None if they are unknown."""
        return self.estimated_config

    def model_fields(self) -> dict[str, Any]:
        """Returns the configuration without fields that may differ between versions and locations of one model."""
        fields = json.loads(self.config.to_json_string(use_diff=True))
        adapters = {} if self.lora is None else {LORA: self.lora.fields(), BASE_DIGEST: self._base_digest}
        return {n: x for n, x in fields.items() if n not in PASSING} | adapters

    def is_saved(self, name: str) -> bool:
        """Returns whether checkpoints hold the module's tensor `name`: with `lora` its adapters alone."""
        return self.lora is None or is_adapter(name)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the model's configuration, and with `lora` the base model's name. Raises as in `RingModule`."""
        super().on_save_checkpoint(checkpoint)
        if self.lora is not None:
            checkpoint[BASE] = self._base
            checkpoint["state_dict"] = {n: x for n, x in checkpoint["state_dict"].items() if self.is_saved(n)}

    @property
    def trained_size(self) -> int | None:
        """Number of parameters that train; None if all do."""
        if self.lora is None:
            return None
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return adapter_size(AutoModelForCausalLM.from_config(self.config), self.lora)

    @property
    def _base(self) -> str:
        """Name of the base model, or the absolute path of its folder."""
        assert self.init_from is not None
        return str(Path(self.init_from).absolute()) if Path(self.init_from).is_dir() else self.init_from

    def _check_lora(self, lora: Any) -> None:
        if not isinstance(lora, Lora):
            remedy = "Write Lora(rank=16, alpha=32), from ringflash.train."
            raise ConfigError("lora", expected="a ringflash.train.Lora, or None", got=repr(lora), remedy=remedy)
        check_installed(lora)
        if self.init_from is None:
            raise ConfigError(
                "model",
                expected="a folder or name of trained weights with lora",
                got="a configuration, which makes new weights",
                remedy="Pass the base model's folder, or leave lora out.",
            )
        if self.linear_dtype != "compute":
            expected, remedy = '"compute" with lora', "Leave one out: adapters are too narrow for float8 products."
            raise ConfigError("linear_dtype", expected=expected, got=f'"{self.linear_dtype}"', remedy=remedy)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        num_valid = batch.get("num_valid_tokens")
        losses = self._token_losses(self.decoder, batch)
        return losses, count_valid(batch["labels"]) if num_valid is None else num_valid

    def _token_losses(self, model: Any, batch: dict[str, Tensor], *, each: bool = False) -> TokenLosses:
        """Returns the losses of this rank's tokens under `model`; with `each` those of single tokens have a graph."""
        input_ids, labels = batch["input_ids"], batch["labels"]
        position_ids = torch.atleast_2d(positions_of(batch))
        if self.context is None and self.vocab_size is not None:
            check_tokens(batch, self.vocab_size)
        keywords: dict[str, Any] = {"ring_context": self.context, "ring_dropout_seed": self._dropout_seed()}
        if (documents := documents_of(batch)) is not None:
            keywords["ring_documents"] = documents
        keywords |= {"position_ids": position_ids, "use_cache": False}
        with self._autocast():
            if (chunked_loss := getattr(model, CHUNKED_LOSS, None)) is not None:
                return chunked_loss(input_ids, labels, each=each, **keywords)
            return token_losses(model(input_ids, **keywords).logits, labels, each=each)

    def _dropout_seed(self) -> int:
        """Returns a seed that is equal on all ranks that share a sequence, and differs at every micro-batch."""
        strategy = self.trainer.strategy
        data_rank = strategy.distributed_sampler_kwargs["rank"] if isinstance(strategy, RingAttentionStrategy) else 0
        words = f"{self.seed}/{self.trainer.fit_loop.total_batch_idx}/{data_rank}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) >> 1


def _read_config(model: str | Path) -> Any:
    """Reads the configuration of a model from its folder, or by its name.

    Raises:
        ConfigError: no such model, or one with quantised weights.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model",
            expected="a folder or name of a model of transformers",
            got=f"{model}: {str(error).splitlines()[0].rstrip('.')}",
            remedy="Pass the folder that save_pretrained wrote, or that a download made.",
        ) from error
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ConfigError(
            "model",
            expected="weights in float32, float16 or bfloat16",
            got=f"{model}, quantised by {getattr(method, 'value', method)}",
            remedy='Pass the model before it was quantised. Lora(base="nf4") stores its linear layers in 4 bits.',
        )
    return config
