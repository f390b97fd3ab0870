"""Ring messages that GPUs of one host pull from each other's memory with the copy engine.

A rank sends from symmetric memory: it sets a "ready" flag in the receiver's memory. The receiver pulls the bytes and
sets a "free" flag in the sender's memory. Streams set and await the flags, so no SM is taken, no process waits, and
there is no barrier. A flag is a 32-bit value, and it is 0 again when its message is done. So a captured graph can be
replayed: it finds the flags as they were at its capture.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.coordination import threads
from ringflash.coordination.cuda_driver import Driver, SecondContext
from ringflash.coordination.session import ControlPlane
from ringflash.coordination.watch import Watch
from ringflash.errors import ArgumentError
from ringflash.torch_private import allocate_shared
from ringflash.transport.base import Message
from ringflash.transport.rendezvous import Rendezvous

if TYPE_CHECKING:
    from ringflash.torch_private import SymmetricMemory

log = logging.getLogger(__name__)

_CHANNELS = 8  # more than a ring uses
_READY, _FREE = range(2)
_PAGE = 2**21  # bytes; memory is mapped in units of this size
_GROWTH = 1.25
_PARTS = 64  # cached views of a region
_FAREWELL = 0.5  # seconds for which the end of the program keeps releasing waits of its GPU
_BLOCKED = 0.2  # seconds after which pending writes of a release are repeated from a second CUDA context

T = TypeVar("T")


def _together(control: ControlPlane, action: Callable[[], T]) -> T:
    """Runs `action` and returns its result; a collective. If it fails on any rank, all ranks raise a RuntimeError."""
    results: list[T] = []
    failure = ""
    try:
        results.append(action())
    except (RuntimeError, OSError) as error:
        failure = f"rank {control.rank}: {error}"
    failures = [text for text in control.tell(failure) if text]
    if failures:
        raise RuntimeError(failures[0])
    return results[0]


class _Region:
    """Memory of the same size on each rank, which all ranks can read and write. Making a region is a collective."""

    def __init__(self, nbytes: int, control: ControlPlane, rendezvous: Rendezvous, device: torch.device) -> None:
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        # Not from torch's pool of symmetric memory, because there the pieces of ranks may start at different offsets.
        # All ranks allocate before the exchange, because a rank without memory could not abort the exchange.
        make = partial(allocate_shared, self.nbytes, device)
        with torch.inference_mode(False):  # the memory outlives the call that makes it
            self.own = _together(control, make)
            self._handle, self.of = _together(control, partial(self._exchange, rendezvous, control.world_size))
        self._rank, self._start = control.rank, self.own.data_ptr()
        self._parts: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def _exchange(self, rendezvous: Rendezvous, world_size: int) -> tuple[SymmetricMemory, list[Tensor]]:
        """Returns the handle that keeps the peers' memory mapped, and the bytes of every rank."""
        with _without_multicast():
            handle = rendezvous.share(self.own)
        return handle, [handle.get_buffer(rank, (self.nbytes,), torch.uint8) for rank in range(world_size)]

    def offset(self, address: int) -> int | None:
        """Returns the offset of an address in this rank's bytes, or None if it is outside."""
        offset = address - self._start
        return offset if 0 <= offset < self.nbytes else None

    def part(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a vector in the bytes of `rank`. Vectors are cached, because most calls use the same ones again."""
        key = rank, offset, numel, dtype
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) == _PARTS:
                self._parts.clear()
            whole = self.own if rank == self._rank else self.of[rank]
            with torch.inference_mode(False):  # else only inference mode could write to it
                found = self._parts[key] = whole[offset : offset + numel * dtype.itemsize].view(dtype)
        return found


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keeps torch from making an NVLink multicast object, as only one GPU at a time reads the memory.

    A multicast object may leave the GPUs of a shared host unusable. torch reads this setting from the environment only.
    """
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class SymmetricTransport:
    """Messages between the GPUs of one host; sent buffers must come from `allocate`.

    Args:
        control: connects the ranks.
        group: group of the same ranks, through which they find each other's memory.
        device: this rank's GPU.
        watch: ends the ring if a message does not arrive.
    """

    def __init__(self, control: ControlPlane, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
        self._control, self._rendezvous, self._device = control, Rendezvous(control, group), device
        self._faults, self._watch, self._driver = control.faults, watch, _together(control, Driver)
        self._rank, self._world_size = control.rank, control.world_size
        self._regions: dict[tuple[int, int], _Region] = {}
        self._captured: set[_Region] = set()  # kept: replayed graphs read them, even after a slot has grown
        self._last: torch.cuda.Stream | None = None
        with torch.cuda.device(device):
            self._words = _Region(self._place(_FREE + 1, 0, 0), control, self._rendezvous, device)
            self._streams = _together(control, self._begin)  # a collective: no rank sets a flag before all are 0
        control.faults.on_release(self._release_waits)

    def _begin(self) -> list[torch.cuda.Stream]:
        """Sets all flags of this rank to 0, and returns a stream for each channel."""
        self._words.own.zero_()
        torch.cuda.synchronize(self._device)
        return [torch.cuda.Stream(self._device, priority=-1) for _ in range(_CHANNELS)]

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the slot's memory, kept from call to call. Larger memory replaces it if needed, in a collective.

        Raises:
            ArgumentError: a CUDA graph is being captured, and the memory is too small.
        """
        current, capturing = torch.cuda.current_stream(self._device), torch.cuda.is_current_stream_capturing()
        nbytes = numel * dtype.itemsize
        region = self._regions.get(slot)
        if region is None or region.nbytes < nbytes:
            if capturing:
                remedy = "Run the same call once before it is captured: memory that peers see cannot grow meanwhile."
                expected = "a call that ran before, in a CUDA graph"
                raise ArgumentError("q", expected=expected, got=f"{nbytes} bytes to send", remedy=remedy)
            torch.cuda.synchronize(self._device)  # peers have then pulled all messages, as the streams await "free"
            least = 0 if region is None else int(region.nbytes * _GROWTH)
            self._regions.pop(slot, None)
            del region
            region = self._regions[slot] = _Region(max(nbytes, least), self._control, self._rendezvous, self._device)
        if capturing:
            self._captured.add(region)
        if self._last is not None and self._last != current and not capturing:
            current.wait_stream(self._last)  # the previous pass may still use these bytes
        self._last = current
        return region.part(self._rank, 0, numel, dtype)

    def start(self, messages: Sequence[Message]) -> list[torch.cuda.Event]:
        """Queues all messages; each channel has its own stream."""
        self._faults.check()
        if not messages:
            return []
        current = torch.cuda.current_stream(self._device)
        by_channel: dict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_channel[message.channel].append(message)
        events = []
        for channel, batch in by_channel.items():
            stream = self._streams[channel]
            stream.wait_stream(current)
            sends, receives = [m for m in batch if m.sends], [m for m in batch if not m.sends]
            # A rank sets all "ready" flags before it awaits one, and likewise all "free" flags: ranks cannot deadlock.
            for message in sends:
                self._set_flag(stream, _READY, message)
            for message in receives:
                self._wait_flag(stream, _READY, message)
                self._pull(stream, message)
                self._set_flag(stream, _FREE, message)
            for message in sends:
                self._wait_flag(stream, _FREE, message)
            done = torch.cuda.Event()
            done.record(stream)
            self._watch.add(done.query, batch[0].hop, [message.peer for message in batch])
            events.append(done)
        return events

    def finish(self, handle: list[torch.cuda.Event]) -> None:
        """Makes the current stream wait for the messages."""
        if not handle:
            return
        current = torch.cuda.current_stream(self._device)
        for done in handle:
            current.wait_event(done)

    def _pull(self, stream: torch.cuda.Stream, message: Message) -> None:
        target = message.buffer
        assert message.mirror is not None, "a receiver names its own counterpart of what is sent"
        address = message.mirror.data_ptr()
        for region in self._regions.values():
            offset = region.offset(address)
            if offset is not None:
                source = region.part(message.peer, offset, target.numel(), target.dtype)
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                return
        raise AssertionError("what is sent is not of allocate()")

    def _set_flag(self, stream: torch.cuda.Stream, what: int, message: Message) -> None:
        """Sets this rank's flag in the peer's memory. The flag is 0 before: the peer reset it after its last wait."""
        base = self._words.of[message.peer].data_ptr()
        self._driver.write(stream, base + self._place(what, message.channel, self._rank), 1)

    def _wait_flag(self, stream: torch.cuda.Stream, what: int, message: Message) -> None:
        """Makes `stream` wait for the peer's flag in this rank's memory, and then reset the flag to 0."""
        address = self._words.own.data_ptr() + self._place(what, message.channel, message.peer)
        self._driver.wait(stream, address, 1)
        self._driver.write(stream, address, 0)

    def _place(self, what: int, channel: int, rank: int) -> int:
        return 4 * ((what * _CHANNELS + channel) * self._world_size + rank)

    def _flags(self) -> range:
        """Returns the addresses of all flags of this rank. The rest of their page has none."""
        start = self._words.own.data_ptr()
        return range(start, start + self._place(_FREE + 1, 0, 0), 4)

    def _release_waits(self) -> None:
        """Ends all waits of this rank's GPU: a thread sets this rank's flags in place of the peers, again and again."""
        # The watch adds the replayed graphs, which run on none of these streams.
        done = [*(stream.query for stream in self._streams), *self._watch.under_way()]

        def release() -> None:
            torch.cuda.set_device(self._device)  # for this thread
            flags = self._flags()
            stream, started = torch.cuda.Stream(self._device), time.monotonic()
            with ExitStack() as stack:
                second: SecondContext | None = None
                has_second = True
                while not all(query() for query in done) and not threads.is_ending(_FAREWELL):
                    waited = time.monotonic() - started
                    if waited >= self._faults.deadline:
                        break
                    if stream.query():  # the previous writes are done: a full queue would block this thread
                        for address in flags:
                            self._driver.write(stream, address, 1)
                    elif has_second and waited >= _BLOCKED:  # a waiting stream shares this stream's queue
                        try:
                            second = second or stack.enter_context(closing(self._driver.second_context(self._device)))
                            second.write(flags, 1)
                        except RuntimeError as error:  # such as too little memory: the first way goes on
                            has_second = False
                            log.warning("waits of the GPU may last until the program ends: %s", error)
                    time.sleep(0.01)

        threads.start(release, "ringflash-release", lambda: None)
