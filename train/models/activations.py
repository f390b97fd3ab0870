"""What a block keeps for its backward: all, or its input and attention's results, on the GPU or in host memory."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ringflash.errors import ConfigError

ActivationCheckpointing = Literal["none", "block"]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# (out, lse) of these are kept: computed again they would cost the whole ring, and its messages.
KEPT = [torch.ops.ringflash.attention.default]
MIN_OFFLOADED_BYTES = 2**20  # what is smaller costs more in calls than it frees
# On their way at a time are 9 tensors, or 1 GiB (20 ms of a GPU's link) where that is less; but those of a block, which
# are up to 4, however large.
AHEAD_BYTES = 2**30
AT_LEAST, AT_MOST = 4, 9


def check_offload(checkpointing: ActivationCheckpointing, offload: bool) -> None:
    """Raises ConfigError for `offload` without "block"."""
    if offload and checkpointing == "none":
        raise ConfigError(
            "activation_offload",
            expected='activation_checkpointing="block" with it',
            got=checkpointing,
            remedy="Offloading all activations would take longer than to compute them again.",
        )


def recompute(function: Callable[..., Tensor], *args: Any, offload: HostMemory | None = None, **kwargs: Any) -> Tensor:
    """`function(*args, **kwargs)`, which keeps its tensors and results of `KEPT`; its backward runs the rest again.

    With `offload` what is kept lies in host memory meanwhile; tensors of `args` are taken there by `HostMemory.hooks`.
    """
    context_fn: Contexts = partial(create_selective_checkpoint_contexts, KEPT)
    if offload is not None:
        context_fn = partial(_offloading_contexts, offload)
    out = checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
    assert isinstance(out, Tensor)
    return out


@dataclass(eq=False)
class Packed:
    """A tensor's copy in the host's memory.

    Args:
        host: the copy.
        device: where the tensor was, and is wanted again.
        copied: when `host` is written; None on a CPU, at once.
        here: the tensor on its device, before it is let go and when it comes back.
        arrived: when `here` is written, if it comes back.
    """

    host: Tensor
    device: torch.device
    copied: torch.cuda.Event | None
    here: Tensor | None
    arrived: torch.cuda.Event | None = None


class HostMemory:
    """Takes tensors to pinned memory of the host and back.

    Copies run beside the computation, on a stream of their own, some tensors ahead of it. A forward lets a tensor go
    when as many have been taken since, and then waits for its copy. A backward asks for tensors in the reverse order,
    so those before the one that it asks for are then on their way back already. Waiting on the stream that computes,
    instead of telling the allocator of the other one, is what frees memory in the order of the computation: the host
    runs ahead of it, and would find none of the copies made.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._away: list[weakref.ref[Packed]] = []  # in the order in which they were taken
        self._leaving: deque[Packed] = deque()  # of these, the last, whose tensors are still here
        self._coming: list[Packed] = []  # and those on their way back

    def pack(self, x: Tensor) -> Tensor | Packed:
        """Starts the copy; `x` must not be written to any more. Small tensors stay where they are."""
        if x.nbytes < MIN_OFFLOADED_BYTES:
            return x.detach()  # not `x`, which may refer to what keeps this
        for unwanted in self._coming:  # of a backward that did not go on
            _let_go(unwanted)
        self._coming.clear()
        packed = self._taken(x.detach())
        self._away = [*(ref for ref in self._away if ref() is not None), weakref.ref(packed)]
        self._leaving.append(packed)
        while _are_many(len(self._leaving), sum(each.host.nbytes for each in self._leaving)):
            _let_go(self._leaving.popleft())
        return packed

    def unpack(self, packed: Tensor | Packed) -> Tensor:
        """The tensor, on its device again; waits on the device, not on the host."""
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
            # Memory that is still written to when this goes must not be given to who computes.
            weakref.finalize(self, _join, self._stream).atexit = False
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Packed(host, x.device, copied, x)

    def _brought(self, packed: Packed) -> Tensor:
        """The tensor on its device, on its way there unless it is there already."""
        if packed.here is not None:
            return packed.here
        packed.here = torch.empty_like(packed.host, device=packed.device)
        self._coming.append(packed)
        if packed.copied is None:
            return packed.here.copy_(packed.host)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))  # which may still use this memory
        with torch.cuda.stream(self._stream):
            packed.here.copy_(packed.host, non_blocking=True)
            packed.arrived = torch.cuda.Event()
            packed.arrived.record(self._stream)
        return packed.here

    def hooks(self, staying: Iterable[Tensor]) -> saved_tensors_hooks:
        """A context in which what autograd saves is packed, except what shares memory with `staying`.

        Those are weights, which FSDP frees and gathers itself, and what all blocks share.
        """
        stay = {x.untyped_storage().data_ptr() for x in staying}

        def pack(x: Tensor) -> Tensor | Packed:
            return x.detach() if x.untyped_storage().data_ptr() in stay else self.pack(x)

        return saved_tensors_hooks(pack, self.unpack)


def _are_many(tensors: int, nbytes: int) -> bool:
    """Whether they are more than may be on their way at a time."""
    return tensors > AT_LEAST and (tensors > AT_MOST or nbytes > AHEAD_BYTES)


def _join(stream: torch.cuda.Stream) -> None:
    """What computes from now on waits for what `stream` has been given."""
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def _let_go(packed: Packed) -> None:
    """Leaves the tensor to who else has it; what computes after that waits for the copy from it or to it."""
    copied = packed.arrived or packed.copied
    if packed.here is not None and copied is not None:
        torch.cuda.current_stream(packed.device).wait_event(copied)
    packed.here = packed.arrived = None


def _offloading_contexts(memory: HostMemory) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """As `create_selective_checkpoint_contexts(KEPT)`, whose own storage no saved-tensor hook sees."""
    kept: list[tuple[Tensor | Packed, ...]] = []
    return _Keep(kept, memory), _Replay(kept, memory)


class _Keep(TorchDispatchMode):
    """In the forward: packs results of `KEPT`."""

    def __init__(self, kept: list[tuple[Tensor | Packed, ...]], memory: HostMemory) -> None:
        super().__init__()
        self.kept, self.memory = kept, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.kept.append(tuple(self.memory.pack(x.detach()) for x in result))
        return result


class _Replay(TorchDispatchMode):
    """In the backward: gives them back in their order, each once."""

    def __init__(self, kept: list[tuple[Tensor | Packed, ...]], memory: HostMemory) -> None:
        super().__init__()
        self.kept, self.memory = kept, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            if not self.kept:
                raise RuntimeError("What a checkpointed block kept is used up by its backward: run its forward again.")
            return tuple(self.memory.unpack(x) for x in self.kept.pop(0))
        return func(*args, **(kwargs or {}))
