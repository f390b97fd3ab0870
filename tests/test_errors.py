"""Errors of the library between processes: each keeps its class, message and attributes."""

from __future__ import annotations

import pickle

import pytest

from ringflash.errors import (
    ArgumentError,
    ConfigError,
    GroupFailed,
    PeerFailed,
    PeerLost,
    RankMismatch,
    RingflashError,
    RingTimeout,
)
from ringflash.extras import MissingExtra
from ringflash.integrations.transformers.mask import MaskAsTensor
from ringflash.train.callbacks.nonfinite import NonFiniteError

ERRORS = [
    ArgumentError("q", expected="a tensor", got=None, remedy="Pass one.", rank=1),
    ConfigError("lora.base", expected="layers", got="none", remedy="Leave it out."),
    MaskAsTensor("mask + 1"),
    RankMismatch("seqlen", [8, 9], [1], rank=0),
    PeerFailed([1], ["ValueError: no"], rank=0),
    RingTimeout([1], 2, 3.0, ["waits", "computes"], rank=0),
    PeerLost([1], None, ["waits", "computes"], rank=0),
    GroupFailed("agreed", "Connection closed", 1),
    MissingExtra("This command", "peft", "peft"),
    NonFiniteError("the loss of step 3 is nan"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: RingflashError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert {n: str(x) for n, x in vars(copy).items()} == {n: str(x) for n, x in vars(error).items()}
    assert getattr(copy, "name", None) == getattr(error, "name", None)
