"""A transformers model fine-tuned on a ring of ranks has the gradients of a model trained on whole sequences."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_layers import TrainedLayer
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.activations import ActivationCheckpointing
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.loss import count_valid, token_losses
from ringflash.train.models.memory import TrainingShape, estimate_memory
from tests.helpers.distributed import run_ranks
from tests.train.runs import SEQLEN, Outcome, sequences, whole
from tests.train.runs import Run as Sequences

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers model")

CUTS = [0, 9, 30, SEQLEN]
SEED = 4


@dataclass(frozen=True)
class Run:
    """Options of one run of `TransformersModel` on a tiny model of `family`."""

    family: str = "Qwen3"
    tied: bool = True
    dtype: ComputeDtype = "float32"
    compile_blocks: bool = False
    validate: bool = False
    epochs: int | None = None  # None is a single step
    layout: str = "zigzag"
    masked: str = "some"
    packed: bool = False
    dropout: float = 0.0
    rope: dict[str, Any] | None = None
    checkpointing: ActivationCheckpointing = "none"
    resume: str | None = None
    save: str | None = None
    folder: str | None = None
    export: str | None = None


BY_LENGTH: dict[str, Any] = {  # RoPE that changes its frequencies for sequences longer than half of SEQLEN
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": SEQLEN // 2 + 1,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
}
CHANGING = {"Gemma2": {"final_logit_softcapping": 2.0}, "Granite": {"logits_scaling": 8.0}}  # change the logits


def config_of(run: Run) -> Any:
    import transformers

    return getattr(transformers, f"{run.family}Config")(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_dropout=run.dropout,
        initializer_range=0.1,
        tie_word_embeddings=run.tied,
        **CHANGING.get(run.family, {}),
        **({} if run.rope is None else {"rope_parameters": run.rope}),
    )


def rows(run: Run) -> list[dict[str, Tensor]]:
    extra = {"cu_seqlens": torch.tensor(CUTS)} if run.packed else {}
    return [row | extra for row in sequences(Sequences(masked=run.masked, epoch_batches=2))]


class Recorded(TransformersModel):
    """Records the gradients of the first step, unrounded losses, and the number of tokens in each call of the head."""

    def __init__(self, run: Run, outcome: Outcome) -> None:
        optimizer = OptimizerConfig(lr=3e-3, warmup_steps=1, max_steps=20)
        options: dict[str, Any] = {"activation_checkpointing": run.checkpointing, "compile_blocks": run.compile_blocks}
        super().__init__(run.folder or config_of(run), optimizer, run.dtype, seed=SEED, **options)
        self.outcome = outcome

    def configure_model(self) -> None:
        super().configure_model()
        calls = self.outcome.extra.setdefault("logits", [])
        head = self.decoder.get_output_embeddings()
        head.register_forward_hook(lambda _module, _args, logits: calls.append(logits.shape[:-1].numel()))

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
    if run.validate:
        outcome.logged["val/loss"] = []
        trainer.limit_val_batches = 1
        trainer.validate(module, loader, verbose=False)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    if run.export is not None:
        module.save_pretrained(run.export)
    outcome.weights = {name: whole(p) for name, p in module.decoder.named_parameters()}
    return outcome


def _all_runs(folder: str) -> dict[str, Outcome]:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    # torch warns when its compiler is imported, and when the compiler inspects the input of the second block
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    with mock.patch.object(TrainedLayer, "compile", partialmethod(TrainedLayer.compile, backend="aot_eager")):
        outcomes = {name: train(run) for name, run in RUNS.items()}
    outcomes["validated"] = train(Run(validate=True))
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
    "tied float64": Run(dtype="float64"),
    "untied": Run(family="Llama", tied=False),
    "untied float64": Run(family="Llama", tied=False, dtype="float64", checkpointing="block"),
    "capped": Run(family="Gemma2"),
    "scaled float64": Run(family="Granite", dtype="float64"),
    "RoPE by length": Run(layout="contiguous", rope=BY_LENGTH, dtype="float64"),
    "compiled": Run(checkpointing="block", compile_blocks=True, dtype="float64"),
    "compiled packed": Run(packed=True, compile_blocks=True, dtype="float64"),
    "compiled dropout": Run(dropout=0.3, checkpointing="block", compile_blocks=True),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("transformers")
    return folder, run_ranks(2, _all_runs, str(folder))[0]


def reference(run: Run, seed: int = 0, weights: dict[str, Tensor] | None = None) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of the first step of an unsharded model with its own attention.

    With dropout it uses ringflash's attention on one device. So does Gemma 2, because transformers has no fused
    attention for it.
    """
    from transformers import AutoModelForCausalLM

    rf.hf.register()
    torch.manual_seed(SEED)
    attention = rf.hf.NAME if run.dropout or run.family == "Gemma2" else "sdpa"
    model: Any = AutoModelForCausalLM.from_config(config_of(run), attn_implementation=attention).train()
    model.to(torch.float64 if run.dtype == "float64" else torch.float32)
    if weights is not None:
        model.load_state_dict(weights, strict=False)  # tied weights have a single name
    batch = {name: torch.stack([row[name] for row in rows(run)[:2]]) for name in ("input_ids", "labels")}
    keywords = {"ring_dropout_seed": seed} if run.dropout else {}
    cuts = CUTS if run.packed else [0, SEQLEN]
    parts = [model(batch["input_ids"][:, a:b], use_cache=False, **keywords).logits for a, b in itertools.pairwise(cuts)]
    loss = token_losses(torch.cat(parts, dim=1), batch["labels"]).total / count_valid(batch["labels"])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_an_unsharded_model_s(trained: tuple[Path, dict[str, Outcome]], name: str) -> None:
    outcome = trained[1][name]
    loss, gradients = reference(RUNS[name], dropout_seed())
    exact = RUNS[name].dtype == "float64"
    assert outcome.logged["train/loss"][0] == pytest.approx(loss, rel=1e-13 if exact else 1e-6)
    assert outcome.gradients.keys() == gradients.keys()
    for n, expected in gradients.items():
        assert (outcome.gradients[n] - expected).norm() <= (1e-12 if exact else 3e-6) * expected.norm(), n


@pytest.mark.parametrize("name", RUNS)
def test_logits_are_whole_only_where_the_model_changes_them(
    trained: tuple[Path, dict[str, Outcome]], name: str
) -> None:
    calls = trained[1][name].extra["logits"]
    assert len(calls) == (RUNS[name].family in CHANGING)
    assert all(tokens >= 2 * (SEQLEN // 2) for tokens in calls)  # a rank's whole share of two sequences


def test_validates_after_training(trained: tuple[Path, dict[str, Outcome]]) -> None:
    outcome = trained[1]["validated"]
    loss, _ = reference(Run(), weights=outcome.weights)
    assert outcome.logged["val/loss"] == [pytest.approx(loss, rel=1e-6)]
    assert loss < outcome.logged["train/loss"][0]
    assert outcome.extra["logits"] == []


def dropout_seed() -> int:
    """Returns the dropout seed of the very first micro-batch."""
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


def configured(**options: Any) -> TransformersModel:
    """Returns a configured module on one CPU device."""
    module = TransformersModel(options.pop("model", config_of(Run())), compute_dtype="float32", **options)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    module.configure_model()
    return module


def test_one_line_says_that_logits_are_whole(caplog: pytest.LogCaptureFixture) -> None:
    configured()
    assert "whole logits" not in caplog.text
    configured(model=config_of(Run(family="Gemma2")))
    line = "Loss: of whole logits, since Gemma2ForCausalLM changes its logits after its head"
    assert caplog.messages.count(line) == 1


def test_offloading_is_refused_where_it_is_of_no_use() -> None:
    with pytest.raises(ConfigError, match='activation_offload: expected activation_checkpointing="block" with it'):
        TransformersModel(config_of(Run()), activation_offload=True)
    with pytest.raises(ConfigError, match="activation_offload: expected False on a CPU"):
        configured(activation_offload=True, activation_checkpointing="block")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_memory_is_estimated_for_models_of_a_known_shape(family: str) -> None:
    module = configured(model=config_of(Run(family=family)), activation_checkpointing="block")
    config = ModelConfig(
        vocab_size=61,
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=96,
        tie_embeddings=True,
        qkv_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
    )
    shape = TrainingShape(0, compute_dtype=torch.float32, checkpointing="block", copied=False)
    estimate = module.memory_estimate()
    assert estimate == estimate_memory(config, shape)
    assert estimate is not None
    assert estimate.weights == 4 * sum(p.numel() for p in module.decoder.parameters())
    assert configured(model=config_of(Run(family="Gemma2"))).memory_estimate() is None
