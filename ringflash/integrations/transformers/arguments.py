"""Arguments of a transformers model's forward on a ring of ranks, checked before the model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError
from ringflash.integrations.transformers.mask import PADDED

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
        ArgumentError: there are labels, or input_ids, position_ids and attention_mask are not of the same shard.
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
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    name, tokens = ("inputs_embeds", embeddings) if ids is None else ("input_ids", ids)
    if isinstance(tokens, Tensor) and tokens.ndim == (2 if name == "input_ids" else 3):
        batch, seqlen = tokens.shape[:2]
        _check_positions(given.get("position_ids"), name, batch, seqlen)
        if given.get("past_key_values") is None:  # the mask of a cache is longer than the rows
            _check_mask(given.get("attention_mask"), seqlen)


def _check_positions(positions: object, name: str, batch: int, seqlen: int) -> None:
    """Checks the shape of positions against tokens (batch, seqlen) of the argument `name`.

    Positions of other kinds, such as those of images in three dimensions, are left to the model.
    """
    if not isinstance(positions, Tensor) or positions.ndim not in (1, 2):
        return
    given = positions.shape[-1]
    if given != seqlen:
        raise ArgumentError(
            "position_ids",
            expected=f"as many positions as {name} has tokens, both of this rank's shard",
            got=f"{seqlen} tokens and {given} positions",
            remedy=f"Cut both: pass context.shard({name}), and context.positions(seqlen)[None] for the seqlen tokens "
            "of the whole sequence.",
        )
    if positions.ndim == 1 or positions.shape[0] not in (1, batch):
        rows = "1" if batch == 1 else f"1 or {batch}"
        raise ArgumentError(
            "position_ids",
            expected=f"({rows}, {seqlen}), as (batch or 1, tokens of the shard)",
            got=tuple(positions.shape),
            remedy="Pass context.positions(seqlen)[None].",
        )


def _check_mask(mask: object, seqlen: int) -> None:
    """Checks the length of a mask of padding against the tokens of the shard."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] == seqlen:
        return
    is_padded = not bool(mask.all())
    raise ArgumentError(
        "attention_mask",
        expected=f"None, or ones for the {seqlen} tokens of this rank's shard",
        got=f"{mask.shape[1]} columns{', with padding' if is_padded else ''}",
        remedy=PADDED if is_padded else "Leave it out: attention follows from the model and position_ids.",
    )


def _takes_shards(model: nn.Module) -> bool:
    return getattr(getattr(model, "loss_function", None), OF_SHARDS, False)
