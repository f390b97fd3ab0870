"""Run of a benchmark on one device: its options, its device, and the record of its figures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringflash.bench.common import record
from ringflash.commands.options import fill_in


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
        return Run(options, torch.device("cuda" if on_gpu else "cpu"), name, record.command(parser.prog, arguments))

    def write(self, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        """Writes `rows` and the entries of `more` to the file of `--json`, if it was given."""
        if self.options.json is not None:
            record.write(self.options.json, self.command, self.device_name, rows, **more)
