"""Gluon functions whose names differ between versions of Triton, and all private names of Triton that are used.

Gluon is experimental: releases rename its functions. Triton 3.8 and 3.9 renamed four that these kernels use; all their
other code is the same under every version, but for what `FEW_REGISTERS` changes. `c_launcher.py` lists the releases
that they were checked with.
"""

# Gluon's DSL is not Python to a type checker, and libtriton is a binary.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportMissingImports=false

from __future__ import annotations

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ringflash.kernels.c_launcher import SUPPORTED, release_of

assert release_of(triton.__version__) in SUPPORTED, "`select` asks `fallback.why_not` before it imports these kernels"

# The first name is the newer one; releases between 3.6 and 3.9 brought them at different times.
copy_to_shared = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_from_shared = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# From 3.9 on Triton assembles for sm_90 with ptxas 13, not 12. That one spills what a loop could compute again at each
# step, such as the numbers of a mask's columns. Under these versions the kernels leave less to be kept.
FEW_REGISTERS = gl.constexpr(release_of(triton.__version__) >= (3, 9))

environment_of_compilations = get_cache_invalidating_env_vars  # returns variables that are part of Triton's cache keys


@builtin
def nbytes(descriptor, _semantic=None):
    """Returns the bytes of a tile of a tensor descriptor."""
    return descriptor.nbytes_per_cta if hasattr(descriptor, "nbytes_per_cta") else descriptor.block_type.nbytes


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Returns a buffer of shared memory reinterpreted with another dtype, shape and layout."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def reduce_add(descriptor, place, source, _semantic=None):
    """Adds a tile of shared memory to global memory, asynchronously by TMA; Triton 3.9 has a public name for this."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, source.handle)


@builtin
def halves(pairs, dtype, _semantic=None):
    """Returns the two 16-bit numbers in each int32 of a tensor, as numbers of `dtype`."""
    types = (gl.constexpr(dtype).value,) * 2  # a kernel itself cannot write this tuple
    asm = "mov.b32 {$0, $1}, $2;"
    return gl.inline_asm_elementwise(asm, "=h,=h,r", [pairs], types, is_pure=True, pack=1, _semantic=_semantic)
