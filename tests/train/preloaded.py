"""Preparations that fork servers make once for all ranks, since each rank that trains would make them again.

Importing this module fills tables that a first Trainer, compilation or model of transformers reads. It uses neither
autograd nor a GPU, which no fork could use then.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from lightning.fabric.utilities import registry

from tests.helpers import one_gpu

# Each of Lightning's Trainers looks for callbacks in the metadata of all installed packages.
kept = cache(entry_points)
kept(group="lightning.pytorch.callbacks_factory")
callbacks: Any = registry
callbacks.entry_points = kept

if not one_gpu.GPUS:  # where there are GPUs, a compilation would ask CUDA for them
    torch.set_num_threads(1)
    with torch.no_grad():
        torch.compile(lambda x: torch.square(x) + 1, backend="eager")(torch.zeros(2))
    torch.compiler.reset()
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        pass
    else:
        get_checkpoint_conversion_mapping("llama")
