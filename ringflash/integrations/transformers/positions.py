"""Positions of a transformers model's rows in the whole sequence, and the starts of its documents."""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError
from ringflash.integrations.transformers.mask import Asked, base_mask
from ringflash.masks import Documents, Mask
from ringflash.torch_private import version_of

HOST = "_ring_host"  # attribute of positions that were copied to the host: their version, and the copy


def on_host(positions: Tensor) -> Tensor:
    """Returns `positions` on the CPU, copied once for all masks and forwards of a batch.

    The copy stays with the tensor, until the tensor is changed in place.
    """
    if positions.is_inference():  # torch does not count its changes
        return positions.cpu()
    version, host = getattr(positions, HOST, (0, None))
    if host is None or version != version_of(positions):
        host = positions.cpu()
        if host is not positions:
            setattr(positions, HOST, (version_of(positions), host))
    return host


def resolve_mask(
    asked: Asked, positions: Tensor | None, documents: Documents | None, context: ContextParallel | None
) -> Mask | None:
    """Returns the mask over the whole sequence, from the model's mask over the given rows and from their positions.

    All comparisons are made on the CPU, after one copy of the positions.

    Args:
        asked: the model's mask.
        positions: position_ids of the rows, (batch | 1, seqlen). Positions of another shape are ignored.
        documents: packed documents of the whole sequence, if the caller gives them.
        context: the ranks that share the sequence; None if the rows are the whole sequence or follow a cache.

    Raises:
        ArgumentError: the positions do not belong to the rows, or the model's mask has documents that they do not show.
    """
    base = base_mask(asked.causal, asked.left)
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != asked.seqlen_q):
        positions = None
    positions = None if positions is None else on_host(positions)
    if context is None and asked.seqlen_q != asked.seqlen_k:
        _check_cached(asked, positions, documents)
        return base
    if context is None and documents is None:
        return _joined(base, _documents(asked.starts, positions))
    if context is not None and positions is None:
        remedy = "Pass position_ids=context.positions(seqlen)[None]; a model that keeps them from attention cannot run."
        raise ArgumentError("position_ids", expected="those of the shard, (batch, seqlen)", got=None, remedy=remedy)
    mask = _joined(base, documents)
    whole, first = _expected(asked, mask, documents, context, positions)
    breaks = (whole[1:] - whole[:-1] != 1) | (whole[1:] == first[:, 1:])
    if bool((asked.starts[:, 1:] & ~breaks).any()):
        remedy = "Attention in chunks, and documents besides ring_documents, need the whole sequence on one device."
        raise ArgumentError("attention_mask", expected="that of the positions", got="more documents", remedy=remedy)
    return mask


def _check_cached(asked: Asked, positions: Tensor | None, documents: Documents | None) -> None:
    """Checks rows on one device that follow the rows of a cache, or that see another sequence's keys.

    Raises:
        ArgumentError: there are documents, or the positions of causal rows do not follow the cache.
    """
    if documents is not None or bool(asked.starts.any()):
        remedy = "Pack only what has no cache."
        raise ArgumentError("past_key_values", expected="no cache with documents", got="both", remedy=remedy)
    if asked.causal and positions is not None:
        rows = torch.arange(asked.first, asked.first + asked.seqlen_q)
        if not bool((positions == rows).all()):
            remedy = "The cache is of a shard, or of other tokens: fill it without a context."
            expected = f"{asked.seqlen_q} that follow the cache's {asked.first} tokens"
            raise ArgumentError("position_ids", expected=expected, got=positions.tolist(), remedy=remedy)


def _documents(starts: Tensor, positions: Tensor | None) -> Documents | None:
    """Returns the documents of a whole sequence; None if there is only one.

    A document begins where the positions restart, and where a row does not see the row before it.

    Raises:
        ArgumentError: a run of positions does not begin at 0.
    """
    if positions is not None:
        jumps = torch.ones_like(positions, dtype=torch.bool)
        jumps[:, 1:] = positions.diff(dim=1) != 1
        if bool((positions[jumps] != 0).any()):
            remedy = "Pass ring_context=context with the positions of a shard; those of documents restart at 0."
            got = f"runs from {positions[jumps].unique().tolist()[:8]}"
            raise ArgumentError("position_ids", expected="runs from 0 without a ring_context", got=got, remedy=remedy)
        jumps[:, 0] = False
        starts = starts | jumps
    if not bool(starts.any()):
        return None
    seqlen, rows = starts.shape[1], [row.nonzero().flatten().tolist() for row in starts]
    if all(row == rows[0] for row in rows):
        return Documents([0, *rows[0], seqlen])
    most = max(map(len, rows))
    return Documents(torch.tensor([[0, *row, *[seqlen] * (most + 1 - len(row))] for row in rows]))


def _expected(
    asked: Asked,
    mask: Mask | None,
    documents: Documents | None,
    context: ContextParallel | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the positions of the rows in the whole sequence, and the positions at which their documents begin.

    Returns:
        Positions of the rows, (seqlen,), and the first position of each row's document, (batch | 1, seqlen).

    Raises:
        ArgumentError: `positions` are neither positions in the whole sequence nor positions in the rows' documents.
    """
    if context is None and documents is not None:
        documents.validate(asked.seqlen_q)
    for seqlen in _lengths(asked.seqlen_q, documents, context):
        if context is None:
            whole = torch.arange(seqlen)
        elif seqlen < context.world_size:
            continue
        else:
            whole = context.positions(seqlen, mask=mask)
        if whole.shape[0] != asked.seqlen_q:
            continue
        first = torch.zeros_like(whole)[None] if documents is None else documents.bounds(whole, seqlen)[0]
        if positions is None or bool((positions == whole).all()) or bool((positions == whole - first).all()):
            return whole, first
    got, cut = "others", ""
    if positions is not None:
        got = f"{positions.flatten()[:8].tolist()}, ..."
        if context is not None and bool((positions == torch.arange(asked.seqlen_q)).all()):
            # The default of transformers: the rows may be a shard, or a whole sequence that was not cut.
            got = f"0 to {asked.seqlen_q - 1}, as of a sequence that was not cut"
            cut = "Cut whole input_ids by context.shard(input_ids). "
    shard = "the whole sequence" if context is None else f"the {context.layout} shard of rank {context.rank}"
    packed = "" if documents is None else ", or that less where each one's document begins"
    raise ArgumentError(
        "position_ids",
        expected=f"those of {shard}{packed}",
        got=got,
        remedy=f"{cut}Pass context.positions(seqlen)[None], and ring_documents of the whole sequence if it is packed.",
    )


def _lengths(rows: int, documents: Documents | None, context: ContextParallel | None) -> list[int]:
    """Returns the possible lengths of the whole sequence. The shards of two ranks differ by at most one or two rows."""
    if documents is not None:
        return [int(documents.spec[1][0].max())]
    assert context is not None
    if len(context.local_ranks) == context.world_size:
        return [rows]
    even = rows * context.world_size
    return [even, *(even + n for n in range(-2 * context.world_size, 2 * context.world_size + 1) if n)]


def _joined(base: Mask | None, documents: Documents | None) -> Mask | None:
    return base if documents is None else documents if base is None else base & documents
