"""Samples cut from a stream of documents."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringflash.errors import ConfigError, DataError
from ringflash.train.data.packing import fit
from ringflash.train.data.sampler import BatchSampler, ResumableLoader
from ringflash.train.data.samples import TokenSamples, TokenStream, WholeSamples, train_and_held_out
from ringflash.train.data.tokens import HEADER_BYTES, TokenFiles, shard_path, write_dataset
from tests.train.data.corpora import documents, learnt_files, prepared, write_lines

END = 256


def line_of(folder: Path, lengths: list[int], shard_bytes: int = 200) -> TokenStream:
    """Returns a stream of documents of these lengths, each of one repeated byte and the end token."""
    texts = [chr(33 + i % 90) * max(length - 1, 0) for i, length in enumerate(lengths)]
    return TokenStream(prepared(folder / "to", write_lines(folder / "in.jsonl", texts), shard_bytes=shard_bytes))


def order_of(line: TokenStream) -> list[int]:
    return line.documents(range(len(line.edges) - 1))[0].tolist()


def spread(line: TokenStream) -> list[int]:
    whole = documents(line.tokens)
    return [token for document in order_of(line) for token in whole[document]]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.sampled_from([0, 0, 2, 3, 5, 17]), min_size=1, max_size=20), data=st.data())
def test_packed_samples_keep_documents_apart(tmp_path: Path, lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    if total < 2:
        return
    seqlen, first = data.draw(st.integers(1, total - 1)), data.draw(st.integers(0, total - 1))
    line = line_of(tmp_path, lengths)
    tokens = spread(line)
    packed, joined = (TokenSamples(line, seqlen, first, total, how) for how in ("packed", "joined"))
    assert len(packed) == len(joined) == (total - 1 - first) // seqlen
    for index in range(len(packed)):
        row, plain = packed[index], joined[index]
        start = first + index * seqlen
        assert plain.keys() == {"input_ids", "labels"}
        assert plain["input_ids"].tolist() == row["input_ids"].tolist() == tokens[start : start + seqlen]
        assert plain["labels"].tolist() == tokens[start + 1 : start + seqlen + 1]
        ends = row["cu_seqlens"].tolist()
        assert (ends[0], ends[-1]) == (0, seqlen)
        for begin, end in pairwise(ends):
            ids, labels = row["input_ids"][begin:end].tolist(), row["labels"][begin:end].tolist()
            assert end > begin
            assert END not in ids[:-1]
            assert labels[:-1] == ids[1:]
            assert labels[-1] == (-100 if ids[-1] == END else tokens[start + end])
            assert end == seqlen or ids[-1] == END


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.sampled_from([0, 2, 3, 5, 17]), min_size=2, max_size=20), seqlen=st.integers(1, 20))
def test_whole_documents_are_cut_only_where_they_must(tmp_path: Path, lengths: list[int], seqlen: int) -> None:
    if sum(lengths) <= seqlen:
        return
    line = line_of(tmp_path, lengths)
    samples, _ = train_and_held_out(line, seqlen, 0.0, "whole")
    pieces, labels = [], 0
    for i in range(len(samples)):
        row = samples[i]
        for begin, end in pairwise(row["cu_seqlens"].tolist()):
            ids, targets = row["input_ids"][begin:end].tolist(), row["labels"][begin:end].tolist()
            if set(ids) == {END} and end == seqlen:  # padding, or a document equal to it
                assert set(targets) == {-100}
                continue
            assert targets[:-1] == ids[1:]
            assert (targets[-1] == -100) == (ids[-1] == END)
            labels += sum(target != -100 for target in targets)
            pieces.append(ids)
    expected = []
    for document in documents(line.tokens):
        expected += [document[i : i + seqlen] for i in range(0, len(document), seqlen)]
    lone = [piece for piece in expected if piece == [END]]
    assert sorted(pieces + lone[: len(expected) - len(pieces)]) == sorted(expected)
    assert labels == sum(max(n - 1, 0) for n in lengths)
    assert len(samples) <= max(2 * -(-sum(lengths) // seqlen), 1)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=200), capacity=st.integers(30, 60))
def test_fitting(lengths: list[int], capacity: int) -> None:
    order, begins = fit(np.array(lengths), capacity)
    assert sorted(order.tolist()) == [*range(len(lengths))]
    loads = [sum(lengths[i] for i in order[a:b]) for a, b in pairwise(begins.tolist())]
    assert all(0 < load <= capacity for load in loads)
    assert sum(2 * load <= capacity for load in loads) <= 1
    assert len(fit(np.array([20] * 90 + [10] * 90), 60)[1]) == 45 + 1


def test_batches_have_few_shapes(tmp_path: Path) -> None:
    samples = TokenSamples(line_of(tmp_path, [3] * 20), 12, 0, 60, "packed")
    batch = samples[[0, -1, 2]]
    assert batch["input_ids"].shape == (3, 12)
    assert batch["cu_seqlens"].tolist() == [[0, 3, 6, 9, 12, 12, 12, 12], [0] + [12] * 7, [0, 3, 6, 9] + [12] * 4]
    assert (batch["labels"][1] == -100).all()
    assert batch["labels"][0].tolist().count(-100) == 4
    assert all(value.dtype == torch.int64 for value in batch.values())
    with pytest.raises(IndexError):
        samples[4]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.lists(st.lists(st.booleans(), max_size=20), max_size=6), min_size=1, max_size=3),
    seqlen=st.integers(1, 12),
)
def test_labels_are_learnt_tokens_only(tmp_path: Path, shards: list[list[list[bool]]], seqlen: int) -> None:
    if sum(len(document) for shard in shards for document in shard) <= seqlen:
        return
    flat = [flags for shard in shards for flags in shard]
    coded = [[[(2 * i + flag, flag) for i, flag in enumerate(flags)] for flags in shard] for shard in shards]
    files = learnt_files(tmp_path / "to", coded)  # an odd id is learnt
    assert files.header.num_learnt == sum(map(sum, flat))
    for document, flags in enumerate(flat):
        for begin in range(len(flags)):
            end = (begin + 1 + len(flags)) // 2
            learnt = files.learnt(document, begin, end)
            assert learnt is not None
            assert learnt.tolist() == flags[begin:end]
    line = TokenStream(files)
    for how in ("packed", "whole", "joined"):
        samples, _ = train_and_held_out(line, seqlen, 0.0, how)
        everything = train_and_held_out(TokenStream(Unmasked(files.folder)), seqlen, 0.0, how)[0]
        for index, count in enumerate(samples.num_labels(range(len(samples))).tolist()):
            row, plain = samples[index], everything[index]
            expected = torch.where(plain["labels"] % 2 == 1, plain["labels"], -100)
            assert row["labels"].equal(torch.where(plain["labels"] == -100, -100, expected))
            assert row["input_ids"].equal(plain["input_ids"])
            assert count == int((row["labels"] != -100).sum())


class Unmasked(TokenFiles):
    """The same files with all tokens learnt."""

    def learnt(self, document: int, begin: int, end: int) -> None:
        return None


def test_the_order_is_fixed_and_mixes(tmp_path: Path) -> None:
    line = line_of(tmp_path, [4] * 50)
    again = line_of(tmp_path / "again", [4] * 50, shard_bytes=10**6)
    assert len(line.tokens.header.shards) > len(again.tokens.header.shards)
    assert order_of(line) == order_of(again) != [*range(50)]
    assert line.read(0, 200)[0].tolist() == spread(line)


def test_documents_of_many_groups_appear_once(tmp_path: Path) -> None:
    line = line_of(tmp_path, [2 + i % 5 for i in range(1000)], shard_bytes=5000)
    assert len(line.edges) - 1 == 4
    order = order_of(line)
    assert sorted(order) == [*range(1000)]
    # Neighbours in the stream are far apart in the folder.
    assert sum(abs(a - b) < 4 for a, b in pairwise(order)) < 20
    lengths = line.tokens.lengths()
    assert lengths.tolist() == [2 + i % 5 for i in range(1000)]
    assert line.documents(range(4))[1].tolist() == np.cumsum(lengths[order]).tolist()
    assert line.edges.tolist() == [0, *(int(line.documents(range(i, i + 1))[1][-1]) for i in range(4))]
    for begin, end in ((0, 1000), (3, 3), (250, 777), (999, 1000)):
        assert line.tokens.lengths(begin, end).tolist() == lengths[begin:end].tolist()
    assert line.read(0, len(line))[0].tolist() == spread(line)
    assert line.read(1234, 3210)[0].tolist() == spread(line)[1234:3210]
    held_out = len(line) - line.split(0.1)
    assert 0.1 * len(line) <= held_out < 0.1 * len(line) + 6


def test_blocks_of_whole_documents_are_packed_one_by_one(tmp_path: Path) -> None:
    line = line_of(tmp_path, [2 + i % 5 for i in range(1000)], shard_bytes=5000)
    first, last = 501, len(line) - 333
    blocks = WholeSamples(line, 32, first, last, block=1)
    together = WholeSamples(line, 32, first, last)
    assert (len(blocks.edges), together.edges.tolist()) == (5, [0, len(together)])
    assert len(together) <= len(blocks) <= len(together) + 4
    for samples in (blocks, together):
        taken = [samples[i]["input_ids"] for i in np.random.default_rng(0).permutation(len(samples)).tolist()]
        ids = torch.cat(taken).bincount(minlength=END + 1)
        expected = line.read(first, last)[0].bincount(minlength=END + 1)
        assert ids[:END].equal(expected[:END])
    (numbers,) = [list(BatchSampler(len(blocks), 2, seed=1, shuffle=True, edges=blocks.edges))]
    places = [index for batch in numbers for index in batch if index >= 0]
    assert sorted(places) == [*range(len(blocks))]
    assert (np.diff(np.searchsorted(blocks.edges, places, side="right")) != 0).sum() == 3


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    total = 1 << 20
    files = learnt_files(tmp_path, [[[(1, False)]]])
    header = replace(files.header.shards[0], num_tokens=3 * total, num_documents=total, num_learnt=None)
    with shard_path(tmp_path, 0).open("wb") as stream:
        stream.write(json.dumps(header.written()).encode().ljust(HEADER_BYTES))
        stream.seek(header.ends_at)
        np.arange(3, 3 * total + 3, 3).tofile(stream)
    write_dataset(tmp_path, replace(files.header, shards=(header,)))
    tracemalloc.start()
    try:
        train, _ = train_and_held_out(TokenStream(TokenFiles(tmp_path)), 30, 0.01, "packed")
        loader = ResumableLoader(train, BatchSampler(len(train), 4, seed=0, shuffle=True, edges=train.edges))
        batch = next(iter(loader))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert batch["input_ids"].shape == (4, 30)
    assert held < total / 2  # one int64 a document would be 8 * total


@pytest.mark.parametrize(
    ("lengths", "fraction", "held_out"),
    [([10] * 20, 0.1, 20), ([10] * 20, 0.12, 30), ([10] * 20, 0.0, 0), ([500, 500], 0.1, 100), ([1000], 0.1, 100)],
)
def test_whole_documents_are_held_out(tmp_path: Path, lengths: list[int], fraction: float, held_out: int) -> None:
    line = line_of(tmp_path, lengths)
    assert len(line) - line.split(fraction) == held_out
    train, val = train_and_held_out(line, 10, fraction, "packed")
    assert (len(train), len(val)) == ((sum(lengths) - max(held_out, 1)) // 10, max(held_out - 1, 0) // 10)


def test_too_few_tokens(tmp_path: Path) -> None:
    line = line_of(tmp_path, [14])
    assert [len(part) for part in train_and_held_out(line, 13, 0.0, "joined")] == [1, 0]
    assert [len(part) for part in train_and_held_out(line, 6, 0.1, "joined")] == [1, 1]
    with pytest.raises(DataError, match="more than 14 tokens: 2 samples"):
        train_and_held_out(line, 7, 0.1, "joined")
    with pytest.raises(DataError, match="more than 14 tokens: a sample .* lower the context length"):
        train_and_held_out(line, 14, 0.0, "joined")
    with pytest.raises(ConfigError, match="context_length"):
        train_and_held_out(line, 0, 0.0, "joined")
    with pytest.raises(ConfigError, match="val_fraction"):
        train_and_held_out(line, 1, 1.0, "joined")
    with pytest.raises(ConfigError, match="documents: expected one of"):
        train_and_held_out(line, 1, 0.0, "apart")  # pyright: ignore[reportArgumentType]
