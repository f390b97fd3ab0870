"""Passes of a ring captured in CUDA graphs and replayed, for sequences whose launches take longer than their work."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Inputs = Sequence[Tensor | None]
R = TypeVar("R", bound=tuple[Tensor, ...])

MOST = 32  # graphs that are kept, each with its outputs


class _Graph(Generic[R]):
    """A captured pass, and the tensors that it reads and writes.

    Args:
        compute: the pass.
        inputs: like those that it is called with.
        memory: of inputs, which graphs that run one after another have together.
        pool: of what else passes take, likewise.
    """

    def __init__(self, compute: Callable[..., R], inputs: Inputs, memory: _Memory, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):  # else only inference could write to them
            self._inputs = memory.of(inputs)
            # Threads of loaders and of NCCL go on with what they do.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._outputs = compute(*self._inputs)
        self._copied_in, self._copied_out = _by_dtype(self._inputs), _by_dtype(self._outputs)

    def replay(self, inputs: Inputs) -> R:
        """What `compute(*inputs)` gives, bit for bit, in tensors of its own."""
        for places, targets in self._copied_in:
            _copy([inputs[place] for place in places], targets)
        self._graph.replay()
        outputs = tuple(map(_like, self._outputs))
        for places, sources in self._copied_out:
            _copy(sources, [outputs[place] for place in places])
        return cast("R", outputs)


class _Memory:
    """Tensors for inputs: the same for all that are alike, as long as anyone has them."""

    def __init__(self) -> None:
        self._known = WeakValueDictionary[Hashable, Tensor]()

    def of(self, inputs: Inputs) -> list[Tensor | None]:
        """A tensor like each input, and None for None; no two the same."""
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
    """The places of those of one dtype that have anything in them, and these: what is copied in one launch."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for place, x in enumerate(tensors):
        if x is not None and x.numel():
            places, alike = found.setdefault(x.dtype, ([], []))
            places.append(place)
            alike.append(x)
    return list(found.values())


def _copy(sources: Sequence[Tensor | None], targets: Sequence[Tensor]) -> None:
    """All of them, in one launch where they are dense."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore


class GraphCache:
    """The graphs of one context's passes.

    The first call of a kind runs as it is: it compiles, uploads tables and grows memory that peers see. The second is
    captured, and replayed from then on. Ranks make the same calls, so they capture the same ones. As passes run one
    after another, each with its inputs and outputs copied, they share memory of inputs and of what they compute.
    """

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, _Graph[Any] | None] = OrderedDict()  # None: called once
        self._memory = _Memory()
        self._pool: Any = None
        self._last: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Graphs that there are."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(
        self,
        kind: Hashable,
        compute: Callable[..., R],
        inputs: Inputs,
        around: Callable[[], AbstractContextManager[None]],
        started: Callable[[torch.cuda.Stream], None],
    ) -> R:
        """What `compute(*inputs)` gives.

        Args:
            kind: all that the pass depends on beside the values, shapes and dtypes of the inputs.
            compute: the pass; it enters `around` itself.
            inputs: tensors of one GPU, any strides; None where the pass has none.
            around: what a pass runs in.
            started: called with the stream when a graph is under way.
        """
        shapes = tuple([None if x is None else (x.shape, x.dtype) for x in inputs])
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)  # which may be at the same graph, or reads what peers will write
        self._last = current
        key = kind, shapes
        graph = self._graphs.get(key)
        if graph is None and key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > MOST:
                torch.cuda.synchronize()
                self._graphs.popitem(last=False)
            return compute(*inputs)
        if graph is None:
            graph = self._graphs[key] = self._captured(compute, inputs)
        self._graphs.move_to_end(key)
        with around():
            outputs = graph.replay(inputs)
            started(current)
        return outputs

    def _captured(self, compute: Callable[..., R], inputs: Inputs) -> _Graph[R]:
        if not len(self):  # of graphs that are gone the pool is gone too
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return _Graph(compute, inputs, self._memory, self._pool)
        except BaseException:  # the allocator may take the pool for one that is still captured into
            self._pool = torch.cuda.graph_pool_handle()
            raise
