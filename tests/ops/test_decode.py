"""flash_decode in PyTorch: exact, on one device and over ranks, with clear errors for unsupported calls."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.errors import ArgumentError, RankMismatch
from ringflash.masks import Mask
from ringflash.ops import decode_op
from tests.helpers.accuracy import BARS, rms_of
from tests.helpers.distributed import run_ranks

NINE = (-1, 0, 1, 1, 2, 2, 3, 3, 4)
FIVE = (-1, 0, 0, 1, -1)
MASKS: list[tuple[int, Mask | None]] = [
    (1, None),
    (1, rf.Causal()),
    (1, rf.SlidingWindow(20, 0)),
    (5, None),
    (5, rf.Causal()),
    (5, rf.SlidingWindow(30, 2)),
    (5, rf.Causal() & rf.SlidingWindow(3)),
    (5, rf.Tree(FIVE)),
    (9, rf.Tree(NINE)),
    (9, rf.Tree(NINE) & rf.SlidingWindow(40, None)),
]


@dataclass(frozen=True)
class Decoding:
    """Random queries and a cache that holds NaN past each sequence's length."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    mask: Mask | None
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @staticmethod
    def random(
        *,
        seqlen_q: int = 1,
        capacity: int = 100,
        lengths: tuple[int, ...] = (77, 100),
        heads: tuple[int, int] = (4, 2),
        headdims: tuple[int, int] = (32, 32),
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        **rest: Any,
    ) -> Decoding:
        generator = torch.Generator().manual_seed(0)

        def draw(rows: int, nheads: int, headdim: int) -> Tensor:
            return torch.randn(len(lengths), rows, nheads, headdim, generator=generator, dtype=torch.float64)

        q = draw(seqlen_q, heads[0], headdims[0])
        k, v = (draw(capacity, heads[1], headdim) for headdim in headdims)
        for b, length in enumerate(lengths):
            k[b, length:] = v[b, length:] = math.nan
        given = torch.tensor(lengths, dtype=torch.int32, device=device)
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        return Decoding(q, k, v, given, **{"mask": None, **rest})

    def decode(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Returns out and lse of flash_decode."""
        modes = {"softcap": self.softcap, "sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        result = rf.flash_decode(
            self.q,
            self.k,
            self.v,
            cache_seqlens=self.lengths,
            mask=self.mask,
            context=options.pop("context", None),
            options=rf.DecodeOptions(return_lse=True, **modes, **options),
        )
        assert isinstance(result, tuple)
        return result

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns out and lse of the plain formula in `dtype`, for one sequence at a time with all scores in memory."""
        outs, lses = [], []
        batch, seqlen_q, nheads, headdim = self.q.shape
        group = nheads // self.k.shape[2]
        for b, length in enumerate(self.lengths.tolist()):
            q = self.q[b].to(dtype)
            k, v = (x[b, :length].to(dtype).repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q * headdim**-0.5, k)
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            positions = torch.arange(length - seqlen_q, length, device=q.device)
            keys = torch.arange(length, device=q.device)
            if self.alibi_slopes is not None:
                slopes = self.alibi_slopes.expand(batch, nheads)[b].to(dtype)[:, None, None]
                scores = scores - slopes * (positions[:, None] - keys).abs()
            seen = visible(self.mask, seqlen_q, length).to(q.device)
            scores = scores.masked_fill(~seen, -math.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.to(dtype)[:, None, None].expand(-1, seqlen_q, 1)], -1)
            fully_masked = ~seen.any(1)
            weights = (
                scores.masked_fill(fully_masked[:, None], 0.0)
                .softmax(-1)[..., :length]
                .masked_fill(fully_masked[:, None], 0.0)
            )
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            lses.append(torch.logsumexp(scores, -1).masked_fill(fully_masked, -math.inf))
        return torch.stack(outs), torch.stack(lses)


def visible(mask: Mask | None, seqlen_q: int, length: int) -> Tensor:
    """Returns the visible keys, bool (seqlen_q, length), computed key by key from the definitions of the masks."""
    seen = torch.ones(seqlen_q, length, dtype=torch.bool)
    for part in mask.parts if mask is not None else ():
        for i in range(seqlen_q):
            position = length - seqlen_q + i
            for key in range(length):
                if isinstance(part, rf.Causal):
                    seen[i, key] &= key <= position
                elif isinstance(part, rf.SlidingWindow):
                    seen[i, key] &= part.left is None or key >= position - part.left
                    seen[i, key] &= part.right is None or key <= position + part.right
                else:
                    token, ancestors = i, {i}
                    parents = {5: FIVE, 9: NINE}[seqlen_q]
                    while parents[token] >= 0:
                        token = parents[token]
                        ancestors.add(token)
                    seen[i, key] &= key < length - seqlen_q or key - (length - seqlen_q) in ancestors
    return seen


def assert_decoded(got: tuple[Tensor, Tensor], problem: Decoding, *, rounding: float = 0.0) -> None:
    """Checks that out is within the bars of its dtype and lse is close; fully masked rows are exactly 0 and -inf.

    Args:
        rounding: error that float32 results may always have, in eps. It is for kernels that compute float32 in
            float32.
    """
    out, lse = got
    exact, exact_lse = problem.dense(torch.float64)
    plain, _ = problem.dense(problem.q.dtype)
    assert out.dtype == problem.q.dtype
    assert out.shape == exact.shape
    bar, floor = BARS[out.dtype], (rounding if out.dtype == torch.float32 else 0.0) * torch.finfo(out.dtype).eps
    error, plain_error = (out.double() - exact).abs(), (plain.double() - exact).abs()
    if bar.max_ratio < math.inf:
        assert error.max() <= max(bar.max_ratio * plain_error.max(), floor)
    if bar.rms_ratio < math.inf:
        assert rms_of(error) <= max(bar.rms_ratio * rms_of(plain_error), floor / 4)
    assert error.max() <= bar.max_absolute
    tolerance = 1e-12 if out.dtype == torch.float64 else 3e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)
    fully_masked = (exact_lse == -math.inf).transpose(1, 2)
    assert (out[fully_masked] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("seqlen_q", "mask"), MASKS)
def test_masks(seqlen_q: int, mask: Mask | None, dtype: torch.dtype) -> None:
    problem = Decoding.random(seqlen_q=seqlen_q, mask=mask, dtype=dtype)
    assert_decoded(problem.decode(), problem)


@pytest.mark.parametrize(("seqlen_q", "mask"), MASKS)
def test_lengths_from_none_to_all(seqlen_q: int, mask: Mask | None) -> None:
    problem = Decoding.random(seqlen_q=seqlen_q, mask=mask, lengths=(0, 3, 9, 41, 100), heads=(2, 1))
    assert_decoded(problem.decode(), problem)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("headdims", [(16, 16), (40, 24), (48, 32), (256, 256)])
def test_heads(heads: tuple[int, int], headdims: tuple[int, int]) -> None:
    problem = Decoding.random(seqlen_q=5, mask=rf.Causal(), heads=heads, headdims=headdims)
    assert_decoded(problem.decode(), problem)


def modes(nheads: int, batch: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Returns score modes: softcap, sinks and ALiBi, alone and together."""
    sinks = torch.linspace(-2.0, 3.0, nheads, device=device)
    slopes = 0.5 ** torch.arange(1.0, nheads + 1, device=device)
    by_batch = slopes * torch.arange(1.0, batch + 1, device=device)[:, None]
    together = {"softcap": 2.0, "sinks": sinks, "alibi_slopes": by_batch}
    return [{"softcap": 2.0}, {"sinks": sinks}, {"alibi_slopes": slopes}, together]


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_modes(seqlen_q: int, mode: int) -> None:
    problem = Decoding.random(
        seqlen_q=seqlen_q, mask=rf.Causal(), lengths=(0, 50, 100), heads=(4, 2), **modes(4, 3)[mode]
    )
    assert_decoded(problem.decode(), problem)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64, 128])
def test_any_number_of_splits(splits: int) -> None:
    problem = Decoding.random(seqlen_q=5, mask=rf.Causal(), lengths=(0, 2, 100))
    assert_decoded(problem.decode(splits=splits), problem)


def test_several_blocks_of_keys() -> None:
    problem = Decoding.random(capacity=2500, lengths=(2300, 1024), heads=(2, 1), headdims=(16, 16))
    assert_decoded(problem.decode(), problem)


def test_a_chain_of_64_tokens_is_causal() -> None:
    problem = Decoding.random(seqlen_q=64, mask=rf.Causal())
    chain = replace(problem, mask=rf.Tree(list(range(-1, 63))))
    assert_decoded(chain.decode(), problem)


def test_the_scale_and_whole_lengths() -> None:
    problem = Decoding.random(lengths=(100, 100))
    scaled = replace(problem, q=problem.q * 0.3 * math.sqrt(32))
    out = rf.flash_decode(problem.q, problem.k, problem.v, cache_seqlens=100, softmax_scale=0.3)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, scaled.dense(torch.float64)[0], rtol=0, atol=1e-12)
    long = rf.flash_decode(problem.q, problem.k, problem.v, cache_seqlens=problem.lengths.long(), softmax_scale=0.3)
    assert torch.equal(out, long)  # pyright: ignore[reportArgumentType]


def test_the_same_as_flash_attention() -> None:
    problem = Decoding.random(seqlen_q=5, lengths=(100, 100), mask=rf.Causal())
    whole = rf.flash_attention(problem.q, problem.k, problem.v, mask=rf.Causal())
    torch.testing.assert_close(problem.decode()[0], whole, rtol=0, atol=1e-12)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _interleaved(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, math.nan)], 2)[:, :, 0]


@pytest.mark.parametrize("change", [_transposed, _interleaved])
def test_a_cache_of_any_strides(change: Any) -> None:
    problem = Decoding.random(seqlen_q=5, mask=rf.Causal())
    changed = replace(problem, k=change(problem.k), v=change(problem.v), q=change(problem.q))
    assert changed.k.stride() != problem.k.stride()
    assert all(torch.equal(a, b) for a, b in zip(changed.decode(), problem.decode(), strict=True))


SHARDED: list[tuple[int, Mask | None]] = [(1, None), (1, rf.Causal()), (5, None), (5, rf.Causal()), (9, rf.Tree(NINE))]


def _shards(problem: Decoding, world: int, cut: list[list[int]]) -> Decoding:
    """Returns the problem with its cache cut over virtual ranks; `cut[rank]` holds the keys per sequence on a rank."""
    capacity = max(map(max, cut)) + 2
    shape = (len(problem.lengths), world * capacity, *problem.k.shape[2:])
    k, v = (torch.full(shape, math.nan, dtype=problem.k.dtype) for _ in range(2))
    for b in range(len(problem.lengths)):
        begin = 0
        for rank in range(world):
            rows = slice(rank * capacity, rank * capacity + cut[rank][b])
            k[b, rows], v[b, rows] = (x[b, begin : begin + cut[rank][b]] for x in (problem.k, problem.v))
            begin += cut[rank][b]
    return replace(problem, k=k, v=v, lengths=torch.tensor(cut))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seqlen_q", "mask"), SHARDED)
def test_a_sharded_cache(seqlen_q: int, mask: Mask | None, dtype: torch.dtype) -> None:
    whole = Decoding.random(seqlen_q=seqlen_q, mask=mask, dtype=dtype, sinks=torch.tensor([1.0, -1.0, 0.0, 2.0]))
    shards = _shards(whole, 3, [[30, 0], [30, 80], [17, 20]])
    assert_decoded(shards.decode(context=rf.ContextParallel.local(3)), whole)


def test_a_sharded_cache_that_is_not_full_yet() -> None:
    whole = Decoding.random(seqlen_q=5, mask=rf.Causal(), lengths=(77, 0))
    shards = _shards(whole, 3, [[50, 0], [27, 0], [0, 0]])
    for newest in (1, -2):
        assert_decoded(shards.decode(context=rf.ContextParallel.local(3), newest_rank=newest), whole)


@pytest.mark.parametrize("cut", [[[10], [2]], [[12], [0]]])
def test_new_tokens_that_the_newest_rank_has_not(cut: list[list[int]]) -> None:
    whole = Decoding.random(seqlen_q=4, mask=rf.Causal(), lengths=(12,))
    with pytest.raises(ArgumentError, match="cache_seqlens: expected the 4 new tokens among those of newest_rank"):
        _shards(whole, 2, cut).decode(context=rf.ContextParallel.local(2))
    unmasked = replace(whole, mask=None)
    assert_decoded(_shards(unmasked, 2, cut).decode(context=rf.ContextParallel.local(2)), unmasked)


def _without_new_tokens(cases: list[Decoding]) -> list[str]:
    context = rf.ContextParallel(dist.group.WORLD)
    rank, texts = context.rank, list[str]()
    for case in cases:
        k, v = (x.chunk(2, 1)[rank] for x in (case.k, case.v))
        try:
            replace(case, k=k, v=v, lengths=case.lengths[rank]).decode(context=context)
            texts.append("")
        except ArgumentError as error:
            texts.append(str(error))
    return texts


def test_ranks_of_which_the_newest_has_no_token_of_a_sequence() -> None:
    """Checks that all ranks raise, though the newest takes such a sequence for one that nobody has begun."""
    cases = []
    for lengths, cut in (((12,), [[12], [0]]), ((10, 5), [[5, 5], [5, 0]]), ((10, 0), [[5, 0], [5, 0]])):
        cases.append(_shards(Decoding.random(seqlen_q=4, mask=rf.Causal(), lengths=lengths), 2, cut))
    for texts in run_ranks(2, _without_new_tokens, cases):
        assert ["the 4 new tokens among those of newest_rank" in text for text in texts] == [True, True, False]


def _over_ranks(problems: list[Decoding]) -> list[tuple[Tensor, Tensor]]:
    context = rf.ContextParallel(dist.group.WORLD)
    results = []
    for problem in problems:
        capacity = problem.k.shape[1] // context.world_size
        rows = slice(context.rank * capacity, (context.rank + 1) * capacity)
        own = replace(problem, k=problem.k[:, rows], v=problem.v[:, rows], lengths=problem.lengths[context.rank])
        results.append(own.decode(context=context))
    return results


def test_ranks_give_the_bits_of_virtual_ranks() -> None:
    cut = [[40, 80], [37, 20]]
    shards = [
        _shards(Decoding.random(seqlen_q=5, mask=rf.Causal(), dtype=dtype), 2, cut)
        for dtype in (torch.float64, torch.bfloat16)
    ]
    expected = [problem.decode(context=rf.ContextParallel.local(2)) for problem in shards]
    for results in run_ranks(2, _over_ranks, shards):
        for got, want in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _unlike(rank_one: list[tuple[str, Any]]) -> list[str]:
    context = rf.ContextParallel(dist.group.WORLD)
    problem = Decoding.random(seqlen_q=5, mask=rf.Causal())
    failures = []
    for name, value in rank_one:
        given = replace(problem, **{name: value}) if context.rank == 1 else problem
        try:
            given.decode(context=context)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    return failures


def test_ranks_that_differ_all_raise() -> None:
    problem = Decoding.random(seqlen_q=5)
    changes = [
        ("softcap", 2.0),
        ("mask", rf.Tree(FIVE)),
        ("q", problem.q[:, :4]),
        ("sinks", torch.zeros(4)),
        ("lengths", torch.tensor([101, 7])),
        ("mask", rf.SlidingWindow(5)),
    ]
    first, second = run_ranks(2, _unlike, changes)
    for failures in (first, second):
        for failure, (field, _) in zip(failures[:4], changes[:4], strict=True):
            assert failure.startswith(f"{RankMismatch.__name__}: ranks disagree on {field}")
    for mine, theirs, text in (
        (first[4], second[4], "cache_seqlens: expected 0 to 100, got [[101, 7]]"),
        (first[5], second[5], "mask: expected one without a window to the left for a sharded cache"),
    ):
        assert mine.startswith("PeerFailed: ranks [1] raised (seen on rank 0):")
        assert theirs.startswith("ArgumentError: " + text)
        assert text in mine


def test_torch_compile_and_fake_tensors() -> None:
    problem = Decoding.random(seqlen_q=5, headdims=(32, 16), dtype=torch.float32)

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        out = rf.flash_decode(q, k, v, cache_seqlens=lengths, mask=rf.Causal())
        assert isinstance(out, Tensor)
        return out * 2

    given = (problem.q, problem.k, problem.v, problem.lengths)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), step(*given))
    arguments = (*given[:3], problem.lengths[None], None, None, "", "causal", [], 0.2, 0.0, "auto", -1, 0, [])
    clean = [torch.nan_to_num(x) for x in arguments[:3]]  # opcheck compares inputs, and NaN != NaN
    torch.library.opcheck(decode_op.decode, (*clean, *arguments[3:]), test_utils=("test_schema", "test_faketensor"))


def test_under_inference_mode_and_no_grad() -> None:
    problem = Decoding.random()
    expected = problem.decode()[0]
    trained = replace(problem, q=problem.q.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(trained.decode()[0], expected)
    with torch.inference_mode():
        assert torch.equal(problem.decode()[0], expected)


def test_lengths_checked_on_the_device() -> None:
    problem = replace(Decoding.random(), lengths=torch.tensor([101, 7]))
    with pytest.raises(RuntimeError, match="cache_seqlens: expected 0 to the cache's capacity"):
        problem.decode(check_lengths=True)


def _call(**changes: Any) -> None:
    q, cache = torch.zeros(2, 3, 4, 16), torch.zeros(2, 10, 2, 16)
    given: dict[str, Any] = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": 10}
    options = {name: changes.pop(name) for name in list(changes) if name in rf.DecodeOptions.__dataclass_fields__}
    rf.flash_decode(**{**given, "options": rf.DecodeOptions(**options), **changes})


CACHE = torch.zeros(2, 10, 2, 16)


@pytest.mark.parametrize(
    ("numbers", "name"), [((48, 4, 3), "block_n"), ((8, 4, 3), "block_n"), ((64, 3, 3), "num_warps")]
)
def test_bad_tiles(numbers: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: expected a power of two"):
        rf.DecodeTiles(*numbers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": [1.0]}, "q: expected a tensor, got list"),
        ({"q": torch.zeros(3, 4, 16)}, "q: expected 4 dimensions, got shape"),
        ({"k_cache": CACHE.half()}, "k_cache: expected as q: torch.float32 on cpu, got torch.float16"),
        ({"v_cache": CACHE.to("meta")}, "v_cache: expected as q: torch.float32 on cpu, got torch.float32 on meta"),
        (
            {"q": torch.zeros(2, 3, 4, 16, requires_grad=True)},
            "q: expected none that requires a gradient: .*flash_attention",
        ),
        ({"q": torch.zeros(2, 0, 4, 16)}, "seqlen_q: expected 1 to 64, got 0"),
        ({"q": torch.zeros(2, 65, 4, 16)}, "seqlen_q: expected 1 to 64, got 65. Use rf.flash_attention"),
        ({"q": torch.zeros(3, 3, 4, 16)}, r"k_cache, v_cache: expected \(3, capacity, nheads_kv, 16\)"),
        ({"v_cache": CACHE[:, :9]}, "k_cache, v_cache: expected .* one capacity and nheads_kv"),
        ({"v_cache": CACHE[..., :8]}, "headdim_v: expected 16 to 256, got 8"),
        ({"q": torch.zeros(2, 3, 3, 16)}, "nheads: expected a positive multiple of nheads_kv = 2, got 3 and 2"),
        (
            {"k_cache": CACHE.transpose(1, 3).contiguous().transpose(1, 3)},
            "k_cache: expected a last dimension of stride 1",
        ),
        ({"cache_seqlens": 11}, "cache_seqlens: expected 0 to 10, got 11"),
        ({"cache_seqlens": -1}, "cache_seqlens: expected 0 to 10, got -1"),
        ({"cache_seqlens": True}, "cache_seqlens: expected an integer or an int32 or int64 tensor"),
        (
            {"cache_seqlens": torch.zeros(3, dtype=torch.int32)},
            r"cache_seqlens: expected .* \(2,\) on cpu, got .* \(3,\)",
        ),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens: expected .*, got torch.float32"),
        ({"cache_seqlens": torch.tensor([4, 11])}, r"cache_seqlens: expected 0 to 10, got \[\[4, 11\]\]"),
        ({"mask": rf.Documents([0, 10])}, r"mask: expected None, rf.Causal\(\), .*got Documents"),
        ({"mask": rf.Causal() & rf.KeyPadding([4, 4])}, "mask: expected None, .*got KeyPadding.*cache_seqlens says"),
        (
            {"mask": rf.Tree([-1, 0])},
            "mask: expected a Tree of seqlen_q tokens with start 0, got 2 tokens .* 3 queries",
        ),
        ({"mask": rf.Tree([-1, 0, 0], start=7)}, "mask: expected a Tree of seqlen_q tokens .*from position 7"),
        ({"mask": rf.Causal}, "mask: expected None or a mask"),
        ({"softmax_scale": 0.0}, "softmax_scale: expected positive and finite, got 0.0"),
        ({"softcap": -1.0}, "softcap: expected 0 or positive, and finite, got -1.0"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected a floating-point tensor of shape \(4,\) on cpu, got .* \(3,\)"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "sinks: expected none that requires a gradient"),
        ({"sinks": 1.0}, "sinks: expected a floating-point tensor of shape .*, got float"),
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes: expected a .* of shape \(4,\) or \(2, 4\) on cpu"),
        ({"backend": "cuda"}, "backend: expected one of .*got 'cuda'"),
        ({"splits": 0}, "splits: expected None or 1 to 128, got 0"),
        ({"splits": True}, "splits: expected None or 1 to 128, got True"),
        ({"tiles": rf.DecodeTiles(64, 4, 3)}, "tiles: expected None for the eager backend"),
        ({"tiles": (64, 4, 3)}, "tiles: expected None or a rf.DecodeTiles, got"),
        ({"options": rf.AttentionOptions()}, "options: expected a rf.DecodeOptions, got"),
        ({"newest_rank": 1}, "newest_rank: expected -1 to 0, got 1"),
        ({"newest_rank": "0"}, "newest_rank: expected -1 to 0, got '0'"),
        ({"context": "world"}, "context: expected None or a rf.ContextParallel, got 'world'"),
        ({"context": rf.ContextParallel.local(3)}, "k_cache: expected a multiple of 3 rows, got 10"),
        ({"context": rf.ContextParallel.local(2), "cache_seqlens": 6}, "cache_seqlens: expected 0 to 5, got 6"),
        (
            {"context": rf.ContextParallel.local(2), "cache_seqlens": 5, "alibi_slopes": torch.zeros(4)},
            "alibi_slopes: expected None for a sharded cache",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        _call(**changes)


def test_the_keyword_return_lse_goes_before_the_option() -> None:
    q, k, v = (torch.randn(1, length, 2, 16, dtype=torch.float64) for length in (1, 8, 8))
    out, lse = rf.flash_decode(q, k, v, cache_seqlens=8, return_lse=True)
    torch.testing.assert_close((out, lse), reference.attention(q, k, v), rtol=0, atol=1e-13)
    options = rf.DecodeOptions(return_lse=True)
    assert torch.equal(out, rf.flash_decode(q, k, v, cache_seqlens=8, options=options, return_lse=False))
