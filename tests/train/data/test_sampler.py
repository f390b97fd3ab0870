from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ringflash.errors import ConfigError
from ringflash.train.data.sampler import PADDING, BatchSampler, ResumableLoader
from ringflash.train.data.samples import TokenSamples, TokenStream
from tests.train.data.corpora import prepared


def ranks(total: int, batch_size: int, world_size: int) -> list[BatchSampler]:
    return [
        BatchSampler(total, batch_size, rank=r, num_replicas=world_size, seed=3, shuffle=True)
        for r in range(world_size)
    ]


def take(samplers: list[BatchSampler], batches: int | None = None) -> list[list[int]]:
    """Returns the next global batches, and counts them in the samplers as handed out."""
    taken = []
    for rows in zip(*(list(s) for s in samplers), strict=True):
        if len(taken) == batches:
            break
        taken.append([index for row in rows for index in row])
    for sampler in samplers:
        sampler.handed_out += len(taken)
    return taken


@pytest.mark.parametrize("total", [1, 12, 53, 60])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_sample_once_an_epoch(total: int, world_size: int) -> None:
    batches = take(ranks(total, 6, world_size))
    seen = Counter(index for batch in batches for index in batch)
    assert seen.pop(PADDING, 0) == -total % 6
    assert seen == Counter(range(total))
    assert len(batches) == len(ranks(total, 6, world_size)[0])


def test_order_is_a_function_of_seed_and_epoch() -> None:
    (sampler,) = ranks(40, 4, 1)
    first = list(sampler)
    sampler.epoch = 1
    second = list(sampler)
    sampler.epoch = 0
    assert list(sampler) == first != second
    assert [sorted(b) for b in take(ranks(40, 4, 2))] == [sorted(b) for b in first]


def test_an_epoch_of_any_size_starts_at_once() -> None:
    samplers = ranks(10**15, 6, 2)
    first = [next(iter(sampler)) for sampler in samplers]
    assert len({index for rows in first for index in rows}) == 6
    state = {"epoch": 2, "consumed": 10**15 - 4, "batches": 9}
    for sampler in samplers:
        sampler.load_state_dict(state)
    last = [index for sampler in samplers for rows in sampler for index in rows]
    assert last.count(PADDING) == 2
    assert len({*last}) == 5


@pytest.mark.parametrize("batch_size", [6, 12])
def test_resume_at_another_data_parallel_size(batch_size: int) -> None:
    total, seen, state = 103, [], None
    reference = [index for batch in ranks(total, 6, 1)[0] for index in batch if index != PADDING]
    for world_size, size, batches in ((2, 6, 4), (3, batch_size, 3), (1, 6, None)):
        samplers = ranks(total, size, world_size)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
                sampler.set_epoch(1)  # as Lightning does after a run that ended inside epoch 0
        length = len(samplers[0])
        taken = take(samplers, batches)
        seen += [index for batch in taken for index in sorted({*batch} - {PADDING}, key=reference.index)]
        states = [sampler.state_dict() for sampler in samplers]
        assert all(s == states[0] for s in states)
        state = states[0]
        if batches is None:
            assert length == state["batches"]
    assert seen == reference
    assert state is not None
    assert state["consumed"] == total


def test_an_iteration_goes_on_where_the_last_one_stopped() -> None:
    (sampler,) = ranks(10, 2, 1)
    (reference,) = ranks(10, 2, 1)
    whole = list(reference)
    sampler.begin()
    sampler.handed_out = 3
    sampler.begin()
    assert list(sampler) == whole[3:]
    assert len(sampler) == 2  # a trainer that has begun a new epoch counts from there
    sampler.handed_out = 2
    sampler.begin()
    assert sampler.epoch == 1
    assert sorted(index for batch in sampler for index in batch) == list(range(10))
    assert list(sampler) != whole


def test_without_shuffling() -> None:
    sampler = BatchSampler(5, 2, seed=0, shuffle=False)
    for handed_out in (0, 2):
        sampler.handed_out = handed_out
        sampler.begin()
        assert list(sampler) == [[0, 1], [2, 3], [4, PADDING]]


@pytest.mark.parametrize("batch_size", [0, 3])
def test_batch_size_that_ranks_cannot_share(batch_size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of the data-parallel size, 2"):
        BatchSampler(10, batch_size, num_replicas=2, seed=0, shuffle=True)


def test_loader_counts_what_it_has_handed_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    line = TokenStream(prepared(tmp_path / "to", tmp_path / "a.txt"))
    samples = TokenSamples(line, 5, 0, len(line))
    assert len(samples) == 10

    def loader() -> ResumableLoader:
        return ResumableLoader(samples, BatchSampler(len(samples), 3, seed=1, shuffle=True))

    whole = [batch["labels"].tolist() for batch in loader()]
    assert len(whole) == len(loader()) == 4
    first = loader()
    batches = iter(first)
    assert [next(batches)["labels"].tolist() for _ in range(2)] == whole[:2]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert [batch["labels"].tolist() for batch in second] == whole[2:]
    assert second.state_dict() == {"epoch": 0, "consumed": 10, "batches": 4}


def test_a_loader_that_starts_after_other_batches(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    line = TokenStream(prepared(tmp_path / "to", tmp_path / "a.txt"))
    samples = TokenSamples(line, 5, 0, len(line))
    loader, whole = (ResumableLoader(samples, BatchSampler(len(samples), 3, seed=1, shuffle=True)) for _ in range(2))
    batches = [batch["labels"].tolist() for batch in whole]
    state = {"epoch": 0, "consumed": 6, "batches": 2}
    loader.start_after(state)
    assert (len(loader), loader.state_dict()) == (4, state | {"batches": 0})
    rest = iter(loader)
    assert len(loader) == 2
    assert [batch["labels"].tolist() for batch in rest] == batches[2:]
    loader.start_after(state)
    loader.load_state_dict(state)  # as Lightning does inside an epoch
    iter(loader)
    assert len(loader) == 4
