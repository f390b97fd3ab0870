from __future__ import annotations

import os
import signal
from typing import Any, cast

import pytest

from ringflash.train.lightning.interrupt import Interrupt


class Finalized:
    """An object that interrupts this process when it is collected."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # gives Python bytecodes to run the handler between
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops this interrupt
def test_interrupt_that_falls_into_a_finalizer() -> None:
    callback, nothing = Interrupt(), cast("Any", None)
    callback.on_train_start(nothing, nothing)
    try:
        callback.on_train_batch_end(nothing, nothing, None, None, 0)
        Finalized()
        with pytest.raises(KeyboardInterrupt):
            callback.on_train_batch_end(nothing, nothing, None, None, 0)
    finally:
        callback.on_train_end(nothing, nothing)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
