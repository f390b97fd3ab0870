"""All ranks of rings read rows in one order, also where their random numbers differ."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler

from tests.helpers.distributed import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS, EPOCHS = 12, 2


class PythonSampler(Sampler[int]):
    """Draws from Python's random numbers, and has no length and no end."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(ROWS)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


def make_loader(way: str) -> DataLoader[Any]:
    rows: Any = range(ROWS)
    if way == "generator":
        return DataLoader(rows, 2, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed()))
    if way == "subset":
        return DataLoader(rows, 2, sampler=SubsetRandomSampler(range(ROWS)))
    if way == "no end":
        return DataLoader(rows, 2, sampler=PythonSampler())
    if way == "batches":
        return DataLoader(rows, batch_sampler=BatchSampler(SubsetRandomSampler(range(ROWS)), 2, False))
    if way == "stream":
        return DataLoader(Stream(), 2)
    return DataLoader(rows, 2, shuffle=True)


def read(loader: Any) -> list[list[int]]:
    """Returns the rows of each epoch, at most two more than `ROWS`, with draws between the epochs as of dropout."""
    epochs: list[list[int]] = []
    for _ in range(EPOCHS):
        torch.rand(3 + torch.initial_seed() % 7)
        epochs.append([int(row) for batch in islice(loader, ROWS // 2 + 1) for row in batch])
    return epochs


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def orders(way: str, ring_size: int) -> tuple[list[list[int]], list[list[int]], bool]:
    """Returns the rows of a prepared loader, those of a plain one, and whether both draw the same numbers after."""
    from accelerate import DataLoaderConfiguration

    from ringflash.train import AcceleratorRing
    from tests.train.trainer.test_rings import make_accelerator

    config = DataLoaderConfiguration(use_seedable_sampler=way == "seedable")
    accelerator = make_accelerator(dataloader_config=config)
    AcceleratorRing(accelerator, ring_size)
    seed(100 + dist.get_rank())
    mine = read(make_loader(way))
    after = torch.get_rng_state()
    seed(100 + dist.get_rank())
    loader: Any = accelerator.prepare(make_loader(way))
    assert accelerator.prepare(loader) is loader
    got = read(loader)
    return got, mine, torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("way", ["shuffled", "generator", "subset", "no end", "batches", "stream"])
def test_a_ring_reads_in_the_order_of_its_first_rank_alone(way: str) -> None:
    (first, alone, _), *others = run_ranks(2, orders, way, 2)
    assert first == alone if way != "no end" else first[0] == alone[0]  # it is read ahead
    assert first[0] != first[1] or way == "stream"
    for got, mine, draws_on in others:
        assert got == first
        assert mine != first or way == "stream"
        assert draws_on


def test_seedable_samplers_take_the_seed_of_the_first_rank() -> None:
    (first, _, _), (second, _, _) = run_ranks(2, orders, "seedable", 2)
    assert first == second
    assert sorted(first[0]) == [*range(ROWS)]


@pytest.mark.parametrize("way", ["shuffled", "seedable"])
def test_rings_share_one_order(way: str) -> None:
    epochs = [got for got, _, _ in run_ranks(4, halves, way)]
    assert epochs[0] == epochs[1]
    assert epochs[2] == epochs[3]
    assert sorted(epochs[0] + epochs[2]) == [*range(ROWS)]


def halves(way: str) -> tuple[list[int], None, None]:
    """Returns the rows that this rank gets from the loader of two rings."""
    from accelerate import DataLoaderConfiguration

    from ringflash.train import AcceleratorRing
    from tests.train.trainer.test_rings import make_accelerator

    config = DataLoaderConfiguration(use_seedable_sampler=way == "seedable")
    accelerator = make_accelerator(dataloader_config=config)
    AcceleratorRing(accelerator, 2)
    seed(100 + dist.get_rank())
    return [int(row) for batch in accelerator.prepare(make_loader(way)) for row in batch], None, None


def dropout_losses() -> list[float]:
    """Returns the losses of a ring whose ranks draw unlike numbers of dropout, over two epochs of shuffled rows."""
    from ringflash.train import AcceleratorRing
    from tests.train.trainer.runs import Rows, Run, collate, make_model
    from tests.train.trainer.test_rings import make_accelerator

    accelerator = make_accelerator()
    ring = AcceleratorRing(accelerator)
    model = make_model(Run())
    model.model.layers[0].mlp.register_forward_hook(lambda mlp, _, out: dropout(out, 0.1, mlp.training))
    ring.use_ring_attention(model)
    prepared, loader = accelerator.prepare(
        model, DataLoader(Rows(length=7), batch_size=5, shuffle=True, collate_fn=collate)
    )
    losses: list[Tensor] = []
    for _ in range(EPOCHS):
        losses += [ring.token_mean(prepared, batch).value for batch in loader]
    return [loss.item() for loss in losses]


def test_dropout_of_shards_of_unequal_length_leaves_the_order_alone() -> None:
    first, second = run_ranks(2, dropout_losses)
    assert first == second
    assert len(first) == 2 * EPOCHS


class EpochRows(Dataset[int]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


def epochs(ring_size: int) -> list[list[int]]:
    """Returns the epochs that reach a dataset, and those that reach a sampler."""
    from ringflash.train import AcceleratorRing
    from tests.train.trainer.test_rings import make_accelerator

    accelerator = make_accelerator()
    AcceleratorRing(accelerator, ring_size)
    rows, sampler = EpochRows(), PythonSampler()
    loader: Any = accelerator.prepare(DataLoader(rows, 2, shuffle=True))
    for _ in range(EPOCHS):
        list(loader)
    loader = accelerator.prepare(DataLoader(range(ROWS), 2, sampler=sampler))  # pyright: ignore[reportArgumentType]
    loader.set_epoch(3)
    return [rows.epochs, sampler.epochs]


@pytest.mark.parametrize("ring_size", [1, 2])
def test_epochs_reach_datasets_and_samplers_of_ones_own(ring_size: int) -> None:
    assert run_ranks(2, epochs, ring_size) == [[[0, 1], [3]]] * 2


def test_a_batch_sampler_reads_what_its_own_sampler_has() -> None:
    from ringflash.train.trainer.order import SharedOrder

    sampler = SharedOrder(SubsetRandomSampler(range(ROWS)), None)
    for each in (sampler, copy.deepcopy(sampler)):
        assert each.indices == range(ROWS)
        assert not hasattr(each, "set_epoch")
