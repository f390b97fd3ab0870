"""Token files and checkpoints at URLs: in memory, in a folder that a URL names, and on a local S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest

from ringflash.commands.main import main
from ringflash.errors import CheckpointError, ConfigError, DataError
from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.checkpoint.manifest import MANIFEST, STATE, TENSOR_INDEX, Keep, verify
from ringflash.train.data.corpus import load_corpus
from ringflash.train.data.prepare import Recipe, prepare
from ringflash.train.data.tokenizer import RUN_FOLDER, Tokenizer
from ringflash.train.remote import RemoteCopy, check_remote, fetch, fetched, newest_at, whole_url
from tests.helpers.distributed import run_ranks
from tests.train.callbacks.test_checkpointing import Fitted, fit

ROOT = Path(__file__).parents[2]
TEXT = "a text whose bytes become tokens " * 50


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty file system in the memory of this process."""
    remote = fsspec.filesystem("memory")
    remote.store.clear()
    remote.pseudo_dirs[:] = [""]
    yield remote
    remote.store.clear()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return prepare(str(tmp_path / "text.txt"), tmp_path / "tokens", Recipe(Tokenizer())).folder


def test_token_files_are_copied_once(
    tokens: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.put(str(tokens), "/bucket/tokens", recursive=True)
    files = load_corpus("memory://bucket/tokens", tmp_path / "cache")
    assert [*files.read(0, 0, 10)] == [*TEXT[:10].encode()]
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", None)
        again = load_corpus(["memory://bucket/tokens/"], tmp_path / "cache")
    assert again.folder == files.folder


def test_a_changed_folder_is_copied_again(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/bucket/x/file", b"old")
    first = fetch("memory://bucket/x", "corpus", tmp_path)
    other = fetch("memory://bucket/x/", "corpus", tmp_path)
    memory.pipe("/bucket/x/file", b"newer")
    second = fetch("memory://bucket/x", "corpus", tmp_path)
    assert first == other != second
    assert (second / "file").read_bytes() == b"newer"
    assert (first / "file").read_bytes() == b"old"  # this process uses it


def test_copies_that_no_process_uses_are_removed(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    for step in (1, 2):
        (source / f"step-{step}").mkdir(parents=True)
        (source / f"step-{step}" / "file").write_text("x")
    program = "import sys; from ringflash.train.remote import fetch; fetch(*sys.argv[1:4], family=sys.argv[4])"
    family = f"file://{source}"
    for step in (1, 2):
        command = [sys.executable, "-c", program, f"{family}/step-{step}", "ckpt_path", str(cache), family]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (left,) = (path for path in cache.iterdir() if path.is_dir())
    assert left == fetch(f"{family}/step-2", "ckpt_path", cache, family=family)


def test_a_copy_that_breaks_off_leaves_nothing(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe({"/bucket/x/a": b"12345", "/bucket/x/b": b"12345"})

    def truncated(self: Any, name: str, local: str, **kwargs: Any) -> None:
        Path(local).write_bytes(b"123" if name.endswith("b") else b"12345")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", truncated)
        with pytest.raises(DataError, match=r"3 of 5 bytes of b arrived\. Check the name"):
            fetch("memory://bucket/x", "corpus", tmp_path, DataError)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (fetch("memory://bucket/x", "corpus", tmp_path) / "b").read_bytes() == b"12345"


def test_what_cannot_be_read_is_named(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"corpus: expected a folder at memory://bucket/none, got FileNotFoundError"):
        load_corpus("memory://bucket/none", tmp_path)
    memory.pipe("/bucket/other/file", b"1")
    with pytest.raises(DataError, match=r"dataset\.json"):
        load_corpus("memory://bucket/other", tmp_path)
    with pytest.raises(CheckpointError, match=r"nosuch://x, got ValueError: .* Install the package that fsspec names"):
        fetched("nosuch://x", "--checkpoint")

    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("no credentials")

    monkeypatch.setattr(type(memory), "find", refused)
    with pytest.raises(
        DataError, match=r"got PermissionError: no credentials\. .* credentials and network of this host"
    ):
        load_corpus("memory://bucket/other", tmp_path)


def test_no_name_leads_out_of_the_copy(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"/bucket/x/../../evil": {"name": "/bucket/x/../../evil", "size": 1}}
    monkeypatch.setattr(type(memory), "find", lambda self, path, detail: entry)
    with pytest.raises(CheckpointError, match="PermissionError: .* leads out of the folder"):
        fetch("memory://bucket/x", "corpus", tmp_path)


def write_checkpoint(url: str, step: int, folder: Path, keep: Keep | None = None) -> None:
    copy = RemoteCopy(url, step)
    copy.begin()
    (folder / MANIFEST).write_text(json.dumps({"written": step, "files": {STATE: {}, TENSOR_INDEX: {}}}))
    (folder / "data").write_text("x")
    for name in ("data", MANIFEST):
        copy.add(folder / name)
    copy.retire(keep)


def test_checkpoints_that_keep_excludes_are_removed(tmp_path: Path, memory: Any) -> None:
    url = "memory://bucket/run[1]*"  # no pattern
    write_checkpoint("memory://bucket/run1", 1, tmp_path)
    for step in (2, 3, 4, 5):
        write_checkpoint(url, step, tmp_path, Keep(2, every_n_steps=2))
    left = [name.rpartition("/")[2] for name in memory.ls("/bucket/run[1]*", detail=False)]
    assert sorted(left) == ["step-00000002", "step-00000004", "step-00000005"]
    assert newest_at(url, "ckpt_path") == f"{url}/step-00000005"
    RemoteCopy(url, 5).begin()  # an incomplete checkpoint is none
    assert newest_at(url, "ckpt_path") == f"{url}/step-00000004"
    assert newest_at("memory:/bucket/run1", "ckpt_path") == "memory://bucket/run1/step-00000001"


def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path, memory: Any) -> None:
    write_checkpoint("memory://bucket/run", 1, tmp_path)
    memory.pipe({"/bucket/run/step-00000002/manifest.json": b"{", "/bucket/run/other/manifest.json": b"[]"})
    assert newest_at("memory://bucket/run", "ckpt_path") == "memory://bucket/run/step-00000001"
    write_checkpoint("memory://bucket/run", 3, tmp_path, Keep(1))
    assert newest_at("memory://bucket/run", "ckpt_path") == "memory://bucket/run/step-00000003"


def test_a_new_run_keeps_the_checkpoints_of_another(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_remote("memory://bucket/run", fresh=True)
    write_checkpoint("memory://bucket/run", 9, tmp_path)
    check_remote("memory://bucket/run", fresh=False)
    with pytest.raises(CheckpointError, match=r"got step-00000009\. Resume with --ckpt_path=memory://bucket/run, or"):
        check_remote("memory://bucket/run", fresh=True)
    assert not memory.exists("/bucket/run/.ringflash")

    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(type(memory), "pipe_file", refused)
    with pytest.raises(CheckpointError, match=r"remote: expected a folder at .* got PermissionError: read only"):
        check_remote("memory://bucket/run", fresh=False)


def test_a_file_system_that_tells_no_sizes(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/bucket/x/file", b"12345")
    listed = {"/bucket/x/file": {"name": "/bucket/x/file", "size": None}}
    monkeypatch.setattr(type(memory), "find", lambda self, path, detail: listed)
    assert (fetch("memory://bucket/x", "corpus", tmp_path) / "file").read_bytes() == b"12345"
    monkeypatch.setattr(type(memory), "info", lambda self, path: {"size": None})
    with pytest.raises(CheckpointError, match="does not tell the size of /bucket/x/file"):
        fetch("memory://bucket/x", "corpus", tmp_path)


def test_urls_that_path_has_shortened_are_whole_again() -> None:
    for url in ("s3://bucket/run", "file:///tmp/run", "memory://x"):
        assert whole_url(Path(url)) == whole_url(url + "/") == url
    assert whole_url("hdfs:///user/x") == "hdfs:///user/x"


def test_bad_remotes() -> None:
    with pytest.raises(ConfigError, match="remote: expected a URL"):
        LastCheckpoint(remote="/tmp/run")
    trainer = pl.Trainer(logger=False, accelerator="cpu", devices=1)
    with pytest.raises(ConfigError, match="strategy: expected RingAttentionStrategy for copies at a URL"):
        LastCheckpoint(remote="memory://run").on_train_start(trainer, pl.LightningModule())


def _runs(base: str, url: str, cache: str) -> dict[str, Fitted]:
    root, runs = Path(base), dict[str, Fitted]()
    os.environ["HOME"] = cache  # of the copies
    saver = LastCheckpoint(2, keep=2, remote=url)
    runs["straight"] = fit(root / "straight", 6)
    runs["half"] = fit(root / "half", 3, saver)
    runs["resumed"] = fit(root / "resumed", 6, LastCheckpoint(100, remote=url), resume=Path(url))
    runs["none"] = fit(root / "none", 6, resume=Path(f"{url}/none"))
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Fitted]]:
    Tokenizer().save(folder / "resumed" / RUN_FOLDER)  # as a run with a log does
    return run_ranks(2, _runs, str(folder), f"file://{folder}/bucket", str(folder / "home"))


def test_a_run_resumes_from_its_copy(folder: Path, runs: list[dict[str, Fitted]]) -> None:
    for rank in runs:
        assert rank["half"].error == rank["resumed"].error == ""
        resumed = {**rank["half"].losses, **rank["resumed"].losses}
        assert resumed == rank["straight"].losses
    steps = sorted(path.name for path in (folder / "bucket").iterdir())
    assert steps == ["step-00000003", "step-00000006"]  # the newest two
    for step in steps:
        verify(folder / "bucket" / step)


def test_commands_take_the_copy_with_its_tokenizer(
    folder: Path, runs: list[dict[str, Fitted]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    url = f"file://{folder}/bucket"
    assert (
        main(["generate", "--checkpoint", url, "--prompt", "a text", "--max-new-tokens", "3", "--device", "cpu"]) == 0
    )
    assert "a text" in capsys.readouterr().out
    assert main(["generate", "--checkpoint", f"{url}/none", "--prompt", "a"]) != 0
    assert "--checkpoint: expected a folder at file://" in capsys.readouterr().err


def test_ranks_say_together_that_there_is_no_checkpoint(runs: list[dict[str, Fitted]]) -> None:
    for rank in runs:
        assert "CheckpointError" in rank["none"].error
        assert "ckpt_path: expected a folder at file://" in rank["none"].error


def test_an_s3_server(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs where s3fs and moto are installed, which are no packages of the tests, because they pin others."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        remote = fsspec.filesystem("s3", skip_instance_cache=True)
        remote.mkdir("bucket")
        remote.put(str(tokens), "bucket/tokens", recursive=True)
        files = load_corpus("s3://bucket/tokens", tmp_path / "cache")
        assert [*files.read(0, 0, 10)] == [*TEXT[:10].encode()]
        check_remote("s3://bucket/run", fresh=True)
        for step in (1, 2):
            write_checkpoint("s3://bucket/run", step, tmp_path, Keep(1))
        assert newest_at("s3://bucket/run", "ckpt_path") == "s3://bucket/run/step-00000002"
        assert {path.name for path in fetched("s3://bucket/run", "ckpt_path").iterdir()} == {MANIFEST, "data"}
        with pytest.raises(DataError, match="expected a folder at s3://none/tokens"):
            load_corpus("s3://none/tokens", tmp_path / "cache")
    finally:
        server.stop()
