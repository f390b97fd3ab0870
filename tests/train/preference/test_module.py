"""DPO over rings: the loss and its gradients are those of one process that runs each conversation alone."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringflash.errors import ArgumentError, CheckpointError, ConfigError
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.lora import Lora, add_adapters, base_modules, is_adapter, without_adapters
from ringflash.train.preference.module import DpoModel
from ringflash.train.weights.nf4 import round_nf4
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_model import Run as Model
from tests.train.lightning.test_transformers_model import config_of
from tests.train.models.test_lora import fill_adapters
from tests.train.runs import Outcome, whole

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.xdist_group("dpo"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

SEQLEN, SEED, BETA = 61, 4, 0.3
LORA = Lora(rank=3, alpha=6)
# Bounds of the documents of each row: pairs, then room without labels. Micro-batches hold 3 and 1 pairs.
ROWS = [[0, 9, 20, 41, SEQLEN, SEQLEN], [0, 17, 40, SEQLEN, SEQLEN, SEQLEN], [0, 30, 55, 61, 61, 61], [0] + 5 * [61]]


@dataclass(frozen=True)
class Run:
    """Options of one run of `DpoModel` on a tiny model: a step of two micro-batches, or more steps."""

    lora: bool = False
    base: Literal["compute", "nf4"] = "compute"
    family: str = "Llama"
    dtype: ComputeDtype = "float64"
    data_parallel: int = 1
    layout: str = "zigzag"
    smoothing: float = 0.0
    perturbed: bool = True
    validated: bool = False  # after each micro-batch
    steps: int = 1
    save: bool = False
    resume: bool = False
    seed: int = SEED


RUNS = {
    "full": Run(),
    "full float32": Run(dtype="float32", smoothing=0.1),
    "LoRA": Run(lora=True, smoothing=0.1),
    "LoRA float32": Run(lora=True, dtype="float32", layout="contiguous"),
    "QLoRA": Run(lora=True, base="nf4"),
    "whole logits": Run(family="Granite", layout="striped"),
    "data parallel": Run(data_parallel=2),
    "validated": Run(lora=True, smoothing=0.1, validated=True),
}
ON_THREE = ("full", "LoRA float32", "whole logits")  # one of each layout; the others need more than one rank
CASES = [
    (ranks, name)
    for ranks in (1, 2, 3)
    for name, run in RUNS.items()
    if run.data_parallel in (1, ranks) and (ranks < 3 or name in ON_THREE)
]


def rows() -> list[dict[str, Tensor]]:
    generator, made = torch.Generator().manual_seed(1), []
    for row, ends in enumerate(ROWS):
        tokens = torch.randint(0, 61, (SEQLEN,), generator=generator)
        labels, pairs = torch.full((SEQLEN,), -100), (2, 1, 1, 0)[row]
        for document in range(2 * pairs):
            begin, end = ends[document], ends[document + 1]
            labels[begin + 3 + row : end - 1] = tokens[begin + 4 + row : end]  # a prompt, then the answer
        bounds = {"cu_seqlens": torch.tensor(ends), "num_pairs": torch.tensor(pairs)}
        made.append({"input_ids": tokens, "labels": labels} | bounds)
    return made


def perturb(model: nn.Module) -> None:
    """Moves the weights of the policy away from those of the reference."""
    generator = torch.Generator().manual_seed(SEED)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)


class Recorded(DpoModel):
    """Records the gradients of the first step, and unrounded metrics."""

    def __init__(self, run: Run, folder: str, outcome: Outcome) -> None:
        super().__init__(
            f"{folder}/base" if run.lora else model_of(run),
            BETA,
            run.smoothing,
            optimizer=OptimizerConfig(lr=2e-3, warmup_steps=1, max_steps=20),
            compute_dtype=run.dtype,
            seed=run.seed,
            lora=replace(LORA, base=run.base) if run.lora else None,
        )
        self.run, self.outcome = run, outcome

    def _build(self) -> Any:
        model, weights = super()._build()
        if self.run.perturbed and self.run.lora:
            fill_adapters(model)
        elif self.run.perturbed and self._decoder is None:
            perturb(model)
        return model, weights

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.outcome.logged.setdefault(name, []).append(float(value))
        super().log(name, value, *args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        named = self.decoder.named_parameters()
        self.outcome.gradients = self.outcome.gradients or {n: whole(p.grad) for n, p in named if p.grad is not None}


def model_of(run: Run) -> Any:
    return config_of(Model(family=run.family, tied=False))


def train(run: Run, folder: str, name: str) -> Outcome:
    """Runs `run` on the ranks of the default process group."""
    outcome = Outcome()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=RingAttentionStrategy(data_parallel_size=run.data_parallel, layout=cast("Any", run.layout)),
        max_epochs=run.steps,  # of one step each
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if run.validated else 0,
        val_check_interval=1 if run.validated else None,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank = trainer.global_rank if run.data_parallel > 1 else 0
    module = Recorded(run, folder, outcome)
    batches: DataLoader[Any] = DataLoader(
        cast("Any", rows()[rank :: run.data_parallel]), batch_size=2 // run.data_parallel
    )
    module._rewards.append(torch.ones(4))  # as of a validation that an error ended: no metric counts it
    trainer.fit(module, batches, batches, ckpt_path=f"{folder}/{name}" if run.resume else None)
    if run.save:
        trainer.save_checkpoint(f"{folder}/{name}")
    if run.steps > 1:
        trainer.limit_val_batches = 1.0
        trainer.validate(module, batches, verbose=False)
    outcome.weights = {n: whole(p) for n, p in module.decoder.named_parameters()}
    return outcome


def ignore_lightning() -> None:
    """Ignores warnings of Lightning and transformers about themselves."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before")


def _all_runs(folder: str) -> dict[str, Outcome]:
    ignore_lightning()
    exact_norms(pytest.MonkeyPatch())
    world_size = torch.distributed.get_world_size()
    outcomes = {name: train(RUNS[name], folder, name) for ranks, name in CASES if ranks == world_size}
    if world_size == 1:
        for lora, name in ((False, "full"), (True, "LoRA")):
            outcomes[f"long {name}"] = train(Run(lora=lora, perturbed=False, steps=4), folder, name)
            outcomes[f"half {name}"] = train(Run(lora=lora, perturbed=False, steps=2, save=True), folder, name)
            outcomes[f"resumed {name}"] = train(Run(lora=lora, perturbed=False, steps=4, resume=True), folder, name)
    return outcomes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Outcome]]]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("dpo")
    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_config(model_of(Run()))
    model.save_pretrained(folder / "base")
    return folder, {size: run_ranks(size, _all_runs, str(folder))[0] for size in (1, 2, 3)}


def exact_norms(patch: pytest.MonkeyPatch) -> None:
    """Makes norms compute in the dtype of their inputs: in float32, they round gradients by the scale of the loss."""
    from transformers.models.granite.modeling_granite import GraniteRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for norm in (GraniteRMSNorm, LlamaRMSNorm):
        patch.setattr(norm, "forward", forward)


def log_probabilities(model: Any, row: dict[str, Tensor]) -> Tensor:
    """Returns log p of the labels of each of a row's conversations, each alone in the model."""
    sums = []
    for begin, end in list(pairwise(row["cu_seqlens"].tolist()))[: 2 * int(row["num_pairs"])]:
        log_p = model(row["input_ids"][None, begin:end]).logits[0].log_softmax(-1)
        labels = row["labels"][begin:end]
        sums.append(log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0][labels >= 0].sum())
    return torch.stack(sums) if sums else torch.zeros(0)


@cache
def reference(run: Run, folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns metrics and gradients by the published formula, in float64 and with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    def build() -> Any:
        if run.lora:
            model: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
            if run.base == "nf4":
                round_nf4(base_modules(model.requires_grad_(False)))
        else:
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(model_of(run))
        return model.train()

    policy, frozen = build(), build().double()
    if run.lora:
        add_adapters(policy, LORA, SEED)
        fill_adapters(policy)
    else:
        perturb(policy)
    policy.double()
    ratios = [log_probabilities(policy, row) - log_probabilities(frozen, row).detach() for row in rows()]
    chosen, rejected = BETA * torch.cat(ratios).unflatten(0, (-1, 2)).T
    margin, e = chosen - rejected, run.smoothing
    loss = -((1 - e) * margin.sigmoid().log() + e * (1 - margin.sigmoid()).log()).mean()
    loss.backward()
    metrics = {"loss": loss, "accuracy": (margin > 0).double().mean(), "reward_margin": margin.mean()}
    metrics |= {"reward_chosen": chosen.mean(), "reward_rejected": rejected.mean()}
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {f"train/{name}": float(value.detach()) for name, value in metrics.items()}, gradients


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_loss_and_gradients_are_those_of_the_formula(
    trained: tuple[Path, dict[int, dict[str, Outcome]]], ranks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact_norms(monkeypatch)
    outcome, run = trained[1][ranks][name], RUNS[name]
    metrics, gradients = reference(run, trained[0])
    exact = run.dtype == "float64"
    assert outcome.logged["train/loss"] == [pytest.approx(metrics["train/loss"], rel=0, abs=1e-12 if exact else 1e-6)]
    for metric, value in metrics.items():
        assert outcome.logged[metric] == [pytest.approx(value, rel=0, abs=1e-6)], metric
    assert outcome.gradients.keys() == gradients.keys()
    for n, expected in gradients.items():
        assert (outcome.gradients[n] - expected).abs().max() <= (1e-12 if exact else 1e-6), n
    if run.lora:
        assert all(is_adapter(n) for n in gradients)


@pytest.mark.parametrize("name", ["full", "LoRA"])
def test_training_lowers_the_loss_and_raises_accuracy(
    trained: tuple[Path, dict[int, dict[str, Outcome]]], name: str
) -> None:
    outcome = trained[1][1][f"long {name}"]
    assert outcome.logged["train/loss"][0] == pytest.approx(0.693147, rel=1e-6)
    assert outcome.logged["train/reward_margin"][0] == pytest.approx(0, abs=1e-12)
    losses = [*outcome.logged["train/loss"], *outcome.logged["val/loss"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5
    assert outcome.logged["train/accuracy"][0] == 0
    assert outcome.logged["val/accuracy"] == [1]
    assert outcome.logged["val/reward_margin"][0] > 0.5


@pytest.mark.parametrize("name", ["full", "LoRA"])
def test_a_resumed_run_keeps_the_first_reference(
    trained: tuple[Path, dict[int, dict[str, Outcome]]], name: str
) -> None:
    long, resumed = (trained[1][1][f"{kind} {name}"] for kind in ("long", "resumed"))
    assert resumed.logged["train/loss"] == long.logged["train/loss"][2:]
    assert all(torch.equal(weight, resumed.weights[n]) for n, weight in long.weights.items())


def _resume_with_another_reference(folder: str) -> None:
    ignore_lightning()
    run = Run(perturbed=False, steps=4, resume=True)
    train(run, folder, "full")  # the digest is the same on another number of ranks
    with pytest.raises(
        CheckpointError, match="expected a run whose reference is the initial model of this one, got one"
    ):
        train(replace(run, seed=SEED + 1), folder, "full")


def test_another_reference_is_refused(trained: tuple[Path, dict[int, dict[str, Outcome]]]) -> None:
    run_ranks(2, _resume_with_another_reference, str(trained[0]))


def test_a_checkpoint_of_other_training_is_refused() -> None:
    module = DpoModel(model_of(Run()))
    with pytest.raises(
        CheckpointError, match="ckpt_path: expected a checkpoint of a DPO run, got one of another. Export"
    ):
        module.on_load_checkpoint({"model_config": module.model_fields()})


def test_adapters_run_again_after_the_reference() -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_config(model_of(Run())).eval()
    tokens = torch.arange(8)[None]
    base = model(tokens).logits
    add_adapters(model, LORA, SEED)
    fill_adapters(model)
    adapted = model(tokens).logits
    with torch.no_grad(), without_adapters(model):
        assert torch.equal(model(tokens).logits, base)
    assert torch.equal(model(tokens).logits, adapted)
    assert not torch.equal(adapted, base)


@pytest.mark.parametrize(("lora", "copies"), [(None, 2), (LORA, 1)], ids=["full", "LoRA"])
def test_memory_is_planned_for_the_reference_too(lora: Lora | None, copies: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_of(Run()).save_pretrained(tmp_path)
    estimates = []
    for kind in (TransformersModel, DpoModel):
        module = kind(tmp_path, lora=lora)
        module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        estimates.append(module.memory_estimate())
    alone, both = (estimate.parts for estimate in estimates if estimate is not None)
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(module.config).parameters())
    assert both == alone | {"weights": alone["weights"] + 4 * (copies - 1) * parameters}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta: expected a positive number, got 0.0"),
        ({"beta": float("inf")}, "beta: expected a positive number, got inf"),
        ({"label_smoothing": 0.5}, "label_smoothing: expected from 0 to below 0.5, got 0.5"),
        ({"lora": Lora(init_from="adapters")}, "lora.init_from: expected None: the reference is the model without"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model_of(Run()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        DpoModel(tmp_path, **options)


def test_a_batch_without_pairs_is_refused() -> None:
    module = DpoModel(model_of(Run()))
    with pytest.raises(ArgumentError, match="batch: expected .* got input_ids, labels. Use PreferenceDataModule"):
        module.on_train_batch_start({name: rows()[0][name] for name in ("input_ids", "labels")}, 0)
