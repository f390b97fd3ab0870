"""Loss of a transformers model without whole logits, and the check that its head permits this.

The logits must be the product of the head's weight with the final states. The check runs the model once and watches it,
because a list of names or configurations would miss new models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringflash.train.models.linear_loss import linear_token_loss
from ringflash.train.models.loss import TokenLosses

LARGEST = 100.0  # largest stand-in logit, beyond the caps that models apply to logits


def why_whole_logits(model: Any) -> str | None:
    """Returns what the model does to its logits besides multiplying final states with its head, or None for nothing.

    Two tokens run through the model in training mode, on the CPU and before anything is sharded. The head must be a
    plain matrix. Its input must equal the output of `base_model`, both in this run and in a separate call of
    `base_model`. The logits must equal the head's output bit for bit. The check replaces the head's output with other
    numbers, so that zero or small weights hide no change.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or head.bias is not None:
        return "has a head that is more than a matrix"
    if base is model:
        return "does not say which part of it comes before its head"
    states: list[Tensor] = []
    inputs: list[Tensor] = []

    def note_states(_module: nn.Module, _args: Any, output: Any) -> None:
        states.append(output.last_hidden_state.clone())

    def replace(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs.append(args[0].clone())
        return _stand_in(output)

    tokens = torch.arange(2, device=head.weight.device)[None]
    given: dict[str, Any] = {"position_ids": tokens, "use_cache": False, "ring_dropout_seed": 0}
    hooks = [base.register_forward_hook(note_states), head.register_forward_hook(replace, prepend=True)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same dropout in both runs
            logits = model(tokens, **given).logits
            torch.manual_seed(0)
            base(tokens, **given)
    finally:
        for hook in hooks:
            hook.remove()
    if len(inputs) != 1 or not all(_same(inputs[0], x) for x in states) or len(states) != 2:
        return "gives its head something else than its last hidden state"
    if not torch.equal(logits.to(inputs[0].dtype), _stand_in(logits.to(inputs[0].dtype))):
        return "changes its logits after its head"
    return None


def states_loss(model: Any, input_ids: Tensor, labels: Tensor, *, each: bool = False, **given: Any) -> TokenLosses:
    """Computes `token_losses(model(input_ids, **given).logits, labels)` without whole logits.

    `why_whole_logits(model)` must be None. Under FSDP it runs in a forward method of `model`, in which the head's
    weight is whole.

    Args:
        model: model with a `base_model` and a head.
        input_ids: (batch, seqlen) int64.
        labels: (batch, seqlen) int64, as in `linear_token_loss`.
        each: as in `linear_token_loss`.
        given: keywords of the model's forward.
    """
    states = model.base_model(input_ids, **given).last_hidden_state
    return linear_token_loss(states, model.get_output_embeddings().weight, labels, each=each)


def _stand_in(logits: Tensor) -> Tensor:
    """Returns distinct numbers of both signs and many sizes."""
    return torch.linspace(-LARGEST, LARGEST, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits)


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns whether `a` equals `b` up to rounding: matrix libraries may sum in another order the next time."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
