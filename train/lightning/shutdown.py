"""End of a process group: a rank that has finished waits for its peers before it exits."""

from __future__ import annotations

import atexit
import contextlib
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(seconds=20)


class Shutdown:
    """Destroys the default process group when this process exits, after every rank has reached that point.

    A rank that exits at once breaks connections that a slower peer, or one of gloo's threads, still uses; gloo then
    aborts the process. The ranks synchronise through the group's store. If a rank has failed, a barrier would hang or
    match another collective.

    Args:
        patience: longest wait for the other ranks; after that this rank exits without them.
    """

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self._patience, self._failed = patience, False
        atexit.register(self.leave)

    def fail(self) -> None:
        """Records that the run broke off: at exit this rank does not wait for its peers."""
        self._failed = True

    def leave(self) -> None:
        """Waits for the other ranks, then destroys the process group, if there still is one."""
        if not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError):  # a peer is late, or the rank that serves the store has died
            self._arrive("done", wait=not self._failed)
            # Rank 0 may serve the store, so it also waits until the others have made their last request to it.
            self._arrive("leaving", wait=not self._failed and dist.get_rank() == 0)
        dist.destroy_process_group()

    def _arrive(self, stage: str, *, wait: bool) -> None:
        world = dist.group.WORLD
        assert world is not None, "`leave` has asked whether there is a group"
        store, key = world.get_group_store(), f"ringflash/shutdown/{stage}"
        if store.add(key, 1) == dist.get_world_size():
            store.set(f"{key}/all", "1")
        if wait:
            store.wait([f"{key}/all"], self._patience)
