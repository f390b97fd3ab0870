"""The control plane of a mesh of two dimensions."""

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

    Tensors travel along one dimension after the other, so no further group of the data's backend is needed.

    Args:
        mesh: the ranks, counted upwards.
        names: of the first dimension and the second.
        places: of each rank (index along the first, index along the second).
        gloo: a gloo group of all ranks.
        faults: what a wait for a rank that does not come becomes.
        optimistic: as of any control plane.
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
        """The sum of `x` over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        for group in (self._columns, self._rows):
            dist.all_reduce(total, group=group)
        return total
