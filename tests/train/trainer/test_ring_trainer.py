"""RingTrainer trains, evaluates, saves and resumes as Trainer does in one process, on one ring and on several."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import ringflash.train
from ringflash.errors import ArgumentError, ConfigError, PeerFailed, RankMismatch
from ringflash.extras import MissingExtra
from tests.helpers.distributed import run_ranks
from tests.helpers.programs import OUTER
from tests.train.trainer.runs import Outcome, Rows, Run, collate, make_trainer, train

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.xdist_group("trainer")

TOLERANCE = 1e-5
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
DROPOUT = Run(model={"attention_dropout": 0.2}, settings={"max_steps": 2})
# Runs that each world makes, and that equal those of Trainer in one process with sdpa attention.
RUNS = {
    "plain": Run(),
    "packed": Run(rows=1, data={"packed": True}),
    "recomputed": Run(settings={"activation_checkpointing": True, "max_steps": 2}),
    "grouped by length": Run(family="Qwen3", settings={"train_sampling_strategy": "group_by_length", "max_steps": 2}),
    "short": Run(data={"length": 2}, settings={"max_steps": 2}),
    "whole logits": Run(family="Cohere", settings={"max_steps": 2}),
    "tied head": Run(model={"tie_word_embeddings": True}, settings={"max_steps": 2}),
    "adapters": Run(lora=True, settings={"max_steps": 2}),
    "stream": Run(stream=True, settings={"max_steps": 2}),
}
OF_ANY_SIZE = ("recomputed", "whole logits", "tied head", "adapters")  # three ranks would show what two do
TWO_RINGS = {name: RUNS[name] for name in ("plain", "stream")}
CASES = [(n, name) for n in (1, 2, 3) for name in RUNS if n < 3 or name not in OF_ANY_SIZE]


class Unlike:
    """Collator that on rank 0 makes another batch."""

    def __init__(self, change: str) -> None:
        self.change = change

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(rows)
        if dist.get_rank() == 0:
            if self.change == "rows":
                batch["input_ids"] = batch["input_ids"].flip(0)
            else:
                batch = {name: x.flip(1) for name, x in batch.items()}
        return batch


def _error(run: Run, folder: str) -> str:
    try:
        train(run, folder)
    except (ArgumentError, PeerFailed, RankMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _all_runs(folder: str) -> dict[str, Any]:
    world_size = dist.get_world_size()
    if world_size == 4:
        outcomes = {name: train(replace(run, ring=2, rows=1), folder) for name, run in TWO_RINGS.items()}
        outcomes["split"] = train(Run(ring=2, settings={"accelerator_config": {"split_batches": True}}), folder)
        return outcomes
    names = [name for n, name in CASES if n == world_size]
    outcomes: dict[str, Any] = {name: train(RUNS[name], folder) for name in names}
    outcomes["dropout"] = train(DROPOUT, folder)
    if world_size == 2:
        train(Run(settings=SAVED), f"{folder}/saved")
        for change in ("rows", "padding"):
            outcomes[change] = _error(Run(options={"data_collator": Unlike(change)}), folder)
        best = {**SAVED, "load_best_model_at_end": True}
        outcomes["best"] = train(Run(settings=best), f"{folder}/best")
        outcomes["bf16"] = train(Run(settings={"bf16": True}), folder)
    if world_size == 3:
        outcomes["resumed"] = train(Run(resume=f"{folder}/saved/checkpoint-2"), folder)
    return outcomes


class Worlds:
    """Outcomes by world size on rank 0; 0 is Trainer in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with mock.patch.dict(os.environ):
            for name in OUTER:
                os.environ.pop(name, None)
            own = {name: train(replace(run, ring=0), folder / "own") for name, run in RUNS.items()}
            one = {name: train(run, folder / "one") for name, run in {**RUNS, "dropout": DROPOUT}.items()}
        self.outcomes: dict[int, list[dict[str, Any]]] = {0: [own], 1: [one]}
        self.outcomes |= {n: run_ranks(n, _all_runs, str(folder)) for n in (2, 3, 4)}

    def __getitem__(self, world_size: int) -> dict[str, Any]:
        return self.outcomes[world_size][0]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("trainer"))


def assert_equal(got: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    for name in ("losses", "norms", "evaluations", "rates"):
        assert len(getattr(got, name)) > 0
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=0, abs=tolerance), name
    for name, weight in expected.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=tolerance, msg=name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_one_ring_trains_as_one_process(worlds: Worlds, world_size: int, name: str) -> None:
    assert_equal(worlds[world_size][name], worlds[0][name])


@pytest.mark.parametrize("name", TWO_RINGS)
def test_two_rings_of_two_train_as_one_process_with_both_batches(worlds: Worlds, name: str) -> None:
    assert_equal(worlds[4][name], worlds[0][name])


def test_batches_are_split_over_rings(worlds: Worlds) -> None:
    """Trainer then divides the rows that it is given, where it otherwise multiplies them."""
    split, plain = worlds[4]["split"], worlds[0]["plain"]
    assert split.losses == pytest.approx(plain.losses, rel=0, abs=TOLERANCE)


def test_the_best_checkpoint_is_loaded(worlds: Worlds) -> None:
    """The evaluation after two steps is better than the last one."""
    best = worlds[2]["best"]
    assert best.evaluations[0] < best.evaluations[1]
    stored = load_file(worlds.folder / "best" / "checkpoint-2" / "model.safetensors")
    for name, weight in stored.items():
        torch.testing.assert_close(best.weights[name], weight, rtol=0, atol=0)


def test_the_runs_tell_gradients_apart(worlds: Worlds) -> None:
    """Clipping is active, the loss falls, and each rank of a world has the same results."""
    plain = worlds[0]["plain"]
    assert min(plain.norms) > 0.4
    assert plain.losses[-1] < plain.losses[0] - 0.1
    for outcomes in worlds.outcomes.values():
        for other in outcomes[1:]:
            assert_equal(other["plain"], outcomes[0]["plain"], 0.0)


def test_dropout_is_that_of_one_rank(worlds: Worlds) -> None:
    one = worlds[1]["dropout"]
    assert abs(one.losses[0] - worlds[0]["plain"].losses[0]) > 1e-4
    for world_size in (2, 3):
        assert_equal(worlds[world_size]["dropout"], one)


def test_mixed_precision(worlds: Worlds) -> None:
    assert worlds[2]["bf16"].losses == pytest.approx(worlds[0]["plain"].losses, abs=0.02)


def test_operations_are_counted_once(worlds: Worlds) -> None:
    for world_size in (1, 2, 3):
        assert worlds[world_size]["plain"].flops == pytest.approx(worlds[0]["plain"].flops, rel=1e-6)


def test_a_checkpoint_of_two_ranks_continues_on_three(worlds: Worlds) -> None:
    straight, resumed = worlds[0]["plain"], worlds[3]["resumed"]
    assert resumed.losses[-2:] == pytest.approx(straight.losses[-2:], rel=0, abs=TOLERANCE)
    for name, weight in straight.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=TOLERANCE)


def test_a_saved_model_loads_without_ringflash(worlds: Worlds) -> None:
    from transformers import AutoModelForCausalLM

    folder = worlds.folder / "saved" / "checkpoint-4"
    assert "ring_attention" not in (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config._attn_implementation == "sdpa"
    for name, weight in worlds[0]["plain"].weights.items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=TOLERANCE)


def test_ranks_of_a_ring_with_other_rows_raise_together(worlds: Worlds) -> None:
    for outcomes in worlds.outcomes[2]:
        assert outcomes["rows"].startswith("RankMismatch: ranks disagree on tokens")
    wrong, other = (outcomes["padding"] for outcomes in worlds.outcomes[2])
    assert wrong.startswith("ArgumentError: batch['attention_mask']: expected a mask")
    assert other.startswith("PeerFailed: ranks [0] raised")


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"include_for_metrics": ["inputs"]}, "include_for_metrics"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings: dict[str, Any], argument: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}: expected"):
        make_trainer(Run(settings=settings), tmp_path)


@pytest.mark.parametrize("argument", ["deepspeed", "fsdp", "parallelism_config", "n_gpu", "predict_with_generate"])
def test_other_ways_to_spread_a_model_are_refused(argument: str, tmp_path: Path) -> None:
    from ringflash.train.trainer.ring_trainer import check_settings

    args = make_trainer(Run(), tmp_path).args
    check_settings(args)
    given = {name: getattr(args, name, None) for name in dir(args) if not name.startswith("_")}
    with pytest.raises(ConfigError, match=f"^{argument}: expected"):
        check_settings(SimpleNamespace(**given | {argument: 2}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_metrics": len}, "compute_metrics: expected None"),
        ({"preprocess_logits_for_metrics": max}, "preprocess_logits_for_metrics: expected None"),
        ({"compute_loss_func": len}, "compute_loss_func: expected None"),
        ({"context_parallel_size": 2}, "context_parallel_size: expected a divisor of the 1 processes, or None, got 2"),
        ({"layout": "balanced"}, "layout: expected zigzag, contiguous or striped"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_trainer(Run(options=options), tmp_path)


def test_predictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prediction_loss_only: expected True on a ring"):
        make_trainer(Run(), tmp_path).predict(Rows())


def test_a_model_of_another_loss_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification(make_trainer(Run(), tmp_path).model.config)
    with pytest.raises(ConfigError, match="model: expected a causal .* got ForSequenceClassification"):
        make_trainer(Run(options={"model": model}), tmp_path)


def test_a_router_with_a_loss_is_refused(tmp_path: Path) -> None:
    run = Run(family="Qwen3Moe", model={"output_router_logits": True, "num_experts": 4, "num_experts_per_tok": 2})
    with pytest.raises(ConfigError, match=r"config.output_router_logits: expected False"):
        make_trainer(run, tmp_path)


def test_models_are_made_by_model_init(tmp_path: Path) -> None:
    from tests.train.trainer.runs import make_model

    trainer = make_trainer(Run(options={"model": None, "model_init": lambda: make_model(Run())}), tmp_path)
    assert trainer.model.config._attn_implementation == "ring_attention"


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match=r"RingTrainer needs accelerate, .* `pip install 'ringflash\[trainer\]'`"):
        ringflash.train.RingTrainer  # noqa: B018
