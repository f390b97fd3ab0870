"""Activations that blocks keep, recompute or offload: the same gradients, each ring run once, and the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.compilers import nop

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.ops.one_device import OneDevice
from ringflash.ring import schedule
from ringflash.train.models import activations
from ringflash.train.models.activations import HostMemory, Packed
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder, Step
from ringflash.train.models.memory import feed_forward_pieces
from ringflash.train.models.rotary import rotary_angles

CONFIG = ModelConfig(vocab_size=31, dim=32, n_layers=3, n_heads=2, n_kv_heads=1, ffn_dim=48)
SEQLEN = 20

# torch 2.11 warns when its compiler is imported, and when the compiler inspects the input of the second block.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Counts:
    """Counts of attention forwards, and sizes in bytes of the tensors moved to the host's memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rings, self.packed = 0, []
        pack = HostMemory.pack

        def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.rings += 1
                return forward(*args)

            return run

        def counted_pack(memory: HostMemory, x: Tensor) -> Tensor | Packed:
            result = pack(memory, x)
            if isinstance(result, Packed):
                self.packed.append(x.nbytes)
            return result

        for module, name in ((schedule, "forward"), (OneDevice, "forward")):  # with and without a context
            patch.setattr(module, name, counted(getattr(module, name)))
        patch.setattr(HostMemory, "pack", counted_pack)


def gradients(decoder: Decoder) -> tuple[float, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x, labels = torch.randint(0, CONFIG.vocab_size, (2, 1, SEQLEN), generator=generator)
    loss = decoder(x, torch.arange(SEQLEN), labels=labels).total
    loss.backward()
    return loss.item(), [p.grad for p in decoder.parameters() if p.grad is not None]


def test_a_compiled_backward_holds_one_piece_of_a_feed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringflash.train.models.memory.FEED_FORWARD_ROWS", SEQLEN)
    assert feed_forward_pieces(SEQLEN) == [5] * 4
    held: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Records the largest number of rows alive at once in the gate, up, their product and their gradients."""
        nodes = list(graph.graph.nodes)
        spans = []
        for begin, node in enumerate(nodes):
            shape = getattr(node.meta.get("val"), "shape", (0,))
            if shape[-1] == CONFIG.ffn_dim and shape[0] != CONFIG.dim:  # no weight's shape
                spans.append((begin, max(map(nodes.index, node.users), default=begin), shape[0]))
        held.append(max(sum(rows for a, b, rows in spans if a <= at <= b) for at in range(len(nodes))))
        return nop(graph, inputs)

    decoder = Decoder(CONFIG)
    decoder.keep_activations("block")
    decoder.compile_blocks(aot_autograd(fw_compiler=nop, bw_compiler=count))
    gradients(decoder)
    assert min(held) > 0
    assert max(held) <= 6 * 5  # it would be 6 * SEQLEN for all tokens at once


def test_any_number_of_lengths_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringflash.train.models.memory.FEED_FORWARD_ROWS", 64)
    torch._dynamo.reset()
    lengths = [20, 40, 57, 64, 70, 100, 130, 200, 260, 300, 400]
    decoder = Decoder(replace(CONFIG, n_layers=4, sliding_layers=(0, 2), sliding_window=8))  # two kinds of blocks
    decoder.keep_activations("block", kept_blocks=2)
    blocks = decoder._blocks()
    counters = []
    for chosen in (blocks[:2], blocks[2:]):  # those that recompute and those that keep everything are counted apart
        counters.append(CompileCounterWithBackend("aot_eager"))
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_blocks", lambda chosen=chosen: chosen)
            decoder.compile_blocks(counters[-1])
    for seqlen in lengths:
        x = (torch.arange(seqlen) % CONFIG.vocab_size)[None]
        decoder(x, torch.arange(seqlen), labels=x).total.backward()
    assert all(0 < frames.frame_count <= 8 for frames in counters)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_last_blocks_keep_everything_and_losses_stay_bitwise(compiled: bool) -> None:
    results = []
    choice: list[tuple[Any, int]] = [("none", 0), ("block", 0), ("block", 1), ("block", 2), ("block", 3)]
    torch._dynamo.reset()
    for mode, kept in choice:
        decoder = Decoder(CONFIG)
        decoder.keep_activations(mode, kept_blocks=kept)
        if compiled:
            decoder.compile_blocks("aot_eager")
        choices = [block.checkpointing for block in decoder._blocks()]
        assert choices == [mode] * (3 - kept) + ["none"] * kept
        results.append(gradients(decoder))
    for loss, found in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][1], strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("mode", "offload"), [("none", False), ("block", False), ("block", True)])
def test_gradients_are_the_same_and_no_ring_runs_twice(
    mode: Any, offload: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_loss, expected = gradients(Decoder(CONFIG).double())
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 1000)
    counts, frames = Counts(monkeypatch), CompileCounterWithBackend("aot_eager")
    decoder = Decoder(CONFIG).double()
    decoder.keep_activations(mode, offloaded_blocks=CONFIG.n_layers if offload else 0)
    if compiled:
        torch._dynamo.reset()
        decoder.compile_blocks(frames)
    loss, actual = gradients(decoder)
    assert loss == pytest.approx(expected_loss, rel=1e-14)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=0)
    assert counts.rings == CONFIG.n_layers
    assert frames.frame_count == compiled * (1 + offload)  # one graph serves all blocks, or one each of their parts
    # Each block's input and out go to the host, 20 x 32 float64 each. lse is too small to pay, and weights stay.
    assert counts.packed == ([5120] * 6 if offload else [])


def test_what_is_kept_without_checkpointing_is_more() -> None:
    kept, step = {}, Step(*rotary_angles(CONFIG, torch.arange(SEQLEN), torch.float32), None, None, None)
    sizes: list[int] = []
    for mode in ("none", "block"):
        decoder = Decoder(CONFIG)
        decoder.keep_activations(mode)
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.nbytes), x.detach())[1], lambda x: x):
            decoder.layers[1](torch.randn(1, SEQLEN, 32, requires_grad=True), step)
        kept[mode] = sum(sizes)
    assert kept["block"] == SEQLEN * 32 * 4  # the input; attention's results are stored elsewhere
    assert kept["none"] > 10 * kept["block"]


def test_virtual_ranks_are_recomputed_without_their_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    context = rf.ContextParallel.local(2)
    results = []
    for mode in ("none", "block"):
        decoder = Decoder(CONFIG).double()
        decoder.keep_activations(mode)
        counts = Counts(monkeypatch)
        positions = context.positions(SEQLEN)
        x = positions[None] % CONFIG.vocab_size
        decoder(x, positions, context, labels=x).total.backward()
        results.append([p.grad for p in decoder.parameters()])
        assert counts.rings == 2 * CONFIG.n_layers
        monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_host_memory_gives_back_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 64)
    monkeypatch.setattr(activations, "PIECE_BYTES", 320)
    memory, x = HostMemory(), torch.randn(50, 40, device=device).T
    packed, small = memory.pack(x), memory.pack(x[:1, :2])
    assert isinstance(packed, Packed)
    assert isinstance(small, Tensor)
    assert all(piece.is_cpu and piece.is_pinned() == (device == "cuda") for piece in packed.host)
    assert len(packed.host) == (25 if device == "cuda" else 1)
    assert torch.equal(memory.unpack(packed), x)


def test_tensors_leave_behind_and_come_back_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in {"MIN_OFFLOADED_BYTES": 64, "AHEAD_BYTES": 450}.items():
        monkeypatch.setattr(activations, name, value)
    memory, xs = HostMemory(), [torch.randn(100 + i, device=device) for i in range(4)]
    packed = [memory.pack(x) for x in xs]
    dropped = packed.pop(1)  # belongs to a graph without a backward
    del dropped

    def here() -> list[bool]:
        return [isinstance(each, Packed) and each.here is not None for each in packed]

    assert here() == [False, False, True]
    assert torch.equal(memory.unpack(packed[2]), xs[3])
    assert here() == [False, True, False]
    for each, x in zip(reversed(packed[:2]), (xs[2], xs[0]), strict=True):
        assert torch.equal(memory.unpack(each), x)
    assert torch.equal(memory.unpack(packed[2]), xs[3])  # a second time, as with retain_graph
    assert not any(here())
    more = [memory.pack(x) for x in xs]
    assert torch.equal(memory.unpack(more[3]), xs[3])
    assert isinstance(more[2], Packed)
    assert more[2].here is not None
    last = memory.pack(xs[0])  # starts another forward before the backward continues
    assert more[2].here is None
    assert torch.equal(memory.unpack(more[2]), xs[2])
    assert torch.equal(memory.unpack(last), xs[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kept", "offloaded"), [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_blocks_in_pieces_beside_others(
    kept: int, offloaded: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_loss, expected = gradients(Decoder(CONFIG).double())
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 1000)
    monkeypatch.setattr("ringflash.train.models.decoder.OFFLOADED_ROWS", 6)  # 6, 6, 6 and 2 of 20 tokens
    counts, decoder = Counts(monkeypatch), Decoder(CONFIG).double()
    decoder.keep_activations("block", kept_blocks=kept, offloaded_blocks=offloaded)
    if compiled:
        torch._dynamo.reset()
        decoder.compile_blocks("aot_eager")
    loss, actual = gradients(decoder)
    assert loss == pytest.approx(expected_loss, rel=1e-14)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=0)
    assert counts.rings == CONFIG.n_layers
    assert counts.packed == [5120] * 2 * min(offloaded, 3 - kept)  # pieces are parts of what is there already


def test_a_part_shares_the_copy_of_its_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 64)
    monkeypatch.setattr(activations, "AHEAD_BYTES", 64)
    memory, counts = HostMemory(), Counts(monkeypatch)
    weight = torch.ones(3, device=device, requires_grad=True)
    x, other = torch.randn(40, 3, device=device), torch.randn(40, 3, device=device)
    with memory.hooks(()):
        first = (x * weight).sum() + (other * weight).sum()
    with memory.hooks((), wholes=(x,)):
        parts = sum((piece * weight).sum() for piece in (x[:30], x[30:], other[:30]))
    assert counts.packed == [480, 480, 360]  # `other` is no whole
    expected = 2 * x.sum(0) + other.sum(0) + other[:30].sum(0)
    x.add_(1)  # the copies are what counts
    assert isinstance(parts, Tensor)
    (first + parts).backward()
    torch.testing.assert_close(weight.grad, expected)


def test_parts_come_back_for_a_second_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 64)
    memory, weight, x = HostMemory(), torch.ones(3, requires_grad=True), torch.randn(40, 3)
    with memory.hooks(()):
        first = (x * weight).sum()
    with memory.hooks((), wholes=(x,)):
        total = first + (x[:10] * weight).sum()
    for _ in range(2):
        weight.grad = None
        total.backward(retain_graph=True)
        torch.testing.assert_close(weight.grad, x.sum(0) + x[:10].sum(0))


def test_few_tensors_are_on_their_way_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 64)
    memory, xs = HostMemory(), [torch.randn(100) for _ in range(2 * activations.AT_MOST)]
    packed = [memory.pack(x) for x in xs]

    def here() -> list[int]:
        return [i for i, each in enumerate(packed) if isinstance(each, Packed) and each.here is not None]

    assert here() == list(range(activations.AT_MOST, 2 * activations.AT_MOST))
    for i in reversed(range(len(xs))):
        assert torch.equal(memory.unpack(packed[i]), xs[i])
        assert here() == list(range(max(0, i - activations.AT_MOST), i))


def test_a_second_backward_is_refused() -> None:
    decoder = Decoder(CONFIG)
    decoder.keep_activations("block", offloaded_blocks=3)
    x = torch.arange(SEQLEN)[None]
    total = decoder(x, x[0], labels=x).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run its forward again"):
        total.backward()


def test_offloading_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match='activation_offload: expected activation_checkpointing="block" with it'):
        Decoder(CONFIG).keep_activations("none", offloaded_blocks=1)
