"""The hop benchmark has figures for every role, checks hops before it times them, and reports failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ringflash.bench.attention import hops
from ringflash.bench.common import timing
from ringflash.commands.main import main
from ringflash.kernels.contract import ForwardArguments
from ringflash.kernels.eager.backend import EagerBackend

CELL = "--seqlens 24 37 --headdims 16 --nheads 2 --tokens 50 --dtype float32 --rounds 2"


@pytest.fixture(autouse=True)
def _quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_CALLS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_role_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hops", *CELL.split(), "--nheads-kv", "1", "--json", str(tmp_path / "hops.json")]) == 0
    record = json.loads((tmp_path / "hops.json").read_text())
    assert record["command"] == f"ringflash bench hops {CELL} --nheads-kv 1 --json hops.json"
    cells = [(row["seqlen"], row["batch"], row["mask"]) for row in record["rows"]]
    assert cells == [(24, 2, "full"), (24, 2, "causal"), (37, 1, "full"), (37, 1, "causal")]
    for row in record["rows"]:
        assert row["only_cost"] == 1.0
        for role in ("first", "middle", "last"):
            assert row[f"{role}_cost"] == pytest.approx(row[f"{role}_ms"] / row["only_ms"], rel=0.05)
            assert row[f"{role}_launch_us"] > 0
    assert "A hop's forward, 2:1 heads of 16, float32, backend auto, CPU" in capsys.readouterr().out


def test_without_arguments_it_shows_that_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert hops.main(["--backend", "eager"]) == 0
    assert "2:2 heads of 32, bfloat16, backend eager, CPU" in capsys.readouterr().out


def test_roles_pass_the_state_as_a_ring_does(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = EagerBackend.forward, set[tuple[bool, bool, bool, int]]()

    def spy(given: ForwardArguments) -> None:
        seen.add((given.first, given.last, given.state is None, given.k.shape[1]))
        forward(given)

    monkeypatch.setattr(EagerBackend, "forward", staticmethod(spy))
    assert hops.main(["--seqlens", "24", "--tokens", "24"]) == 0
    whole = {(True, True, True, 24), (True, False, False, 24), (False, False, False, 24), (False, True, False, 24)}
    assert seen == whole | {(True, False, False, 6), (False, False, False, 6), (False, True, False, 12)}


@pytest.mark.parametrize(("role", "hidden"), [((True, True), "only"), ((False, False), "first, middle, last")])
def test_a_hop_that_is_wrong_is_said_in_its_row(
    role: tuple[bool, bool],
    hidden: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forward, calls = EagerBackend.forward, iter(range(99))

    def flawed(given: ForwardArguments) -> None:
        attention_itself = given.first and given.last and next(calls) % 2 == 0  # the reference of the hops
        is_wrong = (given.first, given.last) == role and not attention_itself
        forward(given._replace(v=given.v * 1.5) if is_wrong else given)

    monkeypatch.setattr(EagerBackend, "forward", staticmethod(flawed))
    path = tmp_path / "hops.json"
    assert hops.main([*CELL.split(), "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["failed"].startswith(f"ValueError: another result: out of {hidden} differs by 0.")
        assert "only_ms" not in row
    assert "seqlen 24, full: ValueError: another result: out of " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--seqlens 64 3", "--seqlens: expected at least 4, got 3"),
        ("--tokens 0", "--tokens: expected at least 1, got 0"),
        ("--nheads-kv 3", "nheads: expected a positive multiple of nheads_kv = 3"),
        ("--headdims 512", "headdim: expected 16 to 256, got 512"),
        ("--backend cuda", "backend: expected one of "),
    ],
)
def test_bad_arguments_measure_nothing(changed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hops", *CELL.split(), *changed.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
