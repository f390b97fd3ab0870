"""Arguments of a transformers model's forward on a ring of ranks, checked before the model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError

OF_SHARDS = "_ring_of_shards"  # attribute of a loss function whose results may be added up over shards
Loss = TypeVar("Loss", bound=Callable[..., Any])


def loss_of_shards(loss_function: Loss) -> Loss:
    """Marks a model's `loss_function` that takes shifted labels of a shard, so that `labels` may come to the model."""
    setattr(loss_function, OF_SHARDS, True)
    return loss_function


def check_arguments(
    model: nn.Module, context: ContextParallel, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """Checks the arguments of a model's forward that the model itself would take wrongly, or refuse without a remedy.

    Args:
        model: a transformers model.
        context: the context among the keywords.
        args: positional arguments of the call.
        keywords: keyword arguments of the call.

    Raises:
        ArgumentError: there are labels.
    """
    # A wrong number of arguments is left to the forward itself, whose error names it.
    names = inspect.signature(model.forward).parameters if args else ()
    given = {**dict(zip(names, args, strict=False)), **keywords}
    labels = given.get("labels")
    if labels is not None and context.world_size > 1 and not _takes_shards(model):
        shape = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ArgumentError(
            "labels",
            expected=f"None under a context of {context.world_size} ranks",
            got=f"{shape}: the model would shift them within the shard, and average over the shard alone",
            remedy="Leave labels out, and compute the loss from the logits by "
            "context.token_mean(token_losses, labels).",
        )


def _takes_shards(model: nn.Module) -> bool:
    return getattr(getattr(model, "loss_function", None), OF_SHARDS, False)
