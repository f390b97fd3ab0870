"""Resources of contexts: descriptors, threads and memory do not leak, and a closed context raises."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

import ringflash as rf
from ringflash.errors import ArgumentError
from tests.helpers.accuracy import Problem, as_tensor
from tests.helpers.distributed import run_ranks
from tests.helpers.faults import Outcome, call_ring, outcome_of, planted, raise_out_of_memory
from tests.helpers.patience import PATIENCE

Counts = tuple[int, int, int]  # numbers of descriptors and threads, MiB of resident memory
SLACK = (4, 4, 16)


def _counts() -> Counts:
    for thread in threading.enumerate():
        if thread.name == "ringflash-gloo" and thread is not threading.current_thread():
            thread.join(0.05)  # threads of closed contexts end; those of open contexts stay
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * resource.getpagesize() >> 20
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir())), memory


def _new_group(closes: bool) -> None:
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    context = rf.ContextParallel(group, timeout=20.0)
    context.unshard(context.shard(torch.ones(1, 4, 1)))
    if closes:
        context.close()
    del context
    dist.destroy_process_group(group)


def _timeouts(turn: int) -> None:
    with rf.ContextParallel(dist.group.WORLD, timeout=20.0 + turn / 100) as context:
        call_ring(context)


def _broken_ring() -> None:
    context = rf.ContextParallel(dist.group.WORLD, timeout=20.0)
    with planted(0, raise_out_of_memory):
        assert outcome_of(call_ring, context).kind in ("PeerFailed", "OutOfMemoryError")
    dist.barrier()


def _backwards_after_close() -> list[str]:
    """Returns the errors of backwards whose context was closed, while another context has its name."""
    errors = list[str]()
    for options in (rf.AttentionOptions(), rf.AttentionOptions(sinks=torch.zeros(2))):
        q, k, v = (torch.randn(1, 8, 2, 16).requires_grad_() for _ in range(3))
        with rf.ContextParallel(dist.group.WORLD, timeout=20.0) as context:
            out = as_tensor(rf.ring_attention(q, k, v, context, options=options))
        other = rf.ContextParallel(dist.group.WORLD, timeout=20.0)
        assert other.name == context.name
        with pytest.raises(ArgumentError) as error:
            out.sum().backward()
        errors.append(str(error.value))
    return errors


def test_a_backward_after_close_does_not_run_on_another_context_of_the_name() -> None:
    for errors in run_ranks(2, _backwards_after_close):
        assert len(errors) == 2
        assert all("an open one" in error for error in errors)


def _soak() -> list[tuple[Counts, Counts]]:
    """Returns counts after a few repetitions of each action, and after many."""
    actions: list[tuple[int, Callable[[int], None]]] = [
        (60, lambda _: _new_group(closes=True)),
        (60, lambda _: _new_group(closes=False)),
        (60, _timeouts),
        (20, lambda _: _broken_ring()),
    ]
    results = []
    for times, action in actions:
        for turn in range(3):
            action(turn)
        gc.collect()
        before = _counts()
        for turn in range(3, times):
            action(turn)
        results.append((before, _settled(before)))
    return results


def _is_level(before: Counts, after: Counts) -> bool:
    return all(x <= y + slack for x, y, slack in zip(after, before, SLACK, strict=True))


def _settled(before: Counts) -> Counts:
    """Returns counts after connections have closed; a broken ring's threads close them, and a leak never settles."""
    give_up = time.monotonic() + PATIENCE / 4
    while True:
        gc.collect()
        after = _counts()
        level = _is_level(before, after) or time.monotonic() > give_up
        every = torch.tensor(level)
        dist.all_reduce(every, dist.ReduceOp.MIN)  # ranks wait together, or one would reach its group's timeout
        if every:
            return after
        time.sleep(0.1)


def test_descriptors_threads_and_memory_stay_level_over_200_contexts() -> None:
    for results in run_ranks(2, _soak):
        for before, after in results:
            assert _is_level(before, after), results  # 40 contexts that leak took 150 descriptors or more


def _alive_after_a_failure(hop: int) -> int:
    """Returns the number of contexts of broken rings that are still alive after the program has dropped them.

    The hops of the backward are counted after those of the forward.
    """
    contexts: list[weakref.ref[rf.ContextParallel]] = []
    for _ in range(3):
        context = rf.ContextParallel(dist.group.WORLD, timeout=20.0)
        contexts.append(weakref.ref(context))
        with planted(hop, raise_out_of_memory):
            assert outcome_of(call_ring, context).kind in ("PeerFailed", "OutOfMemoryError")
        del context
    dist.barrier()
    gc.collect()
    return sum(context() is not None for context in contexts)


@pytest.mark.parametrize("hop", [0, 2])
def test_a_broken_ring_ends_when_the_program_drops_it(hop: int) -> None:
    assert run_ranks(2, _alive_after_a_failure, hop) == [0, 0]


def _after_close() -> list[Outcome]:
    context, other = rf.ContextParallel(dist.group.WORLD), rf.ContextParallel(dist.group.WORLD, "striped")
    x = context.shard(torch.ones(1, 4, 2, 16)).requires_grad_()
    out = as_tensor(rf.ring_attention(x, x, x, context))
    context.close()
    context.close()
    outcomes = [
        outcome_of(call_ring, context),
        outcome_of(context.unshard, torch.ones(1, 2)),
        outcome_of(rf.flash_decode, x.detach(), x.detach(), x.detach(), cache_seqlens=2, context=context),
        outcome_of(out.sum().backward),
    ]
    call_ring(other)  # another context stays open
    call_ring(rf.ContextParallel(dist.group.WORLD))
    return outcomes


def test_a_closed_context_raises_and_leaves_others_open() -> None:
    for outcomes in run_ranks(2, _after_close):
        for outcome in outcomes:
            assert outcome.kind == "ArgumentError", outcome
            assert outcome.text.startswith("context: expected an open one, got one after close()")
            assert "Create a new ContextParallel" in outcome.text


def _compiled_after_another_is_closed(context: rf.ContextParallel, other: rf.ContextParallel) -> bool:
    """Returns whether compiled attention gives the same as eager attention, after an equal context was closed."""
    assert context.name == other.name
    other.close()
    x = context.shard(torch.ones(1, 4, 2, 16)).requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return as_tensor(rf.ring_attention(x, x, x, context, mask=rf.Causal()))

    compiled = torch.compile(attend, backend="aot_eager")(x)
    compiled.sum().backward()
    return torch.equal(compiled, attend(x))


def _compiled_on_processes() -> bool:
    contexts = rf.ContextParallel(dist.group.WORLD), rf.ContextParallel(dist.group.WORLD)
    return _compiled_after_another_is_closed(*contexts)


def test_compiled_attention_finds_its_context_after_an_equal_one_is_closed() -> None:
    assert _compiled_after_another_is_closed(rf.ContextParallel.local(2), rf.ContextParallel.local(2))
    assert run_ranks(2, _compiled_on_processes) == [True, True]


def _dropped_before_the_backward() -> bool:
    problem = Problem.random(seqlen=8, batch=1)
    x = rf.ContextParallel(dist.group.WORLD).shard(problem.k).requires_grad_()
    out = as_tensor(rf.ring_attention(x, x, x, rf.ContextParallel(dist.group.WORLD, "contiguous", timeout=9.0)))
    rf.ContextParallel(dist.group.WORLD, timeout=8.0)  # closes unused contexts
    out.sum().backward()
    return bool(x.grad is not None and x.grad.isfinite().all())


def test_the_graph_keeps_a_context_that_the_program_drops() -> None:
    assert run_ranks(2, _dropped_before_the_backward) == [True, True]


def _kept_by_one_rank() -> None:
    kept = [rf.ContextParallel(dist.group.WORLD, timeout=9.0)]
    if dist.get_rank() == 0:
        kept.clear()
    rf.ContextParallel(dist.group.WORLD, timeout=8.0)  # rank 0 closes the first one here
    call_ring(rf.ContextParallel(dist.group.WORLD, timeout=9.0))


def test_ranks_that_keep_different_contexts_make_a_new_one_together() -> None:
    run_ranks(2, _kept_by_one_rank)


def test_virtual_ranks_can_be_closed() -> None:
    with rf.ContextParallel.local(2) as context:
        call = Problem.random(seqlen=8).ring
        call(context)
    outcome = outcome_of(call, context)
    assert outcome.kind == "ArgumentError"


def _copies() -> tuple[bool, bool, Outcome]:
    context = rf.ContextParallel(dist.group.WORLD)
    module: Any = torch.nn.Linear(2, 2)
    module.context = context
    averaged: Any = AveragedModel(module)  # copies the module
    call_ring(averaged.module.context)
    return averaged.module.context is context, copy.copy(context) is context, outcome_of(pickle.dumps, module)


def test_a_module_with_a_context_is_copied_but_not_pickled() -> None:
    for deep, shallow, pickled in run_ranks(2, _copies):
        assert deep
        assert shallow
        assert pickled.kind == "ArgumentError"
        assert "context: expected one that stays in its process" in pickled.text
        assert "state_dict" in pickled.text


def test_a_context_of_another_process_is_named() -> None:
    context = pickle.dumps(rf.ContextParallel.local(2))
    code = f"""
import pickle, torch, ringflash as rf
q = torch.zeros(1, 4, 1, 16)
try:
    rf.ring_attention(q, q, q, pickle.loads({context!r}))
except rf.errors.ArgumentError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.startswith(
        "context: expected one that lives here, got local rank 0 of 2 zigzag, which is gone or"
    )
    assert "a copy from another process does not work" in done.stdout
