"""Bitmap masks: block-sparse masks, and the tree of a speculative draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ringflash.checks import check_whole
from ringflash.errors import ArgumentError
from ringflash.masks.base import TensorMask, integers, is_traced, shortened, tensor_of
from ringflash.masks.bitmap import Bitmap


class _Sparse(TensorMask):
    """A mask that its bitmap defines completely."""

    def bitmap(self) -> Bitmap:
        """Returns the bitmap, which defines the whole mask."""
        return self._bitmap

    @cached_property
    def _bitmap(self) -> Bitmap:
        return self._drawn()

    @abstractmethod
    def _drawn(self) -> Bitmap:
        """Computes the bitmap."""

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = the first key that the bitmap shows, hi = one past the last; both 0 if it shows none."""
        bitmap = self.bitmap()
        rows = bitmap.rows(positions_q)
        lo, hi = (x.to(positions_q.device)[rows].clamp(max=seqlen_k)[None] for x in bitmap.hull)
        return lo, hi


class BlockSparse(_Sparse):
    """The block-sparse mask: the query at position i sees key j iff blocks[i // block_size, j // block_size].

    Tiles that no set block touches are neither loaded nor computed. Queries before the first key see nothing.

    Args:
        blocks: (nblocks, nblocks) bool, nblocks = ceil(seqlen / block_size): all pairs of blocks of the sequence.
        block_size: number of tokens in a block.

    Raises:
        ArgumentError: `blocks` is not boolean, not square or empty, or `block_size` is below 1.
    """

    def __init__(self, blocks: Tensor | Sequence[Sequence[bool]], block_size: int) -> None:
        given = tensor_of("blocks", blocks, "a square matrix of bools")
        if given.dtype != torch.bool or given.ndim != 2 or given.shape[0] != given.shape[1] or given.numel() == 0:
            got = f"{given.dtype} {tuple(given.shape)}"
            remedy = "Pass (nblocks, nblocks): blocks[i, j] says whether query block i sees key block j."
            raise ArgumentError("blocks", expected="a square matrix of bools", got=got, remedy=remedy)
        check_whole("block_size", block_size, 1, "Pass the number of tokens in a block.")
        self._blocks = given.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.block_size = block_size
        self._words = f"block_sparse {block_size}"  # made here for torch.compile, as in SlidingWindow

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind with the block size, and the blocks."""
        return self._words, [self._blocks]

    def validate(self, seqlen: int) -> None:
        """Raises ArgumentError unless the number of blocks fits `seqlen` tokens."""
        nblocks = -(-seqlen // self.block_size)
        if self._blocks.shape[0] != nblocks:
            expected = f"({nblocks}, {nblocks}) for {seqlen} tokens in blocks of {self.block_size}"
            remedy = "Cut the whole sequence into ceil(seqlen / block_size) blocks."
            raise ArgumentError("blocks", expected=expected, got=tuple(self._blocks.shape), remedy=remedy)

    def _drawn(self) -> Bitmap:
        edges = torch.arange(self._blocks.shape[0] + 1, device="cpu") * self.block_size
        return Bitmap(edges, torch.nn.functional.pad(self._blocks, (0, 0, 1, 1)), self.block_size)

    def __repr__(self) -> str:
        nblocks = self._blocks.shape[0]
        return f"BlockSparse({nblocks} x {nblocks} blocks of {self.block_size}, {int(self._blocks.sum())} seen)"


class Tree(_Sparse):
    """The mask of a token tree after a common context: a token sees the context, its ancestors and itself.

    Token i has position start + i, and the keys before `start` are the context. Queries outside the tree see the
    context alone (`Tree(parents, start) & Causal()` is causal there too). No query sees keys past the tree.

    Args:
        parents: (n,) integers: the index of each token's parent, less than the token's own; -1 for a root.
        start: position of token 0.

    Raises:
        ArgumentError: a parent does not come before its child or is below -1, or `start` is below 0.

    Source: Miao et al. 2024, "SpecInfer", section 4.
    """

    def __init__(self, parents: Tensor | Sequence[int], start: int = 0) -> None:
        self._parents = integers("parents", parents)
        wrong = (self._parents < -1) | (self._parents >= torch.arange(self._parents.numel(), device="cpu"))
        if not is_traced() and bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            got = f"parent {int(self._parents[token])} of token {token}"
            remedy = "Number the tokens so that every parent comes before its children; a root has -1."
            raise ArgumentError("parents", expected="each -1 or an earlier token", got=got, remedy=remedy)
        check_whole("start", start, 0, "Pass the position of token 0.")
        self.start = start
        self._words = f"tree {start}"

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind with the start, and the parents."""
        return self._words, [self._parents]

    @cached_property
    def ancestors(self) -> Tensor:
        """Returns bool (n, n) on the CPU: row i is True at the ancestors of token i and at token i."""
        tokens = torch.arange(self._parents.numel(), device="cpu")
        seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool, device="cpu")
        ancestor = tokens
        while len(tokens):  # each iteration moves all tokens one step towards the root
            seen[tokens, ancestor] = True
            ancestor = self._parents[ancestor]
            climbing = ancestor >= 0
            tokens, ancestor = tokens[climbing], ancestor[climbing]
        return seen

    def validate(self, seqlen: int) -> None:
        """Raises ArgumentError unless the tree lies within `seqlen` keys."""
        stop = self.start + self._parents.numel()
        if stop > seqlen:
            remedy = "Pass the keys of all its tokens, or an earlier start."
            raise ArgumentError("mask", expected=f"a tree that ends by {seqlen}", got=f"one to {stop}", remedy=remedy)

    def _drawn(self) -> Bitmap:
        n = self._parents.numel()
        cells = torch.ones(n + 2, self.start + n, dtype=torch.bool, device="cpu")
        cells[:, self.start :] = torch.nn.functional.pad(self.ancestors, (0, 0, 1, 1))
        return Bitmap(self.start + torch.arange(n + 1, device="cpu"), cells, 1)

    def __repr__(self) -> str:
        start = f", start={self.start}" if self.start else ""
        return f"Tree({shortened(self._parents.tolist())}{start})"
