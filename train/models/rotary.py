"""Rotary position embeddings: frequencies, their scaling for long sequences, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import ringflash as rf
from ringflash.train.models.config import ModelConfig, RopeScaling


def rotary_frequencies(
    config: ModelConfig, seqlen: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, float]:
    """Returns the radians a position of each pair, (headdim / 2,) float64, and the factor of cosines and sines.

        rope_theta^(-2 i / headdim), scaled by `config.rope_scaling`

    Args:
        config: shape of the decoder.
        seqlen: tokens in the longest whole sequence or document, for "dynamic" scaling: see `scaled_length`.
        device: device of the result.

    Source: Su et al. 2021, "RoFormer"; for the scaling, `RopeScaling` and transformers' modeling_rope_utils.
    """
    index = torch.arange(0, config.headdim, 2, device=device, dtype=torch.float64) / config.headdim
    scaling, theta = config.rope_scaling, config.rope_theta
    if scaling is None:
        return theta**-index, 1.0
    if scaling.rope_type == "linear":
        return theta**-index / scaling.factor, 1.0
    original = scaling.original_max_position_embeddings
    assert original is not None
    if scaling.rope_type == "dynamic":
        if seqlen is not None and seqlen > original:
            longer = scaling.factor * seqlen / original - (scaling.factor - 1)
            theta *= longer ** (config.headdim / (config.headdim - 2))
        return theta**-index, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(theta**-index, scaling, original), 1.0
    return _yarn(theta, index, scaling, original)


def _llama3(frequency: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    turns = original * frequency / (2 * math.pi)  # number of rotations in the original length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def _yarn(theta: float, index: Tensor, scaling: RopeScaling, original: int) -> tuple[Tensor, float]:
    headdim, fast, slow = 2 * index.numel(), scaling.beta_fast or 32, scaling.beta_slow or 1

    def pair_that_turns(times: float) -> float:
        return headdim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, headdim - 1)
    last += 0.001 * (first == last)
    ramp = torch.arange(index.numel(), device=index.device, dtype=torch.float64)
    divided = ((ramp - first) / (last - first)).clamp(0, 1)
    frequency = theta**-index
    return divided * frequency / scaling.factor + (1 - divided) * frequency, _attention_factor(scaling)


def _attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (scaling.mscale * grown + 1) / (scaling.mscale_all_dim * grown + 1)
    return grown + 1


def scaled_length(
    config: ModelConfig, seqlen: int, context: rf.ContextParallel | None = None, documents: rf.Documents | None = None
) -> int | None:
    """Returns the length that "dynamic" scaling uses, the same on every rank; None for other scaling.

    It is the length of the longest document, or without documents of the whole sequence, over all ranks of `context`.
    With the length of its own shard, every rank would rotate by other frequencies.

    Args:
        config: shape of the decoder.
        seqlen: tokens on this rank.
        context: ranks that share the sequence.
        documents: documents packed into the sequence.
    """
    if config.rope_scaling is None or config.rope_scaling.rope_type != "dynamic":
        return None
    if documents is not None:
        ends = documents.spec[1][0]
        return int(ends.diff(dim=-1).max()) if ends.shape[-1] > 1 else 0
    return seqlen if context is None else context.agree({"operation": "rotary length"}, seqlen, rf.Causal())


def rotary_angles(
    config: ModelConfig, position_ids: Tensor, dtype: torch.dtype, seqlen: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of position * frequency, (batch | 1, seqlen, 1, headdim / 2); see `rotary_frequencies`.

    The angles are computed in float64: at position 10^6 a float32 angle is wrong by up to 0.03 radians.
    """
    frequency, factor = rotary_frequencies(config, seqlen, position_ids.device)
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    angle = position_ids[:, :, None, None].double() * frequency
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + headdim / 2]) in the angles' dtype; x (batch, seqlen, nheads, headdim)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
