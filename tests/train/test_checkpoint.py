"""Checkpoints: resume at another world size, damage, other models, unsafe content."""

from __future__ import annotations

import hashlib
import json
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringflash.errors import CheckpointError
from ringflash.train.checkpoint import MANIFEST, STATE, TENSOR_INDEX, load_decoder, save, verify
from tests.distributed import run_ranks
from tests.train.conftest import Worlds
from tests.train.runs import MODEL, Outcome


@pytest.fixture
def folder(worlds: Worlds, tmp_path: Path) -> Path:
    """A checkpoint of two ranks, to damage."""
    return Path(shutil.copytree(worlds.folder / "two", tmp_path / "checkpoint"))


def sign(folder: Path, name: str) -> None:
    """Makes the manifest agree with a changed file."""
    manifest = json.loads((folder / MANIFEST).read_text())
    content = (folder / name).read_bytes()
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.proof,)


def test_resume_at_other_world_sizes(worlds: Worlds) -> None:
    curve = [loss for n in (2, 3, 1) for loss in worlds[n]["resumed"].logged["train/loss"]]
    straight = worlds[1]["straight"]
    assert len(curve) == 9
    assert curve == pytest.approx(straight.logged["train/loss"], rel=1e-8)
    resumed = worlds[1]["resumed"]
    assert resumed.extra["step"] == straight.extra["step"] == 9
    assert [worlds[n]["resumed"].extra["epochs_seen"] for n in (2, 3, 1)] == [0, 1, 2]
    for name, weight in straight.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, atol=1e-8, rtol=0)


def test_decoder_of_one_process(worlds: Worlds) -> None:
    decoder = load_decoder(worlds.folder / "three", dtype=torch.float64)
    expected: Outcome = worlds[3]["resumed"]
    assert decoder.config == MODEL
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in decoder.named_parameters())
    assert next(load_decoder(str(worlds.folder / "three")).parameters()).dtype == torch.float32


def test_other_model(worlds: Worlds) -> None:
    for rank in worlds.ranks[2]:
        kind, text = rank["other model"]
        assert kind == "CheckpointError"
        assert "ffn_dim 96 (now 128), tie_embeddings False (now True)" in text


def test_missing_folder(worlds: Worlds) -> None:
    assert all(rank["missing"][0] == "CheckpointError" for rank in worlds.ranks[2])
    assert "no such folder" in worlds[2]["missing"][1]  # type: ignore[index]
    with pytest.raises(CheckpointError, match="no such folder"):
        load_decoder(worlds.folder / "nowhere")


def test_damage_is_seen_by_every_rank(worlds: Worlds) -> None:
    for rank in worlds.ranks[2]:
        kind, text = rank["damaged"]
        assert kind == "CheckpointError"
        assert "__1_0.distcp" in text
        assert "other content" in text


@pytest.mark.parametrize("name", [STATE, TENSOR_INDEX, MANIFEST, "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_file(folder: Path, name: str, damage: str) -> None:
    file = folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(bytes(content) if damage == "flip" else bytes(content)[:-1])
    with pytest.raises(CheckpointError, match=name if (name, damage) != (MANIFEST, "flip") else None):
        load_decoder(folder)


def test_every_rank_verifies_a_part(folder: Path) -> None:
    content = bytearray((folder / STATE).read_bytes())
    content[-1] ^= 1
    (folder / STATE).write_bytes(bytes(content))
    raised = []
    for part in range(2):
        try:
            verify(folder, part=part, parts=2)
        except CheckpointError:
            raised.append(part)
    assert len(raised) == 1


def test_malicious_index(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (folder / TENSOR_INDEX).write_bytes(pickle.dumps(Payload(proof)))
    sign(folder, TENSOR_INDEX)
    with pytest.raises(CheckpointError, match="which no index of tensors needs"):
        load_decoder(folder)
    assert not proof.exists()


def test_malicious_state(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    torch.save({"model_config": Payload(proof)}, folder / STATE)
    sign(folder, STATE)
    with pytest.raises(CheckpointError, match="unreadable"):
        load_decoder(folder)
    assert not proof.exists()


def test_malicious_manifest(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../two/state.pt"] = manifest["files"][STATE]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"\.\./two"):
        load_decoder(folder)


def _save_on_two(folder: str) -> list[str]:
    """Saves over a leftover, then with a full disk on rank 1, then an object; returns what was raised."""
    tensor = torch.arange(40_000.0).reshape(200, 200) + dist.get_rank()
    checkpoint = {"state_dict": {f"rank {dist.get_rank()}": tensor}, "epoch": 1}
    path, texts = Path(folder) / "checkpoint", []
    if dist.get_rank() == 0:
        (Path(folder) / ".checkpoint.partial").mkdir()
    save(checkpoint, path)
    before = (path / MANIFEST).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        save(checkpoint, path)
    except CheckpointError as error:
        texts.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        save({**checkpoint, "hyper_parameters": {"path": Path(folder)}}, path)
    except CheckpointError as error:
        texts.append(str(error))
    dist.barrier()
    verify(path)
    assert (path / MANIFEST).read_bytes() == before
    save({**checkpoint, "epoch": 2}, path)
    assert torch.load(path / STATE, weights_only=True)["epoch"] == 2
    assert sorted(p.name for p in Path(folder).iterdir()) == ["checkpoint"]
    return texts


def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    for texts in run_ranks(2, _save_on_two, str(tmp_path)):
        full, unsafe = texts
        assert "got rank 1:" in full
        assert "checkpoint['hyper_parameters']" in unsafe
        assert "pathlib.PosixPath" in unsafe
