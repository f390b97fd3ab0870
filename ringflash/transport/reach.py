"""Test of peer access between the GPUs of a group's ranks."""

from __future__ import annotations

import json
import platform

import torch

from ringflash.coordination.session import ControlPlane


def obstacle(control: ControlPlane, device: torch.device) -> str | None:
    """Returns the first reason why ranks cannot read each other's memory, or None; a collective.

    The text is the same on every rank.
    """
    own = {"host": platform.node(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}
    ranks = [json.loads(text) for text in control.tell(json.dumps(own))]
    found = [text for text in control.tell(_seen_from(control.rank, device, ranks)) if text]
    return found[0] if found else None


def _seen_from(rank: int, device: torch.device, ranks: list[dict[str, str]]) -> str:
    """Returns the first obstacle between this rank and another; empty if there is none."""
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, other in enumerate(ranks):
        if peer == rank:
            continue
        if other["host"] != ranks[rank]["host"]:
            return f"ranks {rank} and {peer} are on different hosts"
        if other["gpu"] == ranks[rank]["gpu"]:
            return f"ranks {rank} and {peer} share a GPU"
        if other["gpu"] not in visible:
            return f"the GPU of rank {peer} is hidden from rank {rank} (CUDA_VISIBLE_DEVICES)"
        if not torch.cuda.can_device_access_peer(device, visible[other["gpu"]]):
            return f"the GPU of rank {rank} has no peer access to that of rank {peer}"
    return ""
