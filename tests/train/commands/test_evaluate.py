from __future__ import annotations

import gzip
import itertools
import json
import warnings
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

import ringflash as rf
from ringflash.commands import main as cli
from ringflash.errors import ArgumentError, ConfigError, DataError
from ringflash.train.callbacks.loss_by_position import LossByPosition, buckets
from ringflash.train.callbacks.profiler import Profile, summary
from ringflash.train.callbacks.run_log import read_run
from ringflash.train.callbacks.throughput import Throughput
from ringflash.train.callbacks.trace import Cost
from ringflash.train.commands import evaluate
from ringflash.train.commands.evaluate import losses_by_position, main
from ringflash.train.data.module import TextDataModule
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.xdist_group("evaluate")

MODEL = ModelConfig(vocab_size=257, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48)
SEQLEN = 150
CU_SEQLENS = torch.tensor([[0, 70, 70, 140, SEQLEN, SEQLEN]])


def rows(count: int) -> list[dict[str, Tensor]]:
    """Returns sequences with labels, some of which are masked."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 257, (count, SEQLEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, 100:110] = -100
    return [{"input_ids": t[:-1], "labels": x} for t, x in zip(tokens, labels, strict=True)]


def stack(part: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in part]) for name in part[0]}


def drawn_in_float64() -> Decoder:
    """Returns a decoder with the initial weights of training; weights drawn in float32 would differ."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Decoder(MODEL, seed=5)
    finally:
        torch.set_default_dtype(default)


def reference(decoder: Decoder, part: list[dict[str, Tensor]], cu_seqlens: Tensor) -> dict[str, tuple[int, float]]:
    """Returns (tokens, mean loss) of each bucket of positions, with each document run alone through the decoder."""
    found: dict[str, tuple[int, float]] = {}
    ends = cu_seqlens.unique().tolist()
    for batch in (stack([row]) for row in part):
        for first, end in itertools.pairwise(ends):
            ids, labels = (batch[name][:, first:end] for name in ("input_ids", "labels"))
            with torch.no_grad():
                chances = decoder(ids, torch.arange(end - first)).log_softmax(-1)[0]
            for position, label in enumerate(labels[0].tolist()):
                if label != -100:
                    name = "0-63" if position < 64 else "64-127" if position < 128 else "128-255"
                    tokens, total = found.get(name, (0, 0.0))
                    found[name] = tokens + 1, total - chances[position, label].item()
    return {name: (tokens, total / tokens) for name, (tokens, total) in found.items()}


def _run(folder: str) -> tuple[Tensor, Tensor]:
    """Trains two steps with all callbacks, then evaluates twice, on the ranks of the default group."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*log directory.*|.*logs directory.*")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(),
        max_steps=2,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[Throughput(0), LossByPosition(), Profile((2, 2))],
        limit_val_batches=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    optimizer = OptimizerConfig(warmup_steps=3, max_steps=9)
    module = LanguageModel(MODEL, optimizer, "float64", seed=5)
    loader = DataLoader(cast("Any", rows(8)), batch_size=2)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(f"{folder}/last")
    decoder, context = Decoder(MODEL, seed=5).double(), rf.ContextParallel(dist.group.WORLD)
    packed = [stack([row]) | {"cu_seqlens": CU_SEQLENS} for row in rows(2)]
    tables = [losses_by_position(decoder, batches, context) for batches in (packed, [stack(rows(2))])]
    (Path(folder) / "text.txt").write_text("the quick brown fox\n" * 200)
    assert main(evaluate_arguments(Path(folder), "ring.json")) == 0
    return tables[0], tables[1]


def evaluate_arguments(folder: Path, name: str) -> list[str]:
    args = f"--checkpoint {folder}/last --corpus {folder}/text.txt --context-length 300 --cache-dir {folder}/cache"
    given = ["--val-fraction", "0.5", "--max-samples", "3", "--device", "cpu"]
    return [*args.split(), *given, "--json", f"{folder}/{name}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Tensor, Tensor]]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(2, _run, str(folder))


def test_training_logs_the_loss_by_position_of_all_ranks(run: Any) -> None:
    log = read_run(run[0])
    expected = reference(drawn_in_float64(), rows(4), torch.tensor([[0, SEQLEN]]))
    assert set(expected) == {"0-63", "64-127", "128-255"}
    for name, (_, loss) in expected.items():
        first = log.points(f"train/loss_by_position/{name}")[0]
        assert first == (1, pytest.approx(loss, rel=1e-6))  # metrics are float32
    assert len(log.points("train/tokens_per_second")) == 2
    assert [rate for _, rate in log.points("train/learning_rate")] == pytest.approx([1e-4, 2e-4])


def test_traces_of_all_ranks(run: Any) -> None:
    for rank in range(2):
        with gzip.open(run[0] / "profile" / f"steps-2-2-rank{rank}.json.gz", "rt") as stream:
            assert any(e.get("name") == "ringflash::attention_backward" for e in json.load(stream)["traceEvents"])
    page = (run[0] / "profile" / "steps-2-2.md").read_text()
    assert "No GPU in the trace" in page
    assert "ringflash::attention_backward" in page


@pytest.mark.parametrize(("index", "cu_seqlens"), [(0, CU_SEQLENS), (1, torch.tensor([[0, SEQLEN]]))])
def test_ring_against_documents_on_their_own(run: Any, index: int, cu_seqlens: Tensor) -> None:
    decoder = Decoder(MODEL, seed=5).double()
    expected = reference(decoder, rows(2), cu_seqlens)
    batch = [stack([row]) | ({"cu_seqlens": cu_seqlens} if index == 0 else {}) for row in rows(2)]
    for table in (sum(ranks[index] for ranks in run[1]), losses_by_position(decoder, batch)):
        found = {b.name: (b.tokens, b.loss) for b in buckets(cast("Tensor", table))}
        assert found.keys() == expected.keys()
        for name, (tokens, loss) in expected.items():
            assert found[name] == (tokens, pytest.approx(loss, rel=1e-12))


def test_command_alone_and_on_a_ring(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder: Path = run[0]
    assert cli.main(["evaluate", *evaluate_arguments(folder, "one.json"), "--png", str(folder / "loss.png")]) == 0
    printed = capsys.readouterr().out
    one, ring = (json.loads((folder / name).read_text()) for name in ("one.json", "ring.json"))
    assert one["tokens"] == ring["tokens"] == 900
    assert [row["last"] for row in one["by_position"]] == [63, 127, 255, 511]
    assert one["loss"] == pytest.approx(ring["loss"], rel=1e-5)
    for row, other in zip(one["by_position"], ring["by_position"], strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    assert f"{one['perplexity']:.4g}" in printed
    with Image.open(folder / "loss.png") as image:
        assert image.format == "PNG"


def test_tokens_that_the_model_lacks() -> None:
    batch = {"input_ids": torch.tensor([[1, 300]]), "labels": torch.tensor([[300, 1]])}
    with pytest.raises(DataError, match="token ids below 257, got 300"):
        losses_by_position(Decoder(MODEL), [batch])


def test_bad_arguments(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = evaluate_arguments(run[0], "none.json")
    for more, message in ((["--max-samples", "0"], "--max-samples"), (["--png", "loss.txt"], "--png")):
        assert cli.main(["evaluate", *args, *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("documents", ["packed", "whole", "joined"])
def test_longer_samples_do_not_reach_tokens_of_training(tmp_path: Path, documents: str) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 200)
    corpus = {"corpus": [str(tmp_path / "text.txt")], "cache_dir": str(tmp_path / "cache")}
    of_training = TextDataModule(**corpus, context_length=50, documents=cast("Any", documents), val_fraction=0.1)
    of_training.prepare_data()
    of_training.setup("fit")
    held_out = len(of_training.val_samples().line) - of_training.val_samples().first

    def data(context_length: int) -> TextDataModule:
        given = {"context_length": context_length, "documents": None, "val_fraction": None}
        return evaluate._data(Namespace(**corpus, **given, checkpoint="none"), of_training.state_dict())

    assert data(held_out // 2).val_samples().first == of_training.val_samples().first
    with pytest.raises(ArgumentError, match=f"--context-length: expected samples within the {held_out} tokens"):
        data(2 * held_out)


@pytest.mark.parametrize("several", [False, True])
def test_the_corpus_of_training_by_default(tmp_path: Path, several: bool) -> None:
    text, given = str(tmp_path / "text.txt"), {"cache_dir": str(tmp_path / "cache"), "context_length": 50}
    Path(text).write_text("the quick brown fox\n" * 200)
    of_training = TextDataModule([text] if several else text, **cast("Any", given))
    of_training.prepare_data()
    of_training.setup("fit")
    options = Namespace(**given, corpus=None, documents=None, val_fraction=None, checkpoint="none")
    assert evaluate._data(options, of_training.state_dict()).sources == text
    assert options.corpus == [text]
    options.corpus = None
    message = "--corpus: expected the text to evaluate on, got none, and the checkpoint does not name .* Name the files"
    with pytest.raises(ArgumentError, match=message):
        evaluate._data(options, {})


def test_bad_steps_to_trace() -> None:
    for steps in ((1, 2), (5, 4), (3,)):
        with pytest.raises(ConfigError, match="profile.steps"):
            Profile(cast("Any", steps))
    trainer: Any = SimpleNamespace(max_steps=11)
    with pytest.raises(ConfigError, match="a run of 11"):
        Profile((10, 12)).on_train_start(trainer, cast("Any", None))


def test_page_of_a_trace() -> None:
    page = summary(10, 11, [[0.2, 0.1, 0.06, 0.05, 0.05], [0.2, 0.2, 0.0, 0.0, 0.0]], (Cost("a|b", 0.03, 4),))
    assert "| 0 | 100.00 | 50.00 | 30.00 | 25.00 (25.0%) | 25.00 |" in page
    assert "| `a/b` | 15.000 | 2.0 | 100.0% |" in page
