"""The control plane of a context: small CPU collectives in which ranks agree before any data moves."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import PeerFailed, RankMismatch

Field = int | float | str
_OK, _FAILED = 0, 1
_WIDTH = 24  # every rank sends the same number of words, whatever it has to say


def _word(value: Field) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)


def odd_ones(values: Sequence[int]) -> list[int]:
    """The ranks whose value is not the most common one."""
    common = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != common]


class ControlPlane:
    """Agreement between the ranks of `group` over gloo.

    A group that has no CPU backend gets a gloo group of the same ranks beside it; creating that is a collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._data = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        has_cpu = "gloo" in dist.get_backend_config(group)
        self._group = group if has_cpu else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def agree(self, fields: Mapping[str, Field], *, free: str) -> list[int]:
        """Compares `fields` over all ranks, all but the integer field `free`, and returns that field's value of each.

        Raises:
            RankMismatch: on every rank, when a field differs.
            PeerFailed: when a rank called `fail` instead.
        """
        words = [_OK, *(_word(value) for value in fields.values())]
        table = self._exchange(words)
        failed = [rank for rank, row in enumerate(table) if row[0] == _FAILED]
        if failed:
            raise PeerFailed(failed, [texts for texts in self._texts("") if texts], rank=self.rank)
        for column, name in enumerate(fields, start=1):
            values = [row[column] for row in table]
            if name != free and len(set(values)) > 1:
                raise RankMismatch(name, self._texts(str(fields[name])), odd_ones(values), rank=self.rank)
        column = list(fields).index(free) + 1
        return [row[column] for row in table]

    def fail(self, error: Exception) -> None:
        """Tells the ranks that are about to agree that this one raised `error`, so that they raise too."""
        table = self._exchange([_FAILED])
        if any(row[0] == _FAILED for row in table):
            self._texts(f"{type(error).__name__}: {error}")

    def gather(self, x: Tensor, rows: list[int], dim: int) -> Tensor:
        """All ranks' `x` joined along `dim` in rank order; rank r's has `rows[r]` entries there."""
        moved = x.movedim(dim, 0).contiguous()
        padded = moved.new_zeros((max(rows), *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        everyone = self.stack(padded.view(torch.uint8)).view(x.dtype)  # bytes: gloo knows few dtypes
        return torch.cat([t[:n] for t, n in zip(everyone, rows, strict=True)]).movedim(0, dim)

    def stack(self, x: Tensor) -> Tensor:
        """All ranks' `x`, contiguous and of one shape and dtype, one after another in rank order: (ranks, ...)."""
        everyone = x.new_empty((self.world_size, *x.shape))
        dist.all_gather(list(everyone.unbind(0)), x, group=self._data)
        return everyone

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._data)
        return total

    def _exchange(self, words: list[int]) -> list[list[int]]:
        assert len(words) <= _WIDTH
        mine = torch.tensor(words + [0] * (_WIDTH - len(words)), dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        return [row.tolist() for row in everyone]

    def _texts(self, text: str) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, text, group=self._group)
        return everyone
