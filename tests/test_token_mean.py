"""token_mean gives one process's loss, gradients and logged figures, under DDP and FSDP2, on any number of ranks."""

from __future__ import annotations

import copy
import logging
import warnings
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ringflash as rf
from ringflash.errors import ArgumentError
from tests.helpers.distributed import run_ranks

VOCAB, SEQLEN, STEPS, MICRO_BATCHES = 23, 31, 2, 2
LAYOUT = "contiguous"  # the rank that holds the prompt has no valid token


class TinyModel(nn.Module):
    """A user's own model with one attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor, context: rf.ContextParallel | None) -> Tensor:
        """Returns the loss of each token."""
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (2, 48)).chunk(3, dim=-1)
        if context is None:
            out = rf.flash_attention(q, k, v, mask=rf.Causal())
        else:
            out = rf.ring_attention(q, k, v, context, mask=rf.Causal())
        assert isinstance(out, Tensor)
        logits = self.head(x + out.flatten(-2))
        return cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def make_model() -> TinyModel:
    torch.manual_seed(3)
    return TinyModel().double()


def make_batches(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Returns batches of conversations with labels only on the responses, which have unequal lengths."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for index in range(count):
        tokens = torch.randint(0, VOCAB, (size, SEQLEN + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for row in range(size):
            labels[row, : SEQLEN - 2 - (3 * index + 4 * row) % 12] = -100
        batches.append((tokens[:, :-1], labels))
    return batches


def alone() -> tuple[list[dict[str, Tensor]], list[float], float]:
    """Returns gradients and losses of each window, and the validation loss, of one process with all the data."""
    model, batches = make_model(), make_batches(STEPS * MICRO_BATCHES + 2)
    gradients, losses = [], []
    for step in range(STEPS):
        window = batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        model.zero_grad()
        total = sum((model(*batch, None).sum() for batch in window), torch.tensor(0.0).double())
        loss = total / sum(int((labels >= 0).sum()) for _, labels in window)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    held_out = batches[STEPS * MICRO_BATCHES :]
    with torch.no_grad():
        total = sum(model(*batch, None).sum().item() for batch in held_out)
    return gradients, losses, total / sum(int((labels >= 0).sum()) for _, labels in held_out)


def parallel(
    model: nn.Module, context: rf.ContextParallel, group: dist.ProcessGroup | None, part: slice
) -> tuple[list[dict[str, Tensor]], list[float], float]:
    """Runs a user's plain training loop on this rank's shards of the sequences `part`; returns the same as `alone`."""
    # cross_entropy returns a view; nothing here changes it in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    batches = [(tokens[part], labels[part]) for tokens, labels in make_batches(STEPS * MICRO_BATCHES + 2)]
    shards = [(context.shard(tokens), context.shard(labels)) for tokens, labels in batches]
    gradients, losses = [], []
    for step in range(STEPS):
        window = shards[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        model.zero_grad()
        count = context.count_valid_tokens([labels for _, labels in window], group=group)
        logged = 0.0
        for tokens, labels in window:
            mean = context.token_mean(model(tokens, labels, context), labels, num_valid_tokens=count, group=group)
            mean.loss.backward()
            assert mean.loss.item() == mean.value.item()
            logged += mean.value.item()
        losses.append(logged)
        named = [(name.removeprefix("module."), p.grad) for name, p in model.named_parameters()]
        gradients.append({name: _whole(grad).clone() for name, grad in named if grad is not None})
    model.eval()
    values = []
    with torch.no_grad():
        for tokens, labels in shards[STEPS * MICRO_BATCHES :]:
            mean = context.token_mean(model(tokens, labels, context), labels, group=group)
            values.append((mean.value.item(), int(mean.num_valid)))
    return gradients, losses, sum(v * n for v, n in values) / sum(n for _, n in values)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _everything() -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = rf.ContextParallel(cast("Any", dist.group.WORLD), layout=LAYOUT)
    whole = slice(None)
    outcomes = {"ddp": parallel(DistributedDataParallel(make_model()), world, None, whole)}
    sharded = make_model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)))
    outcomes["fsdp"] = parallel(sharded, world, None, whole)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data", "context"))
    single = rf.ContextParallel(mesh["context"], layout=LAYOUT)
    part = slice(rank, None, world_size)
    given = mesh.get_group("data")
    outcomes["data parallel"] = parallel(DistributedDataParallel(make_model()), single, given, part)
    virtual = rf.ContextParallel.local(2, layout=LAYOUT)
    outcomes["virtual"] = parallel(DistributedDataParallel(make_model()), virtual, None, part)
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_and_losses_are_one_process_s(world_size: int) -> None:
    gradients, losses, validation = alone()
    for outcomes in run_ranks(world_size, _everything):
        for name, (got, logged, value) in outcomes.items():
            assert logged == pytest.approx(losses, rel=1e-12), name
            assert value == pytest.approx(validation, rel=1e-12), name
            for actual, expected in zip(got, gradients, strict=True):
                assert actual.keys() == expected.keys()
                for parameter, gradient in expected.items():
                    torch.testing.assert_close(actual[parameter], gradient, atol=1e-12, rtol=0, msg=f"{name}")


def _two_by_two() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    context = rf.ContextParallel(mesh["context"], layout=LAYOUT)
    part = slice(mesh.get_local_rank("data"), None, 2)
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert isinstance(model, FSDPModule)
    by_data = parallel(model, context, mesh.get_group("data"), part)
    wrapped = DistributedDataParallel(make_model())
    by_world = parallel(wrapped, context, None, part)
    pairs = [cast("Any", dist.new_group(list(pair))) for pair in pairwise(range(4))]
    try:
        context.token_mean(torch.zeros(1), torch.zeros(1, dtype=torch.int64), group=pairs[0])
    except ArgumentError as error:
        return [by_data, by_world, str(error)]
    return [by_data, by_world, ""]


def test_data_parallel_groups_of_a_ring() -> None:
    gradients, losses, validation = alone()
    for rank, (*runs, refused) in enumerate(run_ranks(4, _two_by_two)):
        for got, logged, value in runs:
            assert logged == pytest.approx(losses, rel=1e-12)
            assert value == pytest.approx(validation, rel=1e-12)
            for actual, expected in zip(got, gradients, strict=True):
                for parameter, gradient in expected.items():
                    torch.testing.assert_close(actual[parameter], gradient, atol=1e-12, rtol=0)
        assert ("group: expected a process group that this rank belongs to" in refused) == (rank > 1), refused


LOCAL = rf.ContextParallel.local(2)
LABELS = torch.tensor([[3, -100, 5]])


def test_one_process() -> None:
    losses = torch.tensor([[1.0, torch.nan, 4.0]], requires_grad=True)
    mean = LOCAL.token_mean(losses, LABELS)
    (mean.loss * 3).backward()
    assert (mean.loss.item(), mean.value.item(), mean.num_valid.item()) == (2.5, 2.5, 2)
    assert losses.grad is not None
    assert losses.grad.tolist() == [[1.5, 0.0, 1.5]]
    assert not mean.value.requires_grad


def test_no_valid_token_at_all() -> None:
    losses = torch.tensor([[1.0, torch.nan, 4.0]], requires_grad=True)
    mean = LOCAL.token_mean(losses, torch.full_like(LABELS, -100))
    mean.loss.backward()
    assert (mean.value.item(), mean.num_valid.item()) == (0, 0)
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_low_precision_losses_are_added_in_float32() -> None:
    losses = torch.full((1, 3000), 1.001, dtype=torch.bfloat16)
    mean = LOCAL.token_mean(losses, torch.ones(1, 3000, dtype=torch.int64))
    assert mean.value.dtype == torch.float32
    assert mean.value.item() == losses[0, 0].item()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"token_losses": torch.tensor(2.5)},
            r'token_losses: expected the shape of labels, \(1, 3\).*reduction="none"',
        ),
        ({"token_losses": torch.zeros(1, 3, dtype=torch.int64)}, "token_losses: expected a floating-point tensor"),
        ({"labels": torch.zeros(1, 3)}, "labels: expected a tensor of whole numbers"),
        ({"num_valid_tokens": -1}, "num_valid_tokens: expected a whole number from 0"),
        ({"num_valid_tokens": 2.5}, "num_valid_tokens: expected .* got 2.5. .*count_valid_tokens"),
        ({"num_valid_tokens": torch.tensor([2])}, "num_valid_tokens: expected"),
        ({"gradients": "average"}, 'gradients: expected "mean" or "sum"'),
        ({"group": "data"}, "group: expected a process group .* got 'data'"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"token_losses": torch.zeros(1, 3), "labels": LABELS} | changes
    with pytest.raises(ArgumentError, match=text):
        LOCAL.token_mean(**arguments)


def test_what_contradicts_a_strategy_that_sums_gradients() -> None:
    context = copy.copy(LOCAL)
    context.gradients, context.weighs_windows = "sum", True
    with pytest.raises(ArgumentError, match='gradients: expected None or "sum".*sums gradients'):
        context.token_mean(torch.zeros(1, 3), LABELS, gradients="mean")
    with pytest.raises(ArgumentError, match="num_valid_tokens: expected None.*weighs the micro-batches"):
        context.token_mean(torch.zeros(1, 3), LABELS, num_valid_tokens=2)


def _chunks() -> tuple[float, str]:
    """Returns the mean by two chunks of a cut batch with a count, and the error of a chunk without one."""
    context = rf.ContextParallel(dist.group.WORLD)
    labels = torch.arange(12).view(2, 6)
    losses, context.labels_shape = labels.double(), (2, 6)
    count = context.count_valid_tokens(labels)
    parts = zip(losses.split(3, 1), labels.split(3, 1), strict=True)
    means = [context.token_mean(*part, num_valid_tokens=count).value.item() for part in parts]
    with pytest.raises(ArgumentError) as refused:
        context.token_mean(losses[:, :3], labels[:, :3])
    return sum(means), str(refused.value)


def _warnings_without_attention(sees: bool) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ringflash").addHandler(handler)
    context = rf.ContextParallel(dist.group.WORLD)
    half = rf.ContextParallel(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    other = rf.ContextParallel(dist.group.WORLD, "contiguous")
    q = torch.ones(1, 4, 1, 16)
    rf.ring_attention(q, q, q, half)  # other ranks
    if sees:
        rf.ring_attention(q, q, q, other)
    for _ in range(2):
        context.token_mean(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.int64))
    logging.getLogger("ringflash").removeHandler(handler)
    return records


def test_a_mean_before_any_attention_is_named_once() -> None:
    assert run_ranks(2, _warnings_without_attention, True) == [[], []]
    first, second = run_ranks(2, _warnings_without_attention, False)
    (record,) = first
    assert "no attention has used this context yet, so each of its 2 ranks attends to its own part" in record
    assert second == []


def test_half_of_a_cut_batch_needs_a_count() -> None:
    for mean, refused in run_ranks(2, _chunks):
        assert mean == pytest.approx(5.5)
        assert "labels: expected this rank's part of the batch, (2, 6), got (2, 3), of a batch that was cut" in refused


def test_labels_that_cannot_be_counted() -> None:
    with pytest.raises(ArgumentError, match="labels: expected at least one tensor"):
        LOCAL.count_valid_tokens([])
    with pytest.raises(ArgumentError, match="labels: expected a tensor of whole numbers"):
        LOCAL.count_valid_tokens(torch.zeros(3))
    mask, context = torch.tensor([[True, False]]), rf.ContextParallel.local(1)
    with pytest.raises(ArgumentError, match=r"labels: expected a tensor of whole numbers.* got torch\.bool"):
        context.token_mean(torch.ones(1, 2), mask)
    assert LOCAL.count_valid_tokens([LABELS, LABELS]).item() == 4
