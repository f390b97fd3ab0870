"""Ring messages that GPUs of one host fetch from each other's memory with the copy engine.

A rank sends from symmetric memory: it says "ready" to the receiver, which pulls the bytes and says "free". Both are
words in the other's memory that streams write and await, so no SM is taken, no process waits, and there is no barrier.
Every word is 0 again when its message is done: a captured graph may be replayed, and finds the words as they were.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from ringflash.coordination import threads
from ringflash.coordination.cuda_driver import ContextBeside, Driver
from ringflash.coordination.session import ControlPlane
from ringflash.coordination.watch import Watch
from ringflash.errors import ArgumentError
from ringflash.transport.base import Message
from ringflash.transport.rendezvous import Rendezvous

_CHANNELS = 8  # more than a ring uses
_READY, _FREE = range(2)
_PAGE = 2**21  # bytes, what memory is mapped in
_GROWTH = 1.25
_PARTS = 64  # of a region that are kept
_FAREWELL = 0.5  # seconds that a program at its end goes on to let its GPU go
_BLOCKED = 0.2  # seconds after which a release that has not been written is written by another way

T = TypeVar("T")


def _together(control: ControlPlane, action: Callable[[], T]) -> T:
    """What `action` gives, a collective; where it fails on any rank, all ranks raise a RuntimeError that says so."""
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
    """As many bytes on each rank, which all ranks can read and write; making one is a collective."""

    def __init__(self, nbytes: int, control: ControlPlane, rendezvous: Rendezvous, device: torch.device) -> None:
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        # Not from torch's pool of such memory: there a rank's piece might start elsewhere than its peers'.
        # All ranks have memory before it is exchanged: a rank that has none could not break that off.
        make = partial(_SymmetricMemory.empty_strided_p2p, (self.nbytes,), (1,), torch.uint8, device)
        with torch.inference_mode(False):  # it outlives the call that it is made in
            self.own = _together(control, make)
            self._handle, self.of = _together(control, partial(self._exchange, rendezvous, control.world_size))
        self._rank, self._start = control.rank, self.own.data_ptr()
        self._parts: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def _exchange(self, rendezvous: Rendezvous, world_size: int) -> tuple[_SymmetricMemory, list[Tensor]]:
        """What keeps the peers' memory mapped, and every rank's bytes."""
        with _without_multicast():
            handle = rendezvous.share(self.own)
        return handle, [handle.get_buffer(rank, (self.nbytes,), torch.uint8) for rank in range(world_size)]

    def offset(self, address: int) -> int | None:
        """Where an address lies in this rank's bytes; None if it does not."""
        offset = address - self._start
        return offset if 0 <= offset < self.nbytes else None

    def part(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector in the bytes of `rank`; most are asked for again in every call."""
        key = rank, offset, numel, dtype
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) == _PARTS:
                self._parts.clear()
            whole = self.own if rank == self._rank else self.of[rank]
            with torch.inference_mode(False):  # else only inference could write to it
                found = self._parts[key] = whole[offset : offset + numel * dtype.itemsize].view(dtype)
        return found


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keeps torch from making an NVLink multicast object of memory that is only ever read by one GPU at a time.

    It may leave the GPUs of a shared host unusable, and torch looks nowhere but in the environment.
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
    """Messages between the GPUs of one host; what is sent must be of `allocate`.

    Args:
        control: joins the ranks.
        group: the same ranks, to find each other's memory through.
        device: this rank's GPU.
        watch: sees to it that a message that does not come ends it.
    """

    def __init__(self, control: ControlPlane, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
        self._control, self._rendezvous, self._device = control, Rendezvous(control, group), device
        self._faults, self._watch, self._driver = control.faults, watch, _together(control, Driver)
        self._rank, self._world_size = control.rank, control.world_size
        self._regions: dict[tuple[int, int], _Region] = {}
        self._captured: set[_Region] = set()  # a graph that is replayed reads them, whatever has grown since
        self._last: torch.cuda.Stream | None = None
        with torch.cuda.device(device):
            self._words = _Region(4 * 2 * _CHANNELS * self._world_size, control, self._rendezvous, device)
            self._streams = _together(control, self._begin)  # before anyone writes to the words
        control.faults.on_release(self._release_waits)

    def _begin(self) -> list[torch.cuda.Stream]:
        """A stream for each channel; words are 0."""
        self._words.own.zero_()
        torch.cuda.synchronize(self._device)
        return [torch.cuda.Stream(self._device, priority=-1) for _ in range(_CHANNELS)]

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The slot's memory, kept from call to call; where it has grown too small, a larger one, a collective.

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
            torch.cuda.synchronize(self._device)  # every peer has pulled what this rank waited for it to pull
            least = 0 if region is None else int(region.nbytes * _GROWTH)
            self._regions.pop(slot, None)
            del region
            region = self._regions[slot] = _Region(max(nbytes, least), self._control, self._rendezvous, self._device)
        if capturing:
            self._captured.add(region)
        if self._last is not None and self._last != current and not capturing:
            current.wait_stream(self._last)  # the pass before may still be computing from these bytes
        self._last = current
        return region.part(self._rank, 0, numel, dtype)

    def start(self, messages: Sequence[Message]) -> list[torch.cuda.Event]:
        """Queues all messages, each channel's on a stream of its own."""
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
            # Whoever waits has said before all that others wait for: no order of ranks can block.
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
        """Sets the peer's word of this rank, which is 0: the peer has awaited it the last time."""
        base = self._words.of[message.peer].data_ptr()
        self._driver.write(stream, base + self._place(what, message.channel, self._rank), 1)

    def _wait_flag(self, stream: torch.cuda.Stream, what: int, message: Message) -> None:
        """Waits for this rank's word of the peer, and makes it 0 again."""
        address = self._words.own.data_ptr() + self._place(what, message.channel, message.peer)
        self._driver.wait(stream, address, 1)
        self._driver.write(stream, address, 0)

    def _place(self, what: int, channel: int, rank: int) -> int:
        return 4 * ((what * _CHANNELS + channel) * self._world_size + rank)

    def _release_waits(self) -> None:
        """Ends all waits of this rank's GPU, by saying in everybody's stead what they wait for, again and again."""
        done = [*(stream.query for stream in self._streams), *self._watch.under_way()]  # a replayed graph has no stream

        def speak() -> None:
            torch.cuda.set_device(self._device)  # of this thread
            words = range(self._words.own.data_ptr(), self._words.own.data_ptr() + self._words.nbytes, 4)
            stream = torch.cuda.Stream(self._device)
            started = time.monotonic()
            with ExitStack() as stack:
                beside: ContextBeside | None = None
                while not all(query() for query in done) and not threads.is_ending(_FAREWELL):
                    waited = time.monotonic() - started
                    if waited >= self._faults.deadline:
                        break
                    if stream.query():  # what was written last is there
                        for address in words:
                            self._driver.write(stream, address, 1)
                    elif waited >= _BLOCKED:  # a waiting stream shares this stream's queue
                        beside = beside or stack.enter_context(closing(self._driver.context_beside(self._device)))
                        beside.write(words, 1)
                    time.sleep(0.01)

        threads.start(speak, "ringflash-release", lambda: None)
