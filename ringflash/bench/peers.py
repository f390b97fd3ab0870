"""Who runs in the ring benchmark: ring_attention and its peers, given the same problem and cut over the same ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.bench.problem import Contender, Problem, Setup


def ours(context: rf.ContextParallel) -> Contender:
    """`ring_attention` over `context`."""

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        local = problem.map(context.shard)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = rf.ring_attention(q, k, v, context, mask=rf.Causal())
            assert isinstance(out, Tensor)
            return out

        yield Setup(local.leaves(), local.dout, call, context.unshard)

    return prepare


def torch_context_parallel(mesh: DeviceMesh, backend: SDPBackend, rotation: str) -> Contender:
    """torch's context_parallel over scaled_dot_product_attention; it wants KV heads repeated to the query heads."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        repeated = problem.repeated().map(lambda x: x.transpose(1, 2).contiguous())
        buffers = [repeated.q, repeated.k, repeated.v, repeated.dout]
        set_rotate_method(rotation)
        with sdpa_kernel(backend), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            yield Setup(
                repeated.leaves(),
                repeated.dout,
                lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),  # patched by name
                lambda out: context_parallel_unshard(mesh, [out.contiguous()], [2])[0].transpose(1, 2),
            )

    return prepare


def contenders(context: rf.ContextParallel, mesh: DeviceMesh, *, with_peers: bool) -> dict[str, Contender]:
    """Everything to measure on this machine, by name."""
    named: dict[str, Contender] = {f"ringflash {context.layout}": ours(context)}
    if with_peers:
        backends = {"flash": SDPBackend.FLASH_ATTENTION}
        if mesh.device_type == "cuda":
            backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
        for name, backend in backends.items():
            for rotation in ("allgather", "alltoall"):
                named[f"torch {name} {rotation}"] = torch_context_parallel(mesh, backend, rotation)
    return named
