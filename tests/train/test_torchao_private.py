"""Float8 linear layers and 8-bit AdamW of torchao: losses, recomputation, sharding, checkpoints, refusals."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ringflash.errors import ConfigError
from ringflash.train import torchao_private
from ringflash.train.callbacks.ema import ExponentialMovingAverage
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig, make_adamw
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.budget import with_margin
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.lora import Lora
from ringflash.train.models.memory import GIB, TrainingShape, estimate_memory
from ringflash.train.torchao_private import (
    LinearDtype,
    check_float8,
    check_torchao,
    make_adamw_8bit,
    use_float8,
)
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_model import Run as TransformersRun
from tests.train.lightning.test_transformers_model import config_of
from tests.train.models.test_memory import LLAMA_8B, WIDE, kept_bytes, partitioned
from tests.train.runs import MODEL, OPTIMIZER, Data, Outcome, Recorded, Run, train, whole

CPU = torch.device("cpu")
PACKED = Run(steps=2, micro_batches=2, packed=True, linears="fp8")
EPOCHS = Run(epoch_batches=2, max_epochs=2, linears="fp8", optimizer=replace(OPTIMIZER, state="8bit"))
EPOCHS = replace(EPOCHS, model=replace(MODEL, dim=128, n_layers=1, ffn_dim=160))  # shards of more than 4096 weights


def needs_torchao() -> None:
    pytest.importorskip("torchao")


def fit(module: pl.LightningModule, run: Run, callbacks: list[Callback], resume: str | None = None) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"accelerator": "cpu", "devices": 2, "limit_val_batches": 0, "enable_model_summary": False}
    trainer = pl.Trainer(strategy=RingAttentionStrategy(), max_steps=run.steps, callbacks=callbacks, **quiet)
    trainer.fit(module, Data(run), ckpt_path=resume)
    return trainer


def _average(folder: str) -> dict[str, Any]:
    """Trains with float8 and an average of the weights, saves both, and loads them into a new run."""
    run, found = replace(PACKED, micro_batches=1, packed=False), {}
    average = ExponentialMovingAverage(0.5)
    trainer = fit(Recorded(run, Outcome()), run, [average])
    module: Any = trainer.lightning_module
    trainer.save_checkpoint(f"{folder}/average")
    with average.averaged(module):
        trainer.save_checkpoint(f"{folder}/swapped")
    state: dict[str, Any] = {**get_model_state_dict(module.decoder)}
    averages: dict[str, Any] = average.averages
    found["plain"] = {type(x.to_local()) for x in state.values()} | {type(x.to_local()) for x in averages.values()}
    found["dtypes"] = {x.dtype for x in state.values()}
    for name in ("average", "swapped"):
        after = ExponentialMovingAverage(0.5)
        resumed = Recorded(replace(run, linears="compute"), Outcome())
        fit(resumed, run, [after], f"{folder}/{name}")
        same = [torch.equal(whole(x), whole(average.averages[n])) for n, x in after.averages.items()]
        same += [torch.equal(whole(x), whole(module.decoder.get_parameter(n))) for n, x in named(resumed)]
        found[name] = all(same)
    return found


def named(module: Any) -> list[tuple[str, torch.Tensor]]:
    return list(module.decoder.named_parameters())


def _transformers(linears: LinearDtype) -> list[float]:
    losses: list[float] = []

    class Noted(TransformersModel):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if name == "train/loss":
                losses.append(float(value))

    fit(Noted(config_of(TransformersRun(family="Llama")), linear_dtype=linears), Run(steps=3), [])
    return losses


def _on_rank(folder: str) -> dict[str, Any]:
    # torch warns when its compiler is imported, and when the compiler inspects the input of the second block
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    found: dict[str, Any] = {}
    for linears in ("compute", "fp8", "fp8_rowwise"):
        found[linears] = train(Run(steps=20, linears=linears)).logged["train/loss"]
        found[f"transformers {linears}"] = _transformers(linears)
    shape = TrainingShape(52, 2, torch.float32, "block", 1, linear_dtype="fp8")
    budget = f"{(with_margin(estimate_memory(MODEL, shape)) + 64) / GIB:.9f}GiB"
    found["none"], found["block"] = train(PACKED), train(replace(PACKED, checkpointing="block"))
    found["budget"] = train(replace(PACKED, checkpointing=None, memory=budget))
    found["replicated"] = train(replace(PACKED, replicate=2))
    with mock.patch.object(Decoder, "compile_blocks", partialmethod(Decoder.compile_blocks, backend="aot_eager")):
        found["compiled"] = train(replace(PACKED, checkpointing="block", compile_blocks=True))
    with torch.compiler.set_stance("force_eager"):  # of the compiled step of torchao
        found["straight"] = train(EPOCHS)
        found["first"] = train(replace(EPOCHS, max_epochs=1, save=f"{folder}/first"))
        resumed = replace(EPOCHS, resume=f"{folder}/first", save=f"{folder}/second")
        found["resumed"] = train(resumed)
        usual = replace(EPOCHS, linears="compute", optimizer=OPTIMIZER)
        found["to the usual"] = train(replace(usual, resume=f"{folder}/first"))
        found["usual"] = train(replace(usual, max_epochs=1, save=f"{folder}/usual"))
        found["from the usual"] = train(replace(EPOCHS, resume=f"{folder}/usual"))
    found |= _average(folder)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    needs_torchao()
    folder = tmp_path_factory.mktemp("float8")
    return {**run_ranks(2, _on_rank, str(folder))[0], "folder": folder}


def weights_differ(a: Outcome, b: Outcome, over: Any = torch.Tensor.max) -> float:
    return max(over((a.weights[name] - b.weights[name]).abs()).item() for name in a.weights)


@pytest.mark.xdist_group("float8")
class TestRuns:
    @pytest.mark.parametrize("linears", ["fp8", "fp8_rowwise"])
    def test_losses_follow_those_without_float8(self, runs: dict[str, Any], linears: str) -> None:
        losses, exact = runs[linears], runs["compute"]
        assert losses != exact
        assert losses == pytest.approx(exact, abs=0.02)
        assert exact[-1] < exact[0] - 0.5  # the runs learn far more than they differ
        assert runs[f"transformers {linears}"] != runs["transformers compute"]
        assert runs[f"transformers {linears}"] == pytest.approx(runs["transformers compute"], abs=0.05)

    @pytest.mark.parametrize("other", ["block", "budget"])
    def test_recomputation_changes_no_bit(self, runs: dict[str, Any], other: str) -> None:
        assert runs[other].logged == runs["none"].logged
        assert weights_differ(runs[other], runs["none"]) == 0

    def test_groups_that_hold_whole_weights_have_the_same_scales(self, runs: dict[str, Any]) -> None:
        assert runs["replicated"].logged["train/loss"] == runs["none"].logged["train/loss"]

    def test_compiled_blocks_compute_the_same(self, runs: dict[str, Any]) -> None:
        assert runs["compiled"].logged["train/loss"] == pytest.approx(runs["none"].logged["train/loss"], abs=2e-3)

    def test_a_resumed_run_is_bitwise_the_uninterrupted_one(self, runs: dict[str, Any]) -> None:
        assert weights_differ(runs["straight"], runs["resumed"]) == 0

    def test_checkpoints_go_on_with_and_without_float8_and_8_bits(self, runs: dict[str, Any]) -> None:
        for other in ("to the usual", "from the usual"):
            assert 0 < weights_differ(runs["straight"], runs[other], torch.Tensor.mean) < 1e-3, other
            assert runs[other].logged["train/loss"] == pytest.approx(
                runs["straight"].logged["train/loss"][2:], abs=0.02
            )

    def test_a_checkpoint_holds_plain_float32_weights(self, runs: dict[str, Any]) -> None:
        saved = load_decoder(runs["folder"] / "second")
        assert all(torch.equal(x, runs["resumed"].weights[name]) for name, x in saved.named_parameters())
        assert runs["dtypes"] == {torch.float32}
        assert runs["plain"] == {torch.Tensor}

    def test_averages_of_float8_runs_are_saved_and_loaded(self, runs: dict[str, Any]) -> None:
        assert runs["average"]
        assert runs["swapped"]


@pytest.mark.parametrize("linears", ["fp8", "fp8_rowwise"])
def test_weights_are_drawn_as_without_float8(linears: LinearDtype, caplog: pytest.LogCaptureFixture) -> None:
    needs_torchao()
    config = replace(MODEL, qkv_bias=True)
    with torch.device("meta"):
        decoder, usual = Decoder(config, seed=3), Decoder(config, seed=3)
    with caplog.at_level(logging.WARNING):
        use_float8(decoder.layers, linears, CPU, sharded=False)
    assert [r.getMessage() for r in caplog.records if "emulated" in r.getMessage()] == [
        "Linear layers: float8 is emulated, and slower than float32, since a CPU has no float8 products"
    ]
    for each in (decoder, usual):
        each.materialise("cpu")
    expected = usual.state_dict()
    assert {n: x.dtype for n, x in decoder.state_dict().items()} == {n: x.dtype for n, x in expected.items()}
    assert all(torch.equal(x, expected[name]) for name, x in decoder.state_dict().items())
    x: Any = torch.arange(37)[None]  # no multiple of 16
    error: Any = decoder(x, x[0]) - usual(x, x[0])
    assert 0 < error.abs().max() < 0.1
    assert type(decoder.lm_head) is type(usual.lm_head)


@pytest.mark.parametrize("linears", ["fp8", "fp8_rowwise"])
def test_rows_that_are_no_multiple_of_16_have_their_gradients(linears: LinearDtype) -> None:
    needs_torchao()
    block: Any = nn.Sequential(nn.Linear(32, 48))
    use_float8([block], linears, CPU, sharded=False, speak=False)
    x = torch.randn(2, 24, 32)
    gradients = []
    for inputs in (x, x[:, :19]):
        block.zero_grad()
        out = block(inputs)
        assert out.shape == (*inputs.shape[:2], 48)
        (out * torch.ones(48)).sum().backward()
        assert block[0].weight.grad is not None
        gradients.append(block[0].weight.grad.clone())
    usual = torch.ones(48, 2 * 19) @ x[:, :19].flatten(0, 1)
    assert (gradients[1] - usual).abs().max() < 0.05 * usual.abs().max() + 0.5
    assert not torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["fp8", "fp8_rowwise"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_float8_block_keeps_what_is_estimated(kind: LinearDtype) -> None:
    needs_torchao()
    x = torch.arange(512)[None] % 61
    backend = partitioned()
    torch._dynamo.reset()

    def kept(layers: int, dtype: torch.dtype) -> int:
        decoder = Decoder(replace(WIDE, n_layers=layers)).to(dtype)
        use_float8(decoder.layers, kind, CPU, sharded=False, speak=False)
        decoder.round_weights(torch.bfloat16)
        decoder.compile_blocks(backend)  # one graph serves all blocks
        return kept_bytes(decoder, x, x[0])

    shape = TrainingShape(512, compiled=True, linear_dtype=kind, copied=False, rounded=True)
    estimate = estimate_memory(replace(WIDE, n_layers=1), shape)
    assert estimate.gathered == 0
    for dtype in (torch.bfloat16, torch.float32):
        assert kept(2, dtype) - kept(1, dtype) == pytest.approx(estimate.activations, rel=0.01)


def test_compiled_float8_blocks_leave_out_the_reductions_that_write_single_bytes() -> None:
    """The option's name is one of inductor's, and other dtypes compile without it."""
    assert torchao_private.compile_options("compute") == {}
    for kind in ("fp8", "fp8_rowwise"):
        options = torchao_private.compile_options(kind)
        assert options == {"triton.mix_order_reduction": False}
        assert options.keys() <= {*torch._inductor.list_options()}
    with mock.patch.object(torch, "compile") as compiler:
        Decoder(MODEL).compile_blocks(options=torchao_private.compile_options("fp8"))
        assert compiler.call_args.kwargs["options"] == options
        Decoder(MODEL).compile_blocks("aot_eager", options=options)  # other backends have other options
        assert compiler.call_args.kwargs["options"] is None


def test_the_estimate_counts_smaller_moments_and_gathered_weights() -> None:
    shape = TrainingShape(65536, shard_size=4, checkpointing="block")
    usual, small = estimate_memory(LLAMA_8B, shape), estimate_memory(LLAMA_8B, replace(shape, state_8bit=True))
    assert small.optimizer == usual.optimizer * (1 + 1 / 64) // 4
    float8 = estimate_memory(LLAMA_8B, replace(shape, linear_dtype="fp8"))
    assert usual.block - float8.block == 218_112_000
    rowwise = replace(shape, linear_dtype="fp8_rowwise")
    assert estimate_memory(LLAMA_8B, rowwise) == usual  # weights are gathered in bfloat16
    module = LanguageModel(MODEL, OptimizerConfig(state="8bit"), linear_dtype="fp8")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    assert module.training_shape().state_8bit
    assert module.training_shape().linear_dtype == "fp8"


def test_moments_in_8_bits_return_as_the_same_bits() -> None:
    needs_torchao()
    weights = [nn.Parameter(torch.randn(64, 80)), nn.Parameter(torch.randn(64))]
    with torch.compiler.set_stance("force_eager"):
        optimizer = make_adamw(weights, OptimizerConfig(state="8bit"))
        usual = make_adamw([nn.Parameter(w.detach().clone()) for w in weights], OptimizerConfig())
        for own, other in zip(weights, usual.param_groups[0]["params"] + usual.param_groups[1]["params"], strict=True):
            own.grad = other.grad = torch.randn_like(own)
        optimizer.step()
        usual.step()
        before = optimizer.state_dict()
        state, expected = before["state"], usual.state_dict()["state"]
        assert {i: [*x] for i, x in state.items()} == {i: [*x] for i, x in expected.items()}
        for index, own in state.items():
            for name, x in own.items():
                assert type(x) is torch.Tensor
                torch.testing.assert_close(x, expected[index][name], rtol=0.1, atol=2e-3)
        assert before["param_groups"][0]["lr"] == 3e-4
        other = make_adamw([nn.Parameter(w.detach().clone()) for w in weights], OptimizerConfig(state="8bit"))
        other.load_state_dict(before)
        after = other.state_dict()["state"]
        assert all(torch.equal(x, after[i][n]) for i, own in state.items() for n, x in own.items())
        kept = torch.clone(weights[0])
        optimizer.zero_grad()
        optimizer.step()  # as for a step that is skipped, since a loss was not finite
        assert torch.equal(kept, weights[0])


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            None,
            r'linear_dtype: expected torchao 0\.18 for "fp8", got no such package\. Install it with .*ringflash\[fp8\]',
        ),
        ("0.12.0", r'linear_dtype: expected torchao 0\.18 for "fp8", got 0\.12\.0\. '),
        ("0.180.0", r"got 0\.180\.0\. "),
    ],
)
def test_torchao_is_needed_in_a_checked_version(found: str | None, text: str) -> None:
    spec = mock.patch.object(torchao_private.importlib.util, "find_spec", return_value=found and object())
    with spec, mock.patch.object(torchao_private, "version", return_value=found):
        with pytest.raises(ConfigError, match=text):
            check_float8("fp8", CPU, torch.float32)
        with pytest.raises(ConfigError, match=r'optimizer\.state: expected torchao 0\.18 for "8bit"'):
            make_adamw_8bit([], 1e-3, (0.9, 0.95))
        check_float8("compute", CPU, torch.float64)
    for good in ("0.18.0", "0.18.1+cu130"):
        spec = mock.patch.object(torchao_private.importlib.util, "find_spec", return_value=object())
        with spec, mock.patch.object(torchao_private, "version", return_value=good):
            check_torchao("linear_dtype", "fp8")


@pytest.mark.parametrize(("kind", "capability", "least"), [("fp8", (8, 0), r"8\.9"), ("fp8_rowwise", (8, 9), r"9\.0")])
def test_a_gpu_without_float8_is_refused(kind: LinearDtype, capability: tuple[int, int], least: str) -> None:
    gpu = torch.device("cuda", 0)
    with (
        mock.patch.object(torchao_private, "check_torchao"),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability) as found,
    ):
        text = rf"linear_dtype: expected a GPU of compute capability {least} or higher .*got NVIDIA A100, of 8\."
        with pytest.raises(ConfigError, match=text):
            check_float8(kind, gpu, torch.bfloat16)
        found.return_value = (9, 0)
        check_float8(kind, gpu, torch.bfloat16)
        with pytest.raises(ConfigError, match=r'compute_dtype: expected "auto" or "bfloat16" with .*got float32'):
            check_float8(kind, gpu, torch.float32)
        with pytest.raises(ConfigError, match=r'compute_dtype: expected "auto", "float32" or .*got float64'):
            check_float8(kind, CPU, torch.float64)


def test_options_that_do_not_fit_are_refused() -> None:
    unknown: Any = "fp4"
    with pytest.raises(ConfigError, match=r"linear_dtype: expected compute or fp8 or fp8_rowwise, got 'fp4'"):
        LanguageModel(MODEL, linear_dtype=unknown)
    offload: dict[str, Any] = {"activation_checkpointing": "block", "activation_offload": True}
    with pytest.raises(ConfigError, match=r'activation_offload: expected False with linear_dtype="fp8", got True'):
        LanguageModel(MODEL, linear_dtype="fp8", **offload)
    with pytest.raises(ConfigError, match=r"optimizer\.state: expected .*got '4bit'"):
        OptimizerConfig(state=unknown.replace("fp4", "4bit"))


def test_lora_is_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r'linear_dtype: expected "compute" with lora, got "fp8"'):
        TransformersModel("nowhere", lora=Lora(), linear_dtype="fp8")


def test_a_model_without_a_fitting_layer_is_refused() -> None:
    needs_torchao()
    blocks = [nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24), nn.RMSNorm(24))]
    with pytest.raises(ConfigError, match=r"linear_dtype: expected linear layers .*multiples of 16, got none"):
        use_float8(blocks, "fp8", CPU, sharded=False)


def test_float64_weights_keep_their_moments() -> None:
    needs_torchao()
    weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64))]
    with pytest.raises(ConfigError, match=r'optimizer\.state: expected "float32" for float64 weights, got "8bit"'):
        make_adamw(weights, OptimizerConfig(state="8bit"))
