"""The launch that prepares a backward of one hop: delta, both vectors, and the zeros of the sum of dq."""

from __future__ import annotations

import pytest
import torch

from ringflash.kernels.contract import PendingDelta
from ringflash.kernels.hopper.config import dq_tile, padded_rows
from ringflash.kernels.hopper.vectors import prepared_vectors, vectors
from ringflash.kernels.triton.delta import delta as delta_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(("headdim", "columns"), [(64, 64), (40, 64), (72, 96), (96, 96), (128, 128), (136, 256)])
@pytest.mark.parametrize("seqlen", [1, 100, 256])
def test_one_launch_has_the_bits_of_two(
    seqlen: int, headdim: int, columns: int, in_turns: bool, with_dlse: bool
) -> None:
    batch, nheads, factor, padded = 2, 3, -1.7, padded_rows(seqlen)
    out, dout = (torch.randn(batch, seqlen, nheads, headdim, device=DEVICE, dtype=torch.float16) for _ in range(2))
    lse = torch.randn(batch, nheads, seqlen, device=DEVICE)
    dlse = torch.randn(batch, seqlen, nheads, device=DEVICE).transpose(1, 2) if with_dlse else None
    total = torch.full((batch, nheads, padded, columns), torch.nan, device=DEVICE)
    counters = (
        torch.full((total.numel() // dq_tile(columns),), 7, dtype=torch.int32, device=DEVICE) if in_turns else None
    )
    lost = torch.zeros(4, dtype=torch.int32, device=DEVICE)[1:]
    *got, reported = prepared_vectors(dout, lse, PendingDelta(out, dlse), factor, lost, total, counters)
    delta = delta_of(out, dout, dlse)
    *expected, _ = vectors(lse, delta, factor, lost.clone(), None)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6 if headdim == columns else 1e-5, atol=1e-6 * headdim)
    assert reported is lost
    assert not lost.any()
    if counters is None:
        assert not total.any()
    else:
        assert not counters.any()
        assert total.isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("where", ["out", "lse"])
def test_rows_that_are_not_finite_are_reported(where: str) -> None:
    out, dout = (torch.randn(1, 70, 2, 64, device=DEVICE, dtype=torch.float16) for _ in range(2))
    lse = torch.randn(1, 2, 70, device=DEVICE)
    if where == "out":
        out[0, 69, 1, 3] = torch.inf
    else:
        lse[0, 0, 64] = torch.nan
    total, lost = torch.empty(1, 2, 128, 64, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)[1:]
    prepared_vectors(dout, lse, PendingDelta(out, None), 1.0, lost, total, None)
    assert lost[0] == -1
