"""Several ranks on one GPU, which test the symmetric transport's signals, buffers, streams and graphs.

Such a run tests neither links nor speed. It does not test NCCL either: NCCL refuses ranks that share a GPU, so its
collectives stay unused.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - torch documents it

from ringflash.coordination.session import ControlPlane
from ringflash.transport import connect

GPUS = torch.cuda.device_count()
WORLDS = [2, 4, 8] if GPUS == 1 else sorted({2, GPUS}) if GPUS else [2]
TRANSPORTS = ["symmetric"] if GPUS == 1 else ["nccl", "symmetric"]
TURNS = 6  # worlds that share the GPU at a time; each rank takes half a GiB of its memory


def is_shared(world_size: int) -> bool:
    """Returns whether ranks of a world of this size have to share GPUs."""
    return 0 < GPUS < world_size


def _no_obstacle(control: ControlPlane, device: torch.device) -> str | None:
    """Replaces `peer_access_obstacle`, which refuses ranks on one GPU; exchanges texts as the original does."""
    control.tell("shared")
    return None


def init_process_group(backend: str, rank: int, world_size: int, store: Store, timeout: timedelta) -> None:
    """Makes the default group of a test's process; with NCCL the process gets its own GPU or a shared one."""
    device = None
    if backend == "nccl":
        from ringflash.compile_once import compile_once_a_host  # here, because it imports Triton

        compile_once_a_host()
    if backend == "nccl" and is_shared(world_size):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        connect.peer_access_obstacle = _no_obstacle
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"  # bound to no device, so that NCCL stays unused
    elif backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device, rank=rank, world_size=world_size, store=store, timeout=timeout)


def meet() -> None:
    """Waits for all ranks; the barrier uses gloo instead of NCCL if ranks share a GPU."""
    if is_shared(dist.get_world_size()) and dist.get_backend() != "gloo":
        dist.all_reduce(torch.zeros(1, device="cpu"))
    else:
        dist.barrier()


def broadcast(x: Tensor) -> Tensor:
    """Returns rank 0's `x`, sent over gloo if ranks share a GPU."""
    shared = x.is_cuda and is_shared(dist.get_world_size())
    moved = x.cpu() if shared else x.contiguous()
    dist.broadcast(moved, 0)
    return moved.to(x.device)


@contextmanager
def turn(backend: str, world_size: int) -> Iterator[None]:
    """Waits until few other worlds of any test process share the GPU."""
    if not (backend == "nccl" and is_shared(world_size)):
        yield
        return
    for number in cycle(range(TURNS)):
        path = Path(tempfile.gettempdir()) / f"ringflash-one-gpu-{os.getuid()}-{number}"
        with path.open("w") as file:  # closing the file releases its lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            yield
            return
