"""Training forward of a transformers model's layers: checkpointed, offloaded to host memory, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ringflash as rf
from ringflash.errors import ConfigError
from ringflash.torch_private import tree_leaves
from ringflash.train.models.activations import BlockActivations, HostMemory, recompute
from ringflash.train.models.decoder import compiled


class TrainedLayer:
    """Training forward of one layer; without gradients it runs the layer's own forward.

    It replaces only the layer's forward, not the module. FSDP's hooks then wrap the whole call and gather the weights
    once, also for recomputation.

    Args:
        layer: layer that takes hidden states first and returns one tensor; all layers share its other tensor arguments.
        activations: choice of the activations that the layer keeps.
        host_memory: host memory of all layers that keep them there.
    """

    def __init__(self, layer: nn.Module, activations: BlockActivations, host_memory: HostMemory) -> None:
        self.layer, self.forward = layer, layer.forward
        self.host_memory = host_memory if activations == "host" else None
        self.compiled: Callable[..., Tensor] | None = None
        # Two functions, since torch bounds the number of compiled graphs of one.
        self._run = self._keep if activations == "none" else self._recompute

    def compile(self, backend: str | Callable[..., Any] = "inductor", options: dict[str, Any] | None = None) -> None:
        """Compiles forward and backward in one piece; all layers of one kind share the compiled code."""
        self.compiled = compiled(self._run, backend, options)

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        """Runs the layer's forward."""
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

    def _keep(self, *args: Any, offload: HostMemory | None = None, **keywords: Any) -> Tensor:
        return self.forward(*args, **keywords)

    def _recompute(self, *args: Any, offload: HostMemory | None = None, **keywords: Any) -> Tensor:
        """Runs the layer, checkpointed. Compiled code omits `offload`: the hooks see all tensors that a graph saves."""
        return recompute(self.forward, *args, offload=offload, **keywords)


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Returns the layers of a transformers model that are checkpointed, and therefore sharded, one by one.

    Raises:
        ConfigError: the model has none.
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
