"""Directives that describe commands and configuration keys from the parsers and classes of the library."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

from docutils import nodes
from docutils.parsers.rst import Directive
from lightning.pytorch.cli import LightningArgumentParser
from sphinx.application import Sphinx

from ringflash.commands.main import main
from ringflash.train.commands.train import RingCLI


class _Stop(BaseException):
    """The end of a command that was only started for its parser."""


def parser_of(command: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a `ringflash` command: the command stops where it would parse its arguments."""
    found: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        found.append(self)
        raise _Stop

    try:
        with patch.multiple(argparse.ArgumentParser, parse_args=stop, parse_known_args=stop):
            main([*command, "--help"])  # without it some benchmarks ask for torchrun
    except _Stop:
        return found[0]
    raise ValueError(f"ringflash {' '.join(command)} has no parser of argparse")


def keys_of(path: str, prefix: str) -> argparse.ArgumentParser:
    """Returns a parser with the keys that `ringflash train` makes of the class `path`; "" is the run's own keys."""
    parser = LightningArgumentParser(exit_on_error=False)
    if path:
        module, _, name = path.rpartition(".")
        parser.add_class_arguments(getattr(importlib.import_module(module), name), prefix)
    else:
        RingCLI.add_arguments_to_parser(_Run(), parser)  # pyright: ignore[reportArgumentType]
    return parser


class _Run:
    """The part of `RingCLI` that its method for arguments reads, without callbacks."""

    run_callbacks: ClassVar[dict[str, Any]] = {}
    samples_text = True


def marked(text: str) -> list[nodes.Node]:
    """Returns a text with its words in backticks as code."""
    parts = re.split(r"`+([^`]+)`+", text)
    return [nodes.literal("", part) if i % 2 else nodes.Text(part) for i, part in enumerate(parts) if part]


def definitions(entries: Iterator[tuple[str, str]]) -> nodes.definition_list:
    """Returns a list of names with what they mean."""
    made = nodes.definition_list()
    for name, meaning in entries:
        item = nodes.definition_list_item()
        item += nodes.term("", "", nodes.literal("", name))
        item += nodes.definition("", nodes.paragraph("", "", *marked(meaning)))
        made += item
    return made


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yields the options of a command, as its own help shows them."""
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        value = parser._get_formatter()._format_args(action, (action.metavar or action.dest).upper())  # type: ignore[operator]
        name = ", ".join(action.option_strings)
        meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
        needed = "required. " if action.required and action.option_strings else ""
        yield f"{name} {value}".strip(), needed + meaning


def _keys(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yields the keys of a class with type and default."""
    for action in parser._actions:
        if action.default is argparse.SUPPRESS or not action.option_strings:
            continue  # its help, or a file with its keys
        name = action.option_strings[0].removeprefix("--")
        kind = getattr(action, "_typehint", None) or action.type or type(action.default)
        words = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
        words = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])|typing\.", "", words)
        default = "required" if action.required else f"default: `{action.default}`"
        yield name, f"`{words}`, {default}. {action.help or ''}"


class Command(Directive):
    """Describes the options of a command: `.. command:: prepare`."""

    required_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        """Returns the description of the command, and its options."""
        parser = parser_of(self.arguments[0].split())
        texts = [] if parser.description is None else parser.description.strip().split("\n\n")
        return [*(nodes.paragraph("", "", *marked(text)) for text in texts), definitions(_options(parser))]


class Keys(Directive):
    """Describes the keys that a class has in a configuration: `.. keys:: model ringflash.train.LanguageModel`."""

    optional_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        """Returns the keys."""
        prefix, _, path = (self.arguments or [""])[0].partition(" ")
        return [definitions(_keys(keys_of(path, prefix)))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives."""
    directives: dict[str, Callable[..., Any]] = {"command": Command, "keys": Keys}
    for name, directive in directives.items():
        app.add_directive(name, directive)  # pyright: ignore[reportArgumentType]
    return {"parallel_read_safe": True}
