"""Loading of checkpoints: resume at another world size, damage, other models, unsafe content."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringflash.errors import CheckpointCorrupt, CheckpointError
from ringflash.train.checkpoint.load import load, load_adapted, load_decoder
from ringflash.train.checkpoint.manifest import MANIFEST, STATE, TENSOR_INDEX, Keep, locate, verify
from ringflash.train.checkpoint.safe_reader import SafeReader
from ringflash.train.checkpoint.save import save
from ringflash.train.models.lora import BASE, LORA, Lora
from tests.helpers.distributed import run_ranks
from tests.train.conftest import Worlds
from tests.train.runs import MODEL, Outcome


@pytest.fixture
def folder(worlds: Worlds, tmp_path: Path) -> Path:
    """Returns a copy of a checkpoint of two ranks, which a test may damage."""
    return Path(shutil.copytree(worlds.folder / "two", tmp_path / "checkpoint"))


def sign(folder: Path, name: str) -> None:
    """Updates the manifest's size and hash of a changed file."""
    manifest = json.loads((folder / MANIFEST).read_text())
    content = (folder / name).read_bytes()
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


class Payload:
    """An object that creates a file when it is unpickled."""

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
        assert kind == "CheckpointCorrupt"
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
    missing = (name, damage) == (MANIFEST, "remove")  # without a manifest there is no checkpoint
    with pytest.raises(
        CheckpointError if missing else CheckpointCorrupt, match=name if (name, damage) != (MANIFEST, "flip") else None
    ):
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


def test_a_pickle_in_place_of_the_index_is_not_read(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (folder / TENSOR_INDEX).write_bytes(pickle.dumps(Payload(proof)))
    sign(folder, TENSOR_INDEX)
    with pytest.raises(CheckpointCorrupt, match="unreadable"):
        load_decoder(folder)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"dtype": "load"}, "dtype 'load'"),
        ({"shape": [-1]}, "got -1"),
        ({"shape": True}, "shape True"),
        ({"chunks": [{"offsets": [0], "shape": [1], "file": "../state.pt", "start": 0, "length": 1}]}, "a chunk of"),
        ({"chunks": {}}, "chunks {}"),
    ],
)
def test_a_forged_index_is_called_corrupt(folder: Path, change: dict[str, Any], got: str) -> None:
    index = json.loads((folder / TENSOR_INDEX).read_text())
    next(iter(index["tensors"].values())).update(change)
    (folder / TENSOR_INDEX).write_text(json.dumps(index))
    sign(folder, TENSOR_INDEX)
    with pytest.raises(CheckpointCorrupt) as caught:
        load_decoder(folder)
    assert got in str(caught.value)


def test_an_index_names_files_of_its_own_folder_alone(folder: Path) -> None:
    index = json.loads((folder / TENSOR_INDEX).read_text())
    for entry in index["tensors"].values():
        for chunk in entry["chunks"]:
            chunk["file"] = f"../two/{chunk['file']}"
    (folder / TENSOR_INDEX).write_text(json.dumps(index))
    sign(folder, TENSOR_INDEX)
    with pytest.raises(CheckpointCorrupt, match=r"data in '\.\./two/"):
        load_decoder(folder)


@pytest.mark.parametrize("key", ["model_config", "hyper_parameters"])
def test_malicious_state(folder: Path, tmp_path: Path, key: str) -> None:
    proof = tmp_path / "proof"
    torch.save({key: Payload(proof)}, folder / STATE)
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


@pytest.mark.parametrize("name", [STATE, TENSOR_INDEX, "__0_0.distcp", "__1_0.distcp"])
def test_fuzzed_content_with_the_right_digest_loads_or_is_called_corrupt(folder: Path, name: str) -> None:
    content, draw, refused = (folder / name).read_bytes(), random.Random(name), list[CheckpointError]()
    for case in range(40):
        changed = bytearray(content)
        for _ in range(draw.choice([1, 4, 40])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        if case % 4 == 1:
            changed.insert(draw.randrange(10, 400), draw.randrange(256))  # shifts the rest of the first tensor
        (folder / name).write_bytes(changed[: draw.randrange(len(changed))] if case % 4 == 0 else changed)
        sign(folder, name)
        try:
            load_decoder(folder)
        except CheckpointError as error:  # a changed name or shape may look like another model
            refused.append(error)
    damage = [error for error in refused if isinstance(error, CheckpointCorrupt)]
    assert damage
    if name.endswith(".distcp"):
        assert damage == refused
    assert all(Path(error.argument).name in (name, TENSOR_INDEX) for error in damage)


def _load_beside_a_corrupt_one(folder: str) -> dict[str, list[float]]:
    found = {}
    for name in (STATE, TENSOR_INDEX, "__0_0.distcp"):
        path, module = Path(folder) / name, nn.Linear(3, 2)
        for step in (1, 2):
            save(state_of(filled(step), global_step=step), path / "last", keep=Keep(2))
        if dist.get_rank() == 0:
            size = (path / "last" / name).stat().st_size
            (path / "last" / name).write_bytes(b"x" * size)
            sign(path / "last", name)
        dist.barrier()
        step = load(path, module, [])["global_step"]
        found[name] = [step, module.weight[0, 0].item()]
    return found


def test_corrupt_content_with_the_right_digest_falls_back_on_every_rank(tmp_path: Path) -> None:
    expected = {name: [1, 1.0] for name in (STATE, TENSOR_INDEX, "__0_0.distcp")}
    assert run_ranks(2, _load_beside_a_corrupt_one, str(tmp_path)) == [expected] * 2


def _save_on_two(folder: str) -> list[str]:
    """Returns the errors of saves over a leftover folder, with a full disk on rank 1, and of an unsupported object."""
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
        assert f"got rank 1: OSError: the disk of {tmp_path}/.checkpoint.partial is full" in full
        assert "inline_container" not in full
        assert "checkpoint['hyper_parameters']" in unsafe
        assert f"{type(Path()).__module__}.PosixPath" in unsafe  # Python 3.13 names a module within pathlib


def state_of(module: nn.Module, **more: Any) -> dict[str, Any]:
    return {"state_dict": dict(module.state_dict()), **more}


def filled(value: int) -> nn.Linear:
    module = nn.Linear(3, 2)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def refusal(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except CheckpointError as error:
        return str(error)
    return "nothing raised"


def _save_over_other_things(folder: str) -> list[str]:
    names = ("thesis", "empty", "program", "file", ".")
    return [refusal(save, state_of(filled(1)), Path(folder) / name) for name in names]


def test_saving_deletes_nothing_but_checkpoints(tmp_path: Path) -> None:
    for name in ("thesis", "empty", "program"):
        (tmp_path / name).mkdir()
    contents = {"thesis/thesis.txt": "years", "program/manifest.json": '{"files": {"a.js": 1}}', "file": "notes"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    for texts in run_ranks(2, _save_over_other_things, str(tmp_path)):
        assert all("expected a new name, or a checkpoint to replace" in text for text in texts), texts
        assert "thesis: expected" in texts[0]
        assert "got a file" in texts[3]
    assert sorted(tmp_path.rglob("*")) == before
    assert all((tmp_path / name).read_text() == content for name, content in contents.items())


class Killed(BaseException):
    """An exception in place of the process's end."""


def _loaded(path: Path) -> float:
    module = filled(-1)
    load(path, module, [])
    assert (module.weight == module.weight[0, 0]).all()
    assert (module.bias == module.weight[0, 0]).all()
    return module.weight[0, 0].item()


def _saves_killed_everywhere(folder: str, between_renames: bool) -> list[float]:
    """Returns the loaded values after a save of 2 over 1 that dies before its n-th file system change, for all n."""
    seen = []
    for last in count():
        path = Path(folder) / str(last) / "checkpoint"
        save(state_of(filled(1)), path)
        if between_renames:
            path.rename(path.parent / ".checkpoint.old")
            assert _loaded(path) == 1
        changes = count()

        def dying(change: Callable[..., Any], changes: count[int] = changes, last: int = last) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(changes) >= last:
                    raise Killed
                return change(*args, **kwargs)

            return call

        complete = True
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                save(state_of(filled(2)), path)
            except (Killed, CheckpointError):  # DCP converts even a KeyboardInterrupt to an error
                complete = False
        seen.append(_loaded(path))
        verify(locate(path))
        save(state_of(filled(3)), path)
        assert _loaded(path) == 3
        assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]
        if complete:
            return seen
    raise AssertionError


@pytest.mark.parametrize("between_renames", [False, True])
def test_a_kill_at_any_point_leaves_a_checkpoint(tmp_path: Path, between_renames: bool) -> None:
    (seen,) = run_ranks(1, _saves_killed_everywhere, str(tmp_path), between_renames)
    assert len(seen) > 5
    assert {seen[0], seen[-1]} == {1, 2}
    assert seen == sorted(seen)


def _save_over_a_link(folder: str) -> tuple[float, float]:
    target, link = Path(folder) / "first", Path(folder) / "last"
    save(state_of(filled(1)), target)
    link.symlink_to(target)
    for value in (2, 3):
        save(state_of(filled(value)), link)
    return _loaded(target), _loaded(link)


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    assert run_ranks(1, _save_over_a_link, str(tmp_path)) == [(1, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "last"]


def _other_names(folder: str) -> list[str]:
    path = Path(folder) / "checkpoint"
    deep, shallow = (nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))) for depth in (3, 2))
    momentum, plain = (torch.optim.SGD(deep.parameters(), lr=0.1, momentum=m) for m in (0.9, 0.0))
    names = [name for name, _ in deep.named_parameters()]
    buffers = {name: {"momentum_buffer": torch.ones_like(p)} for name, p in deep.named_parameters()}
    group = {**momentum.state_dict()["param_groups"][0], "params": names}
    save(state_of(deep, optimizer_states=[{"state": buffers, "param_groups": [group]}]), path)
    load(path, deep, [momentum])
    texts = [
        refusal(load, path, shallow, []),
        refusal(load, path, deep, [plain]),
        refusal(load, path, deep, [momentum, plain]),
    ]
    counted = {"state": {names[0]: {"step": 4}}, "param_groups": [group]}
    texts.append(refusal(save, state_of(deep, optimizer_states=[counted]), path))
    texts.append(refusal(save, {"state_dict": {"_extra_state": {"scale": 2}}}, path))
    load(path, deep, [momentum])
    return texts


def test_other_names(tmp_path: Path) -> None:
    for texts in run_ranks(2, _other_names, str(tmp_path)):
        model, optimizer, optimizers, counter, extra = texts
        assert "the 4 tensors under model.* that there is a place for, got 2 more, the first model.2.bias" in model
        assert "tensors under optimizer.0.* that there is a place for, got 6 more" in optimizer
        assert "the state of 2 optimizer(s), got 1. Resume with the optimizers" in optimizers
        assert "optimizer.0.0.weight.step: expected a tensor, got int" in counter
        assert "model._extra_state: expected a tensor, got dict" in extra


class PartlyUsed(nn.Module):
    """A module with a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _resumed_without_gradients(folder: str) -> list[dict[str, float]]:
    """Returns the steps that AdamW counted for each parameter, before a save and after it was loaded."""
    counts = []
    for _ in range(2):
        model = PartlyUsed()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters())
        if counts:
            load(Path(folder), model, [optimizer])
        else:
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            states = [get_optimizer_state_dict(model, optimizer)]
            save({"state_dict": get_model_state_dict(model), "optimizer_states": states}, Path(folder) / "last")
        names = dict(model.named_parameters()).items()
        counts.append({name: float(optimizer.state[p]["step"]) for name, p in names if p in optimizer.state})
    return counts


def test_a_parameter_that_had_no_gradient_resumes_without_a_state(tmp_path: Path) -> None:
    expected = {"used.weight": 1.0, "used.bias": 1.0}
    assert run_ranks(2, _resumed_without_gradients, str(tmp_path)) == [[expected, expected]] * 2


def _load_where_one_rank_cannot_read(folder: str) -> list[str]:
    """Returns the errors of loads while rank 1 alone cannot open a file that rank 0 verifies, for each kind of file."""
    path = Path(folder) / "last"
    save(state_of(filled(1)), path)

    def stale(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    texts: list[str] = []
    for reader in ((torch, "load"), (SafeReader, "read_metadata")):  # of the state, and of the index of tensors
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(*reader, stale)
            texts.append(refusal(load, path, filled(2), []))
        load(path, filled(2), [])
    return texts


def test_a_rank_that_cannot_read_is_named_on_every_rank(tmp_path: Path) -> None:
    texts = run_ranks(2, _load_where_one_rank_cannot_read, str(tmp_path))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    assert all("Stale file handle" in text for text in texts[0])


def test_code_in_the_folder_of_a_base_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, base = tmp_path / "proof", tmp_path / "base"
    base.mkdir()
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (base / "config.json").write_text(json.dumps({"model_type": "unknown", "auto_map": classes}))
    (base / "own.py").write_text(f"from pathlib import Path\nPath({str(proof)!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask, and run it after a yes
    with pytest.raises(CheckpointError, match="the base model of the adapters"):
        load_adapted(tmp_path, {"model_config": {LORA: Lora().fields()}, BASE: str(base)})
    assert not proof.exists()
