"""Safetensors of whole models and of shards, and errors for damaged or unsuitable folders."""

from __future__ import annotations

import json
import textwrap
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ringflash as rf
from ringflash.commands import main
from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.commands.export import save
from ringflash.train.commands.train import RingCLI
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import ModelConfig, RopeScaling
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.huggingface import read_config
from ringflash.train.models.loss import count_valid, token_losses
from ringflash.train.models.weights import Weights
from ringflash.train.weights.tensor_files import COMPARED_ROWS, SINGLE, TensorFiles, local_part
from tests.helpers.distributed import run_ranks
from tests.train.runs import SEQLEN, Data, Run, sequences, whole

CONFIG = ModelConfig(
    vocab_size=61,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=97,
    rope_theta=1000.0,
    tie_embeddings=True,
    head_dim=32,
    qk_norm=True,
    sliding_window=9,
    sliding_layers=(1,),
    rope_scaling=RopeScaling("dynamic", 4.0, original_max_position_embeddings=16),
    max_position_embeddings=16,
)


def random_tensors(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    shapes = {name: p.shape for name, p in Decoder(config).named_parameters()}
    generator = torch.Generator().manual_seed(3)
    return {n: 0.2 * torch.randn(shape, generator=generator) + ("norm" in n) for n, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(random_tensors(), CONFIG, tmp_path / "model", max_file_bytes=40_000)
    return tmp_path / "model"


def test_written_in_parts_and_read_whole(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 44_000 for file in files)
    assert json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(
        4 * tensor.numel() for tensor in random_tensors().values()
    )
    decoder = Decoder(read_config(folder), weights=Weights(folder))
    assert all(torch.equal(p, random_tensors()[name]) for name, p in decoder.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_is_written(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(61, 64, 2, 4, 2, 96, qkv_bias=True, tie_embeddings=tied, max_position_embeddings=64)
    tensors = random_tensors(config)
    save(tensors, config, tmp_path / "model", "bfloat16", max_file_bytes=30_000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.bfloat16
    assert not any(info.values()), info
    decoder = Decoder(config)
    decoder.load_state_dict({name: tensor.bfloat16() for name, tensor in tensors.items()})
    x = torch.arange(50)[None] % 61
    with torch.no_grad():
        torch.testing.assert_close(decoder(x, torch.arange(50)), model.float()(x).logits, atol=1e-4, rtol=0)


def _ranks(folder: str, saved: str) -> dict[str, Any]:
    """Returns the weights and logits of a decoder that ranks load in parts, and its loss by the Trainer."""
    world_size = dist.get_world_size()
    with torch.device("meta"):
        decoder = Decoder(read_config(folder), weights=Weights(folder)).double()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in decoder.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    decoder.materialise("cpu")
    outcome: dict[str, Any] = {"weights": {name: whole(p) for name, p in decoder.named_parameters()}}
    context = rf.ContextParallel(mesh)
    x = torch.arange(SEQLEN)[None] % 61
    with torch.no_grad():
        local = decoder(context.shard(x), context.positions(SEQLEN), context)
    outcome["logits"] = context.unshard(local)

    two = init_device_mesh("cpu", (world_size, 1))
    for shape in ((7, 5), (2, 3), (3, 4)):
        full = torch.arange(shape[0] * shape[1]).view(shape)
        for placements in (
            (Replicate(), Shard(0)),
            (Shard(0), Replicate()),
            (Shard(0), Shard(0)),
            (Shard(1), Shard(0)),
        ):
            tensor = distribute_tensor(full, two, placements)
            assert isinstance(tensor, DTensor)
            assert torch.equal(full[local_part(tensor)], tensor.to_local())

    # Lightning's advice on loader processes, and its use of a name that PyTorch has moved
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=RingAttentionStrategy(),
        limit_val_batches=3,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LanguageModel(init_from=folder, compute_dtype="float64")
    trainer.validate(module, Data(Run(batch_size=1)), verbose=False)
    outcome["loss"] = trainer.callback_metrics["val/loss"].item()
    trainer.save_checkpoint(saved)
    return outcome


def test_ranks_read_their_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_ranks(2, _ranks, str(folder), str(tmp_path / "saved"))[0]
    expected = {name: tensor.double() for name, tensor in random_tensors().items()}
    assert expected.keys() == outcome["weights"].keys()
    assert all(torch.equal(outcome["weights"][name], tensor) for name, tensor in expected.items())
    decoder = Decoder(CONFIG).double()
    decoder.load_state_dict(expected)
    with torch.no_grad():
        logits = decoder(torch.arange(SEQLEN)[None] % 61, torch.arange(SEQLEN))
        rows = sequences(Run(batch_size=1, epoch_batches=3))
        losses = [
            token_losses(decoder(row["input_ids"][None], torch.arange(SEQLEN)), row["labels"][None]).total
            for row in rows
        ]
    torch.testing.assert_close(outcome["logits"], logits, atol=1e-11, rtol=0)
    mean = sum(losses) / sum(count_valid(row["labels"]) for row in rows)
    assert outcome["loss"] == pytest.approx(float(mean), rel=1e-6)  # Lightning logs float32

    exported = tmp_path / "exported"
    command = ["export", "--checkpoint", str(tmp_path / "saved"), "--to", str(exported), "--dtype", "bfloat16"]
    assert main.main(command) == 0
    assert "qwen3" in capsys.readouterr().out
    stored = load_file(exported / "model.safetensors")
    assert torch.equal(
        stored["model.layers.1.self_attn.q_norm.weight"], expected["layers.1.self_attn.q_norm.weight"].bfloat16()
    )
    assert read_config(exported).rope_scaling == CONFIG.rope_scaling
    assert main.main(command) == 2
    assert "expected nothing there yet" in capsys.readouterr().err


def spoil(folder: Path, how: str) -> None:
    names = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / names["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    if how == "missing":
        del tensors["model.norm.weight"], names["weight_map"]["model.norm.weight"]
    elif how == "shape":
        tensors["model.norm.weight"] = torch.ones(63)
    elif how == "extra":
        tensors["model.score.weight"] = torch.ones(3)
        names["weight_map"]["model.score.weight"] = file.name
    elif how == "dtype":
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    elif how == "not in its file":
        del tensors["model.norm.weight"]
    elif how == "elsewhere":
        names["weight_map"]["model.norm.weight"] = "../model.safetensors"
    elif how == "pickle":
        names["weight_map"]["model.norm.weight"] = "model.bin"
    save_file(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "no file":
        file.unlink()
    elif how == "index":
        (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"expected model.norm.weight of shape \(64,\), got no such tensor"),
        ("shape", r"expected model.norm.weight of shape \(64,\), got \(63,\)"),
        ("extra", "got 1 more, the first model.score.weight"),
        ("dtype", "model.norm.weight: expected one of .*, got I8"),
        ("not in its file", "expected a tensor model.norm.weight, got none in model-0"),
        ("elsewhere", "got ../model.safetensors"),
        ("pickle", "got model.bin"),
        ("truncated", "expected a file of safetensors, got unreadable"),
        ("no file", "expected a file of safetensors, got no such file"),
        ("index", "expected an index of tensors, got unreadable"),
    ],
)
def test_folders_that_are_not_the_models(folder: Path, how: str, message: str) -> None:
    Decoder(CONFIG, weights=Weights(folder))
    spoil(folder, how)
    with pytest.raises(CheckpointError, match=message):
        Decoder(CONFIG, weights=Weights(folder))


def test_no_folder_and_pickled_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="a folder without"):
        Weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pickled weights, pytorch_model.bin. Unpickling can run code"):
        Weights(tmp_path)


def test_what_older_folders_hold_beside_the_parameters(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in random_tensors().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    decoder = Decoder(CONFIG, weights=Weights(tmp_path))
    assert torch.equal(decoder.norm.weight, tensors["model.norm.weight"])
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight equal to the embedding"):
        Decoder(CONFIG, weights=Weights(tmp_path))


@pytest.mark.parametrize("shape", [(), (0, 2), (1,), (COMPARED_ROWS + 1, 2)])
def test_stored_tensors_are_compared(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.ones(shape)
    other = x.clone()
    other.view(-1)[-1:] = 2
    save_file({"x": x, "same": x.clone(), "other": other, "longer": torch.ones(*shape, 2)}, tmp_path / SINGLE)
    files = TensorFiles(tmp_path)
    assert files.are_equal("x", "same")
    assert files.are_equal("x", "other") == (x.numel() == 0)
    assert not files.are_equal("x", "longer")


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ringflash.train.commands.export.write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(random_tensors(), CONFIG, tmp_path / "model")
    assert not list(tmp_path.iterdir())


# Lightning calls a jsonargparse method by its deprecated name.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_command_line_takes_a_folder_or_a_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingCLI, "_run_subcommand", lambda self, subcommand: None)
    args = ["fit", "--trainer.max_steps=200", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    args += ["--data.corpus=stdlib", "--data.context_length=64"]
    rope = "--model.model.rope_scaling"
    shape = yaml.safe_dump(json.loads(json.dumps(asdict(CONFIG))))
    (folder.parent / "shape.yaml").write_text(f"model:\n  model:\n{textwrap.indent(shape, '    ')}")
    written = RingCLI([*args[:1], "--config", str(folder.parent / "shape.yaml"), *args[1:]], []).model
    assert written.model_config == CONFIG
    assert written.weights is None
    taken = RingCLI([*args, f"--model.init_from={folder}"], []).model
    assert taken.model_config == replace(CONFIG, family="qwen3")
    assert taken.weights is not None
    with pytest.raises(ConfigError, match=r"rope_scaling.factor: expected at least 1, got 0.5"):
        RingCLI([*args[:1], "--config", str(folder.parent / "shape.yaml"), *args[1:], f"{rope}.factor=0.5"], [])
    with pytest.raises(ConfigError, match="expected a shape, or init_from"):
        RingCLI(args, [])
