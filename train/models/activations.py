"""Activations that a block keeps for its backward, in GPU or host memory: all, or its input and attention's results."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ringflash.errors import ConfigError, StateError
from ringflash.torch_private import TorchDispatchMode

ActivationCheckpointing = Literal["none", "block"]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# The (out, lse) of these operators are kept, because recomputing them would repeat the whole ring and its messages.
KEPT = [torch.ops.ringflash.attention.default]
MIN_OFFLOADED_BYTES = 2**20  # smaller tensors cost more in calls than they free.
# At most 9 tensors are in flight at a time, or 1 GiB (20 ms of a GPU's link) if that is less. Up to 4 tensors, as many
# as one block has, are always allowed, however large.
AHEAD_BYTES = 2**30
AT_LEAST, AT_MOST = 4, 9


def check_offload(checkpointing: ActivationCheckpointing | None, offload: bool) -> None:
    """Raises ConfigError for `offload` without "block"."""
    if offload and checkpointing != "block":
        raise ConfigError(
            "activation_offload",
            expected='activation_checkpointing="block" with it',
            got=checkpointing,
            remedy="Offloading all activations would take longer than to compute them again.",
        )


def by_block(checkpointing: ActivationCheckpointing, blocks: int, kept: int) -> list[ActivationCheckpointing]:
    """Returns the choice of each block when the last `kept` blocks keep everything.

    The backward begins with the last blocks. What they keep is free by the time an earlier block is recomputed, and the
    recomputed tensors take its place.
    """
    recomputed: list[ActivationCheckpointing] = [checkpointing] * (blocks - kept)
    whole: list[ActivationCheckpointing] = ["none"] * kept
    return recomputed + whole


def recompute(function: Callable[..., Tensor], *args: Any, offload: HostMemory | None = None, **kwargs: Any) -> Tensor:
    """Runs `function(*args, **kwargs)`, keeping its arguments and results of `KEPT`; the backward recomputes the rest.

    With `offload` the kept results lie in host memory until the backward. `HostMemory.hooks` moves the tensors of
    `args`.
    """
    context_fn: Contexts = partial(create_selective_checkpoint_contexts, KEPT)
    if offload is not None:
        context_fn = partial(_offloading_contexts, offload)
    out = checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
    assert isinstance(out, Tensor)
    return out


@dataclass(eq=False)
class Packed:
    """Copy of a tensor in host memory.

    Args:
        host: the copy.
        device: device of the tensor, to which it returns.
        copied: event after which `host` is written; None on a CPU, where it is written at once.
        here: the tensor on its device, before it is released and after it returns.
        arrived: event after which `here` is written, if the tensor returns.
    """

    host: Tensor
    device: torch.device
    copied: torch.cuda.Event | None
    here: Tensor | None
    arrived: torch.cuda.Event | None = None


class HostMemory:
    """Moves tensors to pinned host memory and back.

    A separate stream copies during the computation, some tensors ahead of it. The forward releases a tensor once enough
    later tensors have been packed, and then waits for its copy. The backward asks for tensors in reverse order, so each
    request also starts the copies of a few tensors packed before it.

    Releasing makes the compute stream wait for the copy, which frees memory in the order of the computation. The
    allocator is deliberately not given the copy stream (record_stream). The host runs ahead of the device, so the
    allocator would find no copy finished and could not reuse the memory.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._away: list[weakref.ref[Packed]] = []  # all packed tensors, in order
        self._leaving: deque[Packed] = deque()  # the last of them, with tensors still on the device
        self._coming: list[Packed] = []  # tensors on their way back to the device

    def pack(self, x: Tensor) -> Tensor | Packed:
        """Starts the copy; `x` must not be written to afterwards. Small tensors stay on their device."""
        if x.nbytes < MIN_OFFLOADED_BYTES:
            return x.detach()  # `x` itself may hold a reference to the graph that keeps it
        for unwanted in self._coming:  # left by a backward that stopped early
            _let_go(unwanted)
        self._coming.clear()
        packed = self._taken(x.detach())
        self._away = [*(ref for ref in self._away if ref() is not None), weakref.ref(packed)]
        self._leaving.append(packed)
        while _are_many(len(self._leaving), sum(each.host.nbytes for each in self._leaving)):
            _let_go(self._leaving.popleft())
        return packed

    def unpack(self, packed: Tensor | Packed) -> Tensor:
        """Returns the tensor on its device. The device waits for the copy; the host does not."""
        if isinstance(packed, Tensor):
            return packed
        x = self._brought(packed)
        _let_go(packed)
        for underway in (self._leaving, self._coming):
            if packed in underway:
                underway.remove(packed)
        away = [each for each in (ref() for ref in self._away) if each is not None and each is not packed]
        self._away = [weakref.ref(each) for each in away]
        ahead = 0
        for number, each in enumerate(reversed(away), start=1):
            ahead += each.host.nbytes
            if _are_many(number, ahead):
                break
            self._brought(each)
        return x

    def _taken(self, x: Tensor) -> Packed:
        if not x.is_cuda:
            return Packed(x.clone(), x.device, None, x)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
            # Pending copies may still write when this object dies, so the compute stream waits before memory is reused.
            weakref.finalize(self, _join, self._stream).atexit = False
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Packed(host, x.device, copied, x)

    def _brought(self, packed: Packed) -> Tensor:
        """Returns the tensor on its device, and starts its copy unless it is there already."""
        if packed.here is not None:
            return packed.here
        packed.here = torch.empty_like(packed.host, device=packed.device)
        self._coming.append(packed)
        if packed.copied is None:
            return packed.here.copy_(packed.host)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))  # it may still use this memory
        with torch.cuda.stream(self._stream):
            packed.here.copy_(packed.host, non_blocking=True)
            packed.arrived = torch.cuda.Event()
            packed.arrived.record(self._stream)
        return packed.here

    def hooks(self, staying: Iterable[Tensor]) -> saved_tensors_hooks:
        """Returns a context that packs the tensors that autograd saves, except those that share memory with `staying`.

        `staying` holds the weights, which FSDP frees and gathers itself, and the tensors that all blocks share.
        """
        stay = {x.untyped_storage().data_ptr() for x in staying}

        def pack(x: Tensor) -> Tensor | Packed:
            return x.detach() if x.untyped_storage().data_ptr() in stay else self.pack(x)

        return saved_tensors_hooks(pack, self.unpack)


def _are_many(tensors: int, nbytes: int) -> bool:
    """Returns whether this is more than may be in flight at a time."""
    return tensors > AT_LEAST and (tensors > AT_MOST or nbytes > AHEAD_BYTES)


def _join(stream: torch.cuda.Stream) -> None:
    """Makes the current stream wait for all work of `stream`."""
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def _let_go(packed: Packed) -> None:
    """Drops the reference to the tensor. Later work of the compute stream waits for the copy from it or to it."""
    copied = packed.arrived or packed.copied
    if packed.here is not None and copied is not None:
        torch.cuda.current_stream(packed.device).wait_event(copied)
    packed.here = packed.arrived = None


def _offloading_contexts(memory: HostMemory) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns offloading counterparts of `create_selective_checkpoint_contexts(KEPT)`.

    Saved-tensor hooks do not see the storage of the latter.
    """
    kept: list[tuple[Tensor | Packed, ...]] = []
    return _Keep(kept, memory), _Replay(kept, memory)


class _Keep(TorchDispatchMode):
    """Forward mode that packs the results of `KEPT`."""

    def __init__(self, kept: list[tuple[Tensor | Packed, ...]], memory: HostMemory) -> None:
        super().__init__()
        self.kept, self.memory = kept, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.kept.append(tuple(self.memory.pack(x.detach()) for x in result))
        return result


class _Replay(TorchDispatchMode):
    """Backward mode that returns the kept results in their order, each once."""

    def __init__(self, kept: list[tuple[Tensor | Packed, ...]], memory: HostMemory) -> None:
        super().__init__()
        self.kept, self.memory = kept, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            if not self.kept:
                expected, got = "the first backward of a forward", "another, after what the block kept was used up"
                remedy = "Leave out retain_graph and run its forward again."
                raise StateError("checkpointed block", expected=expected, got=got, remedy=remedy)
            return tuple(self.memory.unpack(x) for x in self.kept.pop(0))
        return func(*args, **(kwargs or {}))
