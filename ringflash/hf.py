"""Attention of transformers models by name: `register()`, then `attn_implementation="ring_attention"`.

The context is an argument of the model's forward, `model(..., ring_context=context)`; transformers hands it down to
the attention function with its other keywords. Without it attention runs on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.attention import AttentionOptions, flash_attention, ring_attention
from ringflash.context import ContextParallel
from ringflash.dropout import Dropout
from ringflash.errors import ArgumentError
from ringflash.hf_mask import REMEDY, Asked, Settled, describe
from ringflash.hf_positions import resolve_mask
from ringflash.masks import Documents, Mask

NAME = "ring_attention"  # a name with "flash" in it is taken for one of transformers' own
# What transformers passes on to attention along with the rest, and says nothing about attention, or nothing new.
OF_OTHERS = {
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "encoder_hidden_states",
    "shift_labels",
}


def register() -> None:
    """Makes `attn_implementation="ring_attention"` known to transformers.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("transformers is not installed: pip install 'ringflash[hf]'") from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, describe)  # without one, models pass no mask and do not say so


@dataclass(frozen=True, eq=False)
class Keywords:
    """Keywords that reach attention, from the model and from the caller of its forward.

    Args:
        dropout: probability; 0 while evaluating.
        scaling: of the scores; None is 1 / sqrt(headdim).
        sliding_window: keys that a row sees, its own included; None is all.
        softcap: bound of the scores; None is none.
        s_aux: (nheads,), a sink's logit a head.
        is_causal: what the caller wants; None leaves it to the model.
        deterministic: as in `AttentionOptions`.
        position_ids: (batch | 1, seqlen) of the rows, in the whole sequence or in their documents.
        cu_seq_lens_q: (ndocuments + 1,), where documents begin and end, in the whole sequence.
        cu_seq_lens_k: the same.
        use_cache: whether keys are kept for later forwards.
        output_attentions: whether weights are wanted.
        ring_context: the ranks that share the sequence.
        ring_documents: packed documents, of the whole sequence.
        ring_dropout_seed: the same on all ranks of the context, another one at each forward; of a tensor, each layer.
        others: keywords of other names, that are not None or False.
    """

    dropout: float = 0.0
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    is_causal: bool | None = None
    deterministic: bool | None = None
    position_ids: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    use_cache: bool | None = None
    output_attentions: bool | None = None
    ring_context: ContextParallel | Witness | None = None
    ring_documents: Documents | None = None
    ring_dropout_seed: int | Tensor | None = None
    others: tuple[str, ...] = ()

    @staticmethod
    def of(given: Mapping[str, Any]) -> Keywords:
        """The keywords of one call, by name."""
        others = [n for n, x in given.items() if n not in KNOWN_OR_OTHERS and x is not None and x is not False]
        return Keywords(**{n: x for n, x in given.items() if n in KNOWN}, others=tuple(others))

    @property
    def documents(self) -> Documents | None:
        """The packed documents that the caller names."""
        return self.ring_documents if self.cu_seq_lens_q is None else Documents(self.cu_seq_lens_q)


KNOWN = {f.name for f in fields(Keywords)} - {"others"}
KNOWN_OR_OTHERS = KNOWN | OF_OTHERS


@dataclass
class Witness:
    """Stands in for a context and notes which attention calls it reaches, and whether with positions."""

    positions: list[bool] = field(default_factory=list)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The entry for `AttentionInterface`: `ring_attention` with a context among the keywords, else `flash_attention`.

    Args:
        module: the model's attention layer.
        query: (batch, nheads, seqlen, headdim).
        key: (batch, nheads_kv, seqlen_k, headdim), not repeated.
        value: (batch, nheads_kv, seqlen_k, headdim_v).
        attention_mask: what `describe` made of the model's mask, or None.
        keywords: see `Keywords`.

    Returns:
        out (batch, seqlen, nheads, headdim_v), and no weights.

    Raises:
        ArgumentError: anything that cannot be honoured.
    """
    call = Keywords.of(keywords)
    context = call.ring_context
    if isinstance(context, Witness):
        context.positions.append(call.position_ids is not None)
        context = None
    try:
        _check(module, call, context)
        if attention_mask is None:
            causal = bool(getattr(module, "is_causal", True)) if call.is_causal is None else call.is_causal
            starts = torch.zeros(1, query.shape[2], dtype=torch.bool, device=query.device)
            window = call.sliding_window if causal or call.sliding_window is None else call.sliding_window - 1
            seqlen_k = query.shape[2] if causal else key.shape[2]  # where others begin is not said
            attention_mask = Asked(causal, window, query.shape[2], seqlen_k, 0, starts)
        asked = _check_asked(attention_mask, query, key, call)
        mask = asked.mask if isinstance(asked, Settled) else _resolve(asked, call, context)
        options = AttentionOptions(sinks=call.s_aux, deterministic=call.deterministic or None)
        modes: dict[str, Any] = {"mask": mask, "softmax_scale": call.scaling, "softcap": call.softcap or 0.0}
        modes |= {"dropout": _dropout(module, call, context), "options": options}
    except Exception as error:
        if isinstance(context, ContextParallel):
            context.announce_failure(error)  # the others are about to wait for this rank
        raise
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attention(q, k, v, **modes) if context is None else ring_attention(q, k, v, context, **modes)
    assert isinstance(out, Tensor)
    return out, None


def settle(
    layer: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer's forward, with which `torch.compile` traces its attention in one piece.

    Masks are resolved, which looks at positions, and dropout's seed is this layer's, in a tensor: a number would be
    compiled in.

    Args:
        layer: of a transformers model, with the attention.
        args: that its forward is called with.
        keywords: that its forward is called with, without cache.

    Raises:
        ArgumentError: as `attention`, about masks and positions.
    """
    call = Keywords.of(keywords)
    context = call.ring_context if isinstance(call.ring_context, ContextParallel) else None

    def settled(x: object) -> object:
        return Settled(x.causal, x.window, _resolve(x, call, context)) if isinstance(x, Asked) else x

    try:
        args, named = tuple(map(settled, args)), {name: settled(x) for name, x in keywords.items()}
    except Exception as error:
        if context is not None:
            context.announce_failure(error)
        raise
    if isinstance(call.ring_dropout_seed, int):
        indices = (getattr(module, "layer_idx", None) for module in layer.modules())
        index = next((x for x in indices if isinstance(x, int)), None)
        named["ring_dropout_seed"] = None if index is None else torch.tensor(_layer_seed(call.ring_dropout_seed, index))
    return args, named


def check_model(model: nn.Module) -> None:
    """Runs two tokens through a transformers model, and checks that keywords of its forward reach all its attention.

    A model that keeps them would attend to the shard alone, and so would layers that mix tokens by other means. Under
    FSDP it is a collective, as any forward is.

    Raises:
        ArgumentError: another attn_implementation; a model that keeps the context or the positions from its attention,
            or that has layers without attention.
    """
    config: Any = model.config
    found = config.get_text_config()._attn_implementation
    if found != NAME:
        remedy = 'Call ringflash.hf.register() and make the model with attn_implementation="ring_attention".'
        raise ArgumentError("attn_implementation", expected=NAME, got=found, remedy=remedy)
    witness, training = Witness(), model.training
    tokens = torch.arange(2, device=next(model.parameters()).device)[None]
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=tokens, position_ids=tokens, use_cache=False, ring_context=witness)
    finally:
        model.train(training)
    mixing = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if mixing:
        remedy = "Choose a model in which tokens meet in attention alone: these see the shard alone."
        raise ArgumentError("model", expected="no convolutions over tokens", got=mixing[0], remedy=remedy)
    layers, reached = config.get_text_config().num_hidden_layers, sum(witness.positions)
    if reached < layers:
        remedy = "Choose a model whose layers hand all keywords of forward to transformers' attention interface."
        raise ArgumentError(
            "model",
            expected=f"ring_context and position_ids in the attention of {layers} layers",
            got=f"{type(model).__name__}, where they come to {reached}",
            remedy=remedy,
        )


def _check(module: nn.Module, call: Keywords, context: object) -> None:
    if context is not None and not isinstance(context, ContextParallel):
        remedy = "Make one from a mesh or group."
        raise ArgumentError("ring_context", expected="a rf.ContextParallel", got=repr(context), remedy=remedy)
    if call.ring_documents is not None and not isinstance(call.ring_documents, Documents):
        remedy = "Pass rf.Documents(cu_seqlens) of the whole sequence."
        raise ArgumentError("ring_documents", expected="rf.Documents", got=repr(call.ring_documents), remedy=remedy)
    if call.output_attentions or getattr(getattr(module, "config", None), "output_attentions", False):
        remedy = "The weights are never there whole: leave it out."
        raise ArgumentError("output_attentions", expected="False", got=True, remedy=remedy)
    if call.others:
        raise ArgumentError(
            call.others[0], expected="a keyword that this attention knows", got=", ".join(call.others), remedy=REMEDY
        )
    if context is not None and call.use_cache:
        remedy = "Pass use_cache=False, or set model.config.use_cache: a cache would hold this rank's shard."
        raise ArgumentError("use_cache", expected="False under a context", got=True, remedy=remedy)
    q, k = call.cu_seq_lens_q, call.cu_seq_lens_k
    if (q is None) != (k is None) or (q is not None and k is not None and q is not k and not torch.equal(q, k)):
        remedy = "Queries and keys are of the same documents: pass both alike."
        raise ArgumentError("cu_seq_lens_k", expected="cu_seq_lens_q", got=k, remedy=remedy)
    if q is not None and call.ring_documents is not None:
        remedy = "Pass one of them."
        raise ArgumentError("cu_seq_lens_q", expected="None with ring_documents", got=q, remedy=remedy)


def _resolve(asked: Asked, call: Keywords, context: ContextParallel | None) -> Mask | None:
    given = (context, call.position_ids, call.ring_documents, call.cu_seq_lens_q)
    return asked.resolve(given, lambda: resolve_mask(asked, call.position_ids, call.documents, context))


def _check_asked(asked: object, query: Tensor, key: Tensor, call: Keywords) -> Asked | Settled:
    if not isinstance(asked, Asked | Settled):
        remedy = "Leave it out: masks follow from the model, position_ids and ring_documents."
        raise ArgumentError("attention_mask", expected="None or all ones", got=type(asked).__name__, remedy=remedy)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if isinstance(asked, Asked) and (asked.seqlen_q, asked.seqlen_k) != (seqlen_q, seqlen_k):
        got = f"{seqlen_q} queries and {seqlen_k} keys"
        expected = f"{asked.seqlen_q} queries and {asked.seqlen_k} keys, as in the mask"
        raise ArgumentError("past_key_values", expected=expected, got=got, remedy="Pass a DynamicCache, or none.")
    if call.is_causal is not None and call.is_causal != asked.causal:
        remedy = "Set config.is_causal, from which the model makes its mask."
        raise ArgumentError("is_causal", expected=f"{asked.causal}, as in the mask", got=call.is_causal, remedy=remedy)
    if call.sliding_window is not None and call.sliding_window - 1 != asked.left:
        got = f"{call.sliding_window} keys, own one included"
        expected = f"the mask's window, {asked.left} keys before the own one"
        raise ArgumentError("sliding_window", expected=expected, got=got, remedy=REMEDY)
    if call.ring_context is not None and seqlen_q != seqlen_k:
        remedy = "Pass no past_key_values, and shards of one sequence."
        raise ArgumentError("key", expected=f"{seqlen_q} rows, as query", got=seqlen_k, remedy=remedy)
    if isinstance(call.ring_context, ContextParallel) and asked.window is not None and call.sliding_window is None:
        remedy = "Attention in chunks needs the whole sequence on one device."
        raise ArgumentError("attention_mask", expected="a sliding window", got="chunks", remedy=remedy)
    return asked


def _dropout(module: nn.Module, call: Keywords, context: ContextParallel | None) -> Dropout | None:
    if not call.dropout:
        return None
    if call.ring_dropout_seed is None:
        if context is None or len(context.local_ranks) == context.world_size:
            return Dropout(call.dropout)
        remedy = "Pass ring_dropout_seed, the same on all ranks and another at each forward, or set attention_dropout."
        raise ArgumentError("dropout", expected="0 or a ring_dropout_seed", got=call.dropout, remedy=remedy)
    if isinstance(call.ring_dropout_seed, Tensor):
        return Dropout(call.dropout, call.ring_dropout_seed)
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        remedy = "Set the model's attention dropout to 0."
        raise ArgumentError("ring_dropout_seed", expected="layers with a layer_idx", got=type(module), remedy=remedy)
    return Dropout(call.dropout, _layer_seed(call.ring_dropout_seed, layer))


def _layer_seed(seed: int, layer: int) -> int:
    return (seed + 0x9E3779B97F4A7C15 * (layer + 1)) % 2**63
