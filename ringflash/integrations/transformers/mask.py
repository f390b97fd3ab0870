"""Masks of transformers models, derived from the mask functions that describe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.masks import Causal, Mask, SlidingWindow

MULTIPLIERS = (2654435761, 3266489917)  # multipliers of the hashes that spread rows over keys
REMEDY = 'Leave it out, or choose attn_implementation="sdpa" for this model.'
PADDED = "Cut padding off, or pack sequences into one with position_ids that restart."


class MaskAsTensor(ArgumentError, AttributeError):
    """Error for a model that computes with its mask instead of passing the mask to the chosen attention.

    The error is an AttributeError too, so that `hasattr` keeps its meaning.

    Args:
        got: the operation of the model on the mask.
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
    """Error for a model's mask that no mask of the library equals.

    It is raised before any attention call, where only the caller of the model's forward knows the context.
    """


@dataclass(frozen=True, eq=False)
class Form:
    """Form of a mask: causal or not, with a sliding window or without.

    Args:
        causal: whether rows see no later key.
        window: if causal, the number of keys that a row sees, its own included; else the number of keys to either
            side. None means all.
    """

    causal: bool
    window: int | None

    @property
    def left(self) -> int | None:
        """Returns the number of keys that a row sees before its own; None means all."""
        return self.window if self.window is None or not self.causal else self.window - 1


@dataclass(frozen=True, eq=False)
class Asked(Form):
    """Mask of one forward as the model describes it: its form, and its documents if it has any.

    Under a context the rows, keys and documents are those of the shard. A jump in the positions of a shard looks like
    the start of a document.

    Args:
        causal: as in `Form`.
        window: as in `Form`.
        seqlen_q: number of rows.
        seqlen_k: number of keys; more than the rows if a cache holds earlier keys.
        first: index of the first row in the sequence.
        starts: bool (batch | 1, seqlen_q) on the CPU, True for rows that do not see the row before them.
        resolved: cache of `resolve`, so that a mask is found once a forward instead of once a layer.
    """

    seqlen_q: int
    seqlen_k: int
    first: int
    starts: Tensor
    resolved: list[tuple[tuple[object, ...], Mask | None]] = field(default_factory=list)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: object) -> Any:
        """Raises ArgumentError: a model that adds its mask to scores does not call the chosen attention."""
        raise MaskAsTensor(f"mask in {function}")

    def __getattr__(self, name: str) -> Any:
        """Raises ArgumentError for attributes of tensors, and AttributeError for attributes of Python's protocols."""
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
        """Returns `find()`, or its earlier result if `given` were the same objects."""
        for known, mask in self.resolved:
            if all(a is b for a, b in zip(known, given, strict=True)):
                return mask
        mask = find()
        self.resolved.append((given, mask))
        return mask


@dataclass(frozen=True, eq=False)
class Settled(Form):
    """Resolved mask that can be traced: its form, and the mask over the whole sequence."""

    mask: Mask | None


def base_mask(causal: bool, left: int | None) -> Mask | None:
    """Returns a mask that is causal or not, with a window of `left` keys back; None means full attention.

    A window without a causal mask goes `left` keys ahead too.
    """
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
    """Describes `mask_function(batch, head, row, key)` without an N x N mask; the entry of `AttentionMaskInterface`.

    The function is evaluated for each row at the keys near both ends of the expected range, and at a few other keys.
    These are about nine times N results, enough to notice a mask of another form. They are read from the device in one
    copy. The other arguments of the interface concern dense masks and are ignored.

    Raises:
        MaskRefused: padding, a custom mask function, a cache with room for more keys, or a mask of another form.
    """
    is_whole = None if attention_mask is None else attention_mask.all()
    if use_vmap:
        _check_whole(is_whole)
        raise MaskRefused("attention_mask", expected="the model's own", got="one with a function", remedy=REMEDY)
    begin, end = int(q_offset), kv_offset + kv_length
    rows = torch.arange(begin, begin + q_length, device=device)
    batches, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)

    def sees(rows: Tensor, keys: Tensor) -> Tensor:
        seen = mask_function(batches, head, rows, keys)
        return seen.expand(torch.broadcast_shapes(seen.shape, batches.shape, keys.shape))

    # The host reads all flags at the end in one copy, so the choice of the causal form is made on the device.
    causal = ~sees(rows[:1], rows[:1] + 1).any()
    starts = torch.zeros(batch_size, q_length, dtype=torch.bool, device=device)
    if q_length > 1:
        apart = ~sees(rows[1:], rows[1:] - 1)
        sees_itself_only = local_size is not None and local_size <= 1  # if it is causal
        starts[:, 1:] = apart & ~causal if sees_itself_only else apart
    lo = torch.where(starts, rows, kv_offset).cummax(dim=1).values
    ends = torch.where(starts, rows, end).roll(-1, dims=1)
    ends[:, -1] = end
    hi = torch.where(causal, rows + 1, ends.flip(1).cummin(dim=1).values.flip(1))
    if local_size is not None:
        lo, hi = torch.maximum(lo, rows - local_size + causal), torch.minimum(hi, rows + local_size + 1)
    lo, hi = lo.clamp(min=kv_offset), hi.clamp(max=end)
    anywhere = [kv_offset + (rows * factor >> 7) % kv_length for factor in MULTIPLIERS]
    tests: list[Tensor] = []
    for keys in (lo - 2, lo - 1, lo, hi - 1, hi, hi + 1, *anywhere):
        at = keys.clamp(kv_offset, end - 1)
        tests.append((sees(rows, at) == ((at >= lo) & (at < hi))).all())
    flags = torch.stack([causal, torch.stack(tests).all(), torch.ones_like(causal) if is_whole is None else is_whole])
    read = torch.cat([flags, starts.flatten()]).cpu()
    is_causal, is_of_form, is_all_ones = map(bool, read[:3])
    _check_whole(is_all_ones)
    if is_causal and begin + q_length != end:
        got = f"rows up to {begin + q_length} and {end} keys"
        raise MaskRefused(
            "past_key_values", expected="a cache of the keys so far", got=got, remedy="Pass a DynamicCache, or none."
        )
    if not is_of_form:
        expected = "causal or full, in a window or not, in documents or not"
        raise MaskRefused("attention_mask", expected=expected, got="a mask of another form", remedy=REMEDY)
    return Asked(is_causal, local_size, q_length, kv_length, begin, read[3:].view(batch_size, q_length))


def _check_whole(is_whole: Tensor | bool | None) -> None:
    if is_whole is not None and not bool(is_whole):
        raise MaskRefused("attention_mask", expected="None or all ones", got="padding", remedy=PADDED)
