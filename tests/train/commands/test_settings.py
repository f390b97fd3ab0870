"""Settings of runs: configurations are understood, and one setting reaches all parts that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import ringflash
from ringflash.train.commands import train
from ringflash.train.commands.finetune import DpoCLI, FinetuneCLI
from ringflash.train.commands.retrieval import RetrievalCLI

# Lightning calls a jsonargparse method by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIGS = Path(ringflash.__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_configs_are_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {"retrieval": RetrievalCLI, "lora": FinetuneCLI, "dpo": DpoCLI}
    command = commands.get(path.stem.partition("-")[0], train.RingCLI)
    monkeypatch.setattr(train.RingCLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(train.RingCLI, "_run_subcommand", lambda self, subcommand: None)
    monkeypatch.setattr(train.RingCLI, "after_instantiate_classes", lambda self: None)
    config = command(["fit", "--config", str(path)], []).config.fit
    assert "max_steps" not in config.model.optimizer
    assert config.trainer.max_steps > config.model.optimizer.warmup_steps
    strategy = config.trainer.strategy
    assert getattr(strategy, "class_path", strategy) in (
        "ring_attention",
        "ringflash.train.lightning.strategy.RingAttentionStrategy",
    )
    assert config.trainer.use_distributed_sampler is False
    if command is train.RingCLI:
        assert config.data.corpus == "stdlib"
    elif issubclass(command, FinetuneCLI):
        assert config.model.lora.rank == 16
        assert config.summary.sample_tokens == 0
    else:
        assert config.summary.sample_tokens == 0
        longest = config.data.first_length << (config.trainer.max_steps - 1) // config.data.double_every
        assert longest >= 2 * config.data.context_length  # some steps train on whole sequences


@pytest.mark.parametrize(
    ("trainer_steps", "own", "expected"), [(1000, None, 1000), (1000, 300, 300), (-1, 300, 300), (5, None, 11)]
)
def test_the_learning_rate_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer_steps: int, own: int | None, expected: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.RingCLI, "_run_subcommand", lambda self, subcommand: None)
    args = ["fit", "--config", str(CONFIGS / "tiny-cpu.yaml"), f"--trainer.max_steps={trainer_steps}"]
    built = train.RingCLI([*args, *([f"--model.optimizer.max_steps={own}"] if own else [])], [])
    assert built.model.optimizer_config.max_steps == expected
    written = yaml.safe_load(built.parser.dump(built.config))["fit"]["model"]["optimizer"]
    assert written.get("max_steps") == own


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], (0, 0)),
        (["--seed_everything=5"], (5, 5)),
        (["--seed_everything=5", "--model.seed=2"], (2, 5)),
        (["--seed_everything=true"], (0, 0)),
    ],
)
def test_one_seed_is_that_of_weights_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], expected: tuple[int, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.RingCLI, "_run_subcommand", lambda self, subcommand: None)
    config = yaml.safe_load((CONFIGS / "tiny-cpu.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({k: v for k, v in config.items() if k != "seed_everything"}))
    built = train.RingCLI(["fit", "--config", "config.yaml", *given], [])
    assert (built.model.seed, cast("Any", built.datamodule).seed) == expected
    config = yaml.safe_load(built.parser.dump(built.config))["fit"]
    assert (config["model"]["seed"], config["data"]["seed"]) == expected
