"""Attention of transformers models by name: call `register()`, then pass `attn_implementation="ring_attention"`.

The context is an argument of the model's forward, `model(..., ring_context=context)`. transformers passes the context
to the attention function with the other keywords. Without a context, attention runs on one device. The first forward
with a context checks the model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.context import ContextParallel
from ringflash.dropout import Dropout
from ringflash.errors import ArgumentError
from ringflash.extras import MissingExtra
from ringflash.integrations.transformers.arguments import check_arguments
from ringflash.integrations.transformers.arguments import loss_of_shards as loss_of_shards
from ringflash.integrations.transformers.check import ONE_DEVICE, Checked, Witness, check
from ringflash.integrations.transformers.mask import REMEDY, Asked, MaskRefused, Settled, describe
from ringflash.integrations.transformers.positions import on_host, resolve_mask
from ringflash.integrations.transformers.rope import largest_position
from ringflash.integrations.transformers.weights import match_weights as match_weights
from ringflash.masks import Documents, Mask
from ringflash.ops.attention import AttentionOptions, flash_attention, ring_attention
from ringflash.ops.guard import Phase, announce

NAME = "ring_attention"  # transformers takes a name that contains "flash" for one of its own
# Keywords that transformers passes to attention, and that attention does not need.
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
CHECKED = "_ring_checked"  # attribute of a checked model
AGREED = "_ring_position_agreed"  # attribute of a model while its ranks have agreed on the largest position
log = logging.getLogger(__name__)


def register() -> None:
    """Makes `attn_implementation="ring_attention"` known to transformers.

    A transformers model then reads `ring_context` at each call, and its first call with a context checks the model.
    Models that choose attention from a table of their own raise ArgumentError when they are made.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise MissingExtra("ring_attention in transformers' models", "transformers", "hf") from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, describe)  # without a mask function, models silently pass no mask
    if PreTrainedModel.__call__.__module__ == __name__:
        return
    chosen = PreTrainedModel.get_correct_attn_implementation
    prepared: Any = torch.compiler.disable(_prepared)

    def choose(model: Any, requested_attention: str | None, *args: Any, **keywords: Any) -> str:
        if requested_attention == NAME:
            _check_tables(type(model))
        return chosen(model, requested_attention, *args, **keywords)

    def call(model: nn.Module, *args: Any, **keywords: Any) -> Any:
        context = keywords.get("ring_context")
        if not isinstance(context, ContextParallel):
            return nn.Module.__call__(model, *args, **keywords)
        return _call(model, context, prepared, args, keywords)

    setattr(PreTrainedModel, "get_correct_attn_implementation", choose)  # noqa: B010 - typed as a method
    setattr(PreTrainedModel, "__call__", call)  # noqa: B010 - the same


@dataclass(frozen=True, eq=False)
class Keywords:
    """Keywords that reach attention, from the model and from the caller of its forward.

    Args:
        dropout: dropout probability; 0 in evaluation.
        scaling: softmax scale; None means 1 / sqrt(headdim).
        sliding_window: number of keys that a row sees, its own included; None means all.
        softcap: bound of the scores; None means no bound.
        s_aux: (nheads,), the logit of each head's attention sink.
        is_causal: whether the caller wants a causal mask; None leaves the choice to the model.
        deterministic: as in `AttentionOptions`.
        position_ids: (batch | 1, seqlen), positions of the rows in the whole sequence or in their documents.
        cu_seq_lens_q: (ndocuments + 1,), boundaries of the documents in the whole sequence.
        cu_seq_lens_k: the same boundaries as `cu_seq_lens_q`.
        use_cache: whether keys are kept for later forwards.
        output_attentions: whether the caller wants attention weights.
        ring_context: context of the ranks that share the sequence, or the `Witness` of a check.
        ring_documents: packed documents of the whole sequence.
        ring_dropout_seed: dropout seed, the same on all ranks of the context and different at each forward. A tensor
            holds the seed of one layer.
        others: names of the other keywords that are neither None nor False.
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
        """Returns the keywords of one call, from `given` by name."""
        others = [n for n, x in given.items() if n not in KNOWN_OR_OTHERS and x is not None and x is not False]
        return Keywords(**{n: x for n, x in given.items() if n in KNOWN}, others=tuple(others))

    @property
    def documents(self) -> Documents | None:
        """Returns the packed documents that the caller gives, as `ring_documents` or as `cu_seq_lens_q`."""
        return self.ring_documents if self.cu_seq_lens_q is None else Documents(self.cu_seq_lens_q)


KNOWN = {f.name for f in fields(Keywords)} - {"others"}
KNOWN_OR_OTHERS = KNOWN | OF_OTHERS


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **keywords: Any
) -> tuple[Tensor, None]:
    """Calls `ring_attention` if the keywords have a context, else `flash_attention`; the entry of `AttentionInterface`.

    Args:
        module: the model's attention layer.
        query: (batch, nheads, seqlen, headdim).
        key: (batch, nheads_kv, seqlen_k, headdim), not repeated.
        value: (batch, nheads_kv, seqlen_k, headdim_v).
        attention_mask: result of `describe` for the model's mask, or None.
        keywords: see `Keywords`.

    Returns:
        out (batch, seqlen, nheads, headdim_v), and None in place of attention weights.

    Raises:
        ArgumentError: an argument asks for something that this attention cannot do.
    """
    call = Keywords.of(keywords)
    context, witness = call.ring_context, None
    if isinstance(context, Witness):
        witness, context = context, context.context
    try:
        _check(module, call, context)
        if attention_mask is None:
            causal = bool(getattr(module, "is_causal", True)) if call.is_causal is None else call.is_causal
            starts = torch.zeros(1, query.shape[2], dtype=torch.bool)
            window = call.sliding_window if causal or call.sliding_window is None else call.sliding_window - 1
            seqlen_k = query.shape[2] if causal else key.shape[2]  # a causal row has no known place among more keys
            attention_mask = Asked(causal, window, query.shape[2], seqlen_k, 0, starts)
        asked = _check_asked(attention_mask, query, key, call, getattr(module, "config", None))
        if witness is not None and witness.any_positions:
            mask = None
        else:
            mask = asked.mask if isinstance(asked, Settled) else _resolve(asked, call, context)
        if witness is not None:
            return witness.attend((query, key, value), mask, (call.scaling, call.softcap or 0.0)), None
        options = AttentionOptions(sinks=call.s_aux, deterministic=call.deterministic or None)
        modes: dict[str, Any] = {"mask": mask, "softmax_scale": call.scaling, "softcap": call.softcap or 0.0}
        modes |= {"dropout": _dropout(module, call, context), "options": options}
    except Exception as error:
        if isinstance(context, ContextParallel):
            announce(context, error, Phase.PREPARING)  # the other ranks are about to wait for this one
        raise
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attention(q, k, v, **modes) if context is None else ring_attention(q, k, v, context, **modes)
    assert isinstance(out, Tensor)
    return out, None


def settle(
    layer: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of a layer's forward that let `torch.compile` trace its attention without a graph break.

    Masks are resolved here, because that reads the positions. The dropout seed becomes this layer's seed in a tensor,
    because a number would be compiled into the graph.

    Args:
        layer: a layer of a transformers model, with its attention.
        args: positional arguments of the layer's forward.
        keywords: keyword arguments of the layer's forward, without a cache.

    Raises:
        ArgumentError: a mask or positions that `attention` would refuse.
    """
    call = Keywords.of(keywords)
    context = call.ring_context if isinstance(call.ring_context, ContextParallel) else None

    def settled(x: object) -> object:
        return Settled(x.causal, x.window, _resolve(x, call, context)) if isinstance(x, Asked) else x

    try:
        args, named = tuple(map(settled, args)), {name: settled(x) for name, x in keywords.items()}
    except Exception as error:
        if context is not None:
            announce(context, error, Phase.PREPARING)
        raise
    if isinstance(call.ring_dropout_seed, int):
        indices = (getattr(module, "layer_idx", None) for module in layer.modules())
        index = next((x for x in indices if isinstance(x, int)), None)
        named["ring_dropout_seed"] = None if index is None else torch.tensor(_layer_seed(call.ring_dropout_seed, index))
    return args, named


def check_model(model: nn.Module) -> None:
    """Runs a few tokens through a transformers model, and checks that its results are the same on a ring.

    The first forward on a ring makes the same check. Under FSDP the check is a collective, as any forward is. A model
    without storage (on the meta device) is checked at its first forward.

    Raises:
        ArgumentError: the model has another attn_implementation, keeps the context or the positions from its attention,
            counts positions in its own way, or mixes tokens outside of attention.
    """
    if any(x.is_meta for x in model.parameters()):
        log.warning("%s is on the meta device: the check waits for its first forward on a ring.", type(model).__name__)
        return
    checked = _checked(model)
    for module in model.modules():
        if _is_pretrained(module):
            setattr(module, CHECKED, checked if module is model else _inside(model, module, checked))


def _text_config(model: nn.Module) -> Any:
    """Returns the configuration of the model's text model, which asks for ring attention.

    Raises:
        ArgumentError: it asks for another attention now, or there are two text models.
    """
    config: Any = model.config
    try:
        text = config.get_text_config()
    except ValueError as error:  # raised for a model with both a text encoder and a text decoder
        remedy = "Call the decoder that is inside it with ring_context."
        expected = "a model with one text model"
        raise ArgumentError("model", expected=expected, got=type(model).__name__, remedy=remedy) from error
    if text._attn_implementation != NAME:
        remedy = (
            'Call ringflash.hf.register() and make the model with attn_implementation="ring_attention". Another model '
            "made from the same config object may have changed it: pass copy.deepcopy(config) to each."
        )
        raise ArgumentError("attn_implementation", expected=NAME, got=text._attn_implementation, remedy=remedy)
    return text


def _checked(model: nn.Module) -> Checked:
    text = _text_config(model)
    mixing = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if mixing:
        got = f"{mixing[0]} in {type(model).__name__}"
        raise ArgumentError("model", expected="no convolutions over tokens", got=got, remedy=ONE_DEVICE)
    return check(model, getattr(text, "num_hidden_layers", 1))


def _inside(model: nn.Module, module: nn.Module, checked: Checked) -> Checked:
    """Returns the findings about `model` that concern its submodule `module`, with names relative to `module`."""
    prefix = next(f"{name}." for name, each in model.named_modules() if each is module)
    return Checked(tuple(name.removeprefix(prefix) for name in checked.rotary if name.startswith(prefix)))


def _is_pretrained(module: nn.Module) -> bool:
    return getattr(type(module).__call__, "__module__", None) == __name__


def _call(
    model: nn.Module,
    context: ContextParallel,
    prepared: Callable[..., tuple[str, ...]],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """Calls a transformers model on a ring; the first such call checks the model.

    Args:
        model: a transformers model.
        context: the context among the keywords.
        prepared: `_prepared`, wrapped so that `torch.compile` does not trace it.
        args: positional arguments of the call.
        keywords: keyword arguments of the call.
    """
    try:
        rotary = prepared(model, context, args, keywords)
        agrees = bool(rotary) and len(context.local_ranks) < context.world_size and not hasattr(model, AGREED)
        own = _largest_of(keywords.get("position_ids")) if agrees else 0
    except Exception as error:
        announce(context, error, Phase.PREPARING)
        raise
    if not agrees:
        return _announced(model, context, args, keywords)
    position = context.largest("position_ids", own)
    inside = [module for module in model.modules() if _is_pretrained(module)]
    for module in inside:
        setattr(module, AGREED, True)
    try:
        with largest_position(model, rotary, position):
            return _announced(model, context, args, keywords)
    finally:
        for module in inside:
            delattr(module, AGREED)


def _announced(model: nn.Module, context: ContextParallel, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Calls the model. If the model's mask is refused on this rank, the other ranks raise PeerFailed."""
    try:
        return nn.Module.__call__(model, *args, **keywords)
    except MaskRefused as error:
        announce(context, error, Phase.PREPARING)
        raise


def _prepared(
    model: nn.Module, context: ContextParallel, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the names of the modules whose RoPE depends on length.

    Checks the arguments of the call first, and the model too, unless that was done. The attention that the model uses
    is checked each time: another model that is made from the same configuration changes it.
    """
    check_arguments(model, context, args, keywords)
    if hasattr(model, CHECKED):
        _text_config(model)
    else:
        check_model(model)
    return getattr(model, CHECKED).rotary


def _largest_of(positions: object) -> int:
    if isinstance(positions, Tensor) and positions.numel():
        return int(on_host(positions).max())
    remedy = "Pass position_ids=context.positions(seqlen)[None]: the RoPE of this model depends on length."
    raise ArgumentError("position_ids", expected="those of the shard, by keyword", got=positions, remedy=remedy)


def _check_tables(model_class: type) -> None:
    """Raises ArgumentError for a class that takes its attention from its own table without this library in it."""
    for name, table in vars(sys.modules[model_class.__module__]).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and NAME not in table:
            raise ArgumentError(
                "attn_implementation",
                expected="a model that uses transformers' attention interface",
                got=f"{model_class.__name__}, which chooses attention from its own {name}: {', '.join(table)}",
                remedy=f"Choose one of these. {ONE_DEVICE}",
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
        raise _unknown(call.others)
    if context is not None and call.use_cache:
        remedy = "Pass use_cache=False, or set model.config.use_cache: a cache would hold this rank's shard."
        raise ArgumentError("use_cache", expected="False under a context", got=True, remedy=remedy)
    q, k = call.cu_seq_lens_q, call.cu_seq_lens_k
    if (q is None) != (k is None):
        raise _unlike(k)
    if q is not None and call.ring_documents is not None:
        remedy = "Pass one of them."
        raise ArgumentError("cu_seq_lens_q", expected="None with ring_documents", got=q, remedy=remedy)


def _unknown(names: tuple[str, ...]) -> ArgumentError:
    """Returns the error for keywords that attention does not know, with the library's keyword of a like name."""
    name, own = names[0], sorted(n for n in KNOWN if n.startswith("ring_"))
    like = [f"ring_{name}"] if f"ring_{name}" in own else get_close_matches(name, own, n=1, cutoff=0.7)
    if like:
        remedy = f"Did you mean {like[0]}?"
    elif name.startswith("ring_"):
        remedy = "Pass one of these; masks follow from the model, position_ids and ring_documents."
    else:
        remedy = REMEDY
    expected = f"a keyword that this attention knows, such as {', '.join(own[:-1])} and {own[-1]}"
    return ArgumentError(name, expected=expected, got=", ".join(names), remedy=remedy)


def _resolve(asked: Asked, call: Keywords, context: ContextParallel | None) -> Mask | None:
    q, k = call.cu_seq_lens_q, call.cu_seq_lens_k

    def find() -> Mask | None:
        if q is not None and k is not None and q is not k and not torch.equal(q, k):
            raise _unlike(k)
        return resolve_mask(asked, call.position_ids, call.documents, context)

    return asked.resolve((context, call.position_ids, call.ring_documents, q, k), find)


def _unlike(cu_seq_lens_k: object) -> ArgumentError:
    remedy = "Queries and keys are of the same documents: pass both alike."
    return ArgumentError("cu_seq_lens_k", expected="cu_seq_lens_q", got=cu_seq_lens_k, remedy=remedy)


def _check_asked(asked: object, query: Tensor, key: Tensor, call: Keywords, config: object) -> Asked | Settled:
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
    if call.ring_context is not None and not _is_window(asked.window, call, config):
        remedy = "Attention in chunks needs the whole sequence on one device."
        raise ArgumentError("attention_mask", expected="a sliding window", got="chunks", remedy=remedy)
    return asked


def _is_window(window: int | None, call: Keywords, config: object) -> bool:
    """Returns whether `window` is None or a sliding window, not attention in chunks.

    Both look alike within a shard, but only a sliding window is named by the caller or by the configuration.
    """
    if window is None or call.sliding_window is not None:
        return True
    return getattr(config, "attention_chunk_size", None) is None and getattr(config, "sliding_window", None) == window


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
