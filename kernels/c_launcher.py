"""Triton's C launcher of a compiled kernel, without the Python code that `CompiledKernel.run` puts around it.

That code allocates scratch memory, and encodes the TMA descriptor of each tensor at every launch. The kernels here need
no scratch memory. The address of its tensor is all that a descriptor depends on in launches that repeat, and an
allocator returns few addresses in a training step.

The ways to the C function were read in the releases in `SUPPORTED`: 3.6 compiles one for each kernel, later releases
share one that takes a signature. Pointers are passed as numbers, for which the C function asks the driver nothing.
"""

# Triton's drivers have no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from triton.runtime import driver

Grid = tuple[int, int, int]
Launcher = Callable[[Grid, int, Sequence[Any]], Any]  # of the grid, a stream and the flat arguments

# Checked with 3.6.0, 3.7.1, 3.8.0 and 3.9.0. Gluon is experimental too: each release is tried before it is added.
SUPPORTED = ((3, 6), (3, 7), (3, 8), (3, 9))
MOST_ADDRESSES = 256  # addresses of one argument whose descriptors are kept


def release_of(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version such as "3.9.0" or "3.8.0+git1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def launcher_of(compiled: Any) -> Launcher | None:
    """Returns a function that launches `compiled`; None if the kernel needs more than its arguments."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    modes = run.launch_cooperative_grid, run.launch_pdl
    if hasattr(run, "kernel_signature"):
        launch = driver.active.utils.launch
        rest = *modes, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature
        return lambda grid, stream, arguments: launch(*grid, stream, function, *rest, arguments)
    of_kernel = run.launch
    if inspect.isfunction(of_kernel):  # a Python function that expands descriptors, around the C function
        of_kernel = inspect.getclosurevars(of_kernel).nonlocals["launcher"]
    before = *modes, None, None, metadata, None, None, None
    return lambda grid, stream, arguments: of_kernel(*grid, stream, function, *before, *arguments)


class TensorMaps(dict[int, Any]):
    """Encoded TMA descriptors of one argument, by the address of its tensor."""

    def __init__(self, descriptor: Any, metadata: dict[str, Any]) -> None:
        """Keeps the shape and the strides of `descriptor`; `metadata` is what the compiler says of its tiles."""
        super().__init__()
        self._kind, self._metadata = type(descriptor), metadata
        self._attributes = {**vars(descriptor), "base": None}  # keeps no tensor of the first call alive

    def __missing__(self, address: int) -> Any:
        """Encodes the descriptor of a tensor at `address`."""
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        encoded = self.expanded(address)[0]
        self[address] = encoded
        return encoded

    def expanded(self, address: int) -> list[Any]:
        """Returns the arguments that stand for the descriptor: the encoded descriptor, its shape and its strides."""
        descriptor = object.__new__(self._kind)
        vars(descriptor).update(self._attributes, base=_Address(address))
        return _expand()(descriptor, self._metadata)


class _Address:
    """Stands for a tensor where only its address is asked for."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@cache
def _expand() -> Callable[[Any, Any], list[Any]]:
    """Returns Triton's function that expands a descriptor to the arguments of the C function."""
    from triton.backends.nvidia import driver as nvidia

    expand: Callable[..., list[Any]] = nvidia.make_tensordesc_arg
    if len(inspect.signature(expand).parameters) == 2:
        return expand
    return lambda descriptor, metadata: expand(descriptor, metadata, None)  # from 3.8 on
