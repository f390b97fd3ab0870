"""Options that several commands share: choices, defaults and checks."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ringflash as rf
from ringflash import extras
from ringflash.errors import ArgumentError, ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIGS = Path(rf.__file__).parent / "configs"  # the package's own, which its wheel has too
LEAVE_OUT = "Leave it out for the default."


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that explain or prepare a training run."""
    text = "configuration of the run; several are merged, as in `ringflash train fit`"
    parser.add_argument("--config", type=Path, action="append", required=True, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


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


def check_picture(flag: str, path: Path | None, example: str) -> None:
    """Raises ArgumentError unless `path`, if it is given, has the suffix of a picture; `example` has one."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        remedy = f"Name it {example}."
        raise ArgumentError(flag, expected="a .png, .svg or .pdf file", got=path, remedy=remedy)
    if path is not None:
        extras.require("plot", flag)


def _given(options: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yields the flag and the number for each number of the options `names`."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            yield f"--{name.replace('_', '-')}", number
