"""Layers of a transformers model as they train: checkpointed, with what they keep in the host's memory, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.train.models.activations import ActivationCheckpointing, HostMemory, recompute


class TrainedLayer:
    """Forward of one layer, in the place of its own; without gradients it is its own.

    In the forward's place alone: FSDP's hooks wrap all of it and gather the weights once for what runs again.

    Args:
        layer: whose first argument is hidden states, whose other tensors all layers share, and which returns a tensor.
        checkpointing: what it keeps.
        host_memory: where it keeps that, with "block"; None is on its device.
    """

    def __init__(
        self, layer: nn.Module, checkpointing: ActivationCheckpointing, host_memory: HostMemory | None = None
    ) -> None:
        self.layer, self.forward = layer, layer.forward
        self.checkpointing: ActivationCheckpointing = checkpointing
        self.host_memory = host_memory
        self.compiled: Callable[..., Tensor] | None = None

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles forward and backward in one piece; all layers of one kind share what is compiled."""
        self.compiled = torch.compile(self._run, backend=backend, fullgraph=True)

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        """The layer's forward."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **keywords)
        if self.host_memory is None:
            return self._train(*args, **keywords)
        shared = (x for x in tree_leaves((args[1:], keywords)) if isinstance(x, Tensor))
        with self.host_memory.hooks(staying=(*self.layer.parameters(), *shared)):
            return self._train(*args, **keywords)

    def _train(self, *args: Any, **keywords: Any) -> Tensor:
        if self.compiled is None:
            return self._run(*args, offload=self.host_memory, **keywords)
        args, keywords = rf.hf.settle(self.layer, args, keywords)
        return self.compiled(*args, **keywords)

    def _run(self, *args: Any, offload: HostMemory | None = None, **keywords: Any) -> Tensor:
        """The layer as it is checkpointed; compiled without `offload`, since the hooks see all that a graph saves."""
        if self.checkpointing == "none":
            return self.forward(*args, **keywords)
        return recompute(self.forward, *args, offload=offload, **keywords)


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of a transformers model that are checkpointed, and so sharded, one by one.

    Raises:
        ConfigError: there are none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            "model",
            expected="layers of transformers' GradientCheckpointingLayer",
            got=f"none in {type(model).__name__}",
            remedy="Shard it in a LightningModule of your own, and call it with ring_context.",
        )
    return layers
