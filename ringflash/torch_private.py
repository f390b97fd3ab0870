"""Private parts of torch: the only file of the library and the trainer that uses them.

torch may change these names in any release. Each one says what the library needs it for, and why no public name serves.
All were checked with the releases in `CHECKED`; `tests/test_torch_private.py` fails under any other release, and where
a name no longer behaves as the library needs.

Names on the path of every call are bound to torch's own objects here, so that they cost no Python frame. Benchmarks
set up other implementations of attention, time them and read the profiler by private names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import (
    Store,  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    distributed_c10d,
)
from torch.optim import AdamW
from torch.utils import _python_dispatch, _pytree

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

D = TypeVar("D", bound=dict[Any, Any])

CHECKED = ("2.11", "2.13", "2.15")  # releases of torch; run the tests under another one before adding it

# Operators and automatic differentiation. These names are on the path of every call.

are_transforms_active = torch._C._are_functorch_transforms_active
"""Returns whether a transform of torch.func (vmap, grad, jvp) is running. torch.func has no public query."""

forward_mode_level = partial(getattr, forward_ad, "_current_level")
"""Returns the level of forward-mode differentiation, -1 outside of it.

Public is only `forward_ad.unpack_dual`, a Python function for each tensor. A partial of `getattr` adds no frame.
"""

dispatch_modes = torch._C._len_torch_dispatch_stack
"""Returns the number of active modes that see every operator. There is no public query."""

function_modes = torch._C._len_torch_function_stack
"""Returns the number of active modes of `torch.overrides`. There is no public query."""

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Returns whether torch.autocast is on for any kind of device. The public query takes one kind, and a tensor to ask."""

is_profiling = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Returns whether a profiler of torch records operators. There is no public query."""

jit_tracing_state = torch._C._get_tracing_state
"""Returns the state of torch.jit.trace, None outside of it. The public query is a Python function, soon deprecated."""

assert_async = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]
"""Checks a bool tensor on its device, without waiting for the device; takes the tensor and a message.

A public `assert` or `bool(tensor)` would wait.
"""

copy_each: Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]
copy_each = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage, reportAssignmentType]
"""Copies into each tensor of the first list the tensor of the second list, in one launch if all are dense.

Public functions copy one tensor.
"""

multiply_each: Callable[[Sequence[Tensor], Tensor], None]
multiply_each = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage, reportAssignmentType]
"""Multiplies each tensor of a list by a scalar tensor, in place and in few launches; all are of one device and dtype.

Public functions multiply one tensor.
"""

# Modes and trees.

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of modes that see every operator below autograd. `torch.overrides` offers only modes above autograd."""

tree_leaves = _pytree.tree_leaves
"""Returns the leaves of nested lists, tuples and dicts. torch has no public module for trees."""


def enter_dicts(
    kind: type[D], context_of: Callable[[D], Hashable], make: Callable[[dict[Any, Any], Hashable], D]
) -> None:
    """Makes functions of trees, such as `tree_map`, enter dicts of the class `kind`; call it once for a class.

    They enter a dict itself, but take a dict of a subclass for a leaf. torch has no public module for trees.

    Args:
        kind: subclass of dict. Its entries are read by dict's own methods.
        context_of: returns what `make` needs besides the entries; trees with unequal contexts differ.
        make: returns a new `kind` of entries and of such a context.
    """

    def flatten(x: D) -> tuple[list[Any], tuple[tuple[Any, ...], Hashable]]:
        return [*dict.values(x)], ((*dict.keys(x),), context_of(x))

    def flatten_with_keys(x: D) -> tuple[list[tuple[Any, Any]], Any]:
        values, context = flatten(x)
        return [(_pytree.MappingKey(key), value) for key, value in zip(context[0], values, strict=True)], context

    def unflatten(values: Iterable[Any], context: tuple[tuple[Any, ...], Hashable]) -> D:
        keys, rest = context
        return make(dict(zip(keys, values, strict=True)), rest)

    _pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


# Modules and tensors.


class ShardAdamW(AdamW):
    """AdamW that updates each rank's shards of DTensors as plain tensors, with the same bits.

    For hundreds of small shards the dispatch of DTensors takes the host longer than all of their updates. States stay
    DTensors, as a checkpoint needs them. No public method gives the lists of tensors between their making and the
    update.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        from torch.distributed.tensor import DTensor  # here, because attention alone needs none

        is_complex = super()._init_group(group, *lists)
        pairs = zip(*lists[:2], strict=True)  # parameters and their gradients
        if all(isinstance(p, DTensor) and isinstance(g, DTensor) and p.placements == g.placements for p, g in pairs):
            for tensors in lists:
                tensors[:] = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
        return is_complex


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's own table of its buffers, which writes change.

    A write restores a buffer after any forward. `setattr`, the public way, would make a plain attribute of a buffer
    that the forward has deleted.
    """
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Returns whether `module.compile()` was called. There is no public query."""
    return module._compiled_call_impl is not None


def version_of(x: Tensor) -> int:
    """Returns the number of in-place changes of `x`, which must not be an inference tensor.

    torch's documentation of autograd describes `_version`, but there is no public name for it.
    """
    return x._version


# Streams.

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Returns the handle of the current stream of a GPU. `torch.cuda.current_stream` makes an object, ten times as slow.

Builds of torch without CUDA lack it.
"""

# Process groups.

_BEYOND = 2**40  # no program makes so many groups: its names differ from the names of `numbered_group`


def number_of_groups() -> int:
    """Returns the number of groups of this process, the least number for `numbered_group`."""
    return len(distributed_c10d._world.pg_names)


@contextmanager
def numbered_group(number: int) -> Iterator[None]:
    """Makes torch derive the name of the next group from its ranks and `number` alone.

    With `use_local_synchronization`, torch hashes the ranks and a number of its own into the name of a new group. This
    is the number of groups of the process up to torch 2.13, and a count of all groups ever made in 2.15. Both may
    differ between the ranks. `new_group` takes no name. Both are afterwards as they were, so that the program's own
    groups get the names that they would get without this one.
    """
    world = distributed_c10d._world
    count = world.group_count
    fillers: dict[Any, Any] = {object(): f"ringflash {i}" for i in range(number - len(world.pg_names))}
    world.pg_names.update(fillers)
    world.group_count = _BEYOND + number
    try:
        yield
    finally:
        world.group_count = count
        for filler in fillers:
            del world.pg_names[filler]


def timeouts_of(group: dist.ProcessGroup) -> list[timedelta]:
    """Returns the timeout of each backend of `group`. A public name sets timeouts, but none reads them."""
    return [group._get_backend(device).options._timeout for device in group._device_types]


def set_timeout(options: dist.ProcessGroupNCCL.Options, timeout: timedelta) -> None:
    """Sets the timeout of the options of an NCCL group.

    `new_group` warns if they differ from its argument `timeout`, and the constructor of the options takes no timeout.
    """
    options._timeout = timeout


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Aborts the backend of `group` for tensors on `device`: its kernels stop waiting for peers.

    `ProcessGroup.abort` would abort the other backends of a program's group too. torch 2.15 has a public
    `ProcessGroup.get_backend`, and 2.13 has none.
    """
    group._get_backend(device).abort()


# Memory that the GPUs of a host share. `torch.distributed._symmetric_memory`, itself private, allocates from a pool,
# where the pieces of ranks may start at different offsets. It finds peers through the store of a group only. Only CUDA
# builds of torch support shared memory, so its class is imported where it is used.


def allocate_shared(nbytes: int, device: torch.device) -> Tensor:
    """Returns (nbytes,) uint8 on `device`, in an allocation of its own that peers can map."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def share(own: Tensor, group_name: str) -> SymmetricMemory:
    """Returns the memory of all ranks of a group, each with `own` of `allocate_shared`; a collective of these ranks."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.rendezvous(own, group_name)


def name_group(name: str, rank: int, world_size: int, store: Store) -> dist.ProcessGroup:
    """Makes `share` find `world_size` ranks under `name`, which exchange through `store`.

    The caller keeps the returned group and the store alive. The group has no backend, so it runs no collective.
    """
    from torch._C._distributed_c10d import _register_process_group

    group = dist.ProcessGroup(store, rank, world_size)
    _register_process_group(name, group)  # pyright: ignore[reportArgumentType] - a name is a string
    return group


# Checkpoints.


def storage_info(file: str, start: int, length: int) -> StorageInfo:
    """Returns the place of a tensor's data, `length` bytes of `file`, as `FileSystemReader` expects it in its metadata.

    The reader is public, but the class of the places is not: torch otherwise gets them by unpickling a file.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)
