"""Passes of a ring captured in CUDA graphs and replayed, for sequences whose launches take longer than their work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

Inputs = Sequence[Tensor | None]
R = TypeVar("R", bound=tuple[Tensor, ...])

MOST = 32  # graphs that are kept, each with the memory of a pass


class _Graph(Generic[R]):
    """A captured pass, and the tensors that it reads and writes."""

    def __init__(self, compute: Callable[..., R], inputs: Inputs) -> None:
        self._inputs = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Threads of loaders and of NCCL go on with what they do.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = compute(*self._inputs)

    def replay(self, inputs: Inputs) -> R:
        """What `compute(*inputs)` gives, bit for bit, in tensors of its own."""
        for target, source in zip(self._inputs, inputs, strict=True):
            if target is not None and source is not None:
                target.copy_(source)
        self._graph.replay()
        return cast("R", tuple(x.clone() for x in self._outputs))


class Replays:
    """The graphs of one context's passes.

    The first call of a kind runs as it is: it compiles, uploads tables and grows memory that peers see. The second is
    captured, and replayed from then on. Ranks make the same calls, so they capture the same ones.
    """

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, _Graph[Any] | None] = OrderedDict()  # None: called once
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
        started: Callable[[], None],
    ) -> R:
        """What `compute(*inputs)` gives.

        Args:
            kind: all that the pass depends on beside the values, shapes and dtypes of the inputs.
            compute: the pass; it enters `around` itself.
            inputs: tensors of one GPU, any strides; None where the pass has none.
            around: what a pass runs in.
            started: called when a graph is under way.
        """
        shapes = tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)  # which may be at the same graph, or reads what peers will write
        self._last = current
        key = kind, shapes
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > MOST:
                torch.cuda.synchronize()
                self._graphs.popitem(last=False)
            return compute(*inputs)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = _Graph(compute, inputs)
        self._graphs.move_to_end(key)
        with around():
            outputs = graph.replay(inputs)
            started()
        return outputs
