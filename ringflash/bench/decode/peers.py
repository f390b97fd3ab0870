"""Problems and contenders of the decoding benchmark: random queries and caches, flash_decode and its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one cell of the benchmark. Every sequence has `length` valid keys, and the cache is full."""

    length: int
    batch: int
    nheads: int
    nheads_kv: int
    headdim: int
    seqlen_q: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.batch * self.length * self.nheads_kv * self.headdim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes that must move: keys, values and queries read once, the output written once."""
        return self.kv_bytes + 2 * self.batch * self.seqlen_q * self.nheads * self.headdim * self.dtype.itemsize


@dataclass(frozen=True)
class Decoding:
    """Random queries and a cache, with a causal mask among the queries.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, length, nheads_kv, headdim).
        v: (batch, length, nheads_kv, headdim).
        lengths: int32 (batch,), number of valid keys in each cache.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor

    @staticmethod
    def random(shape: CacheShape, device: torch.device, seed: int) -> Decoding:
        """Returns normally distributed inputs from `seed`."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(rows: int, heads: int) -> Tensor:
            size = (shape.batch, rows, heads, shape.headdim)
            return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

        lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        q, k, v = (draw(*of) for of in ((shape.seqlen_q, shape.nheads), *2 * [(shape.length, shape.nheads_kv)]))
        return Decoding(q, k, v, lengths)

    def reference(self, dtype: torch.dtype) -> Tensor:
        """Returns the output of the plain formula in `dtype` for the first sequence, computed KV head by KV head.

        Returns:
            out, (1, seqlen_q, nheads, headdim).
        """
        seqlen_q, length, group = self.q.shape[1], self.k.shape[1], self.q.shape[2] // self.k.shape[2]
        hidden = torch.ones(seqlen_q, length, dtype=torch.bool, device=self.q.device).triu(length - seqlen_q + 1)
        outs = []
        for head, q in enumerate(self.q[0].to(dtype).split(group, 1)):
            k, v = (x[0, :, head].to(dtype) for x in (self.k, self.v))
            scores = torch.einsum("qhd,kd->hqk", q * q.shape[-1] ** -0.5, k).masked_fill_(hidden, -torch.inf)
            outs.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), v))
        return torch.cat(outs, 1)[None]


def ours(given: Decoding, options: rf.DecodeOptions) -> Call:
    """Returns a call of `flash_decode` with `options`."""
    mask = None if given.q.shape[1] == 1 else rf.Causal()
    more = {"cache_seqlens": given.lengths, "mask": mask, "options": options}
    return partial(rf.flash_decode, given.q, given.k, given.v, **more, return_lse=False)


def torch_sdpa(given: Decoding, backend: SDPBackend, *, packed: bool) -> Call:
    """Returns a call of torch's scaled_dot_product_attention on `backend`.

    It gets enable_gqa, or with `packed` the query heads of a group as the rows of one KV head.
    """
    batch, seqlen_q, nheads, headdim = given.q.shape
    if seqlen_q > 1:
        raise ValueError("its causal diagonal begins at the first key: one query only")
    k, v = (x.transpose(1, 2) for x in (given.k, given.v))
    shape = (batch, k.shape[1], -1, headdim) if packed else (batch, nheads, 1, headdim)
    q = given.q.view(shape)

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=not packed)
        return out.reshape(batch, seqlen_q, nheads, headdim)

    return call


def contenders(device: torch.device) -> dict[str, Callable[[Decoding], Call]]:
    """Returns all contenders of `device` by name."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if device.type == "cpu":
        backends = {"math": SDPBackend.MATH}
    named: dict[str, Callable[[Decoding], Call]] = {"ringflash": partial(ours, options=rf.DecodeOptions())}
    for name, backend in backends.items():
        named[f"torch {name}"] = partial(torch_sdpa, backend=backend, packed=False)
        named[f"torch {name} packed"] = partial(torch_sdpa, backend=backend, packed=True)
    return named
