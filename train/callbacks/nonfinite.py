"""Policy for a step with a NaN or infinite loss or gradient."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from ringflash.errors import ConfigError, RingflashError

log = logging.getLogger(__name__)


class NonFiniteError(RingflashError, ArithmeticError):
    """A NaN or infinite loss or gradient; raised on every rank before the optimizer steps."""


@dataclass(frozen=True)
class NonFinite:
    """Stops the run, or skips the step.

    A skipped step leaves weights and optimizer unchanged, while data and learning rate move on.

    Args:
        action: "stop" or "skip".
        max_consecutive: number of skipped steps in a row, after which the next one stops the run.
    """

    action: Literal["stop", "skip"] = "stop"
    max_consecutive: int = 3

    def __post_init__(self) -> None:
        if self.action not in ("stop", "skip"):
            raise ConfigError("action", expected='"stop" or "skip"', got=repr(self.action), remedy='Try "stop".')
        if self.max_consecutive < 1:
            raise ConfigError("max_consecutive", expected="at least 1", got=self.max_consecutive, remedy="Try 3.")

    def skip(self, error: NonFiniteError, before: int, *, speak: bool) -> int:
        """Returns the number of steps skipped in a row, including this one after `before` others.

        Args:
            error: error of this step.
            before: number of steps skipped directly before this one.
            speak: log the skipped step.

        Raises:
            NonFiniteError: `error`, if the step must not be skipped.
        """
        if self.action == "stop" or before == self.max_consecutive:
            raise error
        if speak:
            log.warning("skipped %s", error)
        return before + 1
