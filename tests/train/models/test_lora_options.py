"""Options of LoRA that cannot be honoured, and packages that it misses, raise errors with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from ringflash.errors import ConfigError
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.lora import Lora, add_adapters
from tests.train.lightning.test_transformers_model import Run as Model
from tests.train.lightning.test_transformers_model import config_of

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folder `tied` of a model."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    model: Any = AutoModelForCausalLM.from_config(config_of(Model(tied=True)))
    model.save_pretrained(folder / "tied")
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"lora\.rank: expected an integer of at least 1, got 0"),
        ({"rank": 2.5}, r"lora\.rank: expected an integer of at least 1, got 2\.5"),
        ({"alpha": 0}, r"lora\.alpha: expected a positive number, got 0"),
        ({"dropout": 1.0}, r"lora\.dropout: expected from 0 to below 1, got 1\.0"),
        ({"targets": "q_proj"}, r"lora\.targets: expected a list of layer names, got 'q_proj'"),
        ({"targets": []}, r"lora\.targets: expected a list of layer names, got \[\]"),
    ],
)
def test_values_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lora(**options)


def test_unknown_targets_come_with_the_nearest(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "tied")
    with pytest.raises(ConfigError, match=r"got 'qproj'\. The nearest are q_proj"):
        add_adapters(model, Lora(targets=["v_proj", "qproj"]))
    with pytest.raises(ConfigError, match=r"got 'lm_head'\. There are down_proj, gate_proj"):
        add_adapters(model, Lora(targets=["lm_head"]))  # tied to the embedding


def test_other_models_and_new_weights_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora: expected a model of transformers.*got Linear"):
        add_adapters(nn.Linear(2, 2), Lora())
    with pytest.raises(ConfigError, match=r"model: expected a folder or name of trained weights with lora"):
        TransformersModel(config_of(Model()), lora=Lora())
    with pytest.raises(ConfigError, match=r"lora: expected a ringflash\.train\.Lora"):
        TransformersModel(str(folder / "tied"), lora=cast("Any", {"rank": 2}))


def test_a_missing_peft_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr("ringflash.train.models.lora.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ringflash\[peft\]"):
        TransformersModel(str(folder / "tied"), lora=Lora())
