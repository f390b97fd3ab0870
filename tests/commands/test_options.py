from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path

import pytest

from ringflash.commands.options import CONFIGS, check_at_least, check_heads, check_positive, config_file, fill_in
from ringflash.errors import ArgumentError, CheckpointCorrupt, ConfigError
from ringflash.integrations.transformers.mask import MaskAsTensor


def test_what_is_left_out_is_filled_in() -> None:
    options = Namespace(nheads=None, nheads_kv=None, rounds=3, png=None)
    fill_in(options, {"nheads": 8, "rounds": 5})
    assert options == Namespace(nheads=8, nheads_kv=8, rounds=3, png=None)
    fill_in(options, {"nheads": 16, "nheads_kv": 4})
    assert (options.nheads, options.nheads_kv) == (8, 8)


def test_configurations_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("two-hosts", "two-hosts.yaml", "configs/two-hosts.yaml"):
        assert config_file(name) == CONFIGS / "two-hosts.yaml"
    (tmp_path / "two-hosts.yaml").write_text("")  # a file comes first
    assert config_file("two-hosts.yaml") == Path("two-hosts.yaml")
    with pytest.raises(ConfigError, match=r"no file two-hots\. Did you mean two-hosts.yaml or two-hosts\?"):
        config_file("two-hots")
    with pytest.raises(ConfigError, match=r"no file elsewhere/two-hosts\. Did you mean two-hosts\?"):
        config_file("elsewhere/two-hosts")


def test_numbers_are_checked_one_by_one() -> None:
    options = Namespace(seqlens=[4, 2], choose_at=[], gpus_a_host=None, taken=0.0, latency_us=float("nan"))
    check_at_least(options, ["seqlens", "choose_at", "gpus_a_host"], 2)
    check_at_least(options, ["taken"], 0)
    message = "^--seqlens: expected at least 3, got 2. Leave it out for the default.$"
    with pytest.raises(ArgumentError, match=message):
        check_at_least(options, ["choose_at", "seqlens"], 3)
    with pytest.raises(ArgumentError, match="^--latency-us: expected at least 0, got nan. Say more.$"):
        check_at_least(options, ["latency_us"], 0, remedy="Say more.")
    with pytest.raises(ArgumentError, match="^--taken: expected more than 0, got 0.0. Leave it out for the default.$"):
        check_positive(options, ["taken"])


def test_heads_are_shared_evenly() -> None:
    check_heads(Namespace(nheads=12, nheads_kv=4))
    with pytest.raises(ArgumentError, match="^--nheads: expected a multiple of --nheads-kv 8, got 12. Query heads"):
        check_heads(Namespace(nheads=12, nheads_kv=8))


@pytest.mark.parametrize(
    "error",
    [
        CheckpointCorrupt("file", expected="a", got=Path("b"), remedy="Do c.", rank=2),
        MaskAsTensor("indexes it"),
    ],
)
def test_errors_travel_between_processes(error: ArgumentError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert (copy.argument, copy.remedy, copy.rank) == (error.argument, error.remedy, error.rank)
