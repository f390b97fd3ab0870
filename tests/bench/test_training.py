"""The training benchmark runs, its contenders train the same model, and all ranks report failures in rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash.bench.common.flash_kernels import Kernels
from ringflash.bench.training import flash_attention, throughput, trainees
from ringflash.errors import ArgumentError
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.loss import TokenLosses
from ringflash.train.models.memory import parameter_counts
from tests.helpers.distributed import run_ranks

SMALL = "--shapes tiny --peers --eager --steps 2 --warmup 1"


def test_two_processes(tmp_path: Path) -> None:
    results = run_ranks(2, _everything, str(tmp_path))
    for rows, failed, full, kept in results:
        assert [row["kept_blocks"] for row in kept[:-1]] == [0, 3, 3]  # "auto" on a CPU
        assert len({row["loss"][1] for row in kept[:-1]}) == 1
        assert 'activation_offload: expected activation_checkpointing="block"' in kept[-1]["failed"]
        names = (throughput.OURS, throughput.PEER, throughput.FLASH)
        assert [(row["name"], row["context"]) for row in rows] == [(n, context) for context in (64, 128) for n in names]
        for ours, peer, flash in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            assert ours["loss"] == pytest.approx(peer["loss"], abs=2e-4)
            assert ours["loss"] == pytest.approx(flash["loss"], abs=2e-4)
            assert ours["loss"][1] < ours["loss"][0]
            fastest = min(peer["seconds"], flash["seconds"])
            assert ours["over_peer"] == pytest.approx(fastest / ours["seconds"], rel=0.05)
            assert (flash["kernels"], flash["layout"]) == ("math", "contiguous")
            assert ours["tokens_per_second_per_gpu"] == pytest.approx(ours["context"] / ours["seconds"] / 2, rel=0.01)
            assert len(ours["each_seconds"]) == 2
            assert (ours["transport"], ours["dtype"], ours["world_size"]) == ("gloo", "float32", 2)
        # torch's own attention cannot run a ring on CPUs.
        assert "failed" not in failed[0]
        assert failed[1]["failed"].startswith("NotImplementedError: Operator aten._scaled_dot_product")
        said = ["OutOfMemoryError: rank 0 tried to allocate 9 TiB", "not tried: out of memory at 64"]
        assert [row["failed"] for row in full] == [text for text in said for _ in range(3)]
    record = json.loads((tmp_path / "training.json").read_text())
    assert [row["loss"] for row in record["rows"]] == [row["loss"] for row in results[0][0]]
    assert record["command"].startswith("torchrun --nproc-per-node 2 -m ringflash.bench training --shapes tiny")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def _everything(folder: str) -> tuple[list[dict[str, Any]], ...]:
    mesh = init_device_mesh("cpu", (2,))
    failed = throughput.run([*SMALL.split(), "--seqlens", "64"], mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainees, "_attend", _gathered_attention)
        patch.setattr(flash_attention, "installed_kernels", lambda: Kernels("math", _forward, _backward))
        written = ["--json", f"{folder}/training.json", "--png", f"{folder}/training.png"]
        rows = throughput.run([*SMALL.split(), "--seqlens", "128", "64", *written], mesh)
        for module in (trainees, flash_attention):
            patch.setattr(module, "on_device", _out_of_memory)
        full = throughput.run([*SMALL.split(), "--seqlens", "64", "128"], mesh)
    shape = "--shapes tiny --eager --steps 1 --warmup 1 --seqlens 64 --layers 3 --activations"
    choices = ("block", "none", "auto", "auto --offload")
    kept = [row for choice in choices for row in throughput.run([*shape.split(), *choice.split()], mesh)]
    return rows, failed, full, kept


def test_float8_linear_layers() -> None:
    pytest.importorskip("torchao")
    (usual, *float8), _ = run_ranks(2, _with_linears)
    assert [row["linears"] for row in (usual, *float8)] == ["compute", "fp8", "fp8_rowwise"]
    for row in float8:
        assert row["loss"] != usual["loss"]
        assert row["loss"] == pytest.approx(usual["loss"], abs=0.02)


def _with_linears() -> list[dict[str, Any]]:
    options = "--shapes tiny --eager --steps 1 --warmup 1 --seqlens 64 --linears compute fp8 fp8_rowwise"
    return throughput.run(options.split(), init_device_mesh("cpu", (2,)))


def _out_of_memory(*args: object) -> Decoder:
    raise torch.OutOfMemoryError(f"rank {dist.get_rank()} tried to allocate 9 TiB\nand more")


class _Gather(torch.autograd.Function):
    """Concatenates the shards of all ranks along dimension 2, in rank order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> Tensor:
        total = dout[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def _gathered_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Replaces scaled_dot_product_attention under context_parallel: causal, over all ranks' keys in a zigzag layout."""
    context = rf.ContextParallel.local(2)
    positions = context.shard(torch.arange(2 * q.shape[2]), dim=0)
    hidden = positions.chunk(2)[dist.get_rank()][:, None] < positions
    scores = (q @ _Gather.apply(k).transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ _Gather.apply(v)


def _probabilities(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns softmax of causal scores and lse, from query and KV heads of equal number."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]), lse


def _repeated(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in tensors]


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    assert causal
    keys, values = _repeated(q, k, v)
    p, lse = _probabilities(q, keys, scale)
    return torch.einsum("bhqk,bkhd->bqhd", p, values), lse


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> None:
    _, scale, _, dq, dk, dv = rest
    keys, values = _repeated(q, k, v)
    p, _ = _probabilities(q, keys, scale)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, values)
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, keys))
    for target, weights, x in ((dk, ds, q), (dv, p, dout)):
        whole = torch.einsum("bhqk,bqhd->bkhd", weights, x)
        target.copy_(whole.unflatten(2, (target.shape[2], -1)).sum(3))


def test_blocks_that_checkpoint_run_attention_once() -> None:
    ((losses, calls),) = run_ranks(1, _steps_on_flash_attention)
    assert losses[0] == losses[1]
    assert calls == [2, 2]  # in one step of two blocks, with nothing and with everything but attention recomputed


def _steps_on_flash_attention() -> tuple[list[float], list[int]]:
    losses, calls = [], []

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        calls[-1] += 1
        return _forward(*args)

    mesh = init_device_mesh("cpu", (1,))
    given = (trainees.SHAPES["tiny"], 64, mesh, mesh, torch.device("cpu"), torch.float32, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "installed_kernels", lambda: Kernels("math", forward, _backward))
        for activations in ("none", "block"):
            calls.append(0)
            with flash_attention.flash_attention(trainees.Training(*given, activations=activations)) as trainee:
                losses.append(trainee.step().item())
    return losses, calls


def test_a_peers_block_is_a_block() -> None:
    config = trainees.SHAPES["tiny"]
    decoder, peer = Decoder(config, seed=1).double(), trainees.PeerDecoder(config).double()
    peer.load_state_dict(decoder.state_dict())
    ids, positions = torch.randint(config.vocab_size, (1, 33)), torch.arange(32)
    losses = []
    for model in (decoder, peer):
        loss = model(ids[:, :-1], positions, labels=ids[:, 1:])
        assert isinstance(loss, TokenLosses)
        loss.total.backward()
        losses.append(loss.total.detach())
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for (name, ours), theirs in zip(decoder.named_parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(("shape", "billions"), [("1b", 1.236), ("8b", 8.030)])
def test_shapes_are_those_of_their_names(shape: str, billions: float) -> None:
    config = trainees.SHAPES[shape]
    block, root = parameter_counts(config)
    assert (config.n_layers * block + root) / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize("changed", ["--layers 0", "--seqlens 0", "--steps 0", "--warmup 0"])
def test_bad_arguments(changed: str) -> None:
    with pytest.raises(ArgumentError, match=f"{changed.split()[0]}: expected at least 1, got 0"):
        throughput.main(changed.split())


def test_peers_have_no_window() -> None:
    with pytest.raises(ArgumentError, match=r"--window: expected nothing with --peers, got 64"):
        throughput.main(["--peers", "--window", "64"])


def test_one_process_has_a_peer_of_its_own(tmp_path: Path) -> None:
    ((rows, windowed),) = run_ranks(1, _alone, str(tmp_path))
    ours, peer, flash = rows
    assert [row["name"] for row in rows] == [throughput.OURS, throughput.PEER_OF_ONE, throughput.FLASH_OF_ONE]
    assert "failed" in flash  # FlashAttention runs on GPUs
    assert (ours["layers"], ours["kept_blocks"], peer["kept_blocks"]) == (1, 1, 1)
    assert ours["loss"] == pytest.approx(peer["loss"], abs=2e-4)
    assert "window" not in ours
    (seen,) = windowed
    assert (seen["window"], seen["offloaded_blocks"], seen["head_groups"]) == (8, 2, 1)
    assert seen["loss"][1] < seen["loss"][0]


def _alone(folder: str) -> tuple[list[dict[str, Any]], ...]:
    arguments = [*SMALL.split(), "--seqlens", "64", "--layers", "1", "--activations", "none"]
    mesh = init_device_mesh("cpu", (1,))
    windowed = [
        "--shapes",
        "tiny",
        "--eager",
        "--steps",
        "1",
        "--warmup",
        "1",
        "--seqlens",
        "64",
        "--window",
        "8",
        "--offload",
    ]
    return throughput.run(arguments, mesh), throughput.run(windowed, mesh)
