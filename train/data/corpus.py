"""Loading of a corpus by name: a folder made by `ringflash prepare`, or text that is encoded as bytes into a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ringflash.errors import DataError
from ringflash.train.checkpoint.manifest import is_url
from ringflash.train.data.prepare import SHARD_BYTES, Recipe, prepare
from ringflash.train.data.sources import divide, find_sources
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import DATASET, TokenFiles
from ringflash.train.remote import CACHE, fetch


def load_corpus(sources: str | Sequence[str], cache_dir: str | Path = CACHE) -> TokenFiles:
    """Returns the token files of a prepared folder, or of text, which the first process that needs it encodes as bytes.

    A prepared folder may be a URL, such as s3://bucket/tokens. It is then copied to `cache_dir` once a host.

    Text is encoded once. The folder's name in `cache_dir` is derived from the files' paths, sizes and times. Processes
    that start together may all call this function.

    Raises:
        DataError: no documents, only empty ones, one that cannot be read or is not UTF-8 text, an incomplete prepared
            folder, or a cache that cannot be written.
    """
    names = [sources] if isinstance(sources, str) else list(sources)
    if len(names) == 1 and is_url(names[0]):
        return TokenFiles(fetch(names[0], "corpus", cache_dir, DataError))
    try:
        if len(names) == 1 and names[0].strip() and (Path(names[0]).expanduser() / DATASET).is_file():
            return TokenFiles(Path(names[0]).expanduser())
    except (OSError, RuntimeError):  # not a valid path; find_sources raises a clear error
        pass
    recipe = Recipe(Tokenizer())
    keys = "\n".join(recipe.key(parts) for parts in divide(find_sources(sources), SHARD_BYTES))
    name = f"tokens-{hashlib.sha256(keys.encode()).hexdigest()[:20]}"
    try:
        folder = Path(cache_dir).expanduser() / name
        if (folder / DATASET).is_file():
            try:
                return TokenFiles(folder)
            except DataError:
                pass  # damaged: `prepare` rewrites the damaged files
        return prepare(sources, folder, recipe)
    except (OSError, RuntimeError) as error:  # RuntimeError: expanduser found no folder for the user
        raise DataError(
            "cache_dir",
            expected="a folder for token files with room in it",
            got=str(error),
            remedy="Pass another cache_dir.",
        ) from error
