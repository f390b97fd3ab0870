"""The retrieval task: the content of sequences, the count of right answers, and that only a whole ring can answer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.commands.main import main
from ringflash.errors import ConfigError, DataError
from ringflash.train.callbacks.retrieval_accuracy import (
    Cell,
    RetrievalAccuracy,
    count,
    depth_names,
    draw,
    mean,
    tabulate,
    write,
)
from ringflash.train.commands.retrieval import measure
from ringflash.train.data.retrieval import Grid, RetrievalDataModule, RetrievalTask
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from tests.helpers.distributed import run_ranks

TASK = RetrievalTask(32)
CONFIG = ModelConfig(vocab_size=32, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48)
GRID = Grid((32, 48), 4, 3)


@given(vocab=st.integers(16, 600), seqlen=st.integers(16, 300), seed=st.integers(0, 2**40), part=st.integers(0, 9))
def test_a_label_is_the_value_that_its_key_was_planted_with(vocab: int, seqlen: int, seed: int, part: int) -> None:
    task, depth = RetrievalTask(vocab), (part / 10, (part + 1) / 10)
    n, row = task.num_keys, task.row(seqlen, (seed,), depth)
    tokens, labels = row["input_ids"].tolist(), row["labels"].tolist()
    facts = {token // n: (place, token % n) for place, token in enumerate(tokens) if token < n * n}
    assert len(facts) == sum(token < n * n for token in tokens) == min(n, seqlen // 8)  # no key occurs twice
    assert all(0 <= token < vocab for token in tokens)
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        asks = n * n <= token < n * n + n
        assert asks == (label != -100)
        if asks:
            planted, value = facts[token - n * n]
            assert planted < place
            assert label == n * n + n + value < vocab
    assert labels[-1] != -100
    place = facts[tokens[-1] - n * n][0]
    begin, end = (int(x * (seqlen - 1)) for x in depth)
    assert begin <= place < max(end, begin + 1)
    assert all(torch.equal(row[name], task.row(seqlen, (seed,), depth)[name]) for name in row)
    assert not torch.equal(row["input_ids"], task.row(seqlen, (seed + 1,), depth)["input_ids"])


@given(st.lists(st.integers(16, 200), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_batches_of_a_grid_have_every_sequence_once(lengths: list[int], depths: int, rows: int, ranks: int) -> None:
    grid = Grid(tuple(lengths), depths, rows)
    batches = grid.batches(300, ranks)
    assert sorted(number for batch in batches for number in batch if number >= 0) == [*range(len(grid))]
    assert all(len(batch) % ranks == 0 for batch in batches)
    assert all(len({number // (depths * rows) for number in batch if number >= 0}) == 1 for batch in batches)


def test_what_is_counted() -> None:
    batch = GRID.batch(TASK, [12, 23, -1])
    assert batch["input_ids"].shape == (3, 48)
    assert (batch["labels"][2] == -100).all()
    logits = torch.nn.functional.one_hot(batch["labels"].clamp(min=0), 32).double()
    logits[0, -1] = 0  # one wrong answer, all others right
    assert count(logits, batch["labels"], torch.arange(48), 47).tolist() == [0, 1, 0]
    right = torch.zeros(len(GRID), dtype=torch.int64)
    right[3:5] = 1
    cells = tabulate(right, GRID)
    assert cells[1] == Cell(32, 0.25, 0.5, 3, 2 / 3)
    assert mean(cells) == pytest.approx(2 / 24)


@pytest.mark.parametrize(
    ("depths", "last"),
    [(1, "0%"), (10, "90%"), (100, "99%"), (101, "99.0%"), (200, "99.5%"), (1000, "99.9%"), (1001, "99.90%")],
)
def test_each_depth_has_a_name_of_its_own(depths: int, last: str) -> None:
    names = depth_names(depths)
    assert len(set(names)) == depths
    assert names[-1] == last


def test_the_accuracy_of_each_of_many_depths_is_logged() -> None:
    callback, data, logged = RetrievalAccuracy(), RetrievalDataModule(val_depths=200, val_rows=1), {}
    module: Any = SimpleNamespace(device="cpu", log=mock.Mock(), log_dict=lambda values, **_: logged.update(values))
    trainer: Any = SimpleNamespace(datamodule=data, strategy=SimpleNamespace(reduce=lambda right, **_: right))
    callback.on_validation_epoch_start(trainer, module)
    callback.on_validation_epoch_end(trainer, module)
    assert len(logged) == 200
    assert {"val/retrieval/1024/0.0%", "val/retrieval/1024/0.5%", "val/retrieval/1024/99.5%"} <= logged.keys()


def test_pictures_and_figures_are_written(tmp_path: Path) -> None:
    cells = tabulate(torch.ones(len(GRID), dtype=torch.int64), GRID)
    draw(tmp_path / "new" / "picture.png", cells)
    write(tmp_path / "new" / "figures.json", cells, step=7)
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert (figures["step"], figures["mean"], len(figures["cells"])) == (7, 1.0, 8)


def _answer(decoder: Decoder, tokens: Tensor, context: rf.ContextParallel, *, hops: bool) -> Tensor:
    """Returns the logits of the last token; without hops, every rank attends only to its own shard."""
    positions = context.positions(len(tokens))
    if hops:
        return context.unshard(decoder(context.shard(tokens[None]), positions, context))[0, -1]
    own = next(rows for rows in positions.chunk(context.world_size) if len(tokens) - 1 in rows)
    return decoder(tokens[None, own], own)[0, -1]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_without_hops_no_fact_of_another_rank_can_be_known(layout: str) -> None:
    """Checks that without hops a fact on another rank cannot change the answer, which is then right only by chance."""
    decoder, context, n, seqlen = Decoder(CONFIG, seed=3).double(), rf.ContextParallel.local(2, layout), 4, 64
    own = next(rows for rows in context.positions(seqlen).chunk(2) if seqlen - 1 in rows).tolist()
    with torch.no_grad():
        for seed in range(8):
            tokens = TASK.row(seqlen, (seed,))["input_ids"]
            place = next(
                i for i, token in enumerate(tokens.tolist()) if token < n * n and token // n == tokens[-1] - n * n
            )
            other = tokens.clone()
            other[place] = tokens[place] // n * n + (tokens[place] + 1) % n  # the same key with another value
            changes = [
                not torch.equal(*(_answer(decoder, x, context, hops=hops) for x in (tokens, other)))
                for hops in (True, False)
            ]
            assert changes == [True, place in own]


def test_sequences_grow_and_training_goes_on_where_it_was() -> None:
    data = RetrievalDataModule(100, batch_size=2, first_length=20, double_every=3)
    data._task = TASK
    assert [data.length_of(i) for i in (0, 2, 3, 6, 9, 10**9)] == [20, 20, 40, 80, 100, 100]
    loader, batches = data.train_dataloader(), []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 5:
            break
    assert [tuple(batch["labels"].shape) for batch in batches] == [(10, 20)] * 3 + [(5, 40)] * 2
    again = data.train_dataloader()
    again.load_state_dict({"number": 4})
    assert all(torch.equal(x, batches[4][name]) for name, x in next(iter(again)).items())
    assert again.number == 5
    data.load_state_dict(data.state_dict())
    assert data.train_dataloader().number == 5
    data.trainer = cast("Any", SimpleNamespace(max_steps=9, accumulate_grad_batches=1, distributed_sampler_kwargs=None))
    assert data.train_dataloader().number == 0  # of another trainer
    assert next(iter(data.train_dataloader()))["labels"].shape == (10, 20)
    assert data.train_dataloader().number == 1
    with pytest.raises(DataError, match=r"seed 9 \(now 0\)"):
        data.load_state_dict(data.state_dict() | {"seed": 9})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 8}, "first_length: expected at least 16, got 8"),
        ({"context_length": 64, "first_length": 128}, "context_length: expected at least 128, got 64"),
        ({"val_depths": 0}, "depths: expected at least one"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_data_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RetrievalDataModule(**options)


def test_overfit_batches_is_refused() -> None:
    data = RetrievalDataModule()
    data.trainer = cast("Any", SimpleNamespace(overfit_batches=2, lightning_module=SimpleNamespace(vocab_size=64)))
    with pytest.raises(ConfigError, match=r"overfit_batches: expected 0 with RetrievalDataModule, .* got 2\. Leave"):
        data.setup("fit")


def test_bad_sequences() -> None:
    with pytest.raises(ConfigError, match="vocab_size: expected at least 16"):
        RetrievalTask(15)
    with pytest.raises(ConfigError, match="context_length: expected at least 16, got 9"):
        TASK.row(9, (0,))


def _trained() -> tuple[dict[str, float], list[Cell], list[Cell], list[Cell]]:
    """Returns metrics and cells of a short run, and cells of a decoder measured over the ring and without it."""
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    callback, data = RetrievalAccuracy(), RetrievalDataModule(32, 2, 16, 1, [48], 4, 1)
    module = LanguageModel(CONFIG, OptimizerConfig(max_steps=2, warmup_steps=1), "float32", seed=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(),
        max_steps=2,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module, data)
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    loader: Any = trainer.train_dataloader
    assert (len(loader), loader.state_dict()) == (2, {"number": 2})  # no batch was prefetched
    decoder, context = Decoder(CONFIG, seed=4).double(), rf.ContextParallel(dist.group.WORLD)
    assert decoder.lm_head is not None
    with torch.no_grad():  # without these zeros, the decoder would also guess tokens that are no answers
        decoder.lm_head.weight[: TASK.num_keys * (TASK.num_keys + 1)] = 0
        decoder.lm_head.weight[TASK.num_keys * (TASK.num_keys + 2) :] = 0
    return metrics, callback.cells, measure(decoder, GRID, context), measure(decoder, GRID)


def test_training_and_measuring_over_ranks() -> None:
    for metrics, cells, over_ring, alone in run_ranks(2, _trained):
        assert over_ring == alone
        assert 0 < mean(alone) < 1
        assert [(cell.length, cell.begin, cell.rows) for cell in cells] == [(48, depth / 4, 1) for depth in range(4)]
        assert metrics["val/retrieval"] == pytest.approx(mean(cells))
        assert metrics["val/retrieval/48/75%"] == pytest.approx(cells[-1].accuracy)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", "nowhere"], "no such folder"),
        (["--checkpoint", "nowhere", "--depths", "0"], "depths"),
        (["--checkpoint", "nowhere", "--device", "tpu"], "--device"),
    ],
)
def test_the_command_with_bad_arguments(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieval", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("filename", ["retrieval.json", "retrieval.xyz", "folder/retrieval.png"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(filename: str) -> None:
    with pytest.raises(ConfigError, match="filename: expected a name that ends in"):
        RetrievalAccuracy(filename)
