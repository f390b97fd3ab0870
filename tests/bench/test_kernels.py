"""The kernel benchmark runs without a GPU, reports failures and missing peers, and counts correctly."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ringflash.bench.attention import kernels, single, tiles, traffic
from ringflash.bench.attention.traffic import Shape, Tile
from ringflash.bench.common import memory, plot, profiler, timing
from ringflash.bench.common.problem import Problem, Setup, check_agreement
from ringflash.commands.main import main
from ringflash.errors import ArgumentError
from ringflash.kernels import fallback

PAGE = Path(__file__).parents[2] / "docs" / "performance" / "tiles.md"
CPU = torch.device("cpu")
CELL = "--seqlens 40 --headdims 16 --nheads 2 --tokens 80 --dtype float32 --rounds 2"


@pytest.fixture(autouse=True)
def _quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_CALLS", 1)


@pytest.fixture
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_without_gpus")
def test_every_contender_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "kernels.json"), "--png", str(tmp_path / "kernels.png")]
    assert main(["bench", "kernels", *CELL.split(), "--nheads-kv", "1", "--peers", *files]) == 0
    record = json.loads((tmp_path / "kernels.json").read_text())
    shown = f"{CELL} --nheads-kv 1 --peers --json kernels.json --png kernels.png"
    assert record["command"] == f"ringflash bench kernels {shown}"
    assert record["missing"] == []
    names = ["ringflash fast", "ringflash deterministic", "SDPA math", "standard attention"]
    assert [(row["name"], row["causal"]) for row in record["rows"]] == [(n, c) for c in (True, False) for n in names]
    for row in record["rows"]:
        assert row["batch"] == 2
        for part, passes in (("forward", 1.0), ("backward", 2.5)):
            flops = passes * 4 * 40**2 * 16 * 2 * 2 / (2 if row["causal"] else 1)
            assert row[f"{part}_tflops"] == pytest.approx(flops / row[f"{part}_ms"] / 1e9, rel=0.2, abs=1e-4)
        assert all(row["errors"][tensor]["rms"] < 1e-6 for tensor in ("out", "dq", "dk", "dv"))
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
    assert "standard attention" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="contenders of a GPU")
def test_contenders_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "kernels.json", ["ringflash fast", "ringflash deterministic", "SDPA flash (FA2)"]
    cell = ["--seqlens", "256", "--headdims", "64", "--nheads", "2", "--tokens", "512", "--masks", "causal"]
    assert main(["bench", "kernels", *cell, "--json", str(path), "--only", *names]) == 0
    record = json.loads(path.read_text())
    assert [row["name"] for row in record["rows"]] == names
    for row in record["rows"]:
        assert row["forward_ms"] > 0, row
        assert row["backward_ms"] > 0, row
        assert row["peak_bytes"] > 0, row
        assert all(row["errors"][tensor]["rms"] < 1e-2 for tensor in ("out", "dq", "dk", "dv")), row
    assert main(["bench", "kernels", *cell, "--only", "SDPA math"]) == 2
    assert "'SDPA flash (FA2)', 'SDPA cuDNN', 'FlexAttention', 'FlashAttention-4', " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "dq", "message"),
    [(1.1, 3.0, "dq of hops differs by 2"), (3.0, 1.1, "out of hops differs by 2"), (3.0, torch.nan, "dq .* by nan")],
)
def test_the_worst_of_the_results_that_differ_is_named(out: float, dq: float, message: str) -> None:
    ones = [torch.ones(2), torch.ones(2)]
    check_agreement(("out", "dq"), ones, [1.01 * one for one in ones])
    with pytest.raises(ValueError, match=f"another result: {message} of the largest value"):
        check_agreement(("out", "dq"), [out * ones[0], dq * ones[1]], ones, " of hops")


def test_a_contender_that_cannot_is_said_in_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    @contextmanager
    def raises(problem: Problem) -> Generator[Setup, None, None]:
        raise torch.OutOfMemoryError("tried to allocate 9 TiB\nand more")
        yield

    @contextmanager
    def wrong(problem: Problem) -> Generator[Setup, None, None]:
        with single.ours(problem, deterministic=True) as setup:
            yield Setup(setup.inputs, setup.dout, lambda q, k, v: setup.call(q, k, v) * 1.2, setup.whole)

    @contextmanager
    def gives_up(problem: Problem) -> Generator[Setup, None, None]:
        with single.ours(problem, deterministic=True) as setup:
            calls = iter(range(1))

            def call(*qkv: torch.Tensor) -> torch.Tensor:
                next(calls)
                return setup.call(*qkv)

            yield Setup(setup.inputs, setup.dout, call, setup.whole)

    monkeypatch.setattr(single, "_free_bytes", lambda device: 1 << 10)
    named = single.contenders(CPU, torch.float32, with_peers=True) | {
        "raises": raises, "wrong": wrong, "gives up": gives_up, "FlashAttention-4": single.flash_attention_4,
    }  # fmt: skip
    monkeypatch.setattr(kernels, "contenders", lambda *_, **__: named)
    path = tmp_path / "kernels.json"
    files = ["--json", str(path), "--png", str(tmp_path / "k.png")]
    assert kernels.main([*CELL.split(), "--masks", "causal", *files]) == 0
    failed = {row["name"]: row["failed"] for row in json.loads(path.read_text())["rows"] if "failed" in row}
    wrong_row = failed.pop("wrong")
    assert wrong_row.startswith("ValueError: another result: ")
    assert wrong_row.endswith(" differs by 0.2 of the largest value")
    assert failed == {
        "standard attention": "needs 0 GiB, 0 are free",
        "raises": "OutOfMemoryError: tried to allocate 9 TiB",
        "gives up": "StopIteration: ",
        "FlashAttention-4": "not installed",
    }
    assert "raises: OutOfMemoryError: tried to allocate 9 TiB" in capsys.readouterr().out


@pytest.mark.usefixtures("_without_gpus")
def test_only_those_named_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    arguments = [*CELL.split(), "--masks", "full", "--json", str(path), "--only"]
    assert main(["bench", "kernels", *arguments, "SDPA math", "ringflash deterministic"]) == 0
    record = json.loads(path.read_text())
    assert [row["name"] for row in record["rows"]] == ["ringflash deterministic", "SDPA math"]
    assert record["command"].endswith("--json kernels.json --only 'SDPA math' 'ringflash deterministic'")
    assert main(["bench", "kernels", *arguments, "SDPA"]) == 2
    there = "'ringflash fast', 'ringflash deterministic', 'SDPA math', 'standard attention'"
    assert f"--only: expected some of {there}, got 'SDPA'. " in capsys.readouterr().err


def test_portable_kernels_are_there_where_auto_means_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(fallback, "why_not", lambda device: None)
    named = single.contenders(gpu, torch.bfloat16, with_peers=False)
    modes = ["ringflash fast", "ringflash deterministic"]
    assert [*named] == [*modes, *(f"{mode}, portable" for mode in modes)]
    assert [*single.contenders(gpu, torch.float32, with_peers=False)] == modes
    assert [*single.contenders(CPU, torch.bfloat16, with_peers=False)] == modes
    short, shape = (Shape(1, seqlen, 2, 2, 64, causal=True) for seqlen in (512, 2048))
    for mode in ("fast", "deterministic"):
        computed, others = (kernels._bytes(f"ringflash {mode}{end}", short, "hopper") for end in ("", ", portable"))
        assert computed["backward_bytes"] == others["backward_bytes"]
        assert computed["forward_bytes"] != others["forward_bytes"]
    for kernels_of, end in (("hopper", ""), ("portable", ", portable")):
        bytes_of = tiles.pass_bytes(shape, kernels_of)
        for mode in ("fast", "deterministic"):
            row = kernels._bytes(f"ringflash {mode}{end}", shape, "hopper")
            assert row["forward_bytes"]["computed"] == bytes_of["forward"]
            assert row["backward_bytes"]["computed"] == bytes_of[f"backward {mode}"]
    monkeypatch.setattr(fallback, "why_not", lambda device: "they need another")
    assert [*single.contenders(gpu, torch.bfloat16, with_peers=False)] == modes
    facts = {"seqlen": 512, "headdim": 64, "causal": True, "nheads": 2, "nheads_kv": 2, "dtype": "bfloat16"}
    rows = [facts | {"name": name, "forward_tflops": 3.0, "backward_tflops": 2.0} for name in named]
    plot.draw_kernels(tmp_path / "kernels.png", rows, "GPU")
    assert (tmp_path / "kernels.png").exists()


def test_ours_failing_is_a_failure_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def raises(problem: Problem) -> Generator[Setup, None, None]:
        raise RuntimeError("no")
        yield

    named = {"ringflash fast": raises}
    monkeypatch.setattr(kernels, "contenders", lambda *_, **__: named)
    assert kernels.main([*CELL.split(), "--masks", "full"]) == 1


@pytest.mark.usefixtures("_without_gpus")
def test_a_run_out_of_time_keeps_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    assert kernels.main([*CELL.split(), "--budget-s", "0.0001", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert len(record["rows"]) == 2
    assert record["missing"] == ["full headdim 16 seqlen 40"]
    assert "Not measured, out of time: full headdim 16 seqlen 40" in capsys.readouterr().out
    assert kernels.main(["--merge", str(path), str(path), "--json", str(tmp_path / "both.json")]) == 0
    assert len(json.loads((tmp_path / "both.json").read_text())["rows"]) == 4


@pytest.mark.parametrize("causal", [True, False])
def test_tiled_bytes_are_those_of_the_loops(causal: bool) -> None:
    shape, tile = Shape(2, 100, 4, 2, 32, causal), Tile(32, 16)
    keys = queries = 0
    for begin in range(0, 100, tile.block_m):
        keys += len({k for k in range(100) if not causal or k < min(begin + tile.block_m, 100)})
    for begin in range(0, 100, tile.block_n):
        queries += 100 - (begin // tile.block_m * tile.block_m if causal else 0)
    rows, row = 2 * 4 * 100, 32 * 2
    assert traffic.forward_kernel(shape, tile) == 2 * 4 * 2 * row * keys + 2 * rows * row + 4 * rows
    assert traffic.dq_kernel(shape, tile) == 2 * 4 * 2 * row * keys + 3 * rows * row + 8 * rows
    assert traffic.dkdv_kernel(shape, tile) == 2 * 4 * (2 * row + 8) * queries + 4 * row * rows // 2
    for in_turns, zeros in ((False, 4 * 32 * rows), (True, -4 * 32 * rows)):
        added = 2 * 4 * 8 * 32 * queries + zeros + rows * (4 * 32 + row)
        assert traffic.added_dq(shape, tile, in_turns=in_turns) == added


def test_bytes_of_the_hopper_kernels_are_of_their_tiles() -> None:
    """Checks bytes by tiles: the forward loads all keys per owned tile of queries, the backward owns tiles of keys."""
    rows = 2 * 2 * 4096

    def kv(headdim: int, block_m: int) -> int:
        return 2 * 4 * headdim * 2 * 4096 * -(-4096 // block_m)

    def over(headdim: int, itemsize: int = 2) -> Shape:
        return Shape(2, 4096, 2, 2, headdim, False, itemsize)

    for headdim, block_m, keys in ((64, 192, 128), (128, 128, 128), (256, 128, 64)):
        row, met = 2 * headdim, 2 * 2 * 4096 * (4096 // keys)
        passes = tiles.pass_bytes(over(headdim), tiles.HOPPER)
        before = (2 * row + 4) * rows + 16 * rows
        dkdv = (2 * row + 8) * met + 4 * row * rows
        assert passes["forward"] == kv(headdim, block_m) + (2 * row + 4) * rows
        for mode, zeros in (("fast", 4 * headdim), ("deterministic", -4 * headdim)):
            added = 8 * headdim * met + (zeros + 4 * headdim + row) * rows
            assert passes[f"backward {mode}"] == before + dkdv + added
    short = tiles.pass_bytes(Shape(16, 512, 8, 2, 64, causal=True), tiles.HOPPER)
    assert short["backward fast"] == short["backward deterministic"]  # both add in order
    little = Shape(1, 512, 8, 2, 64, causal=True)
    for mode in ("fast", "deterministic"):
        assert (
            tiles.pass_bytes(little, tiles.HOPPER)[f"backward {mode}"] == tiles.pass_bytes(little)[f"backward {mode}"]
        )
    for other in (over(128, itemsize=4), over(20)):
        assert tiles.pass_bytes(other, tiles.HOPPER) == tiles.pass_bytes(other)
    uneven = Shape(1, 1000, 2, 2, 64, causal=False)  # its masked end needs the tiles for masks
    forward = traffic.forward_kernel(uneven, Tile(128, 128))
    assert tiles.pass_bytes(uneven, tiles.HOPPER)["forward"] == forward


def test_traffic_grows_as_the_papers_say() -> None:
    def over(seqlen: int) -> Shape:
        return Shape(1, seqlen, 1, 1, 64, causal=False)

    short, long, wide = over(4096), over(8192), Tile(128, 64)
    reads = traffic.forward_kernel(long, wide) - traffic.compulsory(long).forward
    assert reads / (traffic.forward_kernel(short, wide) - traffic.compulsory(short).forward) == pytest.approx(
        4, rel=0.1
    )
    assert traffic.standard(long).forward / traffic.standard(short).forward == pytest.approx(4, rel=0.1)
    assert traffic.compulsory(long).forward == 2 * traffic.compulsory(short).forward
    assert traffic.compulsory(short).forward == 4 * 4096 * 64 * 2 + 4 * 4096
    assert traffic.compulsory(short).backward == 8 * 4096 * 64 * 2 + 4 * 4096


def test_traffic_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(child: list[str]) -> float:
        raise ValueError("no permission")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["--seqlens", "1024", "--headdims", "64", "--profile"]) == 0
    out = capsys.readouterr().out
    assert "HBM traffic of the portable kernels in MiB" in out
    assert "backward fast" in out
    assert "no profiler at hand (no CUDA device)" in out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiler, "_with_ncu", none)
    monkeypatch.setattr(profiler, "_with_cupti", lambda child: 7.0)
    shape = Shape(1, 64, 1, 1, 16, causal=True)
    assert profiler.measure(shape, "bfloat16") == (dict.fromkeys(profiler.PASSES, 7.0), "CUPTI")
    monkeypatch.setattr(profiler, "_with_cupti", none)
    nothing = "no profiler at hand (ncu: no permission; CUPTI: no permission)"
    assert profiler.measure(shape, "bfloat16") == ({}, nothing)


def test_a_profilers_output_is_read() -> None:
    table = ['==PROF== "x"', '"ID","Metric Name","Metric Value"', '"0","dram__bytes_read.sum","1,000"']
    assert profiler.ncu_bytes([*table, '"0","dram__bytes_write.sum","24"', '"0","other","7"']) == 1024
    with pytest.raises(ValueError, match="no table"):
        profiler.ncu_bytes(["==ERROR== ERR_NVGPUCTRPERM"])
    trace = {"traceEvents": [{"args": {"dram__bytes_read.sum": 5.0}}, {"args": {}}, {"name": "x"}]}
    assert profiler.trace_bytes(json.dumps(trace)) == 5
    with pytest.raises(ValueError, match="no counters"):
        profiler.trace_bytes('{"traceEvents": []}')


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c", "d"]])
def test_turns(names: list[str]) -> None:
    """Checks that each round has all names, that each name comes first once, and that predecessors vary."""
    rounds = [timing.turns(names, number) for number in range(2 * len(names))]
    assert all(sorted(each) == names for each in rounds)
    assert {each[0] for each in rounds} == set(names)
    for name in names if len(names) > 2 else []:
        assert len({each[each.index(name) - 1] for each in rounds if each[0] != name}) > 1


def test_memory_allowed() -> None:
    problem = Problem.random(64, 8, 1, 16, torch.device("cpu"), torch.bfloat16)
    q, kv = 64 * 8 * 16, 64 * 16
    inputs, results = 2 * (2 * q + 2 * kv), 2 * q + 2 * (q + 2 * kv)
    assert sum(memory.allowed_bytes(problem).values()) == inputs + results + 4 * q + 16 * 64 * 8 + 16 * 64


def test_memory_wants_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels", "--memory", "4096"]) == 2
    assert "--memory: expected a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(("headdim", "blocks"), [(64, (64, 454)), (128, (128, 227)), (256, (114, 114))])
def test_blocks_of_the_papers_formula(headdim: int, blocks: tuple[int, int]) -> None:
    assert tiles.papers_blocks(tiles.SHARED_BYTES, headdim) == blocks


def test_the_page_on_tiles_is_that_of_the_shipped_configuration() -> None:
    page = PAGE.read_text()
    assert tiles.renewed(page) == page, "run python -m ringflash.bench.attention.tiles docs/performance/tiles.md"


def test_flex_sees_causal_blocks() -> None:
    dense = single._causal_blocks(300, torch.device("cpu")).to_dense()[0, 0]
    assert dense.tolist() == torch.ones(3, 3, dtype=torch.int32).tril().tolist()


def test_a_picture_of_part_of_a_run(tmp_path: Path) -> None:
    row = {"seqlen": 1024, "headdim": 64, "causal": True, "name": "ringflash fast", "nheads": 2, "nheads_kv": 2}
    plot.draw_kernels(tmp_path / "part.png", [row | {"dtype": "bfloat16", "forward_tflops": 3.0}], "CPU")
    assert (tmp_path / "part.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traffic", "--png", "x.png"], "--png: expected figures to draw"),
        (["--traffic", "--only", "x"], "--only: expected contenders to measure"),
        (["--merge", "x.json", "--only", "x"], "--only: expected contenders to measure"),
        (["--memory", "64", "--headdims", "64"], "--memory: expected no other sizes, got --headdims"),
    ],
)
def test_options_that_would_be_ignored(arguments: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kernels.main(arguments)
