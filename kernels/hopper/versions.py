"""Names of Gluon that differ between versions of Triton, and the private parts that the Hopper kernels use.

Gluon is experimental: releases rename its functions. Triton 3.9 renamed four that these kernels use; all their other
code is the same under every version. `support.py` lists the versions that they were checked with.
"""

# Gluon's DSL is not Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ringflash.kernels.hopper.support import SUPPORTED, release_of

assert release_of(triton.__version__) in SUPPORTED, "the backend asks `support` before it imports these kernels"

_RENAMED = hasattr(tma, "async_load")  # from 3.9 on
copy_to_shared = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
copy_from_shared = tma.async_store if _RENAMED else tma.async_copy_shared_to_global


@builtin
def nbytes(descriptor, _semantic=None):
    """Bytes of a tile of a tensor descriptor."""
    return descriptor.nbytes_per_cta if _RENAMED else descriptor.block_type.nbytes


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """A buffer of shared memory as one of another dtype, shape and layout."""
    method = buffer.reinterpret if _RENAMED else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def reduce_add(descriptor, place, source, _semantic=None):
    """Adds a tile of shared memory to memory, asynchronously as a store; Triton names this from 3.9 on."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, source.handle)
