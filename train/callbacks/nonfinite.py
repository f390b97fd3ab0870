"""Policy for a step with a NaN or infinite loss or gradient."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ringflash.errors import ConfigError, RingflashError
from ringflash.train.lightning.host_copies import HostCopy

log = logging.getLogger(__name__)


class NonFiniteError(RingflashError, ArithmeticError):
    """A NaN or infinite loss or gradient; raised on every rank, and the optimizer has not applied this step."""


class StepResult:
    """Loss and gradient norm of an optimizer step, equal on all ranks, on their way from the device to the host.

    Args:
        step: number of optimizer steps before this one.
        batches: batch index of each micro-batch.
        loss: mean loss of the step, a scalar.
        norm: norm of the gradients, a scalar.
        losses: (world_size, micro-batches), the sum of token losses of each micro-batch of each rank.
    """

    def __init__(self, step: int, batches: list[int], loss: Tensor, norm: Tensor, losses: Tensor) -> None:
        self.step, self.batches = step, batches
        self.is_finite = loss.isfinite() & norm.isfinite()
        self._copy = HostCopy(torch.cat([x.detach().double().flatten() for x in (loss, norm, losses)]))

    def error(self) -> NonFiniteError | None:
        """Returns the error for a loss or norm that is not finite, else None; waits for the device's work so far.

        The device may have later work, for which the host does not wait.
        """
        loss, norm, *losses = self._copy.read()
        if math.isfinite(loss) and math.isfinite(norm):
            return None
        count = len(self.batches)
        bad = [(self.batches[i % count], i // count) for i, x in enumerate(losses) if not math.isfinite(x)]
        batches = sorted({batch for batch, _ in bad}) or self.batches
        where = f", first seen on ranks {sorted({rank for _, rank in bad})}" if bad else ""
        return NonFiniteError(
            f"step {self.step}, batch {', '.join(map(str, batches))}: loss {loss}, "
            f"gradient norm {norm}{where}. The optimizer has not stepped. Look at the batch; "
            "lower the learning rate or lengthen the warmup; resume from the last checkpoint."
        )


@dataclass(frozen=True)
class NonFinite:
    """Stops the run, or skips the step.

    A skipped step leaves weights and optimizer unchanged, while data and learning rate move on. A step that stops the
    run leaves them unchanged too. On a GPU the optimizer leaves such a step out by itself, and the host reads the
    result one step later. The run therefore stops before the next optimizer step, checkpoint or validation.

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
