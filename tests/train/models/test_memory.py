"""The estimate of training's memory, against explicit formulas and against the tensors that a decoder keeps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.torch_private import TorchDispatchMode, tree_leaves
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import make_adamw
from ringflash.train.lightning.transformers_head import states_loss
from ringflash.train.lightning.transformers_layers import TrainedLayer, layers_of
from ringflash.train.models.activations import ALL_BLOCKS, HostMemory
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.lora import Lora, add_adapters
from ringflash.train.models.memory import (
    GIB,
    TrainingShape,
    check_host_memory,
    check_memory,
    estimate_memory,
    host_memory,
    parameter_counts,
)
from tests.train.runs import MODEL

LLAMA_8B = ModelConfig(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336)
WIDE = ModelConfig(vocab_size=61, dim=256, n_layers=1, n_heads=8, n_kv_heads=2, ffn_dim=896)
FOUR = ModelConfig(vocab_size=61, dim=64, n_layers=4, n_heads=4, n_kv_heads=1, ffn_dim=224)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="an allocator that counts")


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted(tied: bool) -> None:
    config = replace(MODEL, tie_embeddings=tied, qkv_bias=tied, o_bias=tied, qk_norm=tied)
    block, root = parameter_counts(config)
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(p.numel() for p in decoder.layers[0].parameters()) == block
    assert sum(p.numel() for p in decoder.parameters()) == config.n_layers * block + root


def test_llama_8b_at_256k_on_four() -> None:
    tokens = 262144 // 4
    estimate = estimate_memory(LLAMA_8B, TrainingShape(tokens, shard_size=4, checkpointing="block"))
    parameters = 8_030_261_248
    assert estimate.weights == estimate.gradients == parameters
    assert estimate.optimizer == 2 * parameters
    assert estimate.gathered == 2 * (128256 * 4096 + 4096)
    assert estimate.activations == 32 * tokens * (2 * 4096 * 2 + 4 * 32)
    assert estimate.loss == 2048 * 128256 * 6 + 128256 * 4096 * (2 + 4) + 2 * tokens * 4096 * 2
    block = tokens * (4096 + 2 * 14336) * 2 + 218_112_000 * 2
    assert estimate.block == block
    assert estimate.total == 3 * parameters + estimate.gathered + estimate.activations + estimate.loss
    assert str(estimate).startswith(f"at least {estimate.total / GIB:.2f} GiB a GPU (weights 7.48, optimizer 14.96, ")


@given(
    tokens=st.integers(1, 10**6),
    shard_size=st.sampled_from([1, 2, 8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_no_option_takes_more(tokens: int, shard_size: int, dtype: torch.dtype) -> None:
    shape = TrainingShape(tokens, shard_size, dtype)
    everything = estimate_memory(LLAMA_8B, shape)
    block = estimate_memory(LLAMA_8B, replace(shape, checkpointing="block"))
    offloaded = estimate_memory(LLAMA_8B, replace(shape, checkpointing="block", offloaded_blocks=ALL_BLOCKS))
    kept_gathered = estimate_memory(LLAMA_8B, replace(shape, checkpointing="block", reshard_after_forward=False))
    assert offloaded.activations < block.activations < everything.activations
    assert offloaded.total <= block.total <= everything.total
    assert block.total <= kept_gathered.total
    assert estimate_memory(LLAMA_8B, replace(shape, shard_size=16)).total < everything.total
    assert estimate_memory(LLAMA_8B, replace(shape, tokens=0)).total <= everything.total


@pytest.mark.parametrize("mode", ["none", "block"])
def test_a_decoder_keeps_no_less_than_estimated(mode: Any) -> None:
    config, tokens, kept = replace(MODEL, n_layers=1), 40, {}
    decoder = Decoder(config)
    decoder.keep_activations(mode)
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = (x.nbytes, x)
        return x.detach()

    x = torch.arange(tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        decoder(x, x[0])
    estimate = estimate_memory(config, TrainingShape(tokens, compute_dtype=torch.float32, checkpointing=mode))
    results = (
        tokens * (4 * config.dim + 4 * config.n_heads) if mode == "block" else 0
    )  # out and lse; saved-tensor hooks do not see them
    assert estimate.activations <= sum(size for size, _ in kept.values()) + results


def kept_bytes(decoder: Any, *args: Any, **keywords: Any) -> int:
    """Returns the bytes that a forward keeps for its backward, besides weights."""
    kept: dict[int, Any] = {p.untyped_storage().data_ptr(): p for p in decoder.parameters()}
    weights = {*kept}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = decoder(*args, **keywords)
    del out
    return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in weights)


def partitioned() -> Any:
    """Returns a backend that chooses the tensors to keep as inductor does, and compiles nothing."""
    partition: dict[str, Any] = {
        "partition_fn": min_cut_rematerialization_partition,
        "decompositions": select_decomp_table(),
    }
    return aot_autograd(fw_compiler=nop, bw_compiler=nop, **partition)


# torch 2.11 warns when its compiler is imported, and when it inspects the input of the second block.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_keeps_what_is_estimated() -> None:
    backend = partitioned()
    x = torch.arange(512)[None] % 61
    torch._dynamo.reset()

    def kept(layers: int) -> int:
        decoder = Decoder(replace(WIDE, n_layers=layers)).bfloat16()
        decoder.compile_blocks(backend)  # one graph serves all blocks
        return kept_bytes(decoder, x, x[0])

    shape = TrainingShape(512, compiled=True)
    assert kept(2) - kept(1) == pytest.approx(estimate_memory(replace(WIDE, n_layers=1), shape).activations, rel=0.01)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["none", "block"])
def test_blocks_keep_their_rounded_weights_with_everything_else(mode: Any, compiled: bool) -> None:
    x = torch.arange(512)[None] % 61
    torch._dynamo.reset()

    def kept(layers: int, dtype: torch.dtype) -> int:
        decoder = Decoder(replace(WIDE, n_layers=layers)).to(dtype)
        decoder.round_weights(torch.bfloat16)
        decoder.keep_activations(mode)
        if compiled:
            decoder.compile_blocks(partitioned())
        return kept_bytes(decoder, x, x[0])

    def estimate(layers: int, rounded: bool) -> int:
        options: dict[str, Any] = {"copied": False, "rounded": rounded, "compiled": compiled, "checkpointing": mode}
        return estimate_memory(replace(WIDE, n_layers=layers), TrainingShape(512, **options)).gathered

    # The same blocks with bfloat16 weights keep as many activations and no rounded weights.
    measured = [kept(2, dtype) - kept(1, dtype) for dtype in (torch.float32, torch.bfloat16)]
    expected = estimate(2, True) - estimate(1, True)
    assert expected == (2 * parameter_counts(WIDE)[0] if mode == "none" else 0)
    assert measured[0] - measured[1] == pytest.approx(expected, rel=0.01)
    assert estimate(2, False) == 0


def test_a_block_of_transformers_keeps_what_is_estimated() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    rf.hf.register()
    x = torch.arange(512)[None] % 61

    def kept(layers: int) -> int:
        sizes: dict[str, Any] = {
            "hidden_size": WIDE.dim,
            "intermediate_size": WIDE.ffn_dim,
            "num_hidden_layers": layers,
        }
        heads: dict[str, Any] = {"num_attention_heads": WIDE.n_heads, "num_key_value_heads": WIDE.n_kv_heads}
        config = LlamaConfig(vocab_size=61, **sizes, **heads)
        options: dict[str, Any] = {"attn_implementation": rf.hf.NAME, "dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_config(config, **options).train()
        return kept_bytes(model, x, position_ids=x, use_cache=False)

    shape = TrainingShape(512, float32_norms=True)
    assert kept(2) - kept(1) == pytest.approx(estimate_memory(replace(WIDE, n_layers=1), shape).activations, rel=0.01)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operators make while they exist; their temporaries are left out."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.places, self.now, self.most = {p.untyped_storage()._cdata for p in parameters}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (place := x.untyped_storage()._cdata) not in self.places:
                self.places.add(place)
                self.count(x.untyped_storage().nbytes())
                weakref.finalize(x.untyped_storage(), self.drop, place, x.untyped_storage().nbytes())
        return out

    def count(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def drop(self, place: int, size: int) -> None:
        self.places.remove(place)
        self.now -= size


@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize(
    ("lora", "least"), [(None, 0.95), (Lora(4), 0.95), (Lora(4, targets=["q_proj", "v_proj"]), 0.85)]
)
def test_a_step_of_transformers_takes_what_is_estimated(mode: Any, lora: Lora | None, least: float) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    rf.hf.register()
    sizes: dict[str, Any] = {"hidden_size": FOUR.dim, "intermediate_size": FOUR.ffn_dim, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": FOUR.n_heads, "num_key_value_heads": FOUR.n_kv_heads}
    options: dict[str, Any] = {"attn_implementation": rf.hf.NAME, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=61, **sizes, **heads), **options).train()
    if lora is not None:
        pytest.importorskip("peft")
        add_adapters(model, lora)
        model.bfloat16()
    for layer in layers_of(model):
        layer.forward = TrainedLayer(layer, mode, HostMemory())
    x = torch.arange(512)[None] % 61  # 8 times the width: otherwise gradients of weights are most of the memory
    with Live(model.parameters()) as live:
        states_loss(model, x, x, position_ids=x, use_cache=False).total.backward()
    trained = None if lora is None else sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapts_all = lora is not None and lora.targets is None
    shape = TrainingShape(512, checkpointing=mode, copied=False, float32_norms=True, own_head=False, trained=trained)
    estimate = estimate_memory(FOUR, replace(shape, adapts_all=adapts_all))
    assert least * live.most <= estimate.activations + max(estimate.block, estimate.loss) <= live.most


def test_lora_of_llama_8b_at_128k_on_one() -> None:
    """torch allocated 65.6 GiB on an H100, where the base model was stored in float32 still."""
    trained = 41_943_040
    shape = TrainingShape(131072, checkpointing="block", offloaded_blocks=32, float32_norms=True, own_head=False)
    estimate = estimate_memory(LLAMA_8B, replace(shape, trained=trained, adapts_all=True))
    base = 8_030_261_248
    assert estimate.weights == 2 * base + 4 * trained
    assert estimate.gathered == 2 * (2 * 128256 * 4096 + 4096)
    assert 0.98 * 65.6 * GIB < estimate.total + 2 * base < 65.6 * GIB
    alone = estimate_memory(LLAMA_8B, replace(shape, trained=trained, copied=False))
    assert alone.weights == 2 * base + 4 * trained + 2 * (2 * 128256 * 4096 + 4096)  # autocast leaves the embedding


def test_each_kept_block_takes_the_same_and_hides_the_recomputed_ones() -> None:
    shape = TrainingShape(65536, shard_size=4, checkpointing="block", compiled=True)
    estimates = [estimate_memory(LLAMA_8B, replace(shape, kept_blocks=kept)) for kept in range(33)]
    steps = {b.activations - a.activations for a, b in pairwise(estimates)}
    assert steps == {65536 * 2 * (9 * 4096 // 2 + 3 * 14336)}  # q, k, v, the sum, two norms; gate, up and product
    assert estimates[32] == estimate_memory(LLAMA_8B, replace(shape, checkpointing="none"))
    block_weights = 218_112_000 * 2
    assert estimates[0].block > estimates[1].block == estimates[32].block == block_weights


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, 'Use activation_checkpointing="block", then activation_offload, a shorter context'),
        ({"checkpointing": "block"}, "Use activation_offload, a shorter context"),
        ({"checkpointing": "block", "offloaded_blocks": ALL_BLOCKS}, "Use a shorter context"),
        ({"checkpointing": "block", "linear_dtype": "fp8"}, "Use a shorter context"),
    ],
)
def test_what_cannot_fit(options: dict[str, Any], remedy: str) -> None:
    shape = TrainingShape(2**23, **options)
    estimate = estimate_memory(LLAMA_8B, shape)
    check_memory(estimate, shape, estimate.total)
    with pytest.raises(ConfigError, match=r"memory: expected at most the GPU's 139\.00 GiB, got at least") as raised:
        check_memory(estimate, shape, int(139 * GIB))
    assert remedy in str(raised.value)


def test_the_host_s_share() -> None:
    tokens = 262144 // 4
    shape = TrainingShape(tokens, shard_size=4, checkpointing="block", offloaded_blocks=ALL_BLOCKS)
    estimate = estimate_memory(LLAMA_8B, shape)
    assert estimate.host == 32 * tokens * (4 * 4096 + 4 * 32)  # L T 4 D, and lse
    assert estimate_memory(LLAMA_8B, replace(shape, offloaded_blocks=8)).host == estimate.host // 4
    assert estimate_memory(LLAMA_8B, replace(shape, offloaded_blocks=0)).host == 0
    assert estimate_memory(LLAMA_8B, replace(shape, head_groups=8)).host == estimate.host
    uneven = estimate_memory(LLAMA_8B, replace(shape, tokens=17000)).host
    assert uneven == 32 * (2 * 2**28 + 2**22)  # 133 MiB twice and 2 MiB, each rounded up to a power of two
    check_host_memory(estimate, 4, 4 * estimate.host)
    text = r"activation_offload: expected at most the host's 128\.00 GiB, got at least 32\.25 GiB for each of 4 GPUs\. "
    with pytest.raises(ConfigError, match=text):
        check_host_memory(estimate, 4, int(128 * GIB))
    assert host_memory() > GIB / 4


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_a_module_knows_its_data_and_ranks() -> None:
    class Data(pl.LightningDataModule):
        context_length, batch_size = 640, 2

    module = LanguageModel(MODEL, compute_dtype="float32", activation_checkpointing="block")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    shape = TrainingShape(0, compute_dtype=torch.float32, checkpointing="block", copied=False)
    assert module.memory_estimate() == estimate_memory(MODEL, shape)
    module.trainer.datamodule = Data()  # pyright: ignore[reportAttributeAccessIssue]
    assert module.memory_estimate() == estimate_memory(MODEL, replace(shape, tokens=1280))


# torch 2.11 warns when its compiler is imported, when it inspects the input of the second block, and about GPUs.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@NEEDS_GPU
@pytest.mark.parametrize(("mode", "compiled"), [("none", False), ("block", False), ("block", True)])
def test_a_gpu_allocates_no_less_than_estimated(mode: Any, compiled: bool) -> None:
    config = ModelConfig(vocab_size=32000, dim=512, n_layers=6, n_heads=8, n_kv_heads=2, ffn_dim=1408)
    seqlen = 65536 if compiled else 16384
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        decoder, x = Decoder(config), torch.randint(0, 32000, (1, seqlen))
    decoder.keep_activations(mode)
    if compiled:
        decoder.compile_blocks()
    optimizer = make_adamw(decoder.parameters(), LanguageModel(config).optimizer_config)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            total = decoder(x, torch.arange(seqlen, device="cuda"), labels=x).total
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    estimate = estimate_memory(
        config, TrainingShape(seqlen, checkpointing=mode, copied=False, in_pieces=compiled, compiled=compiled)
    )
    assert 0.5 * measured <= estimate.total <= measured
