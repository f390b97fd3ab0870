"""A transformers model fine-tuned on a ring of ranks has the gradients of one that trains whole."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import ringflash as rf
from ringflash.train.activations import ActivationCheckpointing
from ringflash.train.loss import count_valid, token_loss
from ringflash.train.optimizer import OptimizerConfig
from ringflash.train.strategy import RingAttentionStrategy
from ringflash.train.transformers_model import TransformersModel
from tests.distributed import run_ranks
from tests.train.runs import SEQLEN, Outcome, sequences, whole
from tests.train.runs import Run as Sequences

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers model")

CUTS = [0, 9, 30, SEQLEN]
SEED = 4


@dataclass(frozen=True)
class Run:
    """One run of `TransformersModel` on a tiny Qwen 3."""

    epochs: int | None = None  # None is a single step
    layout: str = "zigzag"
    masked: str = "some"
    packed: bool = False
    dropout: float = 0.0
    checkpointing: ActivationCheckpointing = "none"
    resume: str | None = None
    save: str | None = None
    folder: str | None = None
    export: str | None = None


def qwen3(dropout: float = 0.0) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_dropout=dropout,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )


def rows(run: Run) -> list[dict[str, Tensor]]:
    extra = {"cu_seqlens": torch.tensor(CUTS)} if run.packed else {}
    return [row | extra for row in sequences(Sequences(masked=run.masked, epoch_batches=2))]


class Recorded(TransformersModel):
    """Keeps the first step's gradients, and losses unrounded."""

    def __init__(self, run: Run, outcome: Outcome) -> None:
        optimizer = OptimizerConfig(lr=3e-3, warmup_steps=1, max_steps=20)
        model = run.folder or qwen3(run.dropout)
        super().__init__(model, optimizer, "float32", activation_checkpointing=run.checkpointing, seed=SEED)
        self.outcome = outcome

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.outcome.logged.setdefault(name, []).append(float(value))
        super().log(name, value, *args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        named = self.decoder.named_parameters()
        self.outcome.gradients = self.outcome.gradients or {n: whole(p.grad) for n, p in named if p.grad is not None}


def train(run: Run) -> Outcome:
    """Runs `run` on the ranks of the default process group."""
    outcome = Outcome()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=RingAttentionStrategy(layout=cast("Any", run.layout)),
        max_steps=-1 if run.epochs else 1,
        max_epochs=run.epochs,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Recorded(run, outcome)
    loader: DataLoader[Any] = DataLoader(cast("Any", rows(run)), batch_size=2)
    trainer.fit(module, loader, loader, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    if run.export is not None:
        module.save_pretrained(run.export)
    outcome.weights = {name: whole(p) for name, p in module.decoder.named_parameters()}
    return outcome


def _all_runs(folder: str) -> dict[str, Outcome]:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    outcomes = {name: train(run) for name, run in RUNS.items()}
    outcomes["first half"] = train(Run(epochs=1, save=f"{folder}/half", export=f"{folder}/exported"))
    outcomes["resumed"] = train(Run(epochs=2, resume=f"{folder}/half"))
    outcomes["straight"] = train(Run(epochs=2))
    outcomes["from a folder"] = train(Run(folder=f"{folder}/exported"))
    return outcomes


RUNS = {
    "zigzag": Run(),
    "contiguous": Run(layout="contiguous", masked="tail"),
    "packed": Run(packed=True),
    "packed contiguous": Run(packed=True, layout="contiguous", masked="tail"),
    "activation checkpointing": Run(checkpointing="block"),
    "dropout": Run(dropout=0.3, checkpointing="block"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("transformers")
    return folder, run_ranks(2, _all_runs, str(folder))[0]


def reference(run: Run, seed: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first step, from a whole model on its own attention; with dropout on one device's."""
    from transformers import AutoModelForCausalLM

    rf.hf.register()
    torch.manual_seed(SEED)
    attention = rf.hf.NAME if run.dropout else "sdpa"
    model: Any = AutoModelForCausalLM.from_config(qwen3(run.dropout), attn_implementation=attention).train()
    batch = {name: torch.stack([row[name] for row in rows(run)[:2]]) for name in ("input_ids", "labels")}
    keywords = {"ring_dropout_seed": seed} if run.dropout else {}
    cuts = CUTS if run.packed else [0, SEQLEN]
    parts = [model(batch["input_ids"][:, a:b], use_cache=False, **keywords).logits for a, b in itertools.pairwise(cuts)]
    loss = token_loss(torch.cat(parts, dim=1), batch["labels"]) / count_valid(batch["labels"])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_an_unsharded_model_s(trained: tuple[Path, dict[str, Outcome]], name: str) -> None:
    outcome = trained[1][name]
    loss, gradients = reference(RUNS[name], dropout_seed())
    assert outcome.logged["train/loss"][0] == pytest.approx(loss, rel=1e-6)
    assert outcome.gradients.keys() == gradients.keys()
    for n, expected in gradients.items():
        assert (outcome.gradients[n] - expected).norm() <= 3e-6 * expected.norm(), n


def dropout_seed() -> int:
    """That of the first micro-batch of all."""
    return int.from_bytes(hashlib.blake2b(f"{SEED}/0/0".encode(), digest_size=8).digest()) >> 1


def test_resumes(trained: tuple[Path, dict[str, Outcome]]) -> None:
    _, outcomes = trained
    for name, weight in outcomes["straight"].weights.items():
        assert torch.equal(outcomes["resumed"].weights[name], weight)


def test_exports_and_starts_from_a_folder(trained: tuple[Path, dict[str, Outcome]]) -> None:
    from transformers import AutoModelForCausalLM

    folder, outcomes = trained
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "exported")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, outcomes["first half"].weights[name])
    assert outcomes["from a folder"].logged["train/loss"][0] < outcomes["zigzag"].logged["train/loss"][0]
