"""What a Lightning strategy with sharded weights needs to save and to load them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from ringflash.errors import ArgumentError
from ringflash.train.checkpoint.load import load
from ringflash.train.checkpoint.manifest import local_path
from ringflash.train.checkpoint.save import SaveOptions, Saver
from ringflash.train.lightning import random_state
from ringflash.train.lightning.batch import all_ranks

DEFAULT_TIMEOUT = timedelta(minutes=30)
# How long a run that an error ends lets a checkpoint finish that it was writing.
WRITER_PATIENCE_SECONDS = 60.0


class ShardedStrategy(ModelParallelStrategy):
    """Saves folders of sharded tensors, on request while training goes on, and loads them at any world size.

    Args:
        data_parallel_size: as ModelParallelStrategy's.
        process_group_backend: torch.distributed backend; None: nccl on CUDA, gloo on CPU.
        timeout: of collectives, and of waiting for what other ranks write.
    """

    def __init__(self, data_parallel_size: Any, process_group_backend: str | None, timeout: timedelta) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size, process_group_backend=process_group_backend, timeout=timeout
        )
        self.timeout, self.saver = timeout, Saver(timeout)
        self._control: dist.ProcessGroup | None = None
        self._random: tuple[dict[str, Tensor], int] | None = None
        self._is_save_skipped = False

    @property
    def control(self) -> dist.ProcessGroup:
        """A group of all ranks that serves tensors of the CPU; a collective of them the first time."""
        if self._control is None:
            shared = dist.get_backend() == "gloo"
            group = dist.group.WORLD if shared else dist.new_group(backend="gloo", timeout=self.timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._control = group
        return self._control

    def exchange(self, *flags: int) -> list[list[int]]:
        """The `flags` of every rank, in rank order; a small collective that no GPU waits for."""
        return all_ranks(torch.tensor([int(flag) for flag in flags]), self.control).tolist()

    def on_exception(self, exception: BaseException) -> None:
        """Lets a checkpoint finish that is being written, within a minute."""
        self.saver.give_up(WRITER_PATIENCE_SECONDS)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Waits for a checkpoint that is being written.

        Raises:
            CheckpointError: on every rank, when one of them could not write.
        """
        self.saver.wait()
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's tensors where they are; Lightning's own copies them to the CPU first."""
        assert self.model is not None
        return cast("dict[str, Any]", get_model_state_dict(self.model))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's tensors where they are, by the names of their parameters."""
        assert self.model is not None
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return cast("dict[str, Any]", get_optimizer_state_dict(self.model, inner))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder of sharded tensors, complete or not at all; see `ringflash.train.checkpoint.save`.

        An error on one of several ranks that calls for a checkpoint gets none, and a line that says so: its peers are
        elsewhere, and a rank that waited for them would hide its error until their deadline.

        Args:
            checkpoint: Lightning's.
            filepath: of the folder.
            storage_options: a `SaveOptions`; None: at once, and the folder's other checkpoints are left alone.

        Raises:
            CheckpointError: on every rank, when one of them could not write, or for a URL.
        """
        if storage_options is not None and not isinstance(storage_options, SaveOptions):
            raise ArgumentError(
                "storage_options",
                expected="None or a ringflash.train.checkpoint.save.SaveOptions",
                got=storage_options,
                remedy="Checkpoints go to a file system, which has no options of its own.",
            )
        if (error := self._failure()) is not None:
            self._is_save_skipped = True
            text = f"ringflash: no checkpoint is saved after {type(error).__name__} on rank {self.global_rank}, since "
            text += f"other ranks may be at another step; resume from an earlier one. The error: {error}"
            print(text, file=sys.stderr, flush=True)
            return
        path = local_path(self.broadcast(str(filepath)), "filepath")
        checkpoint["random"] = random_state.collect(self.root_device, self.control)
        self.saver.save(checkpoint, path, storage_options or SaveOptions())

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks, unless a checkpoint was just skipped, for which this rank came alone."""
        is_skipped, self._is_save_skipped = self._is_save_skipped, False
        if not is_skipped:
            super().barrier(name)

    def _failure(self) -> BaseException | None:
        """The error that ends the run on this rank of several, where ranks have not agreed on it."""
        error = sys.exception()
        if error is None or self.world_size == 1 or self.lightning_module is None or self._is_agreed(error):
            return None
        return error if self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED else None

    def _is_agreed(self, error: BaseException) -> bool:
        """Says whether all ranks raise `error` after the same step."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restores weights and optimizer at any world size; returns the rest, which is always loaded weights_only."""
        assert self.model is not None
        if weights_only is False:
            raise ArgumentError(
                "weights_only",
                expected="None or True",
                got=False,
                remedy="A checkpoint of this strategy holds no objects: leave weights_only out.",
            )
        model_fields: Callable[[], dict[str, Any]] | None = getattr(self.lightning_module, "model_fields", None)
        fields = None if model_fields is None else model_fields()
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else []  # after `fit`, an evaluation still finds its optimizers here
        self.saver.wait()  # it may be what is to be loaded
        rest = load(local_path(self.broadcast(str(checkpoint_path)), "ckpt_path"), self.model, optimizers, fields)
        states = rest.pop("random", {})
        self._random = (states, rest.get("global_step", 0)) if fitting else None
        return rest

    def restore_random(self) -> None:
        """Sets this rank's random numbers to what a checkpoint that was loaded says, once.

        Before the first training step and not where it is loaded: making the iterators of data draws numbers too.
        """
        if self._random is not None:
            states, step = self._random
            random_state.restore(states, self.global_rank, self.world_size, self.root_device, step)
            self._random = None
