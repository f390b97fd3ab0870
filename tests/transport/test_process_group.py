"""The ring over gloo processes: the same bits as virtual ranks, and agreement before any data moves."""

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringflash as rf
from ringflash.errors import ArgumentError, RankMismatch
from ringflash.ops.call import AttentionCall
from ringflash.ops.one_device import OneDevice
from ringflash.ops.ring_call import RingCall, call_of
from ringflash.ring.cuda_graphs import GraphCache
from ringflash.transport.base import Message, Span
from ringflash.transport.nccl import in_order
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate
from tests.helpers.distributed import RankFailure, run_ranks, try_ranks
from tests.helpers.faults import Outcome, outcome_of

PROBLEMS = [
    Problem.random(seqlen=seqlen, dtype=dtype, mask=mask, batch=1)
    for seqlen, dtype in ((37, torch.float64), (96, torch.float32), (50, torch.bfloat16))
    for mask in (None, rf.Causal())
]


def _rings(layout: str) -> list[list[Tensor]]:
    context = rf.ContextParallel(dist.group.WORLD, layout)
    results = []
    for problem in PROBLEMS:
        out, *grads = problem.ring(context)
        for grad in grads:  # all ranks have equal leaves q, k and v
            dist.all_reduce(grad)
        results.append([out, *(grad / context.world_size for grad in grads)])  # and equal losses
    return results


@pytest.mark.parametrize(("world", "layout"), [(1, "zigzag"), (2, "zigzag"), (3, "zigzag"), (4, "contiguous")])
def test_accuracy(world: int, layout: str) -> None:
    for results in run_ranks(world, _rings, layout):
        for got, problem in zip(results, PROBLEMS, strict=True):
            if problem.q.dtype != torch.bfloat16:  # the sum over ranks above is in bfloat16; see the test below
                assert_accurate(got, problem)


def _shards(layout: str) -> list[Tensor]:
    """Returns this rank's shards of out, dq, dk and dv."""
    context = rf.ContextParallel(dist.group.WORLD, layout)
    results = []
    for problem in PROBLEMS:
        q, k, v = (context.shard(x).requires_grad_() for x in (problem.q, problem.k, problem.v))
        out = as_tensor(rf.ring_attention(q, k, v, context, mask=problem.mask))
        results += [out.detach(), *torch.autograd.grad(out, (q, k, v), context.shard(problem.dout))]
    return results


@pytest.mark.parametrize(("world", "layout"), [(2, "contiguous"), (3, "zigzag")])
def test_same_bits_as_virtual_ranks(world: int, layout: str) -> None:
    by_rank = run_ranks(world, _shards, layout)
    context = rf.ContextParallel.local(world, layout)
    expected = [x for problem in PROBLEMS for x in problem.ring(context)]
    for parts, whole in zip(zip(*by_rank, strict=True), expected, strict=True):
        assert torch.equal(context.unshard(torch.cat(parts, dim=1)), whole)


def _unshard() -> tuple[Tensor, Tensor]:
    context = rf.ContextParallel(dist.group.WORLD)
    whole = torch.arange(22.0).view(2, 11)
    shard = context.shard(whole).requires_grad_()
    again = context.unshard(shard)
    (again * (context.rank + 1) * whole).sum().backward()
    assert torch.equal(again, whole)
    assert shard.grad is not None
    return context.unshard(shard.grad), whole


def test_unshard_gathers_and_its_gradient_sums_over_ranks() -> None:
    for grad, whole in run_ranks(3, _unshard):
        assert torch.equal(grad, whole * (1 + 2 + 3))


def _second_derivative_of_unshard() -> Outcome:
    context = rf.ContextParallel(dist.group.WORLD)
    shard = context.shard(torch.arange(6.0)[None]).requires_grad_()
    (grad,) = torch.autograd.grad(context.unshard(shard).pow(3).sum(), shard, create_graph=True)
    assert torch.equal(grad, 2 * 3 * shard.detach() ** 2)
    return outcome_of(grad.square().sum().backward)


def test_a_second_derivative_of_unshard_is_refused() -> None:
    for outcome in run_ranks(2, _second_derivative_of_unshard):
        assert outcome.kind == "RuntimeError", outcome
        assert "differentiate twice" in outcome.text


def _backward_of_unshard_on_rank_0() -> Outcome | None:
    context = rf.ContextParallel(dist.group.WORLD, timeout=2.0)
    whole = context.unshard(torch.ones(1, 2, 3, requires_grad=True))
    if context.rank == 1:
        time.sleep(8)
        return None
    return outcome_of(whole.sum().backward)


def test_a_rank_that_does_not_come_to_the_backward_of_unshard_is_named() -> None:
    outcome = run_ranks(2, _backward_of_unshard_on_rank_0)[0]
    assert outcome.kind == "RingTimeout", outcome
    assert outcome.fields["peers"] == [1]
    assert outcome.seconds < 7


def _bad_unshard() -> list[Outcome]:
    context = rf.ContextParallel(dist.group.WORLD, timeout=25.0)
    bad, good = torch.ones(1, 4, 2), context.shard(torch.ones(1, 7, 2))
    refused = outcome_of(context.unshard, bad, dim=7 if context.rank == 1 else 1)
    return [refused, outcome_of(context.unshard, good)]


def test_a_rank_that_unshards_along_no_dimension_is_announced() -> None:
    for rank, (refused, later) in enumerate(run_ranks(2, _bad_unshard)):
        assert refused.kind == ("ArgumentError" if rank == 1 else "PeerFailed"), refused
        assert "dim: expected a dimension of a tensor" in refused.text
        assert refused.seconds < 10
        assert later.kind == "", later


def _mesh() -> tuple[int, int, Tensor]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    with pytest.raises(ArgumentError, match="mesh: expected one dimension, or two named .*got dimensions"):
        rf.ContextParallel(mesh)
    context = rf.ContextParallel(mesh["context"], "contiguous")
    return context.rank, context.world_size, context.positions(5)


def test_a_mesh_dimension() -> None:
    results = run_ranks(2, _mesh)
    assert [(rank, world) for rank, world, _ in results] == [(0, 2), (1, 2)]
    assert [positions.tolist() for *_, positions in results] == [[0, 1, 2], [3, 4]]


def _excluded() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return str(rf.ContextParallel(group).world_size)
    with pytest.raises(ArgumentError, match="mesh_or_group: expected .*got a group without this rank on rank 1"):
        rf.ContextParallel(group)  # type: ignore[arg-type]
    return "excluded"


def test_a_group_that_excludes_this_rank() -> None:
    assert run_ranks(2, _excluded) == ["1", "excluded"]


def test_no_process_group() -> None:
    with pytest.raises(ArgumentError, match=r"ContextParallel.local\(n\)"):
        rf.ContextParallel(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_of_two_neighbours_one_sends_first(rank: int) -> None:
    """Checks that neighbours do not both send first: a backend that runs operations in sequence would deadlock."""
    receives = Message((rank - 1) % 4, Span.of(torch.zeros(1)), 0, sends=False, hop=0)
    sends = Message((rank + 1) % 4, Span.of(torch.zeros(1)), 0, sends=True, hop=0)
    for posted in ([sends, receives], [receives, sends]):
        first, second = in_order(posted, rank)
        assert (first.sends, second.sends) == (rank % 2 == 0, rank % 2 == 1)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("seqlen", {"seqlen": 5}),
    ("seqlen", {"seqlen": 9}),
    ("dtype", {"dtype": torch.bfloat16}),
    ("nheads", {"nheads": 4}),
    ("nheads_kv", {"nheads_kv": 1}),
    ("headdim", {"headdim": 32}),
    ("batch", {"batch": 2}),
    ("mask", {"mask": rf.Causal()}),
    ("mask", {"mask": rf.Documents([0, 9, 18])}),
    ("layout", {"layout": "contiguous"}),
    ("softmax_scale", {"scale": 0.5}),
    ("softcap", {"softcap": 5.0}),
    ("headdim", {"headdim_v": 32}),
    ("dropout", {"dropout": None}),
    ("dropout", {"dropout": rf.Dropout(0.2, seed=7)}),
    ("dropout", {"dropout": rf.Dropout(0.1, seed=8)}),
    ("alibi_slopes", {"alibi_slopes": torch.zeros(2)}),
    ("sinks", {"sinks": torch.zeros(2)}),
]


def _call(change: dict[str, Any]) -> None:
    """Calls ring_attention, with `change` applied to the arguments of rank 1 only."""
    given: dict[str, Any] = {"layout": "zigzag", "seqlen": 6, "nheads": 2, "nheads_kv": 2, "headdim": 16, "batch": 1}
    given |= {"dtype": torch.float32, "mask": None, "scale": None, "device": "cpu", "dropout": rf.Dropout(0.1, seed=7)}
    given |= change if dist.get_rank() == 1 else {}
    chosen = {name: given[name] for name in ("backend", "alibi_slopes", "sinks") if name in given}
    rest = {"softcap": given.get("softcap", 0.0), "dropout": given["dropout"]}
    context = rf.ContextParallel(dist.group.WORLD, given["layout"])
    q, k = (torch.zeros(given["batch"], given["seqlen"], given[n], given["headdim"]) for n in ("nheads", "nheads_kv"))
    q, k = (x.to(given["device"], given["dtype"]) for x in (q, k))
    v = k[..., :1].expand(*k.shape[:3], given.get("headdim_v", given["headdim"]))
    options = rf.AttentionOptions(**chosen)
    rf.ring_attention(q, k, v, context, mask=given["mask"], softmax_scale=given["scale"], options=options, **rest)


def _calls() -> list[str]:
    """Returns the error of each change, then checks that the group still works after the mismatches."""
    raised = []
    for _, change in CHANGES:
        with pytest.raises(RankMismatch) as caught:
            _call(change)
        raised.append(str(caught.value))
    _call({})
    return raised


def test_ranks_that_differ_all_raise() -> None:
    for raised in run_ranks(3, _calls):
        for (field, _), text in zip(CHANGES, raised, strict=True):
            assert f"ranks disagree on {field}: rank 1 against the rest" in text


def _seeds_drawn() -> list[Any]:
    """Returns the result for ranks that draw equal dropout seeds, and the error for different seeds."""
    context = rf.ContextParallel(dist.group.WORLD)
    q = torch.ones(1, 6, 2, 16)
    torch.manual_seed(3)
    out = as_tensor(rf.ring_attention(q, q, q, context, dropout=rf.Dropout(0.5)))
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RankMismatch) as caught:
        rf.ring_attention(q, q, q, context, dropout=rf.Dropout(0.5))
    return [context.unshard(out), str(caught.value)]


def test_seeds_that_ranks_draw() -> None:
    torch.manual_seed(3)
    q = torch.ones(1, 12, 2, 16)
    expected = as_tensor(rf.flash_attention(q, q, q, dropout=rf.Dropout(0.5)))
    for out, text in run_ranks(2, _seeds_drawn):
        torch.testing.assert_close(out, expected)
        assert "ranks disagree on dropout" in text


MISFITS = [
    (rf.Documents([0, 9]), "cu_seqlens: expected lengths that sum to the sequence's 12 keys, got a sum of 9"),
    (rf.KeyPadding([13]), "seqlens_k: expected none above the sequence's 12 keys, got 13"),
    (rf.PrefixLM([13]), "prefix_lens: expected none above the sequence's 12 keys, got 13"),
    (rf.BlockSparse([[True]], 4), r"blocks: expected (3, 3) for 12 tokens in blocks of 4, got (1, 1)"),
    (rf.Tree([-1, 0], start=11), "mask: expected a tree that ends by 12, got one to 13"),
]


def _misfits() -> list[str]:
    raised = []
    context = rf.ContextParallel(dist.group.WORLD)
    q = torch.zeros(1, 6, 2, 16)
    for mask, _ in MISFITS:
        with pytest.raises(ArgumentError) as caught:
            rf.ring_attention(q, q, q, context, mask=mask)
        raised.append(str(caught.value))
    rf.ring_attention(q, q, q, context, mask=rf.Documents([0, 9, 12]))
    return raised


def test_masks_of_another_sequence_raise_on_all_ranks() -> None:
    for raised in run_ranks(2, _misfits):
        for (_, message), text in zip(MISFITS, raised, strict=True):
            assert text.startswith(message)


def _documents_differ() -> str:
    q = torch.zeros(1, 6, 2, 16)
    ends = [0, 9, 18] if dist.get_rank() else [0, 8, 18]
    with pytest.raises(RankMismatch) as caught:
        rf.ring_attention(q, q, q, rf.ContextParallel(dist.group.WORLD), mask=rf.Documents(ends))
    return str(caught.value)


def test_values_of_cu_seqlens_that_differ() -> None:
    for text in run_ranks(3, _documents_differ):
        assert "ranks disagree on mask: rank 0 against the rest" in text
        assert "Documents([0, 8, 18])" in text


def _half_precisions() -> str:
    """Returns the error for ranks with different 16-bit dtypes, which gloo would mix up without an error."""
    q = torch.zeros(1, 6, 2, 16, dtype=torch.bfloat16 if dist.get_rank() else torch.float16)
    with pytest.raises(RankMismatch) as caught:
        rf.ring_attention(q, q, q, rf.ContextParallel(dist.group.WORLD))
    return str(caught.value)


def test_half_precisions_that_differ() -> None:
    for text in run_ranks(2, _half_precisions):
        assert "ranks disagree on dtype" in text


def _mesh_without_a_rank() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        return str(rf.ContextParallel(mesh).world_size)
    with pytest.raises(ArgumentError, match="mesh: expected a mesh that this rank belongs to, got ranks"):
        rf.ContextParallel(mesh)
    return "excluded"


def test_a_mesh_that_excludes_this_rank() -> None:
    assert run_ranks(3, _mesh_without_a_rank) == ["2", "2", "excluded"]


@pytest.mark.parametrize("change", [{"backend": "cuda"}, {"scale": "x"}, {"device": "meta"}])
def test_any_failure_before_the_exchange_is_told(change: dict[str, Any]) -> None:
    kinds = [failure.kind for failure in try_ranks(2, _call, change)]
    assert kinds[0] == "PeerFailed"
    assert kinds[1] in ("ArgumentError", "ValueError")


def test_a_rank_that_raises_first_brings_the_others_down() -> None:
    first, second, third = try_ranks(3, _call, {"headdim": 8})
    assert second.kind == "ArgumentError"
    for failure in (first, third):
        assert isinstance(failure, RankFailure)
        assert failure.kind == "PeerFailed"
        assert "rank 1: ArgumentError: headdim: expected 16 to 256, got 8" in failure.text


def _of_some_and_of_all() -> list[float]:
    some = dist.new_group([0, 1])
    x = torch.arange(6.0)[:, None, None].expand(1, 6, 1, 16).contiguous()
    sums = []
    for group in ([some] if dist.get_rank() < 2 else []) + [dist.group.WORLD]:
        context = rf.ContextParallel(group)
        shard = context.shard(x)
        sums.append(float(context.unshard(as_tensor(rf.ring_attention(shard, shard, shard, context))).sum()))
    return sums


def test_ranks_in_different_numbers_of_groups() -> None:
    first, second, third = run_ranks(3, _of_some_and_of_all)
    assert len(first) == len(second) == 2
    assert first[1] == second[1] == third[0]


def test_a_rank_alone_has_the_bits_of_one_device_and_knows_of_closed_contexts() -> None:
    run_ranks(1, _alone)


def _alone() -> None:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    context = rf.ContextParallel(group)
    q, k, v = (torch.randn(1, 24, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask, dout = rf.Causal() & rf.Documents([0, 9, 24]), torch.randn(1, 24, 4, 16, dtype=torch.float64)
    expected = as_tensor(rf.flash_attention(q, k, v, mask=mask))
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    for _ in range(3):
        out = as_tensor(rf.ring_attention(q, k, v, context, mask=mask))
        assert torch.equal(out, expected)
        assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), dout), wanted))
    with pytest.raises(ArgumentError, match="as many local keys as queries"):
        rf.ring_attention(q[:, 1:], k, v, context, mask=mask)
    with pytest.raises(ArgumentError, match="sum to"):
        rf.ring_attention(q, k, v, context, mask=rf.Documents([0, 9, 25]))
    dist.destroy_process_group(group)
    with pytest.raises(ArgumentError, match="whose process group exists"):
        rf.ring_attention(q, k, v, context, mask=mask)
    context.close()
    with pytest.raises(ArgumentError, match="an open one"):
        rf.ring_attention(q, k, v, context, mask=mask)


def test_a_rank_alone_keeps_the_ring_that_graphs_are_made_of() -> None:
    context = rf.ContextParallel.local(1)
    q = torch.randn(1, 24, 2, 16)
    call = AttentionCall(
        sinks=None,
        alibi_slopes=None,
        dropout_seed=None,
        context=context.name,
        mask="causal",
        mask_tensors=[],
        softmax_scale=0.25,
        softcap=0.0,
        dropout_p=0.0,
        backend="auto",
        deterministic=False,
    )
    assert isinstance(call_of(context, q, q, q, call), OneDevice)
    context.graphs = GraphCache()
    assert isinstance(call_of(context, q, q, q, call), RingCall)


def _other_cuts() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ringflash.ops.attention").addHandler(handler)
    ring = rf.ContextParallel(dist.group.WORLD)
    q = ring.shard(torch.ones(1, 8, 2, 16))
    for layout in ("zigzag", "contiguous"):  # the first one cuts as `ring` does
        context = rf.ContextParallel(dist.group.WORLD, layout)
        for mask in (None, rf.Causal()):
            rf.ring_attention(q, q, q, context, mask=mask)
    return records


def test_shards_that_another_context_has_cut_are_named_once() -> None:
    first, second = run_ranks(2, _other_cuts)
    assert ["2 contiguous" in text and "2 zigzag" in text for text in first] == [True]
    assert not second
