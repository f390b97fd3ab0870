from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from ringflash.errors import ConfigError, DataError
from ringflash.train.corpus import (
    END_OF_DOCUMENT,
    Corpus,
    TokenSamples,
    decode,
    encode,
    find_documents,
    load_corpus,
    num_samples,
)


def write(folder: Path, **documents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in documents.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def load(folder: Path, cache: Path, seed: int = 0) -> Corpus:
    return load_corpus(str(folder), cache, seed)


def test_tokens_are_the_documents_bytes(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "text", a="ab", b="", c="é"), tmp_path / "cache")
    documents = [corpus.tokens[i:j].tolist() for i, j in zip((0, 3), (3, 6), strict=True)]
    assert sorted(documents) == sorted([[97, 98, END_OF_DOCUMENT], [0xC3, 0xA9, END_OF_DOCUMENT]])
    assert corpus.header.offsets == (0, 3)
    assert len(corpus) == 6
    assert isinstance(corpus.tokens, np.memmap)


def test_order_follows_from_the_seed_and_not_from_the_folder(tmp_path: Path) -> None:
    texts = {f"d{i}": f"document {i}" for i in range(20)}
    one, two = (load(write(tmp_path / name, **texts), tmp_path / "cache") for name in ("one", "two"))
    other = load(tmp_path / "one", tmp_path / "cache", seed=1)
    assert one.path != two.path
    assert one.header == two.header
    assert one.header.digest != other.header.digest
    assert sorted(one.tokens.tolist()) == sorted(other.tokens.tolist())


def test_a_changed_document_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", a="one")
    before = load(folder, tmp_path)
    write(folder, a="other")
    assert load(folder, tmp_path).header.digest != before.header.digest


def test_globs_files_and_several_sources(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", a="a", b="b")
    (folder / "deep").mkdir()
    (folder / "deep" / "c.txt").write_text("c")
    (folder / ".hidden").write_text("h")
    (folder / "blob.bin").write_bytes(b"\0\1")
    names = {p.name for p in find_documents(f"{folder}/**/*.txt", 0)}
    assert names == {"a.txt", "b.txt", "c.txt"}
    both = [str(folder / "a.txt"), f"{folder}/*.txt"]
    assert sorted(p.name for p in find_documents(both, 0)) == ["a.txt", "b.txt"]
    assert len(find_documents(str(folder), 0)) == 4


def test_standard_library(tmp_path: Path) -> None:
    documents = find_documents("stdlib", 0)
    assert {"ast.py", "argparse.py"} <= {d.name for d in documents}
    parts = {part for d in documents for part in d.parts}
    assert not parts & {"site-packages", "test", "tests"}
    assert 5e6 < sum(d.stat().st_size for d in documents) < 50e6
    assert documents == find_documents("stdlib", 0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "does not exist"),
        ("no file", "holds no file"),
        ("empty", "all of them empty"),
        ("binary", "UTF-8"),
        ("latin", "UTF-8"),
    ],
)
def test_bad_sources(tmp_path: Path, case: str, message: str) -> None:
    folder = tmp_path / "text"
    if case != "missing":
        folder.mkdir()
    contents = {"empty": b"", "binary": b"a\0b", "latin": "caf\xe9".encode("latin-1")}
    if case in contents:
        (folder / "a.txt").write_bytes(contents[case])
    with pytest.raises(DataError, match=message):
        load(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


@pytest.mark.parametrize(("source", "message"), [("", "is empty"), (" ", "is empty"), ("x" * 300, "cannot be read")])
def test_sources_that_are_no_paths(tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "text", a="a"))
    with pytest.raises(DataError, match=message):
        find_documents([source], 0)


def test_standard_library_with_oddities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    (library / "folder.py").mkdir(parents=True)
    (library / "dangling.py").symlink_to(tmp_path / "nowhere")
    (library / "module.py").write_text("pass\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    assert find_documents("stdlib", 0) == [library / "module.py"]
    assert len(load_corpus("stdlib", tmp_path / "cache")) == 6


@pytest.mark.parametrize("replacement", ["nothing", "folder"])
def test_document_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacement: str) -> None:
    document = write(tmp_path / "text", a="a") / "a.txt"
    monkeypatch.setattr("ringflash.train.corpus.find_documents", lambda sources, seed: [document])
    document.unlink()
    if replacement == "folder":
        document.mkdir()
    with pytest.raises(DataError, match="a.txt: (No such file|Is a directory)"):
        load(tmp_path / "text", tmp_path / "cache")


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = write(tmp_path / "text")
    (folder / "caf\udce9.txt").write_text("a")
    assert len(load(folder, tmp_path / "cache")) == 2


def test_user_without_a_home(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cache_dir"):
        load_corpus(str(write(tmp_path / "text", a="a")), "~nobody-of-this-name/cache")


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one source"):
        load_corpus([], tmp_path)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache_dir"):
        load(write(tmp_path / "text", a="a"), tmp_path / "file" / "cache")


def test_damaged_token_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", a="some text")
    path = load(folder, tmp_path).path
    whole = path.read_bytes()
    for damaged in (whole[:-2], b"x" + whole[1:], whole.replace(b"num_tokens", b"mum_tokens")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="Delete the file"):
            load(folder, tmp_path)


def _load_and_report(folder: Path, cache: Path, queue: multiprocessing.SimpleQueue[str]) -> None:
    queue.put(json.dumps(load(folder, cache).tokens.tolist()))


def test_processes_that_start_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", **{f"d{i}": "text " * 1000 for i in range(50)})
    spawn = multiprocessing.get_context("fork")
    queue = spawn.SimpleQueue()
    processes = [spawn.Process(target=_load_and_report, args=(folder, tmp_path / "cache", queue)) for _ in range(4)]
    for process in processes:
        process.start()
    results = {queue.get() for _ in processes}
    for process in processes:
        process.join()
    assert len(results) == 1
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".bin"]


def test_samples_cover_the_tokens_once(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "text", a="abcdefghijklm"), tmp_path)
    samples = TokenSamples(corpus, 4, 0, num_samples(corpus, 4))
    assert len(samples) == 3
    assert num_samples(corpus, 13) == num_samples(corpus, 6, at_least=2) // 2 == 1
    with pytest.raises(DataError, match="more than 14 tokens: 2 sample"):
        num_samples(corpus, 7, at_least=2)
    with pytest.raises(DataError, match="lower the context length"):
        num_samples(corpus, 14)
    with pytest.raises(ConfigError, match="context_length"):
        num_samples(corpus, 0)
    rows = [samples[i] for i in range(3)]
    assert torch.cat([row["labels"] for row in rows]).tolist() == corpus.tokens[1:13].tolist()
    assert all((row["input_ids"][1:] == row["labels"][:-1]).all() for row in rows)
    assert rows[0]["input_ids"].dtype == torch.int64
    batch = samples[[2, -1]]
    assert batch["input_ids"].shape == (2, 4)
    assert batch["labels"][0].equal(rows[2]["labels"])
    assert (batch["labels"][1] == -100).all()
    with pytest.raises(IndexError):
        samples[3]


def test_encode_and_decode() -> None:
    assert decode(encode("def é")) == "def é"
    assert decode(torch.tensor([97, END_OF_DOCUMENT, 98])) == "a"
    assert decode([0xFF]) == "�"
    assert decode([97, 257, 98, 511]) == "a�b�"
