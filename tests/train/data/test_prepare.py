"""Token files prepared from text: equal for every number of processes, never incomplete, with finished parts kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringflash.commands import main
from ringflash.errors import ConfigError, DataError
from ringflash.train.data import prepare as preparing
from ringflash.train.data import sources as reading
from ringflash.train.data import tokens
from ringflash.train.data.corpus import load_corpus
from ringflash.train.data.prepare import Recipe, prepare, skipped_rows
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import HEADER_BYTES, TokenFiles, dtype_of, shard_path
from tests.train.data.corpora import documents, prepared, write, write_lines, write_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_bytes_of_documents(tmp_path: Path) -> None:
    files = prepared(tmp_path / "to", write(tmp_path / "text", a="ab", b="", c="é"))
    assert documents(files) == [[97, 98, 256], [], [0xC3, 0xA9, 256]]
    assert (len(files), files.header.num_documents, files.vocab_size) == (6, 3, 257)
    assert files.header.shards[0].dtype == "<u2"
    assert files.tokenizer == Tokenizer()
    assert not files.read(0, 0, 3).flags.owndata
    assert dtype_of(65536) == "<u2"
    assert dtype_of(65537) == "<u4"


def test_every_kind_of_source_with_a_tokenizer(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in" / "lines.jsonl", ["the ring", "turns and turns"])
    pq.write_table(pa.table({"text": ["around", "é"]}), tmp_path / "in" / "table.parquet")
    write(tmp_path / "in", z="and\nturns " * 400)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    files = prepared(tmp_path / "to", tmp_path / "in", tokenizer)
    assert files.tokenizer == tokenizer
    decoded = [tokenizer.decode(ids) for ids in documents(files)]
    assert decoded == ["the ring", "turns and turns", "around", "é", "and\nturns " * 400]
    assert all(ids[-1] == tokenizer.end_of_document for ids in documents(files))
    other = prepared(tmp_path / "other", lines, tokenizer)
    assert other.header.digest != files.header.digest


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ('[\n {"text": "a", "id": 1},\n {"text": "b"}]', True),
        ('{"text": "a"}\n{"text": "b"}\n', True),
        ('{"name": "a", "text": {"b": "c"}}', False),
        ("[1, 2]", False),
        ("[", False),
    ],
)
def test_rows_in_a_json_file_are_one_text_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, warns: bool
) -> None:
    (tmp_path / "a.json").write_text(text)
    files = prepared(tmp_path / "to", tmp_path / "a.json")
    assert documents(files) == [[*text.encode(), 256]]
    assert ("a.json holds rows with 'text', but is read as one text: rename" in caplog.text) == warns


LONG = "around and around\n" * 600


def bad_lines(path: Path) -> Path:
    """Writes lines of which every seventh is bad, and one is longer than many shards; returns the file."""
    lines = [json.dumps({"text": f"the ring turns {i} times"}) if i % 7 else '{"text": ' for i in range(200)]
    lines[50] = json.dumps({"text": LONG})
    path.write_text("\n".join(lines))
    return path


def test_the_number_of_processes_does_not_matter(tmp_path: Path) -> None:
    lines = bad_lines(tmp_path / "lines.jsonl")
    recipe = Recipe(Tokenizer.load(write_tokenizer(tmp_path / "model")), skip_bad=True)
    one = prepare(str(lines), tmp_path / "one", recipe, shard_bytes=1500)
    two = prepare(str(lines), tmp_path / "two", recipe, shard_bytes=1500, processes=2)
    assert len(one.header.shards) > 4
    assert contents(one.folder) == contents(two.folder)
    assert any("skipped" in name for name in contents(two.folder))
    expected = [f"the ring turns {i} times" for i in range(200) if i % 7]
    expected[expected.index("the ring turns 50 times")] = LONG
    assert [recipe.tokenizer.decode(ids) for ids in documents(two)] == expected


def test_skipped_rows_are_noted_beside_the_shards(tmp_path: Path) -> None:
    lines = bad_lines(tmp_path / "lines.jsonl")
    recipe = Recipe(Tokenizer.load(write_tokenizer(tmp_path / "model")), skip_bad=True)
    one = prepare(str(lines), tmp_path / "one", recipe, shard_bytes=1500)
    before = contents(one.folder)
    assert len(documents(one)) == 200 - 29
    total, first = skipped_rows(one.folder, 3)
    assert total == 29
    assert [re.sub(", byte.*: corpus", ": corpus", row)[len(str(lines)) :] for row in first] == [
        f", line {i}: corpus: expected a JSON object a line, got Expecting value: line 2 column 1 (char 10)"
        for i in (1, 8, 15)
    ]
    # A run that goes on keeps the notes of finished shards.
    shard_path(one.folder, 3).unlink()
    assert contents(prepare(str(lines), one.folder, recipe, shard_bytes=1500).folder) == before
    shorter = prepare(str(lines), one.folder, replace(recipe, max_line=1000), shard_bytes=10**6)
    assert (len(documents(shorter)), skipped_rows(one.folder, 0)) == (200 - 30, (30, []))
    with pytest.raises(DataError, match="expected a JSON object a line, got Expecting .*, line 1, byte 0"):
        prepare(str(lines), one.folder, replace(recipe, skip_bad=False))
    assert not list(one.folder.glob("*skipped*"))


def test_only_bad_rows(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["a"] * 9, "body")
    expected = r"got 1 file\(s\) with 9 bad row\(s\) and no other, for instance .*, line 1, byte 0: text_field"
    with pytest.raises(DataError, match=expected):
        prepare(str(lines), tmp_path / "to", Recipe(Tokenizer(), skip_bad=True), shard_bytes=50)
    with pytest.raises(ConfigError, match="max_line: expected at least 1, got 0"):
        prepare(str(lines), tmp_path / "to", Recipe(Tokenizer(), max_line=0))


def test_a_token_begins_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 100)
    file = write_tokenizer(tmp_path / "model", special=("<s>",))
    tokenizer = Tokenizer.load(file, begin_of_document="<s>")
    plain, begin = Tokenizer.load(file), tokenizer.begin_of_document
    lines = write_lines(tmp_path / "lines.jsonl", ["the ring", "", "around\n" * 99])
    files, others = prepared(tmp_path / "to", lines, tokenizer), prepared(tmp_path / "others", lines, plain)
    assert begin is not None
    assert documents(files) == [[begin, *ids] if ids else [] for ids in documents(others)]
    assert TokenFiles(files.folder).tokenizer == tokenizer != others.tokenizer == plain
    assert tokenizer.encode_prompt("ring") == [begin, *plain.encode("ring")]
    assert plain.encode_prompt("ring") == plain.encode("ring")
    assert tokenizer.agrees_with(tmp_path / "model")
    with pytest.raises(DataError, match="begin_of_document: expected a token of the vocabulary, got '<x>'. Name a"):
        Tokenizer.load(file, begin_of_document="<x>")
    with pytest.raises(DataError, match="begin_of_document: expected none with bytes, got <s>. Leave it out"):
        Tokenizer.load("bytes", begin_of_document="<s>")


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAPS", 3)
    lines = write_lines(tmp_path / "lines.jsonl", [f"the ring turns {i} times" for i in range(40)])
    before = len(os.listdir("/proc/self/fd"))
    files = prepared(tmp_path / "to", lines, shard_bytes=100)
    assert len(files.header.shards) > 9
    assert [bytes(ids[:-1]).decode() for ids in documents(files)] == [f"the ring turns {i} times" for i in range(40)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_what_a_process_raises_comes_back(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["a"] * 9, "body")
    with pytest.raises(
        DataError,
        match="text_field: expected text in the field 'text' of every row, got none, of the fields body, id, in",
    ):
        prepared(tmp_path / "two", lines, shard_bytes=30, processes=2)
    assert not list((tmp_path / "two").glob("*tokens*"))


def test_an_interrupted_preparation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", [f"document {i}" for i in range(60)])
    whole = contents(prepared(tmp_path / "whole", lines, shard_bytes=500).folder)
    made: list[int] = []
    original = preparing.write_shard

    def write_shard(path: Path, *args: Any) -> Any:
        made.append(int(path.stem[-5:]))
        if len(made) == 3:
            (path.parent / f".{path.name}.1").write_text("left by a killed process")
            raise KeyboardInterrupt
        return original(path, *args)

    monkeypatch.setattr(preparing, "write_shard", write_shard)
    folder = tmp_path / "to"
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, lines, shard_bytes=500)
    with pytest.raises(DataError, match="expected complete token files, got .*dataset.json: .*No such file"):
        TokenFiles(folder)
    damaged = bytearray(shard_path(folder, 1).read_bytes())
    damaged[HEADER_BYTES] ^= 1
    shard_path(folder, 1).write_bytes(damaged)
    prepared(folder, lines, shard_bytes=500)
    assert made == [0, 1, 2, *range(1, len(whole) - 2)]
    assert contents(folder) == whole
    prepared(folder, lines, shard_bytes=500)
    assert len(made) == len(whole) - 2 + 2
    with lines.open("a") as stream:
        stream.write('{"text": "more"}\n')
    assert documents(prepared(folder, lines, shard_bytes=10**6))[-1] == [*b"more", 256]
    assert len(list(folder.glob("tokens-*"))) == 1


@pytest.mark.parametrize(
    ("case", "message"),
    [("empty", "nothing but empty ones"), ("binary", "UTF-8"), ("latin", "UTF-8"), ("other", "with notes.txt in it")],
)
def test_what_cannot_be_prepared(tmp_path: Path, case: str, message: str) -> None:
    contents = {"empty": b"", "binary": b"a\0b", "latin": "caf\xe9".encode("latin-1"), "other": b"a"}
    folder = write(tmp_path / "text")
    (folder / "a.txt").write_bytes(contents[case])
    if case == "other":
        write(tmp_path / "to", notes="mine")
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "to", folder)
    assert not (tmp_path / "to" / "dataset.json").exists()
    options: list[dict[str, Any]] = [{"processes": 0}, {"shard_bytes": 0}, {"val_fraction": 1.0}]
    for option in options:
        with pytest.raises(ConfigError, match=next(iter(option))):
            prepare(str(folder), tmp_path / "to", Recipe(Tokenizer()), **option)


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--to: expected a folder, got the file"):
        prepared(write(tmp_path, a="a") / "a.txt", tmp_path)


def damage(folder: Path, case: str) -> None:
    shard, dataset = shard_path(folder, 0), folder / "dataset.json"
    content = bytearray(shard.read_bytes())
    if case == "truncated":
        shard.write_bytes(content[:-2])
    elif case == "no shard":
        shard.unlink()
    elif case == "no header":
        shard.write_bytes(b"x" + content[1:])
    elif case == "another's":
        shard.write_bytes(content.replace(b'"key": "', b'"key": "0', 1).replace(b" " * 9, b" " * 8, 1))
    elif case == "ends":
        content[-8:] = (1).to_bytes(8, "little")
        shard.write_bytes(content)
    elif case == "empty":
        fields = json.loads(dataset.read_text()) | {"shards": []}
        dataset.write_text(json.dumps(fields))
    elif case == "format":
        dataset.write_text(dataset.read_text().replace('"version": 2', '"version": 3'))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("truncated", "tokens-00000.bin: .* bytes instead of"),
        ("no shard", "tokens-00000.bin: .*No such file"),
        ("no header", "tokens-00000.bin: Expecting value"),
        ("another's", "tokens-00000.bin: a file of another preparation"),
        ("ends", "tokens-00000.bin: ends of documents that do not fit"),
        ("empty", "dataset.json: no tokens"),
        ("format", "dataset.json: of format 3, not 2"),
    ],
)
def test_damaged_token_files(tmp_path: Path, case: str, message: str) -> None:
    text = write(tmp_path / "text", a="some text", b="more")
    files = prepared(tmp_path / "to", text)
    whole = contents(files.folder)
    damage(files.folder, case)
    with pytest.raises(DataError, match=message + ".* Run `ringflash prepare` again"):
        TokenFiles(files.folder)
    with pytest.raises(DataError):
        load_corpus(str(files.folder), tmp_path / "cache")
    assert documents(prepared(tmp_path / "to", text)) == [[*b"some text", 256], [*b"more", 256]]
    assert contents(files.folder) == whole


def test_another_tokenizer_in_its_place(tmp_path: Path) -> None:
    files = prepared(tmp_path / "to", write(tmp_path, a="text"))
    Tokenizer.load(write_tokenizer(tmp_path / "model")).save(files.folder / "tokenizer")
    with pytest.raises(DataError, match="tokenizer: not the tokenizer that made the tokens"):
        _ = TokenFiles(files.folder).tokenizer


def test_a_folder_below_its_sources(tmp_path: Path) -> None:
    write(tmp_path, a="text")
    for _ in range(2):
        assert documents(prepared(tmp_path / "to", tmp_path)) == [[*b"text", 256]]


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    files = prepared(tmp_path / "to", write(tmp_path / "text", a="abcd"))
    content = bytearray(shard_path(files.folder, 0).read_bytes())
    content[HEADER_BYTES + 2 : HEADER_BYTES + 4] = (257).to_bytes(2, "little")
    shard_path(files.folder, 0).write_bytes(content)
    files = TokenFiles(files.folder)
    assert files.read(0, 2, 5).tolist() == [99, 100, 256]
    with pytest.raises(DataError, match="tokens-00000.bin: token id 257, which is outside its vocabulary of 257"):
        files.read(0, 0, 5)


def test_text_is_encoded_once(tmp_path: Path) -> None:
    text, cache = write(tmp_path / "text", a="one"), tmp_path / "cache"
    (text / "caf\udce9.txt").write_text("a")
    before = load_corpus(str(text), cache)
    assert documents(before) == [[*b"one", 256], [*b"a", 256]]
    written = shard_path(before.folder, 0).stat().st_mtime_ns
    assert load_corpus([str(text)], cache).header == before.header
    assert shard_path(before.folder, 0).stat().st_mtime_ns == written
    damage(before.folder, "truncated")
    assert documents(load_corpus(str(text), cache)) == documents(before)
    assert load_corpus(str(before.folder), tmp_path / "none").header == before.header
    write(text, a="other")
    assert load_corpus(str(text), cache).header.digest != before.header.digest


def test_caches_that_cannot_be_written(tmp_path: Path) -> None:
    text = str(write(tmp_path / "text", a="a"))
    for cache in (tmp_path / "text" / "a.txt" / "cache", "~nobody-of-this-name/cache"):
        with pytest.raises(DataError, match="cache_dir"):
            load_corpus(text, cache)


def _load_and_report(folder: Path, cache: Path, queue: multiprocessing.SimpleQueue[str]) -> None:
    files = load_corpus(str(folder), cache)
    queue.put(f"{files.header.digest} {documents(files)}")


def test_processes_that_start_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", **{f"d{i}": "text " * 1000 for i in range(50)})
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    processes = [fork.Process(target=_load_and_report, args=(folder, tmp_path / "cache", queue)) for _ in range(4)]
    for process in processes:
        process.start()
    assert len({queue.get() for _ in processes}) == 1
    for process in processes:
        process.join()
    (made,) = (tmp_path / "cache").iterdir()
    assert sorted(p.name for p in made.iterdir()) == [".lock", "dataset.json", "tokenizer", "tokens-00000.bin"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["the ring", "turns"], "body")
    model = write_tokenizer(tmp_path / "model")
    to = tmp_path / "to"
    command = ["prepare", str(lines), "--to", str(to), "--tokenizer", str(model), "--processes", "1"]
    assert main.main([*command, "--text-field=body", "--val-fraction=0.25"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"to: \d+ tokens in 2 documents and 1 files, of tokenizer of \d+ ids", shown.out)
    assert "--model.model.vocab_size=" in shown.out
    assert "encoding" in shown.err
    assert TokenFiles(to).header.val_fraction == 0.25
    assert main.main(command) == 2
    assert "with --text-field" in capsys.readouterr().err
    with lines.open("a") as stream:
        stream.write('{"body": 3}\n' * 7)
    assert main.main([*command, "--text-field=body", "--skip-bad"]) == 0
    report = capsys.readouterr().err
    assert f"skipped 7 bad row(s); {to}/tokens-*.skipped.jsonl lists them all.\n" in report
    assert len(re.findall(rf"\n  {lines}, line [3-7], byte \d+: text_field: .*, got int", report)) == 5
    assert report.endswith("\n  ...\n")
    assert main.main([*command, "--text-field=body", "--begin-of-document=</s>", "--skip-bad"]) == 0
    assert documents(TokenFiles(to))[0][0] == documents(TokenFiles(to))[0][-1]
    assert main.main([*command, "--text-field=body", "--skip-bad", "--max-line-mib=0"]) == 2
    assert "max_line: expected at least 1, got 0" in capsys.readouterr().err
    assert main.main([*command, "--chat", "--begin-of-document=</s>"]) == 2
    assert "--begin-of-document: expected none with --chat, got </s>. Leave it out" in capsys.readouterr().err
    for error, code, message in (
        (OSError(28, "No space left on device"), 2, "No space left on device. Make room"),
        (KeyboardInterrupt(), 130, "interrupted. Run it again to go on"),
    ):
        monkeypatch.setattr(preparing, "write_shard", Mock(side_effect=error))
        assert main.main([*command, "--text-field=body", "--tokenizer=bytes"]) == code
        assert message in capsys.readouterr().err
