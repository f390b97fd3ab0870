"""What a hop computes: which queries meet which keys, and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass

from ringflash.layout import Chunk
from ringflash.masks import Mask
from ringflash.state import LOG2E


@dataclass(frozen=True)
class Meeting:
    """Queries and keys of one hop; both know their global positions from their chunks.

    Args:
        q_chunks: where the rows of q stand, in storage order.
        k_chunks: where the rows of k and v stand.
        mask: which keys a query sees.
        softmax_scale: what q k^T is multiplied with.
        softcap: bound of the scores, softcap * tanh(score / softcap); 0 is none.
    """

    q_chunks: tuple[Chunk, ...]
    k_chunks: tuple[Chunk, ...]
    mask: Mask
    softmax_scale: float
    softcap: float

    @property
    def before_tanh(self) -> float:
        """What q k^T is multiplied with before the tanh; without a softcap there is none."""
        return self.softmax_scale / self.softcap if self.softcap else 1.0

    @property
    def to_base2(self) -> float:
        """What comes next: scores in units of log2, for exp2."""
        return (self.softcap or self.softmax_scale) * LOG2E
