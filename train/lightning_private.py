"""Private parts of Lightning: the only file of the trainer that uses them.

Lightning may change these names in any release. All were checked with the releases in `CHECKED`;
`tests/train/test_lightning_private.py` fails under any other release, and where a name no longer behaves as needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.device_mesh import DeviceMesh

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


def resume_epoch(trainer: pl.Trainer) -> None:
    """Restores the place, the accumulation and the length of an epoch in which a run resumes.

    A run that resumes at the end of an epoch begins the next one. With `max_steps`, Lightning takes it for a run within
    that epoch, and would leave out as many batches as an epoch has.

    Lightning does not call `on_train_epoch_start` in such an epoch, so GradientAccumulationScheduler sets no factor.
    Lightning also limits the epoch to as many batches as a whole epoch has. These are too few if the batches before the
    checkpoint were smaller, and thus more.
    """
    loop: Any = trainer.fit_loop
    progress, at_end = loop.epoch_progress, loop.epoch_loop.batch_progress.is_last_batch
    finished = progress.current.ready == progress.current.processed > 0
    if loop.restarting and finished and at_end and not loop.restarted_mid_epoch:
        if loop.restarted_on_epoch_end:
            progress.increment_completed()
        loop._restarting = loop.epoch_loop.restarting = False
        loop.update_restart_stage()
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
    limit_asked, loader = trainer.limit_train_batches, cast("Any", trainer.fit_loop._combined_loader)
    if loader is None or not loader.limits or not isinstance(limit_asked, float) or limit_asked < 1:
        return
    # in place, because the loader's iterator has the same list
    loader.limits[:] = [
        limit if limit == float("inf") else max(limit, len(each))
        for limit, each in zip(loader.limits, loader.flattened, strict=True)
    ]
    if (fetcher := trainer.fit_loop._data_fetcher) is not None and fetcher.length is not None:
        fetcher.length = len(loader)
        follow_epoch(trainer)  # now, before Lightning compares the batches so far with the length


def follow_epoch(trainer: pl.Trainer) -> None:
    """Sets the number of batches after which the present epoch ends and validates.

    Lightning takes both from the first epoch of a run, but epochs differ: the last part of the data that
    `limit_train_batches` leaves is short, and a run may resume in a short epoch or with another batch size.
    """
    loop: Any = trainer.fit_loop
    length, interval = loop._data_fetcher.length, trainer.val_check_interval
    if length is None:
        return
    loop.max_batches = length
    if isinstance(interval, float) and trainer.val_check_batch not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(length * interval))


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """Returns the trainer of `module`, or None outside of a run, where the public property raises an error."""
    return module._trainer


def connect(strategy: ModelParallelStrategy) -> None:
    """Joins the process group as `setup_environment` does, without the mesh that Lightning would make.

    The public method demands that data x tensor parallel ranks are all ranks.
    """
    strategy._setup_distributed()


def set_device_mesh(strategy: ModelParallelStrategy, module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Sets the public, read-only property `device_mesh` of the strategy and of its module."""
    strategy._device_mesh = mesh
    module._device_mesh = mesh


class UntrustingCLI(LightningCLI):
    """LightningCLI that unpickles no checkpoint, names its options, and lets subclasses run nothing."""

    def _parse_ckpt_path(self) -> None:
        """Does nothing. Lightning would unpickle the file of `ckpt_path` to look for arguments of the module."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Calls `run_subcommand`."""
        self.run_subcommand(subcommand)

    def run_subcommand(self, subcommand: str) -> None:
        """Runs the method of the Trainer that the command line names, in the end of the constructor."""
        super()._run_subcommand(subcommand)

    def configured(self, name: str) -> Any:
        """Returns the part `name` of the configuration of the subcommand, with instances in place of classes."""
        return self._get(self.config_init, name)

    def option_names(self, subcommand: str | None) -> list[str]:
        """Returns the names of the options of `subcommand`, or of all subcommands if there is no such one.

        The parser of a subcommand is made by a private method, and a parser has no public list of its options.
        """
        parsers = self._subcommand_parsers
        used = parsers.get(subcommand) if subcommand else None
        return [action.dest for action in used._actions] if used else [*parsers]
