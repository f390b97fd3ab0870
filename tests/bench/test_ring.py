"""The ring benchmark runs under masks too, its yardsticks are consistent, and its errors are against the reference."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash import reference
from ringflash.bench.attention.single import Unavailable
from ringflash.bench.common import ranks
from ringflash.bench.common.flash_kernels import Kernels
from ringflash.bench.common.problem import Contender, Problem
from ringflash.bench.ring import accuracy, peers, ring_flash_attn, scaling, seen, throughput, ulysses, usp
from ringflash.bench.ring.throughput import Work, main
from ringflash.errors import ArgumentError
from tests.bench.exactness import largest_error
from tests.helpers.distributed import run_ranks
from tests.helpers.patience import PATIENCE

SMALL = "--nheads 4 --nheads-kv 2 --headdim 16 --dtype float32 --rounds 1 --repeats 1"
CPU = torch.device("cpu")


def test_torchrun_starts_it(tmp_path: Path) -> None:
    arguments = f"--seqlens 40 64 {SMALL}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ringflash.bench", "ring"]
    result = subprocess.run(
        [*command, *arguments.split(), "--peers", "--check", "--json", str(tmp_path / "ring.json")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert "ringflash zigzag" in result.stdout
    record = json.loads((tmp_path / "ring.json").read_text())
    assert record["command"].endswith(f"-m ringflash.bench ring {arguments} --peers --check --json ring.json")
    ours = [row for row in record["rows"] if row["name"] == "ringflash zigzag"]
    assert [(row["seqlen"], row["mask"], row["world_size"], row["hops"]) for row in ours] == [
        (40, "causal", 2, 2),
        (64, "causal", 2, 2),
    ]
    for row in ours:
        _check_figures(row)
        assert row["errors_over_plain"]["out max"] < 5
    rest = [row for row in record["rows"] if not row["name"].startswith("ringflash")]
    assert [row["name"].split()[0] for row in rest[:3]] == ["torch", "torch", "ring-flash-attn"]
    assert rest[3]["name"] == "Ulysses, SDPA math"
    assert rest[3].get("failed") is None
    assert rest[3]["forward_backward_ms"] > 0
    assert [row["name"] for row in rest[4:7]] == ["USP, torch's FA2", "TransformerEngine p2p", "MagiAttention"]
    assert all("failed" in row for row in (*rest[:3], *rest[4:10]))  # torch's kernels do not run on CPUs


def _check_figures(row: dict[str, Any]) -> None:
    """Checks that the yardsticks agree with the figures derived from them."""
    for part in ("forward", "forward_backward"):
        assert row[f"{part}_of_one_kernel"] * row[f"{part}_over_flops"] == pytest.approx(1, rel=0.02)
        ratio = row[f"one_kernel_{part}_ms"] / row[f"{part}_ms"]
        assert row[f"{part}_of_one_kernel"] == pytest.approx(ratio, rel=0.15)  # up to the share, since tokens are whole
    exposed = row["forward_ms"] - row["without_messages_forward_ms"]
    assert row["forward_exposed_us_a_hop"] == pytest.approx(exposed / row["hops"] * 1e3, abs=1)


def test_two_processes_under_masks_and_by_number(tmp_path: Path) -> None:
    results = run_ranks(2, _everything, str(tmp_path))
    for windows, documents, auto, scaled, sent, zigzag in results:
        assert windows["mask"] == "window of 16"
        assert documents["mask"] == "3 documents"
        for row in (windows, documents):
            assert row["layout"] == "balanced"
            _check_figures(row)
        assert windows["transport"] == "gloo"
        assert [row["schedule"] for row in (windows, documents, auto)] == ["ring", "grouped", "ring"]
        assert (documents["hops"], auto["hops"]) == (1, 2)
        assert sent == {"messages": 2, "without": 0}  # KV of one hop, sent and received
        assert zigzag is None or zigzag < 1e-5
        assert [row["gpus"] for row in scaled if row["seqlen"] == 64][-1] == 2
    windows, _, _, scaled, _, _ = results[0]
    assert all(value < 5 for value in windows["errors_over_plain"].values())
    assert [(row["seqlen"], row["gpus"]) for row in scaled] == [(32, 1), (32, 2), (64, 2)]  # (64, 1) is too long
    assert "forward_backward_strong" in scaled[1]
    assert "forward_backward_strong" not in scaled[2]
    assert scaled[2]["forward_weak"] == pytest.approx(2 * scaled[0]["forward_ms"] / scaled[2]["forward_ms"], rel=0.01)
    assert json.loads((tmp_path / "scaling.json").read_text())["rows"] == scaled
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def _everything(folder: str) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2,))
    common = ["--layout", "balanced", *SMALL.split(), "--seqlens", "64"]
    windows = throughput.run([*common, "--window-left", "15", "--transport", "nccl", "--check"], mesh)[0]
    documents, fixed, graph = throughput.run(
        [*common, "--num-documents", "3", "--hops", "grouped", "--variants", "fixed-lengths", "graph"], mesh
    )
    assert fixed["name"] == "ringflash balanced, fixed-lengths"
    assert fixed["forward_ms"] > 0
    assert graph["failed"] == "Unavailable: a CUDA graph takes a GPU"
    auto, by_heads = throughput.run([*common, "--hops", "auto", "--head-splits", "2", "--queued", "2"], mesh)
    assert auto["queued"] == 2
    assert "queued" not in documents
    assert by_heads["name"] == "ringflash balanced, heads over 2 ranks"
    assert by_heads["forward_ms"] > 0
    with pytest.raises(ArgumentError, match="--head-splits: expected numbers that divide 2 ranks, got 3"):
        throughput.run([*common, "--head-splits", "3"], mesh)
    written = ["--json", f"{folder}/scaling.json", "--png", f"{folder}/scaling.png"]
    scaled = scaling.run([*SMALL.split(), "--seqlens", "32", "64", "--most-tokens", "32", *written], mesh)
    few = ("--seqlens 8 --most-tokens 2", "at most 2 tokens a GPU")
    for wrong, message in (("--world-sizes 3", "divisors of 2"), few):
        with pytest.raises(ArgumentError, match=message):
            scaling.run(wrong.split(), mesh)
    return windows, documents, auto, scaled, _sent(mesh), _zigzag(mesh)


def test_a_time_is_the_mean_of_the_queued_calls() -> None:
    assert run_ranks(1, _queued) == [(0.25, 4)]


def _queued() -> tuple[float, int]:
    calls, clock = list[float](), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.time, "perf_counter", lambda: float(next(clock)))
        return ranks.slowest_seconds(lambda: calls.append(0), on_gpu=False, queued=4), len(calls)


def _sent(mesh: Any) -> dict[str, int]:
    """Returns the number of messages of a forward, in the usual run and in the run without messages."""
    context = rf.ContextParallel(mesh)
    problem = Problem.random(64, 4, 2, 16, CPU, torch.float32)
    seen = list[Any]()
    transport = context.transport
    assert transport is not None
    start = transport.start

    def spy(messages: Sequence[Any]) -> Any:
        seen.extend(messages)
        return start(messages)

    transport.start = spy
    counts = {}
    for name, contender in (("messages", peers.ours), ("without", peers.without_messages)):
        seen.clear()
        with contender(problem, context) as setup:
            setup.forward()
        counts[name] = len(seen)
    assert context.transport is transport
    return counts


def _ulysses_error(nheads_kv: int) -> float:
    """Returns the largest error of Ulysses, in float64."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    problem = Problem.random(24, 4, nheads_kv, 16, CPU, torch.float64)
    (make,) = ulysses.local_attentions("cpu").values()
    return largest_error(ulysses.ulysses(mesh, make), problem)


@pytest.mark.parametrize(("ranks", "nheads_kv"), [(2, 2), (4, 2), (2, 1)])
def test_ulysses_is_exact(ranks: int, nheads_kv: int) -> None:
    for error in run_ranks(ranks, _ulysses_error, nheads_kv):
        assert error < 1e-12


def _ulysses_refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    refusals = []
    for seqlen, nheads, nheads_kv in ((24, 3, 3), (25, 4, 2), (24, 12, 3)):
        contender = ulysses.ulysses(mesh, *ulysses.local_attentions("cpu").values())
        with (
            pytest.raises(Unavailable) as raised,
            contender(Problem.random(seqlen, nheads, nheads_kv, 16, CPU, torch.float32)),
        ):
            pass
        refusals.append(str(raised.value))
    return refusals


def test_ulysses_names_what_it_cannot_divide() -> None:
    for heads, tokens, kv in run_ranks(2, _ulysses_refusals):
        assert heads == "takes query heads that 2 ranks divide, not 3"
        assert tokens == "takes tokens that 2 ranks divide, not 25"
        assert kv == "takes KV heads that divide 2 ranks or are divided by them, not 3"


def _usp_error() -> float:
    """Returns the largest error of USP with kernels of plain PyTorch, in float64 as in `_zigzag`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kernels = Kernels("plain", _plain_forward, _plain_backward)
    problem = Problem.random(48, 4, 2, 16, CPU, torch.float64)
    return largest_error(usp.usp(mesh, kernels), problem)


needs_usp = pytest.mark.skipif(find_spec("yunchang") is None, reason="needs yunchang, which CI installs")


@needs_usp
def test_usp_is_exact() -> None:
    for error in run_ranks(4, _usp_error):
        assert error < 1e-5  # the package adds in float32


def _usp_refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    contender = usp.usp(mesh, Kernels("plain", _plain_forward, _plain_backward))
    refusals = []
    for seqlen, nheads, nheads_kv in ((46, 4, 2), (48, 3, 3)):
        problem = Problem.random(seqlen, nheads, nheads_kv, 16, CPU, torch.float32)
        with pytest.raises(Unavailable) as raised, contender(problem):
            pass
        refusals.append(str(raised.value))
    return refusals


@pytest.mark.parametrize(
    ("ranks", "tokens", "heads"),
    [
        (2, "takes multiples of 4 tokens, not 46", "takes query heads that 2 ranks divide, not 3"),
        (3, *["takes numbers of ranks that 2 divides, not 3"] * 2),
    ],
)
@needs_usp
def test_usp_names_what_it_cannot_divide(ranks: int, tokens: str, heads: str) -> None:
    assert run_ranks(ranks, _usp_refusals) == [[tokens, heads]] * ranks


def _zigzag(mesh: Any) -> float | None:
    """Returns the largest error of ring-flash-attn with kernels of plain PyTorch, or None if it is not installed.

    It runs in float64, because in float32 it mistakes a buffer for its float32 copy.
    """
    kernels = Kernels("plain", _plain_forward, _plain_backward)
    problem = Problem.random(64, 4, 2, 16, CPU, torch.float64)
    try:
        error = largest_error(ring_flash_attn.ring_flash_attn(mesh, kernels), problem)
    except Unavailable:
        return None
    assert "flash_attn" not in sys.modules
    return error


def _plain_forward(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
    return reference.attention(q, k, v, mask=rf.Causal() if causal else None, softmax_scale=scale)


def _plain_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, causal: bool, *to: Any
) -> None:
    """Computes the backward of some keys with the lse and out of all keys, like flash attention."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k.repeat_interleave(group, 2))
    p = torch.exp(scores - lse[..., None])
    if causal:
        p = p.tril()
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(group, 2))
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.repeat_interleave(group, 2))
    dk = torch.einsum("bhqk,bqhd->bkhd", ds, q)
    dv = torch.einsum("bhqk,bqhd->bkhd", p, dout)
    for target, gradient in zip(to, (dq, *(x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))), strict=True):
        target.copy_(gradient)


def test_its_stand_in_for_flash_attn_is_there_for_one_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ring_flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('wants transformers')")
    (folder / "zigzag_ring_flash_attn.py").write_text(
        "from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward\n"
        "def zigzag_ring_flash_attn_func(q):\n"
        "    return _flash_attn_forward(q=q, k=1, v=2, dropout_p=0, softmax_scale=3, causal=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    other = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    kernels = ring_flash_attn.Kernels("echo", lambda *given: (given, "lse", "more"), lambda *given: None)
    try:
        assert ring_flash_attn.zigzag(kernels)(0) == ((0, 1, 2, 3, True), "lse", None, None)  # pyright: ignore[reportArgumentType]
        assert sys.modules["flash_attn"] is other
        assert set(sys.modules) - before == {"flash_attn", "ring_flash_attn.zigzag_ring_flash_attn"}
    finally:
        sys.modules.pop("ring_flash_attn.zigzag_ring_flash_attn", None)


@given(seqlen=st.integers(1, 5000), documents=st.integers(1, 40))
def test_documents_fill_the_sequence(seqlen: int, documents: int) -> None:
    if documents > seqlen:
        with pytest.raises(ArgumentError, match="--num-documents: expected 1 to"):
            seen.lengths(seqlen, documents)
        return
    lengths = seen.lengths(seqlen, documents)
    assert (sum(lengths), len(lengths)) == (seqlen, documents)
    assert min(lengths) >= 1


def test_documents_are_of_mixed_lengths() -> None:
    lengths = seen.lengths(131072, 16)
    assert max(lengths) > 8 * min(lengths)
    assert lengths == seen.lengths(131072, 16)


@pytest.mark.parametrize(("window", "documents"), [(None, None), (100, None), (None, 5), (300, 7)])
@pytest.mark.parametrize("world", [1, 4])
def test_one_kernel_has_the_work_of_the_mean_rank(world: int, window: int | None, documents: int | None) -> None:
    mask, _ = seen.mask(1000, window, documents)
    problem = Problem.random(1000, 4, 2, 16, CPU, torch.float32, mask=mask)
    work = Work.of(problem, rf.ContextParallel.local(world, "balanced"))
    positions = torch.arange(1000)
    pairs = int(problem.visible.dense(positions, positions).sum())
    assert work.share * work.tokens * (work.tokens + 1) / 2 == pytest.approx(pairs / world)
    assert work.share == pytest.approx(1, abs=0.02)
    assert work.flops == pytest.approx(4 * pairs * 4 * 16, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--rounds 0", "--rounds: expected at least 1, got 0"),
        ("--queued 0", "--queued: expected at least 1, got 0"),
        ("--window-left -1", "--window-left: expected at least 0, got -1"),
        ("--num-documents 65", "--num-documents: expected 1 to 64, got 65"),
        ("--peers --window-left 3", "--peers: expected the causal mask, got window of 4"),
    ],
)
def test_bad_arguments_join_nothing(changed: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match=message):
        main(["--seqlens", "64", *changed.split()])


def test_a_contender_that_fails_on_the_way_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(9))

    def out_of_memory(contender: Any, problem: Any, samples: Any, repeats: int, queued: int) -> None:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("tried to allocate 9 TiB\nand more")
        for seconds in samples.seconds.values():
            seconds.append(0.5)

    monkeypatch.setattr(throughput.ranks, "take_round", out_of_memory)
    monkeypatch.setattr(throughput.dist, "barrier", lambda: None)
    context = rf.ContextParallel.local(2)
    options = throughput._parser().parse_args([*SMALL.split(), "--rounds", "2"])
    named: dict[str, Contender] = {"a": partial(peers.ours, context=context), "b": partial(peers.alone, tokens=64)}
    rows = throughput._measure_length(64, options, context, named, CPU)
    assert rows[1]["failed"] == "OutOfMemoryError: tried to allocate 9 TiB"
    assert rows[0]["forward_of_one_kernel"] == pytest.approx(1, rel=0.05)
    assert rows[0]["forward_exposed_us_a_hop"] == 0


@pytest.mark.parametrize("changed", ["--world-sizes 0", "--most-tokens 0"])
def test_bad_arguments_of_scaling(changed: str) -> None:
    with pytest.raises(ArgumentError, match=f"{changed.split()[0]}: expected at least 1, got 0"):
        scaling.main(changed.split())


def test_numbers_of_gpus() -> None:
    assert [scaling.default_counts(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 6]]


def test_one_process_is_told_to_use_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match="ranks: expected processes started by torchrun"):
        main([])


@pytest.mark.parametrize(("causal", "documents"), [(True, None), (False, None), (True, 3)])
def test_plain_attention_by_rows_is_the_reference(
    causal: bool, documents: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "ROWS", 7)
    mask, _ = seen.mask(20, None, documents)
    problem = Problem.random(20, 4, 2, 16, CPU, torch.float64, batch=2, causal=causal, mask=mask)
    inputs = problem.leaves()
    out, _ = reference.attention(*inputs, mask=problem.visible)
    expected = [out, *torch.autograd.grad(out, inputs, problem.dout)]
    group = accuracy.first_group(problem)
    for got, whole, heads in zip(accuracy.plain_by_rows(group, torch.float64), expected, (2, 2, 1, 1), strict=True):
        torch.testing.assert_close(got, whole[:1, :, :heads])
