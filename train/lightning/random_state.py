"""The states of all ranks' random number generators, for a run that goes on where another one stopped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.train.lightning.batch import all_ranks

STEP_STRIDE = 0xBF58476D1CE4E5B9  # odd, so that no two steps have one seed


def collect(device: torch.device, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """(world_size, nbytes) uint8 by device type, "cpu" and that of `device`; `group` serves tensors of the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {name: all_ranks(state, group) for name, state in states.items()}


def restore(states: dict[str, Tensor], rank: int, world_size: int, device: torch.device, step: int) -> None:
    """Sets this rank's generators to what `collect` found, where that was on as many ranks and the same device type.

    Elsewhere no generator can go on where it stopped. The ranks then begin with seeds that follow from their own and
    from `step`, so that numbers are neither those of another rank, nor those that the run began with.
    """
    if {*states} != {"cpu", device.type} or len(states["cpu"]) != world_size:
        torch.manual_seed((torch.initial_seed() + STEP_STRIDE * step) % 2**63)
        return
    torch.set_rng_state(states["cpu"][rank].clone())  # torch crashes on a part of a larger tensor
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type][rank].clone(), device)
