"""The control plane of a two-dimensional mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringflash.coordination.failures import Faults
from ringflash.coordination.session import ControlPlane, stacked


class MeshControlPlane(ControlPlane):
    """Agreement between the ranks of both dimensions.

    Device tensors travel along one dimension after the other, so the data's backend needs no third group.

    Args:
        mesh: the mesh; its ranks are numbered in ascending order of global rank.
        names: names of the first and the second dimension.
        places: (index along the first dimension, index along the second dimension) of each rank.
        gloo: a gloo group of all ranks of the mesh.
        faults: ends a wait with an error if a rank does not answer.
        optimistic: see `ControlPlane`.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        names: tuple[str, str],
        places: Sequence[tuple[int, int]],
        gloo: dist.ProcessGroup,
        faults: Faults,
        *,
        optimistic: bool,
    ) -> None:
        self._rows, self._columns = (mesh.get_group(name) for name in names)
        self._places = places
        super().__init__(self._rows, gloo, faults, optimistic=optimistic)
        self.rank, self.world_size = dist.get_rank(gloo), dist.get_world_size(gloo)

    def _stack_on_device(self, x: Tensor) -> Tensor:
        of_columns = stacked(stacked(x, self._columns), self._rows)  # (rows, columns, ...)
        return torch.stack([of_columns[place] for place in self._places])

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        for group in (self._columns, self._rows):
            dist.all_reduce(total, group=group)
        return total
