"""Run of a benchmark, and its record: figures as JSON, with the command, the date, the device and the versions."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ringflash.commands.options import fill_in, put_json


def command(program: str, arguments: Sequence[str]) -> str:
    """Returns the command line, quoted for a shell.

    Arguments lose their folders, because the place of a file says nothing about the run.
    """
    names = (Path(argument).name if os.sep in argument else argument for argument in arguments)
    return " ".join([program, *map(shlex.quote, names)])


def write(path: Path, command: str, device: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Writes `rows` and the entries of `more` to `path`, as `put_json`."""
    record = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "versions": {name: version(name) for name in ("ringflash", "torch", "triton")},
        **more,
        "rows": rows,
    }
    put_json(path, record)


@dataclass(frozen=True)
class Run:
    """A run on one device.

    Args:
        options: options of the command line.
        device: a GPU if there is one, else the CPU.
        device_name: name of the device in tables and records.
        command: command line of the run.
    """

    options: argparse.Namespace
    device: torch.device
    device_name: str
    command: str

    @staticmethod
    def begin(
        parser: argparse.ArgumentParser, arguments: Sequence[str], gpu: Mapping[str, Any], cpu: Mapping[str, Any]
    ) -> Run:
        """Parses `arguments`, and fills in what they omit: from `gpu` on a GPU, from `cpu` without one."""
        options = parser.parse_args(arguments)
        on_gpu = torch.cuda.is_available()
        fill_in(options, gpu if on_gpu else cpu)
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        return Run(options, torch.device("cuda" if on_gpu else "cpu"), name, command(parser.prog, arguments))

    def write(self, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        """Writes `rows` and the entries of `more` to the file of `--json`, if it was given."""
        if self.options.json is not None:
            write(self.options.json, self.command, self.device_name, rows, **more)
