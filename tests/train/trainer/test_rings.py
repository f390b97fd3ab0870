"""A loop of accelerate with rings has the losses and gradients of a plain loop in one process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ringflash.errors import ConfigError, RankMismatch
from tests.helpers.distributed import run_ranks
from tests.train.trainer.runs import Rows, Run, collate, make_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, ACCUMULATION = 2, 2


def make_accelerator(cpu: bool = True, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", OMP_NUM_THREADS="1")
        os.environ.update(LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    return Accelerator(cpu=cpu, **options)


def plain_loop() -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process, without accelerate and without a ring."""
    model = make_model(Run())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches, losses = iter(DataLoader(Rows(), batch_size=2, collate_fn=collate)), []
    for _ in range(STEPS):
        window = [next(batches) for _ in range(ACCUMULATION)]
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        losses.append(0.0)
        for batch in window:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / total
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.state_dict().items()}


def loop(ring_size: int | None, rows: int, steps_of_accelerate: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains with accelerate, which divides losses by its steps of accumulation if it counts them."""
    from ringflash.train import AcceleratorRing

    accelerator = make_accelerator(gradient_accumulation_steps=steps_of_accelerate)
    ring = AcceleratorRing(accelerator, ring_size)
    model = make_model(Run())
    ring.use_ring_attention(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared, loader = accelerator.prepare(model, DataLoader(Rows(), batch_size=rows, collate_fn=collate))
    batches, losses = iter(loader), []
    for _ in range(STEPS):
        window = [next(batches) for _ in range(ACCUMULATION)]
        count = ring.count_valid_tokens(window)
        losses.append(0.0)
        for index, batch in enumerate(window):
            with accelerator.no_sync(prepared) if index < len(window) - 1 else nullcontext():
                mean = ring.token_mean(prepared, batch, num_valid_tokens=count)
                accelerator.backward(mean.loss)
            losses[-1] += mean.value.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.state_dict().items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "ring_size", "rows", "steps_of_accelerate"), [(2, None, 2, 1), (2, 2, 2, 2), (2, 1, 1, 1)]
)
def test_a_loop_trains_as_one_process(world_size: int, ring_size: int, rows: int, steps_of_accelerate: int) -> None:
    losses, weights = plain_loop()
    for got, found in run_ranks(world_size, loop, ring_size, rows, steps_of_accelerate):
        assert got == pytest.approx(losses, rel=0, abs=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


def refusals() -> list[str]:
    """Returns the errors of accelerators and sizes that two ranks cannot honour."""
    from accelerate import DataLoaderConfiguration

    from ringflash.train import AcceleratorRing

    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, 3),
        ({}, 0),
        ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, 2),
        ({"dataloader_config": DataLoaderConfiguration(even_batches=False)}, 1),
    ]
    errors = []
    for options, size in cases:
        with pytest.raises(ConfigError) as error:
            AcceleratorRing(make_accelerator(**options), size)
        errors.append(error.value.argument)
    return errors


def error_without_cpu() -> str:
    """Returns the error on ranks without GPUs whose accelerator has not been told so, and takes each as a run."""
    from ringflash.train import AcceleratorRing

    with pytest.raises(ConfigError) as error:
        AcceleratorRing(make_accelerator(cpu=False))
    return str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate finds the GPU")
def test_processes_that_accelerate_would_train_apart_are_refused() -> None:
    for error in run_ranks(2, error_without_cpu):
        assert error.startswith(
            "accelerator: expected one of the 2 processes that were started, got 1 process. On CPUs"
        )


def test_accelerators_that_cannot_be_right_are_refused() -> None:
    expected = ["context_parallel_size", "context_parallel_size", "dispatch_batches", "even_batches"]
    assert run_ranks(2, refusals) == [expected] * 2


@pytest.mark.parametrize(("name", "value"), [("distributed_type", "FSDP"), ("parallelism_config", object())])
def test_models_that_accelerate_shards_are_refused(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from ringflash.train import AcceleratorRing

    accelerator = make_accelerator()
    monkeypatch.setattr(Accelerator, name, DistributedType[value] if isinstance(value, str) else value)
    with pytest.raises(ConfigError, match="^(accelerator|parallelism_config): expected"):
        AcceleratorRing(accelerator)


def unequal() -> str:
    """Returns the error of a loop with a shorter data set on rank 1."""
    from ringflash.train import AcceleratorRing

    accelerator = make_accelerator()
    ring, model = AcceleratorRing(accelerator, 1), make_model(Run())
    ring.use_ring_attention(model)
    rows = Rows(8 - 2 * dist.get_rank())
    prepared, loader = accelerator.prepare(model, DataLoader(rows, batch_size=1, collate_fn=collate))
    batches = iter(loader)
    for batch in islice(batches, 2):
        accelerator.backward(ring.token_mean(prepared, batch).loss)
    with pytest.raises(RankMismatch) as error:
        ring.token_mean(prepared, next(batches))
    return str(error.value)


def test_rings_with_unequal_numbers_of_batches_all_raise() -> None:
    for error in run_ranks(2, unequal):
        assert "rank 0: training batch, not the last" in error
        assert "rank 1: training batch, the last   <-- differs" in error


def test_tokens_outside_the_vocabulary_are_named() -> None:
    from ringflash.errors import ArgumentError
    from ringflash.train import AcceleratorRing

    ring, model = AcceleratorRing(make_accelerator()), make_model(Run())
    ring.use_ring_attention(model)
    batch = collate([Rows()[0]])
    batch["input_ids"][0, 3] = 61
    with pytest.raises(ArgumentError, match=r"ids from 0 to 60, got 61 at \(0, 3\)"):
        ring.token_mean(model, batch)


@pytest.mark.parametrize(("family", "width"), [("Llama", 64), ("Cohere", 61)])
def test_logits_are_whole_only_where_a_model_changes_them(
    family: str, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    from ringflash.train import AcceleratorRing

    ring, model = AcceleratorRing(make_accelerator()), make_model(Run(family=family))
    ring.use_ring_attention(model)
    assert ("Loss: of whole logits, since CohereForCausalLM changes" in caplog.text) == (family == "Cohere")
    widths: list[int] = []
    with model.register_forward_hook(lambda _module, _args, output: widths.append(output.logits.shape[-1])):
        ring.token_mean(model, collate([Rows()[0]])).loss.backward()
    assert widths == [width]
    assert model(torch.ones(1, 3, dtype=torch.int64), use_cache=False).logits.shape == (1, 3, 61)


def test_a_model_that_ignores_its_loss_function_has_whole_logits() -> None:
    from transformers import LlamaForCausalLM

    from ringflash.train.trainer.head import HeadLoss

    class Own(LlamaForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **keywords: Any) -> Any:
            output: Any = super().forward(*args, **keywords)
            output.loss = None if labels is None else output.logits.sum()
            return output

    model = Own(make_model(Run()).config)
    assert HeadLoss(model).why_whole == "does not return that of `loss_function`"
    assert HeadLoss(make_model(Run())).why_whole is None


def test_a_model_without_ring_attention_is_refused() -> None:
    from ringflash.train import AcceleratorRing

    with pytest.raises(ConfigError, match="model: expected one with ring attention, got LlamaForCausalLM"):
        AcceleratorRing(make_accelerator()).token_mean(make_model(Run()), collate([Rows()[0]]))


def test_a_model_of_ones_own_is_refused() -> None:
    from ringflash.train import AcceleratorRing

    with pytest.raises(ConfigError, match="model: expected a causal language model of transformers, got Linear"):
        AcceleratorRing(make_accelerator()).use_ring_attention(torch.nn.Linear(2, 2))
