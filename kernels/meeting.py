"""What a hop computes: which queries meet which keys, and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass

from ringflash.layout import Chunk
from ringflash.masks import Mask


@dataclass(frozen=True)
class Meeting:
    """Queries and keys of one hop; both know their global positions from their chunks.

    Args:
        q_chunks: where the rows of q stand, in storage order.
        k_chunks: where the rows of k and v stand.
        mask: which keys a query sees.
        softmax_scale: what q k^T is multiplied with.
    """

    q_chunks: tuple[Chunk, ...]
    k_chunks: tuple[Chunk, ...]
    mask: Mask
    softmax_scale: float
