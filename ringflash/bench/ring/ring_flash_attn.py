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
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.bench.attention.single import Unavailable
from ringflash.bench.common.flash_kernels import Kernels
from ringflash.bench.common.problem import Contender, Problem, Setup

PACKAGE = "ring_flash_attn"


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
