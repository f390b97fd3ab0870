"""The peer ring-flash-attn: its zigzag ring, if its package is installed.

The package calls private functions of FlashAttention-2's package, which takes an hour to compile. Here FlashAttention-4
replaces them if it is installed, else torch's own FlashAttention-2. Modules with the names of FlashAttention-2's exist
only while ring-flash-attn is imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.bench.attention.single import Unavailable
from ringflash.bench.common.problem import Contender, Problem, Setup

PACKAGE = "ring_flash_attn"


@dataclass(frozen=True)
class Kernels:
    """Attention on one device.

    Args:
        name: name in the tables.
        forward: takes q, k, v, scale and causal; returns out, lse (batch, nheads, seqlen), and possibly other values.
        backward: takes dout, q, k, v, out, lse, scale, causal, dq, dk and dv; writes the last three.
    """

    name: str
    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., None]


def ring_flash_attn(mesh: DeviceMesh, kernels: Kernels) -> Contender:
    """Returns the contender `zigzag_ring_flash_attn_func` over `mesh`, which has all ranks.

    The length of the sequence must be a multiple of twice the number of ranks.
    """
    # A separate group: a call that fails leaves messages behind, which other contenders must not receive.
    group = dist.new_group()

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        attend, chunks = zigzag(kernels), 2 * mesh.size()
        if problem.seqlen % chunks:
            raise Unavailable(f"takes multiples of {chunks} tokens, not {problem.seqlen}")
        context = rf.ContextParallel(mesh, layout="zigzag")  # the same chunks on the same ranks
        local = problem.map(context.shard)
        yield Setup(local.leaves(), local.dout, partial(attend, causal=True, group=group), context.unshard)

    return prepare


def zigzag(kernels: Kernels) -> Callable[..., Tensor]:
    """Returns the package's function, which keeps the kernels of its first import.

    Raises:
        Unavailable: the package is not installed.
    """
    name = f"{PACKAGE}.zigzag_ring_flash_attn"
    if name not in sys.modules:
        spec = find_spec(PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            raise Unavailable("not installed")
        package: Any = ModuleType(PACKAGE)  # skips its own __init__, which imports transformers
        package.__path__ = list(spec.submodule_search_locations)
        interface = _interface(kernels)
        with _modules(ModuleType("flash_attn"), interface, package), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the package uses torch.jit.script
            import_module(name)
    return sys.modules[name].zigzag_ring_flash_attn_func


def installed_kernels() -> Kernels:
    """Returns the kernels of FlashAttention-4 if it is installed, else torch's FlashAttention-2."""
    try:
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]
    except ImportError:
        return Kernels("torch's FA2", _torch_forward, _torch_backward)

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Any, ...]:
        return interface._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        out, lse, scale, causal, dq, dk, dv = rest
        given = {"softmax_scale": scale, "causal": causal, "dq": dq, "dk": dk, "dv": dv}
        interface._flash_attn_bwd(q, k, v, out, dout, lse, **given)

    return Kernels("FA4", forward, backward)


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Any, ...]:
    attend = torch.ops.aten._flash_attention_forward
    return attend(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)


def _torch_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    out, lse, scale, causal, *targets = rest
    lengths = None, None, q.shape[1], k.shape[1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    attend = torch.ops.aten._flash_attention_backward
    gradients = attend(dout, q, k, v, out, lse, *lengths, 0.0, causal, *no_dropout, scale=scale)
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient)


def _interface(kernels: Kernels) -> ModuleType:
    """Returns the module `flash_attn.flash_attn_interface` with two functions. The package inspects their parameters.

    The benchmark uses no dropout, window, softcap or ALiBi, and the functions refuse any of them.
    """

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> tuple[Tensor, Tensor, None, None]:
        assert not dropout_p and alibi_slopes is None and max(window_size_left, window_size_right) < 0  # noqa: PT018
        out, lse, *_ = kernels.forward(q, k, v, softmax_scale, causal)
        return out, lse, None, None

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> None:
        assert not dropout_p and alibi_slopes is None and max(window_size_left, window_size_right) < 0  # noqa: PT018
        statistics = out, softmax_lse.contiguous(), softmax_scale, causal
        kernels.backward(dout.contiguous(), q, k, v, *statistics, dq, dk, dv)

    interface: Any = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    return interface


@contextmanager
def _modules(*there: ModuleType) -> Generator[None, None, None]:
    """Lets imports find the modules `there`, and restores the earlier modules at the end."""
    before = {module.__name__: sys.modules.get(module.__name__) for module in there}
    sys.modules.update({module.__name__: module for module in there})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
