"""Decoding steps that were made before: on one device, a step is a look-up, its allocations and its launches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringflash.kernels import select
from ringflash.kernels.backend import Backend
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.decode_step import DecodeTiles, Step, sight_of
from ringflash.masks import Mask
from ringflash.ops import decode_op
from ringflash.ops.prepared import NUMBERS, PLAIN, SCALES, SWITCHES, is_observed

if TYPE_CHECKING:
    from ringflash.kernels.replay import Replays

TILES = (DecodeTiles, type(None))


class DecodeCall(NamedTuple):
    """A checked step of `flash_decode` on one device.

    Args:
        kernels: the backend.
        step: mask and scoring.
        with_lse: whether it returns lse.
        replays: recorded steps; None if the kernels are no launches.
    """

    kernels: Backend
    step: Step
    with_lse: bool
    replays: Replays | None

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float, options: Any, with_lse: bool
    ) -> DecodeCall:
        """Returns the step for tensors like these; `options` are checked `DecodeOptions` without sinks and slopes."""
        config = ScoreConfig.of(q.dtype, softmax_scale, float(options.softcap), alibi_slopes=None, sinks=None)
        sight = sight_of(mask, q.shape[1], k.shape[1])
        step, kernels = Step(config, sight, options.splits, options.tiles), select.choose(options.backend, q)
        step = replace(step, splits=kernels.decode_splits(q, k, v, step), place=object())
        return DecodeCall(kernels, step, with_lse, select.new_replays(kernels, q))

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor | int) -> tuple[Tensor, Tensor]:
        """Returns out and lse, as the operator `decode`."""
        if not isinstance(cache_seqlens, Tensor):
            lengths = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
        elif cache_seqlens.is_cuda and cache_seqlens.is_contiguous():
            lengths = cache_seqlens
        else:
            of_ranks = cache_seqlens.reshape(1, -1)
            decode_op.check_on_cpu(of_ranks, k.shape[1])
            lengths = of_ranks[0].contiguous()  # kernels read them as one vector
        if self.replays is not None and q.get_device() == torch.cuda.current_device():
            out, lse = self.replays((), self._attend, (q, k, v, lengths))
            return out, lse
        with select.kernels_of(q):
            return self._attend(q, k, v, lengths)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.decode(q, k, v, lengths, self.step)


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor | int,
    mask: Mask | None,
    softmax_scale: float | None,
    options: Any,
    return_lse: bool | None,
) -> Hashable:
    """Returns a key of all arguments of a step except the values of its tensors; None for a step to check again.

    The arguments may be wrong, as in `prepared.key_of`. A number in place of lengths is no part of the key.
    """
    if is_observed():
        return None
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None  # refused
    if options.sinks is not None or options.alibi_slopes is not None or options.check_lengths is not False:
        return None
    softcap, of_options = options.softcap, options.return_lse
    kinds = type(softmax_scale), type(softcap), type(of_options), type(return_lse)
    if not (kinds[0] in SCALES and kinds[1] in NUMBERS and kinds[2] in SWITCHES and kinds[3] in SWITCHES):
        return None
    if not (mask is None or isinstance(mask, Mask)) or type(options.backend) is not str or q.is_meta:
        return None
    splits, tiles, newest_rank = options.splits, options.tiles, options.newest_rank
    if type(splits) not in (int, type(None)) or type(newest_rank) is not int or type(tiles) not in TILES:
        return None
    of_lengths: Hashable = None
    if type(cache_seqlens) is Tensor:
        of_lengths = cache_seqlens.shape, cache_seqlens.dtype, cache_seqlens.device
    elif type(cache_seqlens) is not int or k.ndim != 4 or not 0 <= cache_seqlens <= k.shape[1]:
        return None
    layouts = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in (q, k, v)]
    values = softmax_scale, softcap, options.backend, of_options, return_lse, splits, tiles, newest_rank
    return *layouts, of_lengths, mask, kinds, values
