"""A folder of transformers read in parts: equal to from_pretrained, in little memory, with one error on all ranks."""

from __future__ import annotations

import gc
import json
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringflash.errors import ArgumentError, CheckpointError, ConfigError
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.weights.tensor_files import TensorFiles
from ringflash.train.weights.transformers_weights import NotInParts, check_in_parts
from tests.helpers.distributed import run_ranks
from tests.train.runs import whole

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers loading")

WIDE = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False, "attention_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma": {},  # tied, with a scale of the embedding that is computed
    "Gemma3Text": {},  # two kinds of RoPE
    "Phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},  # projections stored as one
    "Mixtral": EXPERTS,  # experts stored one by one
    "GPTNeoX": {"rotary_pct": 0.25},
}
FILE, HEAD, EMBEDDING, NORM = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
READS_MORE = ("Phi3", "copied head")  # projections that are read whole and parted; two tensors that are compared


def config_of(family: str, **more: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**WIDE | HEADS | FAMILIES[family] | more)


def write(folder: Path, family: str = "Qwen3", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Writes a folder of a model with random weights, norms and biases too, and returns it."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Rewrites the tensors of a folder with one file, and returns the folder."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def configure(model: Any, **options: Any) -> TransformersModel:
    """Returns a module that is configured on the ranks of the default process group, or on one device."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    module = Configured(model, compute_dtype="float32", **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks or 1,
        strategy=RingAttentionStrategy() if ranks else "auto",
        max_steps=0,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader: Any = torch.utils.data.DataLoader([0])  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        trainer.fit(module, loader, loader)
    return module


class Configured(TransformersModel):
    """Keeps the state that `configure_model` makes."""

    def configure_model(self) -> None:
        super().configure_model()
        self.made = {n: whole(p).clone() for n, p in self.decoder.named_parameters(remove_duplicate=False)}
        self.made |= {n: b.clone() for n, b in self.decoder.named_buffers(remove_duplicate=False)}
        self.parameters_made = len(list(self.decoder.parameters()))


@cache
def expected_state(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Returns the parameters and buffers of from_pretrained, and the number of parameters that share nothing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    return {n: x.detach() for n, x in state.items()}, len(list(model.parameters()))


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def _in_parts(folders: list[str]) -> list[tuple[dict[str, Tensor], int, int]]:
    """Returns for each folder the state, the largest number of elements that were read at once, and of parameters."""
    outcomes: list[tuple[dict[str, Tensor], int, int]] = []
    auto = transformers.AutoModelForCausalLM
    for folder in folders:
        sizes: list[int] = []

        def read(files: TensorFiles, name: str, part: Any = (), own: Any = TensorFiles.read, sizes: Any = sizes) -> Any:
            tensor = own(files, name, part)
            sizes.append(tensor.numel())
            return tensor

        with (
            mock.patch.object(TensorFiles, "read", read),
            mock.patch.object(auto, "from_pretrained", side_effect=AssertionError("the whole model was loaded")),
        ):
            module: Any = configure(folder)
        outcomes.append((module.made, max(sizes), module.parameters_made))
    return outcomes


def without_prefix(tensors: dict[str, Tensor]) -> None:
    """Names tensors as a folder of a model without a head does, with the frequencies that old folders hold."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("folders")
    for number, family in enumerate(FAMILIES):
        options: dict[str, Any] = {"max_shard_size": "40KB"} if number % 2 else {}
        write(folder / family, family, **options)
        assert (folder / family / "model.safetensors.index.json").exists() == bool(options)
    write(folder / "float64", "Llama", torch.float64)
    write(folder / "renamed", "Qwen3")
    change(folder / "renamed", without_prefix)
    write(folder / "copied head", "Qwen2")
    change(folder / "copied head", lambda x: x.update({HEAD: x[EMBEDDING].clone()}))
    return {path.name: path for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("world_size", [0, 1, 3])  # three ranks share no dimension evenly, as two do
def test_parameters_and_buffers_are_those_of_from_pretrained(folders: dict[str, Path], world_size: int) -> None:
    paths = [str(path) for path in folders.values()]
    ranks = run_ranks(world_size, _in_parts, paths) if world_size else [_in_parts(paths)]
    for outcomes in ranks:
        for name, (got, largest, count) in zip(folders, outcomes, strict=True):
            expected, parameters = expected_state(folders[name])
            assert_same(got, expected)
            assert count == parameters
            rows = [-(-len(x) // max(world_size, 1)) * x[0].numel() for x in expected.values() if x.ndim]
            assert largest <= max(rows) or name in READS_MORE, name


def _saved(copies: dict[str, str]) -> None:
    for folder, copy in copies.items():
        configure(folder).save_pretrained(copy)


def test_saved_under_the_names_that_were_read(folders: dict[str, Path], tmp_path: Path) -> None:
    families = ("Mixtral", "Phi3", "renamed")
    run_ranks(2, _saved, {str(folders[family]): str(tmp_path / family) for family in families})
    for family in families:
        assert_same(expected_state(tmp_path / family)[0], expected_state(folders[family])[0])
        if family != "renamed":  # transformers itself saves the prefix that a folder lacks
            names = [
                {name for file in path.glob("*.safetensors") for name in load_file(file)}
                for path in (folders[family], tmp_path / family)
            ]
            assert names[0] == names[1], family


def _drawn(family: str) -> dict[str, Tensor]:
    module: Any = configure(config_of(family), seed=7)
    return module.made


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_new_weights_do_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_of("Qwen3"), dtype=torch.float32)
    for made in run_ranks(world_size, _drawn, "Qwen3"):
        for name, tensor in model.named_parameters(remove_duplicate=False):
            assert torch.equal(made[name], tensor), name


def _errors(cases: list[tuple[str, str]]) -> list[str]:
    """Configures the model of each folder, with a fault on rank 1 alone, and returns the errors."""
    texts: list[str] = []
    for folder, fault in cases:
        try:
            _configured(folder, fault if torch.distributed.get_rank() == 1 else "")
        except CheckpointError as error:
            texts.append(str(error))
        torch.distributed.barrier()
    return texts


def _configured(folder: str, fault: str) -> None:
    module = "ringflash.train.lightning.transformers_model"
    faults: dict[str, Any] = {
        "": mock.patch.object(os, "sep", os.sep),
        "disk": mock.patch.object(TensorFiles, "read", side_effect=OSError("input/output error")),
        "another folder": mock.patch(f"{module}.TransformersWeights.digest", "another"),
        "memory": mock.patch(f"{module}.materialise", side_effect=MemoryError("no memory")),
    }
    with faults[fault]:
        configure(folder)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda x: x.pop(NORM), f"expected all tensors of Qwen3ForCausalLM, got 1 missing: {NORM}."),
    "unexpected": (
        lambda x: x.update(extra=torch.ones(2), more=torch.ones(1)),
        "expected the tensors of Qwen3ForCausalLM, got 2 more: extra, more.",
    ),
    "shape": (lambda x: x.update({NORM: torch.ones(3)}), rf"expected {NORM} of shape \(64,\), got \(3,\)."),
    "dtype": (
        lambda x: x.update({NORM: torch.ones(64, dtype=torch.int8)}),
        f"{NORM}: expected one of .*, got I8. Convert the model",
    ),
}


FAULTS = {
    "disk": "got rank 1: OSError: input/output error.",
    "memory": "got rank 1: MemoryError: no memory.",
    "another folder": r"expected the same tensors on all ranks, got others on ranks \[1\] than on rank 0.",
}


def test_a_folder_that_does_not_fit_and_a_fault_of_one_rank_are_errors_on_all_ranks(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    wrong = {str(change(write(tmp_path / name), how)): text for name, (how, text) in WRONG.items()}
    cases = [*((folder, "") for folder in wrong), *((str(folders["Qwen3"]), fault) for fault in FAULTS)]
    for texts in run_ranks(2, _errors, cases):
        for text, expected in zip(texts, [*wrong.values(), *FAULTS.values()], strict=True):
            assert re.search(expected, text), text
    for folder, text in wrong.items():
        with pytest.raises(CheckpointError, match=text):
            configure(folder)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, max_shard_size="40KB")
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{file.name}: expected a file of safetensors, got unreadable"):
        configure(str(tmp_path))
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name}: expected a file of safetensors, got no such file"):
        configure(str(tmp_path))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()


def untied(folder: Path) -> None:
    change(folder, lambda x: x.update({HEAD: 2 * x[EMBEDDING]}))


def named_by_configuration(folder: Path) -> None:
    (folder / FILE).rename(folder / "weights.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "weights.safetensors"}))


WHOLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickled": (pickled, "it has neither model.safetensors nor model.safetensors.index.json"),
    "untied": (untied, f"{HEAD} and {EMBEDDING} differ, which the configuration ties"),
    "named": (named_by_configuration, "its configuration has transformers_weights"),
}


def _whole(folders: list[str]) -> list[tuple[dict[str, Tensor], list[str]]]:
    """Returns the state of each folder's model, and the warnings of this rank."""
    found: list[tuple[dict[str, Tensor], list[str]]] = []
    for folder in folders:
        with mock.patch("ringflash.train.lightning.transformers_model.log.warning") as warning:
            module: Any = configure(folder)
        found.append((module.made, [call.args[0] % call.args[1:] for call in warning.call_args_list]))
    return found


def test_one_line_says_why_ranks_load_the_whole_model(tmp_path: Path) -> None:
    for name, (how, _) in WHOLE.items():
        how(write(tmp_path / name))
    ranks = run_ranks(2, _whole, [str(tmp_path / name) for name in WHOLE])
    for (name, (_, reason)), (made, lines), (of_other, none) in zip(WHOLE.items(), *ranks, strict=True):
        assert lines == [f"Weights: each rank loads the whole of {tmp_path / name}, since {reason}"]
        assert none == []
        expected, _ = expected_state(tmp_path / name)
        assert_same(made, expected)
        assert_same(of_other, expected)


def test_what_transformers_changes_is_a_reason(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    where = "transformers.conversion_mapping.get_model_conversion_mapping"
    with mock.patch(where, side_effect=TypeError("of another release")):
        module: Any = configure(str(folders["Qwen3"]))
    assert "since transformers' names do not apply: TypeError: of another release" in caplog.text
    with mock.patch.object(transformers.AutoModelForCausalLM, "from_config", side_effect=RuntimeError("meta")):
        other: Any = configure(str(folders["Qwen3"]))
    assert "since its constructor needs values of weights: meta" in caplog.text
    for made in (module.made, other.made):
        assert_same(made, expected_state(folders["Qwen3"])[0])


def test_folders_that_only_transformers_can_load(tmp_path: Path) -> None:
    config = config_of("Qwen3")
    with pytest.raises(NotInParts, match="it is no folder on this machine"):
        check_in_parts("some/model", config)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(NotInParts, match="its weights are quantised"):
        check_in_parts(str(tmp_path), config)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NotInParts, match="it holds an adapter"):
        check_in_parts(str(tmp_path), config_of("Qwen3"))


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise AssertionError('this code was run')")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    text = "model: expected a folder or name of a model of transformers, got .* contains custom code"
    with pytest.raises(ConfigError, match=text):
        TransformersModel(tmp_path)


def test_a_model_that_cannot_run_on_a_ring_is_refused_from_a_folder_too(tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.RobertaConfig(**sizes, intermediate_size=96, is_decoder=True, bos_token_id=0, eos_token_id=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="expected a model that counts positions from 0, got RobertaForCausalLM"):
        configure(str(tmp_path))


def _resident(name: str) -> int:
    """Returns bytes of this process's memory: VmRSS, what is resident now, or VmHWM, the most that was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def _peak(small: str, large: str) -> tuple[int, int]:
    """Returns the most memory that loading of a large model takes, and the bytes of this rank's shard."""
    with mock.patch.object(Configured, "configure_model", TransformersModel.configure_model):  # keeps no copies
        configure(small)  # imports what a model needs
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = _resident("VmRSS")
        module = configure(large)
        peak = _resident("VmHWM") - before
    local = (p.to_local() if isinstance(p, DTensor) else p for p in module.decoder.parameters())
    return peak, sum(x.numel() * x.element_size() for x in local)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux reports the peak of memory")
def test_host_memory_is_the_shard_and_at_most_two_tensors(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 9, "head_dim": 64}
    config = transformers.Qwen3Config(**HEADS | sizes, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    largest, whole_model = (4 * f(p.numel() for p in model.parameters()) for f in (max, sum))
    assert whole_model > 200e6
    model.save_pretrained(tmp_path / "large")
    write(tmp_path / "small")
    for peak, shard in run_ranks(2, _peak, str(tmp_path / "small"), str(tmp_path / "large")):
        assert shard < 0.51 * whole_model
        assert peak < shard + 2 * largest < 0.9 * whole_model
