"""Token files with untrusted headers: reading them gives ids of the vocabulary or raises CorpusError."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringflash.errors import CorpusError
from ringflash.train.data.tokens import DATASET, HEADER_BYTES, TokenFiles, shard_path
from tests.train.data.corpora import learnt_files, prepared, write

HOSTILE = [
    "O",
    "<i2",
    "<u4",
    ">u2",
    "<f8",
    "S2",
    "U1",
    "V2",
    "u2,u2",
    "",
    None,
    True,
    [],
    {},
    [["a", "O"]],
    -1,
    0,
    1,
    2,
]
HOSTILE += [3, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, -(10**30), 1.5, 2.0, 1e308, float("inf"), float("nan"), "7"]


def rewrite(folder: Path, change: dict[str, Any]) -> None:
    """Writes `change` into the first shard's header and into dataset.json's copy of it."""
    dataset, shard = folder / DATASET, shard_path(folder, 0)
    fields = json.loads(dataset.read_text())
    fields["shards"][0] |= change
    dataset.write_text(json.dumps(fields))
    content = shard.read_bytes()[HEADER_BYTES:]
    shard.write_bytes(json.dumps(fields["shards"][0]).encode().ljust(HEADER_BYTES) + content)


def read_all(folder: Path) -> None:
    files = TokenFiles(folder)
    for document, length in enumerate(files.lengths()):
        ids = files.read(document, 0, int(length))
        assert ids.dtype == np.uint16
        assert len(ids) == length
        assert ids.max(initial=0) < files.vocab_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "O"}, "dtype: expected '<u2' for a vocabulary of 257, got 'O'"),
        ({"dtype": "<i2"}, "dtype: expected '<u2' for a vocabulary of 257, got '<i2'"),
        ({"dtype": "<u4"}, "dtype: expected '<u2' for a vocabulary of 257, got '<u4'"),
        ({"num_tokens": -4}, "num_tokens: expected a whole number of at least 0, got -4"),
        ({"num_tokens": 14.0}, "num_tokens: expected a whole number of at least 0, got 14.0"),
        ({"num_documents": True}, "num_documents: expected a whole number of at least 0, got True"),
        ({"vocab_size": 1 << 40}, "vocab_size: expected at most 4294967296, got 1099511627776"),
        ({"end_of_document": 257}, "end_of_document: expected an id below vocab_size=257, got 257"),
        ({"digest": 5}, "digest: expected text, got 5"),
        ({"other": 5}, "header: fields that are missing or unknown: 'other'"),
    ],
)
def test_a_header_that_no_preparation_writes_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = prepared(tmp_path / "to", write(tmp_path / "text", a="some text", b="more")).folder
    rewrite(folder, change)
    with pytest.raises(CorpusError, match=rf"dataset\.json: .*{message}"):
        TokenFiles(folder)


def test_bits_of_learnt_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = learnt_files(tmp_path / "to", [[[(5, False), (6, True)]], [], [[(7, True)] * 9]]).folder
    size = shard_path(folder, 0).stat().st_size
    fields = json.loads((folder / DATASET).read_text())["shards"]
    assert [shard["num_learnt"] for shard in fields] == [1, 0, 9]
    for change, message in (
        ({"num_learnt": 3}, "num_learnt: expected at most 2, got 3"),
        ({"num_learnt": None}, "num_learnt: expected a whole number of at least 0, got None"),
        ({"num_tokens": 18}, rf"{size} bytes instead of {size + 34}"),
    ):
        rewrite(folder, change)
        with pytest.raises(CorpusError, match=message):
            TokenFiles(folder)
        rewrite(folder, fields[0])
    read_all(folder)
    text = prepared(tmp_path / "text", write(tmp_path / "in", a="a"))
    assert "num_learnt" not in (text.folder / DATASET).read_text()
    shard_path(folder, 0).write_bytes(shard_path(text.folder, 0).read_bytes())
    content = json.loads((folder / DATASET).read_text())
    content["shards"][0] = json.loads((text.folder / DATASET).read_text())["shards"][0]
    (folder / DATASET).write_text(json.dumps(content))
    with pytest.raises(CorpusError, match="num_learnt: expected it in all shards or in none"):
        TokenFiles(folder)


@pytest.mark.parametrize("ends", [[-5, 14], [20, 15], [5, 1 << 62], [(1 << 63) - 1, -2, 15], [0, 0]])
def test_documents_that_end_out_of_order_or_outside_the_shard_are_refused(tmp_path: Path, ends: list[int]) -> None:
    texts = dict.fromkeys("abc"[: len(ends)], "text")
    folder = prepared(tmp_path / "to", write(tmp_path / "text", **texts)).folder
    shard = shard_path(folder, 0)
    content = shard.read_bytes()
    shard.write_bytes(content[: -8 * len(ends)] + np.array(ends, "<i8").tobytes())
    with pytest.raises(CorpusError, match=r"tokens-00000\.bin: ends of documents"):
        TokenFiles(folder)


def test_a_header_of_nested_brackets_is_refused(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "to", write(tmp_path / "text", a="some text")).folder
    content = shard_path(folder, 0).read_bytes()[HEADER_BYTES:]
    shard_path(folder, 0).write_bytes(b"[" * HEADER_BYTES + content)
    with pytest.raises(CorpusError, match=r"tokens-00000\.bin"):
        TokenFiles(folder)
    (folder / DATASET).write_text("[" * 100_000)
    with pytest.raises(CorpusError, match=r"dataset\.json"):
        TokenFiles(folder)


def test_fuzzed_headers_give_ids_of_the_vocabulary_or_an_error_of_the_library(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "to", write(tmp_path / "text", a="some text", b="more")).folder
    dataset, shard = (folder / DATASET).read_text(), shard_path(folder, 0).read_bytes()
    names = [*json.loads(dataset)["shards"][0]]
    draw, refused = random.Random(0), []
    for case in range(600):
        (folder / DATASET).write_text(dataset)
        shard_path(folder, 0).write_bytes(shard)
        if case % 3 == 0:
            rewrite(folder, {name: draw.choice(HOSTILE) for name in draw.sample(names, draw.choice([1, 1, 2, 3]))})
        elif case % 3 == 1:
            fields = json.loads(dataset)
            fields[draw.choice([*fields])] = draw.choice([*HOSTILE, [{}], [5], [fields["shards"][0]] * 2])
            (folder / DATASET).write_text(json.dumps(fields))
        else:
            content = bytearray(shard)
            header = len(content[:HEADER_BYTES].rstrip())
            for _ in range(draw.choice([1, 2, 8])):
                content[draw.choice([draw.randrange(header), draw.randrange(HEADER_BYTES, len(content))])] = (
                    draw.randrange(256)
                )
            shard_path(folder, 0).write_bytes(content)
        try:
            read_all(folder)
        except CorpusError as error:
            refused.append(str(error))
    assert len(refused) > 400
    assert all(str(folder) in text for text in refused)
