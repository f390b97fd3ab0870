"""Texts and tokenizers for tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from ringflash.train.data.prepare import Recipe, prepare
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import Header, TokenFiles, shard_path, write_dataset, write_shard


def write(folder: Path, **documents: str) -> Path:
    """Writes one .txt file per document and returns the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in documents.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    """Writes a file of JSON lines and returns its path."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def write_tokenizer(
    folder: Path,
    end: str = "</s>",
    text: str = "the ring turns and turns around the ring\n",
    special: tuple[str, ...] = (),
) -> Path:
    """Writes a small byte-level BPE tokenizer trained on `text`; it decodes every text exactly. Returns its file."""
    folder.mkdir(exist_ok=True, parents=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text] * 10, trainer)
    made.enable_truncation(4)  # the file's truncation must not cut documents
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def prepared(
    folder: Path, sources: Path | list[Path], tokenizer: Tokenizer | None = None, **options: Any
) -> TokenFiles:
    """Returns the result of `prepare` with the byte tokenizer or another one."""
    names = [str(source) for source in (sources if isinstance(sources, list) else [sources])]
    return prepare(names, folder, Recipe(tokenizer or Tokenizer()), **options)


def documents(files: TokenFiles) -> list[list[int]]:
    """Returns the ids of each document in order."""
    return [files.read(i, 0, int(n)).tolist() for i, n in enumerate(files.lengths())]


def learnt_files(folder: Path, shards: list[list[list[tuple[int, bool]]]]) -> TokenFiles:
    """Writes shards of documents, each a list of ids and whether they are learnt, with the byte tokenizer."""
    folder.mkdir(exist_ok=True, parents=True)
    headers = []
    for index, shard in enumerate(shards):
        columns = [np.array(document, np.uint32).reshape(-1, 2).T for document in shard]
        pieces = [(ids, True, learnt.astype(bool)) for ids, learnt in columns]
        headers.append(write_shard(shard_path(folder, index), pieces, "key", Tokenizer(), True))
    Tokenizer().save(folder / "tokenizer")
    write_dataset(folder, Header("key", tuple(headers), None))
    return TokenFiles(folder)
