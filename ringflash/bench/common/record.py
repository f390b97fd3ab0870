"""Record of a run: its figures as JSON, with the command, the date, the device and the versions."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def command(program: str, arguments: Sequence[str]) -> str:
    """Returns the command line, quoted for a shell.

    Arguments lose their folders, because the place of a file says nothing about the run.
    """
    names = (Path(argument).name if os.sep in argument else argument for argument in arguments)
    return " ".join([program, *map(shlex.quote, names)])


def write(path: Path, command: str, device: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Writes `rows` and the entries of `more` to `path`. An existing file is replaced in one step."""
    record = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "versions": {name: version(name) for name in ("ringflash", "torch", "triton")},
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(path)
