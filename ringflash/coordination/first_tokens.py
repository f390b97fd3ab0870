"""A check that the ranks of a ring cut one sequence: they compare checksums of the first token ids that each has cut.

Ranks with other sequences, as a sampler gives that divides by the world's ranks, would train without an error. The
check costs one exchange in one of the first calls of attention, and nothing afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.coordination.session import ControlPlane, outlier_ranks
from ringflash.errors import RankMismatch

PERIOD = 65521  # weights of the sum repeat after so many tokens, so that products stay small
LAST_PASS = 2**12  # where no rank has cut token ids by then, the program cuts its sequences itself


class FirstTokens:
    """The first integers with several rows that `ContextParallel.shard` cuts, until all ranks have compared theirs.

    Only the first ones are compared: a loader that works ahead may have cut further sequences on some ranks.
    """

    def __init__(self, *, compares: bool) -> None:
        """Makes the check; without `compares`, as for virtual ranks, it does nothing."""
        self.due = int(compares)  # number of the pass of attention in which ranks compare; 0: in none
        self._sum: Tensor | None = None

    def note(self, x: Tensor, dim: int) -> None:
        """Keeps a checksum of `x`, the whole sequence along `dim`, if it holds integers and is the first that does.

        On a GPU this waits for nothing.
        """
        is_first = self.due and self._sum is None and not torch.compiler.is_compiling()
        if is_first and type(x) is Tensor and not (x.is_floating_point() or x.dtype == torch.bool) and x.shape[dim] > 1:
            values = x.detach().flatten().long()
            self._sum = (values * (torch.arange(values.numel(), device=x.device) % PERIOD + 1)).sum()

    def compare(self, control: ControlPlane) -> None:
        """Compares the ranks' checksums in a collective, and again at twice as many passes while one rank has none.

        Raises:
            RankMismatch: on every rank, if ranks have cut different integers.
        """
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        own = 0 if self._sum is None or capturing else int(self._sum) or 1
        sums = control.agree_now({"operation": "compare tokens", "tokens": own}, free="tokens")
        self.due = 0 if all(sums) or 2 * self.due > LAST_PASS else 2 * self.due
        if self.due == 0:
            self._sum = None
        common = max(filter(None, sums), key=sums.count, default=0)
        if any(each not in (0, common) for each in sums):
            raise RankMismatch(
                "the first token ids that were cut (checksum)",
                sums,
                outlier_ranks([each or common for each in sums]),
                rank=control.rank,
                remedy="All ranks of a context must cut the same sequences. Give the loader's sampler the rank and "
                "the number of ranks of the data-parallel dimension, not those of the world.",
            )
