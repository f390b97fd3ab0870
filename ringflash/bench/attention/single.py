"""Contenders of the kernel benchmark: flash_attention and its peers on one device, on the same problem."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import ringflash as rf
from ringflash.bench.attention.tiles import HOPPER, PORTABLE, auto_kernels
from ringflash.bench.common.problem import Contender, Problem, Setup, swapped, unchanged
from ringflash.errors import ArgumentError

STANDARD_MATRICES = 4  # seqlen x seqlen at once, in the backward: P, dP, its masked copy, dS
FLEX_BLOCK = 128


class Unavailable(RuntimeError):
    """Error for a contender for which this machine has no package or too little memory."""


@contextmanager
def ours(problem: Problem, *, deterministic: bool, backend: str = "auto") -> Generator[Setup, None, None]:
    """Prepares `flash_attention`. Both modes have the same forward."""
    options = rf.AttentionOptions(deterministic=deterministic, backend=backend)
    call = partial(rf.flash_attention, mask=problem.visible, options=options, return_lse=False)
    yield Setup(problem.leaves(), problem.dout, call, unchanged)


@contextmanager
def sdpa(problem: Problem, backend: SDPBackend) -> Generator[Setup, None, None]:
    """Prepares scaled_dot_product_attention of torch, forced to one backend."""
    heads_first = problem.map(swapped)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=problem.group > 1
            )

    yield Setup(heads_first.leaves(), heads_first.dout, call, swapped)


@contextmanager
def flex(problem: Problem) -> Generator[Setup, None, None]:
    """Prepares torch's flex_attention, compiled for this shape, with its block mask made beforehand."""
    heads_first = problem.map(swapped)
    mask = _causal_blocks(problem.seqlen, problem.q.device) if problem.causal else None
    with compiling():
        yield Setup(heads_first.leaves(), heads_first.dout, compiled_flex(mask, problem.group), swapped)


@contextmanager
def compiling() -> Generator[None, None, None]:
    """Lets contenders compile flex_attention for any shapes and masks, and run its backward any number of times."""
    from torch._functorch import config

    torch.compiler.reset()  # dynamo compiles one function for a few shapes and masks only
    with config.patch(donated_buffer=False):  # a backward that donates its buffers runs only once
        yield


def compiled_flex(mask: BlockMask | None, group: int) -> Any:
    """Returns flex_attention under `mask`, compiled for one shape, with `group` query heads for each KV head."""
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=group > 1)


def _causal_blocks(seqlen: int, device: torch.device) -> BlockMask:
    """Returns flex_attention's causal block mask, built from the numbers of blocks.

    create_block_mask would build the seqlen x seqlen mask first.
    """
    blocks = -(-seqlen // FLEX_BLOCK)
    row = torch.arange(blocks, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, blocks, dtype=torch.int32, device=device),  # the block on the diagonal
        torch.cat([row[:, None], row.expand(blocks, -1)], 1)[:, :blocks].contiguous()[None, None],
        row[None, None].contiguous(),  # the blocks before it, fully visible
        row.expand(blocks, -1).contiguous()[None, None],
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, q, k: q >= k,
        seq_lengths=(seqlen, seqlen),
    )


def package_of(name: str) -> Any:
    """Returns the module `name` of a peer's package.

    Raises:
        Unavailable: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable("not installed") from error


def cute() -> Any:
    """Returns the package of FlashAttention-4; raises as `package_of`."""
    return package_of("flash_attn.cute")


@contextmanager
def flash_attention_4(problem: Problem) -> Generator[Setup, None, None]:
    """Prepares FlashAttention-4.

    Raises:
        Unavailable: its package is not installed.
    """
    call = out_of(cute().flash_attn_func, causal=problem.causal)
    yield Setup(problem.leaves(), problem.dout, call, unchanged)


def out_of(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """Returns `function` with `options`, without the results after out that some versions return."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


@contextmanager
def standard(problem: Problem) -> Generator[Setup, None, None]:
    """Prepares softmax(q k^T) v with scores and probabilities in the inputs' dtype, in O(seqlen^2) memory.

    Raises:
        Unavailable: the device has too little free memory.
    """
    batch, seqlen, nheads, headdim = problem.q.shape
    needed = STANDARD_MATRICES * batch * nheads * seqlen**2 * problem.q.element_size()
    free = _free_bytes(problem.q.device)
    if needed > free:
        raise Unavailable(f"needs {needed / 2**30:,.0f} GiB, {free / 2**30:,.0f} are free")
    heads_first = problem.map(swapped)
    hidden = None
    if problem.causal:
        hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=problem.q.device).triu_(1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if problem.group == 1 else x.repeat_interleave(problem.group, 1) for x in (k, v))
        scores = (q * headdim**-0.5) @ k.transpose(-1, -2)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        return scores.softmax(-1) @ v

    yield Setup(heads_first.leaves(), heads_first.dout, call, swapped)


def contenders(
    device: torch.device, dtype: torch.dtype, *, with_peers: bool, only: Sequence[str] | None = None
) -> dict[str, Contender]:
    """Returns the contenders on `device` with inputs of `dtype`, by name; ours first.

    The portable kernels are separate contenders if "auto" means other kernels. `only` selects contenders by name, peers
    included.

    Raises:
        ArgumentError: `only` names an unknown contender.
    """
    kernels = {"": "auto", f", {PORTABLE}": "triton"} if auto_kernels(device, dtype) == HOPPER else {"": "auto"}
    named: dict[str, Contender] = {
        f"ringflash {mode}{by}": partial(ours, deterministic=mode == "deterministic", backend=backend)
        for by, backend in kernels.items()
        for mode in ("fast", "deterministic")
    }
    with_peers = with_peers or only is not None
    if with_peers and device.type == "cuda":
        named["SDPA flash (FA2)"] = partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)
        named["SDPA cuDNN"] = partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)
        named["FlexAttention"] = flex
        named["FlashAttention-4"] = flash_attention_4
    elif with_peers:
        named["SDPA math"] = partial(sdpa, backend=SDPBackend.MATH)
    if with_peers:
        named["standard attention"] = standard
    if only is None:
        return named
    for name in only:
        if name not in named:
            expected, remedy = f"some of {', '.join(map(repr, named))}", "Quote a name that has spaces."
            raise ArgumentError("--only", expected=expected, got=repr(name), remedy=remedy)
    return {name: contender for name, contender in named.items() if name in only}


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
