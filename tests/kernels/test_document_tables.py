"""Tables of packed documents that kernels make from cumulative lengths, compared with those of the host."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.kernels import document_tables as document_tables_module
from ringflash.kernels.contract import ScoreConfig, TileProblem, Tiling
from ringflash.kernels.document_tables import rising_ends
from ringflash.kernels.eager.backend import EagerBackend
from ringflash.kernels.hopper.backend import HOPPER as HOPPER_BACKEND
from ringflash.kernels.hopper.calls import packed_tilings
from ringflash.kernels.hopper.calls import tiling as tiling_of
from ringflash.kernels.hopper.config import ROWS
from ringflash.kernels.hopper.launch import choose_heads_per_wave
from ringflash.kernels.hopper.mask_tables import intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask
from ringflash.ops.packed import packed_form
from tests.helpers.documents import CPU, DEVICE, check_tables, interpreted, made, packing_of


def packed(ends: list[list[int]], causal: bool = True, left: int | None = None, right: int | None = None) -> Mask:
    mask: Mask = rf.Documents(ends)
    if left is not None or right is not None:
        mask &= rf.SlidingWindow(left, right)
    return mask & rf.Causal() if causal else mask


def test_equal_documents_share_tables() -> None:
    tiling = Tiling(64, 64, by_keys=False, ordered=False)
    first, again, other = (made(packed([[0, cut, 130]]), tiling, 130, 130, DEVICE) for cut in (50, 50, 51))
    assert all(x is y for x, y in zip(first, again, strict=True))
    assert not any(x is y for x, y in zip(first, other, strict=True))


@interpreted
def test_documents_keep_few_tables() -> None:
    documents, tiling = rf.Documents([0, 5, 90]), Tiling(64, 64, by_keys=False, ordered=False)
    for seqlen_q in range(1, 90):
        made(documents, tiling, seqlen_q, 90, DEVICE)
    assert documents.tables is not None
    assert len(documents.tables) == document_tables_module.MOST


def test_documents_keep_few_forms() -> None:
    packing, k = packing_of(mask := rf.Documents([0, 5, 24])), torch.empty(1, 24, 1, 16)
    for nheads in range(1, 300):
        assert packed_form(mask, k.expand(1, 24, nheads, 16), k, k, 0.0, "eager", deterministic=False) is None
    assert 0 < len(packing.documents.forms) <= 256


lengths = st.sampled_from([1, 7, 64, 130, 203, 300])
limits = st.none() | st.integers(0, 400)


@settings(max_examples=60)
@given(data=st.data(), seqlen_k=lengths, batch=st.integers(1, 3), causal=st.booleans(), left=limits, right=limits)
def test_tables_are_those_of_the_host(
    data: st.DataObject, seqlen_k: int, batch: int, causal: bool, left: int | None, right: int | None
) -> None:
    inner = st.lists(st.integers(0, seqlen_k), min_size=4, max_size=4).map(sorted)
    ends = [[0, *data.draw(inner), seqlen_k] for _ in range(batch)]
    mask = packed(ends, causal, left, right)
    seqlen_q = data.draw(st.sampled_from([seqlen_k, 1, max(seqlen_k // 3, 1)]))
    own_block, block = data.draw(st.sampled_from([(128, 128), (64, 128), (192, 128), (128, 64), (64, 64)]))
    for by_keys, ordered in ((False, False), (True, False), (True, True)):
        check_tables(mask, seqlen_q, seqlen_k, Tiling(own_block, block, by_keys, ordered))


def test_many_tiles_and_many_documents() -> None:
    ends = [[0, *range(5, 9000, 8), 9000]]
    for tiling in (Tiling(64, 64, False, False), Tiling(64, 128, True, True)):
        check_tables(packed(ends), 9000, 9000, tiling)


@pytest.mark.parametrize(
    ("ends", "right"),
    [
        ([[0, 3, 3, 10]], [1]),
        ([[0, 5, 3, 10]], [0]),
        ([[0, 3, 12, 10]], [0]),
        ([[1, 3, 4, 10]], [0]),
        ([[0, 3, 4, 9]], [0]),
        ([[0, 3, 10], [0, 11, 10], [0, -1, 10]], [1, 0, 0]),
        ([[0, *range(3000), 10]], [0]),
    ],
)
def test_lengths_are_checked_and_never_fall(ends: list[list[int]], right: list[int]) -> None:
    """Runs the kernel that reads lengths on a GPU: whatever it reads, its results describe a mask."""
    given = torch.tensor(ends, device=DEVICE)
    rising, verdict = rising_ends(given, 10)
    assert torch.equal(rising, given.clamp(0, 10).cummax(1).values)
    assert verdict.tolist() == right


def test_packings() -> None:
    documents = rf.Documents([0, 5, 24])
    assert packing_of(documents & rf.Causal() & rf.SlidingWindow(7, 3))[:2] == (7, 0)
    assert packing_of(documents).documents is documents
    for other in (rf.Causal(), rf.KeyPadding([3]), documents & rf.PrefixLM([4]), documents & rf.Documents([0, 24])):
        assert other.packing is None


def test_masks_are_equal_with_and_without_a_check() -> None:
    checked, unchecked = (rf.Documents([0, 5, 24], device_check=check) for check in (True, False))
    for other in (rf.KeyPadding([24]), rf.Causal() & rf.PrefixLM([3]), unchecked):
        assert checked & other == unchecked & other
        assert (checked & other).spec[0] == (unchecked & other).spec[0]
    assert checked & unchecked == checked


def test_documents_are_freed_without_garbage_collection() -> None:
    """Their tables are large, and a program may collect garbage rarely."""
    gc.disable()
    try:
        documents = rf.Documents([0, 5, 24])
        mask = rf.Causal() & documents
        assert packing_of(mask).documents is packing_of(documents).documents
        alive = weakref.ref(documents)
        del documents, mask
        assert alive() is None
    finally:
        gc.enable()


@interpreted
@pytest.mark.parametrize("of_capture", [False, True])
def test_a_capture_keeps_lengths_that_it_reads(of_capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a GPU: the lengths of a mask from before a capture must outlive the mask, those in its pool not."""
    monkeypatch.setattr(document_tables_module, "is_capturing", lambda: True)
    monkeypatch.setattr(document_tables_module, "_captured", [])
    monkeypatch.setattr(rf.Documents, "on_gpu", property(lambda documents: documents._given))
    documents = rf.Documents([0, 5, 24])
    documents.of_capture = of_capture
    made(documents, Tiling(64, 64, by_keys=False, ordered=False), 24, 24, CPU)
    alive = weakref.ref(documents._given)
    del documents
    assert (alive() is None) == of_capture


@interpreted
def test_tables_follow_lengths_that_replays_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a mask that a capture made, and that later calls outside of the graph read."""
    monkeypatch.setattr(rf.Documents, "on_gpu", property(lambda documents: documents._given))
    documents, tiling = rf.Documents([0, 5, 24]), Tiling(64, 64, by_keys=False, ordered=False)
    documents.of_capture = True
    for cut in (5, 9):
        documents._given[1] = cut
        bounds, *_ = made(documents, tiling, 24, 24, CPU)
        assert bounds[0, -1].tolist() == [cut, 24]


@interpreted
def test_a_capture_looks_tables_up_while_another_thread_adds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_tables_module, "is_capturing", lambda: True)
    documents = rf.Documents([0, 5, 24])

    class OfAnother:
        def __eq__(self, other: object) -> bool:
            documents.tables[object(), 0] = ()  # pyright: ignore[reportOptionalSubscript]
            return False

        __hash__ = object.__hash__

    documents.tables = {(OfAnother(), 0): (), (OfAnother(), 1): ()}
    made(documents, Tiling(64, 64, by_keys=False, ordered=False), 24, 24, CPU)


def chosen(mask: Mask, seqlen: int, headdim: int, seqlen_q: int | None = None) -> tuple[Tiling, Tiling]:
    q, k = (torch.empty(1, rows, 4, headdim, device="meta") for rows in (seqlen_q or seqlen, seqlen))
    return packed_tilings(q, k, packing_of(mask), ordered=False)


@settings(max_examples=60)
@given(
    data=st.data(),
    unit=st.sampled_from([1, 64, 128, 384]),
    causal=st.booleans(),
    left=st.none() | st.integers(0, 4000),
    headdim=st.sampled_from([64, 128, 256]),
)
def test_rows_that_see_parts_of_tiles_are_known(
    data: st.DataObject, unit: int, causal: bool, left: int | None, headdim: int
) -> None:
    """Compares what the tilings say with the host's tables; kernels that leave a bound out need whole tiles."""
    seqlen = 6 * unit if unit > 1 else 700
    inner = st.lists(st.integers(0, seqlen // unit), max_size=4).map(lambda cuts: [unit * cut for cut in sorted(cuts)])
    ends = [[0, *data.draw(inner), seqlen]]
    mask = packed(ends, causal, left)
    seqlen_q = data.draw(st.sampled_from([seqlen, max(seqlen // 3, 1)]))
    q_chunks, k_chunks = (Chunk(seqlen - seqlen_q, seqlen_q),), (Chunk(0, seqlen),)
    for tiling in chosen(mask, seqlen, headdim, seqlen_q):
        host = intervals(mask, q_chunks, k_chunks, tiling.own_block, tiling.block, CPU, tiling.by_keys, tiling.ordered)
        assert tiling.below >= host.below
        assert tiling.above >= host.above


def test_documents_of_whole_tiles_leave_bounds_out() -> None:
    aligned, other = [0, 256, 1024], [0, 250, 1024]
    forward, backward = chosen(packed([aligned]), 1024, 128)
    assert (forward.below, forward.above, backward.below, backward.above) == (False, True, True, False)
    forward, backward = chosen(packed([aligned], causal=False), 1024, 128)
    assert (forward.below, forward.above, backward.below, backward.above) == (False, False, False, False)
    for tiling in (*chosen(packed([other]), 1024, 128), *chosen(packed([aligned], left=300), 1024, 128)[:1]):
        assert tiling.below
    assert chosen(packed([other]), 1024, 128)[1].above


def test_forwards_are_tiled_as_from_table_spec_the_host() -> None:
    for ends in (range(0, 16385, 2048), range(0, 16385, 512), range(0, 16385, 8192), [0, 16384], [0, 12288, 16384]):
        for causal in (False, True):
            mask = packed([[*ends]], causal)
            problem = TileProblem((Chunk(0, 16384),), (Chunk(0, 16384),), mask, ScoreConfig(1.0))
            config, known = tiling_of(problem, 64, CPU)
            got, _ = chosen(mask, 16384, 64)
            assert (got.own_block, got.below, got.above) == (config.consumers * ROWS, known.below, known.above)
            assert known.skew / 2 <= got.skew <= known.skew * 2


@pytest.mark.parametrize("headdim", [64, 128])
def test_heads_share_waves_as_from_tables_of_the_host(headdim: int) -> None:
    """Compares launches of equal causal documents; a backward that mixed one head more took 3.5% longer."""
    for total, length in itertools.product((8192, 16384, 32768), (512, 2048, 4096)):
        mask, chunks, heads = packed([[*range(0, total + 1, length)]]), (Chunk(0, total),), 16
        for tiling in chosen(mask, total, headdim):
            host = intervals(mask, chunks, chunks, tiling.own_block, tiling.block, CPU, tiling.by_keys)
            ntiles = host.order.numel()
            programs, streamed = min(132, ntiles * heads), 4 * total * headdim
            waves = [min(skew, 2.0) if tiling.by_keys else 1.5 * skew for skew in (tiling.skew, host.skew)]
            got, want = (choose_heads_per_wave(ntiles, heads, streamed, programs, wave) for wave in waves)
            assert got == want


def test_shared_documents_have_a_form_for_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks twice for tiles of masks that share a `Documents`, and of calls that differ otherwise."""
    monkeypatch.setattr(EagerBackend, "packed_tilings", HOPPER_BACKEND.packed_tilings)
    documents, q = rf.Documents([0, 1024, 4096]), torch.empty(1, 4096, 4, 128, dtype=torch.bfloat16)
    shared = [documents, rf.Causal() & documents, rf.Causal() & documents & rf.SlidingWindow(300)]
    rows = [(mask, rows, always) for mask in shared for rows in (4096, 1024) for always in (False, True)]
    for mask, seqlen_q, deterministic in rows * 2:
        form = packed_form(mask, q[:, :seqlen_q], q, q, 0.0, "eager", deterministic=deterministic)
        assert form is not None
        assert (form.left, form.right) == packing_of(mask)[:2]
        assert form.tilings == packed_tilings(q[:, :seqlen_q], q, packing_of(mask), ordered=deterministic)
