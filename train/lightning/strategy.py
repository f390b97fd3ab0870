"""Lightning strategy: it runs the sequence over a ring, and shards the weights over all ranks or within replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ringflash as rf
from ringflash.errors import ConfigError, StateError
from ringflash.train.exchange import Purpose, all_ranks
from ringflash.train.lightning import user_modules
from ringflash.train.lightning.batch import (
    ADDED,
    CUT,
    SAMPLER,
    WHOLE,
    agree_on_batch,
    cut_keys,
    document_positions,
)
from ringflash.train.lightning.host_copies import pinned
from ringflash.train.lightning.optimizer import multiply_gradients, parameters_of
from ringflash.train.lightning.preemption import Preempted
from ringflash.train.lightning.sharded import DEFAULT_TIMEOUT, ShardedStrategy
from ringflash.train.lightning.shutdown import Shutdown
from ringflash.train.lightning_private import (
    connect,
    exchange_sigterm,
    follow_epoch,
    resume_epoch,
    set_device_mesh,
    trainer_of,
)

if TYPE_CHECKING:
    from ringflash.compile_once import Compilations

logger = logging.getLogger(__name__)

DATA, CONTEXT = "data_parallel", "context_parallel"
LAYOUTS = ("zigzag", "contiguous", "striped")  # layouts that can be cut before the mask is known


class RingAttentionStrategy(ShardedStrategy):
    """Context parallelism x data parallelism, with FSDP2 over all ranks or over replicated groups of ranks.

    A batch holds whole sequences and pre-shifted labels, the same on every rank of a context-parallel group.
    `batch_to_device` cuts this rank's shard from it. The module's `training_step` returns
    `context.token_mean(...).loss`, or the local sum of token losses / `batch["num_valid_tokens"]`. The strategy sums
    gradients over all ranks. An accumulation window is the micro-batches of one optimizer step. The strategy weights
    each micro-batch by its valid tokens, so that an optimizer step sees the gradient of

        sum of the window's token losses / number of the window's valid tokens.

    The number of a window's tokens is known only after its last micro-batch. `backward` therefore weights micro-batch i
    by valid_i / valid_0, and `optimizer_step` multiplies the sum of gradients by valid_0 / sum(valid_i). Division by
    valid_0 keeps gradients at the size of a mean's, because 16-bit gradients of a sum could overflow. valid_0 counts as
    1 if the first micro-batch has no valid token. With manual optimization nothing is weighted: the module divides by
    the window's count.

    The LightningModule shards itself in `configure_model` over `shard_mesh` with `fully_shard`; every parameter must be
    sharded, except in a module that rounds its weights itself (`rounds_weights`), such as a LanguageModel on one rank.
    With several micro-batches the gradients are reduced after each micro-batch, which keeps them sharded.

    Args:
        context_parallel_size: ranks that share a sequence; "auto": all ranks that `data_parallel_size` leaves.
        data_parallel_size: number of context-parallel groups, each with batches of its own; "auto": all ranks that
            `context_parallel_size` leaves, 1 when both are auto.
        layout: cut of the sequence: "zigzag" or "striped" (even causal work) or "contiguous".
        transport: transport of keys and values, as in `rf.ContextParallel`.
        process_group_backend: torch.distributed backend; None: nccl on CUDA, gloo on CPU.
        timeout: limit of a collective, and of the wait for other ranks' checkpoint files; a timedelta or seconds.
        replicate_size: number of copies of the weights. Neighbouring ranks form a group that holds one copy, sharded
            within the group (HSDP). If each host holds one copy, only gradients travel between hosts. 1 shards over
            all ranks.
        cuda_graphs: capture and replay attention's passes, as in `rf.ContextParallel`: all with True, those of short
            sequences with "auto".
        shard_keys: further batch entries to cut, (batch, seqlen, ...), such as a loss mask.
    """

    def __init__(
        self,
        context_parallel_size: Literal["auto"] | int = "auto",
        data_parallel_size: Literal["auto"] | int = "auto",
        layout: Literal["zigzag", "contiguous", "striped"] = "zigzag",
        transport: str = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        replicate_size: int = 1,
        cuda_graphs: bool | Literal["auto"] = "auto",
        shard_keys: Sequence[str] = (),
    ) -> None:
        self._shard_keys = _checked_keys(shard_keys)
        for name, size in ((CONTEXT, context_parallel_size), (DATA, data_parallel_size)):
            if size != "auto" and (not isinstance(size, int) or size < 1):
                raise ConfigError(
                    f"{name}_size", expected='"auto" or a positive integer', got=size, remedy="Set the number of ranks."
                )
        if not isinstance(replicate_size, int) or replicate_size < 1:
            remedy = "Set the number of copies of the weights, for instance that of hosts."
            raise ConfigError("replicate_size", expected="a positive integer", got=replicate_size, remedy=remedy)
        if layout not in LAYOUTS:
            remedy = "A batch is cut before any mask is known; cut it yourself where the mask is, for another layout."
            raise ConfigError("layout", expected=f"one of {LAYOUTS}", got=repr(layout), remedy=remedy)
        super().__init__(
            data_parallel_size=data_parallel_size,
            process_group_backend=process_group_backend,
            timeout=timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout),
        )
        self.asked_sizes = data_parallel_size, context_parallel_size  # numbers or "auto", in the order of the mesh
        self.layout: Literal["zigzag", "contiguous", "striped"] = layout
        self._transport = transport
        self._cuda_graphs: bool | Literal["auto"] = cuda_graphs
        self._context: rf.ContextParallel | None = None
        self.replicate_size = replicate_size
        self._shard_mesh: DeviceMesh | None = None
        self._world_group: dist.ProcessGroup | None = None
        self._window_tokens: list[Tensor] = []  # valid tokens over all ranks, for each micro-batch of the window so far
        self._warned_of_repeats, self._step_checks = False, user_modules.StepChecks()
        self._shutdown: Shutdown | None = None
        self._compilations: Compilations | None = None  # until the first step has reported them

    @property
    def hops(self) -> str:
        """`hops` with which `ringflash warmup` compiles kernels for this run: `cuda_graphs=True` groups no hops."""
        return "ring" if self._cuda_graphs is True else "auto"

    @property
    def context(self) -> rf.ContextParallel:
        """Context-parallel group and layout; available after the strategy has set up its environment.

        The context remembers the agreement on the current batch's lengths. Between GPUs, later attention calls then
        need not wait for other ranks. User code must call `context.forget_lengths()` before attention over sequences of
        another length.
        """
        if self._context is None:
            raise _not_set_up("context")
        return self._context

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh over which weights are sharded: 1-D over all ranks, or (replicate, shard) with `replicate_size`."""
        if self._shard_mesh is None:
            raise _not_set_up("shard_mesh")
        return self._shard_mesh

    @property
    def world_group(self) -> dist.ProcessGroup:
        """Process group of all ranks, data x context parallel."""
        if self._world_group is None:
            raise _not_set_up("world_group")
        return self._world_group

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of the weights."""
        return self.world_size // self.replicate_size

    def setup_environment(self) -> None:
        """Joins the process group and arranges the ranks as (data_parallel, context_parallel)."""
        assert self.lightning_module is not None
        if (trainer := trainer_of(self.lightning_module)) is not None:
            user_modules.check_callbacks(trainer)
        # Skips ModelParallelStrategy.setup_environment, which asserts data x tensor == world.
        super(ModelParallelStrategy, self).setup_environment()
        if not dist.is_initialized():
            # This strategy makes the group, and so destroys it: at exit, not at teardown, because `validate` may follow
            # `fit` on the same sharded weights. The user's program destroys a group that it made itself.
            self._shutdown = Shutdown()
        connect(self)
        if self.root_device.type == "cuda":
            from ringflash.compile_once import compile_once_a_host  # here, so that CPU users never import Triton

            self._compilations = compile_once_a_host()
        shape = resolve_sizes(*self.asked_sizes, self.world_size)
        if self.world_size % self.replicate_size:
            raise ConfigError(
                "replicate_size",
                expected=f"a divisor of {self.world_size} ranks",
                got=self.replicate_size,
                remedy="Every copy of the weights is sharded over equally many ranks.",
            )
        if self._context is None:  # a later stage of the same strategy keeps its groups
            device_type = self.root_device.type
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=(DATA, CONTEXT))
            world = init_device_mesh(device_type, (self.world_size,), mesh_dim_names=("shard",))
            self._world_group, self._shard_mesh = world.get_group(), world
            if self.replicate_size > 1:
                sizes = (self.replicate_size, self.shard_size)
                self._shard_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))
            self._context = rf.ContextParallel(
                mesh[CONTEXT],
                layout=self.layout,
                transport=self._transport,
                fixed_lengths=True,  # ranks compare lengths once a batch: `batch_to_device` calls `forget_lengths`
                cuda_graphs=self._cuda_graphs,
            )
            self._context.gradients = "sum"  # `setup` makes FSDP sum gradients; `token_mean` then omits its factor
        else:
            mesh = self.device_mesh
        set_device_mesh(self, self.lightning_module, mesh)

    def setup(self, trainer: pl.Trainer) -> None:
        """Makes FSDP sum gradients, materialises the weights, makes the optimizer, and seeds each rank differently."""
        self._window_tokens = []
        assert self.model is not None
        assert self.lightning_module is not None
        # `token_mean` then refuses its argument `num_valid_tokens`: `backward` already weights each micro-batch.
        self.context.weighs_windows = self.lightning_module.automatic_optimization
        callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self.world_size > 1 and not any(isinstance(callback, user_modules.MetricGuard) for callback in callbacks):
            callbacks.insert(0, user_modules.MetricGuard())
        if self.world_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            exchange_sigterm(trainer, lambda told: any(row[0] for row in self.exchange(Purpose.NEXT_BATCH, told)))
        # A forward without a backward may have left weights gathered. `sum_gradients` would refuse these plain tensors,
        # and the optimizer would keep them.
        reshard(self.model)
        if self.is_global_zero:
            user_modules.warn_of_parted_weights(self.model)  # FSDP2 may make tied weights separate parameters
            if self.world_size > 1:
                user_modules.warn_of_batch_norms(self.model)
        rounds = getattr(self.lightning_module, "rounds_weights", None)
        if rounds is None or not rounds(self.world_size):
            sum_gradients(self.model)
        super().setup(trainer)
        # Lightning seeds all ranks alike, and the weights were initialised from that seed. But dropout must differ
        # between the shards of a sequence. The order of the data must not differ there; samplers take it from their own
        # seed. The constant spreads neighbouring ranks' seeds.
        torch.manual_seed((torch.initial_seed() + 0x9E3779B97F4A7C15 * self.global_rank) % 2**63)

    def teardown(self) -> None:
        """Reshards the weights. The process group stays for the next stage and is destroyed when the process exits."""
        if self.model is not None:
            reshard(self.model)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Lets this rank destroy the process group at exit without waiting for its peers, which may never finish."""
        if self._shutdown is not None and not isinstance(exception, Preempted):  # all ranks raise Preempted together
            self._shutdown.fail()
        super().on_exception(exception)

    def _is_raised_by_all(self, error: BaseException) -> bool:
        # All ranks raise Preempted after the same step, so a checkpoint can still be saved. `save_checkpoint` asks.
        return isinstance(error, Preempted)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Returns this rank's shard of a batch of whole sequences.

        {"input_ids", "labels": (batch, seqlen) int64, ...} becomes {"input_ids", "labels": (batch, seqlen_local),
        "position_ids": (seqlen_local,) int64, "num_valid_tokens": scalar int64, ...}. `num_valid_tokens` counts the
        labels other than -100 in this micro-batch over all ranks, each sequence once. An attention_mask and the entries
        in `shard_keys` are cut too; other entries are only moved. With a batch on the CPU the host does not wait for
        the GPU. The batch may hold "cu_seqlens", (batch, ndocuments + 1) int64, the bounds of the documents packed into
        the whole sequences. Positions then restart at each document and are (batch, seqlen_local). "cu_seqlens" stays
        whole, and on the CPU, where masks are made.

        Raises:
            ArgumentError: the batch is not of this form, is shorter than the context-parallel group, has unshifted
                labels, or has entries of the names that the strategy adds. Or it holds an attention_mask with zeros, or
                an entry with a value for each token that `shard_keys` does not name. Or ids lie outside the module's
                vocab_size, if it has one.
            PeerFailed: another rank's batch is not of this form.
            RankMismatch: ranks of one context-parallel group hold different sequences, or ranks have unequal numbers
                of batches.
        """
        device = device or self.root_device
        vocab_size = getattr(self.lightning_module, "vocab_size", None)
        # `place` says which batch of the run this is. Ranks at different places raise RankMismatch.
        place, ranks = user_modules.place_of_batch(self.lightning_module, dataloader_idx), self.context.world_size
        agreed = agree_on_batch(batch, self.cpu_group, ranks, vocab_size, self._shard_keys, place=place)
        if agreed.is_repeated and not self._warned_of_repeats:
            self._warned_of_repeats = True
            if self.is_global_zero:
                text = "All data-parallel groups hold the same batch, so that they gain nothing. %s"
                logger.warning(text, SAMPLER)
        cu_seqlens: Tensor | None = batch.get("cu_seqlens")
        rest = {name: pinned(value, device) for name, value in batch.items() if name != "cu_seqlens"}
        moved = dict(cast("Mapping[str, Any]", super().batch_to_device(rest, device, dataloader_idx)))
        seqlen = moved["input_ids"].shape[1]
        for name in cut_keys(batch, self._shard_keys):
            moved[name] = self.context.shard(moved[name], dim=1)
        self.context.labels_shape = tuple(moved["labels"].shape)  # `token_mean` refuses labels that are cut again
        self.context.forget_lengths()  # this batch may have another length than the last one
        if cu_seqlens is None:
            moved["position_ids"] = self.context.positions(seqlen, device=device)
        else:
            moved["cu_seqlens"] = cu_seqlens.cpu()
            positions = document_positions(moved["cu_seqlens"], self.context.positions(seqlen))
            moved["position_ids"] = pinned(positions, device).to(device, non_blocking=True)
        # `torch.tensor` would copy the number from the host, and wait for the GPU before it does.
        moved["num_valid_tokens"] = torch.full((), agreed.num_valid, dtype=torch.int64, device=device)
        return moved

    def on_train_start(self) -> None:
        """Restores the accumulation factor and the length of the epoch in which a run resumes."""
        assert self.lightning_module is not None
        resume_epoch(self.lightning_module.trainer)
        super().on_train_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step and records the number of valid tokens of the micro-batch.

        Raises:
            ConfigError: as `StepChecks.run`.
        """
        batch = args[0]
        self.restore_random()  # acts only before the first step after a checkpoint was loaded
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        follow_epoch(trainer)  # sets the length of this epoch, and when it is validated
        # Lightning zeroes gradients at the same indices. The loop has the index, and `training_step` may not take it.
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._window_tokens = []
        self._window_tokens.append(batch["num_valid_tokens"])
        step = super().training_step
        return self._step_checks.run(self, batch, lambda watched: step(watched, *args[1:], **kwargs))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over ranks, for `self.log(..., sync_dist=True)`.

        Raises:
            ConfigError: a mean of values that differ between ranks; it would weight ranks, not tokens.
            RankMismatch: in an evaluation, if the other ranks have more batches.
        """
        if self.world_size > 1 and user_modules.is_evaluating(self.lightning_module):
            self.exchange(Purpose.METRIC)  # Lightning reduces at the end of a loader, before it calls any hook
        # `self.log` takes single numbers only; larger tensors are reductions of the user's own.
        is_mean = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        if is_mean and isinstance(tensor, Tensor) and tensor.numel() == 1 and self.world_size > 1:
            local = tensor.detach().reshape(1).to(self.root_device, torch.float64)
            values = all_ranks(local, group or self.world_group).flatten().tolist()
            if not user_modules.are_equal(values):
                got = f"{values}, whose mean is neither the sum of the ranks' shares nor weighted by their tokens"
                raise ConfigError(
                    "sync_dist", expected="a value that is equal on all ranks", got=got, remedy=user_modules.REMEDY
                )
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a micro-batch's backward, weighted by its valid tokens / those of the window's first micro-batch."""
        assert self.lightning_module is not None
        micro_batches = self.lightning_module.trainer.accumulate_grad_batches
        if micro_batches > 1 and self.lightning_module.automatic_optimization:
            # Undoes the division by the number of micro-batches in Lightning: the mean is over tokens.
            factor = micro_batches * self._window_tokens[-1].double() / self._first_count()
            closure_loss = closure_loss * factor.to(closure_loss.dtype)  # bfloat16 would round the counts themselves
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps on the window's token mean.

        Gradients are final before `on_before_optimizer_step` and clipping. `on_after_backward` sees them unscaled.
        With automatic optimization Lightning calls this at the last micro-batch of a window. `closure` then runs that
        micro-batch's training step and backward.
        """
        assert self.lightning_module is not None

        def closure_then_rescale() -> Any:
            result = closure()
            self._rescale_gradients(optimizer)
            return result

        micro_batches = self.lightning_module.trainer.accumulate_grad_batches
        rescales = micro_batches > 1 and self.lightning_module.automatic_optimization
        result = super().optimizer_step(optimizer, closure_then_rescale if rescales else closure, model, **kwargs)
        self._report_compilations()
        return result

    def _report_compilations(self) -> None:
        """Logs what this rank compiled until the end of the first step; later calls log nothing."""
        if self._compilations is not None:
            self._compilations.report(self.global_rank)
            self._compilations = None

    def _first_count(self) -> Tensor:
        # Valid tokens of the window's first micro-batch; all gradients of the window are relative to this number.
        return self._window_tokens[0].clamp(min=1)

    def _rescale_gradients(self, optimizer: Optimizer) -> None:
        # A sum of the recorded counts, because an epoch's last window may hold fewer than `accumulate_grad_batches`.
        total = torch.stack(self._window_tokens).sum().clamp(min=1)
        share = self._first_count().double() / total
        multiply_gradients(parameters_of(optimizer), share)


def _not_set_up(name: str) -> StateError:
    """Returns the error of a property that is read too early."""
    expected, got = "a strategy that has set up its environment", "one that has not yet"
    remedy = "Read it only after that: in `setup` or a later hook."
    return StateError(f"strategy.{name}", expected=expected, got=got, remedy=remedy)


def resolve_sizes(
    data_parallel_size: Literal["auto"] | int, context_parallel_size: Literal["auto"] | int, world_size: int
) -> tuple[int, int]:
    """Returns (data, context) parallel sizes with the product `world_size`; context parallelism takes free ranks.

    Raises:
        ConfigError: no such sizes exist.
    """
    if context_parallel_size == "auto":
        data = 1 if data_parallel_size == "auto" else data_parallel_size
        context = world_size // data
    else:
        context = context_parallel_size
        data = world_size // context if data_parallel_size == "auto" else data_parallel_size
    if data * context != world_size:
        raise ConfigError(
            "context_parallel_size",
            expected=f"data_parallel_size x context_parallel_size == {world_size} ranks",
            got=f"{data_parallel_size} x {context_parallel_size}",
            remedy='Leave one of them "auto", or change the number of devices.',
        )
    return data, context


def _checked_keys(shard_keys: Sequence[str]) -> tuple[str, ...]:
    taken, names = {*ADDED, *CUT, *WHOLE}, tuple(shard_keys)
    if isinstance(shard_keys, str) or any(not isinstance(name, str) or name in taken for name in names):
        raise ConfigError(
            "shard_keys",
            expected=f"a sequence of names of batch entries other than {sorted(taken)}",
            got=repr(shard_keys),
            remedy='Name the further entries with a value for each token, for instance ("loss_mask",).',
        )
    return names


def sum_gradients(model: torch.nn.Module) -> None:
    """Makes FSDP sum gradients over the ranks; its default divides them by the number of ranks.

    `setup` calls this, and so can training loops without this strategy.

    Raises:
        ConfigError: a parameter is not sharded; it would get no gradient from other ranks, and norm clipping would be
            wrong.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "model",
            expected="a module sharded with fully_shard",
            got="DistributedDataParallel, which averages gradients",
            remedy="Leave sum_gradients out: the loss of context.token_mean is right under DDP as it is.",
        )
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ConfigError(
            "model",
            expected="every parameter sharded with fully_shard",
            got=f"{len(plain)} that are not, the first {plain[0]}",
            remedy="Call fully_shard(module, mesh=mesh) on the module that holds it; under RingAttentionStrategy in "
            "configure_model, with mesh=self.trainer.strategy.shard_mesh.",
        )
    if all(cast("DTensor", parameter).device_mesh.size() == 1 for parameter in model.parameters()):
        return  # one rank: torch divides nothing without a factor, but passes over all gradients with a factor of 1
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the factor alone selects PREMUL_SUM, which gloo lacks


def reshard(model: torch.nn.Module) -> None:
    """Frees gathered weights.

    A forward without a backward leaves the root, the head, and blocks with `reshard_after_forward=False` gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


StrategyRegistry.register(
    "ring_attention",
    RingAttentionStrategy,
    description="Ring attention over the sequence, FSDP2 over all ranks or within replicas",
    override=True,
)
