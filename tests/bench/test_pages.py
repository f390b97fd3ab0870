"""The pages on performance: their figures agree with the records, and their pictures are drawn from the records."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import ringflash
from ringflash.bench.common import pictures
from ringflash.commands.main import main

DOCS = Path(ringflash.__file__).parents[1] / "docs"
PAGES, RECORDS = DOCS / "performance", DOCS / "benchmarks"
RECORD = re.compile(
    r"^\| \[[^]]*\]\(\.\./benchmarks/([^)]*\.json)\) \| `(.*)` \| (\S+) \| (.*) \| (.*) \|$", re.MULTILINE
)
Cells = list[list[str]]


def rows(*names: str) -> list[dict[str, Any]]:
    """Returns the rows of records of H200s."""
    return [row for name in names for row in json.loads((RECORDS / "h200" / f"{name}.json").read_text())["rows"]]


def table(page: str, name: str) -> Cells:
    """Returns the cells below the header of the table between two comments with its name."""
    mark = f"<!-- {name}_table -->"
    lines = (PAGES / f"{page}.md").read_text().split(mark)[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def assert_rounded(cell: str, *exact: float) -> None:
    """Checks that a cell has these values, each rounded to the digits shown."""
    shown = [part.replace(",", "").rstrip("%") for part in cell.split(" / ")] if cell else []
    assert len(shown) == len(exact), (cell, exact)
    for text, value in zip(shown, exact, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        assert abs(float(text) - value) <= 0.501 * unit, (cell, exact)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_pages_say_what_their_records_say(page: Path) -> None:
    text = page.read_text()
    records = RECORD.findall(text)
    assert len(records) == len(re.findall(r"^\| \[[^]]*\]\(\.\./benchmarks/", text, re.MULTILINE))  # none is skipped
    for name, command, date, device, versions in records:
        record = json.loads((RECORDS / name).read_text())
        assert (command, date, device) == (record["command"], record["date"], record["device"])
        for package, version in record["versions"].items():
            told = " and ".join(version) if isinstance(version, list) else version
            assert package == "ringflash" or f"{package} {told}" in versions


def test_every_record_is_named() -> None:
    named = {
        name for page in PAGES.glob("*.md") for name in re.findall(r"benchmarks/([\w/-]*\.json)", page.read_text())
    }
    elsewhere = re.findall(r"benchmarks/([\w/-]*\.json)", (DOCS / "retrieval.md").read_text())
    assert {str(path.relative_to(RECORDS)) for path in RECORDS.rglob("*.json")} == named | set(elsewhere)


def test_accuracy() -> None:
    record = json.loads((RECORDS / "cpu-accuracy.json").read_text())
    errors = {(row["world_size"], row["name"], row.get("layers")): row["errors"] for row in record["rows"]}
    shown = table("accuracy", "ranks")
    assert len(shown) == 12
    for ranks, name, *cells in shown:
        for cell, error in zip(cells, errors[int(ranks), name.strip("*"), None].values(), strict=True):
            assert_rounded(cell, 1e3 * error)
    for layers, *cells in table("accuracy", "layers"):
        for name, cell in zip(dict.fromkeys(name for _, name, _ in errors), cells, strict=True):
            assert_rounded(cell, *(1e3 * error for error in errors[8, name, int(layers)].values()))


@pytest.mark.parametrize("name", ["host", "host-later", "host-documents"])
def test_host(name: str) -> None:
    record = json.loads((RECORDS / "h200" / f"{name}.json").read_text())
    of = {(row["name"], row["call"], row["seqlen"], row["headdim"]): row["host_us"] for row in record["rows"]}
    sizes = [(seqlen, headdim) for seqlen in (128, 512, 1024, 2048) for headdim in (64, 128)]
    shown = {(name.strip("*"), call): cells for name, call, *cells in table("host", name.replace("-", "_"))}
    cells = {(*row, *size): cell for row in shown for size, cell in zip(sizes, shown[row], strict=True)}
    assert {place for place, cell in cells.items() if cell != "-"} == {*of}
    for place, figure in of.items():
        assert_rounded(cells[place], figure)


def test_kernels() -> None:
    names = "ringflash fast", "ringflash deterministic", "FlashAttention-4", "SDPA cuDNN"
    of = {
        (row["headdim"], row["nheads"], row["nheads_kv"], row["seqlen"], row["causal"], row["name"]): row
        for row in rows("kernels", "kernels-gqa")
    }
    for headdim, heads, tokens, causal, *cells in table("kernels", "kernels"):
        nheads, nheads_kv = map(int, heads.split(":"))
        cell = int(headdim), nheads, nheads_kv, int(tokens), causal == "yes"
        ours, deterministic, fa4, cudnn = (of[*cell, name] for name in names)
        assert_rounded(cells[1], deterministic["backward_tflops"])
        for text, row in ((cells[0], ours), (cells[2], fa4), (cells[3], cudnn)):
            assert_rounded(text, row["forward_tflops"], row["backward_tflops"])


@pytest.mark.parametrize(
    ("records", "forward", "backward"),
    [
        (("kernels", "kernels-gqa"), (0.96, 1.07, 1.00), (0.93, 1.11, 1.02)),
        (("kernels-later",), (0.91, 1.05, 0.99), (0.94, 1.09, 1.00)),
    ],
)
def test_claims_about_kernels(
    records: tuple[str, ...], forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    of: dict[str, dict[tuple[Any, ...], Any]] = {}
    for row in rows(*records):
        cell = tuple(row[key] for key in ("headdim", "nheads", "seqlen", "causal"))
        of.setdefault(row["name"], {})[cell] = row
    ours, fa4, cudnn = (of[name] for name in ("ringflash fast", "FlashAttention-4", "SDPA cuDNN"))
    assert len(ours) == 32
    for part, expected in (("forward", forward), ("backward", backward)):
        key = f"{part}_tflops"
        assert all(ours[cell][key] > cudnn[cell][key] for cell in ours)
        ratios = [ours[cell][key] / fa4[cell][key] for cell in ours]
        assert (min(ratios), max(ratios), statistics.median(ratios)) == pytest.approx(expected, abs=0.0061)


def test_other_headdims() -> None:
    of = {
        tuple(row[key] for key in ("headdim", "nheads", "batch", "seqlen", "causal", "name")): row
        for row in rows("kernels-96-256") + rows("kernels-96")  # of two figures of a cell, the later one
    }
    names, keys = ("ringflash fast", "FlashAttention-4", "SDPA cuDNN"), ("forward_tflops", "backward_tflops")
    ratios: dict[str, list[list[float]]] = {}
    for headdim, heads, sequences, causal, *cells in table("kernels", "other"):
        batch, tokens = map(int, sequences.split(" of "))
        cell = int(headdim), int(heads.split(":")[0]), batch, tokens, causal == "yes"
        ours, fa4, cudnn = ([of[*cell, name][key] for key in keys] for name in names)
        for text, exact in zip(cells, (ours, fa4, cudnn), strict=True):
            assert_rounded(text, *exact)
        assert all(mine > theirs for mine, theirs in zip(ours, cudnn, strict=True))
        ratios.setdefault(headdim, []).append([mine / theirs for mine, theirs in zip(ours, fa4, strict=True)])
    for headdim, expected in (("96", (0.89, 0.99, 0.95, 0.99)), ("256", (0.97, 0.97, 1.30, 1.38))):
        forward, backward = zip(*ratios[headdim], strict=True)
        assert (min(forward), max(forward), min(backward), max(backward)) == pytest.approx(expected, abs=0.0061)


def test_the_triton_kernels() -> None:
    of = {(row["headdim"], row["seqlen"], row["causal"], row["name"]): row for row in rows("portable-flex")}
    for headdim, tokens, causal, ours, flex in table("kernels", "flex"):
        cell = int(headdim), int(tokens), causal == "yes"
        for text, name in ((ours, "ringflash deterministic, portable"), (flex, "FlexAttention")):
            assert_rounded(text, *(of[*cell, name][f"{part}_tflops"] for part in ("forward", "backward")))
    for part, least, most in (("forward", 1.10, 1.37), ("backward", 1.08, 1.50)):
        key = f"{part}_tflops"
        cells = [cell[:3] for cell in of if cell[3] == "FlexAttention"]
        ratios = [
            of[*cell, "ringflash deterministic, portable"][key] / of[*cell, "FlexAttention"][key] for cell in cells
        ]
        assert (min(ratios), max(ratios)) == pytest.approx((least, most), abs=0.0051)


def test_masks() -> None:
    of = {(row["name"], row.get("by", "Triton"), row["headdim"]): row for row in rows("masks", "masks-portable")}
    names = {"a window of 4096": "window of 4096", "a quarter of the blocks of 128": "25% of blocks of 128"}
    by = {"for sm_90": "ringflash"}
    mask = ""
    for name, kernels, *cells in table("masks", "masks"):
        mask = names.get(name, name) or mask
        found = [of[mask, by.get(kernels, kernels), headdim] for headdim in (64, 128)]
        for cell, part in zip(cells, ("forward", "backward_fast", "backward_deterministic"), strict=True):
            assert_rounded(cell, *(row[f"{part}_cost"] for row in found if f"{part}_cost" in row))
    for name, kernels, *cells in table("masks", "masks_ms"):
        mask = name or mask
        wanted = [
            of[mask, kernels, headdim][f"{part}_ms"] for headdim in (64, 128) for part in ("forward", "backward_fast")
        ]
        for cell, value in zip(cells, wanted, strict=True):
            assert_rounded(cell, value)


FLASH_RING, FLASH_ULYSSES, CUDNN_ULYSSES = "ring-flash-attn zigzag, FA4", "Ulysses, FA4", "Ulysses, cuDNN"


@pytest.mark.parametrize(
    ("name", "records", "peers"),
    [
        (
            "ring",
            ("ring-4gpu-8k", "ring-4gpu-short", "ring-4gpu-ulysses", "ring-4gpu-long", "ring-4gpu-1m"),
            (FLASH_RING,),
        ),
        ("ring2", ("ring-2gpu", "ring-2gpu-128k"), (FLASH_RING, FLASH_ULYSSES, CUDNN_ULYSSES)),
    ],
)
def test_rings(name: str, records: tuple[str, ...], peers: tuple[str, ...]) -> None:
    keys = "forward_ms", "forward_backward_ms"
    of: dict[tuple[int, str], dict[str, Any]] = {}
    for row in reversed(rows(*records)):  # the first record with a length wins
        of[row["seqlen"], row["name"]] = row
    ours = [f"ringflash zigzag{variant}" for variant in ("", ", fixed-lengths", ", graphs", ", graph")]
    for tokens, *cells in table("ring", name):
        length = int(tokens)
        torch = [row for (seqlen, by), row in of.items() if seqlen == length and by.startswith("torch")]
        for cell, by in zip(cells[:-1], [*ours, *peers], strict=True):
            row = of.get((length, by))
            assert_rounded(cell, *(row[key] for key in keys) if row else ())
        assert_rounded(cells[-1], *(min(row[key] for row in torch) for key in keys if torch))


@pytest.mark.parametrize(
    ("record", "tokens", "share"), [("ring-4gpu-long", 131072, 0.975), ("ring-4gpu-ulysses", 65536, 0.96)]
)
def test_rings_beside_one_kernel(record: str, tokens: int, share: float) -> None:
    ours = [row for row in rows(record) if row["name"] == "ringflash zigzag" and row["seqlen"] >= tokens]
    assert len(ours) == 2
    assert all(row["forward_backward_of_one_kernel"] >= share for row in ours)


def test_rings_of_two_beside_peers() -> None:
    for tokens, over_peer, over_captured in (
        (8192, 1.18, 1.42),
        (16384, 1.01, 1.19),
        (32768, 1.04, 1),
        (65536, 1.01, 1),
    ):
        of = {
            row["name"]: row["forward_backward_ms"]
            for row in rows("ring-2gpu")
            if row["seqlen"] == tokens and "forward_backward_ms" in row
        }
        ours, captured = of["ringflash zigzag"], of["ringflash zigzag, graph"]
        peers = [ms for name, ms in of.items() if not name.startswith("ringflash")]
        assert len(peers) == 7
        assert min(peers) / ours == pytest.approx(over_peer, abs=0.0051)
        assert ours / captured == pytest.approx(over_captured, abs=0.0051 if tokens < 32768 else 0.03)
    of = {(row["seqlen"], row["name"]): row for row in rows("ring-2gpu-queued")}
    for tokens, *expected in ((8192, 2.31, 2.37, 1.85), (16384, 7.32, 7.73, 7.08)):
        names = "ringflash zigzag", FLASH_ULYSSES, "ringflash zigzag, graph"
        assert [of[tokens, name]["forward_backward_ms"] for name in names] == pytest.approx(expected, abs=0.0051)


def test_queued_rings() -> None:
    variants = [f"ringflash zigzag{variant}" for variant in ("", ", launches", ", graphs", ", graph")]
    names = [*variants, FLASH_RING, FLASH_ULYSSES, CUDNN_ULYSSES]
    of = {(row["seqlen"], row["name"]): row for row in rows("ring-4gpu-queued")}
    for tokens, *cells in table("ring", "queued"):
        for cell, name in zip(cells, names, strict=True):
            row = of[int(tokens), name]
            assert row["queued"] == 20
            assert_rounded(cell, row["forward_ms"], row["forward_backward_ms"])
    for tokens, over_captured, over_ulysses in ((8192, 1.17, 1.48), (16384, 1.07, 0.97), (32768, 1.0, 1.04)):
        ours, _, _, captured, _, flash, cudnn = (of[tokens, name]["forward_backward_ms"] for name in names)
        assert ours / captured == pytest.approx(over_captured, abs=0.0051)
        assert min(flash, cudnn) / ours == pytest.approx(over_ulysses, abs=0.0051)


def test_ulysses() -> None:
    variants = ("", ", graphs", ", heads over 2 ranks", ", heads over 4 ranks")
    names = [*(f"ringflash zigzag{variant}" for variant in variants)]
    names += ["Ulysses, FA4", "Ulysses, cuDNN", "USP, FA4"]
    records = "ring-4gpu-ulysses", "ring-4gpu-ulysses-256k", "ring-4gpu-short"  # the last record with a length wins
    of = {(row["seqlen"], row["name"]): row for row in rows(*records)}
    ratios, over_usp = list[float](), list[float]()
    for tokens, *cells in table("ring", "ulysses"):
        for cell, name in zip(cells, names, strict=True):
            row = of.get((int(tokens), name))
            assert_rounded(cell, *((row["forward_ms"], row["forward_backward_ms"]) if row else ()))
        ms = {name: of[int(tokens), name]["forward_backward_ms"] for name in names if (int(tokens), name) in of}
        ulysses = min(ms["Ulysses, FA4"], ms["Ulysses, cuDNN"])
        ratios.append(ulysses / ms[names[0]])
        if "USP, FA4" in ms:
            over_usp.append(ms["USP, FA4"] / ms[names[0]])
    today = {(row["seqlen"], row["name"]): row.get("forward_backward_ms", 0) for row in rows("ring-4gpu-8k")}
    for tokens, ratio in ((8192, 1.07), (16384, 1.05)):
        ulysses = min(today[tokens, "Ulysses, FA4"], today[tokens, "Ulysses, cuDNN"])
        assert ulysses / today[tokens, names[0]] == pytest.approx(ratio, abs=0.0051)
    assert all(ratio == pytest.approx(1, abs=0.02) for ratio in ratios[2:])
    assert over_usp == pytest.approx((2.53, 1.41, 1.11, 1.06, 1.04), abs=0.0051)


def test_predictions(tmp_path: Path) -> None:
    found: dict[int, dict[str, Any]] = {}
    rates = "--tflops-forward 639 --tflops-backward 592 --issue-us 500 --seqlens 8192 --world-sizes 4 --choose-at"
    for name in ("ring-4gpu", "ring-4gpu-long", "ring-4gpu-1m"):
        written, measured = tmp_path / "model.json", RECORDS / "h200" / f"{name}.json"
        assert main(["bench", "model", *rates.split(), "--measured", str(measured), "--json", str(written)]) == 0
        found |= {row["seqlen"]: row for row in json.loads(written.read_text())["measured"]}
    listed = table("cost-model", "predicted")
    assert [int(cells[0]) for cells in listed] == sorted(found)
    for tokens, *cells in listed:
        row = found[int(tokens)]
        for texts, part in ((cells[:3], "forward"), (cells[3:], "forward_backward")):
            measured, predicted = row[f"{part}_ms"], row[f"{part}_predicted_ms"]
            for text, value in zip(texts, (measured, predicted, 100 * (predicted / measured - 1)), strict=True):
                assert_rounded(text, value)


def test_decode() -> None:
    keys = "graph_us", "gb_s", "queued_us", "host_us"
    for cells, row in zip(table("decode", "decode"), rows("decode"), strict=True):
        assert cells[0].strip("*") == row["name"]
        for cell, key in zip(cells[1:], keys, strict=True):
            assert_rounded(cell, row[key])


def test_memory() -> None:
    of: dict[tuple[int, str], list[float]] = {}
    first = {row["seqlen"] for row in rows("ring-4gpu-ulysses")}
    later = [row for row in rows("ring-4gpu-long", "ring-4gpu-1m") if row["seqlen"] not in first]
    for row in [row for row in rows("ring-4gpu-ulysses") if "gib" in row] + later:
        name = "torch" if row["name"].startswith("torch") else row["name"]
        of.setdefault((row["seqlen"], name), []).append(row["gib"])
    for tokens, ours, peer, torch in table("memory", "memory"):
        assert_rounded(ours, *of[int(tokens), "ringflash zigzag"])
        assert_rounded(peer, *of.get((int(tokens), "ring-flash-attn zigzag, FA4"), ()))
        found = of.get((int(tokens), "torch"), [])
        assert_rounded(torch.replace(" to ", " / "), *(f(found) for f in (min, max) if found))


def test_longest_contexts() -> None:
    record = rows("memory-longest", "memory-groups")
    for shape, before, before_gib, now, planned, gib, host in table("memory", "longest"):
        of = {(row["name"], row["context"]): row for row in record if row["shape"] == shape[:2].lower()}
        row = of["ringflash", int(now)]
        for cell, key in ((planned, "planned_gib"), (gib, "gib"), (host, "planned_host_gib")):
            assert_rounded(cell, row[key])
        assert 0.95 * row["planned_gib"] <= row["gib"] <= row["planned_gib"]
        earlier = of["ringflash at a819d7d", int(before.removeprefix("less than "))]
        if "failed" in earlier:
            assert (before[:9], before_gib) == ("less than", "out of memory")
        else:
            assert_rounded(before_gib, earlier["gib"])
        assert int(now) >= 2 * earlier["context"]


def test_groups_of_heads() -> None:
    of = {(row["context"], row["head_groups"]): row for row in rows("memory-groups")}
    shown = table("memory", "groups")
    assert len(shown) == len(of)
    for tokens, groups, *cells in shown:
        row = of[int(tokens), int(groups)]
        for cell, key in zip(cells, ("planned_gib", "gib", "seconds"), strict=True):
            assert_rounded(cell, row[key])
        assert 0.94 * row["planned_gib"] <= row["gib"] <= row["planned_gib"]


def assert_steps(cells: list[str], ours: dict[str, Any], peer: dict[str, Any]) -> None:
    """Compares a row of a table of training steps with the records of both contenders."""
    for texts, row in ((cells[:3], ours), (cells[3:6], peer)):
        exact = row["tokens_per_second_per_gpu"], 100 * row["mfu"], row["gib"]
        for text, value in zip(texts, exact, strict=True):
            assert_rounded(text, value)
    assert_rounded(cells[6], ours["over_peer"])


def test_training() -> None:
    of: dict[tuple[str, int, str], dict[str, Any]] = {}
    for path in sorted((RECORDS / "h200").glob("training-4gpu-[18]b*.json")):
        for row in rows(path.stem):
            if "name" in row and not path.stem.endswith("-kept"):
                of[row["shape"], row["context"], row["name"]] = row
    listed = table("training", "training")
    assert len(listed) == 8
    for shape, context, *cells in listed:
        cell = shape.lower(), int(context.partition(",")[0])
        ours, torch = of[*cell, "ringflash"], of[*cell, "torch context_parallel"]
        assert ("offloaded" in context, "graphs" in context) == (ours.get("offload", False), ours["cuda_graphs"])
        assert_steps(cells, ours, torch)


def test_training_beside_ulysses() -> None:
    for shape, *cells in table("training", "ulysses"):
        of = {row["name"]: row for row in rows(f"training-4gpu-ulysses-{shape[:2].lower()}") if row["context"] == 32768}
        ours, *peers = (of[name] for name in ("ringflash", "FlashAttention, Ulysses", "torch context_parallel"))
        assert (shape, peers[0]["kernels"]) == (f"{shape[:2]}, {ours['layers']} layers", "FA4")
        assert ours["cuda_graphs"] == (shape[:2] == "1B")
        rate, *others = (row["tokens_per_second_per_gpu"] for row in (ours, *peers))
        expected = rate, 100 * ours["mfu"], ours["gib"], *others, *(rate / other for other in others)
        for text, value in zip(cells, expected, strict=True):
            assert_rounded(text, value)


def test_training_on_two_gpus() -> None:
    of = {row["name"]: row for row in rows("training-2gpu-ulysses-8b")}
    ours, *peers = (of[name] for name in ("ringflash", "FlashAttention, Ulysses", "torch context_parallel"))
    ((context, *cells),) = table("training", "two_gpus")
    assert int(context) == ours["context"]
    rate, *others = (row["tokens_per_second_per_gpu"] for row in (ours, *peers))
    expected = rate, 100 * ours["mfu"], ours["gib"], *others, *(rate / other for other in others)
    for text, value in zip(cells, expected, strict=True):
        assert_rounded(text, value)
    (alone,) = rows("training-2gpu-8b-128k")
    figures = f"{alone['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, {alone['mfu']:.1%}, in {alone['gib']:.1f} GiB"
    assert figures in (PAGES / "training.md").read_text().replace("\n", " ")


def test_training_on_one_gpu() -> None:
    of = {
        (row["shape"].upper(), int(row["context"]), row["name"]): row
        for row in rows("training-1gpu-1b-flash", "training-1gpu-8b-flash", "training-1gpu-8b-128k-flash")
    }
    listed = table("training", "flash")
    assert len(of) == 3 * len(listed) - 1 == 26
    for shape, context, *cells in listed:
        ours, *peers = (of.get((shape, int(context), name)) for name in ("ringflash", "FlashAttention", "SDPA"))
        assert ours is not None
        rate, *others = (None if row is None else row["tokens_per_second_per_gpu"] for row in (ours, *peers))
        ratios = [None if other is None else rate / other for other in others]
        for text, value in zip(cells, (rate, 100 * ours["mfu"], ours["gib"], *others, *ratios), strict=True):
            assert text == "-" if value is None else assert_rounded(text, value) is None
        assert peers[0] is not None
        assert peers[0]["kernels"] == "FA4"
        assert ours["kept_blocks"] == (4 if context == "131072" else ours["layers"])
    (block,) = rows("training-1gpu-8b-block")
    assert block["loss"][0] == pytest.approx(of["8B", 32768, "ringflash"]["loss"][0], abs=1.1e-4)
    text = (PAGES / "training.md").read_text().replace("\n", " ")
    kept = f"{block['tokens_per_second_per_gpu']:,.0f} tokens/s, {block['mfu']:.1%}, in {block['gib']:.1f} GiB"
    assert kept in text
    short = {row["name"]: row["tokens_per_second_per_gpu"] for row in rows("training-1gpu-1b-2048")}
    ours = short["ringflash"]
    later = f"{ours:,.0f} tokens a second there: {ours / short['FlashAttention']:.3f} times FlashAttention-4's rate"
    assert f"{later} and {ours / short['SDPA']:.3f} times SDPA's" in text


def test_float8() -> None:
    of = {row["linears"]: row for row in rows("training-1gpu-8b-fp8-rowwise", "training-1gpu-8b-fp8")}
    listed = table("training", "float8")
    assert [name.strip("`") for name, *_ in listed] == list(of)
    for name, *cells in listed:
        row = of[name.strip("`")]
        exact = row["seconds"], row["tokens_per_second_per_gpu"], 100 * row["mfu"], row["gib"]
        for text, value in zip(cells, exact, strict=True):
            assert_rounded(text, value)
    losses = {row["run"]: row["loss"] for row in rows("training-curves-fp8")}
    base = losses.pop("compute")
    differences = {name: [(x - y) / y for x, y in zip(loss, base, strict=True)] for name, loss in losses.items()}
    means = {name: sum(map(abs, each)) / len(each) for name, each in differences.items()}
    assert (round(means["fp8"], 3), round(means["fp8_rowwise"], 3)) == (0.022, 0.011)
    most = {name: max(map(abs, each)) for name, each in differences.items()}
    assert (round(most["fp8"], 2), round(most["fp8_rowwise"], 2)) == (0.21, 0.05)
    assert abs(differences["fp8"][145]) == most["fp8"]
    assert round(sum(differences["fp8"][100:]) / 100, 3) == 0.021


def test_claims_of_the_readme() -> None:
    of: dict[int, dict[str, float]] = {}
    memory: dict[str, list[float]] = {}
    for row in rows("ring-4gpu-long", "ring-4gpu-ulysses", "ring-4gpu-short", "ring-4gpu-8k"):  # the last one wins
        if "forward_backward_ms" in row and not row["name"].startswith("Ulysses"):
            of.setdefault(row["seqlen"], {})[row["name"]] = row["forward_backward_ms"]
        if row["seqlen"] == 262144:
            memory.setdefault(row["name"].split()[0], []).append(row["gib"])
    peers = [min(ms for name, ms in by.items() if not name.startswith("ringflash")) for by in of.values()]
    ratios = [peer / by["ringflash zigzag"] for peer, by in zip(peers, of.values(), strict=True)]
    assert (min(ratios), max(ratios)) == pytest.approx((1.02, 2.59), abs=0.0051)
    assert [round(min(gib), 1) for gib in memory.values()] == [4.3, 15.8, 6.0]
    (ours, _) = rows("training-4gpu-8b-256k")
    assert (round(ours["mfu"], 2), round(ours["over_peer"], 2)) == (0.52, 1.42)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn_from_records(name: str, tmp_path: Path) -> None:
    path = pictures.draw(name, RECORDS / "h200", tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "images" / path.name).exists()
