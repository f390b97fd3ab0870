"""Contenders of the ring benchmark: ring_attention, its peers, and two yardsticks.

All contenders get the same problem.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.bench.common.problem import Contender, Problem, Setup, swapped, unchanged
from ringflash.bench.ring.ring_flash_attn import installed_kernels, ring_flash_attn


@contextmanager
def ours(problem: Problem, context: rf.ContextParallel) -> Generator[Setup, None, None]:
    """Prepares `ring_attention` over `context`."""
    mask = problem.visible
    local = problem.map(partial(context.shard, mask=mask))
    call = partial(rf.ring_attention, context=context, mask=mask, return_lse=False)
    yield Setup(local.leaves(), local.dout, call, partial(context.unshard, mask=mask))


@contextmanager
def without_messages(problem: Problem, context: rf.ContextParallel) -> Generator[Setup, None, None]:
    """Prepares the same as `ours`, but without messages between ranks.

    Every hop has the same work, so the time that this contender saves is the cost of the messages.
    """
    transport = context.transport
    silent: Any = _Silent(transport)
    context.transport = silent
    try:
        with ours(problem, context) as setup:
            yield setup
    finally:
        context.transport = transport


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
            buffer = message.buffer
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
    with sdpa_kernel(backend), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        yield Setup(
            repeated.leaves(),
            repeated.dout,
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),  # patched by name
            lambda out: context_parallel_unshard(mesh, [out.contiguous()], [2])[0].transpose(1, 2),
        )


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
    return named
