from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import ConfigError, DataError
from ringflash.train.data.module import TextDataModule
from ringflash.train.data.prepare import Recipe, prepare
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.train.data.corpora import learnt_files, write_lines, write_tokenizer

TEXT = "".join(chr(33 + i % 90) for i in range(1000))


def module(tmp_path: Path, **options: Any) -> TextDataModule:
    if not (tmp_path / "text.txt").exists():  # a rank must not rewrite a file that another rank reads
        (tmp_path / "text.txt").write_text(TEXT)
    options = {"context_length": 50, "val_fraction": 0.101, "documents": "joined"} | options
    return TextDataModule(str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache"), **options)


def ready(data: TextDataModule) -> TextDataModule:
    data.prepare_data()
    data.setup("validate")
    return data


def test_held_out_samples_are_the_last_ones(tmp_path: Path) -> None:
    data = ready(module(tmp_path))
    train, held_out = data.train_samples(), data.val_samples()
    assert (len(train), len(held_out)) == (18, 2)
    assert train[17]["labels"][-1] == held_out[0]["input_ids"][0]
    (batch,) = list(ready(module(tmp_path, batch_size=2)).val_dataloader())
    assert batch["input_ids"].equal(torch.stack([held_out[i]["input_ids"] for i in range(2)]))


def test_nothing_held_out(tmp_path: Path) -> None:
    data = ready(module(tmp_path, val_fraction=0))
    assert len(data.train_samples()) == 20
    assert data.val_dataloader() == []


@pytest.mark.parametrize(("context_length", "val_fraction"), [(1001, 0.0), (501, 0.1)])
def test_corpus_shorter_than_a_sample(tmp_path: Path, context_length: int, val_fraction: float) -> None:
    with pytest.raises(DataError, match="lower the context length"):
        ready(module(tmp_path, context_length=context_length, val_fraction=val_fraction))


@pytest.mark.parametrize("context_length", [1000, 500])
def test_corpus_just_long_enough(tmp_path: Path, context_length: int) -> None:
    data = ready(module(tmp_path, context_length=context_length, val_fraction=0.0 if context_length == 1000 else 0.1))
    assert len(list(data.train_dataloader())) == 1


@pytest.mark.parametrize("option", [{"context_length": 0}, {"batch_size": 0}, {"val_fraction": 1.0}])
def test_bad_options(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        TextDataModule(**option)


def test_a_checkpoint_of_other_samples(tmp_path: Path) -> None:
    state = ready(module(tmp_path)).state_dict()
    ready(module(tmp_path, batch_size=4)).load_state_dict(state)
    with pytest.raises(DataError, match="context_length 50"):
        ready(module(tmp_path, context_length=40)).load_state_dict(state)
    with pytest.raises(DataError, match="documents joined"):
        ready(module(tmp_path, documents="packed")).load_state_dict(state)


def test_a_prepared_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    lines = write_lines(tmp_path / "lines.jsonl", [f"the ring turns {i} times" for i in range(40)])
    to = tmp_path / "to"
    prepare(str(lines), to, Recipe(tokenizer), val_fraction=0.2)
    data = ready(TextDataModule(str(to), context_length=16, cache_dir=str(tmp_path / "none")))
    assert data.tokenizer == tokenizer
    assert len(data.val_samples()) == pytest.approx(0.2 * len(data.tokens) / 16, abs=1.5)
    assert len(ready(TextDataModule(str(to), context_length=16, val_fraction=0)).val_samples()) == 0
    batch = next(iter(data.train_dataloader()))
    assert batch["cu_seqlens"][0, -1] == 16
    assert not (tmp_path / "none").exists()
    with pytest.raises(DataError, match=r"vocab_size: expected at least \d+, the ids of tokenizer of .*to has, got 64"):
        trainer(1, devices=1, enable_checkpointing=False).fit(Reader(vocab_size=64), data)


def test_samples_without_a_token_to_learn_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt, answer = [(1, False)] * 12, [(2, True)] * 4
    files = learnt_files(tmp_path / "chats", [[[*prompt, *answer]] * 10])
    data = TextDataModule(str(files.folder), context_length=8, documents="whole", val_fraction=0.2)
    data.setup("fit")
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "Data: 8 of 16 training samples have no token to learn",
        "Data: 2 of 4 held-out samples have no token to learn",
    ]
    data.setup("validate")
    assert len(caplog.records) == 2
    for documents, part in (([prompt] * 11, "training"), ([prompt, [*answer, *prompt], *[prompt] * 9], "held-out")):
        learnt_files(tmp_path / "chats", [documents])
        with pytest.raises(DataError, match=rf"a token to learn in one of \d+ {part} samples, got none"):
            TextDataModule(str(files.folder), context_length=10, val_fraction=0.2).setup("validate")


def test_a_logged_run_keeps_the_tokenizer(tmp_path: Path) -> None:
    data = module(tmp_path)
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        lightning_module=None, loggers=[None], log_dir=str(tmp_path / "run"), is_global_zero=True
    )
    data.setup("fit")
    assert Tokenizer.of_run(tmp_path / "run") == Tokenizer()


class Reader(pl.LightningModule):
    """A module with one number as its weight that records its batches."""

    def __init__(self, vocab_size: int = 257) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.init_from: str | None = None
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["input_ids"].tolist())
        return self.weight

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        raise AssertionError("not asked for")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trainer(steps: int, *, max_epochs: int = -1, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=max_epochs, limit_val_batches=0, **quiet, **options
    )


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_training_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    one = Reader()
    trainer(21, devices=1, enable_checkpointing=False).fit(one, module(tmp_path, batch_size=2))
    first, second = Reader(), Reader()
    halfway = trainer(13, devices=1, enable_checkpointing=False)
    halfway.fit(first, module(tmp_path, batch_size=2))
    halfway.save_checkpoint(tmp_path / "halfway.ckpt", weights_only=False)
    trainer(21, devices=1, enable_checkpointing=False).fit(
        second, module(tmp_path, batch_size=2), ckpt_path=tmp_path / "halfway.ckpt"
    )
    assert len(one.seen) == 21
    assert first.seen + second.seen == one.seen
    epochs = [[row for batch in one.seen[start : start + 9] for row in batch] for start in (0, 9)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("first", [{"max_epochs": 1}, {"max_epochs": 2}, {"steps": 3}, {"steps": 9}, {"steps": 13}])
@pytest.mark.parametrize("then", [{"max_epochs": 4}, {"steps": 21}])
def test_training_resumes_however_it_ended(tmp_path: Path, first: dict[str, int], then: dict[str, int]) -> None:
    one = Reader()
    trainer(36, devices=1, enable_checkpointing=False).fit(one, module(tmp_path, batch_size=2))
    readers = Reader(), Reader()
    halfway = trainer(**{"steps": -1} | first, devices=1, enable_checkpointing=False)
    halfway.fit(readers[0], module(tmp_path, batch_size=2))
    halfway.save_checkpoint(tmp_path / "halfway.ckpt", weights_only=False)
    second = trainer(**{"steps": -1} | then, devices=1, enable_checkpointing=False)
    second.fit(readers[1], module(tmp_path, batch_size=2), ckpt_path=tmp_path / "halfway.ckpt", weights_only=False)
    seen = readers[0].seen + readers[1].seen
    assert readers[1].seen
    assert seen == one.seen[: len(seen)]
    assert readers[1].weight.item() == -len(seen)
    if "steps" in then or "max_epochs" in first:
        assert len(seen) == (21 if "steps" in then else 36)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("epochs", [2, 3, 4, 7])
def test_parts_of_an_epoch_lose_no_gradient(tmp_path: Path, epochs: int) -> None:
    reader = Reader()
    options: dict[str, Any] = {"limit_train_batches": 4, "accumulate_grad_batches": 3}
    trainer(-1, max_epochs=epochs, devices=1, enable_checkpointing=False, **options).fit(
        reader, module(tmp_path, batch_size=2)
    )
    assert len(reader.seen) == {2: 8, 3: 9, 4: 13, 7: 22}[epochs]  # an epoch has 9 batches
    assert 3 * reader.weight.item() == pytest.approx(-len(reader.seen), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("limit", [None, 4])
def test_loaders_of_one_trainer_continue(tmp_path: Path, limit: int | None) -> None:
    """Checks a loader for each epoch, and a second fit. Another trainer begins with the first epoch."""
    whole, reloaded, twice, other = (Reader() for _ in range(4))
    options: dict[str, Any] = {"devices": 1, "enable_checkpointing": False, "limit_train_batches": limit}
    trainer(-1, max_epochs=4, **options).fit(whole, module(tmp_path, batch_size=2))
    reloading = trainer(-1, max_epochs=4, reload_dataloaders_every_n_epochs=1, **options)
    reloading.fit(reloaded, module(tmp_path, batch_size=2))
    assert reloaded.seen == whole.seen
    data, again = module(tmp_path, batch_size=2), trainer(-1, max_epochs=1, **options)
    again.fit(twice, data)
    again.fit_loop.max_epochs = 4
    again.fit(twice, data)
    assert len(twice.seen) > 9
    assert twice.seen == whole.seen[: len(twice.seen)]
    trainer(-1, max_epochs=1, **options).fit(other, data)
    assert other.seen == whole.seen[: len(other.seen)]


@pytest.mark.parametrize("batches", [2, 0.5])
def test_overfit_batches_is_refused(tmp_path: Path, batches: float) -> None:
    message = rf"overfit_batches: expected 0 with TextDataModule, .* got {batches}\. .* a corpus of that size"
    with pytest.raises(ConfigError, match=message):
        trainer(1, devices=1, enable_checkpointing=False, overfit_batches=batches).fit(Reader(), module(tmp_path))


def test_vocabulary_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size: expected at least 257, the ids of bytes, .* Set model"):
        trainer(1, devices=1, enable_checkpointing=False).fit(Reader(vocab_size=256), module(tmp_path))
    model = Reader(vocab_size=256)
    model.init_from = str(tmp_path)  # a folder with weights of this size, and without a tokenizer
    with pytest.raises(DataError, match="vocab_size: expected at least 257, .* got 256. Prepare the text"):
        trainer(1, devices=1, enable_checkpointing=False).fit(model, module(tmp_path))


def test_tokens_of_another_tokenizer_than_the_model_s(tmp_path: Path) -> None:
    own, other = (write_tokenizer(tmp_path / name, text=name * 9) for name in ("own", "other"))
    lines = write_lines(tmp_path / "lines.jsonl", [f"the ring turns {i} times" for i in range(40)])
    prepare(str(lines), tmp_path / "to", Recipe(Tokenizer.load(other)))
    model = Reader(vocab_size=400)
    model.init_from = str(own.parent)
    for data, got in ((TextDataModule(str(tmp_path / "to"), 16), "tokenizer of"), (module(tmp_path), "bytes, as")):
        with pytest.raises(DataError, match=f"tokenizer: expected that of .*own, .* got {got} .*--tokenizer .*own`"):
            trainer(1, devices=1, enable_checkpointing=False).fit(model, data)


def _read(folder: Path, use_distributed_sampler: bool) -> list[list[list[int]]]:
    # warnings are errors in spawned ranks; Lightning gives both warnings, see ringflash.train.commands.train.quieten
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    data = module(folder, batch_size=6)
    run = trainer(
        1,
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(data_parallel_size=3, context_parallel_size=1),
        use_distributed_sampler=use_distributed_sampler,
        enable_checkpointing=False,
    )
    run.strategy.connect(Reader())
    data.trainer = run
    run.strategy.setup_environment()
    data.prepare_data()
    data.setup("fit")
    loader = run._data_connector._prepare_dataloader(data.train_dataloader(), shuffle=True, mode=None)  # pyright: ignore
    return [batch["input_ids"].tolist() for batch in loader]  # pyright: ignore


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_lightning_does_not_replace_the_sampler(tmp_path: Path, use_distributed_sampler: bool) -> None:
    alone = module(tmp_path, batch_size=6)
    by_rank = run_ranks(3, _read, tmp_path, use_distributed_sampler)
    whole = [b["input_ids"].tolist() for b in ready(alone).train_dataloader()]
    joined = [[row for rows in zip(*parts, strict=True) for row in rows] for parts in zip(*by_rank, strict=True)]
    assert joined == whole
