"""The training benchmark runs, its contenders train the same model, and failures are said in rows on all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash.bench import trainees, training
from ringflash.train.model import Decoder
from tests.distributed import run_ranks

SMALL = "--shapes tiny --peers --eager --steps 2 --warmup 1"


def test_two_processes(tmp_path: Path) -> None:
    results = run_ranks(2, _everything, str(tmp_path))
    for rows, failed, full in results:
        print(rows, failed)
        assert [(row["name"], row["context"]) for row in rows] == [
            (name, context) for context in (64, 128) for name in (training.OURS, training.PEER)
        ]
        for ours, peer in zip(rows[::2], rows[1::2], strict=True):
            assert ours["loss"] == pytest.approx(peer["loss"], abs=2e-4)
            assert ours["loss"][1] < ours["loss"][0]
            assert ours["over_peer"] == pytest.approx(peer["seconds"] / ours["seconds"], rel=0.05)
            assert ours["tokens_per_second_per_gpu"] == pytest.approx(ours["context"] / ours["seconds"] / 2, rel=0.01)
            assert len(ours["each_seconds"]) == 2
            assert (ours["transport"], ours["dtype"], ours["world_size"]) == ("gloo", "float32", 2)
        # torch's own attention has no ring of CPUs.
        assert "failed" not in failed[0]
        assert failed[1]["failed"].startswith("NotImplementedError: Operator aten._scaled_dot_product")
        assert full[0]["failed"] == "OutOfMemoryError: tried to allocate 9 TiB"
        assert full[1]["failed"] == "not tried: out of memory at 64"
    record = json.loads((tmp_path / "training.json").read_text())
    assert [row["loss"] for row in record["rows"]] == [row["loss"] for row in results[0][0]]
    assert record["command"].startswith("torchrun --nproc-per-node 2 -m ringflash.bench training --shapes tiny")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def _everything(folder: str) -> tuple[list[dict[str, Any]], ...]:
    mesh = init_device_mesh("cpu", (2,))
    failed = training.run([*SMALL.split(), "--contexts", "64"], mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainees, "_attend", _gathered_attention)
        written = ["--json", f"{folder}/training.json", "--png", f"{folder}/training.png"]
        rows = training.run([*SMALL.split(), "--contexts", "128", "64", *written], mesh)
        if mesh.get_rank() == 1:
            patch.setattr(trainees, "_on_device", _out_of_memory)
        else:
            patch.setattr(trainees, "_on_device", lambda *args: pytest.fail("not reached"))
    return rows, failed, []


def _out_of_memory(*args: object) -> Decoder:
    raise torch.OutOfMemoryError("tried to allocate 9 TiB\nand more")


def _gathered_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What context_parallel makes of scaled_dot_product_attention: causal, keys and values of all ranks, in zigzag."""
    context = rf.ContextParallel(torch.distributed.group.WORLD, fixed_lengths=True)
    seqlen = 2 * q.shape[2]
    k, v = (collectives.all_gather_tensor_autograd(x.contiguous(), 2, torch.distributed.group.WORLD) for x in (k, v))
    positions = torch.arange(seqlen)
    whole = torch.cat([rf.ContextParallel.local(2).shard(positions, dim=0)])
    hidden = context.positions(seqlen)[:, None] < whole
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v
