"""Options that several commands share: their one dictionary of names, choices, defaults and checks."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ringflash as rf
from ringflash.commands.picture import PictureFile
from ringflash.errors import ArgumentError, ConfigError
from ringflash.layouts.layout import LAYOUTS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIGS = Path(rf.__file__).parent / "configs"  # the package's own, which its wheel has too
LEAVE_OUT = "Leave it out for the default."
MASKS = ("causal", "full")
PRINTED = Path("-")  # in place of the file of --json

# Options that several commands have. A name has one meaning everywhere, so another meaning needs another name. A plural
# takes several values of its singular.
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_NUMBERS: dict[str, Any] = {**_NUMBER, "nargs": "+"}
_FLAG: dict[str, Any] = {"action": "store_true"}
SHARED: dict[str, dict[str, Any]] = {
    "seqlen": _NUMBER | {"help": "tokens in the whole sequence"},
    "seqlens": _NUMBERS | {"help": "lengths of the whole sequence, in tokens"},
    "tokens": _NUMBER | {"help": "tokens in all sequences: the batch is tokens / seqlen"},
    "batch": _NUMBER | {"help": "sequences in the batch"},
    "nheads": _NUMBER | {"help": "query heads"},
    "nheads_kv": _NUMBER | {"help": "KV heads"},
    "headdim": _NUMBER | {"help": "width of a head"},
    "headdims": _NUMBERS | {"help": "widths of a head"},
    "dtype": {"choices": DTYPES, "help": "dtype of the tensors"},
    "mask": {"choices": MASKS, "help": "mask before any window or documents"},
    "masks": {"choices": MASKS, "nargs": "+", "help": "masks that are measured in turn"},
    "window_left": _NUMBER | {"help": "keys seen before a query's own, as SlidingWindow.left"},
    "window_right": _NUMBER | {"help": "keys seen after a query's own, as SlidingWindow.right"},
    "num_documents": _NUMBER | {"help": "documents packed into the sequence"},
    "world_size": _NUMBER | {"help": "ranks in the ring"},
    "world_sizes": _NUMBERS | {"help": "numbers of ranks in the ring"},
    "head_split": _NUMBER | {"help": "ranks that split the heads"},
    "head_splits": _NUMBERS | {"help": "numbers of ranks that split the heads, measured in turn"},
    "layout": {"help": f"cut of the sequence over ranks: one of {', '.join(LAYOUTS)}"},
    "transport": {"help": "messages between ranks, as ContextParallel.transport"},
    "backend": {"help": "kernels, as AttentionOptions.backend"},
    "rounds": _NUMBER | {"help": "rounds of measurement, each over all contenders"},
    "repeats": _NUMBER | {"help": "timed calls a round"},
    "samples": _NUMBER | {"help": "samples that each cell of the table measures"},
    "peers": _FLAG | {"help": "measure the installed peers too"},
    "checkpoint": {"metavar": "FOLDER", "help": "checkpoint, as in runs/tiny-cpu/checkpoints/last"},
    "tokenizer": {"metavar": "PATH", "help": 'tokenizer.json, a folder with one, or "bytes"'},
    "val_fraction": {"type": float, "metavar": "SHARE", "help": "part of the tokens that is held out of training"},
    "seed": _NUMBER | {"help": "seed of the random numbers"},
    "device": {"metavar": "DEVICE", "help": "device to run on: auto, cpu or cuda"},
    "processes": _NUMBER | {"help": "processes that share the work"},
    "json": {
        "type": Path,
        "metavar": "FILE",
        "nargs": "?",
        "const": PRINTED,
        "help": "write the result as JSON to FILE; without FILE print it, which benchmarks do not",
    },
    "png": {"action": PictureFile, "metavar": "FILE", "help": "draw the figures there: a .png, .svg or .pdf"},
    "to": {"type": Path, "metavar": "PATH", "help": "where to write the result"},
    "config": {"type": Path, "action": "append", "metavar": "FILE", "help": "configuration; several are merged"},
    "debug": _FLAG | {"help": "show tracebacks"},
}
REQUIRED = object()  # in place of a default


@dataclass(frozen=True)
class Described:
    """Default that the help describes in words: the command itself fills it in."""

    text: str


def parser_of(command: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser for `ringflash COMMAND`, which takes no abbreviated options.

    `options` are those of `argparse.ArgumentParser`.
    """
    return argparse.ArgumentParser(f"ringflash {command}", description=description, allow_abbrev=False, **options)


def add_shared(
    parser: argparse.ArgumentParser,
    *names: str,
    choices: Mapping[str, Sequence[str]] | None = None,
    **defaults: Any,
) -> None:
    """Adds options of `SHARED`, each with the type and help that it has in every command.

    Args:
        parser: parser of a command.
        names: options without a default.
        choices: fewer choices for an option, where the command does not take all.
        defaults: options with their defaults; `REQUIRED` and `Described` are possible in place of a default.
    """
    for name, default in {**defaults, **dict.fromkeys(names)}.items():
        keywords: dict[str, Any] = {**SHARED[name]}
        if choices is not None and name in choices:
            keywords["choices"] = choices[name]
        if default is REQUIRED:
            keywords["required"] = True
        elif isinstance(default, Described):
            keywords["help"] += f" (default: {default.text})"
        elif default == []:
            keywords["default"] = default
        elif default is not None:
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            keywords |= {"default": default, "help": f"{keywords['help']} (default: {shown})"}
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)


def put_json(path: Path, content: Any) -> None:
    """Writes `content` as JSON to `path`, or prints it for `PRINTED`. A file is replaced in one step.

    Raises:
        ArgumentError: `path` is a folder.
    """
    text = json.dumps(content, indent=2)
    if path == PRINTED:
        print(text)
        return
    path = path.resolve()  # a link stays, and leads to the new file
    if path.is_dir():
        raise ArgumentError("--json", expected="a FILE", got=f"the folder {path}", remedy="Name a file in it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device or pipe
        path.write_text(text + "\n")
        return
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text + "\n")
    unfinished.replace(path)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that explain or prepare a training run."""
    add_shared(parser, "json", "debug", config=REQUIRED)


def config_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the configurations of `add_run_options` as arguments. Raises ConfigError for a file that is missing."""
    return [argument for name in options.config for argument in ("--config", str(config_file(name)))]


def config_file(name: str | Path) -> Path:
    """Returns the path of a configuration: a file, or one of the package's own by its name, such as h200-4.

    Raises:
        ConfigError: there is none; the error names the nearest one.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.parent in (Path(), Path("configs")):
        own = CONFIGS / (path.name if path.suffix == ".yaml" else f"{path.name}.yaml")
        if own.is_file():
            return own
    files = [str(each) for each in sorted(path.parent.glob("*.yaml"))]
    near = difflib.get_close_matches(str(path), files, n=1, cutoff=0.3)
    names = [each.stem for each in sorted(CONFIGS.glob("*.yaml"))]
    near += difflib.get_close_matches(path.stem, names, n=1)
    remedy = f"Did you mean {' or '.join(near)}?" if near else f"Name a file, or one of {', '.join(names)}."
    raise ConfigError("--config", expected="a configuration file", got=f"no file {path}", remedy=remedy)


def fill_in(options: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Sets omitted options to their `defaults`; an option `nheads_kv` without a default becomes `nheads`."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if "nheads_kv" in options and options.nheads_kv is None:
        options.nheads_kv = options.nheads


def check_at_least(
    options: argparse.Namespace, names: Sequence[str], least: float = 1, *, remedy: str = LEAVE_OUT
) -> None:
    """Raises ArgumentError unless every number of the options `names` is at least `least`; None is skipped."""
    for flag, given in _given(options, names):
        if not given >= least:
            raise ArgumentError(flag, expected=f"at least {least}", got=given, remedy=remedy)


def check_positive(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises ArgumentError unless every number of the options `names` is more than 0; None is skipped."""
    for flag, given in _given(options, names):
        if not given > 0:
            raise ArgumentError(flag, expected="more than 0", got=given, remedy=LEAVE_OUT)


def check_heads(options: argparse.Namespace) -> None:
    """Raises ArgumentError unless `nheads` is a multiple of `nheads_kv`."""
    if options.nheads % options.nheads_kv:
        expected, remedy = f"a multiple of --nheads-kv {options.nheads_kv}", "Query heads share KV heads evenly."
        raise ArgumentError("--nheads", expected=expected, got=options.nheads, remedy=remedy)


def _given(options: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yields the flag and the number for each number of the options `names`."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            yield f"--{name.replace('_', '-')}", number
