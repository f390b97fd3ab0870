"""A corpus by name: a folder that `ringflash prepare` made, or text, which becomes one of bytes in a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ringflash.errors import DataError
from ringflash.train.data.prepare import SHARD_BYTES, Recipe, prepare
from ringflash.train.data.sources import divide, find_sources
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import DATASET, TokenFiles

CACHE = "~/.cache/ringflash"


def load_corpus(sources: str | Sequence[str], cache_dir: str | Path = CACHE) -> TokenFiles:
    """The token files of a prepared folder, or those of text, encoded as bytes by the first process that needs them.

    Text is encoded once: the folder's name in `cache_dir` follows from the files' paths, sizes and times, and processes
    that start together may all call this.

    Raises:
        DataError: no documents, only empty ones, one that cannot be read or is not UTF-8 text, a prepared folder that
            is not complete, or a cache that cannot be written.
    """
    names = [sources] if isinstance(sources, str) else list(sources)
    try:
        if len(names) == 1 and names[0].strip() and (Path(names[0]).expanduser() / DATASET).is_file():
            return TokenFiles(Path(names[0]).expanduser())
    except (OSError, RuntimeError):  # no path at all, which find_sources explains
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
                pass  # damaged: what is not as it was is made anew
        return prepare(sources, folder, recipe)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        raise DataError(
            "cache_dir",
            expected="a folder for token files with room in it",
            got=str(error),
            remedy="Pass another cache_dir.",
        ) from error
