"""Masks of the ring benchmark: causal, with a window, or with documents of mixed lengths."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

import ringflash as rf
from ringflash.errors import ArgumentError

SPREAD = 1.0  # deviation of log(length): the longest of 16 documents is a dozen times the median


def mask(seqlen: int, window_left: int | None, documents: int | None) -> tuple[Any, str]:
    """Returns the mask and its name. None stands for the causal mask.

    Args:
        seqlen: tokens in the whole sequence.
        window_left: number of keys that a query sees before its own.
        documents: number of documents packed into the sequence.

    Raises:
        ArgumentError: a negative window, fewer tokens than documents, or no documents.
    """
    seen: Any = rf.Causal()
    names = ["causal"]
    if window_left is not None:
        if window_left < 0:
            remedy = "Pass how many keys a query sees before its own."
            raise ArgumentError("--window-left", expected="at least 0", got=window_left, remedy=remedy)
        seen &= rf.SlidingWindow(window_left, 0)
        names.append(f"window of {window_left + 1}")  # keys, with the query's own
    if documents is not None:
        seen &= rf.Documents([0, *accumulate(lengths(seqlen, documents))])
        names.append(f"{documents} documents")
    return (None if len(names) == 1 else seen), ", ".join(names[1:]) or "causal"


def lengths(seqlen: int, documents: int) -> list[int]:
    """Returns log-normal lengths that sum to `seqlen`, none of them 0, the same in every process and run.

    Raises:
        ArgumentError: fewer tokens than documents, or no documents.
    """
    if not 1 <= documents <= seqlen:
        remedy = "Every document has at least a token."
        raise ArgumentError("--num-documents", expected=f"1 to {seqlen}", got=documents, remedy=remedy)
    drawn = torch.randn(documents, generator=torch.Generator().manual_seed(documents), dtype=torch.float64)
    weights = (SPREAD * drawn).exp()
    found = [1 + int(share) for share in (weights / weights.sum() * (seqlen - documents)).tolist()]
    found[found.index(max(found))] += seqlen - sum(found)
    return found
