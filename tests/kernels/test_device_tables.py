"""Tables on devices: recent ones are kept, dropped ones stay until they are read, and CUDA graphs keep theirs."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from time import sleep

import numpy as np
import pytest
import torch

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.kernels import device_tables as tables
from ringflash.kernels.device_tables import device_tables
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS
from tests.kernels.triton.test_backend import DEVICE, GPU

MASKS = [None, rf.Causal(), rf.Causal() & rf.Documents([0, 100, 160, 500]), rf.Causal() & rf.SlidingWindow(64)]


def test_recent_tables_are_kept() -> None:
    made: list[int] = []

    @device_tables(maxsize=2)
    def table(n: int) -> int:
        made.append(n)
        return n

    assert [table(n) for n in (0, 0, 1, 2, 0)] == [0, 0, 1, 2, 0]
    assert made == [0, 1, 2, 0]


def test_tables_that_are_dropped_stay_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that dropped tables stay allocated: the next table would reuse memory that queued kernels still read."""
    through, capturing = [False], [False]

    class Event:
        def record(self, stream: object) -> None:
            assert not capturing[0]

        def query(self) -> bool:
            return through[0]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tables, "_streams", lambda device: [None])
    monkeypatch.setattr(tables, "is_capturing", lambda: capturing[0])
    retired: deque[tables._Retired] = deque()
    monkeypatch.setattr(tables, "_retired", lambda device: retired)
    for capturing[0], kept in ((True, 1), (False, 2), (True, 3)):
        tables._retire(torch.zeros(1))
        assert len(retired) == kept
    capturing[0], through[0] = False, True
    tables._retire(torch.zeros(1))
    assert not retired


def test_dropped_tables_stay_until_every_stream_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks streams on which kernels were launched, also one that the program has destroyed since."""
    device, finished, synchronized = torch.device("cpu"), set[int](), []

    class Stream:
        def __init__(self, handle: int, device: torch.device = device) -> None:
            self.cuda_stream, self.device = handle, device

    class Event:
        def record(self, stream: Stream) -> None:
            if stream.cuda_stream == 9:
                raise RuntimeError("invalid resource handle")
            self.of = stream.cuda_stream

        def query(self) -> bool:
            return not hasattr(self, "of") or self.of in finished

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(5))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    retired: deque[tables._Retired] = deque()
    known = {0, 5, 7, 9}
    monkeypatch.setattr(tables, "_retired", lambda device: retired)
    monkeypatch.setattr(tables, "readers", lambda device: known)
    monkeypatch.setattr(tables, "is_capturing", lambda: False)
    for finished_now, kept in ((set(), 1), ({5, 0}, 2), ({5, 0, 7}, 0)):
        finished |= finished_now
        tables._retire(torch.zeros(1))
        assert len(retired) == kept
    assert (known, synchronized) == ({0, 5, 7}, [device])


def test_a_table_that_is_dropped_while_others_retire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops a table in garbage collection during the check of another: each one stays until its own events are over."""
    finished, within = set[int](), list[torch.Tensor]()

    class Event:
        made = 0

        def __init__(self) -> None:
            Event.made += 1
            self.number = Event.made

        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            if within:
                tables._retire(within.pop())
            return self.number in finished

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tables, "_streams", lambda device: [None])
    monkeypatch.setattr(tables, "is_capturing", lambda: False)
    retired: deque[tables._Retired] = deque()
    monkeypatch.setattr(tables, "_retired", lambda device: retired)
    first, second = torch.zeros(1), torch.zeros(1)
    tables._retire(first)
    tables._retire(second)
    finished.add(1)
    within.append(torch.zeros(1))
    tables._retire(torch.zeros(1))
    assert [kept.memory is second for kept in retired] == [True, False, False]


@pytest.mark.skipif(not GPU, reason="streams of a GPU")
@pytest.mark.parametrize("nbytes", [4000, 2 * tables.CHUNK])
def test_tables_take_no_memory_of_work_that_is_still_queued(nbytes: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tables.uploaded([np.zeros(1, np.int32)], device)  # the stream of uploads exists
    tables._current.clear()  # the next table begins a chunk
    x = torch.empty(max(nbytes, tables.CHUNK), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    x.fill_(255)  # half a second from now
    del x
    (table,) = tables.uploaded([np.arange(nbytes // 4, dtype=np.int32)], device)
    torch.cuda.synchronize()
    assert torch.equal(table.cpu(), torch.arange(nbytes // 4, dtype=torch.int32))


def test_threads_that_upload_at_once_keep_their_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a stream is left before another thread enters it: leaving restores what was put there last."""
    device, inside, overlaps = torch.device("cuda", 0), list[int](), list[int]()

    class Stream:
        def __enter__(self) -> None:
            overlaps.extend(inside)
            inside.append(get_ident())
            sleep(0.05)  # the other thread runs, as in a copy

        def __exit__(self, *raised: object) -> None:
            inside.pop()

        def synchronize(self) -> None:
            pass

    class Chunk:
        def typed(self, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(tables.ALIGNMENT, dtype=dtype)

        def table(self, typed: torch.Tensor, shape: tuple[int, ...], begin: int) -> torch.Tensor:
            return typed[begin : begin + shape[0]]

    stream = Stream()
    monkeypatch.setattr(tables, "_stream", lambda device: stream)
    monkeypatch.setattr(tables, "_room", lambda nbytes, device: (Chunk(), 0))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda number: tables.uploaded([np.array([number])], device), range(2)))
    assert [table.tolist() for (table,) in found] == [[0], [1]]
    assert not overlaps


def test_tables_travel_together_and_begin_where_kernels_load_vectors() -> None:
    given = [np.arange(5, dtype=np.int32), np.empty((0, 2), np.int32), np.arange(21).reshape(3, 7).T]
    for dtype in (torch.int32, torch.int64):
        staging, places = tables._packed(given, dtype)
        assert staging.dtype == dtype
        assert staging.nbytes % tables.ALIGNMENT == 0
        for table, place in zip(given, places, strict=True):
            assert place * dtype.itemsize % tables.ALIGNMENT == 0
            assert staging[place : place + table.size].tolist() == table.reshape(-1).tolist()


@pytest.mark.skipif(not GPU, reason="CUDA graphs")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_cuda_graph_gives_the_same_bits(backend: str, mask: Mask | None) -> None:
    """Checks a replay after many other calls, which replace the graph's tables in the cache."""
    given = Problem.random(seqlen=500, headdim=64, dtype=DTYPE_OF[backend], mask=mask, device=DEVICE)
    expected = given.flash(backend=backend, deterministic=True)  # compiles and uploads tables before the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        given.flash(backend=backend, deterministic=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = given.flash(backend=backend, deterministic=True)
    for seqlen in range(128, 128 + 300):
        other = Problem.random(seqlen=seqlen, headdim=64, dtype=DTYPE_OF[backend], mask=mask, device=DEVICE)
        rf.flash_attention(other.q, other.k, other.v, mask=None if mask is None else rf.Causal())
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    for result, before in zip(results, expected, strict=True):
        assert torch.equal(result, before)


@pytest.mark.skipif(not GPU, reason="CUDA graphs")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # from the aborted capture
def test_tables_are_made_before_a_capture() -> None:
    given = Problem.random(seqlen=333, headdim=64, dtype=torch.bfloat16, mask=rf.Causal(), device=DEVICE)
    given.flash()
    mask = rf.Causal() & rf.SlidingWindow(17)
    with pytest.raises(ArgumentError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        rf.flash_attention(given.q, given.k, given.v, mask=mask)
