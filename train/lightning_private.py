"""Private parts of Lightning that training steps depend on.

Lightning may change these names in any release. All were checked with the releases in `CHECKED`;
`tests/train/test_lightning_private.py` fails under any other release, and where a name no longer behaves as needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

CHECKED = ("2.6",)  # releases of Lightning; 2.6.6 was checked

log = logging.getLogger(__name__)


def exchange_sigterm(trainer: pl.Trainer, on_any_rank: Callable[[bool], bool]) -> None:
    """Makes training exchange SIGTERM with `on_any_rank` before each batch, instead of on the accelerator.

    Lightning broadcasts the flag of rank 0 on the accelerator before each batch, and reads it at once. The host would
    wait for all work that its GPU has queued. Lightning also lets each rank end after its own signal, in mid-step for
    its peers. Here a SIGTERM on any rank ends all ranks before the same batch; outside of training it is as before.
    There is no public way to leave the broadcast out.

    Args:
        trainer: Trainer before a run; it registers its signal handlers later.
        on_any_rank: returns whether the argument is True on any rank; a collective of all ranks.
    """
    connector: Any = trainer._signal_connector
    is_told = False

    def stop_if_told() -> None:
        connector.received_sigterm |= on_any_rank(is_told)
        if connector.received_sigterm:
            raise SIGTERMException

    def note(signum: int, frame: Any) -> None:
        nonlocal is_told
        log.info("rank %d received SIGTERM", trainer.global_rank)
        if not is_told and (launcher := trainer.strategy.launcher) is not None:
            launcher.kill(signum)
        is_told = True
        connector.received_sigterm |= not trainer.training

    connector._sigterm_notifier_fn = note
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = stop_if_told
