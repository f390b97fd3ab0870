"""`ringflash finetune`: LoRA from the command line, going on from adapters, errors of other models and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ringflash.commands.main import main
from tests.helpers.programs import output_of
from tests.train.command_line import COMMAND, CONFIG, write_config

# Lightning calls a jsonargparse method by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
needs_peft = pytest.mark.usefixtures("peft")

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def peft() -> None:
    pytest.importorskip("peft")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a folder with a model `base`, and the configuration config.yaml of a LoRA run on it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=257, num_hidden_layers=1, **SHAPE))
    model.save_pretrained("base")
    optimizer = {"lr": 0.05, "warmup_steps": 2}
    module = {"model": "base", "optimizer": optimizer, "lora": {"rank": 4, "alpha": 8}}
    del (config := CONFIG | {"model": module})["summary"]
    write_config(tmp_path, config)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    """Changes fields of the base model's configuration."""
    path = folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@needs_peft
@pytest.mark.timeout(1200)
def test_adapters_train_resume_and_begin_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fit(*more: str, ranks: int | None = None) -> str:
        return output_of(["-m", COMMAND, "finetune", "fit", "--config", "config.yaml", *more], folder, ranks=ranks)

    out = fit(ranks=2)
    assert all(text in out for text in ("first loss", "held-out loss", "tokens/s", "runs/test/checkpoints/last"))
    assert "sample" not in out
    first, last = (float(out.split(f"{name} loss")[1].split()[0]) for name in ("first", "last"))
    assert last < first
    assert "first loss" in fit("--ckpt_path=last", "--trainer.max_steps=14", "--trainer.devices=1")
    assert main(["export", "--checkpoint", "runs/test/checkpoints/last", "--to", "adapter", "--adapter"]) == 0
    assert "adapter: adapters of " in capsys.readouterr().out
    out = fit("--model.lora.init_from=adapter", "--trainer.devices=1", "--trainer.max_steps=2")
    assert float(out.split("first loss")[1].split()[0]) < first - 0.5 * (first - last)


@needs_peft
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.model=other"], "model: expected a folder or name of a model of transformers, got other: "),
        (["--model.model=PreTrainedConfig"], "model: expected a folder or name of trained weights with lora"),
        (["--model.lora.rank=0"], "lora.rank: expected an integer of at least 1, got 0"),
        (["--model.lora.ranks=3"], "Did you mean rank?"),
        (["--trainer.max_steps=many"], "See `ringflash finetune fit --help`."),
        (["--model.lora.targets=[qproj]"], "lora.targets: expected names of linear layers of LlamaForCausalLM"),
        (["--model.lora.init_from=base"], "lora.init_from base: expected a folder with adapter_config.json"),
    ],
)
def test_errors(
    folder: Path,
    args: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["finetune", "fit", "--config", "config.yaml", "--trainer.devices=1", *args]) == 2
    assert message in capsys.readouterr().err


def test_quantised_weights_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert main(["finetune", "fit", "--config", "config.yaml", "--model.lora=null"]) == 2
    error = capsys.readouterr().err
    assert "model: expected weights in float32, float16 or bfloat16, got base, quantised by bitsandbytes. " in error
    assert 'Lora(base="nf4")' in error


def test_train_names_finetune_for_its_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "fit", "--config", "config.yaml"]) == 2
    assert "model.model: expected the shape of a decoder, got base. Run `ringflash finetune`" in capsys.readouterr().err
    decoder = write_config(folder, CONFIG)
    assert main(["train", "fit", "--config", str(decoder), "--model.lora.rank=4"]) == 2
    error = capsys.readouterr().err
    assert "model.lora: expected nothing: LanguageModel trains all its weights, got options of LoRA" in error
    decoder.write_text(yaml.safe_dump(CONFIG | {"model": CONFIG["model"] | {"lora": {"rank": 4}}}))
    assert main(["train", "fit", "--config", str(decoder)]) == 2
    assert "Run `ringflash finetune` with these arguments" in capsys.readouterr().err


@needs_peft
def test_the_memory_of_a_run_counts_what_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan-memory", "--config", "config.yaml", "--gpu-memory", "1", "--json"]
    assert main(plan) == 0
    lora = json.loads(capsys.readouterr().out)["bytes"]["chosen"]
    assert main([*plan, "--model.lora=null"]) == 0
    full = json.loads(capsys.readouterr().out)["bytes"]["chosen"]
    ends = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48)  # widths of q, k, v, o, gate, up, down
    bytes_a_rank = 4 * (4 * ends) // 2  # float32, rank 4, shared by two ranks
    assert (lora["gradients"], lora["optimizer"]) == (bytes_a_rank, 2 * bytes_a_rank)
    assert lora["weights"] == full["weights"] + bytes_a_rank
    assert full["optimizer"] == 2 * full["weights"]


def test_the_memory_of_another_shape_is_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, hidden_act="gelu")
    plan = ["plan-memory", "--config", "config.yaml", "--gpu-memory", "1", "--model.lora=null"]
    assert main(plan) == 2
    assert "model: expected the shape of Llama, Mistral, Qwen 2 or Qwen 3, got another one, of base" in (
        capsys.readouterr().err
    )
