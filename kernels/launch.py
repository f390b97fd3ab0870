"""Launches that repeat: a kernel whose arguments differ only in addresses from an earlier launch skips Triton's checks.

`JITFunction.run` classifies every argument at every launch, to find the compiled kernel. For a kernel with 40 arguments
that takes the host longer than the launch itself. A `Launch` keeps the compiled kernel, the grid and all arguments of
one launch, and repeats it with other tensors of the same layout. The caller's key stands for everything else.

This is the only file that calls a compiled kernel directly. The way is the one by which `JITFunction.run` itself calls
it. It was read and tested in `CHECKED`; under other releases every launch goes through `JITFunction.run`.
"""

# Triton's drivers have no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ringflash.kernels.cache_keys import settle
from ringflash.kernels.device_tables import is_capturing

CHECKED = ("3.6", "3.7", "3.8", "3.9")
ALIGNMENT = 16  # bytes; Triton compiles another kernel for an address that is no multiple of this

_Filler = Callable[[Sequence[Tensor]], Any]  # from the tensors of a call to an argument of its launch


class Statistics(NamedTuple):
    """Counts of launches since the start of the process.

    Args:
        repeated: launches that an earlier launch prepared.
        prepared: launches that went through `JITFunction.run` and can be repeated.
        ordinary: launches that went through `JITFunction.run` and cannot be repeated.
    """

    repeated: int
    prepared: int
    ordinary: int


_counts = {"repeated": 0, "prepared": 0, "ordinary": 0}


def statistics() -> Statistics:
    """Returns how many launches of this process were repeated, prepared and ordinary."""
    return Statistics(**_counts)


def layout(*tensors: Tensor) -> tuple[Hashable, ...]:
    """Returns the shapes and strides of tensors, and the dtype and the device of the first, as a part of a key."""
    first = tensors[0]
    return first.dtype, first.device, *[(x.shape, x.stride()) for x in tensors]


class Launches:
    """Launches of one kernel by key: the `most` recent keys, the oldest of which is dropped first."""

    def __init__(self, most: int = 256) -> None:
        self._known: dict[Hashable, Launch] = {}
        self._captured: set[Launch] = set()
        self._most, self._lock = most, Lock()

    def find(self, key: Hashable) -> Launch | None:
        """Returns the launch of an earlier call of `key`, if it may be repeated now.

        A launch that a CUDA graph captures is kept for good, and with it the tables that the graph's replays read.
        """
        launch = self._known.get(key)
        if launch is None or _has_hooks():
            return None
        if is_capturing():
            self._captured.add(launch)
        return launch

    def repeat(self, key: Hashable, tensors: Sequence[Tensor]) -> bool:
        """Repeats the launch of `key`; returns whether there was one, for tensors that are aligned like these."""
        launch = self.find(key)
        return launch is not None and launch(tensors)

    def first(
        self,
        key: Hashable,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: dict[str, Any],
        tensors: Sequence[Tensor],
        tables: Sequence[Any] = (),
        note: Any = None,
    ) -> None:
        """Launches `kernel`, and keeps the launch for calls of `key`.

        Args:
            key: everything that decides on the launch, except the addresses of `tensors`; None keeps nothing.
            kernel: a `triton.jit` or `gluon.jit` function.
            grid: number of programs in each dimension.
            arguments: values of all parameters of the kernel, in their order.
            options: launch options, such as num_warps.
            tensors: tensors that each call gives anew. A launch that reads any other tensor is not kept.
            tables: tensors, or tuples with tensors, that are the same in all calls of `key`.
            note: a value that the caller needs to repeat the launch.
        """
        settle(kernel)
        compiled = kernel[grid](*arguments, **options)
        launch = None
        if key is not None and _was_launched(compiled) and _is_checked() and not is_capturing():
            launch = Launch.of(compiled, grid, arguments, tensors, tables, note)
        if launch is None:
            _counts["ordinary"] += 1
            return
        _counts["prepared"] += 1
        with self._lock:  # autograd runs backwards in a thread of its own
            while len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            self._known[key] = launch


class Launch:
    """One launch of a compiled kernel, with the places where the tensors of another call go.

    Args:
        compiled: the kernel.
        grid: number of programs in each dimension.
        arguments: values of all parameters; None where a filler makes the value.
        fillers: for each place in `arguments` that changes, the function that makes its value.
        aligned: for each tensor of a call, whether its address is a multiple of `ALIGNMENT`.
        note: a value of the caller.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        fillers: Sequence[tuple[int, _Filler]],
        aligned: Sequence[bool],
        note: Any,
    ) -> None:
        self._compiled = compiled  # which would unload its code if nothing held it
        self.grid, self.note = grid, note
        self._grid = (*grid, 1, 1)[:3]
        self._arguments, self._fillers, self._aligned = arguments, fillers, aligned
        self._device = driver.active.get_current_device()

    @staticmethod
    def of(
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        tensors: Sequence[Tensor],
        tables: Sequence[Any],
        note: Any,
    ) -> Launch | None:
        """Returns the launch, or None if it cannot be repeated.

        It cannot be if an argument is a tensor that is neither of `tensors` nor of `tables`, such as a copy of an
        input. Nor if two of `tensors` are one object, because later calls may give two.
        """
        places = {id(x): index for index, x in enumerate(tensors)}
        if len(places) < len(tensors):
            return None
        kept = set(map(id, _leaves(tables)))
        try:
            fillers = [(index, _filler(value, places, kept)) for index, value in enumerate(arguments)]
        except _UnknownTensorError:
            return None
        constant = [None if filler else value for value, (_, filler) in zip(arguments, fillers, strict=True)]
        changing = [(index, filler) for index, filler in fillers if filler is not None]
        return Launch(compiled, grid, constant, changing, _aligned(tensors), note)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Launches the kernel on the current stream, and returns True; False if `tensors` are aligned otherwise."""
        if _aligned(tensors) != self._aligned:
            return False
        arguments = list(self._arguments)
        for index, filler in self._fillers:
            arguments[index] = filler(tensors)
        stream, compiled = driver.active.get_current_stream(self._device), self._compiled
        compiled.run(*self._grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        _counts["repeated"] += 1
        return True


class _UnknownTensorError(Exception):
    """A tensor of a launch that no call gives."""


def _filler(value: Any, places: dict[int, int], kept: set[int]) -> _Filler | None:
    """Returns the function that makes an argument like `value` from other tensors; None if it is a constant."""
    if isinstance(value, Tensor):
        if id(value) in kept:
            return None
        if id(value) not in places:
            raise _UnknownTensorError
        place = places[id(value)]
        return lambda tensors: tensors[place]
    if _is_descriptor(value):
        base = _filler(value.base, places, kept)
        return None if base is None else _descriptor_filler(value, base)
    if isinstance(value, tuple):
        parts = [(index, _filler(part, places, kept)) for index, part in enumerate(value)]
        return _tuple_filler(value, [(index, part) for index, part in parts if part is not None])
    return None


def _tuple_filler(value: tuple[Any, ...], parts: Sequence[tuple[int, _Filler]]) -> _Filler | None:
    def fill(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        filled = list(value)
        for index, part in parts:
            filled[index] = part(tensors)
        return tuple(filled)

    constant = [None if index in dict(parts) else x for index, x in enumerate(value)]
    value = tuple(constant)  # keeps no tensor of the first call alive
    return fill if parts else None


def _descriptor_filler(value: Any, base: _Filler) -> _Filler:
    """Returns a filler for a tensor descriptor; it copies the first one's attributes, which passed Triton's checks."""
    kind, attributes = type(value), {**vars(value), "base": None}

    def fill(tensors: Sequence[Tensor]) -> Any:
        descriptor = object.__new__(kind)
        vars(descriptor).update(attributes, base=base(tensors))
        return descriptor

    return fill


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "base") and hasattr(value, "block_shape")


def _leaves(value: Any) -> list[Tensor]:
    """Returns the tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    return []


def _aligned(tensors: Sequence[Tensor]) -> list[bool]:
    """Returns for each tensor whether Triton may load whole vectors from its address."""
    return [x.data_ptr() % ALIGNMENT == 0 for x in tensors]


def _has_hooks() -> bool:
    """Returns whether a profiler wants to see launches; `JITFunction.run` serves it."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a program may have put a function in a chain's place


def _was_launched(compiled: Any) -> bool:
    """Returns whether `compiled` is a kernel on a GPU: not what the interpreter returns, or a compilation alone."""
    return isinstance(compiled, CompiledKernel) and compiled.function is not None


def _is_checked() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in CHECKED and torch.version.hip is None
