"""Weights sharded by FSDP2: sharding a model, and saving and loading by a Lightning strategy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from ringflash.errors import ArgumentError
from ringflash.train.checkpoint import random_state
from ringflash.train.checkpoint.load import load
from ringflash.train.checkpoint.manifest import local_path
from ringflash.train.checkpoint.save import SaveOptions, Saver
from ringflash.train.exchange import Place, Purpose, exchange
from ringflash.train.lightning.user_modules import has_unlike_buffers
from ringflash.train.remote import fetched

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
# After an error, a run waits this long for a checkpoint that is being written.
WRITER_PATIENCE_SECONDS = 60.0


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    head: nn.Module | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shards `model` block by block with FSDP2.

    Weights keep their dtype; they are gathered in `compute_dtype`, and gradients are reduced in float32.

    Args:
        model: module with or without storage.
        blocks: blocks of `model`; each is gathered when it runs.
        mesh: mesh of one dimension, or (replicate, shard).
        compute_dtype: bfloat16, or the dtype of the weights.
        head: head of `model`, if it has its own weights and runs as a module; gathered only for the loss and its
            backward. Weights outside the blocks and the head stay gathered for the whole step.
        reshard_after_forward: free a block's gathered weights until its backward.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    if head is not None:
        fully_shard(head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)


class ShardedStrategy(ModelParallelStrategy):
    """Saves checkpoints as folders of sharded tensors, also while training continues, and loads them at any world size.

    Args:
        data_parallel_size: as in ModelParallelStrategy.
        process_group_backend: torch.distributed backend; None: nccl on CUDA, gloo on CPU.
        timeout: limit of a collective, and of the wait for other ranks' files.
    """

    def __init__(self, data_parallel_size: Any, process_group_backend: str | None, timeout: timedelta) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size, process_group_backend=process_group_backend, timeout=timeout
        )
        self.timeout, self.saver = timeout, Saver(timeout)
        self._cpu_group: dist.ProcessGroup | None = None
        self._random: tuple[dict[str, Tensor], int] | None = None
        self._is_save_skipped = False
        self._has_unlike_buffers = False

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """Gloo process group of all ranks, for CPU tensors. Its first use is a collective of all ranks."""
        if self._cpu_group is None:
            shared = dist.get_backend() == "gloo"
            group = dist.group.WORLD if shared else dist.new_group(backend="gloo", timeout=self.timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._cpu_group = group
        return self._cpu_group

    def exchange(self, purpose: Purpose, *flags: int) -> list[list[int]]:
        """Returns the `flags` of every rank, in rank order. This is a small collective that no GPU waits for.

        Raises:
            RankMismatch, GroupFailed: as `ringflash.train.exchange.exchange`.
        """
        return exchange(self.cpu_group, Place(purpose), *flags)

    def on_exception(self, exception: BaseException) -> None:
        """Waits up to a minute for a checkpoint that is being written."""
        self.saver.give_up(WRITER_PATIENCE_SECONDS)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Waits for a checkpoint that is being written.

        Raises:
            CheckpointError: on every rank, when one rank could not write.
        """
        self.saver.wait()
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the tensors that checkpoints hold, on their devices; Lightning's method copies them to the CPU."""
        assert self.model is not None
        state, is_saved = cast("dict[str, Any]", get_model_state_dict(self.model)), self._is_saved
        return {name: x for name, x in state.items() if is_saved(name)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's tensors on their devices, by parameter name."""
        assert self.model is not None
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return cast("dict[str, Any]", get_optimizer_state_dict(self.model, inner))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder of sharded tensors, complete or not at all; see `ringflash.train.checkpoint.save`.

        After an error on one of several ranks this method saves nothing and prints a line that says so. The other ranks
        may be at another step, and waiting for them would hide the error until their deadline.

        Args:
            checkpoint: Lightning's checkpoint.
            filepath: path of the folder.
            storage_options: a `SaveOptions`; None: write at once, and keep the folder's other checkpoints.

        Raises:
            CheckpointError: on every rank, when one rank could not write, or for a URL.
            RankMismatch: on every rank, when another rank does not save.
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
            text = f"no checkpoint is saved after {type(error).__name__} on rank {self.global_rank}, since "
            text += f"other ranks may be at another step; resume from an earlier one. The error: {error}"
            log.warning(text)
            return
        if self.world_size > 1:
            self.exchange(Purpose.CHECKPOINT)  # because the broadcast would wait for a rank that does not save
        path = local_path(self.broadcast(str(filepath)), "filepath")
        if self.world_size > 1 and not self._has_unlike_buffers:
            assert self.model is not None
            self._has_unlike_buffers = has_unlike_buffers(self.model, checkpoint["state_dict"], self.cpu_group)
        checkpoint["random"] = random_state.collect(self.root_device, self.cpu_group)
        self.saver.save(checkpoint, path, storage_options or SaveOptions())

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks, unless a checkpoint was just skipped, because then only this rank came here."""
        is_skipped, self._is_save_skipped = self._is_save_skipped, False
        if not is_skipped:
            super().barrier(name)

    def _failure(self) -> BaseException | None:
        """Returns the error that ends the run on this rank, or None if there is none or all ranks agreed on it."""
        error = sys.exception()
        if error is None or self.world_size == 1 or self.lightning_module is None or self._is_raised_by_all(error):
            return None
        return error if self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED else None

    def _is_raised_by_all(self, error: BaseException) -> bool:
        """Returns whether all ranks raise `error` after the same step."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restores weights and optimizer at any world size. Returns the other entries, loaded with weights_only."""
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
        optimizers = self.optimizers if fitting else []  # an evaluation after `fit` still has fit's optimizers
        self.saver.wait()  # the pending save may be the checkpoint to load
        rest = load(
            fetched(self.broadcast(str(checkpoint_path)), "ckpt_path", self.cpu_group),
            self.model,
            optimizers,
            fields,
            self._is_saved,
        )
        rest.setdefault("callbacks", {})  # without it, callbacks get no call of `on_load_checkpoint`
        states = rest.pop("random", {})
        self._random = (states, rest.get("global_step", 0)) if fitting else None
        return rest

    @property
    def _is_saved(self) -> Callable[[str], bool]:
        """The module's choice of the tensors in checkpoints, by name; without one it is all."""
        return getattr(self.lightning_module, "is_saved", lambda name: True)

    def restore_random(self) -> None:
        """Sets this rank's random number generators from the loaded checkpoint, once.

        This happens before the first training step and not in `load_checkpoint`, because making the data iterators
        draws numbers too.
        """
        if self._random is not None:
            states, step = self._random
            random_state.restore(states, self.global_rank, self.world_size, self.root_device, step)
            self._random = None
