"""Options that several commands share: choices, defaults and checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ringflash.errors import ArgumentError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LEAVE_OUT = "Leave it out for the default."


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
