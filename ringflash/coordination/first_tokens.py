"""A check that the ranks of a ring cut one sequence: they compare checksums of the first token ids that each has cut.

Ranks with other sequences, as a sampler gives that divides by the world's ranks, would train without an error. The
checksum is a field of one agreement, which ranks make anyway, so that it adds no exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

ID_DTYPES = torch.int32, torch.int64
PERIOD = 65521  # weights of the sum repeat after so many tokens, so that products stay small


class FirstTokens:
    """The first token ids that `ContextParallel.shard` cuts: int32 or int64, with a batch and a sequence dimension.

    Only the first ones are compared: a loader that works ahead may have cut further sequences on some ranks.

    Args:
        compares: whether ranks compare them; False for virtual ranks.
    """

    def __init__(self, *, compares: bool) -> None:
        self.pending: Tensor | None = None  # the checksum, from the first cut to the first agreement after it
        self._compares = compares

    def note(self, x: Tensor, dim: int) -> None:
        """Keeps the checksum of `x`, whole sequences along `dim`, if these are the first token ids.

        On a GPU this waits for nothing. Positions, which have one dimension, are no token ids.
        """
        if not self._compares or torch.compiler.is_compiling() or _is_capturing():
            return
        if type(x) is Tensor and x.dtype in ID_DTYPES and x.ndim > 1 and x.shape[dim] > 1 and not x.is_meta:
            self._compares = False
            values = x.detach().flatten().long()
            self.pending = (values * (torch.arange(values.numel(), device=x.device) % PERIOD + 1)).sum()

    def field(self) -> int | None:
        """Returns the pending checksum as a field of an agreement; None if there is none.

        On a GPU the host waits for the checksum, and a capture of a CUDA graph therefore leaves it out.
        """
        return None if self.pending is None or _is_capturing() else int(self.pending)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
