"""Replays: a call that was recorded is made again as its allocations and its launches, without the code between them.

The code between launches allocates, looks up tables and chooses kernels. For a call whose tensors differ from an
earlier one only in addresses and values it always does the same, and takes the host longer than the launches. A
`Recorder` notes what a call allocates and launches. It refuses a call that does anything else, such as a copy of an
input: such calls run their code each time, as do captures of CUDA graphs and calls that a profiler's hooks see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringflash.kernels.device_tables import is_capturing
from ringflash.kernels.launch import ALIGNMENT, Launch, Supply, has_hooks, observers
from ringflash.torch_private import TorchDispatchMode

MOST = 16  # recorded calls of one procedure
MOST_TRIES = 4  # calls of a key that are recorded in vain before its calls are made by their code for good
_SCRATCH_ALIGNMENT = 512  # bytes, as of an allocation of torch

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_VIEWS = {
    _aten.as_strided.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.view.default,
}
_CONVERSIONS = {_aten.to.dtype}  # below autograd, as under torch.compile, one is dispatched even if it does nothing

Results = tuple[Tensor, ...]
Procedure = Callable[..., Results]  # of tensors; every result is an allocation of its own


class Replays:
    """Recorded calls of some procedures by key, the first `MOST` of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Replay | int] = {}  # or how often a call of the key was made by its code

    def __call__(self, key: Hashable, procedure: Procedure, tensors: Sequence[Tensor]) -> Results:
        """Returns `procedure(*tensors)`, by a replay if there is one.

        Args:
            key: everything that decides on the call, except the addresses of `tensors` and their values.
            procedure: the call's code.
            tensors: CUDA tensors on the current device.
        """
        known = self._known.get(key, 0)
        if isinstance(known, int):
            return self._recorded(key, known, procedure, tensors)
        if not (has_hooks() or is_capturing()) and (results := known(tensors)) is not None:
            return results
        return procedure(*tensors)

    def _recorded(self, key: Hashable, tries: int, procedure: Procedure, tensors: Sequence[Tensor]) -> Results:
        """Returns `procedure(*tensors)`, and keeps a replay if the call can be replayed.

        The first call of a key is not recorded: it compiles kernels and makes tables.
        """
        if tries > MOST_TRIES or is_capturing():
            return procedure(*tensors)
        if key not in self._known and len(self._known) >= MOST:
            return procedure(*tensors)
        self._known[key] = tries + 1
        if tries == 0:
            return procedure(*tensors)
        with Recorder(tensors) as recorder:
            results = procedure(*tensors)
        replay = recorder.replay(results)
        if replay is not None:
            self._known[key] = replay
        return results


class Recorder(TorchDispatchMode):
    """Notes the allocations and the launches of the calling thread, and whether it does anything else on a GPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._inputs = [x.data_ptr() for x in tensors]
        distinct = len(set(self._inputs)) == len(self._inputs)  # else an address does not say which tensor it is of
        self._is_complete = distinct and not any(address % ALIGNMENT for address in self._inputs)
        self._allocated: list[Tensor] = []
        self._supplied: list[tuple[Supply, int, int]] = []
        self._launches: list[tuple[Launch, Sequence[int]]] = []

    def __enter__(self) -> Recorder:
        observers[get_ident()] = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        del observers[get_ident()]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._allocated.append(result)
        elif func not in _VIEWS and not (func in _CONVERSIONS and result is args[0]):
            self._is_complete = False
        return result

    def launched(self, launch: Launch | None, addresses: Sequence[int]) -> None:
        """Notes a launch with the addresses of its tensors; None is a launch that cannot be repeated."""
        if launch is None:
            self._is_complete = False
        else:
            self._launches.append((launch, addresses))

    def supplied(self, supply: Supply, address: int, nbytes: int) -> None:
        """Notes memory that `supply` gave; each replay asks for other memory."""
        self._supplied.append((supply, address, nbytes))

    def replay(self, results: Results) -> Replay | None:
        """Returns a replay of the call that returned `results`; None if it cannot be replayed."""
        allocated = {id(x): x for x in self._allocated}
        if not (self._is_complete and self._launches and all(id(x) in allocated for x in results)):
            return None
        returned = set(map(id, results))
        inner, scratch = list[tuple[Tensor, int]](), 0
        for key, x in allocated.items():
            if key not in returned:
                inner.append((x, scratch))
                scratch += -(-x.nbytes // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        of_results = len(self._inputs)
        of_scratch = of_results + len(results)
        spans = [_Span(x.data_ptr(), x.nbytes, of_results + index, 0) for index, x in enumerate(results)]
        spans += [_Span(x.data_ptr(), x.nbytes, of_scratch, offset) for x, offset in inner]
        spans += [
            _Span(begin, nbytes, of_scratch + 1 + index, 0) for index, (_, begin, nbytes) in enumerate(self._supplied)
        ]
        places = {address: _Place(index, 0) for index, address in enumerate(self._inputs)}
        for address in {address for _, addresses in self._launches for address in addresses} - places.keys():
            place = next((span.place(address) for span in spans if span.holds(address)), None)
            if place is None:
                return None
            places[address] = place
        steps = [(launch, [places[address] for address in addresses]) for launch, addresses in self._launches]
        regions = of_scratch + 1 + len(self._supplied)
        forms = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        return Replay(forms, scratch, [supply for supply, *_ in self._supplied], steps, regions)


class _Place(NamedTuple):
    """Bytes from the beginning of a region.

    Regions of a call are numbered: its inputs, its results, its scratch memory, and what each supply gives.
    """

    region: int
    offset: int


class _Span(NamedTuple):
    """Memory of one tensor of a recorded call: `offset` bytes into a region."""

    begin: int
    nbytes: int
    region: int
    offset: int

    def holds(self, address: int) -> bool:
        return self.begin <= address < self.begin + self.nbytes

    def place(self, address: int) -> _Place:
        return _Place(self.region, self.offset + address - self.begin)


class Replay:
    """A recorded call.

    Args:
        results: shape, strides and dtype of each result.
        scratch: bytes that the call needs besides its results.
        supplies: sources of further memory.
        steps: launches, each with the places of its tensors.
        regions: number of regions.
    """

    def __init__(
        self,
        results: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
        scratch: int,
        supplies: Sequence[Supply],
        steps: Sequence[tuple[Launch, Sequence[_Place]]],
        regions: int,
    ) -> None:
        self._results, self._scratch, self._supplies = results, scratch, supplies
        self._inside = sorted({place for _, places in steps for place in places if place.offset})
        numbers = {place: regions + index for index, place in enumerate(self._inside)}
        self._steps = [
            (launch.at, _picker([numbers.get(place, place.region) for place in places])) for launch, places in steps
        ]
        self._stream = steps[0][0].stream

    def __call__(self, tensors: Sequence[Tensor]) -> Results | None:
        """Returns the results for `tensors`; None if they are aligned otherwise, or on a stream without supplies."""
        addresses = [x.data_ptr() for x in tensors]
        for address in addresses:
            if address % ALIGNMENT:
                return None
        supplied = [supply() for supply in self._supplies]
        if None in supplied:
            return None
        allocate = tensors[0].new_empty_strided
        results = tuple([allocate(shape, strides, dtype=dtype) for shape, strides, dtype in self._results])
        scratch = allocate((self._scratch,), (1,), dtype=torch.uint8) if self._scratch else None
        addresses += [x.data_ptr() for x in results]
        addresses.append(0 if scratch is None else scratch.data_ptr())
        addresses += [memory.address for memory in supplied if memory is not None]
        for region, offset in self._inside:
            addresses.append(addresses[region] + offset)
        stream = self._stream()
        for launch, pick in self._steps:
            launch(pick(addresses), stream)
        return results


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    """Returns a function that returns the addresses with these numbers."""
    if len(numbers) == 1:
        return lambda addresses: (addresses[numbers[0]],)
    return itemgetter(*numbers)
