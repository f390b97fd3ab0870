"""Masks of transformers models, read off the functions that describe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.masks import Causal, Mask, SlidingWindow

MULTIPLIERS = (2654435761, 3266489917)  # of hashes that spread rows over keys
REMEDY = 'Leave it out, or choose attn_implementation="sdpa" for this model.'


class MaskAsTensor(ArgumentError, AttributeError):
    """A model that computes with its mask, instead of handing it to the attention that was chosen.

    It is an AttributeError too, so that `hasattr` keeps its meaning.

    Args:
        got: what the model does with the mask.
    """

    def __init__(self, got: str) -> None:
        super().__init__(
            "attn_implementation",
            expected="models that use transformers' attention interface",
            got=got,
            remedy='This model computes with the mask itself: choose attn_implementation="sdpa" or "eager" for it, '
            "on one device.",
        )


class MaskRefused(ArgumentError):
    """A mask of a model that no mask of the library equals.

    It is found before any attention, where only the caller of the model's forward knows the context.
    """


@dataclass(frozen=True, eq=False)
class Form:
    """Of a mask: causal or not, in a window or not.

    Args:
        causal: whether rows see no later key.
        window: keys that a row sees, its own included, if causal; else keys to either side. None is all.
    """

    causal: bool
    window: int | None

    @property
    def left(self) -> int | None:
        """Keys before its own that a row sees; None is all."""
        return self.window if self.window is None or not self.causal else self.window - 1


@dataclass(frozen=True, eq=False)
class Asked(Form):
    """The mask of one forward, as the model describes it: its form, and documents or not.

    Under a context rows and keys are the shard's, and so are the documents: a jump in the positions looks like one.

    Args:
        causal: as in `Form`.
        window: as in `Form`.
        seqlen_q: rows.
        seqlen_k: keys; more than rows where a cache holds earlier ones.
        first: index of the first row in the sequence.
        starts: bool (batch | 1, seqlen_q), rows that do not see the row before them.
        resolved: masks of `resolve`, found once a forward instead of once a layer.
    """

    seqlen_q: int
    seqlen_k: int
    first: int
    starts: Tensor
    resolved: list[tuple[tuple[object, ...], Mask | None]] = field(default_factory=list)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: object) -> Any:
        """Raises ArgumentError: a model that adds its mask to scores does not call the attention that was chosen."""
        raise MaskAsTensor(f"mask in {function}")

    def __getattr__(self, name: str) -> Any:
        """Raises ArgumentError for attributes of tensors, and AttributeError for those of Python's protocols."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise MaskAsTensor(f"mask.{name}")

    def __getitem__(self, index: object) -> Any:
        """Raises ArgumentError: no rows or keys can be taken from this mask."""
        raise MaskAsTensor("mask[...]")

    def __invert__(self) -> Any:
        """Raises ArgumentError, as for all operators of tensors."""
        raise MaskAsTensor("an operator on the mask")

    def _operate(self, other: object) -> Any:
        raise MaskAsTensor("an operator on the mask")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operate
    __and__ = __rand__ = __or__ = __ror__ = __lt__ = __le__ = __gt__ = __ge__ = _operate

    def resolve(self, given: tuple[object, ...], find: Callable[[], Mask | None]) -> Mask | None:
        """`find()`, or what it said when `given` were the same objects."""
        for known, mask in self.resolved:
            if all(a is b for a, b in zip(known, given, strict=True)):
                return mask
        mask = find()
        self.resolved.append((given, mask))
        return mask


@dataclass(frozen=True, eq=False)
class Settled(Form):
    """A resolved mask that can be traced: its form, and the mask over the whole sequence."""

    mask: Mask | None


def base_mask(causal: bool, left: int | None) -> Mask | None:
    """Causal or not, with a window that goes `left` keys back, and as many ahead where it is not causal."""
    parts: list[Mask] = [Causal()] if causal else []
    if left is not None:
        parts.append(SlidingWindow(left, None if causal else left))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def describe(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Asked:
    """The entry for `AttentionMaskInterface`: what `mask_function(batch, head, row, key)` shows, without an N x N mask.

    It is asked about the keys beside both ends of what each row should see, and a few elsewhere, ten times N answers,
    so that a mask of another form is noticed. The other arguments of the interface say how to make a dense mask.

    Raises:
        MaskRefused: padding, functions of one's own, a cache with room for more, any other mask.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        remedy = "Cut padding off, or pack sequences into one with position_ids that restart."
        raise MaskRefused("attention_mask", expected="None or all ones", got="padding", remedy=remedy)
    if use_vmap:
        raise MaskRefused("attention_mask", expected="the model's own", got="one with a function", remedy=REMEDY)
    begin, end = int(q_offset), kv_offset + kv_length
    rows = torch.arange(begin, begin + q_length, device=device)
    batches, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)

    def sees(rows: Tensor, keys: Tensor) -> Tensor:
        seen = mask_function(batches, head, rows, keys)
        return seen.expand(torch.broadcast_shapes(seen.shape, batches.shape, keys.shape))

    causal = not bool(sees(rows[:1], rows[:1] + 1).any())
    if causal and begin + q_length != end:
        got = f"rows up to {begin + q_length} and {end} keys"
        raise MaskRefused(
            "past_key_values", expected="a cache of the keys so far", got=got, remedy="Pass a DynamicCache, or none."
        )
    starts = torch.zeros(batch_size, q_length, dtype=torch.bool, device=device)
    if q_length > 1 and (local_size is None or not causal or local_size > 1):
        starts[:, 1:] = ~sees(rows[1:], rows[1:] - 1)
    lo = torch.where(starts, rows, kv_offset).cummax(dim=1).values
    if causal:
        hi = (rows + 1).expand_as(lo)
        lo = lo if local_size is None else torch.maximum(lo, rows - local_size + 1)
    else:
        ends = torch.where(starts, rows, end).roll(-1, dims=1)
        ends[:, -1] = end
        hi = ends.flip(1).cummin(dim=1).values.flip(1)
        if local_size is not None:
            lo, hi = torch.maximum(lo, rows - local_size), torch.minimum(hi, rows + local_size + 1)
    lo, hi = lo.clamp(min=kv_offset), hi.clamp(max=end)
    anywhere = [kv_offset + (rows * factor >> 7) % kv_length for factor in MULTIPLIERS]
    for keys in (lo - 2, lo - 1, lo, hi - 1, hi, hi + 1, *anywhere):
        at = keys.clamp(kv_offset, end - 1)
        if bool((sees(rows, at) == ((at >= lo) & (at < hi))).all()):
            continue
        expected = "causal or full, in a window or not, in documents or not"
        raise MaskRefused("attention_mask", expected=expected, got="a mask of another form", remedy=REMEDY)
    return Asked(causal, local_size, q_length, kv_length, begin, starts)
