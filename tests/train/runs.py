"""Small training runs through the real Trainer, for tests that call them on every rank of a gloo world."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.activations import ActivationCheckpointing
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.loss import TokenLosses, count_valid, token_losses
from ringflash.train.torchao_private import LinearDtype

MODEL = ModelConfig(vocab_size=61, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)
SEQLEN = 53
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=3, max_steps=120)


@dataclass(frozen=True)
class Run:
    """Options of one training run; data-parallel ranks divide global batches of `batch_size` sequences."""

    steps: int = 1
    micro_batches: int = 1
    batch_size: int = 2
    epoch_batches: int = 100
    dtype: ComputeDtype = "float32"
    model: ModelConfig = MODEL
    masked: str = "some"
    data_parallel: int = 1
    layout: str = "zigzag"
    max_norm: float | None = None
    max_value: float | None = None
    checkpointing: ActivationCheckpointing | None = "none"
    memory: str = "auto"
    replicate: int = 1
    compile_blocks: bool = False
    validate: bool = False
    poison: int | None = None
    resume: str | None = None
    save: str | None = None
    max_epochs: int = -1
    packed: bool = False
    optimizer: OptimizerConfig = OPTIMIZER
    linears: LinearDtype = "compute"
    reshard: bool | None = None


@dataclass
class Outcome:
    """Logged values of a run, the whole gradients of its first optimizer step, and its final weights."""

    logged: dict[str, list[float]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sequences(run: Run) -> list[dict[str, Tensor]]:
    """Returns all sequences of an epoch, equal on all ranks: noisy arithmetic progressions with some masked labels."""
    kept = Run(  # all fields that decide the sequences
        micro_batches=run.micro_batches if run.masked == "first micro-batch" else 1,
        batch_size=run.batch_size,
        epoch_batches=run.epoch_batches,
        model=run.model,
        masked=run.masked,
        packed=run.packed,
    )
    return [dict(row) for row in _sequences(kept)]


@cache
def _sequences(run: Run) -> list[dict[str, Tensor]]:
    """Makes what `sequences` returns, once for all runs of a process that have the same sequences."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(run.epoch_batches * run.batch_size):
        start, stride = torch.randint(0, 60, (2,), generator=generator)
        tokens = (start + (stride % 7 + 1) * torch.arange(SEQLEN + 1)) % run.model.vocab_size
        noise = torch.rand(SEQLEN + 1, generator=generator) < 0.1
        tokens = torch.where(noise, torch.randint(0, 60, (SEQLEN + 1,), generator=generator), tokens)
        labels = tokens[1:].clone()
        if run.masked == "some":
            labels[: 5 * (index % 4)] = -100
        elif run.masked == "tail":  # the last ranks of a contiguous layout have no valid token
            labels[SEQLEN // 4 + index :] = -100
        elif (
            run.masked == "first micro-batch" and (index // run.batch_size) % run.micro_batches == 0
        ) or run.masked == "all":
            labels[:] = -100
        rows.append({"input_ids": tokens[:-1], "labels": labels})
        if run.packed:  # four documents per sequence; some are empty or have one token
            inner = torch.randint(0, SEQLEN + 1, (3,), generator=generator).sort().values
            inner[1] = inner[0] + index % 2
            ends = torch.cat([torch.tensor([0]), inner.sort().values.clamp(max=SEQLEN), torch.tensor([SEQLEN])])
            labels[ends[1:-1][ends[1:-1] > 0] - 1] = -100  # the next token is another document's
            rows[-1]["cu_seqlens"] = ends
    return rows


def window_loss(decoder: Decoder, rows: list[dict[str, Tensor]]) -> Tensor:
    """Returns the mean loss over the valid tokens of some sequences, with each document run alone."""
    total = num_valid = torch.zeros((), dtype=torch.int64)
    for row in rows:
        ends = row.get("cu_seqlens", torch.tensor([0, SEQLEN])).tolist()
        for start, stop in pairwise(ends):
            if stop > start:
                logits = decoder(row["input_ids"][None, start:stop], torch.arange(stop - start))
                total = total + token_losses(logits, row["labels"][None, start:stop]).total
        num_valid = num_valid + count_valid(row["labels"])
    return total / num_valid.clamp(min=1)


class Data(pl.LightningDataModule):
    """Data module with the sequences of a run in order, split over data-parallel ranks, and with a counter as state."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.epochs_seen = run, 0
        self.context_length, self.batch_size = SEQLEN, run.batch_size

    def _loader(self, rows: list[dict[str, Tensor]]) -> DataLoader[Any]:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        ranks = strategy.distributed_sampler_kwargs if isinstance(strategy, RingAttentionStrategy) else {}
        mine = rows[ranks.get("rank", 0) :: ranks.get("num_replicas", 1)]
        dataset = cast("Any", mine)
        return DataLoader(dataset, batch_size=self.run.batch_size // self.run.data_parallel, num_workers=0)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(sequences(self.run))

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(sequences(replace(self.run, epoch_batches=3)))

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs_seen": self.epochs_seen + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs_seen = state_dict["epochs_seen"]


class Recorded(LanguageModel):
    """A model that records values that Lightning's own metrics would round to float32."""

    def __init__(self, run: Run, outcome: Outcome) -> None:
        options: dict[str, Any] = {"activation_checkpointing": run.checkpointing, "compile_blocks": run.compile_blocks}
        options |= {"linear_dtype": run.linears, "reshard_after_forward": run.reshard}
        super().__init__(run.model, run.optimizer, run.dtype, **options, seed=5, activation_memory=run.memory)
        self.run, self.outcome = run, outcome

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.outcome.logged.setdefault(name, []).append(float(value))
        super().log(name, value, *args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        if not self.outcome.gradients:
            named = self.decoder.named_parameters()
            self.outcome.gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        losses, num_valid = super()._loss(batch)
        if self.run.poison == self.trainer.global_rank and self.trainer.global_step == 1:
            losses = losses._replace(total=losses.total * torch.nan)
        return losses, num_valid


def train(run: Run, strategy: Any = None, data: Any = None) -> Outcome:
    """Runs `run` on the ranks of the default process group, on its own sequences or those of a data module."""
    # warnings are errors in spawned ranks; the first is Lightning's advice on loader processes for a toy data set
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own use of a name that PyTorch has moved
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    outcome = Outcome()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy
        or RingAttentionStrategy(
            data_parallel_size=run.data_parallel, layout=cast("Any", run.layout), replicate_size=run.replicate
        ),
        max_steps=run.steps if run.max_epochs == -1 else -1,
        max_epochs=run.max_epochs,
        accumulate_grad_batches=run.micro_batches,
        gradient_clip_val=run.max_norm or run.max_value,
        gradient_clip_algorithm="value" if run.max_value else "norm",
        limit_val_batches=3 if run.validate else 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = Recorded(run, outcome), data or Data(run)
    trainer.fit(module, data, ckpt_path=run.resume)
    metrics = {**trainer.callback_metrics}  # as read by callbacks such as EarlyStopping; each stage resets it
    if run.validate:
        trainer.validate(module, data, verbose=False)
        metrics |= trainer.callback_metrics
        trainer.test(module, data, verbose=False)
        metrics |= trainer.callback_metrics
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    outcome.weights = {name: whole(p) for name, p in module.decoder.named_parameters()}
    outcome.extra = {
        "epochs_seen": getattr(data, "epochs_seen", None),
        "random": torch.rand(()).item(),
        "step": trainer.global_step,
    }
    outcome.extra["metrics"] = {name: float(value) for name, value in metrics.items()}
    return outcome


def attempt(run: Run, strategy: Any = None) -> tuple[str, str] | None:
    """Returns the class and text of the run's exception on this rank, or None without an exception."""
    try:
        train(run, strategy)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def reference_gradients(run: Run, decoder: Decoder | None = None) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of the first optimizer step, from one unsharded decoder and one document at a time."""
    decoder = decoder or Decoder(run.model, seed=5)
    rows = sequences(run)[: run.batch_size * run.micro_batches]
    loss = window_loss(decoder, rows)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def train_alone(run: Run) -> list[float]:
    """Returns the losses of a plain loop: one decoder, one document at a time, AdamW, and an explicit schedule."""

    with torch.device("meta"):
        decoder = Decoder(run.model, seed=5).double()
    decoder.materialise("cpu")
    matrices = [p for p in decoder.parameters() if p.ndim > 1]
    vectors = [p for p in decoder.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    rows, size = sequences(run), run.batch_size * run.micro_batches
    windows = [rows[i : i + size] for i in range(0, len(rows), size)]
    losses = []
    for step in range(run.steps):
        scale = (step + 1) / 3 if step < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 117)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * scale
        loss = window_loss(decoder, windows[step % len(windows)])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
