"""RingAttentionStrategy: sizes, meshes, batches, random numbers, and Lightning's own launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from ringflash.compile_once import Compilations
from ringflash.errors import ConfigError
from ringflash.train.lightning.strategy import RingAttentionStrategy, resolve_sizes, sum_gradients
from tests.helpers.distributed import run_ranks
from tests.helpers.ports import unused_port
from tests.helpers.programs import run_program
from tests.train.runs import Run, sequences, train, train_alone

Size = Literal["auto"] | int


@pytest.mark.parametrize(
    ("data", "context", "world_size", "expected"),
    [
        ("auto", "auto", 8, (1, 8)),
        (2, "auto", 8, (2, 4)),
        ("auto", 2, 8, (4, 2)),
        (4, 2, 8, (4, 2)),
        ("auto", "auto", 1, (1, 1)),
    ],
)
def test_sizes(data: Size, context: Size, world_size: int, expected: tuple[int, int]) -> None:
    assert resolve_sizes(data, context, world_size) == expected


@pytest.mark.parametrize(("data", "context"), [(3, "auto"), ("auto", 3), (2, 2), (16, "auto")])
def test_sizes_that_do_not_fit(data: Size, context: Size) -> None:
    with pytest.raises(ConfigError, match="== 8 ranks"):
        resolve_sizes(data, context, 8)


@pytest.mark.parametrize("size", [0, -1, "all", 2.0])
def test_size_of_the_wrong_kind(size: Any) -> None:
    with pytest.raises(ConfigError, match="context_parallel_size: expected"):
        RingAttentionStrategy(context_parallel_size=size)


@pytest.mark.parametrize("size", [0, -1, "auto", 2.0])
def test_copies_of_the_wrong_kind(size: Any) -> None:
    with pytest.raises(ConfigError, match="replicate_size: expected a positive integer"):
        RingAttentionStrategy(replicate_size=size)


def test_a_layout_that_needs_a_mask() -> None:
    with pytest.raises(ConfigError, match="layout: expected one of .*'striped'.*got 'balanced'. A batch is cut before"):
        RingAttentionStrategy(layout="balanced")  # type: ignore[arg-type]


def test_compilations_are_reported_after_the_first_step_only(caplog: pytest.LogCaptureFixture) -> None:
    strategy = RingAttentionStrategy()
    strategy._compilations = Compilations([("triton.forward._forward_kernel", 6.0)])
    with caplog.at_level("INFO", "ringflash.compilation"):
        for _ in range(2):
            strategy._report_compilations()
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "Rank 0 compiled 1 kernel(s) in 6.0 s by the end of the first step"
    ]


def test_registered() -> None:
    assert isinstance(StrategyRegistry.get("ring_attention"), RingAttentionStrategy)


def test_before_the_processes_have_met() -> None:
    strategy = RingAttentionStrategy()
    with pytest.raises(RuntimeError, match="only after"):
        _ = strategy.context
    with pytest.raises(RuntimeError, match="only after"):
        _ = strategy.shard_mesh
    with pytest.raises(RuntimeError, match="only after"):
        _ = strategy.world_group


def test_a_parameter_that_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match="2 that are not, the first weight. Call fully_shard.* under RingAttention"):
        sum_gradients(torch.nn.Linear(3, 3))


def _divisions() -> int:
    """Returns the divisions in the backward of a module that is sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = fully_shard(torch.nn.Linear(3, 3), mesh=mesh)
    sum_gradients(model)
    loss = model(torch.ones(2, 3)).sum()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss.backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((3, 3), 2.0 * dist.get_world_size()))
    return sum(event.count for event in profiler.key_averages() if "div" in event.key)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_summed_without_a_pass_that_divides_by_1(ranks: int) -> None:
    assert run_ranks(ranks, _divisions) == [0] * ranks


LOSSES = {"train/loss", "val/loss", "test/loss"}


class Probe(RingAttentionStrategy):
    """A strategy that records the first batch that it shards."""

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = getattr(self, "seen", None) or super().batch_to_device(*args, **kwargs)
        return self.seen


def _probe() -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    run, strategy = Run(), Probe(layout="zigzag")
    outcome = train(run, strategy)
    own = {"num_replicas": 1, "rank": 0}
    assert strategy.distributed_sampler_kwargs == own
    parallel = Probe(context_parallel_size=1)
    train(Run(data_parallel=2), parallel)
    assert parallel.distributed_sampler_kwargs == {"num_replicas": 2, "rank": dist.get_rank()}
    assert parallel.shard_mesh.size() == 2
    evaluated = train(Run(steps=1, epoch_batches=1, validate=True))
    assert evaluated.extra["metrics"].keys() >= LOSSES
    for name in LOSSES:  # they are equal on all ranks, so Lightning's reduction must not change them
        assert evaluated.extra["metrics"][name] == pytest.approx(evaluated.logged[name][-1], rel=1e-6), name
    return {"batch": strategy.seen, "whole": parallel.seen, "random": outcome.extra["random"], "evaluated": evaluated}


def test_batches_random_numbers_and_what_callbacks_read() -> None:
    ranks = run_ranks(2, _probe)
    first, second = (rank["evaluated"].extra["metrics"] for rank in ranks)
    assert first == second
    rows = sequences(Run())[:2]
    whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    positions = torch.cat([rank["batch"]["position_ids"] for rank in ranks])
    assert sorted(positions.tolist()) == list(range(53))
    for rank in ranks:
        batch = rank["batch"]
        for name in ("input_ids", "labels"):
            assert torch.equal(batch[name], whole[name][:, batch["position_ids"]])
        assert batch["num_valid_tokens"] == (whole["labels"] != -100).sum()
        assert rank["whole"]["num_valid_tokens"] == batch["num_valid_tokens"]
        assert rank["whole"]["input_ids"].shape == (1, 53)
    assert ranks[0]["random"] != ranks[1]["random"]


SCRIPT = """
import json
import warnings
warnings.filterwarnings("error")
warnings.filterwarnings("ignore", message=".*does not have many workers")
warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
warnings.filterwarnings("ignore", message="GPU available but not used")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
import ringflash.train.lightning.strategy
from tests.train.runs import Data, Outcome, Recorded, Run
run = Run(dtype="float64", epoch_batches=2)
losses = []
for steps, resume in ((2, None), (6, "saved/last.ckpt")):
    best = ModelCheckpoint("saved", every_n_train_steps=1, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ring_attention", max_steps=steps, logger=False, callbacks=[best],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=1,
    )
    outcome = Outcome()
    module, data = Recorded(run, outcome), Data(run)
    trainer.fit(module, data, ckpt_path=resume)
    losses += outcome.logged["train/loss"]
    trainer.validate(module, data, ckpt_path="best", verbose=False)
    in_fit, again = outcome.logged["val/loss"][-2:]
    assert abs(in_fit - again) < 1e-12, (in_fit, again)
with open(f"losses-{trainer.global_rank}.json", "w") as file:
    json.dump(losses, file)
"""


def test_by_name_with_lightning_s_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[3]
    result = run_program([str(script)], tmp_path, PYTHONPATH=str(root), MASTER_PORT=str(unused_port()))
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == pytest.approx(train_alone(Run(dtype="float64", epoch_batches=2, steps=6)), rel=1e-10)
    assert len([path for path in (tmp_path / "saved").iterdir() if (path / "manifest.json").is_file()]) == 2


@pytest.mark.parametrize("keys", ["loss_mask", ("labels",), ("position_ids",), (3,)])
def test_keys_that_cannot_be_cut(keys: Any) -> None:
    with pytest.raises(ConfigError, match="shard_keys: expected a sequence of names of batch entries other than"):
        RingAttentionStrategy(shard_keys=keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_beyond_the_dtype_of_the_gradients(dtype: torch.dtype) -> None:
    strategy, parameter = RingAttentionStrategy(), torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.ones(3, dtype=dtype)
    strategy._window_tokens = [torch.tensor(count) for count in (70_001, 69_999)]  # float16 ends at 65,504
    strategy._rescale_gradients(torch.optim.SGD([parameter]))
    assert parameter.grad.tolist() == [0.5] * 3
