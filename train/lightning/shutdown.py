"""The end of a process group: a rank that has finished waits for its peers before it leaves."""

from __future__ import annotations

import atexit
import contextlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE = timedelta(seconds=20)


class Shutdown:
    """Destroys the default process group when this process exits, once every rank has come to that.

    A rank that leaves at once breaks off what a slower peer, or a thread of gloo's own, has not finished; gloo then
    aborts the process. The ranks meet in the group's store and not in a barrier, which would hang, or meet another
    collective, where a rank has failed.

    Args:
        patience: how long a rank waits for the others; what they do after that they do without it.
    """

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self._patience, self._failed = patience, False
        atexit.register(self.leave)

    def fail(self) -> None:
        """Notes that the run broke off: this rank will neither wait nor be waited for."""
        self._failed = True

    def leave(self) -> None:
        """Meets the other ranks, then destroys the process group, if there still is one."""
        if not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError):  # a peer is late, or the rank that serves the store has died
            self._arrive("done", wait=not self._failed)
            # Rank 0 may serve the store, which the others have just asked for the last time.
            self._arrive("leaving", wait=not self._failed and dist.get_rank() == 0)
        dist.destroy_process_group()

    def _arrive(self, stage: str, *, wait: bool) -> None:
        store, key = distributed_c10d._get_default_store(), f"ringflash/shutdown/{stage}"
        if store.add(key, 1) == dist.get_world_size():
            store.set(f"{key}/all", "1")
        if wait:
            store.wait([f"{key}/all"], self._patience)
