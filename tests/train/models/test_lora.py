"""LoRA on rings: adapters get the gradients of one process, train alone, and reach peft and transformers unchanged."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partialmethod
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringflash.commands import main
from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.checkpoint.load import read_state
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_layers import TrainedLayer
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.activations import ActivationCheckpointing
from ringflash.train.models.adapter_folder import load_adapter
from ringflash.train.models.lora import Lora, add_adapters, check_base, digest_of, is_adapter
from ringflash.train.models.loss import count_valid, token_losses
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_model import Run as Model
from tests.train.lightning.test_transformers_model import config_of
from tests.train.runs import Outcome, sequences, whole
from tests.train.runs import Run as Sequences

pytest.importorskip("peft")

pytestmark = [
    pytest.mark.xdist_group("lora"),
    pytest.mark.filterwarnings(
        "ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:.*resuming from a checkpoint that ended before"
    ),
]

SEED = 4
FEW = Lora(rank=4, alpha=6, targets=["q_proj", "v_proj"])
ALL = Lora(rank=3)
BATCH = 2
IN_FLOAT32 = mock.patch("ringflash.train.lightning.transformers_model.store_base")


@dataclass(frozen=True)
class Run:
    """Options of one run of `TransformersModel` with adapters on the base model in a folder."""

    lora: Lora = ALL
    dtype: ComputeDtype = "float32"
    epochs: int | None = None  # None is a single step
    data_parallel: int = 1
    checkpointing: ActivationCheckpointing = "none"
    compile_blocks: bool = False
    tied: bool = True
    resume: str | None = None
    save: str | None = None
    adapter: str | None = None
    store: bool = True  # False keeps the base model in float32, as if it trained too


def fill_adapters(model: nn.Module) -> None:
    """Gives each B other values than zeros, under which A would get no gradient."""
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in sorted(model.named_parameters()):
        if is_adapter(name) and ".lora_B." in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


class Recorded(TransformersModel):
    """Records the gradients of the first step, and unrounded losses."""

    def __init__(self, run: Run, folder: str, outcome: Outcome) -> None:
        options: dict[str, Any] = {"activation_checkpointing": run.checkpointing, "compile_blocks": run.compile_blocks}
        optimizer = OptimizerConfig(lr=3e-3, warmup_steps=1, max_steps=20)
        super().__init__(base_of(run, folder), optimizer, run.dtype, seed=SEED, lora=run.lora, **options)
        self.outcome = outcome

    def _build(self) -> Any:
        model, weights = super()._build()
        if self.lora is not None and self.lora.init_from is None:
            fill_adapters(model)
        return model, weights

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.outcome.logged.setdefault(name, []).append(float(value))
        super().log(name, value, *args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        named = self.decoder.named_parameters()
        self.outcome.gradients = self.outcome.gradients or {n: whole(p.grad) for n, p in named if p.grad is not None}


def base_of(run: Run, folder: str) -> str:
    return f"{folder}/{'tied' if run.tied else 'untied'}"


def train(run: Run, folder: str) -> Outcome:
    """Runs `run` on the ranks of the default process group, or without a ring on this process."""
    outcome = Outcome()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=RingAttentionStrategy(data_parallel_size=run.data_parallel),
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
    rank = trainer.global_rank if run.data_parallel > 1 else 0
    module = Recorded(run, folder, outcome)
    loader: DataLoader[Any] = DataLoader(
        cast("Any", sequences(Sequences(epoch_batches=2))[rank :: run.data_parallel]),
        batch_size=BATCH // run.data_parallel,
    )
    with nullcontext() if run.store else IN_FLOAT32:
        trainer.fit(module, loader, loader, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    if run.adapter is not None:
        module.save_pretrained(run.adapter)
    outcome.weights = {name: whole(p) for name, p in module.decoder.named_parameters()}
    return outcome


RUNS: dict[int, dict[str, Run]] = {
    1: {"few": Run(FEW)},
    2: {
        "few": Run(FEW),
        "all": Run(),
        "untied head": Run(Lora(rank=2, targets=["lm_head", "o_proj"]), tied=False),
        "untied": Run(FEW, tied=False),
        "data parallel": Run(data_parallel=2),
        "activation checkpointing": Run(checkpointing="block"),
        "compiled": Run(FEW, checkpointing="block", compile_blocks=True),  # test_nf4.py compiles adapters on all layers
    },
    3: {"all": Run()},
}
CASES = [(ranks, name) for ranks, runs in RUNS.items() for name in runs]


def _all_runs(folder: str, ranks: int) -> dict[str, Outcome]:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    with mock.patch.object(TrainedLayer, "compile", partialmethod(TrainedLayer.compile, backend="aot_eager")):
        outcomes = {name: train(run, folder) for name, run in RUNS[ranks].items()}
        for name, run in RUNS[ranks].items():
            outcomes[f"{name} in float64"] = train(replace(run, dtype="float64"), folder)
    if ranks == 2:
        for checkpointing in ("none", "block"):
            halves = Run(dtype="bfloat16", epochs=1, checkpointing=checkpointing)
            outcomes[f"bfloat16 {checkpointing}"] = train(halves, folder)
            outcomes[f"bfloat16 {checkpointing}, stored in float32"] = train(replace(halves, store=False), folder)
        outcomes["first half"] = train(Run(epochs=1, save=f"{folder}/half", adapter=f"{folder}/adapter"), folder)
        outcomes["straight"] = train(Run(epochs=2), folder)
        outcomes["continued"] = train(Run(replace(ALL, init_from=f"{folder}/adapter")), folder)
        outcomes["resumed"] = train(Run(epochs=2, resume=f"{folder}/half"), folder)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with two base models and another one of the same shape."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("lora")
    for seed, (name, tied) in enumerate({"tied": True, "untied": False, "other": True}.items()):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config_of(Model(tied=tied)))
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[int, dict[str, Outcome]]:
    return {ranks: run_ranks(ranks, _all_runs, str(folder), ranks)[0] for ranks in RUNS}


@cache
def reference(ranks: int, name: str, folder: Path, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of the first step of peft's own model in one process, in `dtype` with sdpa."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    run = RUNS[ranks][name]
    base: Any = AutoModelForCausalLM.from_pretrained(base_of(run, str(folder)), attn_implementation="sdpa")
    lora = run.lora
    targets = "all-linear" if lora.targets is None else [*lora.targets]
    config = LoraConfig(r=lora.rank, lora_alpha=cast("int", lora.alpha), target_modules=targets, task_type="CAUSAL_LM")
    torch.manual_seed(SEED)
    model: Any = get_peft_model(base, config)
    fill_adapters(base)
    model.to(dtype).train()
    rows = sequences(Sequences(epoch_batches=1))[:BATCH]
    input_ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    loss = token_losses(model(input_ids, use_cache=False).logits, labels).total / count_valid(labels)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in base.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_gradients_in_float64_are_those_of_one_process(
    trained: dict[int, dict[str, Outcome]], folder: Path, ranks: int, name: str
) -> None:
    outcome = trained[ranks][f"{name} in float64"]
    loss, exact = reference(ranks, name, folder, torch.float64)
    assert outcome.logged["train/loss"][0] == pytest.approx(loss, rel=1e-12)
    assert outcome.gradients.keys() == exact.keys()
    assert all(map(is_adapter, exact))
    for n, expected in exact.items():
        assert (outcome.gradients[n] - expected).abs().max() <= 1e-12, n
        assert (outcome.gradients[n] - expected).norm() <= 3e-12 * expected.norm(), n


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_gradients_in_float32_round_as_those_of_one_process(
    trained: dict[int, dict[str, Outcome]], folder: Path, ranks: int, name: str
) -> None:
    """Compares errors against float64: float32 rounds the gradients of one process by up to 1.4e-6 already."""
    outcome = trained[ranks][name]
    loss, exact = reference(ranks, name, folder, torch.float64)
    _, alone = reference(ranks, name, folder, torch.float32)
    assert outcome.logged["train/loss"][0] == pytest.approx(loss, rel=1e-6)
    assert outcome.gradients.keys() == exact.keys()
    errors = {n: outcome.gradients[n] - expected for n, expected in exact.items()}
    rounding = {n: alone[n] - expected for n, expected in exact.items()}
    largest, of_one_process = (max(x.abs().max().item() for x in all_.values()) for all_ in (errors, rounding))
    assert largest <= min(max(2 * of_one_process, 1e-6), 1e-5)
    for n, error in errors.items():
        assert error.norm() <= max(2 * rounding[n].norm().item(), 1e-6 * exact[n].norm().item()), n


def dtypes_of(weights: dict[str, Tensor]) -> dict[bool, set[torch.dtype]]:
    """Returns the dtypes of the base model, and of the adapters under True."""
    return {kind: {p.dtype for name, p in weights.items() if is_adapter(name) == kind} for kind in (False, True)}


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_the_base_model_is_stored_in_the_compute_dtype_with_the_same_bits(
    trained: dict[int, dict[str, Outcome]], checkpointing: str
) -> None:
    stored, usual = (trained[2][f"bfloat16 {checkpointing}{end}"] for end in ("", ", stored in float32"))
    assert dtypes_of(stored.weights) == {False: {torch.bfloat16}, True: {torch.float32}}
    assert dtypes_of(usual.weights) == {False: {torch.float32}, True: {torch.float32}}
    assert stored.logged == usual.logged
    assert stored.gradients.keys() == usual.gradients.keys()
    assert all(torch.equal(x, usual.gradients[name]) for name, x in stored.gradients.items())
    assert all(torch.equal(x, usual.weights[name].to(x.dtype)) for name, x in stored.weights.items())
    for name, dtype in (("all", torch.float32), ("all in float64", torch.float64)):
        assert dtypes_of(trained[2][name].weights) == {False: {dtype}, True: {dtype}}


def test_only_adapters_train(trained: dict[int, dict[str, Outcome]], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    weights = trained[2]["straight"].weights
    for name, weight in base.named_parameters():
        now = weights.get(name, weights.get(name.replace(".weight", ".base_layer.weight")))
        assert now is not None
        assert torch.equal(weight, now), name
    first = trained[2]["few"].weights | trained[2]["all"].weights
    assert all(not torch.equal(weights[name], first[name]) for name in weights if is_adapter(name))


def test_checkpoints_hold_adapters_alone_and_resume(trained: dict[int, dict[str, Outcome]], folder: Path) -> None:
    path, rest = read_state(folder / "half")
    names = json.loads((path / "tensors.json").read_text()) if (path / "tensors.json").is_file() else None
    size = sum(file.stat().st_size for file in path.iterdir())
    assert names is None or "embed_tokens" not in json.dumps(names)
    assert size < 1e6
    assert rest["base_model"] == str(folder / "tied")
    outcomes = trained[2]
    for name, weight in outcomes["straight"].weights.items():
        assert torch.equal(outcomes["resumed"].weights[name], weight), name


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None] % 61).logits


def tuned(outcome: Outcome, folder: Path) -> Any:
    """Returns the base model with the adapters of a run, without peft's files."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    add_adapters(model, ALL)
    model.load_state_dict(outcome.weights, strict=False)
    return model


def test_peft_loads_the_saved_adapters(trained: dict[int, dict[str, Outcome]], folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    before = logits_of(base)
    expected = logits_of(tuned(trained[2]["first half"], folder))
    assert torch.equal(logits_of(PeftModel.from_pretrained(base, str(folder / "adapter"))), expected)
    assert not torch.allclose(before, expected, atol=1e-2)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "tied")


def test_training_goes_on_from_a_folder_of_adapters(trained: dict[int, dict[str, Outcome]], folder: Path) -> None:
    half, continued = trained[2]["first half"], trained[2]["continued"]
    rows = sequences(Sequences(epoch_batches=1))[:BATCH]
    input_ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        loss = token_losses(tuned(half, folder).eval()(input_ids).logits, labels).total / count_valid(labels)
    assert continued.logged["train/loss"][0] == pytest.approx(loss.item(), rel=1e-6)
    assert loss < 0.95 * half.logged["train/loss"][0]
    moved = [(continued.weights[n] - half.weights[n]).abs().max() for n in half.weights if is_adapter(n)]
    assert all(0 < x < 0.05 for x in moved)


def written_by_peft(folder: Path, to: Path, base: str = "tied", **options: Any) -> None:
    """Writes a folder of adapters without any part of ringflash."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]} | options
    model = get_peft_model(
        cast("Any", AutoModelForCausalLM.from_pretrained(folder / base)), LoraConfig(task_type="CAUSAL_LM", **options)
    )
    fill_adapters(model)
    model.save_pretrained(str(to))


def begun(lora: Lora, folder: Path, base: str = "tied") -> Any:
    """Returns a base model with adapters that `lora` begins with."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / base)
    digest = digest_of(model)
    add_adapters(model, lora)
    load_adapter(model, lora, digest, base)
    return model


def test_a_folder_that_peft_wrote_begins_training(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    written_by_peft(folder, tmp_path)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    expected = logits_of(PeftModel.from_pretrained(base, str(tmp_path)))
    assert torch.equal(logits_of(begun(replace(FEW, init_from=str(tmp_path)), folder)), expected)


@pytest.mark.parametrize(
    ("lora", "base", "message"),
    [
        (ALL, "other", r"expected adapters that were trained on this base model, got adapters of another one: its"),
        (replace(ALL, rank=4), "tied", r"lora\.rank: expected 3, as .*adapter has, got 4\. Set lora\.rank to 3"),
        (replace(ALL, alpha=3), "tied", r"lora\.alpha: expected 32.*, as .*adapter has, got 3\."),
        (Lora(3, targets=["q_proj"]), "tied", r"lora\.targets: expected the 14 layers that .*, got 12 of its layers"),
    ],
)
def test_adapters_of_another_model_or_of_other_options_are_refused(
    trained: dict[int, dict[str, Outcome]], folder: Path, lora: Lora, base: str, message: str
) -> None:
    assert "first half" in trained[2]  # has written the folder
    with pytest.raises((CheckpointError, ConfigError), match=message):
        begun(replace(lora, init_from=str(folder / "adapter")), folder, base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"use_dora: expected None, as plain LoRA has, got True\. Merge these"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern: expected None, as plain LoRA has, got {'q_proj': 2}"),
        (
            {"target_modules": ["q_proj"]},
            r"lora\.targets: expected the 2 layers .*, got 2 layers without adapters",
        ),
    ],
)
def test_adapters_of_peft_that_compute_something_else_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    written_by_peft(folder, tmp_path, **options)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        begun(replace(FEW, init_from=str(tmp_path)), folder)


def test_adapters_of_other_shapes_and_damaged_ones_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    written_by_peft(folder, tmp_path)
    file, lora = tmp_path / "adapter_model.safetensors", replace(FEW, init_from=str(tmp_path))
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file({**tensors, name: torch.zeros(4, 8)}, file)
    with pytest.raises(CheckpointError, match=r"expected .*q_proj\.lora_A\.weight of shape \(4, 64\), .* got \(4, 8\)"):
        begun(lora, folder)
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="expected adapters in safetensors"):
        begun(lora, folder)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a folder with adapter_config\.json"):
        begun(lora, folder)


def test_export_writes_the_merged_model_or_the_adapters(
    trained: dict[int, dict[str, Outcome]], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    expected = logits_of(tuned(trained[2]["first half"], folder))
    export = ["export", "--checkpoint", str(folder / "half"), "--to"]
    longer = ["--max-position-embeddings", "4096"]
    assert main.main([*export, str(tmp_path / "merged"), *longer]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.max_position_embeddings == 4096
    assert torch.allclose(logits_of(merged), expected, atol=1e-5)
    assert main.main([*export, str(tmp_path / "adapter"), "--adapter"]) == 0
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    assert torch.equal(logits_of(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), expected)
    capsys.readouterr()
    assert main.main([*export, str(tmp_path / "wrong"), "--adapter", *longer]) == 2
    assert "--max-position-embeddings: expected nothing with --adapter" in capsys.readouterr().err
    assert main.main([*export, str(tmp_path / "wrong"), "--base", str(folder / "other")]) == 2
    error = capsys.readouterr().err
    assert "expected adapters that were trained on this base model, got adapters of another one" in error
    assert main.main([*export, str(tmp_path / "wrong"), "--base", str(tmp_path / "nowhere")]) == 2
    assert "expected the base model of the adapters" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def fit_alone(
    lora: Lora, base: Path, resume: str | None = None, dtype: ComputeDtype = "float32"
) -> tuple[pl.Trainer, TransformersModel]:
    """Trains one step in this process without a ring."""
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=1, max_steps=20)
    module = TransformersModel(str(base), optimizer, dtype, lora=lora)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"limit_val_batches": 0, "num_sanity_val_steps": 0, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1 if resume is None else 2, **quiet)
    loader: DataLoader[Any] = DataLoader(cast("Any", sequences(Sequences(epoch_batches=4))), batch_size=BATCH)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_one_process_without_a_ring_saves_and_resumes(folder: Path, tmp_path: Path) -> None:
    trainer, module = fit_alone(FEW, folder / "tied")
    path = str(tmp_path / "one.ckpt")
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert len(state) == 2 * 2 * 2  # A and B of two targets in two layers
    assert all(map(is_adapter, state))
    _, resumed = fit_alone(FEW, folder / "tied", path)
    before = {name: p for name, p in module.decoder.named_parameters() if is_adapter(name)}
    after = dict(resumed.decoder.named_parameters())
    assert all((after[name] - p).norm() < 0.1 for name, p in before.items())
    with pytest.raises(CheckpointError, match="got adapters of another one"):
        fit_alone(FEW, folder / "other", path)
    with pytest.raises(CheckpointError, match="lora"):
        fit_alone(ALL, folder / "tied", path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_one_process_without_a_ring_stores_linear_layers_in_the_compute_dtype(folder: Path) -> None:
    with IN_FLOAT32:
        usual = dict(fit_alone(ALL, folder / "tied", dtype="bfloat16")[1].decoder.named_parameters())
    weights = dict(fit_alone(ALL, folder / "tied", dtype="bfloat16")[1].decoder.named_parameters())
    for name, parameter in weights.items():
        is_stored = ".base_layer." in name
        assert parameter.dtype == (torch.bfloat16 if is_stored else torch.float32), name
        assert is_stored or torch.equal(parameter, usual[name])


def test_digests_tell_models_apart(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    digests = [digest_of(AutoModelForCausalLM.from_pretrained(folder / n)) for n in ("tied", "tied", "other")]
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(CheckpointError, match="expected adapters that were trained on this base model"):
        check_base("here", {"base_digest": digests[0]}, digests[2], "other")
