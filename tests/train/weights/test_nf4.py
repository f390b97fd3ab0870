"""Frozen weights in NF4: packing, products, LoRA over ranks on them, export, refusals, memory."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.commands import main
from ringflash.errors import ConfigError, RingflashError
from ringflash.train.lightning.transformers_layers import TrainedLayer
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.lora import Lora, add_adapters, base_modules, digest_of, is_adapter
from ringflash.train.models.memory import TrainingShape, estimate_memory
from ringflash.train.weights.nf4 import NF4Linear, check_nf4, packed, round_nf4, store_nf4, unpacked
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_loading import configure
from tests.train.lightning.test_transformers_model import Run as Model
from tests.train.lightning.test_transformers_model import config_of
from tests.train.models.test_lora import FEW, Run, fill_adapters, fit_alone, logits_of, train
from tests.train.models.test_memory import LLAMA_8B
from tests.train.runs import Outcome

CPU = torch.device("cpu")
NF4 = Lora(rank=3, base="nf4")
RUNS = {
    "float32": Run(NF4),
    "float64": Run(NF4, "float64"),
    "bfloat16": Run(NF4, "bfloat16"),
    "few": Run(replace(FEW, base="nf4")),
    "block": Run(NF4, checkpointing="block"),
    "compiled": Run(NF4, checkpointing="block", compile_blocks=True),
}
# The run on the rounded base model that each is compared with: it neither recomputes nor compiles.
ROUNDED = {name: name if name in ("float64", "bfloat16", "few") else "float32" for name in RUNS}
CASES = [*((1, name) for name in ("float32", "bfloat16", "few")), *((2, name) for name in RUNS)]
pytestmark = [
    pytest.mark.xdist_group("nf4"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*ended before the epoch ended"),
]


@pytest.fixture(autouse=True)
def packages() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")


def plain(run: Run) -> Run:
    return replace(run, lora=replace(run.lora, base="compute"))


def _all_runs(folder: str, ranks: int) -> dict[str, Outcome]:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # torch's compiler makes an instance of an autograd function itself
    warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
    outcomes = {}
    with mock.patch.object(TrainedLayer, "compile", partialmethod(TrainedLayer.compile, backend="aot_eager")):
        for name in (name for n, name in CASES if n == ranks):
            run = RUNS[name]
            outcomes[name] = train(run, folder)
            if ROUNDED[name] == name:
                outcomes[f"{name}, rounded"] = train(plain(run), f"{folder}/rounded")
    if ranks == 2:
        saved = replace(RUNS["bfloat16"], epochs=1, save=f"{folder}/half", adapter=f"{folder}/adapter")
        outcomes["half"], outcomes["straight"] = train(saved, folder), train(Run(NF4, "bfloat16", 2), folder)
        outcomes["resumed"] = train(Run(NF4, "bfloat16", 2, resume=f"{folder}/half"), folder)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a base model, and with the same one rounded to NF4 under `rounded`."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("nf4")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(Model()))
    model.save_pretrained(folder / "tied")
    round_nf4(base_modules(model.requires_grad_(False)))
    model.save_pretrained(folder / "rounded" / "tied")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[int, dict[str, Outcome]]:
    return {ranks: run_ranks(ranks, _all_runs, str(folder), ranks)[0] for ranks in (1, 2)}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_losses_and_gradients_are_those_of_the_rounded_base_model(
    trained: dict[int, dict[str, Outcome]], ranks: int, name: str
) -> None:
    outcome, rounded = trained[ranks][name], trained[ranks][f"{ROUNDED[name]}, rounded"]
    rel = {"float64": 1e-12, "bfloat16": 2e-3}.get(name, 1e-6)
    assert outcome.logged["train/loss"] == pytest.approx(rounded.logged["train/loss"], rel=rel)
    assert outcome.gradients.keys() == rounded.gradients.keys()
    for n, gradient in outcome.gradients.items():
        expected = rounded.gradients[n]
        assert is_adapter(n)
        assert (gradient - expected).norm() <= 10 * rel * expected.norm(), n


def test_linear_layers_are_stored_in_4_bits(trained: dict[int, dict[str, Outcome]]) -> None:
    for ranks, name, dtype in ((2, "float32", torch.float32), (1, "bfloat16", torch.bfloat16)):
        for n, x in trained[ranks][name].weights.items():
            if ".base_layer.weight" in n and "down_proj" not in n:  # whose 96 in_features are no multiple of 64
                assert x.dtype == torch.bfloat16
                assert x.shape[1] % 18 == 0  # 36 bytes for 64 weights
            else:
                assert x.dtype == (torch.float32 if is_adapter(n) else dtype), n
    one, two = trained[1]["bfloat16"].weights, trained[2]["bfloat16"].weights
    same = (name for name in one if ".base_layer.weight" in name)
    assert all(torch.equal(one[n].view(torch.uint8), two[n].view(torch.uint8)) for n in same)


def test_a_run_resumes(trained: dict[int, dict[str, Outcome]]) -> None:
    straight, resumed = trained[2]["straight"].weights, trained[2]["resumed"].weights
    assert all(torch.equal(x.view(torch.uint8), resumed[n].view(torch.uint8)) for n, x in straight.items())


def test_export_merges_into_the_rounded_weights(
    trained: dict[int, dict[str, Outcome]], folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export = ["export", "--checkpoint", str(folder / "half"), "--to"]
    assert main.main([*export, str(tmp_path / "merged")]) == 0
    assert main.main([*export, str(tmp_path / "adapter"), "--adapter"]) == 0
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    for adapter in (folder / "adapter", tmp_path / "adapter"):
        rounded: Any = AutoModelForCausalLM.from_pretrained(folder / "rounded" / "tied")
        logits = logits_of(PeftModel.from_pretrained(rounded, str(adapter)))
        torch.testing.assert_close(logits, merged, atol=1e-5, rtol=0)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    assert not torch.allclose(logits_of(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), merged, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_without_a_ring(folder: Path, dtype: Any) -> None:
    _, module = fit_alone(NF4, folder / "tied", dtype=dtype)
    _, rounded = fit_alone(plain(Run(NF4)).lora, folder / "rounded" / "tied", dtype=dtype)
    assert sum(isinstance(layer, NF4Linear) for layer in module.decoder.modules()) == 12
    after = dict(rounded.decoder.named_parameters())
    adapters = {name: x for name, x in module.decoder.named_parameters() if is_adapter(name)}
    for name, x in adapters.items():
        assert (x - after[name]).norm() <= 1e-3 + 0.02 * x.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packing_rounds_to_a_sixteenth(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    bits = packed(weight)
    assert (bits.dtype, bits.shape) == (torch.bfloat16, (6, 54))
    rounded = unpacked(bits, dtype)
    assert (rounded.dtype, rounded.shape) == (dtype, (6, 192))
    scales = weight.view(6, 3, 64).abs().amax(-1, keepdim=True)
    errors = (rounded.float().view(6, 3, 64) - weight.view(6, 3, 64)).abs()
    assert (errors <= 0.16 * scales).all()
    assert torch.equal(rounded[2], torch.zeros(192, dtype=dtype))
    again = unpacked(packed(rounded), dtype)
    torch.testing.assert_close(again, rounded, atol=1e-2, rtol=1e-2)
    parts = [unpacked(part, dtype) for part in bits.split([1, 5])]
    assert torch.equal(torch.cat(parts), rounded)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_with_the_unpacked_weight_and_keeps_the_packed_one(bias: bool) -> None:
    layer = nn.Linear(128, 8, bias=bias).requires_grad_(False)
    x = torch.randn(3, 5, 128, requires_grad=True)
    usual = nn.Linear(128, 8, bias=bias)
    usual.load_state_dict(layer.state_dict())
    round_nf4([usual.requires_grad_(False)])
    expected = usual(x)
    (dx,) = torch.autograd.grad(expected.square().sum(), x)
    store_nf4([layer], CPU)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert {t.untyped_storage().data_ptr() for t in kept} == {layer.weight.untyped_storage().data_ptr()}
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], dx)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_adapters_and_the_head_are_not_packed(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "tied")
    digest = digest_of(model)
    add_adapters(model, NF4)
    fill_adapters(model)
    blocks = sum(x.numel() for name, x in model.named_parameters() if ".layers." in name and not x.requires_grad)
    final_norm = model.config.hidden_size
    share = store_nf4(base_modules(model), CPU)  # head and embedding do not count
    packed_layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, NF4Linear)}
    sizes = (layer.in_features * layer.out_features for layer in packed_layers.values())
    assert share == pytest.approx(sum(sizes) / (blocks + final_norm))
    names = {*packed_layers}
    assert len(names) == 12
    assert all(name.endswith(".base_layer") for name in names)
    assert digest == digest_of(AutoModelForCausalLM.from_pretrained(folder / "tied"))


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'lora\.base: expected "compute" or "nf4", got \'int4\'\. Choose'):
        Lora(base="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r'multiples of 64, for "nf4", got none\. Leave lora\.base out'):
        store_nf4([nn.Linear(32, 64).requires_grad_(False), nn.Linear(64, 64)], CPU)
    experts = nn.Linear(64, 192).requires_grad_(False)
    experts.stacked = nn.Parameter(torch.zeros(3, 64, 64), requires_grad=False)  # as transformers keeps them
    assert store_nf4([experts], CPU) == pytest.approx(0.5, abs=0.01)
    check_nf4(CPU)
    with (
        mock.patch("bitsandbytes.functional.quantize_4bit", side_effect=RuntimeError("no kernel image")),
        pytest.raises(ConfigError, match=r"lora\.base: expected a device on .*, got cpu: RuntimeError: no kernel"),
    ):
        check_nf4(CPU)
    monkeypatch.setattr("ringflash.train.weights.nf4.version", lambda name: "0.45.5")
    with pytest.raises(ConfigError, match=r'expected bitsandbytes 0\.50 or newer for "nf4", got 0\.45\.5\. Install it'):
        check_nf4()
    missing = {"bitsandbytes": None}
    monkeypatch.setattr("ringflash.train.weights.nf4.importlib.util.find_spec", lambda name: missing.get(name, sys))
    with pytest.raises(ConfigError, match=r"got no such package\. Install it with `pip install 'ringflash\[qlora\]'`"):
        TransformersModel(str(folder / "tied"), lora=NF4)


def _refused(folder: str) -> str:
    broken = mock.patch("bitsandbytes.functional.quantize_4bit", side_effect=RuntimeError("no kernel image"))
    with broken if dist.get_rank() == 1 else nullcontext(), pytest.raises(RingflashError) as caught:
        configure(folder, lora=NF4)
    return f"{caught.type.__name__}: {caught.value}"


def test_a_device_that_one_rank_cannot_use_is_a_config_error_on_all(folder: Path) -> None:
    texts = run_ranks(2, _refused, str(folder / "tied"))
    assert texts[0] == texts[1]
    assert texts[0].startswith("ConfigError: lora.base: expected a device on which bitsandbytes")
    assert "got cpu: RuntimeError: no kernel image. Leave lora.base out" in texts[0]


def test_the_memory_plan_counts_4_bits(folder: Path) -> None:
    shape = TrainingShape(65536, 4, checkpointing="block", trained=41_943_040)
    usual, nf4 = (estimate_memory(LLAMA_8B, replace(shape, nf4=nf4)) for nf4 in (False, True))
    matrices = 218_112_000 - 2 * 4096
    assert usual.weights - nf4.weights == 32 * (2 * matrices - matrices * 36 // 64) // 4
    assert usual.block - nf4.block == 2 * matrices - matrices * 36 // 64
    assert TransformersModel(str(folder / "tied"), lora=NF4).nf4
