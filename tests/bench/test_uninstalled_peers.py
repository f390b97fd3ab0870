"""TransformerEngine and MagiAttention, which no machine of the tests has: stand-ins with their interfaces replace them.

They show that the contenders give each rank its rows, and read results in the right order.
"""

from __future__ import annotations

import sys
from enum import Enum, auto
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash.bench.attention.single import Unavailable
from ringflash.bench.common.problem import Problem
from ringflash.bench.ring import magi_attention, transformer_engine
from tests.bench.exactness import largest_error
from tests.helpers.accuracy import as_tensor
from tests.helpers.distributed import run_ranks


class _DotProductAttention:
    """Causal attention of TransformerEngine on a zigzag ring; its results have heads and headdim as one dimension."""

    def __init__(self, nheads: int, headdim: int, **options: Any) -> None:
        self._shape = nheads, headdim, options.pop("num_gqa_groups")
        assert options == {"attention_dropout": 0.0, "qkv_format": "bshd", "attn_mask_type": "causal"}

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, kind: str) -> None:
        assert (ranks, kind) == (list(range(dist.get_world_size())), "p2p")
        self._context = rf.ContextParallel(group, layout="zigzag")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (*q.shape[2:], k.shape[2]) == self._shape
        return as_tensor(rf.ring_attention(q, k, v, self._context, mask=rf.Causal())).flatten(2)


class _Ranges:
    @staticmethod
    def from_ranges(ranges: list[list[int]]) -> list[list[int]]:
        return ranges


class _MaskType(Enum):
    CAUSAL = auto()


class _Key:
    """A runtime key of MagiAttention for one causal sequence, whose rows are striped here."""

    def __init__(self, **options: Any) -> None:
        seqlen = options["total_seqlen_q"]
        assert options["q_ranges"] == options["k_ranges"] == [[0, seqlen]]
        assert options["attn_mask_type"] == [_MaskType.CAUSAL]
        assert seqlen % (options["chunk_size"] * dist.get_world_size()) == options["pad_size"] == 0
        self.context = rf.ContextParallel(options["cp_group_or_mesh"], layout="striped")


def _calc_attn(q: Tensor, k: Tensor, v: Tensor, key: _Key) -> tuple[Tensor, None]:
    q, k, v = (x[None] for x in (q, k, v))
    return as_tensor(rf.ring_attention(q, k, v, key.context, mask=rf.Causal()))[0], None


def _stand_ins() -> dict[str, ModuleType]:
    engine: Any = ModuleType("transformer_engine.pytorch")
    engine.DotProductAttention = _DotProductAttention
    magi: Any = ModuleType("magi_attention.api")
    magi.AttnRanges, magi.AttnMaskType, magi.magi_attn_flex_key = _Ranges, _MaskType, _Key
    magi.calc_attn = _calc_attn
    magi.dispatch = lambda x, key: key.context.shard(x[None])[0]
    magi.undispatch = lambda x, key: key.context.unshard(x[None])[0]
    packages = {name: ModuleType(name) for name in ("transformer_engine", "magi_attention")}
    return packages | {engine.__name__: engine, magi.__name__: magi}


def _problem(seqlen: int) -> Problem:
    return Problem.random(seqlen, 4, 2, 16, torch.device("cpu"), torch.float64)


def _on_stand_ins() -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with (
        mock.patch.dict(sys.modules, _stand_ins()),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(magi_attention, "CHUNK", 8),
    ):
        contenders = [transformer_engine.transformer_engine(mesh), magi_attention.magi_attention(mesh)]
        for contender, tokens in zip(contenders, (4, 16), strict=True):
            with pytest.raises(Unavailable, match=f"multiples of {tokens} tokens, not 50"), contender(_problem(50)):
                pass
        return [largest_error(contender, _problem(48)) for contender in contenders]


def test_rows_and_results_are_in_order() -> None:
    for errors in run_ranks(2, _on_stand_ins):
        assert max(errors) < 1e-12
