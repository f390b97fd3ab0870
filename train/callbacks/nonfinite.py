"""What becomes of a step whose loss or gradient is NaN or infinite."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from ringflash.errors import ConfigError, RingflashError


class NonFiniteError(RingflashError, ArithmeticError):
    """A loss or gradient that is NaN or infinite; raised on every rank before the optimizer steps."""


@dataclass(frozen=True)
class NonFinite:
    """Stops the run, or leaves the step out: weights and optimizer stay as they are, data and learning rate move on.

    Args:
        action: "stop" or "skip".
        max_consecutive: skipped steps in a row, after which the next one stops the run.
    """

    action: Literal["stop", "skip"] = "stop"
    max_consecutive: int = 3

    def __post_init__(self) -> None:
        if self.action not in ("stop", "skip"):
            raise ConfigError("action", expected='"stop" or "skip"', got=repr(self.action), remedy='Try "stop".')
        if self.max_consecutive < 1:
            raise ConfigError("max_consecutive", expected="at least 1", got=self.max_consecutive, remedy="Try 3.")

    def skip(self, error: NonFiniteError, before: int, *, speak: bool) -> int:
        """The number of steps skipped in a row after this one, `before` it included; `speak` says so on stderr.

        Raises:
            NonFiniteError: `error`, where the step is not to be skipped.
        """
        if self.action == "stop" or before == self.max_consecutive:
            raise error
        if speak:
            print(f"ringflash: skipped {error}", file=sys.stderr, flush=True)
        return before + 1
