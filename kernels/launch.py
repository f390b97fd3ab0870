"""Launches that repeat: a kernel whose arguments differ only in addresses from an earlier launch skips Triton's checks.

`JITFunction.run` classifies every argument at every launch, to find the compiled kernel. For a kernel with 40 arguments
that takes the host longer than the launch itself. A `Launch` keeps the compiled kernel, the grid and all arguments of
one launch, and repeats it with other tensors of the same layout. The caller's key stands for everything else.

Such launches go through Triton's C launcher (`c_launcher.py`), under the releases that it supports. Under others every
launch goes through `JITFunction.run`.
"""

# Triton's drivers have no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from threading import Lock, get_ident
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ringflash.kernels.c_launcher import SUPPORTED, Launcher, TensorMaps, launcher_of, release_of
from ringflash.kernels.cache_keys import settle
from ringflash.kernels.device_tables import is_capturing, readers

PER_THREAD = 2  # the handle that stands for another stream in each thread, cudaStreamPerThread
ALIGNMENT = 16  # bytes; Triton compiles another kernel for an address that is no multiple of this


def layout(*tensors: Tensor) -> tuple[Hashable, ...]:
    """Returns the shapes, strides and dtypes of tensors, and the device of the first, as a part of a key."""
    return tensors[0].device, *[(x.dtype, x.shape, x.stride()) for x in tensors]


def current_stream(device: torch.device) -> int:
    """Returns the handle of the current stream of a GPU; `torch.cuda.current_stream` takes ten times as long."""
    return driver.active.get_current_stream(device.index)


class Launches:
    """Launches of one kernel by key: the `most` recent keys, the oldest of which is dropped first."""

    def __init__(self, most: int = 256) -> None:
        self._known: dict[Hashable, Launch] = {}
        self._families: dict[Hashable, _Family] = {}
        self._captured: set[Launch] = set()
        self._most, self._lock = most, Lock()

    def find(self, key: Hashable) -> Launch | None:
        """Returns the launch of an earlier call of `key`, if it may be repeated now.

        A launch that a CUDA graph captures is kept for good, and with it the tables that the graph's replays read.
        """
        launch = self._known.get(key)
        if launch is None or has_hooks():
            return None
        if is_capturing():
            self._captured.add(launch)
        return launch

    def repeat(self, key: Hashable, tensors: Sequence[Tensor]) -> bool:
        """Repeats the launch of `key`; returns whether there was one, for tensors that are aligned like these."""
        launch = self.find(key)
        return launch is not None and launch(tensors)

    def bind(
        self,
        key: Hashable,
        family: Hashable,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor],
        tables: Sequence[Any],
        numbers: Sequence[int],
        note: Any = None,
    ) -> bool:
        """Launches the kernel of an earlier `first` of the same family, and keeps the launch for calls of `key`.

        Returns whether there was one. The arguments are those of `first`.
        """
        known = self._families.get(_under_modes(family)) if self._families else None
        if key is None or known is None or has_hooks() or is_capturing():
            return False
        launch = Launch.of(known, grid, tables, numbers, note)
        if launch is None or not launch(tensors):
            return False
        self._keep(key, launch)
        return True

    def first(
        self,
        key: Hashable,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: dict[str, Any],
        tensors: Sequence[Tensor],
        tables: Sequence[Any] = (),
        numbers: range = range(0),
        note: Any = None,
        family: Hashable = None,
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
            numbers: places in `arguments` of integers that Triton compiles no other kernel for.
            note: a value that the caller needs to repeat the launch.
            family: everything that decides on the launch besides `grid`, `tables` and `numbers`; None if unknown. A
                launch for another mask, such as other documents, is one of the same family.
        """
        settle(kernel)
        if observers:
            _observe(None, ())
        if tensors[0].is_cuda:
            readers(tensors[0].device).add(current_stream(tensors[0].device))
        compiled = kernel[grid](*arguments, **options)
        launch = None
        if key is not None and _is_supported() and not is_capturing() and _was_launched(compiled):
            known = _Family.of(compiled, arguments, tensors, tables, numbers)
            if known is not None:
                launch = Launch.of(known, grid, tables, [arguments[place] for place in numbers], note)
                if family is not None and len(set(map(id, _leaves(tables)))) == len(_leaves(tables)):
                    with self._lock:
                        _make_room(self._families, self._most)
                        self._families[_under_modes(family)] = known
        if launch is not None:
            self._keep(key, launch)

    def _keep(self, key: Hashable, launch: Launch) -> None:
        with self._lock:  # autograd runs backwards in a thread of its own
            _make_room(self._known, self._most)
            self._known[key] = launch


def _make_room(kept: dict[Hashable, Any], most: int) -> None:
    """Drops the oldest of `kept` until there is room for another."""
    while len(kept) >= most:
        del kept[next(iter(kept))]


def _under_modes(family: Hashable) -> Hashable:
    """Returns `family` with the modes of Triton that decide on the compiled kernel, and the GPU."""
    modes = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    return family, modes, driver.active.get_current_device()


class Launch:
    """One launch of a compiled kernel, with the places where the addresses of another call's tensors go."""

    def __init__(self, family: _Family, grid: tuple[int, ...], arguments: list[Any], tables: Any, note: Any) -> None:
        """Keeps a launch.

        Args:
            family: the kernel, and the places of arguments.
            grid: number of programs in each dimension.
            arguments: flat arguments of the launcher, in which those of the family's places are replaced.
            tables: tensors that the kernel reads in every launch; they live as long as this object.
            note: a value of the caller.
        """
        self.grid, self.note = grid, note
        x, y, z = (*grid, 1, 1)[:3]
        self._whole_grid = x, y, z
        self._launcher, self._arguments, self._aligned = family.launcher, arguments, family.aligned
        self._kept = family.compiled, tables
        self._pointers, self._descriptors, self._tuples = family.pointers, family.descriptors, family.tuples
        self._tables = tuple([x.data_ptr() for x in _leaves(tables)])
        self._device, self._stream_of = driver.active.get_current_device(), driver.active.get_current_stream
        self._readers = readers(torch.device("cuda", self._device))

    @staticmethod
    def of(
        family: _Family, grid: tuple[int, ...], tables: Sequence[Any], numbers: Sequence[int], note: Any
    ) -> Launch | None:
        """Returns the launch of a family, or None if a number has 64 bits, for which Triton compiles another kernel."""
        if not all(-(2**31) <= number < 2**31 for number in numbers):
            return None
        arguments = family.arguments.copy()
        for index, number in zip(family.numbers, numbers, strict=True):
            arguments[index] = number
        return Launch(family, grid, arguments, tables, note)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Launches the kernel on the current stream, and returns True; False if `tensors` are aligned otherwise."""
        addresses = [x.data_ptr() for x in tensors]
        if [address % ALIGNMENT == 0 for address in addresses] != self._aligned:
            return False
        self.at(addresses, self.stream())
        if observers:
            _observe(self, addresses)
        return True

    def stream(self) -> int:
        """Returns the handle of the current stream of the launch's GPU."""
        return self._stream_of(self._device)

    def at(self, addresses: Sequence[int], stream: int) -> None:
        """Launches the kernel for tensors at `addresses`, which are aligned as those of the first launch."""
        arguments, addresses = self._arguments.copy(), (*addresses, *self._tables)
        for index, place in self._pointers:
            arguments[index] = addresses[place]
        for index, place, maps in self._descriptors:
            arguments[index] = maps[addresses[place]]
        for index, fill in self._tuples:
            arguments[index] = fill(addresses)
        self._readers.add(stream)
        self._launcher(self._whole_grid, stream, arguments)


class Memory(NamedTuple):
    """Device memory that a call takes from a supply instead of allocating it, such as the counter of a launch.

    Args:
        owner: an object that must live until the call has launched its kernels.
        address: where the memory begins.
    """

    owner: object
    address: int


Supply = Callable[[], Memory | None]  # None: not on the current stream


class Observer(Protocol):
    """An object that notes the launches of one thread."""

    def launched(self, launch: Launch | None, addresses: Sequence[int]) -> None:
        """Takes a launch and the addresses of its tensors; None for a launch by Triton's run."""
        ...

    def supplied(self, supply: Supply, address: int, nbytes: int) -> None:
        """Takes memory that a launch needs, and the function that supplies such memory."""
        ...


observers: dict[int, Observer] = {}  # by thread


def _observe(launch: Launch | None, addresses: Sequence[int]) -> None:
    observer = observers.get(get_ident())
    if observer is not None:
        observer.launched(launch, addresses)


def refuse_replay() -> None:
    """Notes that this thread's call reads tables of its mask alone, so that replays for other masks would be wrong."""
    _observe(None, ())


def observe_supply(supply: Supply, memory: Tensor) -> None:
    """Notes `memory`, which a launch of this thread reads, and the function that supplies such memory."""
    observer = observers.get(get_ident())
    if observer is not None:
        observer.supplied(supply, memory.data_ptr(), memory.nbytes)


class _UnknownTensorError(Exception):
    """A tensor of a launch that no call gives."""


class _Family:
    """A compiled kernel with flat arguments: addresses in place of tensors, and expanded descriptors.

    Tensors and tables are one list here; a place is an index of it.
    """

    def __init__(
        self,
        compiled: Any,
        launcher: Launcher,
        arguments: Sequence[Any],
        tensors: Sequence[Tensor],
        tables: Any,
        numbers: range,
    ) -> None:
        """Finds the places of a launch; see `Launches.first`.

        Raises:
            _UnknownTensorError: if an argument is a tensor that is neither of `tensors` nor of `tables`.
        """
        self.compiled, self.launcher = compiled, launcher
        self.aligned = [x.data_ptr() % ALIGNMENT == 0 for x in tensors]
        self.arguments, self.numbers = list[Any](), list[int]()
        self.pointers, self.descriptors = list[tuple[int, int]](), list[tuple[int, int, TensorMaps]]()
        self.tuples = list[tuple[int, Callable[[Sequence[int]], tuple[Any, ...]]]]()
        self._places = {id(x): index for index, x in enumerate((*tensors, *_leaves(tables)))}
        of_tiles = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for index, value in enumerate(arguments):
            if index in numbers:
                self.numbers.append(len(self.arguments))
            if _is_descriptor(value):
                self._add_descriptor(value, next(of_tiles, None))
            elif isinstance(value, tuple):
                self._add_tuple(value)
            elif (place := self._place(value)) is not None:
                self.pointers.append((len(self.arguments), place))
                self.arguments.append(None)
            else:
                self.arguments.append(value)

    @staticmethod
    def of(
        compiled: Any, arguments: Sequence[Any], tensors: Sequence[Tensor], tables: Any, numbers: range
    ) -> _Family | None:
        """Returns the family of a launch, or None if the launch cannot be repeated.

        It cannot be if an argument is a tensor that is neither of `tensors` nor of `tables`, such as a copy of an
        input. Nor if two of `tensors` are one object, because later calls may give two, nor if the kernel needs more
        than its arguments.
        """
        launcher = launcher_of(compiled)
        if launcher is None or len(set(map(id, tensors))) < len(tensors):
            return None
        try:
            return _Family(compiled, launcher, arguments, tensors, tables, numbers)
        except _UnknownTensorError:
            return None

    def _place(self, value: Any) -> int | None:
        """Returns the place of a tensor; None for a constant."""
        if not isinstance(value, Tensor):
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
        self.arguments.append(None if fill else _plain(value))

    def _filler(self, value: tuple[Any, ...]) -> Callable[[Sequence[int]], tuple[Any, ...]] | None:
        """Returns the function that makes a tuple like `value` from the addresses of a call; None for a constant."""
        constant, changing = list(_plain(value)), list[tuple[int, Callable[[Sequence[int]], Any]]]()
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


def _plain(value: Any) -> Any:
    """Returns tuples in place of named tuples."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "base") and hasattr(value, "block_shape")


def _leaves(value: Any) -> list[Tensor]:
    """Returns the tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    return []


def has_hooks() -> bool:
    """Returns whether a profiler wants to see launches; `JITFunction.run` serves it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # A program may have put a function in the place of a chain of hooks.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _was_launched(compiled: Any) -> bool:
    """Returns whether `compiled` is a kernel on a GPU: not what the interpreter returns, or a compilation alone."""
    return isinstance(compiled, CompiledKernel) and compiled.function is not None


def _is_supported() -> bool:
    return release_of(triton.__version__) in SUPPORTED and torch.version.hip is None
