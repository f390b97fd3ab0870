"""Contenders of the ring benchmark: ring_attention, its variants and peers, and two yardsticks.

All contenders get the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.bench.attention.single import Unavailable
from ringflash.bench.common.flash_kernels import installed_kernels
from ringflash.bench.common.problem import Contender, Problem, Setup, swapped, unchanged
from ringflash.bench.ring.magi_attention import magi_attention
from ringflash.bench.ring.ring_flash_attn import ring_flash_attn
from ringflash.bench.ring.transformer_engine import transformer_engine
from ringflash.bench.ring.ulysses import local_attentions, ulysses
from ringflash.bench.ring.usp import usp
from ringflash.errors import ArgumentError

VARIANTS = ("ring", "grouped", "launches", "fixed-lengths", "graphs", "graph")
WARM_UPS = 3


@contextmanager
def ours(problem: Problem, context: rf.ContextParallel) -> Generator[Setup, None, None]:
    """Prepares `ring_attention` over `context`."""
    mask = problem.visible
    local = problem.map(partial(context.shard, mask=mask))
    call = partial(rf.ring_attention, context=context, mask=mask, return_lse=False)
    setup = Setup(local.leaves(), local.dout, call, partial(context.unshard, mask=mask))
    if context.graphs is not None:
        plan = context.plan(mask, problem.seqlen, row_bytes=problem.row_bytes)
        captured = context.graphs.takes(plan, problem.row_bytes)
        for _ in range(context.graphs.calls if captured else 0):  # from then on passes are replayed
            setup.forward_backward()
    yield setup


@contextmanager
def without_messages(problem: Problem, context: rf.ContextParallel) -> Generator[Setup, None, None]:
    """Prepares the same as `ours`, but without messages between ranks.

    Every hop has the same work, so the time that this contender saves is the cost of the messages.
    """
    transport = context.transport
    silent: Any = _Silent(transport)
    context.transport, graphs, context.graphs = silent, context.graphs, None  # graphs would send messages
    try:
        with ours(problem, context) as setup:
            yield setup
    finally:
        context.transport, context.graphs = transport, graphs


class _Silent:
    """Transport whose messages arrive at once and leave their buffers unchanged.

    A new buffer gets random numbers. Matrices of zeros or of stale memory would be multiplied faster than others,
    because they take less power.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._filled: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)  # buffers are allocated as if messages were sent

    def start(self, messages: Sequence[Any]) -> None:
        """Fills new receive buffers with random numbers, and sends nothing."""
        for message in messages:
            buffer = message.span.vector
            if not message.sends and buffer.data_ptr() not in self._filled:
                buffer.normal_()
                self._filled.add(buffer.data_ptr())

    def finish(self, handle: None) -> None:
        """Returns at once, because no message is under way."""


@contextmanager
def alone(problem: Problem, tokens: int) -> Generator[Setup, None, None]:
    """Prepares `flash_attention` on every rank by itself: causal, over `tokens` first tokens."""
    first = replace(problem, mask=None, causal=True).map(lambda x: x[:, :tokens].contiguous())
    yield Setup(first.leaves(), first.dout, partial(rf.flash_attention, mask=rf.Causal(), return_lse=False), unchanged)


@contextmanager
def torch_context_parallel(
    problem: Problem, mesh: DeviceMesh, backend: SDPBackend, rotation: str
) -> Generator[Setup, None, None]:
    """Prepares torch's context_parallel over scaled_dot_product_attention.

    It needs KV heads repeated to the query heads.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    repeated = problem.repeated().map(swapped)
    buffers = [repeated.q, repeated.k, repeated.v, repeated.dout]
    set_rotate_method(rotation)
    attention = functional.scaled_dot_product_attention
    try:
        with sdpa_kernel(backend), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            yield Setup(
                repeated.leaves(),
                repeated.dout,
                lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),  # patched by name
                lambda out: context_parallel_unshard(mesh, [out.contiguous()], [2])[0].transpose(1, 2),
            )
    finally:  # torch 2.11 leaves its patch there after an error, and other contenders would run it
        setattr(functional, "scaled_dot_product_attention", attention)  # noqa: B010 - pyright takes it for a constant


def contenders(context: rf.ContextParallel, mesh: DeviceMesh, *, with_peers: bool) -> dict[str, Contender]:
    """Returns all contenders of this machine by name, ours first."""
    named: dict[str, Contender] = {f"ringflash {context.layout}": partial(ours, context=context)}
    if with_peers:
        backends = {"flash": SDPBackend.FLASH_ATTENTION}
        if mesh.device_type == "cuda":
            backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
        for name, backend in backends.items():
            for rotation in ("allgather", "alltoall"):
                peer = partial(torch_context_parallel, mesh=mesh, backend=backend, rotation=rotation)
                named[f"torch {name} {rotation}"] = peer
        kernels = installed_kernels()
        named[f"ring-flash-attn zigzag, {kernels.name}"] = ring_flash_attn(mesh, kernels)
        for name, make in local_attentions(mesh.device_type).items():
            named[f"Ulysses, {name}"] = ulysses(mesh, make)
        named[f"USP, {kernels.name}"] = usp(mesh, kernels)
        named["TransformerEngine p2p"] = transformer_engine(mesh)
        named["MagiAttention"] = magi_attention(mesh)
    return named


def variant(name: str, mesh: DeviceMesh, context: rf.ContextParallel, transport: str) -> Contender:
    """Returns the variant `name` of `ours`, with the requested `transport`.

    - "ring" and "grouped" set the kind of hops.
    - "launches" uses a context that captures nothing.
    - "fixed-lengths" uses a context of one length, in which no call waits for the agreement of the ranks.
    - "graphs" uses such a context that also captures all its passes in CUDA graphs.
    - "graph" captures a forward, and both passes, as a user's program does; the ring's launches then cost nothing.
    """
    if name == "graph":
        hops = "ring" if context.hops == "auto" else context.hops
        return partial(captured, context=rf.ContextParallel(mesh, context.layout, transport, hops=hops))
    hops = name if name in ("ring", "grouped") else context.hops
    fixed = name in ("fixed-lengths", "graphs")
    choices: dict[str, bool | Literal["auto"]] = {"graphs": True, "launches": False}
    options = {"fixed_lengths": fixed, "hops": hops, "cuda_graphs": choices.get(name, "auto")}
    return partial(ours, context=rf.ContextParallel(mesh, context.layout, transport, **options))


def heads_by_ring(mesh: DeviceMesh, heads: int, layout: str, transport: str) -> Contender:
    """Returns `ours` with heads split over `heads` neighbouring ranks, and a ring over the groups.

    Raises:
        ArgumentError: `heads` does not divide the number of ranks.
    """
    if heads < 1 or mesh.size() % heads:
        remedy = "Choose divisors of the number of ranks."
        raise ArgumentError(
            "--head-splits", expected=f"numbers that divide {mesh.size()} ranks", got=heads, remedy=remedy
        )
    shape = (mesh.size() // heads, heads)
    both = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("ring", "heads"))
    return partial(ours, context=rf.ContextParallel(both, layout, transport))


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
