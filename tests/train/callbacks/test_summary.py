from __future__ import annotations

from typing import Any

import pytest
import torch

from ringflash.errors import ConfigError
from ringflash.train.callbacks.progress import progress_texts
from ringflash.train.callbacks.summary import RunSummary


def test_progress_shows_what_there_is() -> None:
    metrics = {"train/loss": torch.tensor(2.5), "train/tokens_per_second": 12345.6, "train/grad_norm": 1.0}
    assert progress_texts(metrics) == {"loss": "2.500", "tokens/s": "12,346"}
    assert progress_texts({"train/mfu": 0.314}) == {"MFU": "31.4%"}


@pytest.mark.parametrize("options", [{"prompt": ""}, {"temperature": -1.0}, {"sample_tokens": -1}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RunSummary(**options)
