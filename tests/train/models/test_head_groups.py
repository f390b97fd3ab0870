"""Attention of offloaded blocks in groups of heads: the same gradients, one graph, one copy in host memory."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.compilers import nop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.ops.one_device import OneDevice
from ringflash.train.lightning.sharded import shard_model
from ringflash.train.models import activations, decoder, memory
from ringflash.train.models.activations import HostMemory, Packed
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder, Linear
from ringflash.train.models.memory import TrainingShape, estimate_memory
from tests.helpers.distributed import run_ranks

HEADS = ModelConfig(vocab_size=31, dim=32, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=16, ffn_dim=48)
LENGTH = 20
QWEN3 = replace(HEADS, qk_norm=True, qkv_bias=True)

# torch 2.11 warns when its compiler is imported, and when the compiler inspects the input of the second block.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offloads small tensors too, runs the rest in pieces of 6 tokens, and returns the bytes of each copy."""
    sizes, pack = list[int](), HostMemory.pack

    def counted(memory: HostMemory, x: Tensor) -> Tensor | Packed:
        result = pack(memory, x)
        if isinstance(result, Packed):
            sizes.append(x.nbytes)
        return result

    monkeypatch.setattr(HostMemory, "pack", counted)
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 300)
    monkeypatch.setattr(decoder, "OFFLOADED_ROWS", 6)
    torch._dynamo.reset()
    return sizes


def grouped(config: ModelConfig, groups: int) -> Decoder:
    model = Decoder(config).double()
    model.keep_activations("block", offloaded_blocks=config.n_layers, head_groups=groups)
    return model


def gradients(model: Decoder, length: int = LENGTH, **options: Any) -> dict[str, Tensor]:
    """Returns the gradients of the parameters by name, with biases and norms away from their initial values."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype))
    x, labels = torch.randint(0, HEADS.vocab_size, (2, 1, length), generator=generator)
    cast("Any", model(x, torch.arange(length), labels=labels, **options)).total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-12, rtol=0, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize(
    ("config", "documents"),
    [
        (HEADS, None),
        (QWEN3, None),
        (replace(QWEN3, sliding_window=5, sliding_layers=(1,)), None),
        (QWEN3, (0, 7, 12, 20)),
        (replace(HEADS, n_kv_heads=8), None),  # no grouped queries
    ],
)
def test_gradients_and_bytes_on_the_host_are_those_of_one_group(
    config: ModelConfig, documents: tuple[int, ...] | None, groups: int, compiled: bool, packed: list[int]
) -> None:
    options: dict[str, Any] = {} if documents is None else {"documents": rf.Documents(torch.tensor(documents))}
    expected = gradients(Decoder(config).double(), **options)
    assert not packed
    assert_same(gradients(grouped(config, 1), **options), expected)
    whole = sum(packed)
    packed.clear()
    model, frames = grouped(config, groups), CompileCounterWithBackend("aot_eager")
    if compiled:
        model.compile_blocks(frames)
    assert_same(gradients(model, **options), expected)
    assert sum(packed) == whole
    assert len(packed) == config.n_layers * (1 + 2 * groups)  # the input, and out and lse of each group
    kinds = 1 if config.sliding_layers is None else 2
    assert frames.frame_count == compiled * (kinds + 2)  # a graph serves all groups; the last piece is shorter


def test_inductor_gives_the_same(packed: list[int]) -> None:
    model = grouped(QWEN3, 2)
    model.compile_blocks()
    assert_same(gradients(model), gradients(Decoder(QWEN3).double()))
    assert len(packed) == 3 * 5


def test_a_graph_has_the_heads_of_one_group(packed: list[int]) -> None:
    seen: Counter[tuple[str, int]] = Counter()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if "ringflash.attention" in str(node.target):
                heads = node.args[0 if "backward" not in str(node.target) else 2].meta["val"].shape[2]
                seen[str(node.target), heads] += 1
        return nop(graph, inputs)

    model = grouped(HEADS, 4)
    model.compile_blocks(aot_autograd(fw_compiler=count, bw_compiler=count))
    gradients(model)
    assert seen == {("ringflash.attention.default", 2): 1, ("ringflash.attention_backward.default", 2): 1}


def test_any_number_of_lengths_compiles(packed: list[int]) -> None:
    model = grouped(replace(HEADS, sliding_layers=(0, 2), sliding_window=8), 2)
    model.compile_blocks(frames := CompileCounterWithBackend("aot_eager"))
    for length in (20, 40, 57, 64, 70, 100, 130):
        gradients(model, length)
    assert 0 < frames.frame_count <= 16  # 8 for each part of a block


def test_virtual_ranks_run_each_group_on_their_ring(packed: list[int]) -> None:
    context = rf.ContextParallel.local(2)
    positions = context.positions(LENGTH)
    ids, results = positions[None] % HEADS.vocab_size, []
    for groups in (1, 4):
        model = grouped(QWEN3, groups)
        cast("Any", model(ids, positions, context, labels=ids)).total.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(results[1], results[0])


def _sharded(groups: int, compiled: bool) -> dict[str, Tensor]:
    """Returns whole gradients of a model that FSDP2 shards, on every rank of the world, summed over ranks."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # which nothing writes to
    activations.MIN_OFFLOADED_BYTES, decoder.OFFLOADED_ROWS = 300, 6
    mesh, model = init_device_mesh("cpu", (2,)), grouped(QWEN3, groups)
    if compiled:
        model.compile_blocks("aot_eager")
    shard_model(model, model.layers, mesh, torch.float64, head=model.lm_head)
    for _ in range(2):  # the second step gathers into memory that the first has freed
        model.zero_grad()
        positions = torch.arange(LENGTH) % 7 + mesh.get_rank()
        ids = positions[None] % HEADS.vocab_size
        cast("Any", model(ids, positions, labels=ids)).total.backward()
    return {name: cast("DTensor", p.grad).full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
def test_sharded_weights_are_cut_as_they_are_gathered(compiled: bool) -> None:
    one, two = (run_ranks(2, _sharded, groups, compiled) for groups in (1, 4))
    assert_same(two[0], one[0])


def test_a_whole_is_copied_once_in_its_own_context(packed: list[int]) -> None:
    memory, weight, x = HostMemory(), torch.ones(3, requires_grad=True), torch.randn(40, 3)
    with memory.hooks((), wholes=(x,)):
        first = (x * weight).sum() + (x * weight).sum() + (x[10:] * weight).sum()
    with memory.hooks((), wholes=(x,)):
        total = first + (x[:30] * weight).sum()
    assert packed == [480]
    total.backward()
    torch.testing.assert_close(weight.grad, 2 * x.sum(0) + x[10:].sum(0) + x[:30].sum(0))


class Replaced(Linear):
    """Layer in place of the decoder's, as a float8 layer or one with an adapter."""


def test_groups_that_cannot_be(packed: list[int]) -> None:
    text = "head_groups: expected 1 without offloaded blocks, got 2"
    with pytest.raises(ConfigError, match=text):
        Decoder(HEADS).keep_activations("block", kept_blocks=1, head_groups=2)
    for groups in (0, 3, 8):
        with pytest.raises(ConfigError, match=f"head_groups: expected a divisor of 4 KV heads, got {groups}"):
            grouped(HEADS, groups)
    model = Decoder(HEADS)
    model._blocks()[1].self_attn.k_proj.__class__ = Replaced
    model.keep_activations("block", offloaded_blocks=1, head_groups=2)  # the replaced layer is in another block
    text = "head_groups: expected 1 for layers in place of the decoder's, got 2 with Replaced"
    with pytest.raises(ConfigError, match=text):
        model.keep_activations("block", offloaded_blocks=2, head_groups=2)


def most_held(groups: int, config: ModelConfig, tokens: int) -> int:
    """Returns the most bytes that a compiled step of a Decoder allocates, of which all blocks are offloaded."""
    model, ids = Decoder(config), torch.zeros(1, tokens, dtype=torch.int64)
    model.keep_activations("block", offloaded_blocks=config.n_layers, head_groups=groups)
    model.compile_blocks()

    def step() -> None:
        cast("Any", model(ids, torch.arange(tokens), labels=ids)).total.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    assert run.profiler is not None
    events = sorted(cast("Any", run.profiler.kineto_results).events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def test_the_peak_falls_as_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(memory: HostMemory, x: Tensor) -> Packed:
        return Packed([torch.from_numpy(x.flatten().numpy().copy())], x.shape, x.device, None, x)  # not torch's memory

    def forward(call: OneDevice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(q.shape), torch.ones(q.shape[0], q.shape[2], q.shape[1])

    def backward(call: OneDevice, dout: Tensor, dlse: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
        # The last one is the float32 sum of dq, as in the kernels of a GPU.
        dq, dk, dv, _ = (torch.ones(x.shape) for x in (*tensors[:3], tensors[0]))
        return dq, dk, dv, None

    monkeypatch.setattr(HostMemory, "_taken", taken)
    monkeypatch.setattr(OneDevice, "forward", forward)
    monkeypatch.setattr(OneDevice, "backward", backward)
    for module in (activations, memory):
        monkeypatch.setattr(module, "AHEAD_BYTES", 0)
    for module in (decoder, memory):
        monkeypatch.setattr(module, "OFFLOADED_ROWS", 128)
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 1)
    torch._dynamo.reset()
    tokens, config = 8192, replace(HEADS, dim=256, n_heads=16, n_layers=2, ffn_dim=640)
    shape = TrainingShape(tokens, compute_dtype=torch.float32, copied=False, in_pieces=True, compiled=True)
    shape = replace(shape, checkpointing="block", offloaded_blocks=2)
    held = {groups: most_held(groups, config, tokens) for groups in (1, 2, 4)}
    estimates = {n: estimate_memory(config, replace(shape, head_groups=n)).expected or 0 for n in held}
    for groups in (2, 4):
        assert held[1] - held[groups] == pytest.approx(estimates[1] - estimates[groups], rel=0.05)
    assert held[1] > held[2] + tokens * config.dim * 4 > held[4] + 1.5 * tokens * config.dim * 4
