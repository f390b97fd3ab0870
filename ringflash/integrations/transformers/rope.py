"""RoPE with frequencies that depend on the length of the sequence ("dynamic", "longrope"), on a ring of ranks.

Such modules take the length from the largest position that they get, but a rank has only its own rows. The ranks
therefore agree on the largest position. Each module gets this position as an extra row, which is cut off its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.errors import ArgumentError

BY_LENGTH = ("dynamic", "longrope")


def rotary_modules(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the modules whose RoPE depends on the largest position.

    Raises:
        ArgumentError: the configuration asks for such a RoPE, but no module computes it from positions.
    """
    config: Any = model.config
    kinds = _kinds(config.get_text_config())
    if not kinds:
        return ()
    names = tuple(name for name, module in model.named_modules() if _depends_on_length(module))
    if not names:
        raise ArgumentError(
            "rope_parameters",
            expected="a RoPE that does not depend on length, or modules that compute it from position_ids",
            got=f"{', '.join(kinds)} in {type(model).__name__}, without such modules",
            remedy='Choose a rope_type of one scale, such as "yarn" or "linear".',
        )
    return names


@contextmanager
def largest_position(model: nn.Module, names: Sequence[str], position: int) -> Iterator[None]:
    """Makes the rotary modules `names` compute the frequencies of a sequence with the largest position `position`."""
    handles: list[Any] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(_Append(position), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(_cut))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Append:
    """Forward pre-hook that appends a position to the positions of a rotary module."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(module.forward).bind(*args, **keywords)
        positions: Tensor = bound.arguments["position_ids"]
        last = positions.new_full((*positions.shape[:-1], 1), self.position)
        bound.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
        return bound.args, bound.kwargs


def _cut(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook that cuts off the appended row. Tensors are (..., seqlen, width)."""
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(x[..., :-1, :] for x in output)


def _kinds(config: Any) -> list[str]:
    """Returns the kinds of RoPE in a configuration that depend on length.

    A configuration may have one kind for each layer type.
    """
    found: set[str] = set()
    stack = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            found |= {str(value[n]) for n in ("rope_type", "type") if isinstance(value.get(n), str)}
            stack.extend(value.values())
    return sorted(kind for kind in found if any(each in kind for each in BY_LENGTH))


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    if kinds is None or "position_ids" not in inspect.signature(module.forward).parameters:
        return False
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(each in str(name) for name in names for each in BY_LENGTH)
