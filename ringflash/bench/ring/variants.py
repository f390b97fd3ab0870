"""Variants of `ring_attention` in the ring benchmark, in addition to the requested ring."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.bench.attention.single import Unavailable
from ringflash.bench.common.peers import ours
from ringflash.bench.common.problem import Contender, Problem, Setup

VARIANTS = ("ring", "grouped", "fixed-lengths", "graphs", "graph")
WARM_UPS = 3


def variant(name: str, mesh: DeviceMesh, context: rf.ContextParallel, transport: str) -> Contender:
    """Returns the variant `name` of `ours`, with the requested `transport`.

    - "ring" and "grouped" set the kind of hops.
    - "fixed-lengths" uses a context of one length, in which no call waits for the agreement of the ranks.
    - "graphs" uses such a context that also captures its passes in CUDA graphs.
    - "graph" captures a forward, and both passes, as a user's program does; the ring's launches then cost nothing.
    """
    if name == "graph":
        hops = "ring" if context.hops == "auto" else context.hops
        return partial(captured, context=rf.ContextParallel(mesh, context.layout, transport, hops=hops))
    hops = name if name in ("ring", "grouped") else context.hops
    fixed, graphs = name in ("fixed-lengths", "graphs"), name == "graphs"
    options = {"fixed_lengths": fixed, "hops": hops, "cuda_graphs": graphs}
    return partial(ours, context=rf.ContextParallel(mesh, context.layout, transport, **options))


@contextmanager
def captured(problem: Problem, context: rf.ContextParallel) -> Generator[Setup, None, None]:
    """Prepares `ours` over `context` with each pass as a CUDA graph."""
    if not problem.q.is_cuda:
        raise Unavailable("a CUDA graph takes a GPU")
    with ours(problem, context) as setup:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # compiles kernels, uploads tables, grows memory
                setup.forward_backward()
        torch.cuda.current_stream().wait_stream(side)
        passes = [_capture(call) for call in (setup.forward, setup.forward_backward)]
        yield Replayed(setup.inputs, setup.dout, setup.call, setup.whole, *passes)


@dataclass(frozen=True)
class Replayed(Setup):
    """A problem with CUDA graphs as passes. Their results stay in the memory of the capture."""

    replay_forward: Callable[[], Any]
    replay_both: Callable[[], Any]

    def forward(self) -> Tensor:
        """Replays one forward and returns out."""
        return self.replay_forward()

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Replays one forward and backward, and returns out, dq, dk and dv."""
        return self.replay_both()


def _capture(call: Callable[[], Any]) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay
