"""Folders of checkpoints: those to keep, the newest, the state after a kill, and `ringflash checkpoint verify`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ringflash.commands import main
from ringflash.errors import CheckpointCorrupt, CheckpointError
from ringflash.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSOR_INDEX,
    Keep,
    complete_in,
    entry_of,
    local_path,
    locate,
    partial_of,
    prepare,
    publish,
    verify,
)


def put(path: Path, step: int, keep: Keep | None = None) -> None:
    """Saves a checkpoint that holds its step but no tensors."""
    partial = prepare(path)
    for name in (STATE, TENSOR_INDEX):
        (partial / name).write_text(f"{name} of step {step}")
    publish(path, {file.name: entry_of(file) for file in partial.iterdir()}, step=step, keep=keep)


def steps(folder: Path) -> list[int | None]:
    return [verify(path).step for path in complete_in(folder)]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, [7]),
        (Keep(), [7]),
        (Keep(3), [7, 6, 5]),
        (Keep(1, 3), [7, 6, 3]),
        (Keep(3, 2), [7, 6, 5, 4, 2]),
    ],
)
def test_which_stay(tmp_path: Path, keep: Keep | None, expected: list[int]) -> None:
    (tmp_path / "step-notes").mkdir()
    for step in range(1, 8):
        put(tmp_path / "last", step, keep)
    assert steps(tmp_path) == expected
    names = ["last", "step-notes", *(f"step-{step:08d}" for step in expected[1:])]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_run_that_goes_back_keeps_its_own(tmp_path: Path) -> None:
    for step in (10, 20, 30, 15, 20):
        put(tmp_path / "last", step, Keep(2))
    assert steps(tmp_path) == [20, 15]


def test_the_newest_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path / "last", step, Keep(3))
    prepare(tmp_path / "last")
    (partial_of(tmp_path / "last") / STATE).touch()
    (tmp_path / "step-00000002" / MANIFEST).write_text("{")
    assert complete_in(tmp_path) == [tmp_path / "last", tmp_path / "step-00000001"]
    (tmp_path / "last").rename(tmp_path / ".last.old")
    assert complete_in(tmp_path) == [tmp_path / ".last.old", tmp_path / "step-00000001"]
    assert complete_in(tmp_path / "nowhere") == []


class Killed(BaseException):
    """An exception in place of the process's end."""


def test_a_kill_at_any_point_leaves_the_newest_and_the_one_before(tmp_path: Path) -> None:
    for last in count():
        folder = tmp_path / str(last)
        for step in (1, 2, 3):
            put(folder / "last", step, Keep(2))
        changes, complete = count(), True

        def dying(change: Callable[..., Any], changes: count[int] = changes, last: int = last) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(changes) >= last:
                    raise Killed
                return change(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                put(folder / "last", 4, Keep(2))
            except Killed:
                complete = False
        left = steps(folder)
        assert left[:2] in ([3, 2], [4, 3], [4, 2]), left  # [4, 2]: step 3 is complete under a hidden name
        assert verify(locate(folder / "last")).step in (3, 4)
        put(folder / "last", 5, Keep(2))
        assert steps(folder)[0] == 5
        put(folder / "last", 6, Keep(2))
        assert steps(folder) == [6, 5]
        assert len([*folder.iterdir()]) == 2
        if complete:
            assert left == [4, 3]
            return


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks for fsync before the rename: without it, a power cut may leave empty files under the right name."""
    synced: set[int] = set()
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checking_rename(source: Path, target: Path) -> None:
        content = [source, *Path(source).iterdir()]
        if Path(source) == partial_of(tmp_path / "last"):
            assert {MANIFEST, STATE, TENSOR_INDEX} <= {file.name for file in content}
            assert {file.stat().st_ino for file in content} <= synced
        rename(source, target)
        synced.discard(tmp_path.stat().st_ino)  # the folder's content has changed

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", checking_rename)
    for step in (1, 2):
        put(tmp_path / "last", step)
        assert tmp_path.stat().st_ino in synced


def test_verify_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        put(tmp_path / "last", step, Keep(2))
    assert main.main(["checkpoint", "verify", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{tmp_path}/last: step 2, 2 files, ")
    assert out[1].startswith(f"{tmp_path}/step-00000001: step 1, 2 files, ")
    (tmp_path / "last" / STATE).write_text("other")
    assert main.main(["checkpoint", "verify", str(tmp_path)]) == 1
    both = capsys.readouterr()
    assert "last/state.pt: expected the file that was saved, got 5 bytes instead of" in both.err
    assert "step-00000001: step 1" in both.out
    assert main.main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_manifest_of_other_values(tmp_path: Path) -> None:
    put(tmp_path / "last", 1)
    content = json.loads((tmp_path / "last" / MANIFEST).read_text())
    for change in ({"step": "one"}, {"files": [STATE]}, {"written": None}):
        (tmp_path / "last" / MANIFEST).write_text(json.dumps(content | change))
        with pytest.raises(CheckpointCorrupt, match=MANIFEST):
            verify(tmp_path / "last")


@pytest.mark.parametrize(
    "content",
    ['{"written": 1e999}', '{"written": Infinity}', '{"written": NaN}', '{"step": 1e999}', "[" * 100_000, "[]", "\xff"],
    ids=lambda content: content[:20],
)
def test_a_hostile_manifest_hides_no_checkpoint_beside_it(tmp_path: Path, content: str) -> None:
    for name in ("good", "bad"):
        put(tmp_path / name, 1)
    file = tmp_path / "bad" / MANIFEST
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | json.loads(content)) if content.startswith("{") else content, "latin-1")
    with pytest.raises(CheckpointCorrupt, match=f"bad/{MANIFEST}"):
        verify(tmp_path / "bad")
    assert complete_in(tmp_path) == [tmp_path / "good"]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    put(tmp_path / "last", 1)
    file = tmp_path / "last" / MANIFEST
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="expected a checkpoint of format 1, got format 2.*Update ringflash"):
        verify(tmp_path / "last")


@pytest.mark.parametrize("path", ["s3://bucket/last", "memory://last", "s3:/bucket/last", "gs://b", "file:///tmp/x"])
def test_urls_are_no_folders(path: str) -> None:
    with pytest.raises(
        CheckpointError, match="filepath: expected a folder of a file system .*LastCheckpoint.remote=URL"
    ):
        local_path(path, "filepath")


def test_paths_of_a_file_system_stay_as_they_are() -> None:
    for path in ("runs/last", "/tmp/a:b/c", "C:/runs", "./s3:x"):
        assert local_path(path, "filepath") == Path(path)
