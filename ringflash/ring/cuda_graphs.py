"""CUDA graphs of a ring's passes, captured and replayed, for sequences whose launches take longer than their work."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringflash.errors import RingflashError
from ringflash.ring.plan import Plan
from ringflash.torch_private import copy_each

Inputs = Sequence[Tensor | None]
R = TypeVar("R", bound=tuple[Tensor, ...])

MOST = 32  # kinds of passes that are known; each graph keeps its outputs
# Calls of a kind before its capture. A capture waits for the GPU, so it comes late if the program did not ask for it.
# Lengths that seldom recur are then never captured.
ASKED, UNASKED = 2, 100
# A program that did not ask for graphs gets them for ranks that own at most this much KV: 4096 tokens of 8 heads of 128
# in two bytes. The work of a hop grows with the square of these tokens, and soon takes longer than its launches.
MOST_BYTES = 16 * 2**20
_BYTES = 16  # kernels differ for tensors that are aligned to less, and copies are always aligned

log = logging.getLogger(__name__)


class _Graph(Generic[R]):
    """A captured pass, with its input and output tensors.

    Args:
        compute: the pass.
        inputs: tensors like the inputs of later calls.
        memory: input tensors shared by all graphs, which run one after another.
        pool: CUDA memory pool for all other tensors of a pass, shared likewise.
    """

    def __init__(self, compute: Callable[..., R], inputs: Inputs, memory: _Memory, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):  # a tensor made in inference mode can be written to only there
            self._inputs = memory.of(inputs)
            self._outputs = _captured(self._graph, compute, self._inputs, pool)
        self._copied_in, self._copied_out = _by_dtype(self._inputs), _by_dtype(self._outputs)

    def replay(self, inputs: Inputs) -> R:
        """Returns the result of `compute(*inputs)`, bit for bit, in new tensors."""
        for places, targets in self._copied_in:
            copy_each(targets, [inputs[place] for place in places])
        self._graph.replay()
        outputs = tuple(map(_like, self._outputs))
        for places, sources in self._copied_out:
            copy_each([outputs[place] for place in places], sources)
        return cast("R", outputs)


def _captured(graph: torch.cuda.CUDAGraph, compute: Callable[..., R], inputs: Inputs, pool: Any) -> R:
    """Captures `compute(*inputs)` in `graph`, and returns its outputs."""
    failure: BaseException | None = None
    outer = torch.cuda.stream(torch.cuda.current_stream())
    try:
        # If the capture cannot end, torch leaves its stream current, and `outer` sets the caller's stream again.
        # "thread_local" lets threads of data loaders and of NCCL call CUDA during the capture.
        with outer, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            try:
                return compute(*inputs)
            except BaseException as error:
                failure = error
                raise
    except RuntimeError as error:
        # A capture that broke off between streams cannot end either. That error would hide its cause.
        raise error if failure is None else failure from None


class _Memory:
    """Input tensors shared by graphs: inputs alike get the same tensor as long as a graph refers to it."""

    def __init__(self) -> None:
        self._known = WeakValueDictionary[Hashable, Tensor]()

    def of(self, inputs: Inputs) -> list[Tensor | None]:
        """Returns a tensor like each input, and None for None; all tensors of one call are distinct."""
        alike = Counter[Hashable]()
        found: list[Tensor | None] = []
        for x in inputs:
            if x is None:
                found.append(None)
                continue
            kind = x.shape, x.dtype, x.device
            key = kind, alike[kind]
            alike[kind] += 1
            mine = self._known.get(key)
            if mine is None:
                mine = self._known[key] = _like(x)
            found.append(mine)
        return found


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _by_dtype(tensors: Inputs) -> list[tuple[list[int], list[Tensor]]]:
    """Groups the non-empty tensors by dtype, each with its index in `tensors`; one launch copies a group."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for place, x in enumerate(tensors):
        if x is not None and x.numel():
            places, alike = found.setdefault(x.dtype, ([], []))
            places.append(place)
            alike.append(x)
    return list(found.values())


class GraphCache:
    """CUDA graphs of the passes of one context.

    The first calls of a kind run without a graph: a call compiles, uploads tables and grows memory that peers see.
    Right after the last of them its pass is captured, and the graph is replayed from then on. A capture can upload no
    tables, and the tables of the first call may have left their caches before the second. Ranks make the same calls, so
    they capture the same ones. Passes run one after another and their inputs and outputs are copied, so all graphs
    share the memory of inputs and of intermediate results. `calls` is the number of calls before a capture.

    Args:
        asked: whether the program asked for graphs. Otherwise they take more calls of a kind, and inputs for which
            kernels give the same bits as for copies. After a capture that fails there are none.
    """

    def __init__(self, *, asked: bool = True) -> None:
        self._asked, self.calls = asked, ASKED if asked else UNASKED
        self._failed = False
        self.is_attempt = False  # during a capture whose failure is no error
        self._kinds: OrderedDict[Hashable, _Graph[Any] | int] = OrderedDict()  # a graph, or the calls until its capture
        self._memory = _Memory()
        self._pool: Any = None
        self._last: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Returns the number of captured graphs."""
        return sum(isinstance(known, _Graph) for known in self._kinds.values())

    def takes(self, plan: Plan, row_bytes: int | None) -> bool:
        """Returns whether passes of `plan` are captured: all if the program asked for it, otherwise short ones.

        `row_bytes` is a token's bytes of keys and values on a GPU. Ranks get the same answer until a capture fails.
        """
        own_bytes = plan.layout.least_length * (row_bytes or 0)
        return self._asked or (own_bytes <= MOST_BYTES and not self._failed)

    def run(
        self,
        kind: Hashable,
        compute: Callable[..., R],
        inputs: Inputs,
        around: Callable[[], AbstractContextManager[None]],
        started: Callable[[torch.cuda.Stream], None],
    ) -> R:
        """Returns the result of `compute(*inputs)`.

        Args:
            kind: everything that the pass depends on, except for the values, shapes and dtypes of the inputs.
            compute: the pass; it enters `around` itself.
            inputs: tensors on one GPU with any strides; None where the pass has no such input.
            around: returns the context manager that surrounds a pass; entered here for replays.
            started: called with the stream once a replay is queued on it.
        """
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)  # it may still run the same graph, or read memory that peers will write
        self._last = current
        if not self._asked and not all(map(_is_aligned, inputs)):
            return compute(*inputs)
        key = kind, tuple([None if x is None else (x.shape, x.dtype) for x in inputs])
        known = self._kinds.get(key, self.calls)
        if isinstance(known, _Graph):
            self._kinds.move_to_end(key)
            with around():
                outputs = known.replay(inputs)
                started(current)
            return outputs
        outputs = compute(*inputs)
        self._put(key, self._captured(compute, inputs) if known == 1 else known - 1)
        return outputs

    def _put(self, key: Hashable, known: _Graph[Any] | int) -> None:
        """Stores the graph of a kind, or the number of its calls until the capture."""
        self._kinds[key] = known
        self._kinds.move_to_end(key)
        if len(self._kinds) > MOST:
            _, oldest = self._kinds.popitem(last=False)
            if isinstance(oldest, _Graph):
                torch.cuda.synchronize()  # it may still run

    def _captured(self, compute: Callable[..., R], inputs: Inputs) -> _Graph[R] | int:
        if not len(self):  # a pool is freed with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        self.is_attempt = not self._asked
        try:
            return _Graph(compute, inputs, self._memory, self._pool)
        except BaseException as error:
            self._pool = torch.cuda.graph_pool_handle()  # the allocator may consider the old one as captured into
            if self._asked or isinstance(error, RingflashError) or not isinstance(error, Exception):
                raise
            self._failed = True
            log.warning("attention goes on without CUDA graphs, which cuda_graphs=False asks for: %s", error)
            return self.calls
        finally:
            self.is_attempt = False


def _is_aligned(x: Tensor | None) -> bool:
    """Returns whether kernels give the same bits for `x` as for its contiguous copy."""
    if x is None:
        return True
    if x.data_ptr() % _BYTES:
        return False
    strides = x.stride()
    return x.is_contiguous() or (strides[-1] == 1 and all(n and n * x.itemsize % _BYTES == 0 for n in strides[:-1]))
