"""The cost model: its walk against formulas and the plan's critical path, its kernels against measurements, the CLI."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.bench.attention.traffic import Shape
from ringflash.bench.cost_model.model import NEAR, Link, Machine, Split, predict
from ringflash.bench.cost_model.walk import Cost, Costs, _Round, _Travel, seconds, steps
from ringflash.commands.main import main
from ringflash.errors import ArgumentError
from ringflash.ring.plan import Kind

FREE = Cost(0.0, 0.0), Cost(0.0, 0.0)
RECORDS = Path(__file__).parents[2] / "docs" / "benchmarks" / "h200"
times = st.floats(0.1, 5.0)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous", "balanced"])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_without_messages_a_ring_keeps_the_pace_of_its_plan(layout: str, world: int) -> None:
    for mask in (rf.Causal(), rf.Causal() & rf.SlidingWindow(300, 0), rf.Documents([0, 100, 900, 1111])):
        plan = rf.ContextParallel.local(world, layout).plan(mask, 1111)
        pairs = np.array(plan.pairs, dtype=float)
        time = seconds(Costs(pairs, np.zeros(world, int), FREE))
        assert time >= plan.balance * pairs.sum() / world * (1 - 1e-9)
        assert time == pytest.approx(plan.critical_path * pairs.sum() / world, rel=0.02)
        assert [step.owner[plan.rank] for step in steps(pairs > 0)] == [hop.owners[0] for hop in plan.hops]


@given(world=st.integers(2, 6), compute=times, kv=times, gradient=times, add=times)
@settings(max_examples=50, deadline=None)
def test_an_even_ring_is_what_its_formula_says(
    world: int, compute: float, kv: float, gradient: float, add: float
) -> None:
    """Checks that a hop ends with its work or its messages, and that nothing overlaps the last gradient's return."""
    work, hosts = np.full((world, world), compute), np.zeros(world, int)
    near = Cost(kv, 0.0), Cost(99.0, 0.0)
    assert seconds(Costs(work, hosts, near)) == pytest.approx((world - 1) * max(compute, kv) + compute)
    between = max(max(compute, gradient) + add, gradient + kv)
    expected = max(compute, kv) + (world - 2) * between + max(compute, gradient) + add + gradient
    both = Costs(work, hosts, near, (Cost(gradient, 0.0), Cost(99.0, 0.0)), add)
    assert seconds(both) == pytest.approx(expected)


@pytest.mark.parametrize("inner", [None, 2])
def test_hops_that_are_known_are_those_found(inner: int | None) -> None:
    pairs = np.random.default_rng(0).random((8, 8))
    kv, gradient = (Cost(0.3, 0.2), Cost(0.7, 0.1)), (Cost(0.5, 0.4), Cost(0.9, 0.3))
    costs = Costs(pairs, np.arange(8) // 4, kv, gradient, 0.1, 0.2)
    assert seconds(costs, inner, list(steps(pairs > 0, inner))) == seconds(costs, inner)


def test_all_ranks_send_at_once_as_one_after_another() -> None:
    ranks = np.arange(6)
    to, hosts = (ranks + 1) % 6, ranks // 3
    cost = Cost(0.3, 0.2), Cost(0.7, 0.1)
    together, apart = (_Travel(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 2.5]), hosts) for _ in range(2))
    together.move_round(_Round(cost, hosts, to), ranks >= 0)
    apart.move(cost, ranks >= 0, to)
    assert together.done.tolist() == apart.done.tolist()
    assert together.taken.tolist() == apart.taken.tolist()


def test_kernels_lose_a_share_of_the_messages_beside_them() -> None:
    costs = Costs(np.full((4, 4), 10.0), np.zeros(4, int), (Cost(4.0, 0.5), Cost(0.0, 0.0)))
    assert seconds(costs) == pytest.approx(3 * (10 + 2) + 10)


def test_issuing_hops_bounds_a_ring() -> None:
    costs = Costs(np.full((4, 4), 1.0), np.zeros(4, int), FREE, issue=3.0)
    assert seconds(costs) == pytest.approx(3 * 3 + 1)


def test_an_inner_ring_hides_a_slow_link_behind_a_revolution() -> None:
    """Checks 4 ranks on 2 hosts: a ring waits for the slow link at every hop, a double ring once per inner pass."""
    costs = Costs(np.full((4, 4), 1.0), np.array([0, 0, 1, 1]), (Cost(0.5, 0.0), Cost(1.9, 0.0)))
    assert seconds(costs) == pytest.approx(3 * 1.9 + 1)
    assert seconds(costs, inner=2) == pytest.approx(4)
    there_and_back = replace(costs, gradient=(Cost(0.5, 0.0), Cost(1.9, 0.0)))
    assert seconds(there_and_back, inner=2) == pytest.approx(4 + 1.9)  # nothing overlaps the last inner pass's gradient
    owners = [step.owner.tolist() for step in steps(costs.compute > 0, 2)]
    assert owners == [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]


@pytest.mark.parametrize("inner", [2, 4])
def test_rings_of_rings_step_as_their_plans_do(inner: int) -> None:
    context = rf.ContextParallel.local(8, inner_ring=inner)
    plans = [context.plan(rf.Causal(), 512, rank) for rank in range(8)]
    for number, step in enumerate(steps(np.ones((8, 8), bool), inner)):
        hops = [plan.hops[number] for plan in plans]
        sent = [{each.kind for batch in plan.steps[number].kv for each in batch.transfers} for plan in plans]
        assert step.owner.tolist() == [hop.owners[0] for hop in hops]
        assert step.sends.tolist() == [Kind.KV in kinds for kinds in sent]
        assert step.revolution == hops[0].revolution
        assert (step.opens and step.far) == (Kind.FAR_KV in sent[0])


@pytest.mark.parametrize("name", ["kernels-gqa.json", "kernels.json"])
def test_one_kernel_is_as_fast_as_measured(name: str) -> None:
    rows = json.loads((RECORDS / name).read_text())["rows"]
    rows = [row for row in rows if row["name"] == "ringflash fast" and row["headdim"] == 128 and row["causal"]]
    assert rows
    for row in rows:
        heads = row["nheads"], row["nheads_kv"], row["headdim"]
        shape = Shape(row["batch"], row["seqlen"], *heads, causal=True)
        prediction = predict(shape, Split(1), "zigzag", Machine(issue_us=0.0))
        assert prediction.forward.total * 1e3 == pytest.approx(row["forward_ms"], rel=0.1)
        assert prediction.backward.total * 1e3 == pytest.approx(row["backward_ms"], rel=0.1)
        assert prediction.efficiency == pytest.approx(1, rel=0.01)


@given(
    world=st.sampled_from([1, 2, 4, 8, 16]),
    heads=st.sampled_from([1, 2, 4]),
    seqlen=st.sampled_from([4096, 65536]),
    layout=st.sampled_from(["zigzag", "striped", "contiguous"]),
)
@settings(max_examples=30, deadline=None)
def test_faster_links_make_no_ring_slower(world: int, heads: int, seqlen: int, layout: str) -> None:
    shape, split = Shape(1, seqlen, 8, 2, 64, causal=True), Split(max(world, heads), heads)
    slow = predict(shape, split, layout, Machine(near=Link(30.0, 50.0, 0.5)))
    fast = predict(shape, split, layout, Machine(near=Link(3.0, 500.0, 0.0)))
    assert fast.seconds <= slow.seconds
    assert fast.forward.exposed >= 0
    assert 0 < slow.efficiency <= fast.efficiency <= 1.01


def test_transports_within_a_host_are_those_measured() -> None:
    """Compares with the measured microseconds of messages of 1, 8 and 32 MiB, launched eagerly."""
    measured = {"nccl": (40, 65, 228), "symmetric": (8.3, 29, 108)}
    for name, of in measured.items():
        for size, microseconds in zip((1, 8, 32), of, strict=True):
            assert NEAR[name].cost(size * 2**20).seconds * 1e6 == pytest.approx(microseconds, rel=0.15)


SMALL = "bench model --seqlens 8192 65536 --world-sizes 4 16 --choose-at 8 65536"


def test_rings_alone_are_beside_predictions(tmp_path: Path) -> None:
    path, measured = tmp_path / "model.json", RECORDS / "ring-4gpu.json"
    assert main([*SMALL.split(), "--measured", str(measured), "--json", str(path)]) == 0
    record, rows = json.loads(path.read_text()), json.loads(measured.read_text())["rows"]
    named = {(row["seqlen"], row["name"]): row["forward_ms"] for row in rows}
    rings = {n: named[n, "ringflash zigzag, ring"] for n in (8192, 16384)}  # their plain rows are of grouped hops
    rings |= {n: named[n, "ringflash zigzag"] for n in (32768, 65536)}
    assert {row["seqlen"]: row["forward_ms"] for row in record["measured"]} == rings
    assert {row["transport"] for row in record["measured"]} == {"symmetric"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    assert main([*SMALL.split(), "--measured", str(RECORDS / "ring.json"), "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Predicted, zigzag, causal: 32:8 heads of 128, bfloat16, batch 1" in out
    assert "Measured, ring.json" in out
    assert "fewer tokens than GPUs" in out
    record = json.loads(path.read_text())
    assert [row["transport"] for row in record["rows"]] == ["symmetric"] * 2 + ["nccl"] * 2
    assert [row["forward_ms"] for row in record["measured"]] == [22.291, 77.703]
    assert record["machine"]["near"]["nccl"]["gb_s"] == NEAR["nccl"].gb_s
    four, _, sixteen = (row for row in record["choices"] if "failed" not in row)
    assert (four["seqlen"], sixteen["seqlen"]) == (8, 65536)
    assert sixteen["forward_backward_ms"] == min(sixteen[f"{family}_ms"] for family in ("ring", "heads", "rings"))


def test_what_is_given_is_what_is_used(tmp_path: Path) -> None:
    arguments = "--latency-us 7 --bandwidth-gb-s 123 --taken 0.3 --network-gb-s 9 --tflops-forward 100"
    path = tmp_path / "model.json"
    rest = "bench model --seqlens 65536 --world-sizes 4 --choose-at --json"
    assert main([*rest.split(), str(path), *arguments.split()]) == 0
    record = json.loads(path.read_text())
    assert record["choices"] == []
    assert record["machine"]["near"]["symmetric"] == {"latency_us": 7.0, "gb_s": 123.0, "taken": 0.3}
    assert (record["machine"]["far"]["gb_s"], record["machine"]["tflops_forward"]) == (9.0, 100.0)
    row = record["rows"][0]
    assert row["forward_message_us"] == pytest.approx(7 + 2 * 8 * 16384 * 128 * 2 / 123e9 * 1e6, abs=0.1)
    assert row["forward_ms"] == pytest.approx(2 * 65536**2 * 32 * 128 / 4 / 100e12 * 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--seqlens 3", "seqlen: expected at least one token a rank (4 ranks), got 3 tokens"),
        ("--layout spiral", "layout: expected one of"),
        ("--tflops-forward 0", "--tflops-forward: expected more than 0, got 0.0"),
        ("--latency-us -1", "--latency-us: expected at least 0, got -1.0"),
        ("--nheads 12", "--nheads: expected a multiple of --nheads-kv 8, got 12"),
        ("--head-split 3", "--head-split: expected a divisor of 4 GPUs and of 32 query heads, got 3"),
        ("--inner-ring 3", "--inner-ring: expected a divisor of the ring's 4 ranks, got 3"),
        ("--measured no-such-file", "--measured: expected JSON of the ring benchmark, got no-such-file"),
    ],
)
def test_bad_arguments_predict_nothing(changed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), *changed.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "choose" not in captured.out


@pytest.mark.parametrize(
    ("row", "lacking"),
    [
        ({"dtype": "bfloat16", "headdim": 128}, "'ringflash zigzag' of 8192 tokens without nheads, nheads_kv"),
        ({"dtype": "int4", "headdim": 128, "nheads": 8, "nheads_kv": 8}, "layout 'zigzag' and dtype 'int4'"),
    ],
)
def test_what_was_measured_is_read_first(
    row: dict[str, object], lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ring.json"
    whole = {"name": "ringflash zigzag", "seqlen": 8192, "forward_ms": 1.0, "forward_backward_ms": 3.0, **row}
    path.write_text(json.dumps({"device": "4 x H200", "rows": [whole]}))
    assert main([*SMALL.split(), "--measured", str(path)]) == 2
    captured = capsys.readouterr()
    assert lacking in captured.err
    assert "bench ring --json" in captured.err
    assert captured.out == ""


def test_symmetric_memory_ends_with_the_host(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    arguments = "bench model --seqlens 65536 --world-sizes 8 16 --choose-at --transport symmetric --json"
    assert main([*arguments.split(), str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("failed") for row in rows] == [None, "symmetric is for one ring in a host"]
    assert main([*arguments.split(), str(path), "--inner-ring", "8"]) == 0
    assert all("failed" in row for row in json.loads(path.read_text())["rows"])


def test_the_page_has_what_the_command_says(tmp_path: Path) -> None:
    """Checks the rows of one host; those of more hosts take too long."""
    path, page = tmp_path / "model.json", Path(__file__).parents[2] / "docs" / "performance" / "cost-model.md"
    assert main(["bench", "model", "--seqlens", "8192", "--world-sizes", "4", "8", "--json", str(path)]) == 0
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    written = [(row[0], *row[2:7]) for row in table if len(row) == 11 and row[0] in ("4", "8")]
    assert len(written) == 6
    for got, row in zip(written, json.loads(path.read_text())["choices"], strict=True):
        names = (str(row["world_size"]), row["layout"], row["transport"], row["split"])
        assert got == (*names, f"{row['forward_backward_ms']:,.1f}", f"{row['tflops_per_gpu']:.0f}")


def test_a_split_says_why_not() -> None:
    with pytest.raises(ArgumentError, match="causal: expected True, got False"):
        predict(Shape(1, 64, 8, 8, 16, causal=False), Split(4), "zigzag", Machine())
    with pytest.raises(ArgumentError, match="a divisor of 4 GPUs"):
        predict(Shape(1, 64, 8, 8, 16, causal=True), Split(4, heads=8), "zigzag", Machine())
