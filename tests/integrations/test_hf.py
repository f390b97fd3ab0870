"""transformers models with ring attention by name: families agree with their own attention, unsupported calls raise."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ringflash as rf
from ringflash.errors import ArgumentError, RingflashError
from ringflash.integrations.transformers.mask import Asked, describe
from ringflash.integrations.transformers.positions import on_host, resolve_mask
from tests.helpers.distributed import run_ranks

pytest.importorskip("transformers")

SEQLEN = 37
WINDOW = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH_LAYERS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A model class of transformers, its configuration, and the attention of transformers to compare with."""

    model: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    own: str = "sdpa"
    dtype: torch.dtype = torch.float64

    @property
    def folder(self) -> str:
        names = {"BertForMaskedLM": "bert", "GptOssForCausalLM": "gpt_oss", "ModernBertForMaskedLM": "modernbert"}
        return names.get(self.model, self.model.removesuffix("ForCausalLM").lower())

    def build(self, **changes: Any) -> Any:
        """Returns a model with fixed random weights and the attention `own`."""
        rf.hf.register()
        config_class, model_class = (
            getattr(importlib.import_module(f"transformers.models.{self.folder}.{kind}_{self.folder}"), name)
            for kind, name in (("configuration", self.config), ("modeling", self.model))
        )
        config = config_class(**(SHAPE | self.changes | changes), attn_implementation=self.own)
        generator = torch.Generator().manual_seed(1)
        model = model_class(config)
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.2, generator=generator)
        return model.to(self.dtype).eval()


GEMMA2 = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "layer_types": BOTH_LAYERS}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": BOTH_LAYERS},
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig"),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": WINDOW} | GEMMA2, "eager"),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": BOTH_LAYERS}),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {"sliding_window": WINDOW, "layer_types": BOTH_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
        "eager",
        torch.float32,  # its experts do not support float64
    ),
    "bert": Family("BertForMaskedLM", "BertConfig"),
}
ENCODERS = ("bert", "modernbert")
LLAMA = FAMILIES["llama"]


@dataclass(frozen=True)
class Result:
    logits: Tensor
    gradients: dict[str, Tensor]


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(3, 61, (batch, SEQLEN), generator=torch.Generator().manual_seed(2))


def run(model: Any, whole: Callable[[Tensor], Tensor] = lambda x: x, **inputs: Any) -> Result:
    """Returns the logits and gradients of a forward; `whole` joins the logits of shards."""
    inputs |= {} if model.config.model_type in ENCODERS else {"use_cache": False}
    logits = whole(model(**inputs).logits)
    dout = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(logits.dtype)
    model.zero_grad()
    logits.backward(dout)
    return Result(logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def by_name(model: Any) -> Any:
    model.set_attn_implementation(rf.hf.NAME)
    return model


def on_ring(model: Any, ids: Tensor, context: rf.ContextParallel, **keywords: Any) -> Result:
    positions = context.positions(ids.shape[1])[None]
    inputs: dict[str, Any] = {"input_ids": context.shard(ids), "position_ids": positions, "ring_context": context}
    return run(model, context.unshard, **(inputs | keywords))


@cache
def by_its_own(name: str) -> Result:
    return run(FAMILIES[name].build(), input_ids=tokens())


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def assert_same(got: Result, expected: Result, bar: float) -> None:
    """Checks logits and the whole gradient against `bar`; norms and rotations are rounded to float32 in any dtype."""
    assert relative(got.logits, expected.logits) <= bar
    assert got.gradients.keys() == expected.gradients.keys()
    gradients = [torch.cat([g[n].flatten() for n in expected.gradients]) for g in (got.gradients, expected.gradients)]
    assert relative(*gradients) <= bar


@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_their_own_attention(name: str) -> None:
    family, ids = FAMILIES[name], tokens()
    expected, model = by_its_own(name), by_name(family.build())
    bar = 1e-6 if family.dtype == torch.float64 else 5e-6
    assert_same(run(model, input_ids=ids), expected, bar)
    for layout, world_size in (("zigzag", 3), ("contiguous", 2), ("striped", 4)):
        assert_same(on_ring(model, ids, rf.ContextParallel.local(world_size, layout)), expected, bar)


def apart(model: Any, ids: Tensor, cuts: list[int]) -> Result:
    """Returns the result of running each document alone, with concatenated logits; packing must give the same."""
    model.set_attn_implementation(LLAMA.own if model.config.model_type == "llama" else "eager")
    first, *rest = itertools.pairwise(cuts)

    def whole(logits: Tensor) -> Tensor:
        return torch.cat([logits, *(model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in rest)], dim=1)

    return run(model, whole, input_ids=ids[:, slice(*first)])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_documents(name: str) -> None:
    family, ids, cuts = FAMILIES[name], tokens(1), [0, 5, 21, SEQLEN]
    model, bar = family.build(), 1e-6 if family.dtype == torch.float64 else 5e-6
    expected = apart(model, ids, cuts)
    by_name(model)
    restarting = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)])[None]
    documents, cu = rf.Documents(cuts), torch.tensor(cuts, dtype=torch.int32)
    ways: list[dict[str, Any]] = [
        {"position_ids": restarting},
        {"position_ids": restarting, "ring_documents": documents},
        {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu},
    ]
    for keywords in ways:
        assert_same(run(model, input_ids=ids, **keywords), expected, bar)
    mask = rf.Causal() & documents
    # A balanced layout depends on the mask, so all layers must have the same mask.
    for layout in ("zigzag", "contiguous", *(["balanced"] if name == "llama" else [])):
        context = rf.ContextParallel.local(3, layout)
        positions = context.positions(SEQLEN, mask=mask)
        for local in (positions[None], restarting[:, positions]):
            got = run(
                model,
                partial(context.unshard, mask=mask),
                input_ids=context.shard(ids, mask=mask),
                position_ids=local,
                ring_context=context,
                ring_documents=documents,
            )
            assert_same(got, expected, bar)


def test_rows_packed_differently() -> None:
    try:
        rf.Documents(torch.tensor([[0, 2, 4], [0, 4, 4]]))
    except ArgumentError:
        pytest.skip("rf.Documents takes one vector for all rows")
    model, ids = LLAMA.build(), tokens(2)
    rows = [[0, 9, SEQLEN], [0, 4, 20, SEQLEN]]
    expected = torch.cat([apart(model, ids[i : i + 1], cuts).logits for i, cuts in enumerate(rows)])
    by_name(model)
    positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(row)]) for row in rows])
    assert relative(run(model, input_ids=ids, position_ids=positions).logits, expected) <= 1e-6
    documents = rf.Documents(torch.tensor([[0, 9, SEQLEN, SEQLEN], rows[1]]))
    assert relative(on_ring(model, ids, rf.ContextParallel.local(2), ring_documents=documents).logits, expected) <= 1e-6


@pytest.mark.parametrize("window", [2, 3])
def test_bidirectional_windows(window: int) -> None:
    family = Family(
        "ModernBertForMaskedLM", "ModernBertConfig", {"local_attention": 2 * window, "layer_types": BOTH_LAYERS}
    )
    model, ids = family.build(), tokens()
    expected = run(model, input_ids=ids)
    assert_same(run(by_name(model), input_ids=ids), expected, 1e-6)


def test_decoders_without_a_causal_mask() -> None:
    model, ids = LLAMA.build(is_causal=False), tokens()
    model.set_attn_implementation("eager")
    expected = run(model, input_ids=ids)
    assert relative(expected.logits, by_its_own("llama").logits) > 1e-2
    assert_same(on_ring(by_name(model), ids, rf.ContextParallel.local(3)), expected, 1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_on_one_device(name: str) -> None:
    model, prompt = FAMILIES[name].build(), tokens()[:, :6]
    greedy: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **greedy)
    assert torch.equal(by_name(model).generate(prompt, **greedy), expected)


def test_dropout_is_the_same_on_every_ring() -> None:
    model, ids = by_name(LLAMA.build(attention_dropout=0.4)).train(), tokens()
    alone = run(model, input_ids=ids, ring_dropout_seed=7)
    assert relative(alone.logits, by_its_own("llama").logits) > 1e-2
    for layout, world_size in (("zigzag", 3), ("contiguous", 2)):
        assert_same(on_ring(model, ids, rf.ContextParallel.local(world_size, layout), ring_dropout_seed=7), alone, 1e-6)
    other = run(model, input_ids=ids, ring_dropout_seed=8)
    assert relative(other.logits, alone.logits) > 1e-2
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(run(model, input_ids=ids).logits)
    assert torch.equal(*drawn)


def refused(**changes: Any) -> dict[str, Any]:
    """Returns the arguments of a call of Llama on two virtual ranks, with changes; `...` removes an argument."""
    context = rf.ContextParallel.local(2)
    inputs = {
        "input_ids": context.shard(tokens()),
        "position_ids": context.positions(SEQLEN)[None],
        "ring_context": context,
        "use_cache": False,
    }
    return {name: value for name, value in (inputs | changes).items() if value is not ...}


def asked(seqlen: int, function: Callable[..., Tensor], **keywords: Any) -> Asked:
    """Returns the description of a mask that `describe` reads off a mask function."""
    size: dict[str, Any] = {"batch_size": 1, "q_length": seqlen, "kv_length": seqlen, "device": torch.device("cpu")}
    return describe(mask_function=function, **size, **keywords)


def padding() -> Tensor:
    mask = torch.ones(2, SEQLEN, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


DEFAULT = torch.arange(SEQLEN)[None]
REFUSED = {
    "no context": (refused(ring_context=...), "position_ids: expected runs from 0 without a ring_context"),
    "default positions": (refused(position_ids=...), r"position_ids: expected those of the zigzag shard of rank 0"),
    "other documents": (refused(ring_documents=rf.Documents([0, 5, 30])), "position_ids: expected those of the zigzag"),
    "other shard": (refused(position_ids=DEFAULT), "position_ids: expected those of the zigzag shard of rank 0, got"),
    "padding": (refused(attention_mask=padding()), "attention_mask: expected None or all ones, got padding"),
    "own mask": (refused(attention_mask=torch.zeros(2, 1, SEQLEN, SEQLEN)), "attention_mask: .* got Tensor"),
    "cache": (refused(use_cache=True), "use_cache: expected False under a context"),
    "weights": (refused(output_attentions=True), "output_attentions: expected False"),
    "no context at all": (refused(ring_context="ring"), "ring_context: expected a rf.ContextParallel, got 'ring'"),
    "no documents": (refused(ring_documents=[0, SEQLEN]), "ring_documents: expected rf.Documents"),
    "unknown": (refused(position_bias=torch.zeros(1)), "position_bias: expected a keyword that this attention knows"),
    "half of cu_seq_lens": (refused(cu_seq_lens_q=torch.tensor([0, SEQLEN])), "cu_seq_lens_k: expected cu_seq_lens_q"),
}


@cache
def llama() -> Any:
    return by_name(LLAMA.build())


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    inputs, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        llama()(**inputs)


def test_refused_caches() -> None:
    model, ids, context = llama(), tokens(), rf.ContextParallel.local(2)
    cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values
    token, position = ids[:, 8:9], torch.tensor([[8]])
    with pytest.raises(ArgumentError, match="key: expected 1 rows, as query, got 9"):
        model(token, position_ids=position, past_key_values=cache, use_cache=False, ring_context=context)
    with pytest.raises(ArgumentError, match="position_ids: expected 1 that follow the cache's 9 tokens"):
        model(token, position_ids=position, past_key_values=cache)


def test_refused_dropout_without_a_seed() -> None:
    model = by_name(LLAMA.build(attention_dropout=0.4))
    for layer in model.model.layers:
        layer.self_attn.layer_idx = None
    with pytest.raises(ArgumentError, match="ring_dropout_seed: expected layers with a layer_idx"):
        model.train()(**refused(ring_dropout_seed=1))


def test_chunks_on_one_device_only() -> None:
    chunks = asked(SEQLEN, lambda batch, head, q, k: (k <= q) & (q // 5 == k // 5), local_size=5)
    mask = resolve_mask(chunks, DEFAULT, None, None)
    assert mask is not None
    rows = torch.arange(SEQLEN)
    assert torch.equal(mask.dense(rows, rows)[0], (rows <= rows[:, None]) & (rows // 5 == rows[:, None] // 5))
    q = torch.zeros(2, 4, SEQLEN, 16)
    with pytest.raises(ArgumentError, match="attention_mask: expected a sliding window, got chunks"):
        rf.hf.attention(llama(), q, q, q, chunks, position_ids=DEFAULT, ring_context=rf.ContextParallel.local(2))


def test_keywords_that_contradict_the_mask() -> None:
    mask, q = (
        asked(SEQLEN, lambda batch, head, q, k: (k <= q) & (k > q - 5), local_size=5),
        torch.zeros(2, 4, SEQLEN, 16),
    )
    with pytest.raises(ArgumentError, match="is_causal: expected True, as in the mask, got False"):
        rf.hf.attention(llama(), q, q, q, mask, is_causal=False)
    with pytest.raises(ArgumentError, match="sliding_window: expected the mask's window, 4 keys before the own one"):
        rf.hf.attention(llama(), q, q, q, mask, sliding_window=6)
    with pytest.raises(ArgumentError, match="past_key_values: expected 37 queries and 37 keys, as in the mask"):
        rf.hf.attention(llama(), q, q[:, :, :30], q[:, :, :30], mask)


def test_layers_that_make_no_mask() -> None:
    q, k = torch.randn(2, 4, 9, 16, dtype=torch.float64), torch.randn(2, 2, 9, 16, dtype=torch.float64)
    for causal, window in ((True, None), (True, 3), (False, None), (False, 3)):
        layer = nn.Identity()
        layer.is_causal = causal  # pyright: ignore[reportArgumentType]
        out, _ = rf.hf.attention(layer, q, k, k, None, sliding_window=window)
        rows = torch.arange(9)
        away = rows[:, None] - rows if causal else (rows[:, None] - rows).abs()
        seen = (away >= 0) & (away < (window or 9))
        expected = nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=1e-12)
    with pytest.raises(ArgumentError, match="past_key_values: expected 9 queries and 9 keys"):
        rf.hf.attention(nn.Identity(), q, k[:, :, :5], k[:, :, :5], None)


@given(st.data())
def test_masks_are_read_off_their_functions(data: st.DataObject) -> None:
    seqlen = data.draw(st.integers(1, 12))
    window = data.draw(st.none() | st.integers(1, 14))
    causal = data.draw(st.booleans())
    ends = sorted(data.draw(st.sets(st.integers(1, seqlen), max_size=4)) | {seqlen})
    cuts = [0, *ends]
    rows = torch.arange(seqlen)
    document = torch.searchsorted(torch.tensor(ends), rows, right=True)

    def function(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) if causal else torch.ones_like(q * k, dtype=torch.bool)
        if window is not None:
            seen = seen & ((k > q - window) if causal else ((k - q).abs() <= window))
        inside = (q < seqlen) & (k < seqlen)
        return seen & (document[q.clamp(max=seqlen - 1)] == document[k.clamp(max=seqlen - 1)]) & inside

    if not causal and seqlen > 1 and cuts[1] == 1:
        return  # the first row is its own document, so the mask looks causal
    mask = resolve_mask(asked(seqlen, function, local_size=window), None, None, None)
    batch = torch.zeros(1, 1, dtype=torch.int64)
    expected = function(batch, batch, rows[:, None], rows[None])
    got = torch.ones(seqlen, seqlen, dtype=torch.bool) if mask is None else mask.dense(rows, rows)[0]
    assert torch.equal(got, expected)


def test_other_masks_are_noticed() -> None:
    def prefix(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < 4)

    def dilated(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k % 2 == q % 2)

    for function in (prefix, dilated):
        with pytest.raises(ArgumentError, match="attention_mask: .* got a mask of another form"):
            asked(9, function)
    with pytest.raises(ArgumentError, match="attention_mask: .* got one with a function"):
        asked(9, prefix, use_vmap=True)


def test_positions_are_copied_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    positions, copies = torch.arange(3)[None], list[Tensor]()

    def cpu(x: Tensor) -> Tensor:
        copies.append(x.clone())
        return copies[-1]

    monkeypatch.setattr(Tensor, "cpu", cpu)
    assert on_host(positions) is on_host(positions)
    assert len(copies) == 1
    positions += 1
    assert on_host(positions).tolist() == [[1, 2, 3]]
    assert len(copies) == 2


def test_models_with_attention_of_their_own() -> None:
    mask = asked(9, lambda batch, head, q, k: k <= q)
    with pytest.raises(ArgumentError, match="attn_implementation: expected models that use transformers' attention"):
        _ = torch.zeros(9, 9) + mask  # pyright: ignore[reportOperatorIssue]


def test_models_that_keep_keywords_from_attention() -> None:
    rf.hf.check_model(llama())
    with pytest.raises(ArgumentError, match="attn_implementation: expected ring_attention, got sdpa"):
        rf.hf.check_model(LLAMA.build())
    model = by_name(LLAMA.build())
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda hidden_states, ring_context=None, **keywords: forward(hidden_states, **keywords)
    with pytest.raises(ArgumentError, match="in the attention of 2 layers, got LlamaForCausalLM, where it comes to 1"):
        rf.hf.check_model(model)
    model.model.layers[0].mixer = nn.Conv1d(64, 64, 4)
    with pytest.raises(ArgumentError, match="model: expected no convolutions over tokens, got model.layers.0.mixer"):
        rf.hf.check_model(model)


def _on_ranks() -> tuple[Tensor, list[str]]:
    """Returns the logits of two ranks, and the errors for default positions, dropout without a seed, and padding."""
    model, ids = by_name(LLAMA.build(attention_dropout=0.4)), tokens()
    context, group = rf.ContextParallel(dist.group.WORLD, "contiguous"), list[str]()
    local: dict[str, Any] = {"input_ids": context.shard(ids), "use_cache": False, "ring_context": context}
    positions = context.positions(SEQLEN)[None]
    logits = context.unshard(model(position_ids=positions, **local).logits)
    for training, changed in ((False, torch.arange(positions.shape[1])[None]), (True, positions)):
        try:
            model.train(training)(position_ids=changed, **local)
        except RingflashError as error:
            group.append(f"{type(error).__name__} {error}")
        dist.barrier()
    padded = torch.ones_like(local["input_ids"])
    padded[:, -1] = 1 - context.rank
    try:
        model.eval()(position_ids=positions, attention_mask=padded, **local)
    except RingflashError as error:
        group.append(f"{type(error).__name__} {error}")
    return logits.detach(), group


def test_ranks() -> None:
    results = run_ranks(2, _on_ranks)
    for logits, _ in results:
        assert relative(logits, by_its_own("llama").logits) <= 1e-6
    (_, first), (_, second) = results
    assert first[0].startswith("PeerFailed")
    assert second[0].startswith("ArgumentError position_ids: expected those of the contiguous shard of rank 1")
    for errors in (first, second):
        assert "dropout: expected 0 or a ring_dropout_seed" in errors[1]
    assert first[2].startswith("PeerFailed ranks [1] raised")
    assert second[2].startswith("MaskRefused attention_mask: expected None or all ones, got padding")
