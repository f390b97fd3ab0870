"""Launches that repeat: a kernel whose arguments differ only in addresses from an earlier launch skips Triton's checks.

`JITFunction.run` classifies every argument at every launch, to find the compiled kernel. For a kernel with 40 arguments
that takes the host longer than the launch itself. A `Launch` keeps the compiled kernel, the grid and all arguments of
one launch, and repeats it with other tensors of the same layout. The caller's key stands for everything else.

Such launches go through Triton's C launcher (`c_launcher.py`). They were tested in `CHECKED`; under other releases
every launch goes through `JITFunction.run`.
"""

# Triton's drivers have no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ringflash.kernels.c_launcher import Launcher, TensorMaps, launcher_of
from ringflash.kernels.cache_keys import settle
from ringflash.kernels.device_tables import is_capturing, readers

CHECKED = ("3.6", "3.7", "3.8", "3.9")
ALIGNMENT = 16  # bytes; Triton compiles another kernel for an address that is no multiple of this


class Statistics(NamedTuple):
    """Counts of launches since the start of the process.

    Args:
        repeated: launches without `JITFunction.run`.
        prepared: launches that are kept for repeats.
        ordinary: launches that are not kept.
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


def current_stream(device: torch.device) -> int:
    """Returns the handle of the current stream of a GPU; `torch.cuda.current_stream` takes ten times as long."""
    return driver.active.get_current_stream(device.index)


class Launches:
    """Launches of one kernel by key: the `most` recent keys, the oldest of which is dropped first."""

    def __init__(self, most: int = 256) -> None:
        self._known: dict[Hashable, Launch] = {}
        self._compiled: dict[Hashable, Any] = {}
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
        variant: Hashable = None,
    ) -> None:
        """Launches `kernel`, and keeps the launch for calls of `key`.

        Args:
            key: everything that decides on the launch, except the addresses of `tensors`; None keeps nothing.
            kernel: a `triton.jit` or `gluon.jit` function.
            grid: number of programs in each dimension.
            arguments: values of all parameters of the kernel, in their order.
            options: launch options, such as num_warps.
            tensors: tensors that change with each call. A launch that reads any other tensor is not kept.
            tables: tensors, or tuples with tensors, that are the same in all calls of `key`.
            note: a value that the caller needs to repeat the launch.
            variant: all that decides on the compiled kernel besides dtypes, alignments and the width of integers. A
                launch of a known variant, such as with other documents, skips `JITFunction.run`. None: unknown.
        """
        settle(kernel)
        repeatable = key is not None and _is_checked() and not is_capturing()
        launch = compiled = known = None
        if repeatable and variant is not None:
            modes = knobs.runtime.debug, knobs.compilation.instrumentation_mode
            known = variant, modes, driver.active.get_current_device(), _specialized(arguments)
            compiled = self._compiled.get(known)
        if compiled is not None and not _has_hooks():
            launch = Launch.of(compiled, grid, arguments, tensors, tables, note)
        if launch is None or not launch(tensors):
            compiled, launch = kernel[grid](*arguments, **options), None
            if repeatable and _was_launched(compiled):
                launch = Launch.of(compiled, grid, arguments, tensors, tables, note)
        if launch is None:
            _counts["ordinary"] += 1
            return
        _counts["prepared"] += 1
        with self._lock:  # autograd runs backwards in a thread of its own
            for kept in (self._known, self._compiled):
                while len(kept) >= self._most:
                    del kept[next(iter(kept))]
            self._known[key] = launch
            if known is not None:
                self._compiled[known] = compiled


class Launch:
    """One launch of a compiled kernel, with the places where the addresses of another call's tensors go.

    Args:
        launcher: the C launcher of the kernel, with its grid.
        grid: number of programs in each dimension.
        template: flat arguments of the launcher, in which those of the fields below are replaced.
        kept: objects that must live as long as this launch: the kernel, and the tables that it reads.
        note: a value of the caller.
    """

    def __init__(self, launcher: Launcher, grid: tuple[int, ...], template: _Template, kept: Any, note: Any) -> None:
        self.grid, self.note = grid, note
        self._launcher, self._kept, self._aligned = launcher, kept, template.aligned
        self._arguments, self._pointers = template.arguments, template.pointers
        self._descriptors, self._tuples = template.descriptors, template.tuples
        self._device, self._stream_of = driver.active.get_current_device(), driver.active.get_current_stream
        self._readers = readers(torch.device("cuda", self._device))

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
        launcher = launcher_of(compiled, (*grid, *[1] * (3 - len(grid))))  # pyright: ignore[reportArgumentType]
        places = {id(x): index for index, x in enumerate(tensors)}
        if launcher is None or len(places) < len(tensors):
            return None
        try:
            template = _Template(arguments, tensors, places, _leaves(tables), compiled)
        except _UnknownTensorError:
            return None
        return Launch(launcher, grid, template, (compiled, tables), note)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Launches the kernel on the current stream, and returns True; False if `tensors` are aligned otherwise."""
        addresses = [x.data_ptr() for x in tensors]
        if [address % ALIGNMENT == 0 for address in addresses] != self._aligned:
            return False
        arguments = self._arguments.copy()
        for index, place in self._pointers:
            arguments[index] = addresses[place]
        for index, place, maps in self._descriptors:
            arguments[index] = maps[addresses[place]]
        for index, fill in self._tuples:
            arguments[index] = fill(addresses)
        stream = self._stream_of(self._device)
        self._readers.add(stream)
        self._launcher(stream, arguments)
        _counts["repeated"] += 1
        return True


class _UnknownTensorError(Exception):
    """A tensor of a launch that no call gives."""


class _Template:
    """Flat arguments of a launch: addresses in place of tensors, and expanded descriptors.

    Args:
        arguments: values of all parameters of the kernel.
        tensors: tensors that change with each call.
        places: the place in `tensors` of each of them, by identity.
        tables: tensors that are the same in all calls.
        compiled: the kernel, which knows the tiles of its descriptors.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        tensors: Sequence[Tensor],
        places: dict[int, int],
        tables: Sequence[Tensor],
        compiled: Any,
    ) -> None:
        self.arguments, self.aligned = list[Any](), [x.data_ptr() % ALIGNMENT == 0 for x in tensors]
        self.pointers, self.descriptors = list[tuple[int, int]](), list[tuple[int, int, TensorMaps]]()
        self.tuples = list[tuple[int, Callable[[Sequence[int]], tuple[Any, ...]]]]()
        self._places, self._kept = places, set(map(id, tables))
        of_tiles = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for value in arguments:
            if _is_descriptor(value):
                self._add_descriptor(value, next(of_tiles, None))
            elif isinstance(value, tuple):
                self._add_tuple(value)
            elif (place := self._place(value)) is not None:
                self.pointers.append((len(self.arguments), place))
                self.arguments.append(None)
            else:
                self.arguments.append(_address_of(value))

    def _place(self, value: Any) -> int | None:
        """Returns the place of a tensor that changes with each call; None for a constant."""
        if not isinstance(value, Tensor) or id(value) in self._kept:
            return None
        if id(value) not in self._places:
            raise _UnknownTensorError
        return self._places[id(value)]

    def _add_descriptor(self, descriptor: Any, metadata: dict[str, Any] | None) -> None:
        if metadata is None:
            raise _UnknownTensorError
        maps, place = TensorMaps(descriptor, metadata), self._place(descriptor.base)
        if place is not None:
            self.descriptors.append((len(self.arguments), place, maps))
        self.arguments += maps.expanded(descriptor.base.data_ptr())

    def _add_tuple(self, value: tuple[Any, ...]) -> None:
        fill = self._filler(value)
        if fill is not None:
            self.tuples.append((len(self.arguments), fill))
        self.arguments.append(None if fill else _address_of(value))

    def _filler(self, value: tuple[Any, ...]) -> Callable[[Sequence[int]], tuple[Any, ...]] | None:
        """Returns the function that makes a tuple like `value` from the addresses of a call; None for a constant."""
        constant, changing = [_address_of(x) for x in value], list[tuple[int, Callable[[Sequence[int]], Any]]]()
        for index, x in enumerate(value):
            if isinstance(x, tuple):
                if (fill := self._filler(x)) is not None:
                    changing.append((index, fill))
            elif (place := self._place(x)) is not None:
                changing.append((index, itemgetter(place)))
            if changing and changing[-1][0] == index:
                constant[index] = None

        def filled(addresses: Sequence[int]) -> tuple[Any, ...]:
            parts = constant.copy()
            for index, fill in changing:
                parts[index] = fill(addresses)
            return tuple(parts)

        return filled if changing else None


def _address_of(value: Any) -> Any:
    """Returns `value` with addresses in place of tensors, in tuples too."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return tuple(map(_address_of, value)) if isinstance(value, tuple) else value


def _specialized(value: Any) -> Hashable:
    """Returns what Triton specialises a kernel for: dtypes and alignments, and whether integers need 64 bits."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, tuple | list):
        return tuple(map(_specialized, value))
    if isinstance(value, int):
        return -(2**31) <= value < 2**31
    return value.base.dtype if _is_descriptor(value) else value is None


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "base") and hasattr(value, "block_shape")


def _leaves(value: Any) -> list[Tensor]:
    """Returns the tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    return []


def _has_hooks() -> bool:
    """Returns whether a profiler wants to see launches; `JITFunction.run` serves it."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a program may have put a function in a chain's place


def _was_launched(compiled: Any) -> bool:
    """Returns whether `compiled` is a kernel on a GPU: not what the interpreter returns, or a compilation alone."""
    return isinstance(compiled, CompiledKernel) and compiled.function is not None


def _is_checked() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in CHECKED and torch.version.hip is None
