"""The command `ringflash plan`: tables, a picture, and errors with a remedy."""

from pathlib import Path

import pytest

import ringflash as rf
from ringflash.commands import plan as plan_command
from ringflash.commands.main import main
from ringflash.layouts.layout import LAYOUTS

COMMON = ["plan", "--seqlen", "4096", "--world-size", "4"]


def test_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, image = tmp_path / "lengths.txt", tmp_path / "made" / "plan.png"
    lengths.write_text("2048 512\n512 1024")
    rest = ["--layout", "balanced", "--document-lengths", str(lengths), "--window-left", "512", "--png", str(image)]
    assert main([*COMMON, *rest]) == 0
    out = capsys.readouterr().out
    parts = "Causal() & Documents([0, 2048, 2560, 3072, 4096]) & SlidingWindow(left=512, right=None)"
    assert parts in " ".join(out.split())
    assert image.read_bytes().startswith(b"\x89PNG")
    for layout in ("contiguous", "zigzag", "striped", "balanced"):
        assert f"│ {layout} " in out


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Checks rank 3 of a contiguous causal ring: 7/16 of the work, 4 of 4 hops computed, nothing sent forward."""
    assert main([*COMMON, "--layout", "contiguous", "--nheads", "8", "--nheads-kv", "2", "--headdim", "64"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("│    ")]
    cells = [[cell for cell in row if cell != "│"] for row in rows]
    assert cells[3][:4] == ["3", "1,024", "1", "43.75%"]
    assert cells[3][6:] == [
        "0.0",
        "3.0",
        "0%",
        "4",
        "of",
        "4",
    ]  # backward: the gradients of three ranks' keys return to their owners
    assert cells[0][6:] == ["0.5", "1.5", "0%", "1", "of", "4"]


def test_layouts_send_what_their_plans_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--window-left", "700"]) == 0
    out = capsys.readouterr().out
    for layout in LAYOUTS:
        context = rf.ContextParallel.local(4, layout)
        plans = [context.plan(rf.Causal() & rf.SlidingWindow(700), 4096, rank) for rank in range(4)]
        (row,) = [line.split() for line in out.splitlines() if line.startswith(f"│ {layout} ")]
        sent = f"{sum(plan.rows_sent for plan in plans) / (3 * 4096):.0%}"
        assert row[3::2] == [
            f"{plans[0].balance:.3f}",
            f"{plans[0].critical_path:.3f}",
            str(len(plans[0].hops)),
            sent,
            row[-2],
        ]


def test_large_worlds_are_shown_in_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "MOST_COMPARED", 71)
    assert main(["plan", "--seqlen", "4096", "--world-size", "72"]) == 0
    out = capsys.readouterr().out
    assert "The first 64 of 72 hops." in out
    assert "Layouts are compared over up to 71 ranks." in out
    assert "The same under every layout" not in out
    assert "│   71 │" in out  # the table has every rank
    assert "│  63 │" in out
    assert "│  64 │" not in out


def test_the_layout_asked_for_comes_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "_layouts", stopped)
    with pytest.raises(KeyboardInterrupt):
        main(COMMON)
    assert "Hops of a forward" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_more_ranks_than_columns(layout: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = tmp_path / "plan.svg"
    argv = [
        "plan",
        "--seqlen",
        "4099",
        "--world-size",
        "24",
        "--layout",
        layout,
        "--mask",
        "full",
        "--png",
        str(image),
    ]
    assert main(argv) == 0
    assert "rank 0" not in capsys.readouterr().out
    assert image.stat().st_size > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--layout", "spiral"],
            "layout: expected one of ('contiguous', 'zigzag', 'striped', 'balanced'), got 'spiral'",
        ),
        (["--world-size", "0"], "--world-size: expected at least 1, got 0"),
        (["--world-size", "5000"], "seqlen: expected at least one token a rank (5000 ranks), got 4096 tokens"),
        (["--nheads", "12"], "--nheads: expected a multiple of --nheads-kv 8, got 12"),
        (["--window-right", "-2"], "--window-right: expected at least 0, got -2"),
        (["--window-left", "-1"], "--window-left: expected at least 0, got -1"),
        (
            ["--document-lengths", "4000"],
            "--document-lengths: expected lengths that sum to --seqlen 4096, got a sum of 4000",
        ),
        (
            ["--document-lengths", "no-such-file"],
            "--document-lengths: expected lengths, or a file that holds them, got no-such-file",
        ),
        (["--document-lengths", ""], "--document-lengths: expected lengths, or a file that holds them, got none"),
        (["--png", "plan"], "--png: expected a .png, .svg or .pdf file, got plan"),
    ],
)
def test_bad_arguments(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_list_of_documents_longer_than_a_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ",".join(["10"] * 400)
    assert main(["plan", "--seqlen", "4000", "--world-size", "2", "--document-lengths", lengths]) == 0
    assert "4000 tokens over 2 ranks" in " ".join(capsys.readouterr().out.split())


def test_a_mask_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*COMMON, "--mask", "triangle"])
    assert "invalid choice: 'triangle'" in capsys.readouterr().err
