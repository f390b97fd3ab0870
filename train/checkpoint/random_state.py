"""States of all ranks' random number generators, apart from the files of a checkpoint because a strategy restores them.

A resumed run continues them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.train.exchange import all_ranks

STEP_STRIDE = 0xBF58476D1CE4E5B9  # odd, so that no two steps share a seed


def collect(device: torch.device, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Returns the generator states of all ranks, (world_size, nbytes) uint8 by device type.

    The types are "cpu" and the type of `device`; `group` must serve CPU tensors.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {name: all_ranks(state, group) for name, state in states.items()}


def restore(states: dict[str, Tensor], rank: int, world_size: int, device: torch.device, step: int) -> None:
    """Sets this rank's generators to the states of `collect`, if the number of ranks and the device type are the same.

    Otherwise the states cannot be restored. Each rank then derives a new seed from its own seed and from `step`. Its
    numbers differ from other ranks' numbers and from the numbers at the start of the run.
    """
    if {*states} != {"cpu", device.type} or len(states["cpu"]) != world_size:
        torch.manual_seed((torch.initial_seed() + STEP_STRIDE * step) % 2**63)
        return
    torch.set_rng_state(states["cpu"][rank].clone())  # torch crashes on a slice of a larger tensor
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type][rank].clone(), device)
