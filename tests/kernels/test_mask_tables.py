"""Intervals of rows, bounds of tiles and the mask tables of the Triton kernels, compared with the dense masks."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.kernels import mask_tables
from ringflash.kernels.mask_tables import (
    CAUSAL,
    FULL,
    LISTED,
    TABLE,
    TileBounds,
    Tiles,
    row_bounds,
    row_intervals,
    visits,
)
from ringflash.kernels.triton.schedule import Programs, make_programs
from ringflash.layouts.layout import LAYOUTS, Chunk, make_layout, positions
from ringflash.masks import Bitmap, Full, Mask
from tests.helpers.strategies import masks, single_masks

SEQLEN = 90
CPU = torch.device("cpu")

listed = masks(SEQLEN).filter(lambda mask: mask.bitmap() is not None)


# Strategies are made once, as in `tests.helpers.strategies`.
layouts, ranks = st.sampled_from(LAYOUTS), [st.integers(0, world - 1) for world in range(1, 5)]


@cache
@st.composite
def hops(draw: st.DrawFn) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Draws chunks of queries and keys: a hop of a ring, or one device with more or fewer queries than keys."""
    if draw(st.booleans()):
        seqlen_q = draw(st.integers(1, SEQLEN + 20))
        return (Chunk(SEQLEN - seqlen_q, seqlen_q),), (Chunk(0, SEQLEN),)
    world = draw(st.integers(1, 4))
    layout = make_layout(draw(layouts), SEQLEN, world, draw(masks(SEQLEN)))
    return layout.chunks[draw(ranks[world - 1])], layout.chunks[draw(ranks[world - 1])]


def tiles_of(chunks: tuple[Chunk, ...], block: int) -> list[tuple[int, int, Tensor]]:
    """Returns for each tile its chunk's index, its first row in the chunk, and its positions."""
    return [
        (c, begin, torch.arange(chunk.start + begin, min(chunk.start + begin + block, chunk.stop)))
        for c, chunk in enumerate(chunks)
        for begin in range(0, chunk.length, block)
    ]


def lists(given: tuple[np.ndarray, Tensor], sequence: int, own: int, chunk: int) -> tuple[list[int], list[int]]:
    """Returns the full tiles of a list, and the partial tiles."""
    ranges, tiles = given
    full, partial, end = ranges[min(sequence, len(ranges) - 1), own, chunk].tolist()
    return tiles[full:partial].tolist(), tiles[partial:end].tolist()


def check(
    mask: Mask, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]], block_m: int, block_n: int, by_keys: bool, exact: bool
) -> None:
    q_chunks, k_chunks = hop
    got = visits(mask, q_chunks, k_chunks, block_m, block_n, CPU, by_keys)
    sides = tiles_of(q_chunks, block_m), tiles_of(k_chunks, block_n)
    (owns, others), block = (sides[::-1], block_m) if by_keys else (sides, block_n)
    nchunks = len(q_chunks if by_keys else k_chunks)
    assert got[0].shape[1:] == (len(owns), nchunks, 3)
    assert got[1].dtype == torch.int32
    queries = positions(q_chunks, "cpu")
    dense = mask.dense(queries, torch.arange(SEQLEN)).numpy()
    row_of = {position: row for row, position in enumerate(queries.tolist())}
    for sequence in range(mask.batch):
        visible = dense[min(sequence, len(dense) - 1)]
        for i, (_, _, own) in enumerate(owns):
            for chunk in range(nchunks):
                full, partial = lists(got, sequence, i, chunk)
                assert full == sorted(set(full))
                assert partial == sorted(set(partial))
                for _, begin, other in (tile for tile in others if tile[0] == chunk):
                    rows, keys = (other, own) if by_keys else (own, other)
                    first = row_of[int(rows[0])]
                    anything = visible[first : first + len(rows)]
                    seen = anything[:, int(keys[0]) : int(keys[-1]) + 1]
                    assert (begin in full) == bool(seen.all() and len(other) == block)
                    if seen.any() or exact:
                        assert (begin in full or begin in partial) == bool(seen.any())
                    if not anything.any():
                        assert begin not in (*full, *partial)
                    assert not (begin in full and begin in partial)


@settings(deadline=None, max_examples=150)
@given(mask=masks(SEQLEN), hop=hops())
def test_row_intervals_hold_the_keys_that_rows_see(
    mask: Mask, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]]
) -> None:
    rows, keys = positions(hop[0], "cpu"), torch.arange(SEQLEN)
    got, dense = row_intervals(mask, hop[0]), mask.dense(rows, keys).numpy()
    assert got is row_intervals(mask, hop[0])
    assert got.lo.dtype == got.hi.dtype == np.int32
    inside = (keys.numpy() >= got.lo[..., None]) & (keys.numpy() < got.hi[..., None])
    assert (dense <= inside).all()
    if mask.bitmap() is None:
        assert (dense == inside).all()
    assert (got.live == (got.hi > got.lo)).all()
    assert (got.seeing == dense.any(2)).all()
    for sequence, (first, stop) in zip(inside, got.hull(), strict=True):
        seen = sequence.any(0).nonzero()[0]
        assert (seen[[0, -1]].tolist() == [first, min(stop, SEQLEN) - 1]) if len(seen) else first >= stop
    own = (got.hi - 1 == rows.clamp(min=-1).numpy()).all() and (got.lo <= rows.clamp(min=0).numpy()).all()
    assert got.ends_at_diagonal == own


@settings(deadline=None, max_examples=150)
@given(
    mask=masks(SEQLEN),
    hop=hops(),
    block_m=st.sampled_from([1, 16, 32, 64]),
    block_n=st.sampled_from([1, 16, 32]),
)
def test_bounds_and_spans_of_tiles(
    mask: Mask, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]], block_m: int, block_n: int
) -> None:
    rows, tiles = row_intervals(mask, hop[0]), Tiles.of(hop[0], block_m)
    got = rows.tiles(tiles)
    spans = got.spans(block_n)
    expected, stored_positions = tiles_of(hop[0], block_m), positions(hop[0], "cpu")
    assert tiles.chunk.tolist() == [chunk for chunk, _, _ in expected]
    assert tiles.offset.tolist() == [offset for _, offset, _ in expected]
    assert tiles.short.tolist() == [len(own) < block_m for _, _, own in expected]
    for i, (_, _, own) in enumerate(expected):
        assert [tiles.start[i], tiles.stop[i]] == [own[0], own[-1] + 1]
        stored = slice(tiles.row[i], tiles.row[i] + len(own))
        assert torch.equal(stored_positions[stored], own)
        for sequence in range(len(rows.lo)):
            lo, hi, seeing = (x[sequence, stored] for x in (rows.lo, rows.hi, rows.seeing))
            assert [got.all_lo[sequence, i], got.all_hi[sequence, i]] == [lo.max(), hi.min()]
            begin, full_begin, full_end, end = spans[sequence, i].tolist()
            assert begin <= full_begin <= full_end <= end
            if not seeing.any():
                assert begin == end
                continue
            assert [got.some_lo[sequence, i], got.some_hi[sequence, i]] == [lo[seeing].min(), hi[seeing].max()]
            assert [begin, end] == [lo[seeing].min() // block_n, -(-hi[seeing].max() // block_n)]
            if full_begin < full_end:
                assert lo.max() <= full_begin * block_n
                assert hi.min() >= full_end * block_n


def test_fully_masked_rows_keep_tiles_from_being_full() -> None:
    lo, hi = np.array([[0, 5, 0, 2]]), np.array([[8, 5, 8, 7]])
    got = TileBounds.of(lo, hi, hi > lo, np.array([0, 2]))
    assert [x.tolist() for x in vars(got).values()] == [[[0, 0]], [[8, 8]], [[5, 2]], [[5, 7]]]
    assert got.spans(1).tolist() == [[[0, 5, 5, 8], [0, 2, 7, 8]]]


def test_bounds_of_masks_are_read_in_one_place() -> None:
    kernels = Path(mask_tables.__file__).parent
    callers = {path.relative_to(kernels) for path in kernels.rglob("*.py") if "mask.bounds(" in path.read_text()}
    assert callers == {Path("mask_tables.py")}


@settings(deadline=None, max_examples=80)
@given(
    mask=listed,
    hop=hops(),
    block_m=st.sampled_from([16, 32, 64]),
    block_n=st.sampled_from([16, 32, 64]),
    by_keys=st.booleans(),
)
def test_visits_agree_with_the_dense_mask(
    mask: Mask, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]], block_m: int, block_n: int, by_keys: bool
) -> None:
    check(mask, hop, block_m, block_n, by_keys, exact=len(mask.parts) == 1)


@settings(deadline=None, max_examples=80)
@given(mask=masks(96), block_m=st.sampled_from([16, 32]), block_n=st.sampled_from([16, 32, 64]))
def test_loads_are_even_where_tiles_are_whole_and_their_queries_see_alike(
    mask: Mask, block_m: int, block_n: int
) -> None:
    chunks = (Chunk(0, 96),)
    seeing = mask.dense(torch.arange(96), torch.arange(96)).any(2)
    tiled = seeing.unflatten(1, (-1, block_m))
    alike = seeing.all() if mask.bitmap() is None else (tiled.all(2) == tiled.any(2)).all()
    got = make_programs(mask, chunks, chunks, block_m, block_n, CPU, by_keys=True)
    assert got.even == (bool(alike) and 96 % block_n == 0)


def shown(
    programs: Programs, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]], block_m: int, block_n: int, by_keys: bool
) -> Tensor:
    """Returns the pairs that the kernels treat as visible: bool (batch or 1, seqlen_q, seqlen_k), in storage order."""
    rows, keys = (positions(chunks, "cpu") for chunks in hop)
    seen = torch.ones(1, len(rows), len(keys), dtype=torch.bool)
    if programs.kind == CAUSAL:
        seen &= (rows >= 0)[:, None] & (keys <= rows[:, None])
    if programs.kind == TABLE:
        lo, hi = (x[..., None] for x in (programs.bounds.lo, programs.bounds.hi))
        seen = (keys >= lo) & (keys < hi)
    seen = (seen.mT if by_keys else seen).numpy()  # small slices of NumPy's take a tenth of the time of torch's
    every, counted = np.ones_like(seen), np.zeros((len(programs.spans), *seen.shape[1:]), dtype=bool)
    block = block_m if by_keys else block_n
    for batch, sequence in enumerate(programs.spans.tolist()):
        for (row, _, count, _), spans in zip(programs.places.tolist(), sequence, strict=True):
            own = slice(row, row + count)
            for begin, full_begin, full_end, end, visible_end, first, _, length in spans:
                for i in range(begin, end, block):
                    masked = i < full_begin or i >= full_end
                    others = slice(first + i, first + min(i + block, visible_end if masked else length))
                    counted[batch, own, others] = (seen if masked else every)[min(batch, len(seen) - 1), own, others]
    shown = torch.from_numpy(counted)
    return shown.mT if by_keys else shown


def documents(seqlen: int, block: int) -> st.SearchStrategy[Mask]:
    """Returns a strategy for causal documents that consist of whole blocks."""
    borders = st.sets(st.integers(1, seqlen // block), max_size=3)
    return borders.map(lambda inner: rf.Causal() & rf.Documents(sorted({0, seqlen} | {block * i for i in inner})))


@settings(deadline=None, max_examples=300)
@given(
    mask=st.one_of(masks(SEQLEN).filter(lambda mask: mask.bitmap() is None), documents(SEQLEN, 16)),
    hop=hops(),
    block_m=st.sampled_from([16, 32]),
    block_n=st.sampled_from([16, 32]),
    by_keys=st.booleans(),
)
def test_spans_and_rules_show_the_dense_mask(
    mask: Mask, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]], block_m: int, block_n: int, by_keys: bool
) -> None:
    programs = make_programs(mask, *hop, block_m, block_n, CPU, by_keys)
    dense = mask.dense(*(positions(chunks, "cpu") for chunks in hop))
    got = shown(programs, hop, block_m, block_n, by_keys)
    assert torch.equal(*torch.broadcast_tensors(got, dense))
    if by_keys and programs.kind == CAUSAL and programs.bounds.kind == TABLE:  # its kernels do not mask unseen keys
        position, count = programs.places[:, 3], programs.places[:, 2]
        meets = (programs.spans[..., 0] < programs.spans[..., 3]).any(2)
        assert (position + count <= programs.bounds.hull[:, 1:])[meets].all()


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (rf.Causal() & rf.Documents([0, 64, 64, 192, 256]), CAUSAL),
        (rf.Causal() & rf.Documents([0, 64, 180, 256]), TABLE),
        (rf.Causal() & rf.SlidingWindow(100), TABLE),
        (rf.Causal() & rf.KeyPadding([256, 100]), TABLE),
        (rf.Documents([0, 64, 256]), TABLE),
    ],
)
def test_no_table_where_the_causal_rule_says_the_same(mask: Mask, kind: int, by_keys: bool) -> None:
    chunks = (Chunk(0, 256),)
    assert make_programs(mask, chunks, chunks, 64, 64, CPU, by_keys).kind == kind


def test_a_bitmap_that_is_too_large() -> None:
    class Wide(rf.Tree):
        def bitmap(self) -> Bitmap:
            return Bitmap(torch.arange(2**16 - 1), torch.ones(1, 1, dtype=torch.bool).expand(2**16, 2**15), 1)

        def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
            return positions_q[None] * 0, positions_q[None] + 1

    with pytest.raises(ArgumentError, match="65536 x 32768 cells"):
        row_bounds(Wide([-1], start=12345), (Chunk(0, 8),), CPU)


def test_lists_that_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringflash.kernels.mask_tables.AT_ONCE", 1)
    mask = rf.Tree([-1, 0, 0, 1], start=50) & rf.KeyPadding([90, 33])
    for by_keys in (False, True):
        check(mask, ((Chunk(0, 90),), (Chunk(0, 40), Chunk(45, 45))), 16, 32, by_keys, exact=False)


def test_tiles_that_no_block_touches_are_in_no_list() -> None:
    blocks = torch.eye(4, dtype=torch.bool)
    blocks[3, 0] = True
    chunks = (Chunk(0, 256),)
    got = visits(rf.BlockSparse(blocks, 64), chunks, chunks, 64, 32, CPU, False)
    assert [lists(got, 0, i, 0) for i in range(4)] == [
        ([0, 32], []),
        ([64, 96], []),
        ([128, 160], []),
        ([0, 32, 192, 224], []),
    ]
    got = visits(rf.BlockSparse(blocks, 64) & rf.Causal(), chunks, chunks, 64, 64, CPU, True)
    assert [lists(got, 0, i, 0) for i in range(4)] == [([192], [0]), ([], [64]), ([], [128]), ([], [192])]


def test_tiles_outside_the_intervals_are_in_no_list() -> None:
    chunks = (Chunk(0, 256),)
    mask = rf.BlockSparse(torch.ones(4, 4, dtype=torch.bool), 64) & rf.Causal() & rf.SlidingWindow(100)
    got = visits(mask, chunks, chunks, 64, 64, CPU, False)
    assert [lists(got, 0, i, 0) for i in range(4)] == [
        ([], [0]),
        ([], [0, 64]),
        ([], [0, 64, 128]),
        ([], [64, 128, 192]),
    ]
    got = visits(mask & rf.SlidingWindow(64), chunks, chunks, 64, 64, CPU, True)
    assert [lists(got, 0, i, 0) for i in range(4)] == [([], [0, 64]), ([], [64, 128]), ([], [128, 192]), ([], [192])]


def test_lists_of_a_mask_that_shows_nothing() -> None:
    chunks = (Chunk(0, 90),)
    got = visits(rf.BlockSparse(torch.zeros(2, 2, dtype=torch.bool), 64), chunks, chunks, 32, 32, CPU, False)
    assert not got[0].any()
    assert got[1].numel() == 1  # kernels need a valid pointer


@settings(deadline=None, max_examples=80)
@given(mask=masks(SEQLEN), hop=hops())
def test_bounds_and_words_say_what_the_dense_mask_says(
    mask: Mask, hop: tuple[tuple[Chunk, ...], tuple[Chunk, ...]]
) -> None:
    rows, keys = (positions(chunks) for chunks in hop)
    got = row_bounds(mask, hop[0], CPU)
    if got.kind in (FULL, CAUSAL):
        assert mask in (Full(), rf.Causal())
        return
    lo, hi = (x.view(-1, len(rows), 1) for x in (got.lo, got.hi))
    assert got.batch_stride == (len(rows) if len(lo) > 1 else 0)
    seen = (keys >= lo) & (keys < hi)
    assert got.kind == (TABLE if mask.bitmap() is None else LISTED)
    if got.kind == LISTED:
        assert got.words.dtype == torch.int32
        assert got.words.is_contiguous()
        columns = keys // got.size
        within = columns < 32 * got.words.shape[1]
        words = got.words[got.bit_rows.long()[:, None], (columns // 32).where(within, 0)]
        seen = seen & within & ((words >> columns % 32) & 1).bool()
    assert torch.equal(seen, mask.dense(rows, keys))


@given(mask=single_masks(SEQLEN).filter(lambda mask: mask.bitmap() is None))
def test_intervals_need_no_words(mask: Mask) -> None:
    got = row_bounds(mask, (Chunk(0, SEQLEN),), CPU)
    assert (got.bit_rows.numel(), got.words.shape, got.size) == (1, (1,), 1)
