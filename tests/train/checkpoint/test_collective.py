"""An error on one rank is raised on all ranks: the library's own as it is, any other as a CheckpointError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringflash.errors import ConfigError, PeerLost
from ringflash.extras import MissingExtra
from ringflash.train.callbacks.nonfinite import NonFiniteError
from ringflash.train.checkpoint.collective import on_every_rank
from tests.helpers.distributed import run_ranks

OWN = [
    ConfigError("lora.base", expected="layers", got="none", remedy="Leave it out."),
    PeerLost([1], None, ["waits", "computes"], rank=0),
    MissingExtra("This folder", "zstandard", "data"),
    NonFiniteError("the loss of step 3 is nan"),
]


def _raised() -> list[tuple[str, str, list[str], str | None]]:
    """Returns the class, message, notes and cause of the error on this rank, for each error of rank 1."""
    found: list[tuple[str, str, list[str], str | None]] = []
    for error in [*OWN, ValueError("no such folder")]:

        def fail(error: Exception = error) -> None:
            if dist.get_rank() == 1:
                raise error from OSError("no space")

        try:
            on_every_rank(fail, Path("folder"))
        except Exception as raised:
            notes: Any = getattr(raised, "__notes__", [])
            cause = raised.__cause__
            found.append((type(raised).__name__, str(raised), notes, None if cause is None else str(cause)))
    return found


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    other, failing = run_ranks(2, _raised)
    expected = [(type(error).__name__, str(error)) for error in OWN]
    assert [each[:2] for each in other[:-1]] == [each[:2] for each in failing[:-1]] == expected
    assert all(notes == ["Raised on rank 1."] and cause is None for _, _, notes, cause in other)
    assert all(notes == [] and cause == "no space" for _, _, notes, cause in failing[:-1])
    assert other[-1][:2] == failing[-1][:2]
    kind, text = other[-1][:2]
    assert kind == "CheckpointError"
    assert text.startswith("folder: expected every rank to read and write it, got rank 1: ValueError: no such folder.")
