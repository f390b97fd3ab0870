from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from ringflash.commands import main
from ringflash.errors import ConfigError, DataError
from ringflash.train.callbacks.report import Report, figures, write_report
from ringflash.train.callbacks.report_picture import draw_by_position, running_mean
from ringflash.train.callbacks.run_log import read_run

LOG = """epoch,step,train/loss,train/loss_by_position/0-63,train/loss_by_position/64-127,train/mfu,val/loss
0,0,5.5,5.6,5.0,,
0,4,4.0,4.2,3.0,0.25,
0,4,,,,,3.9
0,9,3.0,4.0,2.0,0.5,
"""
CONFIG = "trainer: {max_steps: 20, devices: 2}\nmodel: {model: {dim: 64}, seed: null}\n"


def write_run(folder: Path, log: str = LOG, config: str = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.csv").write_text(log)
    (folder / "config.yaml").write_text(config)
    return folder


def test_what_a_log_holds(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a-run"))
    assert run.points("train/loss") == [(1, 5.5), (5, 4.0), (10, 3.0)]
    assert run.points("val/loss") == [(5, 3.9)]
    assert (run.name, run.steps, run.points("nothing")) == ("a-run", 10, [])
    assert run.by_position(0, 1) == [(0, 63, 5.6), (64, 127, 5.0)]
    assert run.by_position() == [(0, 63, pytest.approx(4.6)), (64, 127, pytest.approx(10 / 3))]
    rows = dict(figures(run))
    assert rows["last step logged"] == "10 of 20"
    assert rows["train loss, first and last"] == "5.5000, 4.1667 (mean of 3)"
    assert rows["MFU (median)"] == "37.5%"
    assert "peak memory of a rank" not in rows


@pytest.mark.parametrize("end", [1, 20, len(LOG) - 8, len(LOG) - 30, len(LOG)])
def test_a_run_that_goes_on(tmp_path: Path, end: int) -> None:
    """Checks the report of a run in progress, with a log that may end inside a line."""
    run = write_run(tmp_path / "run", LOG[:end])
    assert main.main(["report", str(run), "--to", str(tmp_path / "pages" / "page.md")]) == 0
    page = (tmp_path / "pages" / "page.md").read_text()
    assert "(page.png)" in page
    assert "| model.model.dim | `64` |" in page
    assert "model.seed" not in page
    with Image.open(tmp_path / "pages" / "page.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10


def test_without_a_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").unlink()
    write_report(run, run / "report.md")
    assert "No config.yaml" in (run / "report.md").read_text()


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main.main(["report", str(tmp_path)]) == 2
    assert "no metrics.csv in it" in capsys.readouterr().err
    run = write_run(tmp_path / "run", config="a: [")
    with pytest.raises(DataError, match="as YAML"):
        read_run(run)
    assert main.main(["report", str(run), "--to", "page.html"]) == 2
    with pytest.raises(ConfigError):
        Report("../report.md")


def test_running_mean() -> None:
    assert running_mean([4.0, 2.0, 0.0], 2) == [4.0, 3.0, 1.0]
    assert running_mean([], 2) == []


def test_picture_by_position(tmp_path: Path) -> None:
    draw_by_position([("a", [(0, 63, 2.0), (64, 127, 1.0)]), ("b", [])], tmp_path / "new" / "loss.png")
    assert (tmp_path / "new" / "loss.png").is_file()
