"""Tokenizers: text to ids and back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringflash.errors import DataError
from ringflash.train.data.tokenizer import Tokenizer, tokenizer_folder
from tests.train.data.corpora import write_tokenizer


@given(text=st.text())
def test_bytes_and_back(text: str) -> None:
    tokenizer = Tokenizer()
    assert tokenizer.encode(text) == [*text.encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_that_are_no_text() -> None:
    tokenizer = Tokenizer.load("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.decode(torch.tensor([97, 256, 98])) == "a"
    assert tokenizer.decode([0xFF]) == "�"
    assert tokenizer.decode([97, 257, 98, 511]) == "a�b�"
    assert tokenizer.encode("a\ud800") == [*b"a?"]


def test_a_tokenizer_file(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer.load(file)
    text = "the ring turns, é and 環\nand again " * 5
    (ids, none) = tokenizer.encode_batch([text, ""])
    assert len(none) == 0
    assert len(text.encode()) > len(ids) > 4
    assert tokenizer.encode(text) == ids.tolist()
    assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_document, 70]) == text
    assert tokenizer.vocab_size > int(ids.max())
    assert len(tokenizer.encode("a\ud800")) > 1
    assert Tokenizer.load(tmp_path / "model") == tokenizer == pickle.loads(pickle.dumps(tokenizer))
    other = Tokenizer.load(file, end_of_document="a")
    assert other.digest != tokenizer.digest
    assert other.end_of_document == tokenizer.encode("a")[0]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    for name, tokenizer in (("bytes", Tokenizer()), ("file", Tokenizer.load(write_tokenizer(tmp_path / "model")))):
        checkpoint = tmp_path / name / "checkpoints" / "last"
        checkpoint.mkdir(parents=True)
        tokenizer.save(tmp_path / name / "tokenizer")
        for inside in (checkpoint, tmp_path / name):
            assert Tokenizer.of_run(inside) == tokenizer
            assert Tokenizer.of_run(inside).digest == tokenizer.digest
    with pytest.raises(DataError, match="a folder tokenizer in .*other or a folder above it, got none"):
        Tokenizer.of_run(tmp_path / "other")


def test_what_is_saved_is_transformers_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.eos_token_id == tokenizer.end_of_document
    assert theirs("the ring")["input_ids"] == tokenizer.encode("the ring")[:4]  # truncated, as the file says


def test_where_the_end_of_a_document_is_named(tmp_path: Path) -> None:
    plain = write_tokenizer(tmp_path / "plain", end="<done>")
    with pytest.raises(DataError, match="end_of_document: .* none said, .* with --end-of-document"):
        Tokenizer.load(plain)
    with pytest.raises(DataError, match="end_of_document: expected a token of the vocabulary, got '<gone>'"):
        Tokenizer.load(plain, "<gone>")
    with pytest.raises(DataError, match="expected none with bytes, got </s>"):
        Tokenizer.load("bytes", "</s>")
    for said in ("<done>", {"content": "<done>", "lstrip": False}):
        (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert Tokenizer.load(plain.parent) == Tokenizer.load(plain, "<done>")


def test_the_same_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    other = Tokenizer.load(write_tokenizer(tmp_path / "other", text="a line of other pairs, another line\n"))
    (tmp_path / "nothing").mkdir()
    Tokenizer().save(tmp_path / "bytes")
    for folder, expected in (
        ("model", (True, False, False)),
        ("bytes", (False, False, True)),
        ("nothing", (True,) * 3),
    ):
        assert tuple(t.agrees_with(tmp_path / folder) for t in (tokenizer, other, Tokenizer())) == expected


def test_the_tokenizer_of_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = write_tokenizer(tmp_path / "models--org--name" / "snapshots" / "0123")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("0123")
    assert tokenizer_folder("org/name") == path.parent
    assert tokenizer_folder(str(tmp_path)) == tmp_path
    assert caplog.messages == []
    assert tokenizer_folder("org/missing") is None
    assert caplog.messages[0].startswith("The tokenizer of org/missing was not compared with that of the corpus: ")


def test_the_same_ids_of_files_that_differ(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model")
    content = json.loads(path.read_text())
    tokenizer = Tokenizer.load(path)
    older = [" ".join(pair) for pair in content["model"]["merges"]]  # the format of older versions of tokenizers
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "Ġ"}')
    path.write_text(json.dumps(content | {"truncation": None, "model": content["model"] | {"merges": older}}, indent=4))
    assert Tokenizer.load(path).end_of_document != tokenizer.end_of_document
    assert Tokenizer.load(path).digest != tokenizer.digest
    assert tokenizer.agrees_with(tmp_path / "model")
    path.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    assert not tokenizer.agrees_with(tmp_path / "model")
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="tokenizer: expected a tokenizer.json, got .*Download"):
        tokenizer.agrees_with(tmp_path / "model")


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer: expected a tokenizer.json of .*text.json: "):
        Tokenizer.load(tmp_path / "text.json")
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="tokenizer: expected .* a tokenizer.json or a folder .* got .*No such"):
            Tokenizer.load(missing)
