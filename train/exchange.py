"""Gathering of small tensors from all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_ranks(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers (n,) of this rank into (world_size, n) of all ranks, in rank order."""
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered)
