"""Dropout of attention weights, keyed by global (batch, head, row, column): the same under any layout and world size.

Each weight has one random number of Philox4x32-10: the key is the seed, the counter is (column // 4, row, head, batch),
and the output is number column % 4. Nothing is stored; the backward draws the numbers again. Source: Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"; a test compares with its known answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.errors import ArgumentError

RESOLUTION = 1 << 24  # only the upper 24 bits are compared: every backend holds them exactly in int32
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class Dropout:
    """Drops each attention weight with probability `p` and scales the others by 1 / (1 - p).

    Args:
        p: a probability in [0, 1).
        seed: a whole number, or an int64 tensor of one element on the CPU, from 0 to 2^63 - 1. None draws a seed in
            each call from torch's default CPU generator, so that torch.manual_seed and activation checkpointing work as
            usual; the ranks of a ring must then be seeded alike. While you capture a CUDA graph, only a whole number is
            accepted: kernels take the seed from the host, so every replay drops the same weights.

    Raises:
        ArgumentError: `p` or `seed` has another type or value.
    """

    p: float
    seed: int | Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.p, int | float) or not 0.0 <= self.p < 1.0:
            got = repr(self.p)
            raise ArgumentError("dropout", expected="a probability in [0, 1)", got=got, remedy="0 drops nothing.")
        seed = self.seed
        if isinstance(seed, Tensor):
            if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device.type != "cpu":
                got = f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
                remedy = "Kernels take the seed as a number: keep it on the CPU."
                raise ArgumentError("seed", expected="one int64 on the CPU", got=got, remedy=remedy)
            seed = None if torch.compiler.is_compiling() else int(seed)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63):
            remedy = "Reduce it modulo 2^63."
            raise ArgumentError("seed", expected="a whole number from 0 to 2^63 - 1", got=repr(seed), remedy=remedy)

    def drawn(self) -> Tensor:
        """Returns the seed of one call, int64 on the CPU: shape () for a constant, (1,) if the next call may differ."""
        if self.seed is None:
            return torch.randint(1 << 62, (1,), dtype=torch.int64, device="cpu")
        return self.seed.reshape(1) if isinstance(self.seed, Tensor) else torch.tensor(self.seed, device="cpu")


def number_of(seed: Tensor) -> int:
    """Returns a seed of `Dropout.drawn` as a number.

    Raises:
        ArgumentError: the seed may differ from call to call, and a CUDA graph is being captured.
    """
    if seed.ndim and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        expected = "a whole number as seed while a CUDA graph is captured"
        remedy = (
            "The graph would keep this call's seed and drop the same weights at every replay. Leave attention with "
            "dropout out of the capture, or pass rf.Dropout(p, seed=number) where the same weights are wanted."
        )
        raise ArgumentError("dropout", expected=expected, got="one that may change (drawn, or a tensor)", remedy=remedy)
    return int(seed)


def threshold(p: float) -> int:
    """Returns the bound on the upper 24 bits of a random number below which its weight is dropped."""
    return round(p * RESOLUTION)


def kept(p: float, seed: int, batch: int, nheads: int, rows: Tensor, columns: Tensor, first_head: int = 0) -> Tensor:
    """Returns the mask of kept weights, bool (batch, nheads, rows, columns).

    `rows` and `columns` are global positions; the heads are `nheads` consecutive ones from `first_head` on.
    """
    heads = torch.arange(first_head, first_head + nheads, device=rows.device)[:, None, None]
    batches = torch.arange(batch, device=rows.device)[:, None, None, None]
    fours, which = columns >> 2, torch.arange(len(columns), device=columns.device)
    if not columns.is_cuda:  # `unique` would make the host wait for the GPU, because its size depends on the values
        fours, which = fours.unique(return_inverse=True)
    words = philox([fours, rows[:, None], heads, batches], seed)
    stays = torch.stack([(word >> 8) >= threshold(p) for word in words], -1).flatten(-2)
    return stays[..., which * 4 + (columns & 3)]


def philox(counter: list[Tensor], seed: int) -> list[Tensor]:
    """Computes Philox4x32-10: returns four int64 tensors below 2^32, broadcast from the four tensors of `counter`."""
    c0, c1, c2, c3 = (x & _WORD for x in counter)
    key0, key1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + _KEY_STEPS[0] & _WORD, key1 + _KEY_STEPS[1] & _WORD
    return [c0, c1, c2, c3]


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Returns the upper and lower 32 bits of a product; int64 keeps all 64 bits of it, as a signed number."""
    product = x * factor
    return product >> 32 & _WORD, product & _WORD
