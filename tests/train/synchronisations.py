"""Finds, on a machine without a GPU, the places of a program at which it would wait for a GPU.

Tensors that a GPU would hold are marked by hand at first: weights, and batches that were moved. Every result of an
operator on a marked tensor is marked too. A read of a marked tensor would wait for all work that the GPU has queued.
`torch.tensor(..., device=...)` would wait too, because its data are not in pinned memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ringflash.torch_private import TorchDispatchMode, tree_leaves

# Attention on a CPU runs other kernels and transports than on a GPU, so what these read says nothing about a GPU.
ATTENTION = ("ringflash.kernels.", "ringflash.ops.", "ringflash.ring.", "ringflash.transport.")
OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
BY_INDEX = {"aten::index", "aten::index_put_"}  # these call nonzero for a bool index
METHODS = {"tolist", "numpy", "cpu", "__array__"}  # torch shows these to modes above autograd only


class Synchronisations:
    """Places that would wait for a GPU.

    Attributes:
        places: "module:line name" of each wait since `counting` was set, in order. Modules are named as they are
            imported, because their files lie where the packages are installed.
        operators: number of calls of each operator on marked tensors since then.
        counting: whether waits and operators are recorded.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.operators: Counter[str] = Counter()
        self.counting = False
        self._marked: dict[int, Any] = {}  # the storages stay alive, so that no other gets the same address

    def mark(self, *values: Any) -> None:
        """Marks the tensors in nested values: a GPU would hold them."""
        for x in tensors(values):
            storage = x.untyped_storage()
            self._marked[storage._cdata] = storage

    def unmark(self, x: Tensor) -> None:
        self._marked.pop(x.untyped_storage()._cdata, None)

    def is_marked(self, *values: Any) -> bool:
        return any(x.untyped_storage()._cdata in self._marked for x in tensors(values))

    def note(self, name: str) -> None:
        if not self.counting:
            return
        frame, place = sys._getframe(1), ""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if f"{module}.".startswith(ATTENTION):
                return
            is_generated = frame.f_code.co_filename.startswith("<")  # as the methods of dataclasses
            if not place and not is_generated and not f"{module}.".startswith((f"{__name__}.", "torch.")):
                place = f"{module}:{frame.f_lineno} {name}"
            frame = frame.f_back
        self.places.append(place)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the operators of the body."""
        with _Methods(self), _Operators(self):
            yield


def tensors(values: Any) -> list[Tensor]:
    """Returns the tensors in nested values; of a sharded tensor this rank's part."""
    found = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return [x._local_tensor if isinstance(x, DTensor) else x for x in found]


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Synchronisations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operators that a sharded tensor calls come here again
        kwargs, name, seen = kwargs or {}, func._schema.name, self._seen
        is_marked = seen.is_marked(args, kwargs)
        by_bool = name in BY_INDEX and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if is_marked and (name in OPERATORS or by_bool):
            seen.note(name)
        result = func(*args, **kwargs)
        if not is_marked:
            return result
        seen.operators[name] += seen.counting
        if name == "aten::copy_" and (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            seen.unmark(args[0])  # a copy to the host that nobody waits for
        elif name.startswith("c10d::"):
            seen.mark(args, kwargs)
        else:
            named = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
            seen.mark(result, [named.get(x.name) for x in func._schema.arguments if x.is_write])
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, seen: Synchronisations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in METHODS and self._seen.is_marked(args[0]):
            self._seen.note(func.__name__)
            if func.__name__ == "cpu":  # the host reads its copy without waiting again
                copy = args[0].clone()
                self._seen.unmark(copy)
                return copy
        if func is torch.tensor and kwargs.get("device") is not None:
            self._seen.note("tensor from the host")  # torch waits for the copy from memory that is not pinned
        return func(*args, **kwargs)
