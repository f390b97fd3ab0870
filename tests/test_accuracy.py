"""The accuracy bars can be missed: results no better than plain attention's do not pass."""

import pytest
import torch

import ringflash as rf
from tests.helpers.accuracy import Problem, assert_accurate


@pytest.mark.parametrize("mask", [None, rf.Causal()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_low_precision_attention_misses_the_bar(dtype: torch.dtype, mask: rf.Causal | None) -> None:
    problem = Problem.random(seqlen=203, dtype=dtype, mask=mask)
    with pytest.raises(AssertionError, match="error"):
        assert_accurate(problem.plain, problem)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_wrong_tensor_misses_the_bar(dtype: torch.dtype, index: int) -> None:
    problem = Problem.random(seqlen=203, dtype=dtype, mask=rf.Causal())
    got = problem.flash()
    got[index] = got[index] * 1.02
    with pytest.raises(AssertionError, match="error"):
        assert_accurate(got, problem)


def test_a_nan_is_found() -> None:
    problem = Problem.random(seqlen=20)
    got = problem.flash()
    got[1][0, 0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="dq has a NaN"):
        assert_accurate(got, problem)
