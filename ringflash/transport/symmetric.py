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
from ringflash.coordination.cuda_driver import Driver, FlagBatch, SecondContext, await_flag, write_flag
from ringflash.coordination.session import ControlPlane
from ringflash.coordination.watch import Watch
from ringflash.errors import ArgumentError
from ringflash.torch_private import allocate_shared, current_stream
from ringflash.transport.base import Message, Slot
from ringflash.transport.rendezvous import Rendezvous

if TYPE_CHECKING:
    from ringflash.torch_private import SymmetricMemory

log = logging.getLogger(__name__)

_CHANNELS = 8  # more than a ring uses
_READY, _FREE = range(2)
_PAGE = 2**21  # bytes; memory is mapped in units of this size
_GROWTH = 1.25
_SLOTS = 64  # cached slots of a region
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
            self._handle, self.addresses = _together(control, partial(self._exchange, rendezvous, control.world_size))
        self._start = self.addresses[control.rank] = self.own.data_ptr()
        self._slots: dict[tuple[int, torch.dtype], Slot] = {}

    def _exchange(self, rendezvous: Rendezvous, world_size: int) -> tuple[SymmetricMemory, list[int]]:
        """Returns the handle that keeps the peers' memory mapped, and where every rank's bytes begin."""
        with _without_multicast():
            handle = rendezvous.share(self.own)
        everyone = [handle.get_buffer(rank, (self.nbytes,), torch.uint8) for rank in range(world_size)]
        return handle, [x.data_ptr() for x in everyone]

    def offset(self, address: int) -> int | None:
        """Returns the offset of an address in this rank's bytes, or None if it is outside."""
        offset = address - self._start
        return offset if 0 <= offset < self.nbytes else None

    def slot(self, numel: int, dtype: torch.dtype) -> Slot:
        """Returns the first elements of this rank's bytes. Slots are cached, because most calls use them again."""
        found = self._slots.get((numel, dtype))
        if found is None:
            if len(self._slots) == _SLOTS:
                self._slots.clear()
            with torch.inference_mode(False):  # else only inference mode could write to it
                found = self._slots[numel, dtype] = Slot(self.own[: numel * dtype.itemsize].view(dtype), {})
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
        self._flag_batches: dict[tuple[tuple[int, int, bool], ...], Sequence[FlagBatch]] = {}
        self._current = self._last = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            self._words = _Region(self._place(_FREE + 1, 0, 0), control, self._rendezvous, device)
            self._streams = _together(control, self._begin)  # a collective: no rank sets a flag before all are 0
        control.faults.on_release(self._release_waits)

    def _begin(self) -> list[torch.cuda.Stream]:
        """Sets all flags of this rank to 0, and returns a stream for each channel."""
        self._words.own.zero_()
        torch.cuda.synchronize(self._device)
        return [torch.cuda.Stream(self._device, priority=-1) for _ in range(_CHANNELS)]

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        """Returns the slot's memory, kept from call to call. Larger memory replaces it if needed, in a collective.

        Raises:
            ArgumentError: a CUDA graph is being captured, and the memory is too small.
        """
        current, capturing = self._current_stream(), torch.cuda.is_current_stream_capturing()
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
        elif self._last is not current:
            current.wait_stream(self._last)  # the previous pass may still use these bytes
            self._last = current
        return region.slot(numel, dtype)

    def start(self, messages: Sequence[Message]) -> list[torch.cuda.Event]:
        """Queues all messages, of one hop; each channel has its own stream."""
        self._faults.check()
        if not messages:
            return []
        current = self._current_stream()
        by_channel: dict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_channel[message.channel].append(message)
        events = []
        for channel, batch in by_channel.items():
            stream = self._streams[channel]
            stream.wait_stream(current)
            self._queue(stream.cuda_stream, batch)
            done = torch.cuda.Event()
            done.record(stream)
            self._watch.add(done.query, batch[0].hop, [message.peer for message in batch])
            events.append(done)
        return events

    def finish(self, handle: list[torch.cuda.Event]) -> None:
        """Makes the current stream wait for the messages."""
        if not handle:
            return
        current = self._current_stream()
        for done in handle:
            current.wait_event(done)

    def _current_stream(self) -> torch.cuda.Stream:
        """Returns the current stream; a new object takes ten times as long as the comparison with the last one."""
        if self._current.cuda_stream != current_stream(self._device.index):
            self._current = torch.cuda.current_stream(self._device)
        return self._current

    def _queue(self, stream: int, messages: Sequence[Message]) -> None:
        """Queues messages of one channel on the stream with this handle: copies, and batches of flags around them."""
        route = tuple([(message.channel, message.peer, message.sends) for message in messages])
        flags = self._flag_batches.get(route)
        if flags is None:
            flags = self._flag_batches[route] = self._flags_of(messages)
        self._driver.queue(stream, flags[0])
        received = 0
        for message in messages:
            if not message.sends:
                received += 1
                span = message.span
                self._driver.copy(stream, span.address, self._source(message), span.nbytes)
                self._driver.queue(stream, flags[received])

    def _flags_of(self, messages: Sequence[Message]) -> list[FlagBatch]:
        """Returns the operations on flags before the copies of `messages`, between them and after them."""
        sends, receives = [m for m in messages if m.sends], [m for m in messages if not m.sends]
        batches = [[self._set(_READY, message) for message in sends]]
        # A rank sets all "ready" flags before it awaits one, and likewise all "free" flags: ranks cannot deadlock.
        for message in receives:
            batches[-1] += self._await(_READY, message)
            batches.append([self._set(_FREE, message)])
        for message in sends:
            batches[-1] += self._await(_FREE, message)
        return [FlagBatch(batch) for batch in batches]

    def _source(self, message: Message) -> int:
        """Returns the address in the peer's memory from which a receiver copies."""
        assert message.mirror is not None, "a receiver names its own counterpart of what is sent"
        address = message.mirror.address
        for region in self._regions.values():
            offset = region.offset(address)
            if offset is not None:
                return region.addresses[message.peer] + offset
        raise AssertionError("what is sent is not of allocate()")

    def _set(self, what: int, message: Message) -> bytes:
        """Sets this rank's flag in the peer's memory. The flag is 0 before: the peer reset it after its last wait."""
        return write_flag(self._words.addresses[message.peer] + self._place(what, message.channel, self._rank), 1)

    def _await(self, what: int, message: Message) -> tuple[bytes, bytes]:
        """Waits for the peer's flag in this rank's memory, and then resets the flag to 0."""
        address = self._words.addresses[self._rank] + self._place(what, message.channel, message.peer)
        return await_flag(address, 1), write_flag(address, 0)

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
