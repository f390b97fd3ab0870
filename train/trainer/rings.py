"""Rings of ranks for loops of accelerate: the rows of each ring, the shard of each rank, and the loss of all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash.errors import ArgumentError, ConfigError
from ringflash.train.accelerate_private import DATA, RING, shard_data_over_rings
from ringflash.train.exchange import Place, Purpose
from ringflash.train.lightning.batch import agree_on_batch, check_batch, check_tokens, document_positions, documents_of
from ringflash.train.models.loss import count_valid
from ringflash.train.trainer.batch import shifted, whole_sequences
from ringflash.train.trainer.head import HeadLoss
from ringflash.train.trainer.order import share_order

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)

WRAPPERS = ("NO", "MULTI_GPU", "MULTI_CPU")  # accelerate's names of a single process, and of DDP
SAME_ROWS = (
    "Prepare the loader with the accelerator, after the rings are made, and let datasets and collators make no random "
    "choices that differ between processes."
)
LIGHTNING = "Train with ringflash.train.TransformersModel under RingAttentionStrategy, which shards models with FSDP2."


class AcceleratorRing:
    """Rings of the ranks of an Accelerator, for a loop with a causal language model of transformers under DDP.

    From then on, loaders that the accelerator prepares give the ranks of a ring the same rows, and each ring other
    rows, in rank 0's order. Creating it is a collective of all processes, and so is preparing a loader.

    Args:
        accelerator: an `accelerate.Accelerator`, before it prepares loaders.
        context_parallel_size: ranks of a ring, which share each sequence; it divides the number of processes. None:
            all processes are one ring.
        layout: "zigzag", "contiguous" or "striped"; see `ContextParallel`.
        transport: as in `ContextParallel`.
        seed: seed of dropout in attention.

    Raises:
        ConfigError: a size that does not divide the processes, or an accelerator of one process where more were
            started, with DeepSpeed, FSDP or parallelism of its own, with dispatch_batches=True, or with
            even_batches=False and several rings.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        context_parallel_size: int | None = None,
        *,
        layout: str = "zigzag",
        transport: str = "auto",
        seed: int = 0,
    ) -> None:
        self.accelerator, self.seed = accelerator, seed
        self._check_processes()
        processes, size = accelerator.num_processes, context_parallel_size
        if size is not None and (not isinstance(size, int) or size < 1 or processes % size):
            remedy = "Choose the number of ranks that share a sequence, or start another number of processes."
            expected = f"a divisor of the {processes} processes, or None"
            raise ConfigError("context_parallel_size", expected=expected, got=size, remedy=remedy)
        if layout not in ("zigzag", "contiguous", "striped"):
            remedy = "Choose one of these: a batch is cut before any mask is known."
            raise ConfigError("layout", expected="zigzag, contiguous or striped", got=repr(layout), remedy=remedy)
        self.ring_size = size or processes
        self.num_rings = processes // self.ring_size
        self._check_settings()
        accelerator.dataloader_config.dispatch_batches = False  # by default rank 0 would read iterable data for all
        self._cpu_group: dist.ProcessGroup | None = None
        self._vocab_size: int | None = None
        self._head: HeadLoss | None = None
        self._forwards = 0
        self._warned_of_repeats = False
        if not dist.is_initialized():
            self.context = rf.ContextParallel.local(1)
            return
        device = accelerator.device.type
        mesh = init_device_mesh(device, (self.num_rings, self.ring_size), mesh_dim_names=(DATA, RING))
        group = cast("dist.ProcessGroup", dist.group.WORLD if device == "cpu" else dist.new_group(backend="gloo"))
        self._cpu_group = group
        # A loader with state restores the state of its own sampler.
        then = None if accelerator.use_stateful_dataloader else partial(share_order, group=group)
        shard_data_over_rings(accelerator, mesh, then)
        self.context = rf.ContextParallel(mesh[RING], layout, transport)

    def _check_processes(self) -> None:
        started = dist.get_world_size() if dist.is_initialized() else 1
        found = self.accelerator.num_processes
        if found != started:
            expected = f"one of the {started} processes that were started"
            remedy = "On CPUs pass Accelerator(cpu=True), or TrainingArguments(use_cpu=True)."
            raise ConfigError("accelerator", expected=expected, got=f"{found} process", remedy=remedy)

    def _check_settings(self) -> None:
        accelerator = self.accelerator
        kind = accelerator.distributed_type.name
        if kind not in WRAPPERS:
            raise ConfigError("accelerator", expected="one process, or DDP", got=kind, remedy=LIGHTNING)
        if accelerator.parallelism_config is not None:
            remedy = "Leave it out: context_parallel_size makes the rings."
            raise ConfigError("parallelism_config", expected="None", got="one of accelerate", remedy=remedy)
        if accelerator.dispatch_batches:
            remedy = "Leave it out: each rank reads the rows of its ring."
            raise ConfigError("dispatch_batches", expected="None or False", got=True, remedy=remedy)
        if not accelerator.even_batches and self.num_rings > 1:
            remedy = "Leave it out: a ring that runs out of batches would stop the others."
            raise ConfigError("even_batches", expected="True with several rings", got=False, remedy=remedy)

    def use_ring_attention(self, model: Any) -> None:
        """Makes a model of transformers compute with ring attention, in place, and checks that it can.

        Call it before `accelerator.prepare(model)`. A PeftModel is changed inside.

        Raises:
            ConfigError: a model with another loss than that of the next token.
            ArgumentError: the model cannot run on a ring; see `ringflash.hf.check_model`.
        """
        rf.hf.register()
        from transformers import PreTrainedModel

        inside = model.get_base_model() if hasattr(model, "get_base_model") else model
        kind = getattr(inside, "loss_type", None) if isinstance(inside, PreTrainedModel) else type(inside).__name__
        if kind not in (None, "ForCausalLM"):
            remedy = "Train it without a ring: labels and losses of other kinds are not cut along the sequence."
            raise ConfigError("model", expected="a causal language model of transformers", got=kind, remedy=remedy)
        config = inside.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            remedy = "Set it to False: the loss of a router needs the counts of the whole sequence."
            raise ConfigError("config.output_router_logits", expected="False", got=True, remedy=remedy)
        inside.set_attn_implementation(rf.hf.NAME)
        rf.hf.check_model(inside)
        self._head = HeadLoss(inside)
        if self._head.why_whole is not None and self.accelerator.is_main_process:
            log.warning("Loss: of whole logits, since %s %s", type(inside).__name__, self._head.why_whole)
        self._vocab_size = getattr(config, "vocab_size", None)

    def count_valid_tokens(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Returns the number of labels to predict in batches of all rings, an int64 scalar; a collective.

        Args:
            batches: the batches of this rank until the next step of the optimizer.
        """
        labels = [x for batch in batches if isinstance(x := batch.get("labels"), Tensor) and x.ndim == 2]
        none = torch.zeros(0, dtype=torch.int64, device=self.accelerator.device)
        counted = self.context.count_valid_tokens([shifted(x).to(none.device) for x in labels] or [none])
        return counted // self.ring_size  # the ranks of a ring have counted the same rows

    def token_mean(self, model: Any, batch: Mapping[str, Any], *, num_valid_tokens: Tensor | int | None = None):
        """Returns the mean loss of a batch over the valid tokens of all rings; a collective of all processes.

        `loss` is for `accelerator.backward`, which divides it by the steps of accumulation; `value` is for logs.

        Args:
            model: the prepared model, after `use_ring_attention`.
            batch: the rows of this ring, uncut, as a collator of transformers makes them; labels are not shifted.
            num_valid_tokens: labels of the whole accumulation from `count_valid_tokens`. The values of its batches
                then add up to the mean, and each token has the same weight. None: the labels of this batch alone.

        Raises:
            ConfigError: `use_ring_attention` was not called.
            ArgumentError: a batch that cannot be honoured; see `whole_sequences`.
            PeerFailed: the batch of another rank raised.
            RankMismatch: the ranks of a ring hold different rows, or the rings have unequal numbers of batches.
        """
        if self._head is None:
            remedy = "Call use_ring_attention(model) before accelerator.prepare(model)."
            raise ConfigError("model", expected="one with ring attention", got=type(model).__name__, remedy=remedy)
        purpose = Purpose.TRAINING_BATCH if model.training else Purpose.VALIDATION_BATCH
        is_last = self.accelerator.gradient_state.end_of_dataloader
        whole, num_valid = self._agreed(batch, Place(purpose, is_last=is_last))
        device, documents = self.accelerator.device, documents_of(whole)
        input_ids, labels = (self.context.shard(whole[name]).to(device) for name in ("input_ids", "labels"))
        positions = self.context.positions(whole["input_ids"].shape[1])[None]
        if documents is not None:
            positions = document_positions(whole["cu_seqlens"], positions[0])
        given: dict[str, Any] = {"position_ids": positions.to(device), "use_cache": False}
        given |= {"ring_context": self.context, "ring_dropout_seed": self._dropout_seed(), "ring_documents": documents}
        total = self._head.total(model, labels, input_ids=input_ids, **given)
        count = num_valid if num_valid_tokens is None else num_valid_tokens
        # One loss stands for those of all tokens of this rank, which are counted already.
        mean = self.context.token_mean(total[None], labels.new_zeros(1), num_valid_tokens=count)
        if num_valid_tokens is None:
            return mean
        return replace(mean, loss=mean.loss * self.accelerator.gradient_accumulation_steps)

    def _agreed(self, batch: Any, place: Place) -> tuple[dict[str, Tensor], int]:
        """Returns the batch's whole sequences, and the valid tokens of all rings.

        An error on one rank is raised on all, before any of them waits.
        """
        whole, error = None, None
        try:
            whole = whole_sequences(batch, self.ring_size)
        except Exception as raised:  # any error, because the other ranks wait in the agreement
            error = raised
        if self._cpu_group is None:
            if error is not None:
                raise error
            assert whole is not None
            check_batch(whole, 1)
            if self._vocab_size is not None:
                check_tokens(whole, self._vocab_size)
            return whole, int(count_valid(whole["labels"]))
        try:
            vocab_size, group = self._vocab_size, self._cpu_group
            found = agree_on_batch(whole, group, self.ring_size, vocab_size, remedy=SAME_ROWS, place=place)
        except ArgumentError as raised:
            raise error or raised from None
        assert whole is not None
        if found.is_repeated and not self._warned_of_repeats:
            self._warned_of_repeats = True
            log.warning("All %d rings hold the same rows: prepare the loader with the accelerator", self.num_rings)
        return whole, found.num_valid

    def _dropout_seed(self) -> int:
        """Returns a seed that is equal on the ranks of a ring, and differs at each forward."""
        self._forwards += 1
        ring = self.accelerator.process_index // self.ring_size
        words = f"{self.seed}/{self._forwards}/{ring}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) >> 1

    def restart_dropout(self, forwards: int) -> None:
        """Continues the seeds of dropout after `forwards` calls of `token_mean`, as after a checkpoint is loaded."""
        self._forwards = forwards
