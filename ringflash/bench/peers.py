"""What is measured: ring_attention and its peers, each given the same problem and cut over the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf


@dataclass(frozen=True)
class Problem:
    """Causal self-attention of one whole sequence; every rank holds all of it.

    Args:
        q: (1, seqlen, nheads, headdim).
        k: (1, seqlen, nheads_kv, headdim).
        v: as k.
        dout: as q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def random(
        seqlen: int, nheads: int, nheads_kv: int, headdim: int, device: torch.device, dtype: torch.dtype
    ) -> Problem:
        """Normal inputs, the same on every rank."""
        generator = torch.Generator(device).manual_seed(seqlen)

        def draw(heads: int) -> Tensor:
            return torch.randn(1, seqlen, heads, headdim, generator=generator, device=device, dtype=dtype)

        return Problem(draw(nheads), draw(nheads_kv), draw(nheads_kv), draw(nheads))

    @property
    def seqlen(self) -> int:
        """Tokens in the whole sequence."""
        return self.q.shape[1]

    @property
    def forward_flops(self) -> float:
        """4 seqlen^2 nheads headdim, halved because half the scores are masked."""
        return 2.0 * self.seqlen**2 * self.q.shape[2] * self.q.shape[3]

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with `change` made to every tensor."""
        return Problem(change(self.q), change(self.k), change(self.v), change(self.dout))


@dataclass(frozen=True)
class Shard:
    """One rank's part of a problem in one contender's hands.

    Args:
        inputs: q, k and v as the contender wants them: leaves that require gradients.
        dout: the gradient of its output.
        call: the attention.
        whole: joins the ranks' outputs to (1, seqlen, nheads, headdim).
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    whole: Callable[[Tensor], Tensor]

    def forward(self) -> Tensor:
        """One forward."""
        return self.call(*self.inputs)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """One forward and backward: out, dq, dk, dv."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.inputs, self.dout)


Contender = Callable[[Problem], AbstractContextManager[Shard]]


def ours(context: rf.ContextParallel) -> Contender:
    """`ring_attention` over `context`."""

    @contextmanager
    def prepare(problem: Problem) -> Generator[Shard, None, None]:
        local = problem.map(context.shard)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = rf.ring_attention(q, k, v, context, mask=rf.Causal())
            assert isinstance(out, Tensor)
            return out

        yield Shard(_leaves(local), local.dout, call, context.unshard)

    return prepare


def torch_context_parallel(mesh: DeviceMesh, backend: SDPBackend, rotation: str) -> Contender:
    """torch's context_parallel over scaled_dot_product_attention; it wants KV heads repeated to the query heads."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    @contextmanager
    def prepare(problem: Problem) -> Generator[Shard, None, None]:
        group = problem.q.shape[2] // problem.k.shape[2]
        repeated = replace(
            problem, k=problem.k.repeat_interleave(group, 2), v=problem.v.repeat_interleave(group, 2)
        ).map(lambda x: x.transpose(1, 2).contiguous())
        buffers = [repeated.q, repeated.k, repeated.v, repeated.dout]
        set_rotate_method(rotation)
        with sdpa_kernel(backend), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            yield Shard(
                _leaves(repeated),
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


def _leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    return q, k, v
