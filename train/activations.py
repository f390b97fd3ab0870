"""What a block keeps for its backward: all, or its input and attention's results, on the GPU or in host memory."""

from __future__ import annotations

import weakref
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
AHEAD_BYTES = (
    2**30
)  # on their way back to the GPU before a backward asks for them: 20 ms of its link, one tensor or more


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
    """A tensor's copy in the host's memory, when it is there, and where it is once it is on its way back, and when."""

    host: Tensor
    device: torch.device
    copied: torch.cuda.Event | None
    back: Tensor | None = None
    arrived: torch.cuda.Event | None = None


class HostMemory:
    """Takes tensors to pinned memory of the host and back.

    Copies run beside the computation, on a stream of their own. A backward asks for tensors in the reverse order, so
    those before the one that it asks for are then on their way back already, `AHEAD_BYTES` of them.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._away: list[weakref.ref[Packed]] = []  # in the order in which they were taken

    def pack(self, x: Tensor) -> Tensor | Packed:
        """Starts the copy; `x` must not be written to any more. Small tensors stay where they are."""
        if x.nbytes < MIN_OFFLOADED_BYTES:
            return x.detach()  # not `x`, which may refer to what keeps this
        packed = self._taken(x) if x.is_cuda else Packed(x.detach().clone(), x.device, None)
        self._away.append(weakref.ref(packed))
        return packed

    def _taken(self, x: Tensor) -> Packed:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x.detach(), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        x.record_stream(self._stream)  # its memory may be used again when the copy is made, not before
        return Packed(host, x.device, copied)

    def unpack(self, packed: Tensor | Packed) -> Tensor:
        """The tensor, on its device again; waits on the device, not on the host."""
        if isinstance(packed, Tensor):
            return packed
        x = self._bring(packed)
        if packed.arrived is not None:
            torch.cuda.current_stream(packed.device).wait_event(packed.arrived)
        packed.back = packed.arrived = None
        away = [each for each in (ref() for ref in self._away) if each is not None and each is not packed]
        self._away = [weakref.ref(each) for each in away]
        coming = 0
        while away and coming < AHEAD_BYTES:
            coming += self._bring(away.pop()).nbytes
        return x

    def _bring(self, packed: Packed) -> Tensor:
        """The tensor on its device, on its way there unless it is already."""
        if packed.back is None:
            packed.back = torch.empty_like(packed.host, device=packed.device)
            if packed.copied is None:
                packed.back.copy_(packed.host)
                return packed.back
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream(packed.device))  # which may still use this memory
            self._stream.wait_event(packed.copied)
            with torch.cuda.stream(self._stream):
                packed.back.copy_(packed.host, non_blocking=True)
                packed.arrived = torch.cuda.Event()
                packed.arrived.record(self._stream)
            packed.back.record_stream(self._stream)
        return packed.back

    def hooks(self, staying: Iterable[Tensor]) -> saved_tensors_hooks:
        """A context in which what autograd saves is packed, except what shares memory with `staying`.

        Those are weights, which FSDP frees and gathers itself, and what all blocks share.
        """
        stay = {x.untyped_storage().data_ptr() for x in staying}

        def pack(x: Tensor) -> Tensor | Packed:
            return x.detach() if x.untyped_storage().data_ptr() in stay else self.pack(x)

        return saved_tensors_hooks(pack, self.unpack)


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
            return tuple(self.memory.unpack(x) for x in self.kept.pop(0))
        return func(*args, **(kwargs or {}))
