"""`ringflash plan`: tables, a picture, and errors that say what to do."""

from pathlib import Path

import pytest

from ringflash.cli import main

COMMON = ["plan", "--seqlen", "4096", "--world-size", "4"]


def test_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, image = tmp_path / "lengths.txt", tmp_path / "made" / "plan.png"
    lengths.write_text("2048 512\n512 1024")
    rest = ["--layout", "balanced", "--documents", str(lengths), "--window", "512", "--image", str(image)]
    assert main([*COMMON, *rest]) == 0
    out = capsys.readouterr().out
    assert "SlidingWindow(left=512, right=None) & Documents([0, 2048, 2560, 3072, 4096])" in " ".join(out.split())
    assert image.read_bytes().startswith(b"\x89PNG")
    for layout in ("contiguous", "zigzag", "striped", "balanced"):
        assert f"│ {layout} " in out


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 3 of a contiguous causal ring: 7/16 of the work, hops computed 4 of 4, nothing sent."""
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
    ]  # backward: its the gradients of three ranks' keys go home
    assert cells[0][6:] == ["0.5", "1.5", "0%", "1", "of", "4"]


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
        "--image",
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
        (["--window", "1", "2", "3"], "--window: expected one or two numbers, got [1, 2, 3]"),
        (["--window", "-1"], "left: expected None or at least 0, got -1"),
        (["--documents", "4000"], "--documents: expected lengths that sum to --seqlen 4096, got a sum of 4000"),
        (["--documents", "no-such-file"], "--documents: expected lengths, or a file that holds them, got no-such-file"),
        (["--documents", ""], "--documents: expected lengths, or a file that holds them, got none"),
        (["--image", "plan"], "--image: expected a .png, .svg or .pdf file, got plan"),
    ],
)
def test_bad_arguments(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_mask_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*COMMON, "--mask", "triangle"])
    assert "invalid choice: 'triangle'" in capsys.readouterr().err
