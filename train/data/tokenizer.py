"""Tokenizer from text to token ids and back: UTF-8 bytes, or a tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ringflash.errors import DataError

log = logging.getLogger(__name__)

BYTES = "bytes"
NUM_BYTES = 256
MODEL_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"  # transformers' names
BEGIN = "begin_of_document"  # key of CONFIG_FILE; a bos_token alone is in many of them, and says too little
RUN_FOLDER = "tokenizer"  # in a run's folder
# Common end-of-document tokens, for tokenizers without a tokenizer_config.json.
KNOWN_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as a value, equal to another with the same content.

    Args:
        vocab_size: one more than the largest id.
        end_of_document: the id that ends every document.
        model: the text of a tokenizer.json; None is UTF-8 bytes, with the end of document 256.
        pad_token: token with which transformers pads texts, kept for exports; training never pads with it.
        begin_of_document: the id that begins every document of text that is not empty; None adds none.
    """

    vocab_size: int = NUM_BYTES + 1
    end_of_document: int = NUM_BYTES
    model: str | None = None
    pad_token: str | None = field(default=None, compare=False)
    begin_of_document: int | None = None

    @classmethod
    def load(
        cls, source: str | Path, end_of_document: str | None = None, begin_of_document: str | None = None
    ) -> Tokenizer:
        """Loads the tokenizer of a tokenizer.json, of a folder with one, or "bytes".

        The end of a document is the token `end_of_document`, if given. Otherwise it is the "eos_token" of the
        tokenizer_config.json next to the file, or else one of `KNOWN_ENDS`. The token `begin_of_document` begins a
        document, if it is given or `save` wrote it into the folder. No other token does.

        Raises:
            DataError: no such file, a file that is no tokenizer, a token that it lacks, or the `tokenizers` library is
                missing.
        """
        path = Path(source).expanduser()
        if str(source) == BYTES or (path.is_dir() and _config(path / CONFIG_FILE).get("tokenizer_class") == BYTES):
            for name, token, what in (
                ("end_of_document", end_of_document, "it is the id 256"),
                ("begin_of_document", begin_of_document, "no byte can begin a document"),
            ):
                if token is not None:
                    remedy = f"Leave it out: with bytes {what}."
                    raise DataError(name, expected="none with bytes", got=token, remedy=remedy)
            return cls()
        file = path / MODEL_FILE if path.is_dir() else path
        try:
            model = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                "tokenizer",
                expected=f'"{BYTES}", a {MODEL_FILE} or a folder with one',
                got=f"{str(source)!r}: {getattr(error, 'strerror', None) or error}",
                remedy="Save one with transformers' tokenizer.save_pretrained(folder).",
            ) from error
        vocabulary = _backend(model, str(file)).get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError("tokenizer", expected="a vocabulary", got=f"none in {file}", remedy="Pass another one.")
        end = _end_of_document(vocabulary, end_of_document, file.parent / CONFIG_FILE)
        config = _config(file.parent / CONFIG_FILE)
        pad = _token(config.get("pad_token"))
        begin = _token(config.get(BEGIN)) if begin_of_document is None else begin_of_document
        if begin is not None and begin not in vocabulary:
            remedy = "Name a token of the tokenizer with --begin-of-document, or leave it out."
            raise DataError(BEGIN, expected="a token of the vocabulary", got=repr(begin), remedy=remedy)
        begin_id = None if begin is None else vocabulary[begin]
        return cls(max(vocabulary.values()) + 1, end, model, pad if pad in vocabulary else None, begin_id)

    @classmethod
    def of_run(cls, path: str | Path) -> Tokenizer:
        """Loads the tokenizer that a run trained with; see `folder_of_run`."""
        return cls.load(cls.folder_of_run(path))

    @staticmethod
    def folder_of_run(path: str | Path) -> Path:
        """Returns the folder of a run's tokenizer, from the run's folder or anything in it, such as a checkpoint.

        Raises:
            DataError: there is none.
        """
        start = Path(path).expanduser().absolute()
        for folder in (start, *start.parents[:3]):
            if (folder / RUN_FOLDER / CONFIG_FILE).is_file():
                return folder / RUN_FOLDER
        raise DataError(
            "tokenizer",
            expected=f"a folder {RUN_FOLDER} in {start} or a folder above it",
            got="none",
            remedy="Pass the tokenizer that the training text was prepared with.",
        )

    @property
    def name(self) -> str:
        """Name of the tokenizer in messages."""
        return BYTES if self.model is None else f"tokenizer of {self.vocab_size} ids ({self.digest[:12]})"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the ids of a text."""
        ends = (
            self.end_of_document if self.begin_of_document is None else (self.begin_of_document, self.end_of_document)
        )
        return hashlib.sha256(f"{ends}\0{self.model or BYTES}".encode()).hexdigest()

    def agrees_with(self, folder: Path) -> bool:
        """Returns whether the tokenizer in a model's `folder` gives the same ids for a text, or the folder has none.

        The tokens that begin and end a document are not compared. Nor are a file's rules for truncation, decoding and
        special tokens around a text, because they do not affect the ids of a document.

        Raises:
            DataError: the file in the folder cannot be read.
        """
        file = folder / MODEL_FILE
        if not file.is_file():
            return self.model is None or _config(folder / CONFIG_FILE).get("tokenizer_class") != BYTES
        if self.model is None:
            return False
        try:
            other = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "Download or write the folder anew."
            raise DataError("tokenizer", expected=f"a {MODEL_FILE}", got=f"{file}: {error}", remedy=remedy) from error
        return self.model == other or _rules(self.model, self.name) == _rules(other, str(file))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without ids that begin or end a document."""
        return self.encode_batch([text])[0].tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a document that begins with `text`, as training has seen them."""
        return [*([] if self.begin_of_document is None else [self.begin_of_document]), *self.encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Returns the ids of each text; lone surrogates, which valid text never has, count as U+FFFD or "?"."""
        if self.model is None:
            return [np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.uint32) for text in texts]
        return [np.array(each.ids, np.uint32) for each in self._encodings(self._model.encode_batch_fast, texts)]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Returns the ids of each text, and which of them lie, at least in part, in one of the text's `spans`.

        Args:
            texts: texts for a tokenizer other than bytes.
            spans: begin and end of pieces of each text, in characters.
        """
        result = []
        for each, pieces in zip(self._encodings(self._model.encode_batch, texts), spans, strict=True):
            begins, ends = np.array(each.offsets, np.int64).reshape(-1, 2).T
            inside = np.zeros(len(begins), bool)
            for begin, end in pieces:
                inside[np.searchsorted(ends, begin, "right") : np.searchsorted(begins, end, "left")] = True
            result.append((np.array(each.ids, np.uint32), inside))
        return result

    def _encodings(self, encode_batch: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        try:
            return encode_batch(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            clean = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            return encode_batch(clean, add_special_tokens=False)

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Returns the text of the ids before the first `end_of_document`; invalid bytes become U+FFFD."""
        ids: list[int] = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if self.end_of_document in ids:
            ids = ids[: ids.index(self.end_of_document)]
        if self.model is None:
            never_utf8 = 0xFF
            return bytes(x if 0 <= x < NUM_BYTES else never_utf8 for x in ids).decode(errors="replace")
        return self._model.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which `load` and transformers restore it."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model is None:
            (folder / MODEL_FILE).unlink(missing_ok=True)
            config = {"tokenizer_class": BYTES}
        else:
            _put(folder / MODEL_FILE, self.model)
            end = self._model.id_to_token(self.end_of_document)
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
            if self.begin_of_document is not None:
                config[BEGIN] = config["bos_token"] = self._model.id_to_token(self.begin_of_document)
            if self.pad_token is not None:
                config["pad_token"] = self.pad_token
        _put(folder / CONFIG_FILE, json.dumps(config, indent=1))

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids of the tokens that the tokenizer marks as special."""
        if self.model is None:
            return frozenset([self.end_of_document])
        return frozenset(i for i, token in self._model.get_added_tokens_decoder().items() if token.special)

    @property
    def prefix(self) -> list[int]:
        """Ids that the tokenizer.json puts before a text, as transformers does; training puts none there."""
        if self.model is None:
            return []
        encoding = self._model.encode("a")
        return encoding.ids[: encoding.special_tokens_mask.index(0)]

    @property
    def pad_id(self) -> int | None:
        """Id of `pad_token`."""
        return None if self.pad_token is None else self._model.token_to_id(self.pad_token)

    @cached_property
    def _model(self) -> Any:
        assert self.model is not None
        return _backend(self.model, self.name)

    def __getstate__(self) -> dict[str, Any]:
        # The other process makes its own backend, because threads cannot be sent to it.
        return {name: value for name, value in self.__dict__.items() if name != "_model"}


@lru_cache(maxsize=2)  # a large vocabulary takes a second
def _backend(model: str, name: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        remedy = 'Install ringflash[data], or take "bytes".'
        raise DataError("tokenizer", expected="the library `tokenizers`", got="none", remedy=remedy) from error
    try:
        backend = tokenizers.Tokenizer.from_str(model)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            "tokenizer", expected="a tokenizer.json of the library `tokenizers`", got=f"{name}: {error}",
            remedy="Save one with transformers' tokenizer.save_pretrained(folder).",
        ) from error  # fmt: skip
    # A file may ask for both, but the samples cut documents themselves.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _rules(model: str, name: str) -> dict[str, Any]:
    """Returns the parts of a tokenizer.json that determine ids, as the installed library writes them."""
    content: dict[str, Any] = json.loads(_backend(model, name).to_str())
    return {key: value for key, value in content.items() if key not in ("version", "post_processor", "decoder")}


def _put(path: Path, text: str) -> None:
    """Writes a file atomically, because other processes may be reading it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def tokenizer_folder(model: str) -> Path | None:
    """Returns the folder that holds the tokenizer of a model of transformers: its own, or its files from the hub.

    Logs a warning and returns None if the hub has no tokenizer.json of that name, or cannot be reached.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import hf_hub_download  # a requirement of transformers, which loads such a model

        return Path(hf_hub_download(model, MODEL_FILE)).parent
    except (ImportError, OSError, ValueError) as error:
        log.warning("The tokenizer of %s was not compared with that of the corpus: %s", model, error)
        return None


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _token(entry: Any) -> str | None:
    """Returns the text of a token as tokenizer_config.json has it: a string, or an object with its content."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _end_of_document(vocabulary: dict[str, int], asked: str | None, config: Path) -> int:
    named = asked if asked is not None else _token(_config(config).get("eos_token"))
    found = [token for token in ([named] if named else KNOWN_ENDS) if token in vocabulary]
    if found:
        return vocabulary[found[0]]
    raise DataError(
        "end_of_document",
        expected="a token of the vocabulary",
        got=repr(named) if named else f"none said, and none of {', '.join(KNOWN_ENDS)} is there",
        remedy="Name the token that ends a document, with --end-of-document.",
    )
