"""The memory budget: what it may say, and how many blocks it lets keep their activations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.bench.training.trainees import SHAPES
from ringflash.errors import ConfigError
from ringflash.train.models.activations import Activations
from ringflash.train.models.budget import budget_bytes, check_activations, plan_activations, with_margin
from ringflash.train.models.memory import GIB, TrainingShape, estimate_memory
from tests.train.models.test_memory import LLAMA_8B

SHAPE = TrainingShape(32768, compiled=True, in_pieces=True)
SIX = replace(LLAMA_8B, n_layers=6)
H200 = int(140 * GIB)


def test_a_budget_is_a_size_or_a_share() -> None:
    assert budget_bytes("auto", H200) is None
    assert budget_bytes("60GiB", H200) == budget_bytes("60 GiB", H200) == 60 * GIB
    assert budget_bytes("0.5GiB", H200) == GIB / 2
    assert budget_bytes("80%", H200) == H200 * 0.8
    assert budget_bytes("100%", H200) == H200
    check_activations(None, "100%", offload=False)


@pytest.mark.parametrize("budget", ["-5GiB", "60", "0.8", "60GB", "0GiB", "0%", "", "none", 60, 0.8, None])
def test_another_budget_is_refused_with_its_form(budget: Any) -> None:
    with pytest.raises(
        ConfigError, match=r'activation_memory: expected "auto", a size such as "60GiB", or a share .*80%'
    ):
        check_activations(None, budget, offload=False)


@pytest.mark.parametrize("budget", ["141GiB", "101%"])
def test_a_budget_above_the_memory_is_refused(budget: str) -> None:
    with pytest.raises(
        ConfigError, match=r"activation_memory: expected at most the 140\.00 GiB of memory that there is"
    ):
        budget_bytes(budget, H200)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r'activation_memory: expected "auto" with activation_checkpointing="block"'):
        check_activations("block", "60GiB", offload=False)
    with pytest.raises(ConfigError, match='activation_offload: expected activation_checkpointing="block" with it'):
        check_activations(None, "60GiB", offload=True)
    check_activations("block", "auto", offload=True)


def test_as_many_blocks_are_kept_as_fit() -> None:
    plans = [plan_activations(SIX, SHAPE, "auto", int(gib * GIB), H200, "free") for gib in (39, 45, 50, 60, 70, 140)]
    kept = [plan.activations.kept_blocks for plan in plans]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (0, 6)
    assert len({*kept}) >= 4


@given(gib=st.floats(1, 200))
def test_one_more_block_would_not_fit(gib: float) -> None:
    available = int(gib * GIB)
    plan = plan_activations(SIX, SHAPE, "auto", available, available, "free")
    assert plan.activations.kept_blocks == 0 or plan.planned <= available
    if plan.activations.kept_blocks < 6:
        more = estimate_memory(SIX, replace(SHAPE, checkpointing="block", kept_blocks=plan.activations.kept_blocks + 1))
        assert with_margin(more) > available


def test_gathered_weights_stay_if_they_fit_beside_all_activations() -> None:
    undecided = replace(SHAPE, reshard_after_forward=None)
    plans = [plan_activations(SIX, undecided, "auto", int(gib * GIB), H200, "free") for gib in range(40, 141, 2)]
    keeps = [plan.keeps_weights for plan in plans]
    assert keeps == sorted(keeps)
    assert {*keeps} == {False, True}
    assert all(
        plan.activations.kept_blocks == 6 and plan.planned <= plan.available for plan in plans if plan.keeps_weights
    )
    assert any(plan.activations.kept_blocks == 6 for plan in plans if not plan.keeps_weights)
    freed, kept = (
        estimate_memory(SIX, replace(SHAPE, kept_blocks=6, checkpointing="block", reshard_after_forward=reshard))
        for reshard in (True, False)
    )
    assert plans[-1].estimate == kept
    assert kept.gathered > freed.gathered
    assert "6 of 6 blocks keep all, 0 recompute, gathered weights stay for the backward: " in str(plans[-1])


def test_gathered_weights_are_freed_or_stay_as_asked() -> None:
    for reshard in (True, False):
        plan = plan_activations(SIX, replace(SHAPE, reshard_after_forward=reshard), "auto", H200, H200, "free")
        assert plan.keeps_weights is not reshard
    alone = replace(SHAPE, reshard_after_forward=None, copied=False)  # the weights are used as they are stored
    assert not plan_activations(SIX, alone, "auto", H200, H200, "free").keeps_weights


def test_a_budget_counts_where_it_is_less_than_the_free_memory() -> None:
    plans = [plan_activations(SIX, SHAPE, budget, int(70 * GIB), H200, "free on rank 3") for budget in ("50GiB", "90%")]
    assert [plan.available for plan in plans] == [50 * GIB, 70 * GIB]
    assert [plan.source for plan in plans] == ["50GiB", "free on rank 3"]
    assert str(plans[0]) == (
        f"{plans[0].activations.kept_blocks} of 6 blocks keep all, {6 - plans[0].activations.kept_blocks} recompute: "
        f"{plans[0].planned / GIB:.2f} GiB planned of 50.00 (50GiB)"
    )


def test_a_budget_that_is_too_small_names_the_least_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"activation_memory: expected at least \d+\.\d{4}GiB, even to") as refused:
        plan_activations(SIX, SHAPE, "20GiB", H200, H200, "free")
    least = str(refused.value).split("at least ")[1].split(",")[0]
    assert plan_activations(SIX, SHAPE, least, H200, H200, "free").activations.kept_blocks == 0
    auto = plan_activations(SIX, SHAPE, "auto", int(20 * GIB), H200, "free")  # it may fit: the plan has a margin
    assert auto.activations.kept_blocks == 0


LONG = replace(SHAPE, tokens=2**20, copied=False, rounded=True)


def test_the_fewest_blocks_that_fit_are_offloaded() -> None:
    plans = [plan_activations(SIX, LONG, "auto", int(gib * GIB), 2 * H200, "free", 2**40) for gib in range(80, 260, 5)]
    offloaded = [plan.activations.offloaded_blocks for plan in plans]
    assert offloaded == sorted(offloaded, reverse=True)
    assert (offloaded[0], offloaded[-1]) == (6, 0)
    assert len({*offloaded}) >= 4
    assert all(plan.planned <= plan.available or plan.activations.offloaded_blocks == 6 for plan in plans)
    assert all(not plan.activations.kept_blocks for plan in plans if plan.activations.offloaded_blocks)
    plan = next(plan for plan in plans if 0 < plan.activations.offloaded_blocks < 6)
    count, host = plan.activations.offloaded_blocks, plan.estimate.host
    assert host == count * 2**20 * (4 * 4096 + 4 * 32)  # input, out and lse
    assert f"0 of 6 blocks keep all, 6 recompute, {count} of them from {host / GIB:.2f} GiB of host memory: " in str(
        plan
    )


def test_no_more_blocks_are_offloaded_than_the_host_has_room_for() -> None:
    for gib in (0, 10, 20, 50, 100):
        plan = plan_activations(SIX, LONG, "auto", int(100 * GIB), H200, "free", int(gib * GIB))
        assert plan.estimate.host <= gib * GIB
        assert plan.activations.offloaded_blocks == min(6, int(gib * GIB) // (2**20 * (4 * 4096 + 4 * 32)))
    with pytest.raises(ConfigError, match="activation_memory: expected at least "):
        plan_activations(SIX, LONG, "100GiB", H200, H200, "free", int(20 * GIB))


def test_the_fewest_groups_of_heads_that_fit_come_after_all_blocks_are_offloaded() -> None:
    plans = [plan_activations(SIX, LONG, "auto", int(gib * GIB), 2 * H200, "free", 2**40) for gib in range(80, 140)]
    groups = [plan.activations.head_groups for plan in plans]
    assert groups == sorted(groups, reverse=True)
    assert {*groups} == {1, 2, 4, 8}
    for smaller, plan in pairwise(plans):
        assert plan.activations.head_groups == 1 or plan.activations.offloaded_blocks == 6
        assert plan.planned <= plan.available or plan.activations.head_groups == 8
        if (changed := plan.activations.head_groups) < smaller.activations.head_groups:
            fewer = estimate_memory(SIX, replace(LONG, **plan.activations._asdict()))
            assert with_margin(fewer) > smaller.available, changed
    plan = next(plan for plan in plans if plan.activations.head_groups == 4)
    host = f"{plan.estimate.host / GIB:.2f} GiB of host memory"
    assert f"6 of them from {host} with attention in 4 groups of heads: " in str(plan)


@pytest.mark.parametrize(
    ("heads", "options", "chosen"),
    [
        (6, {}, 6),
        (1, {}, 1),
        (8, {"in_pieces": False, "compiled": False}, 1),
        (8, {"in_pieces": False, "float32_norms": True}, 1),  # a model of transformers
        (8, {"linear_dtype": "fp8"}, 1),  # its weights cannot be cut
    ],
)
def test_groups_divide_the_kv_heads_of_a_decoder(heads: int, options: dict[str, Any], chosen: int) -> None:
    config = replace(SIX, n_heads=4 * heads, n_kv_heads=heads, head_dim=128)
    plan = plan_activations(config, replace(LONG, **options), "auto", 0, H200, "free", 2**40)
    assert plan.activations.head_groups == chosen


@pytest.mark.parametrize("host", [1.2, 1000])
def test_nothing_is_offloaded_where_that_takes_more(host: float) -> None:
    # 2 GiB of tensors on their way are more than six blocks of 32768 tokens keep.
    least, all_host = plan_activations(SIX, SHAPE, "auto", 0, H200, "free"), int(host * GIB)
    plan = plan_activations(SIX, SHAPE, "auto", 0, H200, "free", all_host)
    assert (plan.activations, plan.planned) == (least.activations, least.planned)
    assert plan.activations == Activations("block")
    with pytest.raises(ConfigError, match=f"expected at least {least.planned / GIB:.2f}"):
        plan_activations(SIX, SHAPE, "1GiB", H200, H200, "free", all_host)


@pytest.mark.parametrize(
    ("shape", "layers", "tokens", "activations", "measured"),
    [
        ("8b", 6, 2048, Activations("block", 6), 35.2),
        ("8b", 6, 8192, Activations("block", 6), 40.3),
        ("8b", 6, 32768, Activations("block", 6), 60.0),
        ("8b", 6, 131072, Activations("block", 4), 108.1),
        ("8b", 6, 131072, Activations("block", 5), 123.52),
        ("8b", 6, 262144, Activations("block"), 77.48),
        ("1b", 16, 2048, Activations("block", 16), 21.0),
        ("1b", 16, 32768, Activations("block", 16), 56.6),
    ],
)
def test_plans_are_within_5_percent_of_what_an_h200_allocated(
    shape: str, layers: int, tokens: int, activations: Activations, measured: float
) -> None:
    config = replace(SHAPES[shape], n_layers=layers)
    run = replace(SHAPE, tokens=tokens, copied=False, rounded=True, reshard_after_forward=None)
    planned = with_margin(estimate_memory(config, replace(run, **activations._asdict()))) / GIB
    assert measured <= planned <= measured / 0.95
