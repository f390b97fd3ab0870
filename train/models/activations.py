"""Activations that a block keeps for its backward, in GPU or host memory: all, or its input and attention's results."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ringflash.errors import ConfigError, StateError
from ringflash.torch_private import TorchDispatchMode

ActivationCheckpointing = Literal["none", "block"]
BlockActivations = Literal["none", "block", "host"]  # "host" keeps what "block" keeps, in host memory
ALL_BLOCKS = sys.maxsize
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# The (out, lse) of these operators are kept, because recomputing them would repeat the whole ring and its messages.
KEPT = [torch.ops.ringflash.attention.default]
MIN_OFFLOADED_BYTES = 2**20  # smaller tensors cost more in calls than they free.
# A copy in host memory consists of pieces, since torch rounds each allocation of pinned memory up to a power of two.
PIECE_BYTES = 2**28
# At most 9 tensors are in flight at a time, or 2 GiB (40 ms of a GPU's link) if that is less. The forward always has
# one in flight, however large, so that its copy overlaps with the computation.
AHEAD_BYTES, AT_MOST = 2**31, 9


class Activations(NamedTuple):
    """Activations that the blocks of a model keep for the backward.

    Args:
        checkpointing: "none" keeps everything. "block" keeps a block's input and attention's results, and recomputes
            the rest.
        kept_blocks: number of the last blocks that keep everything, with "block".
        offloaded_blocks: number of the first blocks that keep their tensors in host memory, with "block". More than
            there are mean all that recompute.
        head_groups: number of groups of heads in which attention of offloaded blocks runs, one after another. It
            divides the number of KV heads.
    """

    checkpointing: ActivationCheckpointing
    kept_blocks: int = 0
    offloaded_blocks: int = 0
    head_groups: int = 1

    def of_blocks(self, blocks: int) -> list[BlockActivations]:
        """Returns the choice of each of `blocks` blocks.

        The backward begins with the last blocks. Their tensors are free by the time an earlier block is recomputed, and
        the recomputed tensors take their place. It ends with the first blocks, so their copies to and from the host
        have the most time.
        """
        recomputed = blocks - self.kept_blocks
        host: list[BlockActivations] = ["host"] * min(self.offloaded_blocks, recomputed)
        rest: list[BlockActivations] = [self.checkpointing] * (recomputed - len(host))
        whole: list[BlockActivations] = ["none"] * self.kept_blocks
        return host + rest + whole


def pinned_bytes(nbytes: int) -> int:
    """Returns the bytes of host memory that the copy of a tensor of `nbytes` takes."""
    pieces, rest = divmod(nbytes, PIECE_BYTES)
    return pieces * PIECE_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


def check_offload(checkpointing: ActivationCheckpointing | None, offload: bool, head_groups: int = 1) -> None:
    """Raises ConfigError for `offload` without "block", and for groups of heads without `offload`."""
    if offload and checkpointing != "block":
        raise ConfigError(
            "activation_offload",
            expected='activation_checkpointing="block" with it',
            got=checkpointing,
            remedy="Offloading all activations would take longer than to compute them again.",
        )
    if head_groups != 1 and not offload:
        remedy = "Set offloaded_blocks too: in other blocks all heads attend at once."
        raise ConfigError("head_groups", expected="1 without offloaded blocks", got=head_groups, remedy=remedy)


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
        host: the copy, in pieces one after another.
        shape: shape of the tensor.
        device: device of the tensor, to which it returns.
        copied: event after which `host` is written; None on a CPU, where it is written at once.
        here: the tensor on its device, before it is released and after it returns.
        arrived: event after which `here` is written, if the tensor returns.
        uses: number of requests for the tensor or a part of it that are still to come.
    """

    host: Sequence[Tensor]
    shape: torch.Size
    device: torch.device
    copied: torch.cuda.Event | None
    here: Tensor | None
    arrived: torch.cuda.Event | None = None
    uses: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.nbytes for piece in self.host)


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a packed tensor, which lies at the beginning of its storage: `shape` from the element `begin` on."""

    whole: Packed
    begin: int
    shape: torch.Size


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
        # Contiguous tensors at the beginning of a storage, by its address. Each context of `hooks` empties this,
        # because a later tensor may have the address of one that is gone.
        self._latest: dict[int, weakref.ref[Packed]] = {}

    def pack(self, x: Tensor) -> Tensor | Packed:
        """Starts the copy; `x` must not be written to afterwards. Small tensors stay on their device."""
        if x.nbytes < MIN_OFFLOADED_BYTES:
            return x.detach()  # `x` itself may hold a reference to the graph that keeps it
        for unwanted in self._coming:  # left by a backward that stopped early
            _let_go(unwanted)
        self._coming.clear()
        packed = self._taken(x.detach())
        self._away = [*(ref for ref in self._away if ref() is not None), weakref.ref(packed)]
        if _begins_storage(x):
            self._latest[_place(x)] = weakref.ref(packed)
        self._leaving.append(packed)
        while len(self._leaving) > 1 and _are_many(len(self._leaving), sum(each.nbytes for each in self._leaving)):
            _let_go(self._leaving.popleft())
        return packed

    def unpack(self, saved: Tensor | Packed | Part) -> Tensor:
        """Returns the tensor on its device. The device waits for the copy; the host does not."""
        if isinstance(saved, Tensor):
            return saved
        packed = saved.whole if isinstance(saved, Part) else saved
        x = self._brought(packed)
        if isinstance(saved, Part):
            x = x.flatten()[saved.begin : saved.begin + saved.shape.numel()].view(saved.shape)
        for underway in (self._leaving, self._coming):
            if packed in underway:
                underway.remove(packed)
        packed.uses -= 1
        if packed.uses > 0:
            _await(packed)
            self._coming.append(packed)
        else:
            _let_go(packed)
        away = [each for each in (ref() for ref in self._away) if each is not None and each is not packed]
        self._away = [weakref.ref(each) for each in away]
        ahead = 0
        for number, each in enumerate(reversed(away), start=1):
            ahead += each.nbytes
            if _are_many(number, ahead):
                break
            self._brought(each)
        return x

    def _taken(self, x: Tensor) -> Packed:
        if not x.is_cuda:
            return Packed([x.flatten().clone()], x.shape, x.device, None, x)
        flat = x.flatten()
        pieces = flat.split(PIECE_BYTES // x.itemsize)
        host = [torch.empty(piece.shape, dtype=x.dtype, pin_memory=True) for piece in pieces]
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
            # Pending copies may still write when this object dies, so the compute stream waits before memory is reused.
            weakref.finalize(self, _join, self._stream).atexit = False
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            for into, piece in zip(host, pieces, strict=True):
                into.copy_(piece, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Packed(host, x.shape, x.device, copied, flat.view(x.shape))

    def _brought(self, packed: Packed) -> Tensor:
        """Returns the tensor on its device, and starts its copy unless it is there already."""
        if packed.here is not None:
            return packed.here
        flat = packed.host[0].new_empty(packed.shape.numel(), device=packed.device)
        packed.here = flat.view(packed.shape)
        self._coming.append(packed)
        if packed.copied is None:
            flat.copy_(packed.host[0])
            return packed.here
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))  # it may still use this memory
        with torch.cuda.stream(self._stream):
            for into, piece in zip(flat.split([each.numel() for each in packed.host]), packed.host, strict=True):
                into.copy_(piece, non_blocking=True)
            packed.arrived = torch.cuda.Event()
            packed.arrived.record(self._stream)
        return packed.here

    def hooks(self, staying: Iterable[Tensor], wholes: Iterable[Tensor] = ()) -> saved_tensors_hooks:
        """Returns a context that packs the tensors that autograd saves, except those that share memory with `staying`.

        Args:
            staying: the weights, which FSDP frees and gathers itself, and the tensors that all blocks share.
            wholes: tensors that exist until this context ends, and that this one or the one before packs. Parts of
                them, and the wholes again, share their copies.
        """
        stay, sizes = {*map(_place, staying)}, {_place(x): x.numel() for x in wholes}
        latest = {place: ref() for place, ref in self._latest.items() if place in sizes}
        packed = {place: x for place, x in latest.items() if x is not None and x.shape.numel() == sizes[place]}
        self._latest.clear()

        def pack(x: Tensor) -> Tensor | Packed | Part:
            place = _place(x)
            if place in stay:
                return x.detach()
            whole = packed.get(place)
            if whole is not None and whole.host[0].dtype == x.dtype and x.is_contiguous():
                whole.uses += 1
                return Part(whole, int(x.storage_offset()), x.shape)
            saved = self.pack(x)
            if isinstance(saved, Packed) and _begins_storage(x) and x.numel() == sizes.get(place):
                packed.setdefault(place, saved)
            return saved

        return saved_tensors_hooks(pack, self.unpack)


def _place(x: Tensor) -> int:
    """Returns the address of the storage of `x`."""
    return x.untyped_storage().data_ptr()


def _begins_storage(x: Tensor) -> bool:
    """Returns whether `x` is the beginning of its storage, element by element."""
    return x.is_contiguous() and not x.storage_offset()


def _are_many(tensors: int, nbytes: int) -> bool:
    """Returns whether this is more than may be in flight at a time."""
    return tensors > AT_MOST or nbytes > AHEAD_BYTES


def _join(stream: torch.cuda.Stream) -> None:
    """Makes the current stream wait for all work of `stream`."""
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def _await(packed: Packed) -> None:
    """Makes later work of the compute stream wait for the copy from the tensor or to it."""
    copied = packed.arrived or packed.copied
    if packed.here is not None and copied is not None:
        torch.cuda.current_stream(packed.device).wait_event(copied)


def _let_go(packed: Packed) -> None:
    """Drops the reference to the tensor, after `_await`."""
    _await(packed)
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
