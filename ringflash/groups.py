"""The process group of a context, from the mesh or the group that the user passes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringflash.coordination.session import is_alive
from ringflash.errors import ArgumentError
from ringflash.layouts.grid import RING, Grid


def group_of(mesh_or_group: object) -> tuple[dist.ProcessGroup, DeviceMesh | None, Grid]:
    """Returns the group that KV goes around, the mesh if it has a second dimension, and the grid of ranks.

    Raises:
        ArgumentError: no mesh or group, or one that does not exist any more, or that this rank does not belong to.
    """
    if not isinstance(mesh_or_group, DeviceMesh):
        group = _existing(mesh_or_group)
        return group, None, Grid.of(dist.get_world_size(group))
    if mesh_or_group.get_coordinate() is None:
        raise ArgumentError(
            "mesh",
            expected="a mesh that this rank belongs to",
            got=f"ranks {mesh_or_group.mesh.tolist()}",
            remedy="Create the context only on ranks of the mesh.",
            rank=dist.get_rank(),
        )
    if mesh_or_group.ndim == 1:
        return mesh_or_group.get_group(), None, Grid.of(mesh_or_group.size())
    grid = Grid.of_mesh(mesh_or_group)
    return mesh_or_group.get_group(RING), mesh_or_group, grid


def _existing(mesh_or_group: object) -> dist.ProcessGroup:
    if not isinstance(mesh_or_group, dist.ProcessGroup):
        excluded = mesh_or_group == dist.GroupMember.NON_GROUP_MEMBER
        raise ArgumentError(
            "mesh_or_group",
            expected="a DeviceMesh or a process group that this rank belongs to",
            got="a group without this rank" if excluded else repr(mesh_or_group),
            remedy="Create the context only on ranks of the group; dist.group.WORLD has all; without torch.distributed "
            "use flash_attention, or ContextParallel.local(n) for n virtual ranks.",
            rank=dist.get_rank() if dist.is_initialized() else None,
        )
    if not is_alive(mesh_or_group):
        raise ArgumentError(
            "mesh_or_group",
            expected="a process group that exists",
            got="one that was destroyed",
            remedy="Create the context after the group, and anew when the group is.",
        )
    if dist.get_rank(mesh_or_group) < 0:
        raise ArgumentError(
            "mesh_or_group",
            expected="a group that this rank belongs to",
            got=f"a group of ranks {dist.get_process_group_ranks(mesh_or_group)}",
            remedy="Create the context only on ranks of the group.",
            rank=dist.get_rank(),
        )
    return mesh_or_group
